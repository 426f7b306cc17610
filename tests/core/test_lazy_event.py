"""Events that are made when a task waits: they wake up their tasks as those of anyio do."""

from __future__ import annotations

import anyio
import pytest

from mainspring.core.lazy_event import LazyEvent

pytestmark = pytest.mark.anyio


async def test_it_wakes_up_every_waiting_task_and_stays_set(anyio_backend):
    event, woken = LazyEvent(), []

    async def wait(number):
        await event.wait()
        woken.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(wait, number)
        await anyio.wait_all_tasks_blocked()
        assert not woken
        assert not event.is_set()
        event.set()
        event.set()
    assert sorted(woken) == [0, 1, 2]
    assert event.is_set()
    with anyio.fail_after(1):
        await event.wait()


async def test_to_wait_for_one_that_is_set_is_a_checkpoint(anyio_backend):
    event = LazyEvent()
    event.set()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await event.wait()
    assert scope.cancelled_caught
