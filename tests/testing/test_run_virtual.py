"""Virtual time: what it costs, what holds it, what comes out of it, and that the same seed gives the same run."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import anyio
import pytest

from mainspring import InMemoryMailbox
from mainspring.core import clock, random
from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.testing import DeadlockError, VirtualClock, run_virtual

Run = Callable[..., Any]


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run_virtual`` on each event loop."""
    return partial(run_virtual, backend=request.param)


def test_value_and_errors_come_out(run: Run) -> None:
    async def double(number: int) -> int:
        await anyio.sleep(86_400)
        return number * 2

    async def fail() -> None:
        raise LookupError("as it was raised")

    assert run(double, 21) == 42
    with pytest.raises(LookupError, match="as it was raised"):
        run(fail)


def test_a_call_in_place_of_the_function_says_what_to_write() -> None:
    async def main() -> None: ...

    with pytest.raises(ConfigError, match=r"run_virtual\(main, 1\), not run_virtual\(main\(1\)\)$"):
        run_virtual(main())  # type: ignore[arg-type]


def test_time_passes_only_while_all_are_blocked_and_every_clock_agrees(run: Run) -> None:
    async def main() -> None:
        assert anyio.current_time() == VirtualClock().now == 0
        began, booted = clock.utc_now(), clock.boot_time()
        await anyio.sleep(3600)
        assert anyio.current_time() == VirtualClock().now == 3600
        assert (clock.utc_now() - began).total_seconds() == clock.boot_time() - booted == 3600

    run(main)


def test_the_virtual_date_is_public_and_an_error_about_a_date_names_it(run: Run) -> None:
    async def main() -> None:
        async with InMemoryMailbox("jobs", body=str) as jobs:
            await anyio.sleep(86_400)
            with pytest.raises(
                InvalidParameterError, match=r"its date is 2000-01-02: take VirtualClock\(\)\.utc_now\(\)"
            ):
                await jobs.send("today", at=datetime.now(UTC) + timedelta(minutes=1))
            virtual = VirtualClock()
            assert virtual.utc_now() == datetime(2000, 1, 2, tzinfo=UTC)
            await jobs.send("in an hour", at=virtual.utc_now() + timedelta(hours=1))
            await jobs.send("at once", at=datetime.min.replace(tzinfo=UTC))
            (first,) = await jobs.receive()
            await first.acknowledge()
            (second,) = await jobs.receive(wait_time_seconds=7_200)
            assert (first.body, second.body, virtual.now) == ("at once", "in an hour", 86_400 + 3_600)

    run(main)


def test_timers_fire_at_their_own_instants(run: Run) -> None:
    async def main() -> list[float]:
        fired: list[float] = []

        async def after(seconds: float) -> None:
            await anyio.sleep(seconds)
            fired.append(anyio.current_time())

        async with anyio.create_task_group() as group:
            for seconds in (30, 10, 20):
                group.start_soon(after, seconds)
            with anyio.move_on_after(15):
                await anyio.sleep(100)
            fired.append(anyio.current_time())
        return fired

    assert run(main) == [10, 15, 20, 30]


# ------------------------------------------------------------------------------------------------------- the schedule

