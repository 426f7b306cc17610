"""OffloadPool with interpreters: real ones from Python 3.14 on; before, how they are dealt with."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import offload_work
from mainspring import DeadLetterPolicy, InMemoryMailbox, MainLoop, OffloadPool
from mainspring.errors import (
    ConfigError,
    OffloadPickleError,
    OffloadTimeoutError,
    OffloadWorkerDiedError,
    TaskExitError,
)
from support import background, settled

pytestmark = pytest.mark.anyio

HAS_THEM = sys.version_info >= (3, 14)


class StandIn:
    """An interpreter that is none: it does all in this one."""

    made: list[StandIn]

    def __init__(self):
        self.made.append(self)
        self.closed = False

    def exec(self, code):
        assert code.startswith("import sys; sys.path[:] = [")

    def call(self, fn, *args):
        assert not self.closed
        return fn(*args)

    def close(self):
        self.closed = True


@pytest.fixture
def made(monkeypatch):
    """The stand-ins that were made."""
    StandIn.made = []
    module = ModuleType("concurrent.interpreters")
    module.create = StandIn
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return StandIn.made


@pytest.mark.skipif(HAS_THEM, reason="this Python has interpreters")
def test_a_python_without_interpreters_says_so_when_the_pool_is_made():
    with pytest.raises(ConfigError, match=r"interpreters need Python 3\.14 or newer, and this is 3\.\d+; use kind="):
        OffloadPool("interpreter")


@pytest.mark.skipif(not HAS_THEM, reason="interpreters need Python 3.14")
async def test_calls_in_interpreters():
    async with OffloadPool("interpreter", workers=1) as pool:
        assert await pool.run(offload_work.add, 1, 2) == 3
        with pytest.raises(KeyError, match="key"):
            await pool.run(offload_work.raise_it, KeyError, "key")
        with pytest.raises(OffloadTimeoutError):
            await pool.run(offload_work.sleep, 0.5, timeout=0.1)
        await pool.wait_for_late()
        assert await pool.run(offload_work.add, 1, 2) == 3


async def test_an_interpreter_is_used_again_and_closed_with_the_pool(made):
    async with OffloadPool("interpreter", workers=1) as pool:
        for _ in range(2):
            assert await pool.run(offload_work.add, 1, 2) == 3
        with pytest.raises(OffloadPickleError, match="a_lambda: its result"):
            await pool.run(offload_work.a_lambda)
        (interpreter,) = made
        assert not interpreter.closed
    assert interpreter.closed


async def test_an_interpreter_that_fails_is_replaced(made, monkeypatch):
    async with OffloadPool("interpreter", workers=1) as pool:
        with monkeypatch.context() as broken:
            broken.setattr(StandIn, "call", lambda self, *args: 1 / 0)
            with pytest.raises(OffloadWorkerDiedError, match="the interpreter of add failed: ZeroDivisionError"):
                await pool.run(offload_work.add, 1, 2)
        assert await pool.run(offload_work.add, 1, 2) == 3
    assert [interpreter.closed for interpreter in made] == [True, True]
    assert len(made) == 2


async def test_a_cancellation_that_arises_in_an_interpreter_is_an_error(made):
    fn = offload_work.be_cancelled_in_a_loop_of_its_own
    async with OffloadPool("interpreter", workers=1) as pool:
        for call in (pool.run, pool.run_to_the_end):
            with pytest.raises(TaskExitError, match="raised a spurious cancellation"):
                await call(fn)
    box = InMemoryMailbox()
    loop = MainLoop(box, fn, body=str, offload=OffloadPool("interpreter"), dead_letter=DeadLetterPolicy(max_attempts=1))
    async with background(loop):
        await box.send("job")
        await settled(box)
        assert loop.outcomes == {"dead_lettered": 1}
