"""An event loop that stood still and turns again: a warning names the line that it stood on."""

from __future__ import annotations

import logging
import time

import anyio
import pytest

from mainspring.watchdog import block_watch as guardian
from mainspring.watchdog.block_watch import BlockWatch, _Watcher

pytestmark = pytest.mark.anyio


def stand_still(watcher):
    give_up = time.monotonic() + 60
    while watcher._stood is None and time.monotonic() < give_up:
        time.sleep(0.01)


async def test_a_loop_that_stood_still_is_told_of_with_its_line(caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "mainspring")
    monkeypatch.setattr(guardian, "look_interval", lambda _: 0.02)
    monkeypatch.setattr(guardian, "LONG", 0.2)
    async with BlockWatch(guardian=False) as watch:
        stand_still(watch._watcher)
        with anyio.fail_after(60):
            while not caplog.records:
                await anyio.sleep(0.01)
    said = caplog.messages[0]
    assert said.startswith("the event loop did not turn for ")
    assert " in stand_still: " in said
    assert said.endswith("; leave what blocks to a plain `def` handler or to an OffloadPool")


@pytest.mark.slow
async def test_the_lag_of_the_event_loop_is_known_while_it_is_late_and_for_a_minute_after():
    watch = BlockWatch(block_threshold=5, guardian=False)  # beats each half a second
    assert watch.lag is None
    async with watch:
        await anyio.sleep(0.01)
        assert watch.lag < 0.5
        time.sleep(0.7)
        late = watch.lag
        assert late > 0.15
        await anyio.sleep(0.01)
        assert watch.lag >= late


def test_a_moment_is_not_told_of_and_a_long_one_once_when_it_is_over():
    watcher = _Watcher(30.0, guardian=False, stream=None)
    try:
        for silence in (0.0, 2.9, 1.0):
            watcher._note(silence)
        assert not watcher._notices
        for silence in (3.0, 4.0, 5.0):
            watcher._note(silence)
        assert not watcher._notices
        for silence in (0.5, 0.0):
            watcher._note(silence)
        (notice,) = watcher._notices
        assert notice.startswith("the event loop did not turn for 5 s or more; it stood at ")
    finally:
        watcher._end()
