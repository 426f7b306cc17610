"""One replica of a service: one process at a time, from its first start until it stays down."""

from __future__ import annotations

import math
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import anyio

from mainspring.core.state_machine import ServiceState, Transition
from mainspring.events import (
    HookFailed,
    ProbeAnswered,
    ProbeChanged,
    ServiceGivenUp,
    ServiceOutput,
    ServiceProcessEnded,
    ServiceProcessStarted,
    ServiceStartFailed,
    ServiceStateChanged,
)
from mainspring.runtime.condition import ConditionVariable
from mainspring.services.commands import run_command
from mainspring.services.health import Health, HealthVerdict
from mainspring.services.hooks import run_hooks
from mainspring.services.life import Life
from mainspring.services.probes import ask, of_replica, origin_of
from mainspring.services.process import MAX_MESSAGES, ServiceProcess
from mainspring.services.restarts import Escalate, RunEnd, StartAgain
from mainspring.services.spawning import USER_VARIABLES, Launch, SpawnError
from mainspring.services.spec import HookMoment, HttpProbe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.http.client import Origin
    from mainspring.services.commands import CommandResult
    from mainspring.services.restarts import RestartDecision
    from mainspring.services.spawning import ProcessEnd, Spawner, Stream
    from mainspring.services.spec import Probe, ServiceSpec

FIRST_PAUSE = 0.1
"""Seconds between the first two questions of a probe while a process starts: most are ready within a second or two."""
MEMORY_CHECK_INTERVAL = 5.0
"""Seconds between two looks at the memory of a process that is replaced when it has grown."""


class ReplicaEnding(NamedTuple):
    """Why a replica stays down.

    ``failed``: not by its own work's end, nor by a stop that it obeyed. ``status``: an exit status.
    """

    failed: bool
    reason: str
    status: int


