"""``mainspring run`` with ``--processes``, ``--reload`` or ``--max-messages-per-process``: workers as a supervised service."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from mainspring.cli.control_socket import control_for
from mainspring.cli.sources import SourceWatch
from mainspring.cli.user_errors import WRONG_USE, say
from mainspring.cli.worker_process import MARGIN, NUMBER, PROBLEM, directories_in
from mainspring.errors import ServiceNotRunningError
from mainspring.events import (
    ServiceGivenUp,
    ServiceNotified,
    ServiceOutput,
    ServiceProcessEnded,
    ServiceProcessStarted,
    ServiceStartFailed,
)
from mainspring.policies import RestartPolicy
from mainspring.runtime.scope import DaemonScope
from mainspring.services.orchestrator import Orchestrator
from mainspring.services.process import USED_UP
from mainspring.services.restarts import RestartType
from mainspring.services.spawner import ProcessSpawner
from mainspring.services.spec import Lifecycle, Replacement, ServiceSpec, ShutdownSettings, StartupSettings
from mainspring.validation import counted

if TYPE_CHECKING:
    from mainspring.cli.run import RunOptions

SERVICE = "worker"
START_TIMEOUT = 3_600.0
"""Seconds that a worker may take to import its target and to open its mailboxes."""
LOAD_TIMEOUT = 10.0
"""Seconds that a worker told to stop has while it has not said how long its shutdown may take."""
LONGEST_STOP = 366 * 86_400.0
"""Seconds of a stop at most: a worker says itself how long its own may take."""


class Supervisor:
    """Runs the workers of one target, and tells people what becomes of them. The orchestrator does the work."""

    def __init__(self, options: RunOptions, policy: RestartPolicy | None = None) -> None:
        self._options = options
        self._policy = policy or RestartPolicy()
        self._statuses: list[int] = []
        self._problems: set[str] = set()
        self._pids: dict[int, int] = {}
        self._heard: set[int] = set()
        """The workers whose present process has said something: it can be told to stop in order."""
        self._watch = SourceWatch([os.getcwd()]) if options.reload else None
        self._orchestrator = Orchestrator(
            [self._spec()],
            name="workers",
            shutdown=ShutdownSettings(timeout=LONGEST_STOP),
            spawner=ProcessSpawner(),
            stay_up=options.reload,
            control=control_for(options.target, None, say),
        )
        for event, tell in (
            (ServiceProcessStarted, self._on_started),
            (ServiceProcessEnded, self._on_ended),
            (ServiceStartFailed, self._on_start_failed),
            (ServiceGivenUp, self._on_given_up),
            (ServiceNotified, self._on_news),
            (ServiceOutput, self._on_output),
        ):
            self._orchestrator.dispatcher.subscribe(event, tell)  # type: ignore[arg-type]

    def _spec(self) -> ServiceSpec:
        """Return the workers as a service. With ``--reload`` a worker that has ended waits for a source file to change."""
        return ServiceSpec(
            name=SERVICE,
            command=tuple(self._options.worker_command(sys.executable)),
            replicas=self._options.processes,
            environment={NUMBER: "{replica}"},
            replace_after=Replacement(messages=self._options.max_messages_per_process),
            notify=True,
            restart=RestartType.TEMPORARY if self._options.reload else RestartType.PERMANENT,
            no_restart_statuses=frozenset({WRONG_USE}),
            core=not self._options.reload,
            lifecycle=Lifecycle(
                startup=StartupSettings(timeout=START_TIMEOUT, max_retries=self._policy.max_retries + 1),
                shutdown=ShutdownSettings(
                    timeout=LONGEST_STOP, drain_timeout=LOAD_TIMEOUT + MARGIN, force_kill_timeout=MARGIN
                ),
                restart_policy=self._policy,
            ),
        )

    async def run(self) -> int:
        """Run until a signal, until the workers' work is done, or until one cannot be kept running. Return the exit status."""
        async with DaemonScope("supervisor") as scope:
            if self._watch is not None:
                scope.start_soon(self._reload, self._watch, name="reload")
            await self._orchestrator.run()
            scope.cancel()
        status = max(self._statuses, default=0)
        if not self._problems:
            say(f"all workers have ended; exit status {status}")
        return status

    async def _reload(self, watch: SourceWatch) -> None:
        """Start every worker again at each change of a source file, also while those of the last change start."""
        path = await watch.next_change()
        while True:
            say(f"{path} has changed; starting again")
            self._problems.clear()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._restart_all)
                path = await watch.next_change()
                tasks.cancel_scope.cancel()

    async def _restart_all(self) -> None:
        with suppress(ServiceNotRunningError):  # told when its end was
            await self._orchestrator.restart(SERVICE)

    # ------------------------------------------------------------------------------------------------ what people are told

    def _who(self, replica: int) -> str:
        pid = self._pids.get(replica)
        return f"worker.{replica}" + (f" (pid {pid})" if pid is not None else "")

    def _on_started(self, event: ServiceProcessStarted) -> None:
        self._pids[event.replica] = event.pid

    def _on_output(self, event: ServiceOutput) -> None:
        stream = sys.stdout if event.stream == "stdout" else sys.stderr
        stream.write(event.line + "\n")
        stream.flush()

    def _on_news(self, event: ServiceNotified) -> None:
        self._heard.add(event.replica)
        problem = event.news.get(PROBLEM)
        if problem is not None and problem not in self._problems:
            self._problems.add(problem)
            say(problem)
        if USED_UP in event.news:
            handled = counted(self._options.max_messages_per_process or 0, "message")
            say(f"{self._who(event.replica)} has handled {handled}; starting another one")
        if self._watch is not None:
            self._watch.add(directories_in(event.news))

    def _on_ended(self, event: ServiceProcessEnded) -> None:
        self._tell_end(event, f"has ended, {event.ending}", told=event.told)

    def _on_start_failed(self, event: ServiceStartFailed) -> None:
        self._tell_end(event, f"has not started: {event.error}", told=False)

    def _tell_end(self, event: ServiceProcessEnded | ServiceStartFailed, how: str, *, told: bool) -> None:
        who, status = self._who(event.replica), event.status
        self._pids.pop(event.replica, None)
        if told and event.replica not in self._heard and status == 128 + signal.SIGTERM:
            status = 0  # before it had a handler: nothing was running
        self._heard.discard(event.replica)
        if told and status == 128 + signal.SIGKILL:
            say(f"{who} did not end in time, and was killed")
        if event.restart_in is not None:
            if not told:
                soon = f"in {event.restart_in:.1f} s" if event.restart_in else "now"
                nth = f"restart {event.restarts} of {self._policy.max_retries}"
                say(f"{who} {how}; starting another one {soon} ({nth})")
        elif self._watch is not None and not told:
            say(f"{who} {how}; waiting for a source file to change")
        else:
            self._statuses.append(status)

    def _on_given_up(self, event: ServiceGivenUp) -> None:
        say(f"worker.{event.replica} is given up: {event.reason}; stopping the others")
        self._orchestrator.request_shutdown(f"worker.{event.replica} was given up")
