"""What exists once a group has started is left out of garbage collections, where the group owns its process."""

from __future__ import annotations

import gc

import pytest
from group_support import one_loop_group


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
