"""``Simulation`` and its report; ``shrink``, which makes a failing run small; ``simulate``, which runs many seeds."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mainspring.core import clock
from mainspring.errors import ConfigError
from mainspring.runtime.scope import lone_error
from mainspring.testing.simulation.event_log import around, as_text
from mainspring.testing.simulation.faults import CHANCES, Faults, PlannedFault, plan
from mainspring.testing.virtual_time import VirtualClock, run_virtual
from mainspring.validation import counted, is_whole

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from mainspring.group.group import LoopGroup
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.testing.simulation.event_log import LogEntry
    from mainspring.testing.simulation.ledger import Violation
    from mainspring.testing.simulation.world import World


HISTORY = 30
"""Number of the last events of a message that a violation shows."""
HOURLY = 20.0
"""Factor for the faults of a run of an hour: about the faults of a day."""


@dataclass(frozen=True)
class SimulationReport:
    """The result of a run. ``failed`` is true if an invariant was broken; ``events`` is the log, one line per event."""

    simulation: Simulation
    plan: tuple[PlannedFault, ...]
    violation: Violation | None
    counts: dict[str, int]
    virtual_seconds: float
    real_seconds: float
    entries: tuple[LogEntry, ...] = field(repr=False)

    @property
    def failed(self) -> bool:
        """True if an invariant was broken."""
        return self.violation is not None

    @property
    def seed(self) -> int:
        """The seed that repeats this run."""
        return self.simulation.seed

    @cached_property
    def events(self) -> list[str]:
        """The event log as text. Equal simulations give equal logs, byte for byte."""
        return [str(entry) for entry in self.entries]

    @property
    def speed(self) -> float:
        """Virtual seconds per real second."""
        return self.virtual_seconds / self.real_seconds if self.real_seconds else 0.0

    def check(self) -> None:
        """Raise an :class:`AssertionError` with the violation if an invariant was broken."""
        if self.violation is not None:
            raise AssertionError(str(self))

    def as_dict(self) -> dict[str, Any]:
        """Return figures and the violation for JSON, without the log."""
        return {
            "seed": self.seed,
            "duration": self.simulation.duration,
            "workers": self.simulation.workers,
            "failed": self.failed,
            "counts": self.counts,
            "virtual_seconds": round(self.virtual_seconds, 3),
            "real_seconds": round(self.real_seconds, 3),
            "plan": [str(fault) for fault in self.plan],
            "violation": None if self.violation is None else asdict(self.violation),
        }

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}: {self.virtual_seconds / 3600:.1f} virtual hours of"
            f" {counted(self.simulation.workers, 'worker')} in {self.real_seconds:.1f} s,"
            f" {counted(len(self.plan), 'planned fault')}: {told_counts(self.counts)}"
        )
        return f"{head}\n{self.violation}" if self.violation is not None else f"{head}\nno promise broken"


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The description of a run. Equal descriptions give equal runs.

    :param seed: of the schedule, the faults, the workload and all of Mainspring's randomness.
    :param duration: virtual seconds of work and faults; then the remaining messages are finished, and all shut down.
    :param workers: how many processes.
    :param faults: how often what fails; :meth:`Faults.none` for no faults.
    :param body: the body of message number n, or one JSON document for all; by default derived from the handler's type.
    :param send: sends message number n, ``async def send(mailbox, n)``; then there are no requests with replies.
    :param per_minute: messages per worker and minute.
    :param keep: the numbers of the planned faults that happen; None: all. For replays of a shrunk run.
    :param store: makes the mailbox that plays the server; by default ``InMemoryMailbox(serialize=True)``. For tests of the
        simulation itself, or of another backend that runs on trio and in memory.
    :param patience: real seconds without progress after which the code under test counts as blocked.
    :param target: name of the build function on the command line, for the replay command, with ``target_options``.
    :raises ConfigError: a value is out of range.
    """

    seed: int = 0
    duration: float = 86_400.0
    workers: int = 4
    faults: Faults = field(default_factory=Faults)
    body: Callable[[int], Any] | bytes | None = None
    send: Callable[[Mailbox[Any, Any], int], Awaitable[object]] | None = None
    per_minute: float = 1.0
    keep: tuple[int, ...] | None = None
    store: Callable[[], Mailbox[Any, Any]] | None = None
    patience: float = 20.0
    target: str | None = None
    target_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (is_whole(self.seed) and self.seed >= 0):
            raise ConfigError(f"Simulation: seed must be a whole number from 0, not {self.seed!r}")
        if not (is_whole(self.workers) and 1 <= self.workers <= 1_000):
            raise ConfigError(f"Simulation: workers must be a whole number from 1 to 1000, not {self.workers!r}")
        for name in ("duration", "per_minute", "patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
                raise ConfigError(f"Simulation: {name} must be above 0 and finite, not {value!r}")
        if not isinstance(self.faults, Faults):
            raise ConfigError(f"Simulation: faults must be Faults(…), not {self.faults!r}")

    def run(
        self,
        build: Callable[[Mailbox[Any, Any]], LoopGroup],
        *,
        progress: Callable[[float], object] | None = None,
    ) -> SimulationReport:
        """Run the group of ``build(mailbox)`` in each simulated process, and judge the run.

        :param progress: called with the virtual time, four times a real second, in another thread.
        :raises ConfigError: the group cannot be simulated; the message says why.
        :raises RealWorldError: the code opens sockets, starts threads, sleeps in real time, or blocks.
        :raises KeyboardInterrupt: at a Ctrl-C, once the event loop of the run has ended; at a second one, at once.
        """
        began = clock.monotonic()
        run = _Run(self, build, progress)
        try:
            run_virtual(run.main, seed=self.seed)
        except BaseException as error:
            if run.guards is None or run.guards.error is None:
                raise lone_error(error) from None
        finally:
            if run.guards is not None:
                run.guards.close()
        if run.guards is not None and run.guards.error is not None:
            raise run.guards.error
        world = run.world
        assert world is not None
        if world.broken_build is not None:
            raise world.broken_build
        entries = tuple(world.log)
        return SimulationReport(
            self,
            tuple(run.planned),
            self._violation(world),
            _count(world),
            run.ended_at,
            clock.monotonic() - began,
            entries,
        )

    def _violation(self, world: World) -> Violation | None:
        broken = world.ledger.broken
        if broken is None:
            return None
        return replace(broken, history=world.log.last(HISTORY, broken.message), replay=self.replay())

    def replay(self) -> str:
        """Return the command (or, without a ``target``, the expression) that repeats the run."""
        if self.target is None:
            rest = "" if self.keep is None else f", keep={self.keep!r}"
            rest += "" if self.per_minute == 1 else f", per_minute={self.per_minute!r}"
            return (
                f"Simulation(seed={self.seed}, duration={self.duration!r}, workers={self.workers},"
                f" faults={self.faults.source()}{rest}).run(build)"
            )
        words = ["mainspring", "simulate", self.target, "--seed", str(self.seed), "--duration", f"{self.duration!r}"]
        words += ["--workers", str(self.workers)]
        kinds = [name for name in Faults.kinds if getattr(self.faults, name)]
        usual = Faults().times(HOURLY)
        if len(kinds) < len(Faults.kinds):
            words += ["--faults", ",".join(kinds) or "none"]
        for name in kinds:
            value = getattr(self.faults, name)
            if value != getattr(usual, name):
                words += ["--rate", f"{name}={value!r}"]
        if self.per_minute != 1:
            words += ["--per-minute", f"{self.per_minute!r}"]
        if self.keep is not None:
            words += ["--keep", ",".join(map(str, self.keep)) or "none"]
        return shlex.join(words + list(self.target_options))

    def but(self, **changes: Any) -> Simulation:
        """Return a copy with other values."""
        return replace(self, **changes)


class _Run:
    """The event loop of a run, and what the report needs afterwards."""

    def __init__(
        self,
        simulation: Simulation,
        build: Callable[[Mailbox[Any, Any]], LoopGroup],
        progress: Callable[[float], object] | None,
    ) -> None:
        self.world: World | None = None
        self.guards: Any = None
        self.planned: Sequence[PlannedFault] = ()
        self.ended_at = 0.0
        self._simulation = simulation
        self._build = build
        self._progress = progress

    async def main(self) -> None:
        import trio

        from mainspring.mailbox.mailbox import Mailbox
        from mainspring.testing.simulation.guards import Guards
        from mainspring.testing.simulation.store import SimulatedBackend
        from mainspring.testing.simulation.workload import GroupUnderTest
        from mainspring.testing.simulation.world import World

        simulation = self._simulation
        virtual = VirtualClock()
        guards = self.guards = Guards(self._stop, lambda: self._sign_of_life(virtual), simulation.patience)
        with guards():
            nothing: Any = None  # as this mailbox is never called
            mailbox = Mailbox(SimulatedBackend("jobs", nothing, "", nothing))
            group = self._build(mailbox)
            under_test = GroupUnderTest(group, mailbox, simulation.body, sends=simulation.send is not None)
            planned: Sequence[PlannedFault] = plan(
                simulation.faults,
                seed=simulation.seed,
                duration=simulation.duration,
                workers=simulation.workers,
                lease=under_test.lease,
            )
            if simulation.keep is not None:
                planned = [fault for fault in planned if fault.number in simulation.keep]
            self.planned = planned
            self.world = World(simulation, self._build, under_test)
            try:
                await self.world.main(planned)
            finally:
                self.ended_at = self.world.log.closed_at or trio.current_time()

    def _stop(self) -> None:
        if self.world is not None:
            self.world.stop()

    def _sign_of_life(self, virtual: VirtualClock) -> tuple[float, int]:
        if self._progress is not None:
            self._progress(virtual.now)
        return virtual.now, len(self.world.log) if self.world is not None else 0


def _count(world: World) -> dict[str, int]:
    what = Counter(entry.what for entry in world.log)
    names = {
        "sent": "sent",
        "claimed": "deliveries",
        "acked": "acked",
        "retried": "retried",
        "released": "released",
        "dead-lettered": "dead-lettered",
        "killed": "crashes",
        "SIGTERM": "signals",
        "frozen": "freezes",
    }
    return {shown: what[name] for name, shown in names.items()} | {"waiting": len(world.ledger.waiting())}


def told_counts(counts: dict[str, int]) -> str:
    """Return the counts of one or several runs as words: ``260 sent, 1 crash``."""
    one = {"deliveries": "delivery", "crashes": "crash", "signals": "signal", "freezes": "freeze"}
    return ", ".join(f"{number:,} {one.get(name, name) if number == 1 else name}" for name, number in counts.items())


TRIES = 150
"""Most runs of one shrinking. None is longer than the failing run."""
MARGIN = 1.0
"""Virtual seconds for which a shortened run continues after the instant of the violation."""


def shrink(
    report: SimulationReport,
    run: Callable[[Simulation], SimulationReport],
    *,
    tries: int = TRIES,
    progress: Callable[[SimulationReport], object] = lambda report: None,
) -> SimulationReport:
    """Return the smallest run found that breaks the same invariant; ``report`` itself if it did not fail.

    A smaller run is shorter, or has fewer faults or workers. The search is deterministic.

    :param run: runs a simulation, as in ``lambda simulation: simulation.run(build)``.
    :param tries: most runs of the search.
    :param progress: called with each smaller failing run.
    """
    if report.violation is None:
        return report
    rule = report.violation.rule
    best = report
    tried = {report.simulation}
    found = True
    while found:
        found = False
        for candidate in candidates(best):
            if candidate in tried:
                continue
            if tries <= 0:
                return best
            tries -= 1
            tried.add(candidate)
            smaller = run(candidate)
            if smaller.violation is not None and smaller.violation.rule == rule:
                best, found = smaller, True
                progress(best)
                break
    return best


def candidates(report: SimulationReport) -> Iterator[Simulation]:
    """Yield smaller simulations to try, those with the greatest reduction first."""
    simulation = report.simulation
    assert report.violation is not None
    at = report.violation.at + MARGIN
    if at < simulation.duration * 0.99:
        yield simulation.but(duration=round(at, 3))
    kept = [fault.number for fault in report.plan]
    yield from (simulation.but(keep=tuple(numbers)) for numbers in subsets(kept))
    present = [name for name in CHANCES if getattr(simulation.faults, name)]
    if len(present) > 1:
        yield simulation.but(faults=replace(simulation.faults, **dict.fromkeys(present, 0.0)))
    for name in present:
        yield simulation.but(faults=replace(simulation.faults, **{name: 0.0}))
    for workers in range(1, simulation.workers):
        # First with the same total rate, so that messages arrive as before.
        rate = simulation.per_minute * simulation.workers / workers
        yield simulation.but(workers=workers, per_minute=rate)
        yield simulation.but(workers=workers)
    if simulation.duration > 60:
        yield simulation.but(duration=round(simulation.duration * 0.6, 3))


def subsets(numbers: list[int]) -> Iterator[list[int]]:
    """Yield ``numbers`` without all of them, without each half, each quarter, down to without each one."""
    size = len(numbers)
    while size >= 1:
        for start in range(0, len(numbers), size):
            yield numbers[:start] + numbers[start + size :]
        size = 0 if size == 1 else (size + 1) // 2


def simulate(
    build: Callable[[Mailbox[Any, Any]], LoopGroup],
    *,
    seeds: int | Iterable[int] = 20,
    duration: float = 3600.0,
    faults: Faults | None = None,
    shrink: bool = True,
    **options: Any,
) -> None:
    """Run ``build``'s group under many seeds; raise an :class:`AssertionError` for the first that breaks an invariant.

    All of a test::

        def test_loses_nothing():
            simulate(build, seeds=50)

    The error shows the invariant, the last events, the replay command and the timeline, of a smaller run if ``shrink`` finds
    one.

    :param seeds: a number of seeds (from 0), or the seeds.
    :param faults: by default ``Faults().times(20)``: about the faults of a day in each virtual hour.
    :param options: the other parameters of :class:`Simulation`.
    """
    chosen = Faults().times(HOURLY) if faults is None else faults
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        report = Simulation(seed=seed, duration=duration, faults=chosen, **options).run(build)
        if not report.failed:
            continue
        small = _shrunk(report, build) if shrink else report
        raise AssertionError(f"{small}\n{as_text(around(small))}")


def _shrunk(report: SimulationReport, build: Callable[[Mailbox[Any, Any]], LoopGroup]) -> SimulationReport:
    return shrink(report, lambda simulation: simulation.run(build))
