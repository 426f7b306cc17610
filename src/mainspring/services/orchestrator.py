"""``Orchestrator``: services that start in order, are kept running, and stop in order."""

from __future__ import annotations

import math
import os
import signal
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import anyio

from mainspring.core.dispatcher import Dispatcher
from mainspring.core.loggers import Logger
from mainspring.core.state_machine import ORCHESTRATOR, OrchestratorState, StateMachine, Transition
from mainspring.errors import ConfigError, InvalidParameterError, MainspringError
from mainspring.events import OrchestratorStateChanged, ServiceOutput, ShutdownRequested
from mainspring.runtime.hard_exit import last_words
from mainspring.runtime.scope import DaemonScope
from mainspring.runtime.service_manager import without_manager
from mainspring.runtime.signals import ShutdownCoordinator
from mainspring.services.alerts import Alerts
from mainspring.services.listening import SocketPlaces
from mainspring.services.managed_service import WORKING
from mainspring.services.notify import OrchestratorNews, own_process
from mainspring.services.operations import Operations
from mainspring.services.order import next_state
from mainspring.services.recent_output import RecentOutput
from mainspring.services.report import OrchestratorReport, report_of
from mainspring.services.restarts import Intensity
from mainspring.services.spec import ServiceSpec, ShutdownSettings, Strategy
from mainspring.services.status import OrchestratorStatus, status_of
from mainspring.services.tree import ServiceTree
from mainspring.threads.entry import AnywhereEvent, Entry
from mainspring.validation import is_number, is_whole

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.http.client import Origin
    from mainspring.services.alerts import AlertTarget
    from mainspring.services.managed_service import ManagedReplica
    from mainspring.services.spawning import Spawner

_log = Logger("mainspring.service")
_STUCK_AFTER = 1.0
"""Seconds beyond the last kill after which a replica that has not ended is cancelled."""


