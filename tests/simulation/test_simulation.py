"""Whole runs: the honest system holds in every kind of trouble, and the same seed is the same run."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic_core import core_schema
from simulation_planting import BUSY, TROUBLE, bursts, honest, quick

from mainspring import ConfigError, Context, LeasePolicy, LoopGroup, MainLoop, Retry
from mainspring.testing import Faults, Simulation
from mainspring.testing.simulation import SimulationReport, Violation
from mainspring.testing.simulation.faults import EVENTS

EACH = 50
"""Seeds of one part of the three hundred."""
QUICK = ("clock_jump", "slow_call")
"""The kinds of trouble of the quick run."""


def every(kind: str) -> Faults:
    """A world in which only ``kind`` happens, often."""
    return Faults.just(
        **{kind: 30.0 if kind in EVENTS else 0.3, **({"signal": 30.0} if kind == "second_signal" else {})}
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_the_honest_system_passes_three_hundred_seeds(part: int) -> None:
    for seed in range(part * EACH, part * EACH + EACH):
        Simulation(seed=seed, duration=900, workers=2 + seed % 3, faults=TROUBLE).run(honest).check()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_claiming_ahead_passes_three_hundred_seeds(part: int) -> None:
    ahead = 0
    for seed in range(part * EACH, part * EACH + EACH):
        concurrency = 1 + seed % 3
        report = Simulation(seed=seed, duration=60, workers=2 + seed % 2, faults=BUSY).run(
            partial(bursts, concurrency=concurrency)
        )
        report.check()
        ahead += most_in_hand(report) > 5 * concurrency
    assert ahead > EACH / 4


def most_in_hand(report: SimulationReport) -> int:
    """The most messages that a process had in hand at once."""
    in_hand: defaultdict[str, set[str]] = defaultdict(set)
    most = 0
    for entry in report.entries:
        if entry.what == "claimed":
            in_hand[entry.lane].add(entry.message)
            most = max(most, len(in_hand[entry.lane]))
        elif entry.what in ("acked", "retried", "released", "dead-lettered"):
            in_hand[entry.lane].discard(entry.message)
    return most


@pytest.mark.slow
def test_joint_acknowledgements_pass_while_the_link_breaks_amid_them() -> None:
    seen: set[str] = set()
    for seed in range(10):
        faults = Faults.just(store_restart=60, partition=60, slow_call=0.3, failing_handler=0.05)
        report = Simulation(seed=seed, duration=300, workers=3, per_minute=30, faults=faults).run(quick)
        report.check()
        seen |= {entry.what for entry in report.entries if entry.what.startswith("joint ack")}
    assert {"joint ack failed", "joint ack took effect, answer lost", "joint ack is slow"} <= seen


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in Faults.kinds]
)
def test_each_kind_of_trouble_happens_and_is_survived(kind: str) -> None:
    report = Simulation(seed=5, duration=3600, workers=3, faults=every(kind)).run(honest)
    report.check()
    assert any(TRACES[kind] in entry.what for entry in report.entries), f"no trace of {kind}"


TRACES = {
    "crash": "killed",
    "signal": "SIGTERM",
    "deploy": "deploy",
    "partition": "partition over",
    "store_restart": "is back",
    "clock_jump": "wall clock jumps",
    "freeze": "goes on",
    "second_signal": "second SIGTERM",
    "slow_call": "is slow",
    "slow_handler": "slow handler",
    "hanging_handler": "stalled",
    "failing_handler": "retried",
    "swallowing_handler": "swallowing handler",
    "poison": "dead-lettered",
    "duplicate": "sent again",
}


@pytest.mark.slow
def test_a_demanding_group() -> None:
    """Short leases, renewal by beats, two loops, checkpoints, retries of its own, a bound on all of it."""

    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int, ctx: Context) -> int:
            for _ in range(job % 10):
                await anyio.sleep(1.5)
                ctx.beat()
                await ctx.checkpoint({"job": job})
            if job % 9 == 0 and ctx.attempt == 1:
                raise Retry(delay=7)
            return job

        loops = [
            MainLoop(mailbox, handle, name=f"loop {n}", concurrency=3, visibility_timeout=5, shutdown_priority=n,
                     lease=LeasePolicy("on-beat" if n else "while-running"))
            for n in range(2)
        ]  # fmt: skip
        return LoopGroup(loops, max_concurrency=4, drain_delay=2, shutdown_timeout=10, watchdog_threshold=60)

    for seed in range(5):
        Simulation(seed=seed, duration=1200, workers=2, faults=TROUBLE, per_minute=4).run(build).check()


def test_a_peaceful_day_is_quiet() -> None:
    report = Simulation(seed=1, duration=3600, workers=2, faults=Faults.none()).run(honest)
    assert not report.failed
    assert report.plan == ()
    counts = report.counts
    assert counts["sent"] == counts["deliveries"] == counts["acked"] > 100
    assert counts["retried"] == counts["crashes"] == 0
    assert "no promise broken" in str(report)
    assert " of 2 workers in " in str(report)
    assert sum("got the reply to" in line for line in report.events) == counts["sent"] // 4


def test_a_count_of_one_is_told_in_the_singular() -> None:
    report = Simulation(seed=1, duration=600, workers=1, faults=Faults.just(crash=6), keep=(0,)).run(honest)
    assert report.counts["crashes"] == 1
    assert re.search(r" of 1 worker in .* 1 planned fault: .* 1 crash, 1 signal, 0 freezes, ", str(report))


def test_replies_are_asked_for_and_come_once() -> None:
    report = Simulation(seed=2, duration=3600, workers=2, faults=every("partition")).run(honest)
    report.check()
    replied = [entry.message for entry in report.entries if entry.what == "got the reply to"]
    assert len(replied) == len(set(replied)) > 10


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from simulation_planting import TROUBLE, honest
from mainspring.testing import Simulation
report = Simulation(seed=11, duration=1800, workers=3, faults=TROUBLE).run(honest)
sys.stdout.write("\\n".join(report.events))
"""


