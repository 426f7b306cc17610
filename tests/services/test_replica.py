"""A replica of a service in virtual time: how it starts, what follows an end, how it is stopped."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from replica_play import POLICY, Program, lifecycle, playing, turns, virtually

from mainspring.events import (
    ServiceGivenUp,
    ServiceOutput,
    ServiceProcessEnded,
    ServiceProcessStarted,
    ServiceStartFailed,
)
from mainspring.policies import RestartPolicy
from mainspring.services.restarts import RestartType
from mainspring.services.spawning import SpawnError
from mainspring.services.spec import Replacement, ShutdownSettings, StartupSettings
from mainspring.testing import SimulatedProcess, SimulatedProgram, run_virtual

if TYPE_CHECKING:
    from mainspring.services.replica import Replica

STUBBORN = SimulatedProgram(stops_in=None)
CRASHES = SimulatedProgram(lives=3, returncode=1)
NEVER_READY = SimulatedProgram(ready_in=None)


async def dies_at_once(process: SimulatedProcess) -> int:
    return 7


# ------------------------------------------------------------------------------------------------------------ the start


def test_a_life_from_start_to_stop() -> None:
    async def main() -> None:
        async with playing(SimulatedProgram(ready_in=2, stops_in=3, lines=("hello",))) as play:
            await anyio.sleep(10)
            assert play.replica.pid == play.mains[0].pid
            assert play.replica.life.uptime(10) == 8
            play.replica.request_stop()
            play.replica.request_stop()
            assert not (await play.end()).failed
            assert play.replica.pid is None
            assert play.states == [(0, "starting"), (2, "running"), (10, "stopping"), (13, "stopped")]
            ((at, started),) = play.of(ServiceProcessStarted)
            assert (at, started.pid) == (0, play.mains[0].pid)
            ((at, ended),) = play.of(ServiceProcessEnded)
            assert (at, ended.told, ended.restart_in, ended.status) == (13, True, None, 0)
            assert [event.line for _, event in play.of(ServiceOutput)] == ["hello"]

    virtually(main)


@pytest.mark.parametrize("ready_after", [0.0, 1.0, 5.0])
def test_a_program_that_tells_nothing_is_ready_when_it_has_run_a_while(ready_after: float) -> None:
    async def main() -> None:
        async with playing(NEVER_READY, ready_after=ready_after) as play:
            await anyio.sleep(60)
            assert play.states == [(0, "starting"), (ready_after, "running")]

    virtually(main)


def test_a_program_that_tells_nothing_and_ends_at_once_has_failed_to_start() -> None:
    async def main() -> None:
        async with playing(dies_at_once, ready_after=1) as play:
            ending = await play.end()
            assert ending.failed
            assert ending.status == 7
            assert "3 tries" in ending.reason
            assert [str(event.error) for _, event in play.of(ServiceStartFailed)] == [
                "exit status 7 before it was ready"
            ] * 3

    virtually(main)


def test_a_ready_line() -> None:
    async def main() -> None:
        async def slow(process: SimulatedProcess) -> None:
            await anyio.sleep(4)
            process.write("listening on 80", "stderr")
            await anyio.sleep_forever()

        async with playing(slow, ready_line="listening") as play:
            await anyio.sleep(60)
            assert play.states == [(0, "starting"), (4, "running")]

    virtually(main)


@pytest.mark.parametrize(
    ("program", "error", "starts"),
    [
        (NEVER_READY, "not ready within 60 s", [0, 61, 123]),
        (SimulatedProgram(ready_in=None, stops_in=5), "not ready within 60 s", [0, 66, 133]),
        (dies_at_once, "exit status 7 before it was ready", [0, 1, 3]),
        (SpawnError("main: no such program"), "main: no such program", [0, 1, 3]),
    ],
    ids=["hangs", "hangs and stops slowly", "ends", "cannot be started"],
)
def test_failed_starts_are_tried_again_and_then_given_up(
    program: Program | Exception, error: str, starts: list[float]
) -> None:
    async def main() -> None:
        async with playing(program) as play:
            ending = await play.end()
            assert ending.failed
            assert ending.status
            assert error in ending.reason
            assert play.replica.error is not None
            assert error in play.replica.error
            failures = [event for _, event in play.of(ServiceStartFailed)]
            assert [event.error for event in failures] == [error] * 3
            assert [event.restart_in for event in failures] == [1, 2, None]
            if not isinstance(program, Exception):
                assert play.starts == starts
            ((at, given_up),) = play.of(ServiceGivenUp)
            assert given_up.core
            assert at == play.ended_at
            assert [state for _, state in play.states][-2:] == ["stopping", "stopped"]

    virtually(main)


def test_a_start_may_ask_for_more_time() -> None:
    async def main() -> None:
        async def slow(process: SimulatedProcess) -> None:
            await anyio.sleep(50)
            process.notify(EXTEND_TIMEOUT_USEC="100000000")
            await anyio.sleep(95)
            process.notify(READY="1")
            await anyio.sleep_forever()

        async with playing(slow) as play:
            await play.running()
            assert play.states[-1] == (145, "running")

    virtually(main)


def test_before_each_start_it_waits_for_its_turn() -> None:
    async def main() -> None:
        waits: list[float] = []

        async def turn(replica: Replica) -> None:
            waits.append(anyio.current_time())
            await anyio.sleep(10)

        async with playing(CRASHES, before_start=turn) as play:
            await anyio.sleep(25)
            assert waits == [0, 14]
            assert play.starts == [10, 24]

    virtually(main)


def test_the_environment_and_the_placeholders() -> None:
    async def main() -> None:
        async with playing(environment={"PORT": "800{replica}", "PATH": "/usr/bin"}) as play:
            await play.running()
            environment = play.mains[0].launch.environment
            assert environment["PATH"] == "/usr/bin"
            assert environment["PORT"] == "8001"
            assert environment["MAINSPRING_SERVICE"] == "web"
            assert environment["MAINSPRING_REPLICA"] == "1"
            assert play.mains[0].launch.notify

    virtually(main)


@pytest.mark.parametrize(
    ("user", "left"),
    [(None, {"HOME": "/root", "LOGNAME": "root"}), ("web", {"LOGNAME": "shop"})],
    ids=["its own", "another"],
)
def test_the_home_of_the_supervisor_is_not_that_of_another_user(user: str | None, left: dict[str, str]) -> None:
    async def main() -> None:
        supervisors = {"HOME": "/root", "LOGNAME": "root"}
        own = {} if user is None else {"LOGNAME": "shop"}
        async with playing(user=user, environment=own, supervisors=supervisors) as play:
            await play.running()
            environment = play.mains[0].launch.environment
            assert {name: environment[name] for name in ("HOME", "USER", "LOGNAME") if name in environment} == left

    virtually(main)


# ------------------------------------------------------------------------------------------------- what follows an end


def test_a_service_that_crashes_is_restarted_after_growing_delays_and_then_given_up() -> None:
    async def main() -> None:
        policy = RestartPolicy(max_retries=5, initial_delay=1, max_delay=6, backoff_factor=2, jitter="none")
        asked: list[float] = []
        async with playing(
            CRASHES, lifecycle=lifecycle(policy=policy), on_restart=lambda _: asked.append(anyio.current_time())
        ) as play:
            ending = await play.end()
            assert ending.failed
            assert ending.status == 1
            assert "5 times" in ending.reason
            assert play.starts == [0, 4, 9, 16, 25, 34]  # 3 seconds each, and pauses of 1, 2, 4, 6 and 6
            told = [(event.restart_in, event.restarts, event.told) for _, event in play.of(ServiceProcessEnded)]
            assert told == [(1, 1, False), (2, 2, False), (4, 3, False), (6, 4, False), (6, 5, False), (None, 5, False)]
            assert asked == [3, 7, 12, 19, 28]
            assert len(play.of(ServiceGivenUp)) == 1
            assert play.states[:4] == [(0, "starting"), (0, "running"), (3, "restarting"), (4, "starting")]
            assert play.states[-2:] == [(37, "stopping"), (37, "stopped")]

    virtually(main)


def test_a_run_that_was_well_for_long_clears_the_count() -> None:
    async def main() -> None:
        program = turns(CRASHES, CRASHES, SimulatedProgram(ready_in=100, lives=300, returncode=1), CRASHES)
        settings = lifecycle(startup=StartupSettings(timeout=200), policy=POLICY)
        async with playing(program, lifecycle=settings) as play:
            await anyio.sleep(450)
            counts = [event.restarts for _, event in play.of(ServiceProcessEnded)]
            assert counts[:4] == [1, 2, 1, 2]
            assert play.replica.life.total_restarts >= 4

    virtually(main)


def test_the_time_before_it_was_ready_is_no_health() -> None:
    async def main() -> None:
        program = turns(CRASHES, SimulatedProgram(ready_in=290, lives=20, returncode=1), CRASHES)
        async with playing(program, lifecycle=lifecycle(startup=StartupSettings(timeout=400))) as play:
            await anyio.sleep(315)
            assert [event.restarts for _, event in play.of(ServiceProcessEnded)] == [1, 2]

    virtually(main)


def test_failures_to_start_and_failures_in_running_are_counted_apart() -> None:
    async def main() -> None:
        program = turns(
            CRASHES, dies_at_once, dies_at_once, CRASHES, dies_at_once, dies_at_once, CRASHES, SimulatedProgram()
        )
        async with playing(program) as play:
            await anyio.sleep(60)
            assert [event.restarts for _, event in play.of(ServiceProcessEnded)] == [1, 2, 3]
            assert [event.restart_in for _, event in play.of(ServiceStartFailed)] == [1, 2, 1, 2]
            assert play.replica.life.counts.restarts == 3
            assert play.replica.pid is not None

    virtually(main)


def test_an_end_tells_its_restarts_and_a_failed_start_the_failed_starts() -> None:
    async def main() -> None:
        program = turns(CRASHES, dies_at_once, dies_at_once, SimulatedProgram(lives=1, returncode=42))
        async with playing(program, no_restart_statuses={42}) as play:
            await play.end()
            assert [event.restarts for _, event in play.of(ServiceProcessEnded)] == [1, 1]
            assert [event.restarts for _, event in play.of(ServiceStartFailed)] == [1, 2]

    virtually(main)


def test_failed_starts_before_a_run_that_was_ready_are_over() -> None:
    async def main() -> None:
        program = turns(dies_at_once, dies_at_once, SimulatedProgram(), dies_at_once, SimulatedProgram())
        async with playing(program) as play:
            await anyio.sleep(60)
            play.replica.request_restart("an operator wants it")
            await anyio.sleep(60)
            assert play.replica.ending is None
            assert [event.restart_in for _, event in play.of(ServiceStartFailed)] == [1, 2, 1]

    virtually(main)


@pytest.mark.parametrize("most", [0, 1, 5])
def test_the_delay_after_a_failed_start_does_not_depend_on_the_number_of_restarts(most: int) -> None:
    async def main() -> None:
        policy = RestartPolicy(max_retries=most, initial_delay=1, max_delay=3, jitter="none")
        tries = lifecycle(startup=StartupSettings(max_retries=5), policy=policy)
        async with playing(dies_at_once, lifecycle=tries) as play:
            await play.end()
            assert [event.restart_in for _, event in play.of(ServiceStartFailed)] == [1, 2, 3, 3, None]

    virtually(main)


@pytest.mark.parametrize(
    ("restart", "program", "again", "failed"),
    [
        ("permanent", SimulatedProgram(lives=1), True, None),
        ("permanent", SimulatedProgram(lives=1, returncode=1), True, None),
        ("transient", SimulatedProgram(lives=1), False, False),
        ("transient", SimulatedProgram(lives=1, returncode=1), True, None),
        ("transient", SimulatedProgram(lives=1, returncode=-9), True, None),
        ("temporary", SimulatedProgram(lives=1), False, False),
        ("temporary", SimulatedProgram(lives=1, returncode=3), False, True),
        ("temporary", NEVER_READY, False, True),
        ("temporary", dies_at_once, False, True),
        ("permanent", SimulatedProgram(lives=1, returncode=42), False, True),
        ("transient", SimulatedProgram(lives=1, returncode=42), False, True),
        ("permanent", SimulatedProgram(ready_in=None, lives=1, returncode=42), False, True),
        ("permanent", SimulatedProgram(lives=1, returncode=-15), False, True),
    ],
)
def test_after_which_ends_it_is_started_again(restart: str, program: Program, again: bool, failed: bool | None) -> None:
    async def main() -> None:
        async with playing(program, restart=RestartType(restart), no_restart_statuses=frozenset({42, 143})) as play:
            await anyio.sleep(100)
            assert (len(play.starts) > 1) is again
            if not again:
                assert play.replica.ending is not None
                assert play.replica.ending.failed is failed
                assert not play.of(ServiceGivenUp)
                assert play.states[-1][1] == "stopped"

    virtually(main)


def test_a_process_that_says_that_its_work_is_over_is_not_started_again() -> None:
    async def main() -> None:
        async def done(process: SimulatedProcess) -> None:
            process.notify(READY="1")
            await anyio.sleep(5)
            process.notify(X_MAINSPRING_FINISHED="1")

        async with playing(done) as play:
            ending = await play.end()
            assert not ending.failed
            assert ending.status == 0
            assert play.starts == [0]

    virtually(main)


def test_another_process_is_started_only_when_nothing_is_left_of_the_one_before() -> None:
    async def main() -> None:
        leaves = SimulatedProgram(lives=5, returncode=1, children=(STUBBORN, SimulatedProgram(stops_in=3)))
        async with playing(turns(leaves, SimulatedProgram())) as play:
            await anyio.sleep(100)
            first, stubborn, polite = play.spawner.records[:3]
            assert (first.ended_at, polite.ended_at) == (5, 8)
            assert (stubborn.told_at, stubborn.killed_at) == (5, 25)
            assert play.starts == [0, 26]
            assert play.states[2:4] == [(5, "restarting"), (26, "starting")]

    virtually(main)


def test_what_does_not_even_die_is_named_and_nothing_is_started_beside_it() -> None:
    async def main() -> None:
        async with playing(SimulatedProgram(lives=5, children=(SimulatedProgram(stops_in=None, dies_in=500),))) as play:
            ending = await play.end()
            assert ending.failed
            assert "left in spite of SIGKILL" in ending.reason
            assert play.ended_at is not None
            assert play.ended_at <= 5 + 20 + 2 * 5
            assert play.starts == [0]
            assert len(play.of(ServiceGivenUp)) == 1

    virtually(main)


def test_hundreds_of_restarts() -> None:
    async def main() -> None:
        policy = RestartPolicy(max_retries=800, initial_delay=0.01, max_delay=0.01, jitter="none")
        program = SimulatedProgram(lives=0.01, returncode=1)
        async with playing(program, lifecycle=lifecycle(policy=policy)) as play:
            await play.end()
            assert len(play.starts) == 801

    virtually(main)


# -------------------------------------------------------------------------------------------------------- told to restart


def test_told_to_restart_it_drains_and_starts_again_at_once_uncounted() -> None:
    async def main() -> None:
        asked: list[Replica] = []
        async with playing(SimulatedProgram(stops_in=4), on_restart=asked.append) as play:
            await anyio.sleep(10)
            play.replica.request_restart("a new file")
            play.replica.request_restart("a new file")
            await anyio.sleep(20)
            assert play.starts == [0, 14]
            assert play.replica.life.counts == (0, 0)
            assert not asked
            ((_, ended),) = play.of(ServiceProcessEnded)
            assert (ended.told, ended.restart_in, ended.restarts) == (True, 0, 0)
            assert play.states[2:] == [(10, "restarting"), (14, "starting"), (14, "running")]

    virtually(main)


def test_told_to_restart_while_it_waits_for_a_restart_it_starts_at_once() -> None:
    async def main() -> None:
        slow = lifecycle(policy=RestartPolicy(initial_delay=30, max_delay=30, jitter="none"))
        async with playing(turns(CRASHES, SimulatedProgram()), lifecycle=slow) as play:
            await anyio.sleep(10)
            play.replica.request_restart("now")
            await anyio.sleep(100)
            assert play.starts == [0, 10]

    virtually(main)


def test_a_restart_of_a_process_that_hangs_is_bounded() -> None:
    async def main() -> None:
        async with playing(turns(STUBBORN, SimulatedProgram())) as play:
            await anyio.sleep(10)
            play.replica.request_restart("now")
            await anyio.sleep(100)
            assert play.starts == [0, 30]
            assert play.mains[0].killed_at == 30

    virtually(main)


@pytest.mark.parametrize(
    ("replacement", "at"),
    [(Replacement(age=100), 110), (Replacement(memory=10_000_000), 60), (Replacement(messages=5), 33)],
    ids=["age", "memory", "messages"],
)
def test_a_process_is_replaced_drained(replacement: Replacement, at: float) -> None:
    async def main() -> None:
        async def works(process: SimulatedProcess) -> None:
            process.handle(signal.SIGTERM)
            await anyio.sleep(10)
            process.notify(READY="1")
            await anyio.sleep(23)
            process.notify(X_MAINSPRING_USED_UP="1")
            await process.next_signal()

        async def idles(process: SimulatedProcess) -> None:
            process.handle(signal.SIGTERM)
            await anyio.sleep(10)
            process.notify(READY="1")
            await anyio.sleep(46.5)
            process.memory = 20_000_000
            await process.next_signal()

        program = works if replacement.messages else idles
        async with playing(turns(program, SimulatedProgram()), replace_after=replacement) as play:
            await anyio.sleep(200)
            assert [record.started_at for record in play.mains][:2] == [0, at]
            assert play.mains[0].told_at == at
            assert play.replica.life.counts == (0, 0)

    virtually(main)


# -------------------------------------------------------------------------------------------------------- told to stop


@pytest.mark.parametrize("after", [0.0, 0.25, 0.75, 1.0, 1.5, 2.0, 3.5, 4.0, 6.0, 6.5, 7.5, 8.0, 30.0])
def test_a_stop_wins_whenever_it_comes(after: float) -> None:
    """Latency makes each step take time: a stop may come while a process is being started, and while an end is being told."""

    async def main() -> None:
        program = turns(SimulatedProgram(ready_in=1, lives=2, returncode=1, stops_in=0.5), CRASHES)
        async with playing(program, latency=lambda: 0.5) as play:
            await anyio.sleep(after)
            play.replica.request_stop()
            asked = anyio.current_time()
            await play.end()
            assert anyio.current_time() - asked <= 2
            # A start that the spawner was already asked for takes place, and is drained.
            assert [record for record in play.mains if record.started_at > asked + 0.25] == []
            await anyio.sleep(100)
            assert play.states[-1][1] == "stopped"
            assert [state for at, state in play.states if at > asked] in (["stopped"], [])

    virtually(main)


def test_a_stop_ends_the_wait_for_its_turn() -> None:
    async def main() -> None:
        async def turn(replica: Replica) -> None:
            await anyio.sleep_forever()

        async with playing(before_start=turn) as play:
            await anyio.sleep(5)
            play.replica.request_stop()
            assert not (await play.end()).failed
            assert anyio.current_time() == 5
            assert play.starts == []

    virtually(main)


@pytest.mark.parametrize("ask", ["request_stop", "kill"])
def test_a_stop_before_the_run_is_remembered(ask: str) -> None:
    async def main() -> None:
        async with playing(begin=False) as play:
            getattr(play.replica, ask)()
            assert not (await play.replica.run()).failed
            assert play.starts == []

    virtually(main)


def test_a_stop_wins_over_a_restart_that_drains() -> None:
    async def main() -> None:
        async with playing(SimulatedProgram(stops_in=10)) as play:
            await anyio.sleep(5)
            play.replica.request_restart("now")
            await anyio.sleep(5)
            play.replica.request_stop()
            play.replica.request_restart("again")
            await play.end()
            assert play.ended_at == 15
            assert play.starts == [0]
            assert [state for _, state in play.states[2:]] == ["restarting", "stopping", "stopped"]

    virtually(main)


@pytest.mark.parametrize(
    ("program", "settings", "took", "failed"),
    [
        (SimulatedProgram(stops_in=19), {}, 19, False),
        (SimulatedProgram(stops_in=21), {}, 20, True),
        (STUBBORN, {}, 20, True),
        (STUBBORN, {"drain_timeout": 3.0}, 3, True),
        (STUBBORN, {"drain_timeout": 0.0}, 0, True),
        (STUBBORN, {"timeout": 12.0}, 7, True),
        (SimulatedProgram(stops_in=2, children=(STUBBORN,)), {}, 20, False),
        (SimulatedProgram(stops_in=None, dies_in=4), {}, 24, True),
    ],
)
def test_sigterm_then_the_drain_timeout_then_sigkill(
    program: SimulatedProgram, settings: dict[str, float], took: float, failed: bool
) -> None:
    async def main() -> None:
        async with playing(program, lifecycle=lifecycle(shutdown=ShutdownSettings(**settings))) as play:
            await anyio.sleep(10)
            play.replica.request_stop()
            ending = await play.end()
            assert play.ended_at == 10 + took
            assert ending.failed is failed
            assert play.mains[0].told_at == 10
            assert not play.spawner.running()

    virtually(main)


@pytest.mark.parametrize("returncode", [0, -15, 143])
def test_ends_by_sigterm_are_obedience(returncode: int) -> None:
    async def main() -> None:
        async def obeys(process: SimulatedProcess) -> int:
            process.notify(READY="1")
            if returncode != -15:
                process.handle(signal.SIGTERM)
                await process.next_signal()
                return returncode
            await anyio.sleep_forever()
            return 1

        async with playing(obeys) as play:
            await anyio.sleep(1)
            play.replica.request_stop()
            ending = await play.end()
            assert not ending.failed
            assert ending.status == 0

    virtually(main)


@pytest.mark.parametrize("first", ["", "request_stop", "request_restart"])
def test_a_kill_is_now(first: str) -> None:
    async def main() -> None:
        async with playing(SimulatedProgram(stops_in=None, children=(STUBBORN,))) as play:
            await anyio.sleep(5)
            if first:
                getattr(play.replica, first)(*(["now"] if first == "request_restart" else []))
            await anyio.sleep(5)
            play.replica.kill()
            await play.end()
            assert play.ended_at == 10
            assert play.starts == [0]

    virtually(main)


def test_a_kill_while_it_waits_for_a_restart() -> None:
    async def main() -> None:
        async with playing(CRASHES) as play:
            await anyio.sleep(3.5)
            play.replica.kill()
            await play.end()
            assert play.ended_at == 3.5
            assert play.starts == [0]

    virtually(main)


@pytest.mark.parametrize("after", [0.25, 0.75, 1.5, 3, 6, 7])
def test_cancelled_it_kills_all_and_waits(after: float) -> None:
    async def main() -> None:
        program = turns(
            SimulatedProgram(ready_in=1, lives=4, children=(STUBBORN,), stops_in=None, dies_in=0.25), STUBBORN
        )
        async with playing(program, begin=False, latency=lambda: 0.5) as play:
            with anyio.move_on_after(after):
                await play.replica.run()
            assert anyio.current_time() <= after + 1.25
            await anyio.sleep(1)  # for a process that was being started
            assert not play.spawner.running()
            assert str(play.replica.life.state) == "stopped"
            assert play.replica.ending is not None
            assert play.replica.ending.failed

    virtually(main)


def test_each_change_is_told() -> None:
    async def main() -> None:
        seen: list[str] = []
        async with playing(changed=lambda replica: seen.append(str(replica.life.state))) as play:
            await play.running()
            play.replica.request_stop()
            await play.end()
            assert seen == ["starting", "running", "stopping", "stopped"]

    virtually(main)


def test_equal_seeds_give_equal_lives() -> None:
    async def main() -> list[Any]:
        policy = RestartPolicy(max_retries=20, jitter="full")
        async with playing(SimulatedProgram(crashes_every=10), lifecycle=lifecycle(policy=policy)) as play:
            await play.end()
            return play.states

    assert virtually(main, seed=1) == virtually(main, seed=1) != virtually(main, seed=2)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_restart_that_is_asked_for_as_the_wait_for_the_start_ends_is_not_lost(backend: str) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:

            async def ask(replica: Replica) -> None:
                replica.request_restart("the others have ended")

            async def turn(replica: Replica) -> None:
                if not replica.starts:
                    tasks.start_soon(ask, replica)

            async with playing(before_start=turn) as play:
                await anyio.sleep(10)
                assert play.replica.starts == 2

    run_virtual(main, backend=backend)