class Orchestrator:
    """Runs services: each starts when all it depends on are running, and stops before them.

    It is Ready when all core services have started, Running while all services are well, Degraded while one is not. A core
    service that is given up ends the whole, with exit status 1. It ends by itself when all replicas have ended, and its exit
    status is the highest of theirs. It runs once.

    :param services: at least one.
    :param strategy: which services are restarted with a service that has ended unexpectedly.
    :param max_restarts: more restarts than that within ``period`` seconds end the whole; None: no limit.
    :param shutdown: ``timeout`` caps the stop of all services together; what is left is killed. A service whose own
        settings of the stop (other than the defaults) have a longer ``timeout`` has that.
    :param spawner: starts the processes; None: on this machine. Entered by :meth:`run`. A test gives a
        :class:`~mainspring.testing.SimulatedSpawner`.
    :param dispatcher: hears all events.
    :param stay_up: True if it waits for requests when all services have ended.
    :param health_host: where the health server listens. ``unix:/path`` for a Unix socket.
    :param health_port: its port (0: any free one); None: no health server.
    :param control: the path of a Unix socket on which the same server takes the commands of this user, such as ``mainspring
        restart``; None: none. It needs no token.
    :param alerts: what is told when a service is given up, or all are ended for too many restarts: each a
        :class:`Webhook`, an :class:`AlertCommand` or an async function of an :class:`Alert`.
    :raises ConfigError: a value cannot work; the services depend on unknown ones, on each other, or have one name.
    """

    def __init__(
        self,
        services: Sequence[ServiceSpec],
        *,
        name: str = "mainspring",
        strategy: Strategy | str = Strategy.ONE_FOR_ONE,
        max_restarts: int | None = None,
        period: float = 60.0,
        shutdown: ShutdownSettings | None = None,
        spawner: Spawner | None = None,
        dispatcher: Dispatcher | None = None,
        stay_up: bool = False,
        health_host: str = "127.0.0.1",
        health_port: int | None = None,
        control: str | os.PathLike[str] | None = None,
        alerts: Sequence[AlertTarget] = (),
    ) -> None:
        self.name = name
        self.dispatcher = Dispatcher() if dispatcher is None else dispatcher
        self.report: OrchestratorReport | None = None
        """How its run ended; None before."""
        self._news = OrchestratorNews(None, self._stop_within)
        self._shutdown = ShutdownSettings() if shutdown is None else shutdown
        self._spawner = _default_spawner() if spawner is None else spawner
        self._stay_up = stay_up
        self._health = None if health_port is None else (health_host, _port(health_port))
        self._control = None if control is None else os.fspath(control)
        self._health_url: str | None = None
        self._alerts = Alerts(alerts, orchestrator=name, dispatcher=self.dispatcher)
        self._entry: Entry | None = None
        self._ended: AnywhereEvent | None = None
        self._reason: str | None = None
        self._failure: str | None = None
        self._finished = False
        self._timeout = self._shutdown.timeout
        self._limited = False
        self._began_stop = 0.0
        self._forced_by: int | None = None
        self._dirty = True
        self._killed: dict[ManagedReplica, float] = {}
        self._machine: StateMachine[OrchestratorState] = StateMachine(
            ORCHESTRATOR, OrchestratorState.UNINITIALIZED, name=f"orchestrator {name!r}", on_transition=self._emit
        )
        self._tree = ServiceTree(
            _checked(services),
            strategy=_strategy(strategy),
            intensity=_intensity(max_restarts, period),
            environment=without_manager(os.environ),
            dispatcher=self.dispatcher,
            changed=self._note_change,
            escalate=self._escalate,
        )

        self._operations = Operations(name, self._tree)

    @property
    def state(self) -> OrchestratorState:
        """The present state."""
        return self._machine.state

    @property
    def health_url(self) -> str | None:
        """Where the health server is reached, with its real port; None before it listens, and without one."""
        return self._health_url

    # ------------------------------------------------------------------------------------------------------- the run

    async def run(self, *, install_signals: bool = True) -> OrchestratorReport:
        """Run until a signal, a request, or the end of all services. Return how it ended.

        With ``install_signals`` it receives SIGTERM and SIGINT. A second one is passed on to all processes, which then have
        ``force_kill_timeout``. A third kills all, and ends this process. It also tells the service manager of this process of
        its life (``sd_notify``), and reaps orphans as process 1.
        Cancelled, it kills all processes.

        :raises ConfigError: it has run already, or an address that it is to listen on cannot be used.
        """
        if self._entry is not None:
            raise ConfigError(f"orchestrator {self.name!r} runs once; make another one")
        self._entry = Entry(f"orchestrator {self.name!r}")
        self._ended = AnywhereEvent(f"end of orchestrator {self.name!r}")
        try:
            async with AsyncExitStack() as stack:
                if install_signals:
                    coordinator = ShutdownCoordinator.get() or ShutdownCoordinator()
                    await stack.enter_async_context(
                        coordinator.during_run(self.request_shutdown, self._on_signal_again)
                    )
                    self._news = await stack.enter_async_context(
                        own_process(self.name, self.dispatcher, self._stop_within)
                    )
                await self._serve(stack)
                places = stack.enter_context(SocketPlaces())
                stack.callback(self._tree.sockets.keep_only, ())
                spawner = await stack.enter_async_context(self._spawner)
                await stack.enter_async_context(self._alerts.sending(spawner))
                async with DaemonScope(f"services of {self.name}", timeout=0.0) as scope:
                    try:
                        await self._run_services(spawner, scope, places)
                    finally:
                        self._tree.close()
                    scope.cancel()  # what does not even end when killed
                self._conclude()
        finally:
            for state in (OrchestratorState.SHUTTING_DOWN, OrchestratorState.TERMINATED):
                if self._machine.can(state):
                    self._enter(state)
            self._ended.set()
        assert self.report is not None
        return self.report

    async def _serve(self, stack: AsyncExitStack) -> None:
        """Start the servers that are wanted. They end when ``stack`` is left."""
        wanted = [] if self._health is None else [self._health]
        if self._control is not None:
            wanted.append((f"unix:{self._control}", 0))
        if not wanted:
            return
        # late: no server is imported that is not wanted
        from mainspring.http.serve_orchestrator import start
        from mainspring.telemetry.service_metrics import ServiceMetrics

        scope = await stack.enter_async_context(DaemonScope(f"servers of {self.name}"))
        output = RecentOutput(known=lambda: self._tree.services)
        stack.callback(self.dispatcher.subscribe(ServiceOutput, output.note))
        stack.callback(output.close)
        metrics = ServiceMetrics(self)
        stack.callback(metrics.subscribe(self.dispatcher))
        options = {"output": output, "metrics": metrics, "replica_servers": self._replica_servers}
        urls = [await start(self, scope, host, port, **options) for host, port in wanted]
        self._health_url = urls[0] if self._health is not None else None
        if self._health_url is not None:
            _log.info("%s: health server at %s", self.name, self._health_url)

    async def _run_services(self, spawner: Spawner, scope: DaemonScope, places: SocketPlaces) -> None:
        self._began_stop = anyio.current_time()  # of a stop that was asked for before the run
        if self._reason is None:
            self._enter(OrchestratorState.INITIALIZING)
            self._tree.open(spawner, scope, places)
        while self._reason is None:
            self._dirty = False
            self._follow_services()
            if self._tree.finished and self._reason is None and not self._stay_up:
                self._finished = True
                self._request("all services have ended", None)
            await self._tree.changes.wait_for(lambda: self._dirty or self._reason is not None)
        self._enter(OrchestratorState.SHUTTING_DOWN)
        await self._bring_down()

    def _follow_services(self) -> None:
        tree = self._tree
        while True:
            new = next_state(
                self.state, core_started=tree.core_started, all_started=tree.all_started, all_well=tree.all_well
            )
            if new is self.state:
                return
            self._enter(new)

    async def _bring_down(self) -> None:
        """Stop all services in reverse order. Kill each that is late, and leave what does not even end then."""
        self._tree.stop_waiting()
        while self._tree.up:
            self._tree.stop_next(self._tree.up)
            self._dirty = False
            due = self._kill_late()
            now = anyio.current_time()
            if due <= now:
                return
            await self._tree.changes.wait_for(lambda: self._dirty, lambda due=due: due)  # type: ignore[misc]

    def _kill_late(self) -> float:
        """Kill the replicas whose time is up. Return when the next one is due; now, if none is left to wait for."""
        timeouts = {spec.name: self._limit_of(spec) for spec in self._tree.specs}
        limits = self._tree.order.stop_limits(timeouts, self._timeout)
        now, due = anyio.current_time(), math.inf
        for managed in self._tree.replicas():
            if managed.ended:
                continue
            at = self._began_stop + limits[managed.spec.name]
            if managed not in self._killed and at <= now:
                self._killed[managed] = now
                managed.replica.kill()
            if managed in self._killed:
                at = self._killed[managed] + managed.spec.lifecycle.shutdown.force_kill_timeout + _STUCK_AFTER
            if at > now:
                due = min(due, at)
        return now if due == math.inf else due

    def _stop_within(self) -> float:
        """Return in how many seconds from now all is over, if a shutdown began now."""
        specs = self._tree.specs
        limits = self._tree.order.stop_limits({spec.name: self._limit_of(spec) for spec in specs}, self._timeout)
        return max(limits.values()) + max(spec.lifecycle.shutdown.force_kill_timeout for spec in specs) + _STUCK_AFTER

    def _limit_of(self, spec: ServiceSpec) -> float:
        """Return the service's own limit. It has none where nothing is said of its stop, or a caller has set a limit."""
        own = spec.lifecycle.shutdown
        return 0.0 if own == ShutdownSettings() or self._limited else own.timeout

    def _conclude(self) -> None:
        self._enter(OrchestratorState.TERMINATED)
        self.report = report_of(
            self._tree.replicas(),
            reason=self._reason or "",
            failure=self._failure,
            duration=anyio.current_time() - self._began_stop,
            killed=self._killed,
            statuses=self._tree.statuses if self._finished else (),
            forced_by=self._forced_by,
        )

    # ------------------------------------------------------------------------------------------------------- stopping

    def request_shutdown(self, reason: str = "request_shutdown()") -> None:
        """Ask for the end, and return at once. Before the run it is remembered. Callable from any thread."""
        self._call(partial(self._request, reason, None))

    async def shutdown(self, timeout: float | None = None) -> bool:
        """Stop all services, and wait for the end. Return False if a process had to be killed.

        ``timeout`` (seconds) replaces that of the settings, and all longer ones of services. Before a run it is remembered, and
        returns True. Cancelled, it stops waiting, and the shutdown goes on.

        :raises InvalidParameterError: ``timeout`` is no number of seconds.
        """
        if timeout is not None and not is_number(timeout, 0):
            raise InvalidParameterError(f"shutdown: timeout must be 0 or more seconds, not {timeout!r}")
        self._call(partial(self._request, "shutdown()", timeout))
        if self._ended is None:
            return True
        await self._ended.wait()
        return self.report is not None and self.report.clean

    # ----------------------------------------------------------------------------------------------------- operations

    async def start(self, service: str, replica: int | None = None) -> None:
        """Start a service that was stopped, has ended or was given up, or one replica of it. Return when it runs.

        What it depends on is started too. What runs is left alone. Cancelled, it stops waiting, and the start goes on.

        :raises ServiceNotFoundError: there is no such service or replica.
        :raises ServiceNotRunningError: it does not come to run.
        :raises ControlRefusedError: the orchestrator is not running. So it is with the others.
        """
        await self._operations.start(service, replica)

    async def stop(self, service: str, replica: int | None = None) -> None:
        """Stop a service, after all that depend on it; or one replica of it. Return when it has ended.

        It stays down until :meth:`start` or :meth:`restart`. Cancelled, it stops waiting, and nothing more is stopped.

        :raises ServiceNotFoundError: there is no such service or replica.
        """
        await self._operations.stop(service, replica)

    async def restart(self, service: str | None = None, replica: int | None = None) -> None:
        """Restart the replicas of a service one after the other, each when the one before runs again; or one of them.

        None: the replicas of all services that were not stopped, in the order of their start.

        What has ended is started, with what it depends on. What depends on the service runs on. Cancelled, it restarts no
        further replicas.

        :raises ServiceNotFoundError: there is no such service or replica.
        :raises ServiceNotRunningError: a replica does not come to run again. The next ones are left as they are.
        """
        await self._operations.restart(service, replica)

    async def reload(self, services: Sequence[ServiceSpec] | Callable[[], Awaitable[Sequence[ServiceSpec]]]) -> None:
        """Run these services from now on. Return when all that has changed runs.

        An async function is called for them, and what it raises is raised. A service manager hears of the reload from its begin
        to its end, however it ends.

        Services that are no longer named are stopped, new ones are started, and those that have changed are restarted, one
        replica after the other. A change of ``replicas`` or ``depends_on`` alone restarts nothing.

        :raises ConfigError: these services cannot work. Nothing has changed then.
        :raises ServiceNotRunningError: a replica does not come to run as it is to be now. The replicas and services after it
            still run as before; :meth:`reload` takes up the rest.
        """
        self._operations.check_running()
        self._news.reloading()
        try:
            await self._operations.change(_checked(await services() if callable(services) else services))
        except MainspringError as error:
            self._news.reloaded(f"reload failed: {error}")
            raise
        except BaseException:
            self._news.reloaded("the reload was cancelled")
            raise
        self._news.reloaded(str(self.state))

    # -------------------------------------------------------------------------------------------------------- requests

    def _call(self, fn: partial[None]) -> None:
        if self._entry is None:
            fn()
        else:
            self._entry.call(fn)

    def _request(self, reason: str, timeout: float | None) -> None:
        if timeout is not None:
            self._timeout = min(timeout, self._timeout) if self._reason is not None else timeout
            self._limited = True
        if self._reason is None:
            self._reason = reason
            self._tree.closing = True
            if self._entry is not None:
                self._began_stop = anyio.current_time()
                self.dispatcher.dispatch(ShutdownRequested(self.name, reason))
        self._note_change()
        self._tree.changes.notify_all()

    def _escalate(self, why: str) -> None:
        if self._reason is None:
            self._failure = why
        self._request(why, None)

    def _on_signal_again(self, signum: int, count: int) -> None:
        if count == 1:  # the shutdown was asked for by other means before
            return
        if self._forced_by is None:
            self._forced_by = signum
            self._request(signal.Signals(signum).name, None)
            self._tree.hurry()
            return
        for managed in self._tree.replicas():
            if not managed.ended:
                managed.replica.kill()
        last_words(lambda: "mainspring: the services were killed")
        os._exit(128 + signum)

    def _note_change(self) -> None:
        self._dirty = True

    # ------------------------------------------------------------------------------------------------------- states

    def status(self) -> OrchestratorStatus:
        """Return the present status of all services. It is called on the event loop of the run."""
        return status_of(self.name, self._machine, self._tree.services, reason=self._reason, failure=self._failure)

    def _replica_servers(self) -> dict[tuple[str, int], Origin]:
        """Return the servers that the HTTP probes of replicas ask, by service and replica, if the replica works now."""
        return {
            (managed.spec.name, managed.number): origin
            for managed in self._tree.replicas()
            if managed.state in WORKING and (origin := managed.replica.http_server) is not None
        }

    def _enter(self, state: OrchestratorState) -> None:
        self._machine.to(state, anyio.current_time())

    def _emit(self, transition: Transition[OrchestratorState]) -> None:
        seconds = 0.0 if transition.old is OrchestratorState.UNINITIALIZED else transition.seconds
        self.dispatcher.dispatch(OrchestratorStateChanged(self.name, transition.old, transition.new, seconds))


