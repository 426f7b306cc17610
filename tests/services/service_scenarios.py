"""Services in trouble, drawn from a seed: what they are, what their programs do, and how it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.policies import RestartPolicy
from mainspring.services.restarts import RestartType
from mainspring.services.spec import (
    ExecProbe,
    HealthCheckSettings,
    Hook,
    HookMoment,
    HookSettings,
    Lifecycle,
    Probe,
    ServiceSpec,
    ShutdownSettings,
    StartupSettings,
    Strategy,
)
from mainspring.testing import SimulatedProcess, SimulatedProgram

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CALM_FOR = 90.0
"""Seconds without trouble after which all must stand still: longer than all tries and delays together."""
HOOK_TIMEOUT = 0.5
NAMES = "abcde"


@dataclass(repr=False)
class Scenario:
    """One drawn case. ``calm_at``: from then on nothing fails any more; infinite where it ends in the midst of trouble."""

    seed: int
    specs: list[ServiceSpec]
    strategy: Strategy
    max_restarts: int | None
    period: float
    shutdown: ShutdownSettings
    calm_at: float
    end_at: float
    end: str
    """``request``, ``shutdown`` (with a timeout of its own) or ``cancel``."""
    latency: float
    is_operated: bool
    """True if an operator starts, stops, restarts and reloads services meanwhile."""
    passed: dict[str, list[float]] = field(default_factory=dict)
    """When the probe of a service has passed."""

    def __post_init__(self) -> None:
        self._random = Random(f"world {self.seed}")
        self._ill: dict[str, list[tuple[float, float, str]]] = {}

    def programs(self) -> dict[str, Callable[[SimulatedProcess], Awaitable[int | None]]]:
        """The programs of all commands."""
        found: dict[str, Callable[[SimulatedProcess], Awaitable[int | None]]] = {}
        for spec in self.specs:
            found[f"main:{spec.name}"] = self._main
            found[f"ask:{spec.name}"] = self._ask
            found["hook"] = self._hook
        return found

    def pause(self) -> float:
        """How long the next start, or the news of an end, takes."""
        return self._random.uniform(0.0, self.latency)

    async def _main(self, process: SimulatedProcess) -> int:
        return await self._drawn(process.random)(process)

    def _drawn(self, rng: Random) -> SimulatedProgram:
        now = anyio.current_time()
        stops_in = rng.choice([0.0, 0.0, 0.2, 1.0, 10.0, None])
        dies_in = rng.choice([0.0, 0.0, 0.0, 0.3])
        children = tuple(
            SimulatedProgram(ready_in=None, stops_in=rng.choice([0.0, 0.5, None]), dies_in=dies_in)
            for _ in range(rng.choice([0, 0, 0, 1, 2]))
        )
        ready_in = rng.choice([0.0, 0.1, 0.5, 2.0])
        lives = rng.expovariate(1 / rng.choice([3.0, 10.0, 30.0, 100.0]))
        returncode = rng.choice([0, 1, 3, -11, -9])
        trouble = rng.random()
        if now >= self.calm_at or now + ready_in + lives >= self.calm_at:
            lives = math.inf
        if now < self.calm_at and trouble < 0.05:
            return SimulatedProgram(ready_in=None, stops_in=stops_in, dies_in=dies_in, children=children)
        if now < self.calm_at and trouble < 0.15:
            return SimulatedProgram(
                ready_in=None, lives=rng.choice([0.0, 0.3]), returncode=returncode, children=children
            )
        return SimulatedProgram(
            ready_in=ready_in,
            ready_line="up",
            lives=lives,
            returncode=returncode,
            stops_in=stops_in,
            dies_in=dies_in,
            children=children,
        )

    async def _ask(self, process: SimulatedProcess) -> int:
        return 0 if await self.probe(process.launch.service) else 1

    async def probe(self, service: str) -> bool:
        """Answer as the service is: ill now and then."""
        now = anyio.current_time()
        for begin, end, kind in self._illnesses(service):
            if begin <= now < end and now < self.calm_at:
                if kind == "hangs":
                    await anyio.sleep_forever()
                if kind == "raises":
                    raise LookupError("ill")
                return False
        self.passed.setdefault(service, []).append(now)
        return True

    def _illnesses(self, service: str) -> list[tuple[float, float, str]]:
        if service not in self._ill:
            rng, at, found = Random(f"ill {self.seed} {service}"), 0.0, []
            while at < 300:
                at += rng.expovariate(1 / 15)
                found.append((at, at + rng.uniform(0.5, 8), rng.choice(["fails", "raises", "hangs"])))
            self._ill[service] = found
        return self._ill[service]

    async def _hook(self, process: SimulatedProcess) -> int:
        await self.hook()
        return 0

    async def hook(self) -> None:
        """Take a moment; fail or hang now and then."""
        trouble = self._random.random() if anyio.current_time() < self.calm_at else 1.0
        if trouble < 0.05:
            await anyio.sleep_forever()
        await anyio.sleep(self._random.choice([0.0, 0.1]))
        if trouble < 0.15:
            raise LookupError("the hook failed")

    def probe_of(self, rng: Random, name: str) -> Probe:
        """A probe of a service: a callable or a command."""

        async def ask() -> bool:
            return await self.probe(name)

        return ask if rng.random() < 0.6 else ExecProbe((f"ask:{name}",))


def scenario(seed: int) -> Scenario:
    """Draw a case."""
    rng = Random(f"scenario {seed}")
    calm_at = rng.uniform(20, 60)
    in_trouble = rng.random() < 0.4
    drawn = Scenario(
        seed,
        [],
        rng.choice([Strategy.ONE_FOR_ONE, Strategy.ONE_FOR_ONE, Strategy.ONE_FOR_ALL, Strategy.REST_FOR_ONE]),
        rng.choice([None, None, 4, 10]),
        rng.choice([10.0, 30.0]),
        ShutdownSettings(timeout=rng.choice([5.0, 15.0, 60.0])),
        math.inf if in_trouble else calm_at,
        calm_at if in_trouble else calm_at + CALM_FOR,
        rng.choice(["request", "request", "request", "shutdown", "cancel"]),
        rng.choice([0.0, 0.02]),
        rng.random() < 0.5,
    )
    count = rng.randint(1, len(NAMES))
    for index, name in enumerate(NAMES[:count]):
        needed = tuple(other for other in NAMES[:index] if rng.random() < 0.35)
        drawn.specs.append(_spec(drawn, rng, name, needed))
    return drawn


def _spec(drawn: Scenario, rng: Random, name: str, needed: tuple[str, ...]) -> ServiceSpec:
    ready: dict[str, Any] = rng.choice(
        [
            {"notify": True},
            {"ready_line": "^up$"},
            {"probe": drawn.probe_of(rng, name)},
            {"probe": drawn.probe_of(rng, name), "notify": True},
            {"startup_probe": drawn.probe_of(rng, name), "probe": drawn.probe_of(rng, name)},
            {"ready_after": rng.choice([0.0, 0.5])},
        ]
    )
    restart = rng.choices(list(RestartType), [8, 2, 1])[0]
    return ServiceSpec(
        name=name,
        command=(f"main:{name}",),
        replicas=rng.choice([1, 1, 2, 3]),
        depends_on=needed,
        restart=restart,
        core=rng.random() < 0.5,
        hooks=_hooks(drawn, rng) if rng.random() < 0.3 else {},
        lifecycle=_lifecycle(rng),
        **ready,
    )


def _hooks(drawn: Scenario, rng: Random) -> dict[HookMoment, tuple[Hook, ...]]:
    action = drawn.hook if rng.random() < 0.5 else ("hook",)
    moments = rng.sample(list(HookMoment), rng.randint(1, 4))
    return {moment: (Hook(action, abort=rng.random() < 0.3),) for moment in moments}


def _lifecycle(rng: Random) -> Lifecycle:
    drain, force = rng.choice([0.5, 2.0, 4.0]), rng.choice([1.0, 2.0])
    return Lifecycle(
        startup=StartupSettings(
            timeout=rng.choice([3.0, 6.0]), max_retries=rng.randint(2, 5), health_check_interval=rng.choice([0.2, 1.0])
        ),
        shutdown=ShutdownSettings(
            timeout=drain + force + rng.choice([-0.5, 1.0, 3.0]), drain_timeout=drain, force_kill_timeout=force
        ),
        health_check=HealthCheckSettings(
            interval=rng.choice([1.0, 3.0]), timeout=0.5, max_failures=rng.randint(1, 3), successes=rng.randint(1, 2)
        ),
        restart_policy=RestartPolicy(
            max_retries=rng.choice([2, 5, 10]),
            initial_delay=rng.choice([0.0, 0.1, 0.5]),
            max_delay=rng.choice([1.0, 3.0]),
            backoff_factor=rng.choice([1.5, 2.0]),
            reset_interval=rng.choice([5.0, 20.0]),
            jitter=rng.choice(["none", "full"]),
        ),
        hooks=HookSettings(timeout=HOOK_TIMEOUT),
    )
