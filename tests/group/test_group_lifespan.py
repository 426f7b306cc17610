"""``LoopGroup(lifespan=)``: what handlers share is open while the loops run, and closed after the drain."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest
from group_support import box, running

from mainspring import Context, DeadLetterPolicy, LoopGroup, MainLoop, RetryPolicy, Tasks
from mainspring.errors import ConfigError


class Resources:
    """What a test opens, and how far it is."""

    def __init__(self):
        self.log = []

    @asynccontextmanager
    async def open(self):
        self.log.append("open")
        try:
            async with anyio.create_task_group() as tasks:  # as clients with tasks of their own have
                tasks.start_soon(anyio.sleep_forever)
                yield self
                tasks.cancel_scope.cancel()
        finally:
            self.log.append("closed")


async def test_handlers_have_it_from_the_first_message_until_the_drain_is_over(virtual_clock):
    shared, mailbox = Resources(), box()

    async def handle(body: dict, ctx: Context[Resources]) -> None:
        ctx.resources.log.append("begun")
        await anyio.sleep(5)
        ctx.resources.log.append("done")

    group = LoopGroup([MainLoop(mailbox, handle)], lifespan=shared.open)
    await mailbox.send({})
    async with running(group):
        await anyio.sleep(1)
        assert await group.shutdown()
    assert shared.log == ["open", "begun", "done", "closed"]


async def test_each_run_opens_it_anew_also_embedded_and_with_tasks(virtual_clock):
    shared, tasks = Resources(), Tasks("memory://lifespan")

    @tasks.task
    async def work(ctx: Context[Resources], number: int) -> int:
        ctx.resources.log.append(number)
        return number

    group = LoopGroup([tasks.loop()], lifespan=shared.open)
    async with tasks:
        for number in (1, 2):
            async with group:
                assert await work.request(number) == number
    assert shared.log == ["open", 1, "closed", "open", 2, "closed"]


async def test_an_error_at_the_start_ends_the_group_before_any_loop_has_begun(virtual_clock):
    mailbox, seen = box(), []

    @asynccontextmanager
    async def lifespan():
        raise OSError("no database")
        yield

    async def handle(body: dict) -> None:
        seen.append(body)

    group = LoopGroup([MainLoop(mailbox, handle)], lifespan=lifespan)
    await mailbox.send({})
    with pytest.raises(OSError, match="no database"):
        await group.run(install_signals=False)
    assert seen == []
    assert await mailbox.approximate_count() == 1


async def test_an_error_meanwhile_ends_the_group_and_is_raised(virtual_clock):
    @asynccontextmanager
    async def lifespan():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            yield

    async def fail():
        await anyio.sleep(3)
        raise OSError("the pool is broken")

    async def handle(body: dict) -> None: ...

    group = LoopGroup([MainLoop(box(), handle)], lifespan=lifespan)
    began = anyio.current_time()
    with pytest.raises(OSError, match="the pool is broken"):
        await group.run(install_signals=False)
    assert anyio.current_time() - began == 3


async def test_an_error_at_the_end_is_raised_after_the_drain(virtual_clock):
    @asynccontextmanager
    async def lifespan():
        yield
        raise OSError("not flushed")

    async def handle(body: dict) -> None: ...

    mailbox = box()
    await mailbox.send({})
    group = LoopGroup([MainLoop(mailbox, handle)], lifespan=lifespan)
    with pytest.raises(OSError, match="not flushed"):
        await group.run(install_signals=False, until_empty=True)
    assert (await mailbox.counts()).settled == 1


async def test_a_closing_that_hangs_has_the_grace_and_is_in_the_report(virtual_clock):
    @asynccontextmanager
    async def lifespan():
        yield
        await anyio.sleep_forever()

    async def handle(body: dict) -> None: ...

    group = LoopGroup([MainLoop(box(), handle)], lifespan=lifespan, cancel_grace=7)
    async with running(group):
        began = anyio.current_time()
        await group.shutdown()
    assert anyio.current_time() - began == 7
    assert "lifespan: cancelled" in str(group.report)


async def test_a_shutdown_while_it_opens_ends_the_opening(virtual_clock):
    log = []

    @asynccontextmanager
    async def lifespan():
        try:
            await anyio.sleep_forever()
            yield
        finally:
            log.append("left")

    async def handle(body: dict) -> None: ...

    group = LoopGroup([MainLoop(box(), handle)], lifespan=lifespan)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: group.run(install_signals=False))
            await anyio.sleep(1)
            group.request_shutdown()
    assert log == ["left"]


async def test_handlers_that_are_cancelled_with_the_group_can_use_it_as_they_clean_up(virtual_clock):
    shared, mailbox = Resources(), box()

    async def handle(body: dict, ctx: Context[Resources]) -> None:
        try:
            await anyio.sleep(100)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(2)
                ctx.resources.log.append("cleaned up")

    group = LoopGroup([MainLoop(mailbox, handle)], lifespan=shared.open)
    await mailbox.send({})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: group.run(install_signals=False))
        await anyio.sleep(1)
        tasks.cancel_scope.cancel()
    assert shared.log == ["open", "cleaned up", "closed"]


async def test_its_closing_is_not_cut_off_at_once_where_the_group_is_cancelled(virtual_clock):
    log = []

    @asynccontextmanager
    async def lifespan():
        yield
        await anyio.sleep(3)
        log.append("flushed")

    @asynccontextmanager
    async def hanging():
        yield
        await anyio.sleep_forever()

    async def handle(body: dict) -> None: ...

    for make, took in ((lifespan, 3), (hanging, 5)):
        group = LoopGroup([MainLoop(box(), handle)], lifespan=make)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: group.run(install_signals=False))  # noqa: B023
            await anyio.sleep(1)
            began = anyio.current_time()
            tasks.cancel_scope.cancel()
        assert anyio.current_time() - began == took
    assert log == ["flushed"]


async def test_without_one_it_is_a_fault_of_configuration(virtual_clock):
    mailbox = box()

    async def handle(body: dict, ctx: Context) -> None:
        print(ctx.resources)

    loop = MainLoop(mailbox, handle, dead_letter=DeadLetterPolicy(3), retry=RetryPolicy(initial_delay=0))
    await mailbox.send({})
    await LoopGroup([loop]).run(install_signals=False, until_empty=True)
    (letter,) = await mailbox.dead_letters()
    assert letter.attempt == 1
    assert "ctx.resources: nothing was opened" in letter.error


def test_what_is_no_lifespan_is_refused():
    async def generator():
        yield

    async def coroutine(): ...

    for wrong, text in (
        (generator, "gives no async context manager; decorate it"),
        (coroutine, "gives no async context manager; decorate it"),
        (Resources().open(), "the function itself, without calling it"),
        (7, "must be a function, not 7"),
    ):
        with pytest.raises(ConfigError, match=text):
            LoopGroup([], lifespan=wrong)
