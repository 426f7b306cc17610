"""Notices when a new trio no longer has the parts that are not public and that virtual time stands on."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from trio._core import _run

from mainspring.testing.trio_internals import expire_deadlines, replace_autojump, seeded_schedule, stop_real_time


def test_trio_still_has_the_parts() -> None:
    assert _run._ALLOW_DETERMINISTIC_SCHEDULING in (True, False)
    assert isinstance(_run._r, random.Random)
    assert replace_autojump(trio.testing.MockClock(), lambda: None)


def test_trio_still_obeys_them() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def work(number: int) -> None:
            for _ in range(5):
                await trio.lowlevel.checkpoint()
                order.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(work, number)
        return order

    def run(seed: int) -> list[int]:
        with seeded_schedule(seed):
            return trio.run(main)

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in range(5)}) == 5


def test_the_jump_is_asked_for_when_all_are_blocked() -> None:
    calls: list[float] = []
    clock = trio.testing.MockClock(autojump_threshold=0)

    def on_idle() -> None:
        calls.append(trio.lowlevel.current_statistics().seconds_to_next_deadline)
        clock.jump(calls[-1])

    replace_autojump(clock, on_idle)
    trio.run(trio.sleep, 7, clock=clock)
    assert calls == [7]


def test_what_is_due_runs_in_the_round_of_the_jump() -> None:
    rounds: list[float] = []
    clock = trio.testing.MockClock(autojump_threshold=0)

    class Counter(trio.abc.Instrument):
        def before_io_wait(self, timeout: float) -> None:
            rounds.append(timeout)

    def on_idle() -> None:
        clock.jump(trio.lowlevel.current_statistics().seconds_to_next_deadline)
        assert expire_deadlines(clock.current_time())

    async def main() -> None:
        trio.lowlevel.add_instrument(Counter())
        await trio.sleep(7)
        before = len(rounds)
        await trio.sleep(7)
        assert len(rounds) == before + 1

    replace_autojump(clock, on_idle)
    trio.run(main, clock=clock)


def test_a_clock_need_not_read_the_real_time() -> None:
    clock = trio.testing.MockClock()
    stop_real_time(clock)
    clock.jump(5)
    assert clock.current_time() == 5
    assert "current_time" in vars(clock)


def test_everything_is_put_back() -> None:
    switch, state = _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r.getstate()

    def fail() -> None:
        with seeded_schedule(3):
            assert _run._ALLOW_DETERMINISTIC_SCHEDULING is True
            assert _run._r.getstate() != state
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert switch == _run._ALLOW_DETERMINISTIC_SCHEDULING
    assert _run._r.getstate() == state


def test_a_trio_without_them_warns_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING")
    with pytest.warns(RuntimeWarning, match="cannot be seeded"), seeded_schedule(1):
        pass
