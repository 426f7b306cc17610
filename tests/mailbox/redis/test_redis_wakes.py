"""A process that is called for messages takes them, or passes the call on at once: nothing here looks by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial

import anyio
import pytest
from anyio.lowlevel import checkpoint

from mainspring.mailbox.message import Counts
from redis_support import place, soon, unpushed

pytestmark = pytest.mark.anyio

SMALL = "x"
"""Claimed for who waits, and sent to it."""
LARGE = unpushed()
"""Too large for that: who waits is called, and claims it."""


@pytest.fixture
def here(redis_url):
    with place(redis_url, fallback_interval=3_600) as made:
        yield made


async def listed(here, count: int) -> None:
    """Wait until so many processes are on the list of those that wait."""
    while here.call("ZCARD", here.key("waiters")) != count:
        await anyio.sleep(0.002)


PROGRAM = """
import anyio, sys
from mainspring.mailbox.redis.mailbox import RedisMailbox

async def main():
    async with RedisMailbox(sys.argv[1], name=sys.argv[2], fallback_interval=3_600) as mailbox:
        async def receive():
            for message in await mailbox.receive(max_messages=int(sys.argv[4]), wait_time_seconds=60):
                print(message.body[0], flush=True)
                await message.acknowledge()

        async with anyio.create_task_group() as group:
            for _ in range(int(sys.argv[3])):
                group.start_soon(receive)
            await anyio.sleep(0.1)
            print("waiting", flush=True)

anyio.run(main)
"""


class Process:
    """Another process, in which so many receives wait, each for at most ``most`` messages."""

    def __init__(self, here, receives: int, most: int = 1) -> None:
        command = [sys.executable, "-c", PROGRAM, here.url, here.prefix + "jobs", str(receives), str(most)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)

    async def said(self) -> str:
        assert self._process.stdout is not None
        return (await anyio.to_thread.run_sync(self._process.stdout.readline, abandon_on_cancel=True)).decode().strip()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def __aenter__(self) -> Process:
        assert await self.said() == "waiting"
        return self

    async def __aexit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.loops("asyncio")
@pytest.mark.slow
async def test_a_claim_that_takes_all_it_wanted_and_leaves_more_calls_its_neighbour(here, anyio_backend):
    """The process is called for the first message, and off the list as the second one comes, which calls nobody."""
    with anyio.fail_after(15):
        async with here.mailbox() as sender, Process(here, receives=2) as process:
            process.send_signal(signal.SIGSTOP)
            await sender.send(LARGE)
            await sender.send(unpushed("y"))
            process.send_signal(signal.SIGCONT)
            assert sorted([await process.said(), await process.said()]) == ["x", "y"]


@pytest.mark.loops("asyncio")
@pytest.mark.slow
async def test_what_a_process_was_called_for_and_did_not_take_is_anothers(here, anyio_backend):
    """It was to come for all, has a limit, and asks for no more; the other process was not on the list as they came."""
    got: list[object] = []
    with anyio.fail_after(15):
        async with here.mailbox() as other, here.mailbox() as sender, Process(here, receives=1, most=2) as process:
            process.send_signal(signal.SIGSTOP)
            await sender.send_many(["a", "b", "c", "d"])
            process.send_signal(signal.SIGCONT)
            assert sorted([await process.said(), await process.said()]) == ["a", "b"]
            for _ in range(2):
                got += [message.body for message in await other.receive(wait_time_seconds=600)]
    assert got == ["c", "d"]


@pytest.mark.parametrize("bodies", [[SMALL, SMALL], [LARGE, LARGE, LARGE]], ids=["small", "large"])
async def test_as_many_are_woken_as_messages_come_whatever_each_takes(here, anyio_backend, bodies):
    """All wait with a limit of one; one send brings a message for each."""
    got: list[object] = []

    async def receive(mailbox) -> None:
        got.extend(await mailbox.receive(wait_time_seconds=600))

    with anyio.fail_after(5):
        async with here.mailbox() as one, here.mailbox() as two, here.mailbox() as sender:
            async with anyio.create_task_group() as group:
                for mailbox in (one, one, two)[: len(bodies)]:
                    group.start_soon(receive, mailbox)
                await listed(here, 1 if len(bodies) == 2 else 2)
                await anyio.sleep(0.02)
                await sender.send_many(bodies)
            assert await sender.counts() == Counts(in_flight=len(bodies))


LEAVES = ["cancelled", "at its end", "closed"]


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("leaves", LEAVES)
async def test_a_process_that_was_called_and_leaves_passes_the_call_on(here, anyio_backend, body, leaves):
    """At any point between the call and the message: the other one has it at once, as if nothing had happened."""
    async with here.mailbox() as other, here.mailbox() as sender:
        for steps in (0, 1, 2, 3, 4, 6, 8, 12, 20):
            await leave_after(here, other, sender, body, leaves, steps)


async def leave_after(here, other, sender, body, leaves, steps) -> None:
    first: list[object] = []
    second: list[object] = []

    async def receive(mailbox, got, wait, scope) -> None:
        with scope:
            got += await mailbox.receive(wait_time_seconds=wait)

    scope = anyio.CancelScope()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            leaving = await here.mailbox().__aenter__()
            wait = 0.03 if leaves == "at its end" else 600
            began = anyio.current_time()
            group.start_soon(receive, leaving, first, wait, scope)
            if leaves != "at its end":
                await listed(here, 1)
            group.start_soon(receive, other, second, 600, anyio.CancelScope())
            await (anyio.sleep_until(began + 0.028) if leaves == "at its end" else listed(here, 2))
            await sender.send(body)
            for _ in range(steps):
                await checkpoint()
            if leaves == "cancelled":
                scope.cancel()
            elif leaves == "closed":
                await leaving.__aexit__(None, None, None)
            while not (first or second):
                await anyio.sleep(0.001)
            if first:  # it was quicker
                await sender.send(body)
            while not second:
                await anyio.sleep(0.001)
            if leaves != "closed":
                await leaving.__aexit__(None, None, None)
    for message in (*first, *second):
        assert (message.delivery_count, message.attempt) == (1, 1)
    await sender.purge()


@pytest.mark.slow
@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
async def test_a_receive_that_was_called_and_leaves_passes_the_call_to_its_neighbour(here, anyio_backend, body):
    """Both are of one process, which is called once."""
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        for steps in range(16):
            got: list[object] = []
            scope = anyio.CancelScope()

            async def receive(scope, got=got) -> None:
                with scope:
                    got += await mailbox.receive(wait_time_seconds=600)

            with anyio.fail_after(5):
                async with anyio.create_task_group() as group:
                    group.start_soon(receive, scope)
                    await listed(here, 1)
                    group.start_soon(receive, anyio.CancelScope())
                    await anyio.sleep(0.01)
                    group.start_soon(sender.send, body)
                    while here.call("ZCARD", here.key("waiters")):
                        await checkpoint()
                    for _ in range(steps):
                        await checkpoint()
                    scope.cancel()
                    await anyio.sleep(0.01)
                    if scope.cancelled_caught or not got:
                        while not got:
                            await anyio.sleep(0.001)
                    else:
                        await sender.send(body)
                        while len(got) < 2:
                            await anyio.sleep(0.001)
                    group.cancel_scope.cancel()
            await sender.purge()


async def test_a_receive_that_was_called_while_it_claimed_passes_the_call_on(here, line, waiting):
    """Its claim brings what was there before. What it was called for is another process's, which was not called."""
    async with line.mailbox() as claiming:
        (name,) = here.channels()
        async with here.mailbox() as other, here.mailbox() as sender:
            await sender.send("first")
            line.answers.hold()
            waiting.begin(claiming)
            await line.answers.arrived()
            await waiting.start(other)
            here.call("ZADD", here.key("waiters"), 0, f"{name}.30000000")  # as where an earlier receive has just ended
            heard = line.news.passed
            await sender.send(LARGE)
            await soon(lambda: line.news.passed > heard)
            await anyio.sleep(0.02)  # by then it has come
            line.answers.let_go()
            await waiting.until(2)
    assert {mailbox: found[0].body for mailbox, found in waiting.got} == {claiming: "first", other: LARGE}


