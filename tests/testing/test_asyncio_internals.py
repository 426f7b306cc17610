"""Notices when a new asyncio no longer has the parts that are not public and that virtual time stands on."""

from __future__ import annotations

import asyncio
import math
from random import Random

import pytest

from mainspring.testing.asyncio_internals import next_timer, run_timers_exactly, shuffle_next


@pytest.fixture
def loop():
    loop = asyncio.SelectorEventLoop()
    yield loop
    loop.close()


def test_asyncio_still_has_the_parts(loop) -> None:
    assert next_timer(loop) == math.inf
    loop.call_at(loop.time() + 7, print)
    first = loop.call_at(loop.time() + 3, print)
    assert next_timer(loop) == first.when()
    assert 0 < loop._clock_resolution < 1e-3
    run_timers_exactly(loop, 8.0)
    assert loop._clock_resolution == math.ulp(8.0)


def test_timers_of_one_instant_are_shuffled_and_stay_before_the_others(loop) -> None:
    def order(seed: int) -> list[int]:
        ran: list[int] = []
        when = loop.time()
        for number in range(8):
            loop.call_at(when, ran.append, number)
            loop.call_at(when + 0.001 * (number + 1), ran.append, 100 + number)
        shuffle_next(loop, Random(seed))
        loop.run_until_complete(asyncio.sleep(0.01))
        assert sorted(ran[:8]) == [*range(8)]
        assert ran[8:] == [*range(100, 108)]
        return ran

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 3
    shuffle_next(loop, Random(1))  # without a timer


def test_a_loop_without_them_is_left_alone() -> None:
    class Other:
        pass

    assert next_timer(Other()) is None
    shuffle_next(Other(), Random(1))
    other = Other()
    run_timers_exactly(other, 1.0)
    assert not vars(other)
