"""Simulated processes do what real ones do: signals, forks, ends, and what a spawner promises of them."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import anyio
import pytest

from mainspring.services.spawning import Launch, SpawnedProcess, SpawnError
from mainspring.testing import SimulatedProcess, SimulatedProgram, SimulatedSpawner, run_virtual

Run = Callable[..., Any]
TERM = int(signal.SIGTERM)


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run_virtual`` on each event loop."""
    return partial(run_virtual, backend=request.param)


class Heard:
    """A listener that keeps all that it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str, str]] = []
        self.news: list[tuple[float, dict[str, str]]] = []

    def on_line(self, stream: str, line: str) -> None:
        self.lines.append((anyio.current_time(), stream, line))

    def on_notify(self, news: Mapping[str, str]) -> None:
        self.news.append((anyio.current_time(), dict(news)))


async def start(
    program: Callable[[SimulatedProcess], Awaitable[int | None]], spawner: SimulatedSpawner
) -> tuple[SpawnedProcess, Heard]:
    spawner.programs["it"] = program
    heard = Heard()
    return await spawner.spawn(Launch("web", 1, ("it",)), heard), heard


def test_a_program_of_values_writes_gets_ready_and_ends(run: Run) -> None:
    async def main() -> None:
        async with SimulatedSpawner({}) as spawner:
            process, heard = await start(SimulatedProgram(lines=("a", "b"), ready_in=2, lives=3, returncode=7), spawner)
            assert (await process.wait()).status == 7
            await process.wait_empty()
            assert anyio.current_time() == 5
            assert heard.lines == [(0, "stdout", "a"), (0, "stdout", "b")]
            assert heard.news == [(2, {"READY": "1"})]
            (record,) = spawner.records
            assert (record.ready_at, record.ended_at, record.returncode) == (2, 5, 7)
            assert record.pid == record.family == process.pid
            assert process.memory is None

    run(main)


@pytest.mark.parametrize(
    ("program", "returncode", "after"),
    [
        (SimulatedProgram(), 0, 0),
        (SimulatedProgram(stops_in=4), 0, 4),
        (SimulatedProgram(stops_in=None), -9, 30),
        (SimulatedProgram(stops_in=None, dies_in=2), -9, 32),
        (SimulatedProgram(ready_in=None, stops_in=1), 0, 1),
    ],
    ids=["at once", "drains", "ignores SIGTERM", "needs a moment to die", "never ready"],
)
def test_sigterm_then_sigkill(run: Run, program: SimulatedProgram, returncode: int, after: float) -> None:
    async def main() -> None:
        async with SimulatedSpawner({}) as spawner:
            process, _ = await start(program, spawner)
            await anyio.sleep(10)
            process.send_signal(signal.SIGTERM)
            with anyio.move_on_after(30):
                await process.wait_empty()
            process.kill()
            await process.wait_empty()
            assert (await process.wait()).returncode == returncode
            assert anyio.current_time() == 10 + after
            assert spawner.records[0].told_at == 10
            assert spawner.records[0].killed_at == (40 if returncode == -9 else None)

    run(main)


def test_a_function_is_a_program(run: Run) -> None:
    async def program(process: SimulatedProcess) -> int:
        process.handle(signal.SIGHUP)
        process.ignore(signal.SIGUSR1)
        while (signum := await process.next_signal()) == signal.SIGHUP:
            process.write(f"reloaded by {signum}", "stderr")
        return 3

    async def main() -> None:
        async with SimulatedSpawner({}) as spawner:
            process, heard = await start(program, spawner)
            await anyio.sleep(1)
            for signum in (signal.SIGHUP, signal.SIGUSR1, signal.SIGHUP):
                process.send_signal(signum)
            await anyio.sleep(1)
            assert heard.lines == [(1, "stderr", "reloaded by 1")] * 2
            process.send_signal(signal.SIGTERM)  # which it does not handle
            assert (await process.wait()).returncode == -15

    run(main)


@pytest.mark.parametrize(
    ("how", "returncode", "limit"),
    [
        (lambda process: process.exit(4), 4, None),
        (lambda process: process.die(), -11, None),
        (lambda process: process.die(signal.SIGKILL, limit="memory"), -9, "memory"),
        (lambda process: 1 / 0, 1, None),
    ],
    ids=["exit", "signal", "limit", "error"],
)
def test_ends_of_a_program(run: Run, how: Callable[[SimulatedProcess], object], returncode: int, limit: str) -> None:
    async def program(process: SimulatedProcess) -> None:
        how(process)

    async def main() -> None:
        async with SimulatedSpawner({}) as spawner:
            process, heard = await start(program, spawner)
            end = await process.wait()
            assert (end.returncode, end.limit) == (returncode, limit)
            assert [line for *_, line in heard.lines] == (
                ["ZeroDivisionError: division by zero"] if returncode == 1 else []
            )

    run(main)


def test_what_a_process_forks_goes_on_and_the_family_is_empty_without_it(run: Run) -> None:
    async def main() -> None:
        async with SimulatedSpawner({}) as spawner:
            program = SimulatedProgram(lives=1, children=(SimulatedProgram(), SimulatedProgram(stops_in=None)))
            process, _ = await start(program, spawner)
            await process.wait()
            with anyio.move_on_after(5):
                await process.wait_empty()
            assert anyio.current_time() == 6
            assert len(spawner.running("web")) == 2
            process.send_signal(signal.SIGTERM)  # to all that is left, as the process itself has ended
            await anyio.sleep(1)
            assert [record.told_at for record in spawner.records] == [None, 6, 6]
            assert len(spawner.running()) == 1
            process.kill()
            await process.wait_empty()
            assert [record.returncode for record in spawner.records] == [0, 0, -9]

    run(main)


def test_what_appears_while_all_is_killed_is_killed(run: Run) -> None:
    async def forks(process: SimulatedProcess) -> None:
        try:
            await anyio.sleep(100)
        finally:
            process.fork(SimulatedProgram(stops_in=None))

    async def main() -> None:
        async with SimulatedSpawner({}) as spawner:
            process, _ = await start(forks, spawner)
            await anyio.sleep(1)
            process.kill()
            await process.wait_empty()
            assert [record.returncode for record in spawner.records] == [-9, -9]

    run(main)


def test_leaving_kills_and_waits_and_a_cancellation_reaches_no_process(run: Run) -> None:
    async def main() -> None:
        spawner = SimulatedSpawner({})
        with anyio.move_on_after(5):
            async with spawner:
                await start(SimulatedProgram(stops_in=None, dies_in=3), spawner)
                try:
                    await anyio.sleep(100)
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(2)
                    assert len(spawner.running()) == 1
        (record,) = spawner.records
        assert (record.killed_at, record.ended_at, record.abandoned) == (7, 10, True)
        with pytest.raises(SpawnError):
            await spawner.spawn(Launch("web", 1, ("it",)), Heard())

    run(main)


def test_what_cannot_be_started_and_what_is_cancelled_meanwhile(run: Run) -> None:
    async def main() -> None:
        async with SimulatedSpawner({"busy": SpawnError("busy: no memory")}) as spawner:
            with pytest.raises(SpawnError, match="none: there is no such program"):
                await spawner.spawn(Launch("web", 1, ("none",)), Heard())
            with pytest.raises(SpawnError, match="no memory"):
                await spawner.spawn(Launch("web", 1, ("busy",)), Heard())
        async with SimulatedSpawner({}, latency=lambda: 1.0) as spawner:
            with anyio.move_on_after(1.5) as scope:
                await start(SimulatedProgram(), spawner)
            assert scope.cancelled_caught
            await anyio.sleep(2)
            assert not spawner.running()
            assert spawner.records[0].killed_at is not None

    run(main)


def test_latency_delays_starts_and_news(run: Run) -> None:
    async def main() -> None:
        async with SimulatedSpawner({}, latency=lambda: 0.25) as spawner:
            process, _ = await start(SimulatedProgram(lives=1), spawner)
            assert anyio.current_time() == 0.5
            await process.wait()
            assert anyio.current_time() == 1.5
            assert spawner.records[0].ended_at == 1.25

    run(main)


def test_equal_seeds_crash_at_equal_times(run: Run) -> None:
    async def main(seed: int) -> list[float | None]:
        async with SimulatedSpawner({}, seed=seed) as spawner:
            for _ in range(3):
                process, _ = await start(SimulatedProgram(crashes_every=60), spawner)
                assert (await process.wait()).returncode == -11
        return [record.ended_at for record in spawner.records]

    assert run(main, 1) == run(main, 1) != run(main, 2)


def test_doubles_are_families_that_overlap(run: Run) -> None:
    async def main() -> None:
        async with SimulatedSpawner(
            {"it": SimulatedProgram(lives=1, children=(SimulatedProgram(lives=5),))}
        ) as spawner:
            for replica, delay in ((1, 0), (2, 6), (1, 6)):
                await spawner.spawn(Launch("web", replica, ("it",)), Heard())
                await anyio.sleep(delay)
            assert not spawner.doubles()
            await spawner.spawn(Launch("web", 1, ("it",)), Heard())
            await anyio.sleep(2)
            await spawner.spawn(Launch("web", 1, ("it",)), Heard())
            assert len(spawner.doubles()) == 1

    run(main)


def test_an_error_of_the_listener_is_no_crash_of_the_program(run: Run) -> None:
    class Broken(Heard):
        def on_notify(self, news: Mapping[str, str]) -> None:
            raise LookupError("of the listener")

    async def main() -> None:
        async with SimulatedSpawner({"it": SimulatedProgram()}) as spawner:
            await spawner.spawn(Launch("web", 1, ("it",)), Broken())
            await anyio.sleep(1)

    with pytest.raises(BaseExceptionGroup) as caught:
        run(main)
    assert caught.group_contains(LookupError, match="of the listener")
