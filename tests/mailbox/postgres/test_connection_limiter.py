"""Few calls count at once, and a call that is held up holds up no other: in virtual time, without a server."""

from __future__ import annotations

import anyio
import pytest

from mainspring.mailbox.postgres.connection import ConnectionLimiter, opens_at

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("counts_until", "opens"),
    [
        ([], 10.0),
        ([11.0], 10.0),
        ([11.0, 12.0], 11.0),
        ([12.0, 11.0, 5.0], 11.0),  # one counts no more
        ([10.0, 11.0], 10.0),  # from that instant on
    ],
)
def test_a_call_may_begin_while_fewer_than_two_count(counts_until, opens):
    assert opens_at(2, counts_until, 10.0) == opens


class Calls:
    """Calls through a limiter for two: when each began, and how many were under way at most."""

    def __init__(self):
        self.limiter = ConnectionLimiter(2)
        self.began = {}
        self.under_way = self.most = 0

    async def call(self, name, lasts, counts_for=1.0):
        async with self.limiter.turn(counts_for):
            self.began[name] = anyio.current_time() - self.start
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            try:
                await anyio.sleep(lasts)
            finally:
                self.under_way -= 1

    async def run(self, *calls):
        """Make calls at the same time, in this order."""
        self.start = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for each in calls:
                tasks.start_soon(self.call, *each)
                await anyio.sleep(0.001)


async def test_quick_calls_are_two_at_once_in_their_order(virtual_clock):
    calls = Calls()
    await calls.run(*((name, 0.1) for name in range(40)))
    assert calls.most == 2
    assert list(calls.began) == list(range(40))
    assert max(calls.began.values()) == pytest.approx(1.9, abs=0.05)


async def test_calls_that_are_held_up_let_the_others_begin_once_they_count_no_more(virtual_clock):
    calls = Calls()
    await calls.run(("held", 60), ("held too", 60), *((name, 0.1) for name in range(10)))
    assert calls.began[0] == pytest.approx(1, abs=0.01)
    assert max(calls.began[name] for name in range(10)) < 1.6
    assert calls.most == 4
    assert anyio.current_time() - calls.start == pytest.approx(60, abs=0.01)


async def test_each_says_for_how_long_it_counts(virtual_clock):
    calls = Calls()
    await calls.run(
        *((f"held {name}", 60, 0.1) for name in range(6)), ("quick", 0.1), ("of a handler", 9, 0), ("last", 1)
    )
    assert calls.began["quick"] == pytest.approx(0.3, abs=0.01)
    assert calls.began["last"] == pytest.approx(calls.began["of a handler"], abs=0.01)


async def test_a_call_that_is_cancelled_in_line_gives_its_turn_to_the_next(virtual_clock):
    """At the head of the line, where it has the time to watch, or with its turn at the same instant."""
    calls = Calls()
    calls.start = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for name in ("a", "b"):
            tasks.start_soon(calls.call, name, 60)
        await anyio.sleep(0.5)
        with anyio.move_on_after(0.25):
            await calls.call("cancelled in line", 1)
        with anyio.move_on_after(0.25):  # which is when its turn comes
            await calls.call("cancelled at its turn", 1)
        for name in ("c", "d"):
            tasks.start_soon(calls.call, name, 1)
        await anyio.sleep(0.1)
        assert {"c", "d"} <= set(calls.began)
        assert "cancelled in line" not in calls.began
        tasks.cancel_scope.cancel()


async def test_calls_behind_a_cancelled_one_still_get_their_turn(virtual_clock):
    calls = Calls()
    calls.start = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for name in ("a", "b"):
            tasks.start_soon(calls.call, name, 60)
        await anyio.sleep(0.1)
        leave = anyio.CancelScope()

        async def be_first():
            with leave:
                await calls.call("first in line", 1)

        tasks.start_soon(be_first)
        await anyio.sleep(0.1)
        tasks.start_soon(calls.call, "second in line", 1)
        await anyio.sleep(0.1)
        leave.cancel()
        await anyio.sleep(1)
        assert calls.began["second in line"] == pytest.approx(1, abs=0.01)
        tasks.cancel_scope.cancel()
