"""A handler that uses asyncio and runs on trio: the failure says so, wherever it is seen."""

from __future__ import annotations

import asyncio
import warnings
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from mainspring import DeadLetterPolicy, InMemoryMailbox, LoopGroup, MainLoop, RetryPolicy, WrongEventLoopError
from mainspring.runtime.wrong_loop import explained
from mainspring.testing import run_virtual


async def sleep(_: int) -> None:
    await asyncio.sleep(3600)


async def yield_once(_: int) -> None:
    await asyncio.sleep(0)


async def wait_for(_: int) -> None:
    await asyncio.wait_for(asyncio.Event().wait(), 60)


async def wait_for_an_event(_: int) -> None:
    await asyncio.Event().wait()


async def in_an_executor(_: int) -> None:
    await asyncio.get_running_loop().run_in_executor(None, int)


async def in_a_task_group(_: int) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(sleep, 0)


HANDLERS = [sleep, yield_once, wait_for, wait_for_an_event, in_an_executor, in_a_task_group]


async def dead_letter_of(handler: Any) -> Any:
    jobs = InMemoryMailbox("jobs", body=int)
    loop = MainLoop(jobs, handler, retry=RetryPolicy(1), dead_letter=DeadLetterPolicy(max_attempts=2))
    await jobs.send(1)
    await LoopGroup([loop]).run(install_signals=False, until_empty=True)
    (letter,) = await jobs.dead_letters()
    return letter


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_on_trio_its_failure_says_where_to_run_it(handler: Any, virtual_clock: Any, caplog: Any) -> None:
    letter = await dead_letter_of(handler)
    begin = f"the handler {handler.__name__} uses asyncio, and runs on trio ("
    assert letter.error.startswith(begin)
    assert "`mainspring run --loop asyncio`" in letter.error
    assert "\n" not in letter.error
    assert (letter.error_type, letter.attempt) == ("WrongEventLoopError", 2)
    assert "The above exception was the direct cause" in letter.traceback
    assert f"in {handler.__name__}" in letter.traceback
    assert begin in caplog.text


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_on_asyncio_its_errors_are_its_own(virtual_clock: Any) -> None:
    async def handle(_: int) -> None:
        raise RuntimeError("no running event loop")

    letter = await dead_letter_of(handle)
    assert (letter.error, letter.error_type) == ("no running event loop", "RuntimeError")


async def test_an_error_of_the_handler_is_left_as_it_is(virtual_clock: Any) -> None:
    async def fail(_: int) -> None:
        raise RuntimeError("no running event")

    def in_a_thread(_: int) -> None:
        asyncio.get_running_loop()

    for handler in (fail, in_a_thread):
        assert (await dead_letter_of(handler)).error_type == "RuntimeError"


def test_a_run_in_virtual_time_says_so_too() -> None:
    with pytest.raises(
        WrongEventLoopError, match=r"^sleep uses asyncio, and runs on trio .*backend=\"asyncio\""
    ) as caught:
        run_virtual(sleep, 1)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_lifespan_says_so_too() -> None:
    @asynccontextmanager
    async def lifespan() -> Any:
        yield asyncio.get_running_loop()

    group = LoopGroup([MainLoop(InMemoryMailbox("jobs"), sleep)], lifespan=lifespan)
    with pytest.raises(WrongEventLoopError, match=r"^the lifespan uses asyncio"):
        run_virtual(partial(group.run, install_signals=False))


def test_outside_any_event_loop_an_error_stays() -> None:
    error = RuntimeError("no running event loop")
    assert explained(error, "code") is error


def test_an_error_of_other_code_inside_asyncio_is_no_complaint() -> None:
    async def main() -> None:
        for error in (ValueError("no running event loop"), TypeError("no running event loop"), AttributeError("x")):
            assert explained(error, "code") is error

    with warnings.catch_warnings():
        run_virtual(main)