class Replica:
    """Keeps one process of a service running.

    :param number: from 1; ``MAINSPRING_REPLICA``.
    :param spawner: starts its processes, and those of its hooks and probes.
    :param environment: the environment of its processes beside what its specification sets; None: that of this program.
    :param socket: the path of a Unix socket that its process may serve its probes on (``MAINSPRING_SOCKET``).
    :param listening: descriptors of listening sockets that its processes get.
    :param before_start: awaited before each start; a stop ends the wait.
    :param on_worn: called with the reason when its process is to be replaced by a fresh one (``replace_after``). It is to call
        :meth:`request_restart` when it suits. None: at once.
    :param on_restart: called when its process has ended by itself, or is not well, and another one is to be started.
    :param changed: called after each change of what it shows.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        number: int,
        *,
        spawner: Spawner,
        dispatcher: Dispatcher,
        environment: Mapping[str, str] | None = None,
        socket: str | None = None,
        listening: Sequence[int] = (),
        before_start: Callable[[Replica], Awaitable[object]] | None = None,
        on_restart: Callable[[Replica], object] | None = None,
        on_worn: Callable[[Replica, str], object] | None = None,
        changed: Callable[[Replica], object] | None = None,
    ) -> None:
        self.spec = spec
        self.number = number
        self.name = f"{spec.name}.{number}"
        self.ending: ReplicaEnding | None = None
        self.error: str | None = None
        """What its last probe or start said; None where all is well."""
        self.starts = 0
        """How many processes were started."""
        self._spawner = spawner
        self._dispatcher = dispatcher
        self._environment = environment
        self._socket = socket
        self._listening = tuple(listening)
        self._before_start = before_start
        self._on_restart = on_restart
        self._on_worn = on_worn
        self._on_change = changed
        self._condition = ConditionVariable()
        self._stop_asked = False
        self._restart_asked: str | None = None
        self._hurried = False
        self._unwell: str | None = None
        self._probe_error: str | None = None
        self._startup_probe, self._probe = (
            None if probe is None else of_replica(probe, service=spec.name, replica=number)
            for probe in (spec.startup_probe, spec.probe)
        )
        self._is_restart = False
        self._process: ServiceProcess | None = None
        self.life = Life(
            f"service {self.name!r}",
            policy=spec.lifecycle.restart_policy,
            on_transition=self._moved,
            restart=spec.restart,
            start_tries=spec.lifecycle.startup.max_retries,
            never_after=spec.no_restart_statuses,
        )

    @property
    def pid(self) -> int | None:
        """The process id of its process; None where it has none."""
        process = self._process
        return None if process is None or process.spawned is None or process.end is not None else process.spawned.pid

    @property
    def http_server(self) -> Origin | None:
        """The server that its HTTP probe asks; None where it has no process or no such probe."""
        probe = self._probe or self._startup_probe
        return origin_of(probe, self._socket) if self.pid is not None and isinstance(probe, HttpProbe) else None

    @property
    def notice(self) -> str:
        """What its process has last said of itself (``STATUS=``)."""
        return "" if self._process is None else self._process.notice

    def __repr__(self) -> str:
        return f"<Replica {self.name} {self.life.state} pid={self.pid}>"

    # ------------------------------------------------------------------------------------------------------- requests

    def request_stop(self) -> None:
        """Have it drain its process and stay down. Idempotent; wins over a restart."""
        self._stop_asked = True
        self._enter(ServiceState.STOPPING)
        self._condition.notify_all()

    def request_restart(self, reason: str) -> None:
        """Have it drain its process and start another one, which is not counted as a restart after a failure."""
        if self._restart_asked is None:
            self._restart_asked = reason
            self._condition.notify_all()

    def hurry(self) -> None:
        """Have it stop soon: its process gets SIGTERM again, and ``force_kill_timeout`` seconds before it is killed.

        The process may ask for more (``EXTEND_TIMEOUT_USEC``).
        """
        self.request_stop()
        if self._process is not None:
            self._process.hurry(self.spec.lifecycle.shutdown.force_kill_timeout)

    def kill(self) -> None:
        """Have it kill its process at once instead of draining it, and stay down."""
        self._hurried = True
        if self._process is not None:
            self._process.kill()
        self.request_stop()

    # ------------------------------------------------------------------------------------------------------------ life

    async def run(self) -> ReplicaEnding:
        """Run until it stays down. Cancelled, it kills its process."""
        try:
            while (ending := await self._run_once()) is None:
                pass
        except BaseException:
            ending = ReplicaEnding(True, "cancelled", 1)
            raise
        finally:
            if self.life.can(ServiceState.STOPPING):
                self.life.to(ServiceState.STOPPING)
            self.ending = ending
            self.life.to(ServiceState.STOPPED)
        return ending

    async def _run_once(self) -> ReplicaEnding | None:
        """Start a process, and see it to its end. Return how the replica ends, or None if it is to be started again."""
        await self._unless(lambda: self._stop_asked, self._wait_before_start)
        if self._stop_asked:
            return ReplicaEnding(False, "stopped", 0)
        self._unwell = None
        self._process = process = ServiceProcess(
            self.spec, self.number, dispatcher=self._dispatcher, condition=self._condition
        )
        process.hurried = self._hurried
        try:
            error = await self._start(process)
            if error is None:
                return await self._see_through(process)
        finally:
            await process.destroy(self.spec.lifecycle.shutdown.force_kill_timeout)
        if self._stop_asked:
            return ReplicaEnding(False, "stopped", 0)
        return await self._follow(self.life.after(RunEnd(failed=True, ready=False)), process, error)

    async def _start(self, process: ServiceProcess) -> str | None:
        """Run the hooks before a start, and start the process. Return why that failed, or None."""
        moments = [HookMoment.PRE_RESTART] if self._is_restart else []
        for moment in (*moments, HookMoment.PRE_START):
            if not await self._run_hooks(moment):
                return f"its hook {moment} failed"
        if self._stop_asked:
            return "stopped"
        if self._socket is not None:
            with suppress(OSError):  # of a process that was killed
                os.unlink(self._socket)
        try:
            await process.start(self._spawner, self._launch(self.spec.command, notify=True))
        except SpawnError as error:
            return str(error)
        assert process.spawned is not None
        self.starts += 1
        if not self._stop_asked:
            self.life.to(ServiceState.STARTING)
        self._dispatcher.dispatch(ServiceProcessStarted(self.spec.name, self.number, process.spawned.pid))
        return None

    async def _see_through(self, process: ServiceProcess) -> ReplicaEnding | None:
        """See a started process to its end, and decide what follows."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.watch)
            tasks.start_soon(self._ask_probes, process)
            became_ready = await self._wait_ready(process)
            if became_ready:
                await self._wait_for_cause(process)
            cause = None if became_ready or self._told else self._start_error(process)
            ended = self._run_end(process, became_ready)
            told = self._stop_asked or self._restart_asked is not None
            decision = None if told else self.life.after(ended)
            if decision is None and not self._stop_asked:
                decision = StartAgain(0.0, self.life.counts)
            is_empty = await self._take_down(process, decision)
            tasks.cancel_scope.cancel()
        if not is_empty:
            why = "something of it is left in spite of SIGKILL; look for it in uninterruptible sleep"
            self._dispatcher.dispatch(ServiceGivenUp(self.spec.name, self.number, why, self.spec.core))
            return ReplicaEnding(True, why, 1)
        if self._stop_asked:
            self._tell_end(process, None, told=True)
            return self._ending_of_stop(process)
        return await self._follow(decision, process, cause, told=told)

    async def _wait_ready(self, process: ServiceProcess) -> bool:
        """Wait until it is ready, and run the hooks of that. Return False if it ended, took too long or was told to end."""
        condition = self._condition
        latest = anyio.current_time() + self.spec.lifecycle.startup.timeout

        def is_over() -> bool:
            return process.end is not None or self._told

        if self.spec.tells_ready:
            await condition.wait_for(lambda: is_over() or process.has_said_ready, lambda: process.extended(latest))
        else:
            settled = anyio.current_time() + self.spec.ready_after
            await condition.wait_for(is_over, lambda: settled)
        if is_over() or not process.has_said_ready:
            return False
        moments = [HookMoment.POST_START, *([HookMoment.POST_RESTART] if self._is_restart else [])]
        for moment in moments:
            if not await self._run_hooks(moment):
                self._unwell = f"its hook {moment} failed"
                return False
        if is_over():
            return False
        process.ready_at = anyio.current_time()
        self.error = None
        self._is_restart = True
        self.life.to(ServiceState.RUNNING)
        return True

    async def _wait_for_cause(self, process: ServiceProcess) -> None:
        """Wait until there is a cause to end the process, or it has ended."""

        def is_over() -> bool:
            return process.end is not None or self._told or self._unwell is not None

        worn = await self._wait_until_worn(process, is_over)
        if worn is not None:
            self._replace_worn(worn)
            await self._condition.wait_for(is_over)

    async def _wait_until_worn(self, process: ServiceProcess, is_over: Callable[[], bool]) -> str | None:
        """Return why the process is to be replaced by a fresh one, or None once ``is_over()``."""
        most, oldest = self.spec.replace_after.memory, self.spec.replace_after.age
        old_at = math.inf if oldest is None else anyio.current_time() + oldest
        while True:
            look_at = math.inf if most is None else anyio.current_time() + MEMORY_CHECK_INTERVAL
            due = min(look_at, old_at)
            if await self._condition.wait_for(lambda: is_over() or process.used_up, lambda due=due: due):  # type: ignore[misc]
                return None if is_over() else "it has handled its number of messages"
            if anyio.current_time() >= old_at:
                return f"it is {oldest:g} s old"
            memory = None if process.spawned is None else process.spawned.memory
            if most is not None and memory is not None and memory > most:
                return f"it uses {memory} bytes of memory"

    def _replace_worn(self, reason: str) -> None:
        if self._on_worn is None:
            self.request_restart(reason)
        else:
            self._on_worn(self, reason)

    async def _take_down(self, process: ServiceProcess, decision: RestartDecision | None) -> bool:
        """Bring the process to its end, in the state that the decision means. Return True if nothing of it is left."""
        shutdown = self.spec.lifecycle.shutdown
        self._enter(ServiceState.RESTARTING if isinstance(decision, StartAgain) else ServiceState.STOPPING)
        began = anyio.current_time()
        if process.end is None and self._stop_asked:
            with anyio.move_on_after(shutdown.timeout):
                await self._run_hooks(HookMoment.PRE_STOP)
        is_empty = await process.bring_down(
            drain_timeout=shutdown.drain_timeout,
            within=shutdown.timeout - (anyio.current_time() - began),
            force_kill_timeout=shutdown.force_kill_timeout,
        )
        if self._stop_asked:
            with anyio.move_on_after(max(0.0, shutdown.timeout - (anyio.current_time() - began))):
                await self._run_hooks(HookMoment.POST_STOP)
        return is_empty

    async def _follow(
        self, decision: RestartDecision | None, process: ServiceProcess, error: str | None, *, told: bool = False
    ) -> ReplicaEnding | None:
        """Tell of an end, and wait as the decision says. Return how the replica ends, or None if it is to be started again."""
        delay = decision.delay if isinstance(decision, StartAgain) else None
        self._tell_end(process, error, told=told, delay=delay)
        if isinstance(decision, StartAgain):
            self._enter(ServiceState.RESTARTING)
            if not told and self._on_restart is not None:
                self._on_restart(self)
            again_at = anyio.current_time() + decision.delay
            await self._condition.wait_for(lambda: self._told, lambda: again_at)
            return None
        status = 1 if process.end is None else process.end.status
        if isinstance(decision, Escalate):
            reason = decision.why if self.error is None else f"{decision.why}; the last time: {self.error}"
            self._dispatcher.dispatch(ServiceGivenUp(self.spec.name, self.number, reason, self.spec.core))
            return ReplicaEnding(True, reason, status or 1)
        failed = bool(decision and decision.failed)
        return ReplicaEnding(failed, _how(process.end), status)

    # ---------------------------------------------------------------------------------------------------------- causes

    @property
    def _told(self) -> bool:
        return self._stop_asked or self._restart_asked is not None

    def _run_end(self, process: ServiceProcess, became_ready: bool) -> RunEnd:
        end = process.end
        well_for = 0.0 if process.ready_at is None else anyio.current_time() - process.ready_at
        failed = end is None or end.returncode != 0
        status = None if end is None else end.status
        return RunEnd(failed, became_ready, well_for, status, process.finished)

    def _start_error(self, process: ServiceProcess) -> str:
        if self._unwell is not None:
            return self._unwell
        if process.end is not None:
            return f"{_how(process.end)} before it was ready"
        said = f": {self._probe_error}" if self._probe_error is not None else ""
        return f"not ready within {self.spec.lifecycle.startup.timeout:g} s{said}"

    def _ending_of_stop(self, process: ServiceProcess) -> ReplicaEnding:
        end = process.end
        obeyed = end is not None and (end.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM))
        if process.killed or end is None or not obeyed:
            return ReplicaEnding(True, f"stopped: {_how(end)}", 1 if end is None else end.status)
        return ReplicaEnding(False, "stopped", 0)

    def _tell_end(self, process: ServiceProcess, error: str | None, *, told: bool, delay: float | None = None) -> None:
        service, number = self.spec.name, self.number
        self.error = error or self._unwell or (None if told else _how(process.end))
        status = 1 if process.end is None else process.end.status
        counts = self.life.counts
        if error is not None:
            self._dispatcher.dispatch(ServiceStartFailed(service, number, error, delay, status, counts.start_failures))
        elif process.spawned is not None:
            how = f"{_how(process.end)}: {self._unwell}" if self._unwell is not None else _how(process.end)
            self._dispatcher.dispatch(
                ServiceProcessEnded(
                    service, number, process.spawned.pid, how, status, delay, told=told, restarts=counts.restarts
                )
            )

    # ---------------------------------------------------------------------------------------------------------- probes

    async def _ask_probes(self, process: ServiceProcess) -> None:
        """Ask the probes until they pass, and then the probe for as long as the process runs."""
        spec, settings = self.spec, self.spec.lifecycle.health_check
        for probe in (self._startup_probe, self._probe):
            if probe is None:
                continue
            pause = FIRST_PAUSE
            while (error := await self._ask(probe)) is not None:
                self._note_probe(error, starting=True)
                await anyio.sleep(min(pause, spec.lifecycle.startup.health_check_interval))
                pause *= 2
            self._note_probe(None, starting=True)
        process.probes_passed = True
        self._condition.notify_all()
        health = Health(settings)
        while self._probe is not None:
            await anyio.sleep(settings.interval)
            if process.ready_at is None:
                continue
            error = await self._ask(self._probe)
            if self.life.state not in (ServiceState.RUNNING, ServiceState.DEGRADED):
                return  # it has ended, or is being ended: its answer says nothing any more
            verdict = health.note(error)
            self._note_probe(health.error)
            if verdict is HealthVerdict.FAILED:
                self._unwell = f"its probe failed {settings.max_failures} times: {health.error}"
                self._condition.notify_all()
                return
            self._enter(ServiceState.RUNNING if verdict is HealthVerdict.WELL else ServiceState.DEGRADED)

    async def _ask(self, probe: Probe) -> str | None:
        timeout = self.spec.lifecycle.health_check.timeout
        error = await ask(probe, timeout=timeout, run=self._run_command, socket=self._socket)
        if self._dispatcher.wants(ProbeAnswered):
            self._dispatcher.dispatch(ProbeAnswered(self.spec.name, self.number, error))
        return error

    def _note_probe(self, error: str | None, *, starting: bool = False) -> None:
        self.error = f"not ready yet: {error}" if starting and error is not None else error
        if self._probe_error != error:
            self._probe_error = error
            self._dispatcher.dispatch(ProbeChanged(self.spec.name, self.number, error, starting))

    # ---------------------------------------------------------------------------------------------------- hooks, commands

    async def _run_hooks(self, moment: HookMoment) -> bool:
        hooks = self.spec.hooks.get(moment, ())
        settings = self.spec.lifecycle.hooks
        if not hooks or not settings.enabled or self._hurried:
            return True

        def failed(error: str, aborts: bool) -> None:
            self._dispatcher.dispatch(HookFailed(self.spec.name, self.number, str(moment), error, aborts))

        passed: list[bool] = []

        async def run_all() -> None:
            passed.append(await run_hooks(moment, hooks, settings=settings, run=self._run_hook, failed=failed))

        def is_pointless() -> bool:
            if moment in (HookMoment.PRE_STOP, HookMoment.POST_STOP):
                return self._hurried
            return self._stop_asked or (self._process is not None and self._process.end is not None)

        await self._unless(is_pointless, run_all)
        return not passed or passed[0]

    async def _run_hook(self, command: tuple[str, ...]) -> CommandResult:
        """Run a command of a hook. What it writes is output of the service."""

        def on_line(stream: Stream, line: str) -> None:
            self._dispatcher.dispatch(ServiceOutput(self.spec.name, self.number, stream, line))

        launch = self._launch(command, notify=False)
        return await run_command(self._spawner, launch, timeout=math.inf, on_line=on_line)

    async def _run_command(self, command: tuple[str, ...]) -> CommandResult:
        """Run a command of a probe, which has a timeout of its own."""
        return await run_command(self._spawner, self._launch(command, notify=False), timeout=math.inf)

    def _launch(self, command: tuple[str, ...], *, notify: bool) -> Launch:
        spec = self.spec
        values = {"{replica}": str(self.number), "{service}": spec.name, "{socket}": self._socket or ""}

        def filled(text: str) -> str:
            for name, value in values.items():
                text = text.replace(name, value)
            return text

        environment = {**(os.environ if self._environment is None else self._environment)}
        if spec.user is not None:
            for name in USER_VARIABLES:  # those of its user stand in their place
                environment.pop(name, None)
        environment |= {"MAINSPRING_SERVICE": spec.name, "MAINSPRING_REPLICA": str(self.number)}
        if self._socket is not None:
            environment["MAINSPRING_SOCKET"] = self._socket
        if spec.replace_after.messages is not None and notify:
            environment[MAX_MESSAGES] = str(spec.replace_after.messages)
        if self._listening and notify:
            environment["LISTEN_FDS"] = str(len(self._listening))
        environment |= {name: filled(value) for name, value in spec.environment.items()}
        return Launch(
            service=spec.name,
            replica=self.number,
            command=tuple(map(filled, command)),
            environment=environment,
            directory=spec.working_directory,
            user=spec.user,
            resources=spec.resources,
            descriptors=self._listening if notify else (),
            notify=notify,
            stop_timeout=spec.lifecycle.shutdown.drain_timeout,
        )

    # ---------------------------------------------------------------------------------------------------------- states

    async def _wait_before_start(self) -> None:
        if self._before_start is not None:
            await self._before_start(self)
        self._restart_asked = None  # what was asked for until now is this start; another request may come at once

    async def _unless(self, over: Callable[[], bool], fn: Callable[[], Awaitable[None]]) -> None:
        """Run ``fn()``, and cancel it as soon as ``over()`` holds."""
        if over():
            return
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                await self._condition.wait_for(over)
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            await fn()
            tasks.cancel_scope.cancel()

    def _enter(self, state: ServiceState) -> None:
        if self.life.state is not state and self.life.can(state):
            self.life.to(state)

    def _moved(self, transition: Transition[ServiceState]) -> None:
        self._dispatcher.dispatch(
            ServiceStateChanged(self.spec.name, self.number, transition.old, transition.new, transition.seconds)
        )
        if self._on_change is not None:
            self._on_change(self)


def _how(end: ProcessEnd | None) -> str:
    return "it has not ended" if end is None else end.ending
