"""What a handler held is free as soon as its message has ended, however it ended, without a garbage collection."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import anyio
import pytest
from anyio import from_thread

from mainspring import (
    DeadLetterPolicy,
    DLQConsumer,
    InMemoryMailbox,
    LoopGroup,
    MailboxConnectionError,
    MainLoop,
    OffloadPool,
    ReceiptHandleExpiredError,
    Reject,
    RequestFailedError,
    Retry,
    RetryPolicy,
    ShutdownCoordinator,
    Ticket,
)
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from support import FaultyMailbox, background, fail, hang, settled

pytestmark = pytest.mark.anyio


class Big:
    """Something large that a handler makes."""

    made: ClassVar[list[weakref.ref[Big]]] = []

    def __init__(self) -> None:
        self.made.append(weakref.ref(self))

    @classmethod
    def alive(cls) -> int:
        return sum(one() is not None for one in cls.made)


@pytest.fixture(autouse=True)
def uncollected():
    Big.made.clear()
    gc.disable()
    logging.disable()  # pytest keeps the records, with their errors
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()


async def none_alive(made: int = 1) -> None:
    """All that were made become free by themselves. What is kept by mistake stays, however long the wait."""
    assert len(Big.made) >= made
    with anyio.move_on_after(5):
        while Big.alive():
            await anyio.sleep(0.005)
    if Big.alive():
        kept = [one() for one in Big.made if one() is not None]
        raise AssertionError(f"{len(kept)} of {len(Big.made)} are alive, held by\n{chain(kept[0])}")


def chain(thing: Any) -> str:
    """What holds it, a few steps up."""
    steps, seen = [], {id(thing)}
    for _ in range(12):
        holders = [one for one in gc.get_referrers(thing) if id(one) not in seen and not isinstance(one, list)]
        if not holders:
            break
        thing = holders[0]
        seen.add(id(thing))
        steps.append(f"{type(thing).__name__}: {str(thing)[:110]}")
    return "\n".join(steps)


def failing(how: str):
    async def handle(job: int) -> None:
        big = Big()  # noqa: F841 - held by the frame
        if "late" in how:
            await anyio.sleep(0.001)
        if "fails" in how:
            raise ValueError(how)
        if "group" in how:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fails_inside)
        if "again" in how:
            raise Retry(delay=0)
        if "rejects" in how:
            raise Reject("no")
        if "exits" in how:
            raise SystemExit(1)
        if "sleeps" in how:
            await anyio.sleep_forever()
        if "translates" in how:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class() as error:
                raise ValueError("instead") from error

    return handle


async def fails_inside() -> None:
    await anyio.lowlevel.checkpoint()
    raise ValueError("inside")


ENDINGS = [
    "returns", "late", "fails", "late fails", "group", "again", "late again", "rejects", "late rejects", "exits", "late exits",
    "sleeps", "translates",
]  # fmt: skip


def loop_of(handler, how: str = "", mailbox: Any = None, **options: Any) -> MainLoop:
    return MainLoop(
        mailbox or InMemoryMailbox(body=int),
        handler,
        handler_timeout=0.01
        if how in ("sleeps", "translates", "looks whether it is cancelled", "ignores it")
        else None,
        retry=RetryPolicy(initial_delay=0, jitter="none"),
        dead_letter=DeadLetterPolicy(max_attempts=2),
        **options,
    )


async def handled(loop: MainLoop) -> None:
    """One message is handled to its end, and nothing of it is alive while the loop waits for the next."""
    async with loop:
        await loop.mailbox.send(1)
        await settled(loop.mailbox)  # type: ignore[arg-type]
        await none_alive()


@pytest.mark.parametrize("how", ENDINGS)
async def test_an_async_handler(how):
    await handled(loop_of(failing(how), how))


@pytest.mark.parametrize("how", ["late", "late fails", "fails", "sleeps", "exits"])
async def test_a_wrapper(how):
    loop = loop_of(failing(how), how)

    @loop.wrap
    async def around(message, call):
        big = Big()  # noqa: F841
        return await call()

    await handled(loop)


@pytest.mark.parametrize(
    "how", ["returns", "fails", "again", "exits", "looks whether it is cancelled", "ignores it", "leaves the rest"]
)
async def test_a_plain_handler(how):
    def handle(job: int) -> object:
        big = Big()
        if how == "fails":
            raise ValueError(how)
        if how == "again":
            raise Retry(delay=0)
        if how == "exits":
            raise SystemExit(1)
        while how == "looks whether it is cancelled":
            from_thread.check_cancelled()
            time.sleep(0.002)
        if how == "ignores it":
            time.sleep(0.03)
        return rest(big) if how == "leaves the rest" else None

    async def rest(big: Big) -> None:
        raise ValueError("in the rest")

    await handled(loop_of(handle, how))


@dataclass
class Body:
    """A body that is counted where it is made: by the sender, whose own is let go, and for the handler."""

    number: int

    def __post_init__(self) -> None:
        Big.made.append(weakref.ref(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return self.number


def raises_in_a_process(body: Body) -> None:
    raise ValueError("in the process")


def runs_long_in_a_process(body: Body) -> None:
    time.sleep(60)


@pytest.mark.parametrize("handler", [raises_in_a_process, runs_long_in_a_process])
async def test_a_handler_in_a_process(handler):
    pool = OffloadPool("process", workers=1)
    mailbox = InMemoryMailbox(body=Body)
    loop = MainLoop(
        mailbox,
        handler,
        offload=pool,
        handler_timeout=0.05,
        retry=RetryPolicy(initial_delay=0),
        dead_letter=DeadLetterPolicy(max_attempts=1),
    )
    async with loop:
        await mailbox.send(Body(1))
        await settled(mailbox)
        await none_alive(2)


async def sleeps(job: int) -> None:
    big = Big()  # noqa: F841
    await anyio.sleep_forever()


async def sleeps_and_translates(job: int) -> None:
    big = Big()  # noqa: F841
    try:
        await anyio.sleep_forever()
    except anyio.get_cancelled_exc_class() as error:
        raise ValueError("instead") from error


CANCELLED = [sleeps, sleeps_and_translates]


@pytest.mark.parametrize("handler", CANCELLED)
async def test_one_that_a_shutdown_cancels(handler):
    loop = loop_of(handler)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await loop.mailbox.send(1)
        while not Big.made:
            await anyio.sleep(0.001)
        await loop.shutdown(timeout=0)
    await none_alive()


@pytest.mark.parametrize("handler", CANCELLED)
async def test_one_whose_loop_is_cancelled(handler):
    loop = loop_of(handler)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await loop.mailbox.send(1)
        while not Big.made:
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    await none_alive()


@pytest.mark.parametrize("handler", CANCELLED)
async def test_one_that_stalls(virtual_clock, handler):
    loop = loop_of(handler)
    async with LoopGroup([loop], watchdog_threshold=10, watchdog_interval=1):
        await loop.mailbox.send(1)
        await settled(loop.mailbox, within=100)
        await none_alive(2)


@pytest.mark.parametrize("handler", CANCELLED)
@pytest.mark.parametrize("error", [ReceiptHandleExpiredError("gone"), MailboxConnectionError("away"), OSError("away")])
async def test_one_that_loses_its_lease(virtual_clock, handler, error):
    mailbox = FaultyMailbox(body=int)
    mailbox.always("extend", fail(error))
    loop = MainLoop(mailbox, handler, visibility_timeout=3)
    async with background(loop):
        await mailbox.send(1)
        while not loop.outcomes["lost"]:
            await anyio.sleep(0.1)
        mailbox.always("claim", hang)  # it is not to begin again
        await anyio.sleep(10)
        begun = len(Big.made)
        assert Big.alive() <= begun - 1


@pytest.mark.parametrize("error", [ReceiptHandleExpiredError, MailboxConnectionError, ValueError])
@pytest.mark.parametrize("how", ["returns", "fails", "late fails"])
async def test_one_whose_settlement_fails(virtual_clock, how, error):
    mailbox = FaultyMailbox(body=int)

    async def refuse(hook) -> None:
        raise error("no")  # a new one, as no frame of the test is to hold it

    mailbox.next("settle", refuse, refuse)
    loop = loop_of(failing(how), mailbox=mailbox)
    async with background(loop):
        await mailbox.send(1)
        await anyio.sleep(10)
        await none_alive()


@pytest.mark.parametrize("how", ["wrong type", "fails"])
async def test_one_whose_reply_fails(virtual_clock, how):
    class Odd:
        def __init__(self) -> None:
            Big.made.append(weakref.ref(self))  # type: ignore[arg-type]

    async def handle(job: int) -> int:
        big = Big()  # noqa: F841
        if how == "fails":
            raise ValueError(how)
        return Odd()  # type: ignore[return-value]

    loop = loop_of(handle)
    async with loop.mailbox, background(loop):
        with pytest.raises(RequestFailedError):
            await loop.mailbox.request(1, timeout=20)
        await none_alive()


@pytest.mark.parametrize("how", ["returns", "fails", "late fails", "rejects"])
async def test_one_of_dead_letters(how):
    mailbox = InMemoryMailbox(body=int)
    async with mailbox:
        await mailbox.send(1)
        (message,) = await mailbox.receive()
        await message.dead_letter("broken")
        del message
        handle = failing(how)
        consumer = DLQConsumer(mailbox, lambda letter: handle(1), dead_letter=DeadLetterPolicy(max_attempts=1))
        async with consumer:
            while not consumer.outcomes:
                await anyio.sleep(0.001)
            await none_alive()


@dataclass
class Refused:
    """A body that the receiver's type does not take."""

    number: int

    def __post_init__(self) -> None:
        big = Big()  # noqa: F841 - held by the frame
        raise ValueError("too old")


