"""The line of receives that wait: nobody in it is forgotten, whoever leaves it."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest

from mainspring import MailboxConnectionError
from mainspring.mailbox.batched import Waiters
from mainspring.mailbox.redis.listener import RedisWaiters
from mainspring.runtime.interval import Alarms
from mainspring.testing import run_virtual
from stores import KINDS, on


class Queue:
    """What the receives look for."""

    def __init__(self):
        self.alarms = Alarms()
        self.waiters = Waiters(self.alarms)
        self.messages = []
        self.got = {}

    def send(self, *messages):
        self.messages += messages
        self.waiters.signal(len(messages))

    async def receive(self, name, *, wait=60.0, look_takes=0.0):
        async def look():
            await anyio.sleep(look_takes)
            return [self.messages.pop(0)] if self.messages else []

        until = anyio.current_time() + wait
        found = await self.waiters.claim_or_wait(look, 30, until)
        self.got[name] = (*found, anyio.current_time())


@asynccontextmanager
async def ringing(alarms):
    """The timer that ends waits."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(alarms.run)
        yield
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def parked(queue, *names, **options):
    """Receives of those names, in that order; the scopes in which they wait."""
    scopes = {name: anyio.CancelScope() for name in names}

    async def receive(name):
        with scopes[name]:
            await queue.receive(name, **options)

    async with ringing(queue.alarms), anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(receive, name)
            await anyio.wait_all_tasks_blocked()
            await anyio.sleep(2 * options.get("look_takes", 0.0))
        yield scopes


def test_the_one_that_has_waited_longest_is_woken() -> None:
    async def scenario():
        queue = Queue()
        async with parked(queue, "one", "two"):
            assert queue.waiters.parked == 2
            queue.send("a")
            await anyio.sleep(1)
            assert queue.got == {"one": ("a", 0)}
            queue.send("b")
        assert queue.got["two"] == ("b", 1)
        assert queue.waiters.parked == 0

    run_virtual(scenario)


def test_what_comes_while_one_looks_is_looked_for_again() -> None:
    async def scenario():
        queue = Queue()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: queue.receive("one", look_takes=2))
            await anyio.sleep(1)
            queue.waiters.signals += 1  # as of another thread: nobody waits yet whom it could wake
            await anyio.sleep(1.5)
            queue.messages.append("a")
        assert queue.got == {"one": ("a", 4)}

    run_virtual(scenario)


def test_what_is_signalled_before_one_is_parked_lets_it_not_park() -> None:
    async def scenario():
        waiters = Waiters(Alarms())
        seen = waiters.signals
        waiters.signals += 1
        with anyio.fail_after(1):
            await waiters.wait(seen, 30, anyio.current_time() + 60)
        assert waiters.parked == 0
        assert anyio.current_time() == 0

    run_virtual(scenario)


@pytest.mark.parametrize("look_takes", [0.0, 1.0])
def test_one_that_is_cancelled_once_woken_passes_its_turn_on(look_takes: float) -> None:
    async def scenario():
        queue = Queue()
        async with parked(queue, "one", "two", look_takes=look_takes) as scopes:
            before = anyio.current_time()
            queue.send("a")
            if look_takes:
                await anyio.sleep(look_takes / 2)  # it looks
            scopes["one"].cancel()
        assert queue.got == {"two": ("a", before + look_takes * 1.5)}

    run_virtual(scenario)


def test_one_that_is_cancelled_unwoken_leaves_the_line() -> None:
    async def scenario():
        queue = Queue()
        async with parked(queue, "one", "two") as scopes:
            scopes["one"].cancel()
            await anyio.wait_all_tasks_blocked()
            assert queue.waiters.parked == 1
            queue.send("a")
        assert queue.got == {"two": ("a", 0)}

    run_virtual(scenario)


def test_a_wait_ends_at_its_deadline_and_at_a_close() -> None:
    async def scenario():
        queue = Queue()
        async with parked(queue, "one", wait=5):
            pass
        async with parked(queue, "two", wait=5):
            await anyio.sleep(1)
            queue.waiters.close()
        assert queue.got == {"one": (5,), "two": (6,)}

    run_virtual(scenario)


def test_one_to_whom_a_turn_is_passed_for_nothing_waits_on() -> None:
    """It parked after the call that the turn came from: it looks, finds nothing, and its wait is not over."""

    async def scenario():
        queue = Queue()
        async with parked(queue, "one"):
            await anyio.sleep(1)
            queue.waiters.pass_turn_on()
            await anyio.sleep(1)
            assert queue.waiters.parked == 1
            queue.send("a")
        assert queue.got == {"one": ("a", 2.0)}

    run_virtual(scenario)


LOST = MailboxConnectionError("the server does not answer")


def test_those_that_are_parked_are_failed_and_no_others() -> None:
    """One that was woken looks, one that comes later parks: neither has the error."""

    async def scenario():
        queue = Queue()
        failed = []

        async def receive(name):
            try:
                await queue.receive(name)
            except MailboxConnectionError as error:
                failed.append((name, error))

        async with anyio.create_task_group() as tasks:
            for name in ("woken", "parked", "parked too"):
                tasks.start_soon(receive, name)
                await anyio.wait_all_tasks_blocked()
            queue.send("a")
            queue.waiters.fail_all(LOST)
            await anyio.wait_all_tasks_blocked()
            assert queue.got == {"woken": ("a", 0)}
            assert [name for name, _ in failed] == ["parked", "parked too"]
            assert failed[0][1] is not failed[1][1]
            assert queue.waiters.parked == 0
            tasks.start_soon(receive, "later")
            await anyio.wait_all_tasks_blocked()
            queue.send("b")
        assert queue.got["later"] == ("b", 0)

    run_virtual(scenario)


def test_one_that_is_cancelled_as_it_fails_has_no_turn_to_pass_on() -> None:
    async def scenario():
        queue = Queue()
        async with parked(queue, "one") as scopes:
            scopes["one"].cancel()
            queue.waiters.fail_all(LOST)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(queue.receive, "two")
                await anyio.wait_all_tasks_blocked()
                assert queue.waiters.parked == 1
                tasks.cancel_scope.cancel()
        assert queue.got == {}

    run_virtual(scenario)


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("given_first", [True, False])
def test_redis_keeps_what_was_given_to_a_receive_as_the_server_falls_silent(given_first: bool, cancelled: bool) -> None:
    """It was claimed for it: the receive has it, or, cancelled, hands it back; one that failed before is given nothing."""

    async def scenario():
        passed, refused, got = [], [], []
        waiters = RedisWaiters(passed.append, refused.append, Alarms())
        waiters.active = 1
        scope = anyio.CancelScope()

        async def receive():
            with scope:
                try:
                    got.append((await waiters.wait(0, 30, anyio.current_time() + 60)).delivery)
                except MailboxConnectionError as error:
                    got.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await anyio.wait_all_tasks_blocked()
            if cancelled:
                scope.cancel()
            if given_first:
                assert waiters.give("a", 30)
                waiters.fail_all(LOST)
            else:
                waiters.fail_all(LOST)
                assert not waiters.give("a", 30)  # the caller hands it back
        if given_first:
            assert (got, refused) == (([], ["a"]) if cancelled else (["a"], []))
        else:
            assert [str(error) for error in got] == ([] if cancelled else [str(LOST)])
        assert passed == []

    run_virtual(scenario)


@pytest.mark.anyio
@on(*KINDS)
async def test_waits_have_an_end_where_all_around_is_cancelled(store):
    """Who cleans up under a shield can wait for messages still."""
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group, store.box() as mailbox:
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                assert await mailbox.receive(wait_time_seconds=0.1) == []
