"""A replica whose processes are simulated, and all that is told of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from mainspring import Dispatcher
from mainspring.core.state_machine import ServiceState
from mainspring.events import Event, ServiceStateChanged
from mainspring.policies import RestartPolicy
from mainspring.runtime.scope import lone_error
from mainspring.services.replica import Replica, ReplicaEnding
from mainspring.services.spec import (
    HealthCheckSettings,
    HookSettings,
    Lifecycle,
    ServiceSpec,
    ShutdownSettings,
    StartupSettings,
)
from mainspring.testing import ProcessRecord, SimulatedProcess, SimulatedProgram, SimulatedSpawner, run_virtual

Program = Callable[[SimulatedProcess], Awaitable[int | None]]
T = TypeVar("T")
WELL = SimulatedProgram()
POLICY = RestartPolicy(initial_delay=1, max_delay=60, backoff_factor=2, jitter="none")


def virtually(main: Callable[[], Awaitable[T]], *, seed: int = 0) -> T:
    """Run a test in virtual time, and raise its own error."""
    try:
        return run_virtual(main, seed=seed)
    except BaseException as error:
        raise lone_error(error) from None


def turns(*programs: Program) -> Program:
    """Return a program that is another one at each start; the last one stays."""
    left = list(programs)

    async def program(process: SimulatedProcess) -> int | None:
        return await (left.pop(0) if len(left) > 1 else left[0])(process)

    return program


def lifecycle(
    *,
    startup: StartupSettings | None = None,
    shutdown: ShutdownSettings | None = None,
    health: HealthCheckSettings | None = None,
    policy: RestartPolicy = POLICY,
    hooks: HookSettings | None = None,
) -> Lifecycle:
    """Settings without jitter."""
    return Lifecycle(
        startup or StartupSettings(),
        shutdown or ShutdownSettings(),
        health or HealthCheckSettings(),
        policy,
        hooks or HookSettings(),
    )


class Play:
    """A replica that runs, its spawner, and what happened at which instant."""

    def __init__(self, replica: Replica, spawner: SimulatedSpawner, events: list[tuple[float, Event]]) -> None:
        self.replica = replica
        self.spawner = spawner
        self.events = events
        self.ended_at: float | None = None
        self.ended = anyio.Event()

    def of(self, kind: type[Any]) -> list[tuple[float, Any]]:
        """The events of a kind, with their instants."""
        return [(at, event) for at, event in self.events if isinstance(event, kind)]

    @property
    def states(self) -> list[tuple[float, str]]:
        """All states after the first, with the instants at which they began."""
        return [(at, str(event.new)) for at, event in self.of(ServiceStateChanged)]

    @property
    def mains(self) -> list[ProcessRecord]:
        """The processes of the service's own program."""
        return [each for each in self.spawner.of(launched=True) if each.launch.command[0] == "main"]

    @property
    def starts(self) -> list[float]:
        """When its processes were started."""
        return [each.started_at for each in self.mains]

    async def end(self) -> ReplicaEnding:
        """Wait until the replica stays down."""
        await self.ended.wait()
        assert self.replica.ending is not None
        return self.replica.ending

    async def running(self) -> None:
        """Wait until it is running."""
        while self.replica.life.state is not ServiceState.RUNNING:
            await anyio.sleep(0.125)

    def check(self) -> None:
        """What holds of every replica."""
        assert not self.spawner.doubles()
        assert (self.replica.ending is None) == (self.replica.life.state is not ServiceState.STOPPED)


@asynccontextmanager
async def playing(
    program: Program | Exception = WELL,
    *,
    programs: dict[str, Program | Exception] | None = None,
    before_start: Callable[[Replica], Awaitable[object]] | None = None,
    on_restart: Callable[[Replica], object] | None = None,
    changed: Callable[[Replica], object] | None = None,
    latency: Callable[[], float] | None = None,
    begin: bool = True,
    supervisors: dict[str, str] | None = None,
    **spec: Any,
) -> AsyncIterator[Play]:
    """Run a replica of a program. It is ready by notification, unless the specification says another thing.

    ``supervisors``: more of the environment of the supervisor.
    """
    if not {"notify", "ready_line", "probe", "startup_probe", "ready_after"} & set(spec):
        spec["notify"] = True
    spec.setdefault("lifecycle", lifecycle())
    dispatcher = Dispatcher()
    events: list[tuple[float, Event]] = []
    dispatcher.subscribe(Event, lambda event: events.append((anyio.current_time(), event)))
    async with SimulatedSpawner({"main": program} | (programs or {}), latency=latency) as spawner:
        replica = Replica(
            ServiceSpec(name="web", command=("main",), **spec),
            1,
            spawner=spawner,
            dispatcher=dispatcher,
            environment={"PATH": "/bin"} | (supervisors or {}),
            before_start=before_start,
            on_restart=on_restart,
            changed=changed,
        )
        play = Play(replica, spawner, events)

        async def run() -> None:
            assert await replica.run() == replica.ending
            play.ended_at = anyio.current_time()
            play.check()
            assert not spawner.running() or "left in spite of SIGKILL" in str(replica.ending)
            play.ended.set()

        async with anyio.create_task_group() as tasks:
            if begin:
                tasks.start_soon(run)
            yield play
            play.check()
            tasks.cancel_scope.cancel()
        assert not begin or replica.ending is not None