@pytest.mark.parametrize("takes", [Refused, Refused | None])
async def test_a_body_that_does_not_fit(tmp_path, takes):
    path = tmp_path / "jobs.db"
    async with SQLiteMailbox(path) as sender:
        mailbox = SQLiteMailbox(path, body=takes)

        async def handle(job: Any) -> None: ...

        async with MainLoop(mailbox, handle, body=takes, dead_letter=DeadLetterPolicy(max_attempts=1)):
            await sender.send({"number": 1})
            await settled(sender)
            await none_alive()


# -------------------------------------------------------------------------------- others who call what users hand over


@pytest.mark.parametrize("to_the_end", [False, True])
async def test_a_pool(to_the_end):
    def work() -> None:
        big = Big()  # noqa: F841
        raise ValueError("here")

    async with OffloadPool() as pool:
        with pytest.raises(ValueError, match="here"):
            await (pool.run_to_the_end(work) if to_the_end else pool.run(work))
        await none_alive()


async def test_the_caller_of_a_pool_of_processes():
    async def asks(pool: OffloadPool) -> None:
        big = Big()  # noqa: F841
        with pytest.raises(ValueError, match="invalid literal"):
            await pool.run(int, "one")

    async with OffloadPool("process", workers=1) as pool:
        await asks(pool)
        await none_alive()


