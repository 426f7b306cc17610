"""Context variables: each handler run has a context of its own, a copy of the one that its loop was started in."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import anyio
import pytest
from anyio import from_thread, to_thread
from loop_support import EXACT

from mainspring import Context, Deadline, DLQConsumer, InMemoryMailbox, MainLoop, Retry
from support import background, settled

pytestmark = pytest.mark.anyio

TENANT: ContextVar[str] = ContextVar("tenant", default="none")

ENDINGS = ["returns", "waits", "fails", "fails late", "asks for more time", "times out", "swallows its timeout"]


async def end(how: str) -> None:
    if how in ("waits", "fails late"):
        await anyio.sleep(1)
    if how.startswith("fails"):
        raise ValueError(how)
    if how == "asks for more time":
        raise Retry(delay=1)
    if how == "times out":
        await anyio.sleep_forever()
    if how == "swallows its timeout":
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            TENANT.set("after the cancellation")


async def seen_by_the_next(loop: MainLoop, bodies: list[Any]) -> None:
    token = TENANT.set("of the loop")
    async with background(loop):
        TENANT.reset(token)  # what the loop was started in counts
        for body in bodies:
            await loop.mailbox.send(body)
        await settled(loop.mailbox, within=100)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrapped", [False, True])
async def test_what_a_handler_sets_is_gone_with_it(virtual_clock, wrapped):
    seen = []

    async def handle(how: str) -> None:
        seen.append(TENANT.get())
        TENANT.set(how)
        await end(how)

    loop = MainLoop(InMemoryMailbox(), handle, handler_timeout=5, retry=EXACT)
    if wrapped:

        @loop.wrap
        async def in_a_tenant(message, call):
            seen.append(TENANT.get())
            TENANT.set("of the loop")  # what the handler is to find
            return await call()

    with anyio.move_on_after(60):
        await seen_by_the_next(loop, ENDINGS)
    assert len(seen) > len(ENDINGS)  # all were tried, and some again
    assert set(seen) == {"of the loop"}


async def test_what_a_plain_handler_sets_is_gone_with_it():
    seen = []

    def handle(how: str) -> None:
        seen.append(TENANT.get())
        TENANT.set(how)
        if how == "fails" and len(seen) < 3:
            raise Retry(delay=0)

    await seen_by_the_next(MainLoop(InMemoryMailbox(), handle), ["fails", "returns", "returns"])
    assert seen == ["of the loop"] * 4


async def test_what_a_plain_function_leaves_to_the_event_loop_has_the_context_too():
    seen = []

    async def rest(how: str) -> None:
        seen.append(TENANT.get())
        TENANT.set(how)

    await seen_by_the_next(MainLoop(InMemoryMailbox(), lambda how: rest(how), body=str), ["a", "b"])
    assert seen == ["of the loop"] * 2


async def test_a_run_keeps_its_own_variables_over_all_that_it_waits_for_while_others_run():
    seen = []

    async def child(name: str) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append((name, "child", TENANT.get()))
        TENANT.set("of the child")

    async def handle(name: str) -> None:
        TENANT.set(name)
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child, name)
        seen.append((name, "thread", await to_thread.run_sync(TENANT.get)))
        with anyio.move_on_after(0.001):
            await anyio.sleep_forever()
        seen.append((name, "handler", TENANT.get()))

    names = [f"job {number}" for number in range(6)]
    await seen_by_the_next(MainLoop(InMemoryMailbox(), handle, concurrency=3), names)
    assert sorted(seen) == sorted((name, where, name) for name in names for where in ("child", "thread", "handler"))


@pytest.mark.parametrize("plain", [False, True])
async def test_what_a_thread_has_the_event_loop_run_sees_the_variables_of_the_thread(plain):
    seen = []

    async def later() -> None:
        seen.append(TENANT.get())
        await anyio.lowlevel.checkpoint()
        seen.append(TENANT.get())

    def in_thread() -> None:
        TENANT.set("of the thread")
        from_thread.run(later)
        from_thread.run_sync(lambda: seen.append(TENANT.get()))

    async def handle(job: int) -> None:
        TENANT.set("of the handler")
        await to_thread.run_sync(in_thread)
        seen.append(TENANT.get())

    def handle_plainly(job: int) -> None:
        in_thread()

    await seen_by_the_next(MainLoop(InMemoryMailbox(), handle_plainly if plain else handle, body=int), [1])
    assert seen == ["of the thread"] * 3 + ([] if plain else ["of the handler"])


async def test_a_slot_that_one_handler_has_started_does_not_inherit_from_it():
    """A busy slot wakes others, which are tasks that begin just then."""
    seen = []

    async def handle(job: int) -> None:
        seen.append(TENANT.get())
        TENANT.set("of another")
        await anyio.lowlevel.checkpoint()

    await seen_by_the_next(MainLoop(InMemoryMailbox(), handle, concurrency=5), list(range(20)))
    assert set(seen) == {"of the loop"}


async def test_the_deadline_of_a_message_ends_with_its_run():
    seen = []

    async def handle(job: int) -> None:
        seen.append(Deadline.current())

    mailbox = InMemoryMailbox()
    async with background(MainLoop(mailbox, handle)):
        deadline = Deadline.after(60)
        await mailbox.send(1, deadline=deadline)
        await mailbox.send(2)
        await settled(mailbox)
    assert seen == [deadline, None]


async def test_a_handler_of_dead_letters_has_its_own_too():
    seen = []

    async def handle(letter) -> None:
        seen.append(TENANT.get())
        TENANT.set("of another")

    mailbox = InMemoryMailbox(body=int)
    async with mailbox:
        for number in range(3):
            await mailbox.send(number)
            (message,) = await mailbox.receive()
            await message.dead_letter("broken")
        token = TENANT.set("of the loop")
        async with DLQConsumer(mailbox, handle):
            TENANT.reset(token)
            with anyio.fail_after(10):
                while await mailbox.dead_letters():
                    await anyio.sleep(0.01)
    assert seen == ["of the loop"] * 3


async def test_the_line_of_a_handler_is_known_as_it_waits(virtual_clock):
    async def handle(job: int, ctx: Context) -> None:
        await anyio.sleep(0)
        await anyio.sleep_forever()  # here

    loop = MainLoop(InMemoryMailbox(), handle)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await loop.mailbox.send(1)
        await anyio.sleep(1)
        assert [run.where().endswith("await anyio.sleep_forever()  # here") for run in loop.runs] == [True]
        tasks.cancel_scope.cancel()
