"""A command of a probe or hook: its end, its last output, and nothing of it left."""

from __future__ import annotations

import tracemalloc

import anyio
import pytest

from mainspring.services.commands import EMPTY_WITHIN, MAX_OUTPUT, CommandResult, run_command
from mainspring.services.spawning import Launch, ProcessEnd, SpawnError
from services_support import Play, PlayingSpawner

pytestmark = pytest.mark.anyio


async def run(play, timeout=10):
    spawner = PlayingSpawner({"command": play})
    result = await run_command(spawner, Launch("shop", 1, ("command",)), timeout=timeout)
    return result, spawner.processes[0]


async def test_its_end_and_its_output_are_told(virtual_clock):
    result, _ = await run(Play(("one", "two"), seconds=3, returncode=7))
    assert result == CommandResult(ProcessEnd(7), "one\ntwo\n")
    assert virtual_clock.now == 3


async def test_what_it_has_started_is_killed_at_its_end(virtual_clock):
    result, process = await run(Play(seconds=1, leaves=3600))
    assert result.end == ProcessEnd(0)
    assert process.gone
    assert virtual_clock.now == 1


async def test_it_is_killed_when_its_time_is_up(virtual_clock):
    result, process = await run(Play(seconds=60), timeout=10)
    assert result == CommandResult(None, "")
    assert process.killed_at == 10
    assert virtual_clock.now == 10


@pytest.mark.parametrize(("seconds", "waited"), [(2, 2), (600, EMPTY_WITHIN)])
async def test_it_is_waited_for_until_nothing_is_left_but_not_for_ever(virtual_clock, seconds, waited):
    _, process = await run(Play(seconds=60, hard_to_kill=seconds), timeout=10)
    assert virtual_clock.now == 10 + waited
    assert process.gone == (seconds == waited)


async def test_cancelled_it_leaves_nothing(virtual_clock):
    spawner = PlayingSpawner({"command": Play(seconds=60, hard_to_kill=1)})
    with anyio.move_on_after(5):
        await run_command(spawner, Launch("shop", 1, ("command",)), timeout=10)
    assert virtual_clock.now == 6
    assert spawner.processes[0].gone


async def test_one_that_cannot_be_started_raises():
    with pytest.raises(SpawnError, match="no such program"):
        await run(Play(refused="no such program: command"))


@pytest.mark.parametrize("lines", [("x" * 79,) * 1000, ("ä" * 5000, "end"), ("ä" * 5000,)])
async def test_of_a_flood_the_last_is_kept(virtual_clock, lines):
    result, _ = await run(Play(lines))
    assert MAX_OUTPUT - 2 <= len(result.output.encode()) <= MAX_OUTPUT
    assert "".join(f"{line}\n" for line in lines).endswith(result.output)


async def test_the_memory_for_a_flood_is_bounded(virtual_clock):
    flood = Play(("x" * 79,) * 20_000)
    tracemalloc.start()
    try:
        await run(flood)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (CommandResult(ProcessEnd(0), "fine\n"), None),
        (CommandResult(ProcessEnd(3)), "exit status 3"),
        (CommandResult(ProcessEnd(3), "one\n no route \n\n"), "exit status 3: no route"),
        (CommandResult(ProcessEnd(-9)), "killed by SIGKILL"),
        (CommandResult(ProcessEnd(-9, "memory limit")), "killed by SIGKILL (memory limit)"),
        (CommandResult(ProcessEnd(-40)), "killed by signal 40"),
        (CommandResult(None, "half"), "its time was up, and it was killed"),
    ],
)
def test_a_failure_in_words(result, error):
    assert result.error == error
