"""The hooks and probes of a replica in virtual time: when they run, what follows, and that a stop waits for none too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from replica_play import WELL, Play, lifecycle, playing, turns, virtually

from mainspring.events import (
    HookFailed,
    ProbeChanged,
    ServiceGivenUp,
    ServiceOutput,
    ServiceProcessEnded,
    ServiceStartFailed,
)
from mainspring.services.spec import (
    ExecProbe,
    HealthCheckSettings,
    Hook,
    HookMoment,
    HookSettings,
    ShutdownSettings,
    StartupSettings,
)
from mainspring.testing import SimulatedProgram

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CRASHES = SimulatedProgram(lives=5, returncode=1)
NEVER_READY = SimulatedProgram(ready_in=None)
HANGS = SimulatedProgram(ready_in=None, stops_in=None)
FAST = HealthCheckSettings(interval=1.0, timeout=0.5, max_failures=3)


class Noted:
    """Hooks that note when they ran, each taking a quarter of a second."""

    def __init__(self) -> None:
        self.ran: list[tuple[float, str]] = []

    def hooks(self, **settings: bool) -> dict[HookMoment, tuple[Hook, ...]]:
        return {moment: (Hook(self.at(moment), **settings),) for moment in HookMoment}

    def at(self, moment: HookMoment) -> Callable[[], Awaitable[None]]:
        async def note() -> None:
            await anyio.sleep(0.25)
            self.ran.append((anyio.current_time(), str(moment)))

        return note


def test_hooks_run_around_start_restart_and_stop() -> None:
    async def main() -> None:
        noted = Noted()
        async with playing(turns(CRASHES, WELL), hooks=noted.hooks()) as play:
            await anyio.sleep(20)
            play.replica.request_stop()
            await play.end()
            assert noted.ran == [
                (0.25, "pre_start"),
                (0.5, "post_start"),
                (6.5, "pre_restart"),  # the process ended at 5.25, and there is a second's delay
                (6.75, "pre_start"),
                (7.0, "post_start"),
                (7.25, "post_restart"),
                (20.25, "pre_stop"),
                (20.5, "post_stop"),
            ]
            assert play.starts == [0.25, 6.75]
            assert [at for at, state in play.states if state == "running"] == [0.5, 7.25]
            assert play.mains[1].told_at == 20.25

    virtually(main)


def test_a_hook_is_a_command_with_the_environment_of_the_service() -> None:
    async def main() -> None:
        hooks = {HookMoment.PRE_START: (Hook(("prepare", "{replica}")),), HookMoment.POST_STOP: (Hook(("tidy",)),)}
        programs = {
            "prepare": SimulatedProgram(ready_in=None, lives=2),
            "tidy": SimulatedProgram(ready_in=None, lives=3),
        }
        async with playing(hooks=hooks, programs=programs, environment={"A": "b"}) as play:
            await anyio.sleep(10)
            play.replica.request_stop()
            await play.end()
            prepare, main_, tidy = play.spawner.records
            assert prepare.launch.command == ("prepare", "1")
            assert prepare.launch.environment["A"] == "b"
            assert not prepare.launch.notify
            assert (prepare.ended_at, main_.started_at, tidy.started_at, play.ended_at) == (2, 2, 10, 13)

    virtually(main)


def test_what_a_hook_writes_is_output_of_the_service() -> None:
    async def main() -> None:
        hook = SimulatedProgram(lines=("migrating", "done"), ready_in=None, lives=0.0)
        async with playing(
            WELL, programs={"migrate": hook}, hooks={HookMoment.PRE_START: (Hook(("migrate",)),)}
        ) as play:
            await anyio.sleep(1)
            assert [event.line for _, event in play.of(ServiceOutput)] == ["migrating", "done"]

    virtually(main)


@pytest.mark.parametrize("kind", ["fails", "hangs", "cannot be started"])
@pytest.mark.parametrize("moment", list(HookMoment))
def test_a_failing_hook_is_told_and_changes_nothing(moment: HookMoment, kind: str) -> None:
    async def main() -> None:
        programs = {"fails": SimulatedProgram(ready_in=None, lives=0, returncode=3), "hangs": HANGS}
        async with playing(turns(CRASHES, WELL), hooks={moment: (Hook((kind,)),)}, programs=programs) as play:
            await anyio.sleep(60)
            play.replica.request_stop()
            ending = await play.end()
            assert not ending.failed
            assert len(play.starts) == 2
            failures = [event for _, event in play.of(HookFailed)]
            assert failures
            assert not any(event.aborts for event in failures)
            assert play.ended_at is not None
            assert play.ended_at <= 70

    virtually(main)


@pytest.mark.parametrize(
    ("moment", "starts"),
    [(HookMoment.PRE_START, 0), (HookMoment.POST_START, 3), (HookMoment.PRE_RESTART, 1), (HookMoment.POST_RESTART, 4)],
)
def test_a_failing_hook_that_aborts_fails_the_start(moment: HookMoment, starts: int) -> None:
    async def main() -> None:
        hooks = {moment: (Hook(("fails",), abort=True),)}
        programs = {"fails": SimulatedProgram(ready_in=None, lives=0, returncode=3)}
        async with playing(turns(CRASHES, WELL), hooks=hooks, programs=programs) as play:
            ending = await play.end()
            assert ending.failed
            assert f"its hook {moment} failed" in ending.reason
            assert len(play.starts) == starts
            assert len(play.of(ServiceStartFailed)) == 3
            assert len(play.of(ServiceGivenUp)) == 1
            assert play.of(HookFailed)[0][1].aborts

    virtually(main)


@pytest.mark.parametrize("moment", [HookMoment.PRE_START, HookMoment.POST_START])
def test_a_stop_ends_a_hook_of_a_start(moment: HookMoment) -> None:
    async def main() -> None:
        settings = lifecycle(hooks=HookSettings(timeout=1000))
        async with playing(hooks={moment: (Hook(("hangs",)),)}, programs={"hangs": HANGS}, lifecycle=settings) as play:
            await anyio.sleep(10)
            play.replica.request_stop()
            await play.end()
            assert play.ended_at == 10
            assert len(play.starts) == (moment is HookMoment.POST_START)

    virtually(main)


@pytest.mark.parametrize("moment", [HookMoment.POST_START, HookMoment.POST_RESTART])
def test_an_end_of_the_process_ends_a_hook_that_follows_its_start(moment: HookMoment) -> None:
    async def main() -> None:
        settings = lifecycle(hooks=HookSettings(timeout=1000))
        programs = {"hangs": HANGS}
        async with playing(CRASHES, hooks={moment: (Hook(("hangs",)),)}, programs=programs, lifecycle=settings) as play:
            await anyio.sleep(60)
            assert len(play.starts) >= 3

    virtually(main)


@pytest.mark.parametrize("moment", [HookMoment.PRE_STOP, HookMoment.POST_STOP])
def test_the_hooks_of_a_stop_have_their_part_of_its_whole(moment: HookMoment) -> None:
    async def main() -> None:
        settings = lifecycle(hooks=HookSettings(timeout=1000), shutdown=ShutdownSettings(timeout=12))
        async with playing(
            SimulatedProgram(stops_in=None),
            hooks={moment: (Hook(("hangs",)),)},
            programs={"hangs": HANGS},
            lifecycle=settings,
        ) as play:
            await anyio.sleep(10)
            play.replica.request_stop()
            await play.end()
            assert play.ended_at == 22

    virtually(main)


@pytest.mark.parametrize("moment", [HookMoment.PRE_STOP, HookMoment.POST_STOP])
@pytest.mark.parametrize("how", ["command", "callable"])
def test_a_kill_waits_for_no_hook(moment: HookMoment, how: str) -> None:
    async def main() -> None:
        action = ("hangs",) if how == "command" else anyio.sleep_forever
        settings = lifecycle(hooks=HookSettings(timeout=1000))
        async with playing(
            SimulatedProgram(stops_in=1), hooks={moment: (Hook(action),)}, programs={"hangs": HANGS}, lifecycle=settings
        ) as play:
            await anyio.sleep(10)
            play.replica.request_stop()
            await anyio.sleep(2)
            play.replica.kill()
            await play.end()
            assert play.ended_at == 12

    virtually(main)


def test_a_process_that_ends_itself_ends_no_hook_of_the_stop() -> None:
    async def main() -> None:
        noted = Noted()
        async with playing(SimulatedProgram(lives=10.125), hooks=noted.hooks()) as play:
            await anyio.sleep(10.25)  # it was ready at 0.25
            play.replica.request_stop()
            await play.end()
            assert [moment for _, moment in noted.ran][-2:] == ["pre_stop", "post_stop"]

    virtually(main)


# --------------------------------------------------------------------------------------------------------------- probes


class Answers:
    """A probe that can be told what to answer."""

    def __init__(self, well: bool = True) -> None:
        self.well = well
        self.hangs = False
        self.asked: list[float] = []

    async def __call__(self) -> bool:
        self.asked.append(anyio.current_time())
        if self.hangs:
            await anyio.sleep_forever()
        return self.well


async def unwell_for(play: Play, probe: Answers, seconds: float) -> None:
    probe.well = False
    await anyio.sleep(seconds)
    probe.well = True


def test_it_is_running_when_its_probe_has_passed() -> None:
    async def main() -> None:
        probe = Answers(well=False)
        async with playing(NEVER_READY, probe=probe) as play:
            await anyio.sleep(12)
            assert play.states == [(0, "starting")]
            probe.well = True
            await anyio.sleep(12)
            assert probe.asked == pytest.approx([0, 0.1, 0.3, 0.7, 1.5, 3.1, 6.3, 11.3, 16.3])
            assert play.states == [(0, "starting"), (probe.asked[-1], "running")]
            assert [event.error is None for _, event in play.of(ProbeChanged)] == [False, True]

    virtually(main)


def test_a_probe_that_never_passes_fails_the_start_and_says_why() -> None:
    async def main() -> None:
        async with playing(NEVER_READY, probe=Answers(well=False)) as play:
            ending = await play.end()
            assert ending.failed
            errors = [event.error for _, event in play.of(ServiceStartFailed)]
            assert len(errors) == 3
            assert all(error.startswith("not ready within 60 s: ") for error in errors)

    virtually(main)


def test_the_startup_probe_gates_the_other() -> None:
    async def main() -> None:
        startup, probe = Answers(well=False), Answers()
        async with playing(NEVER_READY, startup_probe=startup, probe=probe) as play:
            await anyio.sleep(22)
            assert probe.asked == []
            startup.well = True
            await anyio.sleep(30)
            ready_at = startup.asked[-1]
            assert startup.asked[-4:] == pytest.approx([11.3, 16.3, 21.3, 26.3])
            assert probe.asked == pytest.approx([ready_at, ready_at + 10, ready_at + 20])
            assert play.states == [(0, "starting"), (ready_at, "running")]

    virtually(main)


def test_with_several_signs_all_must_hold() -> None:
    async def main() -> None:
        probe = Answers()
        async with playing(SimulatedProgram(ready_in=7), probe=probe, notify=True) as play:
            await anyio.sleep(20)
            assert play.states == [(0, "starting"), (7, "running")]

    virtually(main)


def test_it_is_degraded_while_its_probe_fails_and_restarted_after_too_many() -> None:
    async def main() -> None:
        probe = Answers()
        async with playing(probe=probe, lifecycle=lifecycle(health=FAST), notify=True) as play:
            await anyio.sleep(4.5)
            await unwell_for(play, probe, 2)
            await anyio.sleep(3.5)
            assert play.states == [(0, "starting"), (0, "running"), (5, "degraded"), (7, "running")]
            await unwell_for(play, probe, 3.5)
            await anyio.sleep(5)
            assert play.states[4:] == [
                (11, "degraded"),
                (13, "restarting"),
                (14, "starting"),
                (14, "running"),
            ]
            assert play.mains[0].told_at == 13
            ((_, ended),) = play.of(ServiceProcessEnded)
            assert "its probe failed 3 times" in ended.ending
            assert (ended.told, ended.restarts) == (False, 1)

    virtually(main)


def test_several_successes_in_a_row_make_it_running_again() -> None:
    async def main() -> None:
        probe = Answers()
        health = HealthCheckSettings(interval=1, timeout=0.5, max_failures=5, successes=3)
        async with playing(probe=probe, lifecycle=lifecycle(health=health), notify=True) as play:
            await anyio.sleep(4.5)
            await unwell_for(play, probe, 2)
            await anyio.sleep(10)
            assert play.states[2:] == [(5, "degraded"), (9, "running")]

    virtually(main)


def test_a_probe_that_hangs_fails_at_its_timeout() -> None:
    async def main() -> None:
        probe = Answers()
        async with playing(
            turns(WELL, NEVER_READY), probe=probe, lifecycle=lifecycle(health=FAST), notify=True
        ) as play:
            await anyio.sleep(4.75)
            probe.hangs = True
            await anyio.sleep(10)
            assert play.states[2:4] == [(5.5, "degraded"), (8.5, "restarting")]

    virtually(main)


def test_an_exec_probe_leaves_no_process() -> None:
    async def main() -> None:
        programs = {
            "ask": turns(SimulatedProgram(ready_in=None, lives=0), SimulatedProgram(ready_in=None, stops_in=None))
        }
        async with playing(probe=ExecProbe(("ask",)), programs=programs, lifecycle=lifecycle(health=FAST)) as play:
            await anyio.sleep(1.75)
            assert [each.launch.command[0] for each in play.spawner.running()] == ["main"]
            assert play.states[2:] == [(1.5, "degraded")]
            await anyio.sleep(1)
            play.replica.request_stop()
            await play.end()
            assert not play.spawner.running()

    virtually(main)


def test_probes_of_one_process_are_no_probes_of_the_next() -> None:
    """A new process has to pass by itself, and its failures are counted from zero."""

    async def main() -> None:
        probe = Answers()
        health = HealthCheckSettings(interval=1, timeout=0.5, max_failures=3)
        settings = lifecycle(health=health, startup=StartupSettings(health_check_interval=1))
        async with playing(
            SimulatedProgram(ready_in=None, lives=6.5, returncode=1), probe=probe, lifecycle=settings
        ) as play:
            await anyio.sleep(4.5)
            probe.well = False  # it fails at 5 and 6, and the process ends at 6.5
            await anyio.sleep(5)
            assert play.replica.life.state.value == "starting"
            probe.well = True
            await anyio.sleep(1.5)
            assert play.replica.life.state.value == "running"

    virtually(main)


def test_a_stop_waits_for_no_probe() -> None:
    async def main() -> None:
        probe = Answers()
        async with playing(probe=probe, notify=True) as play:
            await anyio.sleep(9)
            probe.hangs = True
            await anyio.sleep(2)
            play.replica.request_stop()
            await play.end()
            assert play.ended_at == 11

    virtually(main)


def test_a_probe_says_nothing_of_a_process_that_has_ended() -> None:
    """What it has left behind drains for long, and its probe fails meanwhile."""

    async def main() -> None:
        probe = Answers()
        program = SimulatedProgram(lives=4.5, returncode=3, children=(SimulatedProgram(stops_in=15),))
        async with playing(turns(program, WELL), probe=probe, lifecycle=lifecycle(health=FAST), notify=True) as play:
            await anyio.sleep(4.75)
            await unwell_for(play, probe, 14)
            await anyio.sleep(10)
            ((at, ended),) = play.of(ServiceProcessEnded)
            assert (at, ended.ending) == (19.5, "exit status 3")
            assert not play.of(ProbeChanged)

    virtually(main)