@pytest.mark.slow
def test_the_same_seed_gives_the_same_log_in_another_process() -> None:
    outputs = []
    for hash_seed in ("1", "4242"):
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT.format(here=str(Path(__file__).parent))],
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            timeout=120,
            check=True,
        )
        outputs.append(ended.stdout)
    here = Simulation(seed=11, duration=1800, workers=3, faults=TROUBLE).run(honest)
    assert outputs[0] == outputs[1] == "\n".join(here.events).encode()
    assert len(here.events) > 500
    other = Simulation(seed=12, duration=1800, workers=3, faults=TROUBLE).run(honest)
    assert digest(other.events) != digest(here.events)


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@pytest.mark.slow
def test_a_part_of_the_plan_can_be_replayed() -> None:
    whole = Simulation(seed=3, duration=3600, workers=2, faults=every("crash")).run(honest)
    kept = whole.simulation.but(keep=(1,)).run(honest)
    assert kept.plan == (whole.plan[1],)
    assert kept.counts["crashes"] == 1 < whole.counts["crashes"]


@dataclass
class Order:
    number: int
    name: str
    tags: list[str]


def test_bodies_are_made_up_given_or_sent_by_oneself() -> None:
    seen: list[Order] = []

    def build(mailbox: Any) -> LoopGroup:
        async def handle(order: Order) -> None:
            seen.append(order)

        return LoopGroup([MainLoop(mailbox, handle)])

    async def send(mailbox: Any, number: int) -> None:
        await mailbox.send(Order(number, "sent", []), priority=number % 3)

    peace = Simulation(duration=300, workers=1, faults=Faults.none())
    peace.run(build).check()
    made_up = seen.copy()
    assert made_up
    assert made_up[0] != made_up[1]
    peace.but(body=lambda number: Order(number, "given", [])).run(build).check()
    peace.but(send=send).run(build).check()
    assert {order.name for order in seen[len(made_up) :]} == {"given", "sent"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": -1}, "seed must be a whole number"),
        ({"seed": True}, "seed must be a whole number"),
        ({"workers": 0}, "workers must be a whole number from 1"),
        ({"duration": 0}, "duration must be above 0"),
        ({"duration": float("inf")}, "duration must be above 0"),
        ({"per_minute": "1"}, "per_minute must be above 0"),
        ({"faults": {"crash": 1}}, "faults must be Faults"),
    ],
)
def test_wrong_values_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Simulation(**options)


class Opaque:
    """A type of which no example can be made up."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return core_schema.is_instance_schema(cls)


async def opaque(job: Opaque) -> None: ...


def test_wrong_build_functions_are_named() -> None:
    from mainspring import InMemoryMailbox

    async def handle(job: int) -> None: ...

    def fails(mailbox: Any) -> Any:
        raise ZeroDivisionError("no group today")

    run = Simulation(duration=60).run
    with pytest.raises(ConfigError, match="must return a LoopGroup, not None"):
        run(lambda mailbox: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="no loop of the group is on the mailbox"):
        run(lambda mailbox: LoopGroup([MainLoop(InMemoryMailbox(), handle)]))
    with pytest.raises(ConfigError, match=r"no body for .*Opaque.*pass body="):
        run(lambda mailbox: LoopGroup([MainLoop(mailbox, opaque)]))
    with pytest.raises(ZeroDivisionError, match="no group today"):
        run(fails)


def test_a_build_that_fails_later_is_told() -> None:
    calls = 0

    def build(mailbox: Any) -> LoopGroup:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise ZeroDivisionError("no more groups")
        return honest(mailbox)

    with pytest.raises(ZeroDivisionError, match="no more groups"):
        Simulation(duration=600, workers=4).run(build)


def test_a_broken_run_tells_its_story() -> None:
    def build(mailbox: Any) -> LoopGroup:
        async def handle(job: int, ctx: Context) -> None:
            await ctx.message.acknowledge()
            await anyio.sleep(30)

        return LoopGroup([MainLoop(mailbox, handle)])

    report = Simulation(seed=0, duration=3600, workers=2, faults=Faults.just(crash=20)).run(build)
    broken = report.violation
    assert isinstance(broken, Violation)
    with pytest.raises(AssertionError, match="the work is lost"):
        report.check()
    told = str(report)
    assert f"virtual second {broken.at:.3f}" in told
    assert f"(message {broken.message})" in told
    assert any(f"acked {broken.message}" in line for line in broken.history)
    assert all(broken.message in line for line in broken.history)
    again = eval(broken.replay, {"Simulation": Simulation, "Faults": Faults, "build": build})
    assert again.events == report.events
    assert report.as_dict()["violation"]["rule"] == broken.rule
    assert report.speed > 0