SCHEDULE = """
import sys, anyio, mainspring.core.random
from mainspring.testing import run_virtual

async def main():
    order = []
    async def work(name):
        for _ in range(5):
            await anyio.sleep(0)
            order.append(name)
        await anyio.sleep(1)
        order.append(mainspring.core.random.token(16))
    async with anyio.create_task_group() as group:
        for name in {"a", "b", "c", "d", "e"} and "abcde":
            group.start_soon(work, name)
        event = anyio.Event()
        async def waiter(name):
            await event.wait()
            order.append(name)
        for name in "vwxyz":
            group.start_soon(waiter, name)
        await anyio.sleep(2)
        event.set()
    return " ".join(order)

if __name__ == "__main__":
    print([run_virtual(main, seed=seed, backend=sys.argv[1]) for seed in (0, 1, 1, 2)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_same_seed_same_schedule_in_any_process(backend: str) -> None:
    def run(hash_seed: str) -> list[str]:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", SCHEDULE, backend], env=environment, capture_output=True, text=True, check=True
        )
        return eval(done.stdout)

    first, second = run("1"), run("4242")
    assert first == second
    zero, one, again, two = first
    assert one == again
    assert len({zero, one, two}) == 3


def test_seed_rules_jitter_and_is_gone_afterwards(run: Run) -> None:
    async def draw() -> list[float]:
        return [random.rng().random() for _ in range(3)]

    assert run(draw, seed=5) == run(draw, seed=5) != run(draw, seed=6)
    assert random.rng() is not None
    assert random.token() != random.token()


# ------------------------------------------------------------------------------------------------------------- holds


def test_clock_stands_still_while_a_thread_works(run: Run) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 1000)
            await anyio.to_thread.run_sync(time.sleep, 0.05)
            assert anyio.current_time() == 0
            with clock.real_work():
                await anyio.to_thread.run_sync(time.sleep, 0.05)
            assert anyio.current_time() == 0
        assert anyio.current_time() == 1000

    run(main)


def test_clock_stands_still_while_a_process_works(run: Run) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 1000)
            result = await anyio.run_process([sys.executable, "-c", "print('done')"])
            assert result.stdout == b"done\n"
            assert anyio.current_time() == 0

    run(main)


def test_a_raw_thread_is_held_for_by_real_work(run: Run) -> None:
    async def main() -> None:
        done = anyio.Event()
        token = anyio.lowlevel.current_token()

        def work() -> None:
            time.sleep(0.05)
            anyio.from_thread.run_sync(done.set, token=token)

        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 1000)
            with clock.real_work():
                threading.Thread(target=work).start()
                await done.wait()
            assert anyio.current_time() == 0

    run(main)


def test_holds_nest_and_overlap(run: Run) -> None:
    async def main() -> None:
        virtual = VirtualClock()
        first_done = anyio.Event()

        async def first() -> None:
            with virtual.hold(), virtual.hold():
                await virtual.advance(10)
            first_done.set()

        async with anyio.create_task_group() as group:
            group.start_soon(first)
            with clock.real_work():
                await first_done.wait()
                group.start_soon(anyio.sleep, 1000)
                await anyio.to_thread.run_sync(time.sleep, 0.02)
                assert virtual.now == 10
        assert virtual.now == 1010

    run(main)


def test_a_hold_survives_an_error_inside_it(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(LookupError), VirtualClock().hold():
            raise LookupError
        await anyio.sleep(5)

    run(main)


def test_abandoned_threads_do_not_hold(run: Run) -> None:
    async def main() -> None:
        release = threading.Event()
        with anyio.move_on_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(partial(anyio.to_thread.run_sync, release.wait, abandon_on_cancel=True))
                await anyio.sleep(0)
                await VirtualClock().advance(31)
        await anyio.sleep(50)
        assert anyio.current_time() == 81
        release.set()

    run(main)


def test_a_thread_that_calls_back_may_wait_for_virtual_time(run: Run) -> None:
    async def main() -> None:
        await anyio.to_thread.run_sync(anyio.from_thread.run, anyio.sleep, 100)
        assert anyio.current_time() == 100

    run(main)


# ----------------------------------------------------------------------------------------------------------- advance


def test_advance_jumps_and_awaited_lets_timers_run(run: Run) -> None:
    async def main() -> None:
        virtual = VirtualClock()
        fired: list[float] = []

        async def after(seconds: float) -> None:
            await anyio.sleep(seconds)
            fired.append(virtual.now)

        async with anyio.create_task_group() as group:
            with virtual.hold():
                group.start_soon(after, 0.1)
                group.start_soon(after, 0.3)
                await anyio.wait_all_tasks_blocked()
                virtual.advance(0.1)
                assert virtual.now == 0.1
                assert fired == []
                await virtual.advance(0)
                assert fired == [0.1]
                await virtual.advance(5)
            assert fired == [0.1, 5.1]

    run(main)


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf])
def test_advance_takes_no_nonsense(run: Run, seconds: float) -> None:
    async def main() -> None:
        with pytest.raises(InvalidParameterError):
            VirtualClock().advance(seconds)

    run(main)


# ---------------------------------------------------------------------------------------------------------- deadlock


def test_a_deadlock_is_named_with_its_lines(run: Run) -> None:
    async def child() -> None:
        await anyio.sleep_forever()

    async def main() -> None:
        VirtualClock().patience = 0.05
        async with anyio.create_task_group() as group:
            group.start_soon(child, name="the child")
            await anyio.sleep(3)
            await anyio.Event().wait()

    with pytest.raises(DeadlockError) as caught:
        run(main)
    text = str(caught.value)
    assert "virtual second 3" in text
    assert "in main: await anyio.Event().wait()" in text
    assert "the child: " in text
    assert "in child: await anyio.sleep_forever()" in text


def test_a_shield_without_a_deadline_does_not_hide_a_deadlock(run: Run) -> None:
    async def main() -> None:
        VirtualClock().patience = 0.05
        with anyio.CancelScope(shield=True):
            await anyio.Event().wait()

    with pytest.raises(DeadlockError, match="no deadline"):
        run(main)


def test_what_a_task_raises_as_it_is_cancelled_is_the_cause(run: Run) -> None:
    async def main() -> None:
        VirtualClock().patience = 0.05
        try:
            await anyio.sleep_forever()
        finally:
            raise LookupError("while cleaning up")

    with pytest.raises(DeadlockError) as caught:
        run(main)
    assert isinstance(caught.value.__cause__, LookupError)


ABANDONED = """
import threading, anyio
from mainspring.testing import DeadlockError, VirtualClock, run_virtual

