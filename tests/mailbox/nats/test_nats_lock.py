"""The lock between counting and moving: those who do the same pass together, and everybody's turn comes."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from mainspring.mailbox.nats.streams import ReadWriteLock

pytestmark = pytest.mark.anyio


class Passage:
    """Tasks that want to pass a lock, and who is inside."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.lock = ReadWriteLock()
        self.inside: list[str] = []
        self._tasks = tasks
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._ends: dict[str, anyio.Event] = {}

    async def come(self, name: str) -> None:
        """One whose name begins with ``c`` counts, else it moves."""
        self._scopes[name], self._ends[name] = anyio.CancelScope(), anyio.Event()
        self._tasks.start_soon(self._pass, name)
        await anyio.wait_all_tasks_blocked()

    async def _pass(self, name: str) -> None:
        with self._scopes[name]:
            async with self.lock.reading() if name[0] == "c" else self.lock.writing():
                self.inside.append(name)
                try:
                    await self._ends[name].wait()
                finally:
                    self.inside.remove(name)

    async def leave(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await anyio.wait_all_tasks_blocked()

    async def cancel(self, name: str) -> None:
        self._scopes[name].cancel()
        await anyio.wait_all_tasks_blocked()


async def test_those_who_come_later_do_not_pass_one_who_waits():
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            passage = Passage(tasks)
            for name in ("c1", "c2", "m1", "m2", "c3", "m3"):
                await passage.come(name)
            assert sorted(passage.inside) == ["c1", "c2"]
            await passage.leave("c1")
            assert passage.inside == ["c2"]
            await passage.leave("c2")
            assert sorted(passage.inside) == ["m1", "m2"]
            await passage.leave("m1", "m2")
            assert passage.inside == ["c3"]
            assert repr(passage.lock) == "<ReadWriteLock 1 reading, 1 waiting>"
            await passage.leave("c3")
            assert passage.inside == ["m3"]
            await passage.leave("m3")
            await passage.come("c4")
            assert passage.inside == ["c4"]
            await passage.leave("c4")


async def test_one_who_gives_up_waiting_holds_up_nobody():
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            passage = Passage(tasks)
            for name in ("c1", "m1", "c2"):
                await passage.come(name)
            await passage.cancel("m1")
            assert sorted(passage.inside) == ["c1", "c2"]
            await passage.come("m2")
            await passage.cancel("c1")
            await passage.cancel("c2")
            assert passage.inside == ["m2"]
            await passage.leave("m2")


@pytest.mark.loops("asyncio", "uvloop")
async def test_one_whose_turn_comes_as_he_is_cancelled_leaves(anyio_backend):
    """By asyncio itself: anyio lets one go on who is about to."""
    lock = ReadWriteLock()

    async def move():
        async with lock.writing():
            pass

    async with lock.reading():
        moving = asyncio.create_task(move())
        await anyio.wait_all_tasks_blocked()
    moving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await moving
    with anyio.fail_after(10):
        async with lock.reading():
            assert repr(lock) == "<ReadWriteLock 1 reading, 0 waiting>"
