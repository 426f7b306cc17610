"""One task for several members: it runs in the scope of one of them, and moves on when that one leaves."""

from __future__ import annotations

from contextlib import asynccontextmanager
from contextvars import ContextVar

import anyio
import pytest

from mainspring.runtime.scope import DaemonScope
from mainspring.runtime.shared_task import SharedTask
from mainspring.testing import run_virtual

pytestmark = pytest.mark.anyio
WHO = ContextVar("who", default="none")


class Served:
    """Counts the runs at the same time, and notes who ran it."""

    def __init__(self):
        self.running = self.most = 0
        self.by = []
        self.cleaning = 0.0
        self.task = SharedTask("served", self.run)

    async def run(self):
        self.running += 1
        self.most = max(self.most, self.running)
        self.by.append(WHO.get())
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(self.cleaning)
            self.running -= 1


@asynccontextmanager
async def member(served, name):
    WHO.set(name)
    async with DaemonScope(name) as scope:
        served.task.join(scope)
        try:
            yield
        finally:
            served.task.leave(scope)


async def test_it_runs_once_and_moves_on_when_its_member_leaves() -> None:
    served = Served()
    served.cleaning = 0.01
    leaves = {name: anyio.Event() for name in ("one", "two", "three")}

    async def be_member(name):
        async with member(served, name):
            await leaves[name].wait()

    async with anyio.create_task_group() as tasks:
        for name in leaves:
            tasks.start_soon(be_member, name)
            await anyio.wait_all_tasks_blocked()
        for count, leave in enumerate(leaves.values(), 1):
            with anyio.fail_after(5):
                while len(served.by) < count:
                    await anyio.sleep(0.001)
            leave.set()
    assert served.by == list(leaves)
    assert (served.running, served.most) == (0, 1)


async def test_a_member_that_it_does_not_run_in_leaves_unnoticed() -> None:
    served = Served()
    async with member(served, "one"):
        async with member(served, "two"):
            await anyio.wait_all_tasks_blocked()
        await anyio.wait_all_tasks_blocked()
        running = served.running
    assert (running, served.by) == (1, ["one"])


def test_clean_up_of_a_cancelled_member_still_has_it() -> None:
    async def scenario():
        served = Served()
        ran = []
        with anyio.CancelScope() as cancelled:
            async with DaemonScope("one") as scope:
                served.task.join(scope)
                await anyio.sleep(1)
                try:
                    cancelled.cancel()
                    await anyio.sleep_forever()
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(1)
                        ran.append(served.running)
                    served.task.leave(scope)
        assert (ran, served.running) == ([1], 0)

    run_virtual(scenario)


async def test_what_left_can_come_back() -> None:
    served = Served()
    for name in ("one", "two"):
        async with member(served, name):
            await anyio.wait_all_tasks_blocked()
    assert served.by == ["one", "two"]