async def main():
    VirtualClock().patience = 0.1
    with anyio.move_on_after(10):
        await anyio.to_thread.run_sync(threading.Event().wait)

try:
    run_virtual(main)
except DeadlockError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_thread_that_never_returns_ends_the_run() -> None:
    """In a process of its own: the event loop has to be abandoned, which Python remarks on when it cleans up."""
    done = subprocess.run([sys.executable, "-c", ABANDONED], capture_output=True, text=True, check=True, timeout=60)
    assert "a thread did not end within 0.1 real seconds" in done.stdout


def test_a_hold_that_nothing_ends_is_noticed(run: Run) -> None:
    async def main() -> None:
        virtual = VirtualClock()
        virtual.patience = 0.05
        with virtual.hold(), anyio.fail_after(10):
            await anyio.sleep_forever()

    with pytest.raises(DeadlockError, match="the clock was held"):
        run(main)


@pytest.mark.slow
def test_waiting_for_real_io_is_no_deadlock(run: Run) -> None:
    async def main() -> bytes:
        ours, theirs = os.pipe()
        timer = threading.Timer(1.2, lambda: os.write(theirs, b"x"))  # a second is how long nothing real may be out
        timer.start()
        await anyio.wait_readable(ours)
        timer.join()
        data = os.read(ours, 1)
        os.close(ours)
        os.close(theirs)
        return data

    assert run(main) == b"x"


def test_a_wait_for_real_things_does_not_spin(run: Run) -> None:
    async def main() -> float:
        before = time.process_time()
        await anyio.to_thread.run_sync(time.sleep, 0.3)
        return time.process_time() - before

    assert run(main) < 0.2


# ------------------------------------------------------------------------------------------------------------ misuse


@pytest.mark.anyio
async def test_not_inside_a_running_event_loop() -> None:
    with pytest.raises(ConfigError, match="cannot be called inside one"):
        run_virtual(anyio.sleep, 1)


def test_not_twice_at_once_in_one_process() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="trio schedule"):
            await anyio.to_thread.run_sync(run_virtual, anyio.sleep, 1)

    run_virtual(main)


def test_no_virtual_clock_outside_a_run() -> None:
    with pytest.raises(ConfigError, match="inside run_virtual"):
        VirtualClock()


def test_without_trio_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['trio'] = None\n"
        "from mainspring.errors import ConfigError\n"
        "import asyncio\n"
        "from mainspring.testing import run_virtual\n"
        "print(run_virtual(asyncio.sleep, 3600, 'slept', backend='asyncio'))\n"
        "try:\n    run_virtual(asyncio.sleep, 1)\n"
        "except ConfigError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'mainspring[test]'" in done.stdout
    assert "slept" in done.stdout


@pytest.mark.parametrize("backend", ["uvloop", "curio", None])
def test_a_backend_without_virtual_time_is_refused(backend: Any) -> None:
    with pytest.raises(ConfigError, match=f'backend must be "trio" or "asyncio", not {backend!r}') as caught:
        run_virtual(anyio.sleep, 1, backend=backend)
    assert ("uvloop keeps real time" in str(caught.value)) is (backend == "uvloop")
