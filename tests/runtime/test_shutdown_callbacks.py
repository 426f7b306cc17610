"""ShutdownCoordinator's callbacks: in order, once, each by itself, from any thread, and to their end."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from contextvars import ContextVar

import anyio
import pytest
from anyio import to_thread

from mainspring import InvalidParameterError, ShutdownCoordinator

pytestmark = pytest.mark.anyio


async def until(condition):
    with anyio.fail_after(60):
        while not condition():
            await anyio.sleep(0.001)


# ------------------------------------------------------------------------------------------------------------- callbacks


async def test_callbacks_plain_and_async_are_called_in_the_order_of_their_registration():
    order = []

    def plain(name):
        order.append(name)

    async def slow(name):
        order.append(f"{name} begins")
        await anyio.sleep(0.01)
        order.append(f"{name} ends")

    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(lambda: plain("1"))
        coordinator.register(functools.partial(slow, "2"))
        coordinator.register(lambda: plain("3"))
        coordinator.register(functools.partial(slow, "4"))
        coordinator.register(lambda: plain("5"))
        coordinator.trigger()
    assert order[:5] == ["1", "2 begins", "3", "4 begins", "5"]
    assert sorted(order[5:]) == ["2 ends", "4 ends"]


def test_an_interrupt_in_a_callback_comes_out_and_the_others_are_called_yet():
    called = []

    def interrupted():
        called.append("first")
        raise KeyboardInterrupt

    with ShutdownCoordinator(()) as coordinator:
        coordinator.register(interrupted)
        coordinator.register(lambda: called.append("second"))
        with pytest.raises(KeyboardInterrupt):
            coordinator.trigger()
        coordinator.register(lambda: called.append("third"))
    assert called == ["first", "second", "third"]


async def test_one_registered_late_is_called_at_once_and_once():
    called = []
    async with ShutdownCoordinator(()) as coordinator:
        coordinator.trigger()
        coordinator.register(lambda: called.append("late"))
        assert called == ["late"]
        coordinator.trigger()
        await anyio.wait_all_tasks_blocked()
    assert called == ["late"]


async def test_none_waits_for_the_end_of_an_async_one():
    order, end = [], anyio.Event()

    async def slow() -> None:
        order.append("slow begins")
        await end.wait()
        order.append("slow ends")

    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(slow)
        coordinator.register(lambda: order.append("second"))
        coordinator.trigger()
        await until(lambda: order)
        coordinator.register(lambda: order.append("late"))
        await until(lambda: "late" in order)
        assert order == ["slow begins", "second", "late"]
        end.set()
    assert order == ["slow begins", "second", "late", "slow ends"]


async def test_one_that_never_ends_keeps_no_other_from_being_called(virtual_clock):
    done = []

    async def close_the_database() -> None:
        await anyio.sleep(1)
        done.append(virtual_clock.now)

    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(anyio.sleep_forever)
        coordinator.register(close_the_database)
        coordinator.trigger()
    assert done == [1]


async def test_an_async_one_in_a_plain_function_is_awaited_though_it_is_the_first():
    called = []

    async def close() -> None:
        await anyio.sleep(0)
        called.append("close")

    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(lambda: close())
        coordinator.register(lambda: called.append("plain"))
        coordinator.trigger()
    assert sorted(called) == ["close", "plain"]


async def test_a_callback_that_registers_another_comes_to_its_end_first():
    order = []

    def first() -> None:
        order.append("first begins")
        coordinator.register(lambda: order.append("third"))
        order.append("first ends")

    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(first)
        coordinator.register(lambda: order.append("second"))
        coordinator.trigger()
        await until(lambda: len(order) == 4)
    assert order == ["first begins", "first ends", "second", "third"]


async def test_a_raising_callback_does_not_skip_the_next(caplog):
    called = []

    def broken() -> None:
        raise ValueError("plain and broken")

    async def broken_too() -> None:
        raise ValueError("async and broken")

    with caplog.at_level(logging.ERROR, "mainspring.signals"):
        async with ShutdownCoordinator(()) as coordinator:
            for callback in (broken, lambda: called.append(1), broken_too, lambda: called.append(2)):
                coordinator.register(callback)
            coordinator.trigger()
            await until(lambda: len(called) == 2)
    assert called == [1, 2]
    assert "plain and broken" in caplog.text
    assert "async and broken" in caplog.text


@pytest.mark.parametrize("is_async", [False, True])
async def test_one_that_exits_does_not_skip_the_next_either(is_async, caplog):
    called = []

    def exits() -> None:
        sys.exit(3)

    async def exits_later() -> None:
        await anyio.sleep(0)
        sys.exit(3)

    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(exits_later if is_async else exits)
        coordinator.register(lambda: called.append(True))
        coordinator.trigger()
        await until(lambda: called)
    assert "exits" in caplog.text


async def test_one_that_was_taken_back_is_not_called():
    called = []

    def callback() -> None:
        called.append(1)

    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(callback)
        coordinator.unregister(callback)
        coordinator.unregister(callback)
        coordinator.trigger()
        await anyio.wait_all_tasks_blocked()
    assert called == []


async def test_async_callables_of_other_shapes_are_awaited():
    called = []

    class Service:
        async def close(self) -> None:
            await anyio.sleep(0)
            called.append("method")

        async def __call__(self) -> None:
            await anyio.sleep(0)
            called.append("object")

    async def parts(name: str) -> None:
        await anyio.sleep(0)
        called.append(name)

    async with ShutdownCoordinator(()) as coordinator:
        for callback in (Service().close, Service(), functools.partial(parts, "partial"), lambda: parts("lambda")):
            coordinator.register(callback)
        coordinator.trigger()
        await until(lambda: len(called) == 4)
    assert called == ["method", "object", "partial", "lambda"]


# --------------------------------------------------------------------------------------------------------------- threads


async def test_a_trigger_from_another_thread_calls_back_on_the_event_loop():
    threads = []

    async def note() -> None:
        threads.append(threading.current_thread())

    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(lambda: threads.append(threading.current_thread()))
        coordinator.register(note)
        await to_thread.run_sync(coordinator.trigger, "from a thread")
        assert coordinator.triggered
        await until(lambda: len(threads) == 2)
    assert threads == [threading.current_thread()] * 2
    assert coordinator.reason == "from a thread"


async def test_of_many_threads_that_trigger_at_once_one_does():
    called = []
    barrier = threading.Barrier(8)

    def trigger() -> None:
        barrier.wait(10)
        coordinator.trigger()

    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(lambda: called.append(1))
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(to_thread.run_sync, trigger)
        await until(lambda: called)
    assert called == [1]


async def test_registrations_from_many_threads_are_each_called_once():
    called = []
    barrier = threading.Barrier(9)

    def register(number: int) -> None:
        barrier.wait(10)
        for part in range(50):
            coordinator.register(functools.partial(called.append, (number, part)))

    def trigger() -> None:
        barrier.wait(10)
        coordinator.trigger()

    async with ShutdownCoordinator(()) as coordinator:
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(to_thread.run_sync, register, number)
            tasks.start_soon(to_thread.run_sync, trigger)
        await until(lambda: len(called) == 400)
        await anyio.wait_all_tasks_blocked()
    assert len(called) == 400


# ------------------------------------------------------------------------------------------------------ leaving the block


async def test_those_that_are_due_when_the_block_is_left_are_called_and_come_to_their_end(virtual_clock):
    log = []

    async def cleans_up() -> None:
        log.append("begun")
        await anyio.sleep(5)
        log.append("done")

    async with ShutdownCoordinator(()) as coordinator:
        asked = anyio.Event()
        coordinator.register(asked.set)
        coordinator.register(cleans_up)
        coordinator.register(lambda: log.append("the next"))
        coordinator.trigger()
        await asked.wait()
    assert log == ["begun", "the next", "done"]
    assert virtual_clock.now == 5


async def test_one_that_does_not_end_holds_the_block_for_ten_seconds_only(virtual_clock):
    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(anyio.sleep_forever)
        coordinator.trigger()
    assert virtual_clock.now == 10


async def test_an_error_of_the_block_cancels_them(virtual_clock):
    async def cleans_up() -> None:
        await anyio.sleep(5)

    async def fails() -> None:
        async with ShutdownCoordinator(()) as coordinator:
            coordinator.register(cleans_up)
            coordinator.trigger()
            await anyio.sleep(1)
            raise LookupError

    with pytest.raises(LookupError):
        await fails()
    assert virtual_clock.now == 1


async def test_the_same_one_can_be_entered_again(virtual_clock):
    called = []
    coordinator = ShutdownCoordinator(())
    async with coordinator:
        pass

    async def callback() -> None:
        await anyio.sleep(1)
        called.append(True)

    async with coordinator:
        coordinator.register(callback)
        coordinator.trigger()
        await anyio.sleep(2)
        assert called == [True]


# ---------------------------------------------------------------------------------- what runs nothing, and context variables

TENANT: ContextVar[str] = ContextVar("tenant", default="none")


async def yields():
    yield


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (yields, "the shutdown callback yields is a generator, which would never run"),
        (functools.partial(yields), "is a generator"),
        (type("Event", (), {}), "the shutdown callback Event is a class"),
        (5, "register takes a function without parameters, not 5"),
    ],
)
async def test_what_would_run_nothing_is_refused(callback, says):
    with pytest.raises(InvalidParameterError, match=says):
        ShutdownCoordinator(()).register(callback)


@pytest.mark.filterwarnings("error")
async def test_a_callback_that_gives_work_that_has_not_run_is_logged(caplog):
    async def never():
        raise AssertionError

    async def forgets_await():
        return never()

    called = []
    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(forgets_await)
        coordinator.register(lambda: (step for step in "ab"))
        coordinator.register(lambda: called.append("next"))
        coordinator.trigger()
    assert called == ["next"]
    said = sorted(str(record.exc_info[1]) for record in caplog.records)
    assert "forgets_await returned a coroutine, so its work has not run" in said[1]
    assert "returned a generator, so its work has not run" in said[0]


@pytest.mark.parametrize("within", [False, True])
async def test_each_callback_has_a_context_of_its_own(within):
    seen = []

    def plain():
        seen.append(TENANT.get())
        TENANT.set("of a plain one")

    async def waits():
        seen.append(TENANT.get())
        TENANT.set("of an async one")
        await anyio.lowlevel.checkpoint()

    def leaves_the_rest():
        TENANT.set("of a plain part")
        return rest()

    async def rest():
        seen.append(TENANT.get())

    TENANT.set("of the block")
    coordinator = ShutdownCoordinator(())
    for callback in (plain, waits, leaves_the_rest, waits, plain):
        coordinator.register(callback)
    async with coordinator:
        TENANT.set("of the trigger")
        if within:
            coordinator.trigger()
        else:
            await to_thread.run_sync(coordinator.trigger)
        assert TENANT.get() == "of the trigger"
    assert sorted(seen) == ["of a plain part", *["of the block"] * 4]


async def test_a_callback_that_swallows_its_cancellation_is_cancelled_ever_more_slowly(virtual_clock):
    caught = 0

    async def stubborn():
        nonlocal caught
        while anyio.current_time() < 12 and caught < 1_000:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                caught += 1

    async with ShutdownCoordinator(()) as coordinator:
        coordinator.register(stubborn)
        coordinator.trigger()
    assert 20 < caught < 40