def _checked(services: Sequence[ServiceSpec]) -> list[ServiceSpec]:
    if isinstance(services, str | ServiceSpec) or not all(isinstance(spec, ServiceSpec) for spec in services):
        raise ConfigError(f"Orchestrator: services must be a list of ServiceSpec, not {services!r:.200}")
    if not services:
        raise ConfigError("Orchestrator: it needs at least one service")
    return list(services)


def _default_spawner() -> Spawner:
    from mainspring.services.spawner import ProcessSpawner  # late: a simulation does without it

    return ProcessSpawner()


def _port(port: int) -> int:
    if not (is_whole(port, 0) and port <= 65_535):
        raise ConfigError(f"Orchestrator: health_port must be 0 to 65535, or None, not {port!r}")
    return port


def _strategy(strategy: Strategy | str) -> Strategy:
    try:
        return Strategy(strategy)
    except ValueError:
        allowed = ", ".join(Strategy)
        raise ConfigError(f"Orchestrator: strategy must be one of {allowed}, not {strategy!r}") from None


def _intensity(most: int | None, period: float) -> Intensity | None:
    if not (is_number(period, 0) and period):
        raise ConfigError(f"Orchestrator: period must be above 0 seconds, not {period!r}")
    if most is None:
        return None
    if not is_whole(most, 0):
        raise ConfigError(f"Orchestrator: max_restarts must be a whole number from 0, or None, not {most!r}")
    return Intensity(most, period)