async def test_a_claim_that_leaves_what_came_with_it_calls_another_process(here, anyio_backend):
    """They are of one call of one process: what it sent, and a receive that takes one of it."""
    got: list[object] = []

    async def receive(mailbox, most, wait) -> None:
        got.extend(await mailbox.receive(max_messages=most, wait_time_seconds=wait))

    with anyio.fail_after(5):
        async with here.mailbox() as waiting, here.mailbox() as busy, anyio.create_task_group() as group:
            group.start_soon(receive, waiting, 9, 600)
            await listed(here, 1)
            group.start_soon(busy.counts)
            group.start_soon(busy.send_many, ["x", "y", "z"])
            group.start_soon(receive, busy, 1, 0)
    assert sorted(message.body for message in got) == ["x", "y", "z"]


async def test_what_is_given_back_wakes_a_process_at_once(here, anyio_backend):
    """By a nack, a release, the end of a delay, of a lease; by a replay, and a cancelled claim."""
    with anyio.fail_after(10):
        async with here.mailbox() as waiting, here.mailbox() as worker:

            async def comes_back(give_back) -> None:
                got: list[object] = []

                async def receive() -> None:
                    got.extend(await waiting.receive(wait_time_seconds=600))

                async with anyio.create_task_group() as group:
                    group.start_soon(receive)
                    await listed(here, 1)
                    await give_back()
                await got[0].acknowledge()

            for how in ("nack", "release"):
                await worker.send(how)
                (held,) = await worker.receive()
                await comes_back(getattr(held, how))
            await worker.send("delayed")
            (held,) = await worker.receive()
            await comes_back(partial(held.nack, delay=0.05))
            await worker.send("expired")
            (held,) = await worker.receive(visibility_timeout=0.1)
            await comes_back(checkpoint)
            await worker.send("dead")
            (held,) = await worker.receive()
            await held.dead_letter("no")
            await comes_back(worker.replay_dead_letters)