async def test_a_pool_that_nobody_waits_for_any_more():
    release = threading.Event()

    def work() -> None:
        big = Big()  # noqa: F841
        release.wait(10)
        raise ValueError("here")

    async with OffloadPool() as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run, work)
            while not Big.made:
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        release.set()
        await pool.wait_for_late()
        await none_alive()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_check(is_async):
    def plain() -> None:
        big = Big()  # noqa: F841
        raise ValueError("here")

    async def waits() -> None:
        await anyio.lowlevel.checkpoint()
        plain()

    group = LoopGroup([loop_of(failing("returns"))], checks={"here": waits if is_async else plain})
    async with group:
        await group.refresh_checks()
        assert group.status().reasons == ("check 'here': ValueError: here",)
        await none_alive()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_shutdown_callback(is_async):
    def plain() -> None:
        big = Big()  # noqa: F841
        raise ValueError("here")

    async def waits() -> None:
        await anyio.lowlevel.checkpoint()
        plain()

    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(waits if is_async else plain)
        coordinator.trigger()
        await none_alive(0)
    assert len(Big.made) == 1
    await none_alive()


async def test_a_ticket():
    def fails() -> None:
        big = Big()  # noqa: F841
        raise ValueError("here")

    ticket: Ticket[None] = Ticket()
    with ticket.writer() as answer:
        try:
            fails()
        except ValueError as error:
            answer.fail(error)
    for _ in range(2):  # a reader may come again
        with pytest.raises(ValueError, match="here"):
            await ticket.wait()
    del ticket, answer
    await none_alive()
