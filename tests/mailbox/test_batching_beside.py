"""The command processor with two batches out: which may be so, what waits for both, and how it ends."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest

from mainspring.errors import MailboxClosedError, MailboxConnectionError
from mainspring.mailbox.batching import Batcher, Command

pytestmark = pytest.mark.anyio


class Number(Command):
    """From 100 on it fills a batch; a negative one must be alone."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value


class Store:
    """Holds every batch until it is let go, by the place at which it came."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.free: list[anyio.Event] = []
        self.undone: list[int] = []
        self.broken: set[int] = set()
        self.batcher: Batcher[Number] = Batcher(
            self.execute,
            undo=lambda command: self.undone.append(command.value),
            fills=lambda command: command.value >= 100,
            beside=lambda command: command.value >= 0,
            name="store",
        )

    async def execute(self, commands: list[Number]) -> None:
        place = len(self.batches)
        self.batches.append([command.value for command in commands])
        self.free.append(anyio.Event())
        await self.free[place].wait()
        if place in self.broken:
            raise MailboxConnectionError("lost")
        for command in commands:
            command.result = command.value

    def let_go(self, *places: int) -> None:
        for place in places:
            self.free[place].set()


@asynccontextmanager
async def calls(store: Store):
    """A task group for the callers, beside the runner."""
    async with anyio.create_task_group() as runner:
        runner.start_soon(store.batcher.run)
        try:
            async with anyio.create_task_group() as callers:
                yield callers
        finally:
            with anyio.move_on_after(1, shield=True):
                await store.batcher.close()


async def turns() -> None:
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


async def send(store: Store, callers, *values: int) -> None:
    async def call(value: int) -> None:
        await store.batcher.call(Number(value))

    for value in values:
        callers.start_soon(call, value)
        await turns()  # one after the other, on trio too


async def test_a_full_batch_leaves_beside_the_one_that_is_out():
    store = Store()
    async with calls(store) as callers:
        await send(store, callers, 100, 2, 3)
        assert store.batches == [[100]]
        await send(store, callers, 101)
        assert store.batches == [[100], [2, 3, 101]]
        store.let_go(0, 1)


@pytest.mark.parametrize(("out", "behind"), [([100], [2, 3]), ([1], [2, 100])])
async def test_what_does_not_fill_a_batch_is_alone_as_ever(out, behind):
    store = Store()
    async with calls(store) as callers:
        await send(store, callers, *out)
        await send(store, callers, *behind)
        assert store.batches == [out]
        store.let_go(0)
        await turns()
        assert store.batches == [out, behind]
        store.let_go(1)


async def test_there_are_never_more_than_two():
    store = Store()
    async with calls(store) as callers:
        await send(store, callers, 100, 101, 102, 103)
        assert store.batches == [[100], [101]]
        store.let_go(1)
        await turns()
        assert store.batches == [[100], [101], [102]]
        store.let_go(0, 2)
        await turns()
        store.let_go(3)


@pytest.mark.parametrize(("out", "behind"), [([100], [-2, 101]), ([-1], [2, 100])])
async def test_what_must_be_alone_is_alone(out, behind):
    store = Store()
    async with calls(store) as callers:
        await send(store, callers, *out)
        await send(store, callers, *behind)
        assert store.batches == [out]
        store.let_go(0)
        await turns()
        assert store.batches == [out, behind]
        store.let_go(1)


async def test_what_was_posted_goes_before_all_that_is_queued_and_alone():
    store = Store()
    async with calls(store) as callers:
        await send(store, callers, 100, 2)
        store.batcher.post(Number(-7))
        await send(store, callers, 101)
        assert store.batches == [[100]]
        store.let_go(0)
        await turns()
        assert store.batches == [[100], [-7, 2, 101]]
        store.let_go(1)


async def test_each_of_two_batches_has_its_own_results_and_errors():
    store = Store()
    store.broken.add(0)
    ends: dict[int, object] = {}

    async def call(value: int) -> None:
        try:
            ends[value] = await store.batcher.call(Number(value))
        except MailboxConnectionError as error:
            ends[value] = str(error)

    async with calls(store) as callers:
        callers.start_soon(call, 100)
        await turns()
        callers.start_soon(call, 101)
        await turns()
        store.let_go(1)
        await turns()
        assert ends == {101: 101}
        store.let_go(0)
    assert ends == {100: "lost", 101: 101}


async def test_a_caller_that_is_cancelled_while_two_are_out_has_its_own_command_undone():
    store = Store()
    async with calls(store) as callers:
        await send(store, callers, 100)
        with anyio.CancelScope() as scope:
            callers.start_soon(cancel_soon, scope)
            await store.batcher.call(Number(101))
        assert store.batches == [[100], [101]]
        store.let_go(0, 1)
        await turns()
        assert store.undone == [101]


async def cancel_soon(scope: anyio.CancelScope) -> None:
    await turns()
    scope.cancel()


async def test_a_close_waits_for_both_and_for_what_is_queued_behind_them():
    store = Store()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.batcher.run)
        await send(store, tasks, 100, 101, 2)
        tasks.start_soon(store.batcher.close)
        await turns()
        assert store.batches == [[100], [101]]
        store.let_go(1)
        await turns()
        assert store.batches == [[100], [101]]
        store.let_go(0)
        await turns()
        assert store.batches == [[100], [101], [2]]
        store.let_go(2)
    with pytest.raises(MailboxClosedError):
        await store.batcher.call(Number(3))


async def test_a_close_that_is_cancelled_refuses_all_that_is_queued():
    store = Store()
    refused: list[int] = []

    async def call(value: int) -> None:
        try:
            await store.batcher.call(Number(value))
        except MailboxClosedError:
            refused.append(value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.batcher.run)
        for value in (100, 101, 102, 3):
            tasks.start_soon(call, value)
            await turns()
        with anyio.move_on_after(0):
            await store.batcher.close()
    assert sorted(refused) == [3, 100, 101, 102]
