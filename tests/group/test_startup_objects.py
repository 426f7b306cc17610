"""What exists once a group has started is left out of garbage collections, where the group owns its process."""

from __future__ import annotations

import gc

import anyio
import pytest
from group_support import one_loop_group

from mainspring import LoopGroup
from mainspring.group.startup_objects import full_collections_rare


@pytest.fixture(autouse=True)
def nothing_frozen():
    """Undo what :mod:`own_time` has frozen, for the time of a test."""
    before = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if before:
        gc.freeze()


async def frozen_in_a_handler(**options) -> int:
    """Return how many objects are frozen while a handler of a group runs."""
    seen = []

    async def handle(body):
        seen.append(gc.get_freeze_count())
        group.request_shutdown()

    group, mailbox = one_loop_group(handle)
    await mailbox.send({})
    await group.run(**options)
    return seen[0]


async def test_they_are_frozen_while_a_group_runs_that_owns_its_process(virtual_clock):
    assert await frozen_in_a_handler() > 1_000
    assert gc.get_freeze_count() == 0


async def test_an_embedded_group_leaves_them_to_the_program(virtual_clock):
    assert await frozen_in_a_handler(install_signals=False) == 0


async def test_what_the_program_has_frozen_stays_frozen(virtual_clock):
    gc.freeze()
    count = gc.get_freeze_count()
    assert await frozen_in_a_handler() <= count
    assert gc.get_freeze_count() > 0


class OwnLoop:
    """A loop of the program's own, which calls ``begin`` as it is started."""

    running = False
    heartbeat = None

    def __init__(self, begin):
        self._begin = begin
        self._told = anyio.Event()

    async def run(self):
        self._begin()
        await self._told.wait()

    async def shutdown(self):
        self._told.set()
        return True


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


async def started(begin) -> tuple[int, int, int]:
    """Return the thresholds of a running group. ``begin()`` is called while it starts."""
    async with LoopGroup([OwnLoop(begin)]):
        return gc.get_threshold()


async def test_full_collections_are_rarer_while_a_group_starts(virtual_clock, thresholds):
    seen = []
    running = await started(lambda: seen.append(gc.get_threshold()))
    assert seen == [(700, 10, 40)]
    assert running == (700, 10, 10)


async def test_thresholds_that_the_program_sets_while_a_group_starts_stay(virtual_clock, thresholds):
    assert await started(lambda: gc.set_threshold(50_000, 20, 100)) == (50_000, 20, 100)


async def test_groups_that_start_at_the_same_time_leave_the_thresholds_as_they_were(virtual_clock, thresholds):
    seen = []
    with full_collections_rare():
        assert await started(lambda: seen.append(gc.get_threshold())) == (700, 10, 40)
    assert seen == [(700, 10, 40)]
    assert gc.get_threshold() == (700, 10, 10)
