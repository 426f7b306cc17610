"""Retries: how long to wait after each failure."""

from __future__ import annotations

import anyio
import pytest

from mainspring.runtime.retry import Retries

pytestmark = pytest.mark.anyio


def waits(retries, count):
    return [retries.failed() for _ in range(count)]


def test_the_waits_double_up_to_the_maximum_and_are_random_below_that():
    bounds = [0.1, 0.2, 0.4, 0.5, 0.5]
    runs = [waits(Retries(initial=0.1, maximum=0.5), len(bounds)) for _ in range(200)]
    for number, bound in enumerate(bounds):
        seen = [run[number] for run in runs]
        assert 0.9 * bound < max(seen) <= bound
        assert min(seen) < 0.1 * bound


def test_a_success_begins_anew_and_tells_how_many_had_failed():
    retries = Retries(initial=0.1, maximum=10.0)
    waits(retries, 8)
    assert retries.failures == 8
    assert retries.succeeded() == 8
    assert retries.failures == 0
    assert retries.failed() <= 0.1
    assert retries.succeeded() == 1
    assert retries.succeeded() == 0


async def test_a_pause_is_such_a_wait(virtual_clock):
    retries = Retries(initial=4.0, maximum=4.0)
    began = anyio.current_time()
    for _ in range(50):
        await retries.pause()
    assert retries.failures == 50
    assert 50 < anyio.current_time() - began < 150
