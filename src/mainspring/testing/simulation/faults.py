"""``Faults``: how often what fails; and the plan of a run: each planned fault, drawn from the seed before the run starts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random
from typing import TYPE_CHECKING, ClassVar, Final, Self

from mainspring.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

EVENTS: Final = ("crash", "signal", "deploy", "partition", "store_restart", "clock_jump", "freeze")
"""The faults that happen at an instant. Their rates are per hour of virtual time, for the whole fleet."""
CHANCES: Final = (
    "second_signal",
    "slow_call",
    "slow_handler",
    "hanging_handler",
    "failing_handler",
    "swallowing_handler",
    "poison",
    "duplicate",
)
"""The faults of single signals, calls, handler runs and messages. Their values are probabilities."""
PARTITIONS: Final = ("hang", "fail", "lost")
HOUR: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Faults:
    """How often what fails. The defaults add up to one event an hour and include every kind of fault.

    Events, as rates per hour of virtual time over the whole fleet:

    :param crash: a worker dies, as by SIGKILL; another is started in its place.
    :param signal: one worker gets SIGTERM, shuts down, and is started again.
    :param deploy: all workers get SIGTERM one after the other, each once the previous one is up again.
    :param partition: one worker cannot reach the store for a while: calls hang, fail, or take effect and then fail.
    :param store_restart: the store is unavailable to all for a while; it keeps what it has accepted.
    :param clock_jump: one worker's wall clock jumps by up to four hours, either way.
    :param freeze: one worker freezes (SIGSTOP, a suspended machine), mostly for longer than its leases last, then continues.

    Probabilities:

    :param second_signal: a second signal follows a SIGTERM during the shutdown.
    :param slow_call: a call to the store takes up to 5 s, before or after it takes effect.
    :param slow_handler: a handler takes up to five minutes longer.
    :param hanging_handler: a handler hangs until it is cancelled.
    :param failing_handler: a handler raises.
    :param swallowing_handler: a handler is slow and ignores its cancellation for up to 20 s.
    :param poison: a message cannot be decoded: it is no JSON, or has the wrong shape.
    :param duplicate: a message is sent again, as if the first answer had been lost.
    :raises ConfigError: a value is out of range.
    """

    crash: float = 0.25
    signal: float = 0.2
    deploy: float = 0.05
    partition: float = 0.2
    store_restart: float = 0.1
    clock_jump: float = 0.1
    freeze: float = 0.1
    second_signal: float = 0.2
    slow_call: float = 0.01
    slow_handler: float = 0.01
    hanging_handler: float = 0.001
    failing_handler: float = 0.02
    swallowing_handler: float = 0.002
    poison: float = 0.005
    duplicate: float = 0.01

    kinds: ClassVar[tuple[str, ...]] = EVENTS + CHANCES

    def __post_init__(self) -> None:
        for name in self.kinds:
            value = getattr(self, name)
            most = 1.0 if name in CHANCES else 3600.0
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                what = "a probability from 0 to 1" if name in CHANCES else "a rate from 0 to 3600 an hour"
                raise ConfigError(f"Faults: {name} must be {what}, not {value!r}")

    @classmethod
    def none(cls) -> Self:
        """Return faults that never happen."""
        return cls.just()

    @classmethod
    def just(cls, **values: float) -> Self:
        """Return faults of the named kinds only: ``Faults.just(crash=4, slow_call=0.1)``."""
        _check_kinds(values)
        return cls(**{**dict.fromkeys(cls.kinds, 0.0), **values})

    def only(self, kinds: Iterable[str]) -> Self:
        """Return these faults, restricted to ``kinds``. An unknown kind is a :class:`ConfigError` that lists all kinds."""
        chosen = set(kinds)
        _check_kinds(chosen)
        return replace(self, **{name: 0.0 for name in self.kinds if name not in chosen})

    def times(self, factor: float) -> Self:
        """Return these faults, ``factor`` times as often. Probabilities become at most 1."""
        scaled = {name: min(getattr(self, name) * factor, 1.0 if name in CHANCES else 3600.0) for name in self.kinds}
        return replace(self, **scaled)

    def __str__(self) -> str:
        told = [f"{name}={getattr(self, name):g}" for name in self.kinds if getattr(self, name)]
        return ", ".join(told) or "none"

    def source(self) -> str:
        """Return the Python expression that makes these faults."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        present = {name: getattr(self, name) for name in self.kinds if getattr(self, name)}
        name, values = ("Faults", changed) if len(changed) <= len(present) else ("Faults.just", present)
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def _check_kinds(kinds: Iterable[str]) -> None:
    for kind in sorted(kinds):
        if kind not in Faults.kinds:
            raise ConfigError(f"there are no faults of kind {kind!r}; there are {', '.join(Faults.kinds)}")


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault of the plan. ``number`` is its index in the whole plan; a replay selects faults by it."""

    number: int
    at: float
    kind: str
    worker: int
    seconds: float
    mode: str = ""

    def __str__(self) -> str:
        what = f"{self.kind} ({self.mode})" if self.mode else self.kind
        who = f"worker {self.worker}" if self.kind not in ("deploy", "store_restart") else "all workers"
        how = f" for {self.seconds:.1f} s" if self.kind in ("partition", "store_restart", "freeze") else ""
        return f"#{self.number} {what}, {who}, at {self.at:.1f} s{how}"


def generator(seed: int, name: str) -> Random:
    """Return the random generator of one part of a run, so that no part disturbs the draws of another."""
    return Random(f"{seed} {name}")  # noqa: S311 - reproducibility is the point


def plan(faults: Faults, *, seed: int, duration: float, workers: int, lease: float = 60.0) -> list[PlannedFault]:
    """Return the faults of a run of ``duration`` seconds, in order of time. Equal arguments give equal plans.

    Each kind has its own random generator, so that disabling one kind does not move the others. Instants do not depend on
    ``duration``, so that a shorter run has the same plan, truncated. ``lease`` is the longest lease that workers take; a
    freeze lasts from half of it to three times as long.
    """
    found: list[tuple[float, str, int, float, str]] = []
    for kind in EVENTS:
        rate = getattr(faults, kind) / HOUR
        rng = generator(seed, kind)
        at = 0.0
        while rate > 0:
            at += rng.expovariate(rate)
            worker, stretch, mode = rng.randrange(1 << 30), rng.random(), rng.random()
            if at >= duration:
                break
            found.append((at, kind, worker % workers, *_extent(kind, stretch, mode, lease)))
    found.sort()
    return [PlannedFault(number, *event) for number, event in enumerate(found)]


def _extent(kind: str, stretch: float, mode: float, lease: float) -> tuple[float, str]:
    """Return how long a fault lasts, in seconds, and its mode, from two draws between 0 and 1."""
    if kind in ("crash", "signal", "deploy"):
        return 0.5 + 20 * stretch, ""  # until the next process is started
    if kind == "partition":
        return 1.0 + lease * 3 * stretch**2, PARTITIONS[int(mode * len(PARTITIONS))]
    if kind == "store_restart":
        return 1.0 + 60 * stretch**2, ""
    if kind == "freeze":
        return lease * (0.5 + 2.5 * stretch), ""
    return (4 * HOUR * stretch) * (1 if mode < 0.5 else -1), ""  # clock_jump
