"""SpuriousAsError and is_spurious_cancellation: which cancellations are an error of what was called, and which go on."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from mainspring.errors import TaskExitError
from mainspring.runtime.cancellation import SpuriousAsError, is_spurious_cancellation

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]
ON_ASYNCIO = pytest.mark.loops("asyncio", "uvloop")


async def cancelled_future():
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def cancelled_task():
    asyncio.current_task().cancel()
    await anyio.sleep(10)


@ON_ASYNCIO
@pytest.mark.parametrize("raise_it", [cancelled_future, cancelled_task])
async def test_a_spurious_cancellation_is_an_error_and_the_task_goes_on(raise_it):
    with pytest.raises(TaskExitError, match=r"^the call was cancelled by itself$") as raised:
        async with SpuriousAsError("the call was cancelled by itself"):
            await raise_it()
    assert isinstance(raised.value.__cause__, asyncio.CancelledError)
    assert not asyncio.current_task().cancelling()
    await anyio.sleep(0)


async def test_the_cancellation_of_a_scope_goes_on():
    reached = False
    with anyio.CancelScope() as scope:
        async with SpuriousAsError():
            scope.cancel()
            await anyio.sleep(10)
        reached = True
    assert scope.cancelled_caught
    assert not reached


@ON_ASYNCIO
async def test_in_a_scope_that_is_cancelled_no_cancellation_is_spurious():
    """A cancelled future may be how the scope's cancellation has come here."""
    raised = None
    try:
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with SpuriousAsError():
                await cancelled_future()
    except BaseException as error:
        raised = error
    assert isinstance(raised, asyncio.CancelledError)


async def test_other_errors_pass_as_they_are():
    for kind in (LookupError, KeyboardInterrupt):
        with pytest.raises(kind):
            async with SpuriousAsError():
                raise kind
    async with SpuriousAsError():
        await anyio.sleep(0)


async def test_on_trio_no_cancellation_is_spurious(anyio_backend_name):
    """On asyncio neither, where a scope has cancelled."""
    answers = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep(10)
        except anyio.get_cancelled_exc_class():
            answers.append(await is_spurious_cancellation())
            raise
    assert answers == [False]
