"""``mainspring run``: one group in this process, or several processes under a supervisor."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.cli.early_signals import CommandSignals, Interrupted
from mainspring.cli.sources import loaded_directories
from mainspring.cli.target import load_group
from mainspring.cli.user_errors import FAILED, WRONG_USE, UserError, say
from mainspring.cli.worker_process import MessageBudget, WorkerProcess
from mainspring.core.loggers import Logger
from mainspring.core.state_machine import GroupState
from mainspring.errors import MainspringError
from mainspring.events import GroupStateChanged, MessageFinished
from mainspring.telemetry import logs

if TYPE_CHECKING:
    from mainspring.group.group import LoopGroup
    from mainspring.runtime.shutdown_report import ShutdownReport


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line says. ``loop``: auto, asyncio, uvloop or trio."""

    target: str
    processes: int = 1
    health_port: int | None = None
    health_host: str | None = None
    reload: bool = False
    max_messages_per_process: int | None = None
    loop: str = "auto"
    log_level: str = "INFO"
    log_json: bool = False

    def worker_command(self, executable: str) -> list[str]:
        """Return the command line of one worker of these."""
        command = [executable, "-m", "mainspring", "run", self.target]
        command += ["--loop", self.loop, "--log-level", self.log_level]
        if self.log_json:
            command.append("--log-json")
        if self.health_port is not None:
            command += ["--health-port", str(self.health_port)]
        if self.health_host is not None:
            command += ["--health-host", self.health_host]
        return command


def run_target(options: RunOptions) -> int:
    """Run until the end. Return the exit status of the process."""
    early = CommandSignals.install()
    worker, budget = WorkerProcess.from_environment(), MessageBudget.from_environment()
    tag = str(worker) if worker is not None else ""
    # Before the user's module, which may have other wishes.
    logs.configure(options.log_level, json=options.log_json, tag=tag)
    if options.processes > 1 or options.reload or options.max_messages_per_process is not None:
        from mainspring.cli.supervise import Supervisor

        event_loop(options.loop)  # a missing one is said here, once
        return anyio.run(lambda: Supervisor(options).run())
    try:
        return _run_group(options, early, worker, budget)
    except UserError as problem:
        if worker is None:
            raise
        worker.tell_directories(loaded_directories())
        worker.tell_problem(str(problem))
        return problem.status  # the supervisor says it, once for all its workers


def event_loop(name: str) -> tuple[str, dict[str, Any]]:
    """Return anyio's backend and its options for ``--loop``. Raise :class:`UserError` if it is not installed."""
    if name == "auto":
        name = "asyncio" if find_spec("uvloop") is None else "uvloop"
    if name in {"uvloop", "trio"} and find_spec(name) is None:
        raise UserError(f"--loop {name} needs an extra: pip install 'mainspring[{name}]'")
    return ("trio", {}) if name == "trio" else ("asyncio", {"use_uvloop": name == "uvloop"})


def _run_group(
    options: RunOptions, early: CommandSignals, worker: WorkerProcess | None, budget: MessageBudget | None
) -> int:
    backend, backend_options = event_loop(options.loop)
    try:
        with early.interrupting():
            group = load_group(options.target)
    except Interrupted as stop:
        if worker is None:  # of its workers the supervisor speaks
            say(f"{stop} before the start; nothing was running")
        return 0
    _set_health_address(group, options, worker)
    seen: set[GroupState] = set()
    group.dispatcher.subscribe(GroupStateChanged, partial(_on_state, group, seen))
    if worker is not None:
        worker.tell_longest_stop(group.settings.stop_within)
        worker.tell_directories(loaded_directories())
        if worker.number == 2:  # where there are several, and once for all of them
            _warn_of_own_mailboxes(group)
    if budget is not None:
        _tell_when_used_up(group, budget)
    try:
        report: ShutdownReport = anyio.run(
            partial(group.run, install_signals=True), backend=backend, backend_options=backend_options
        )
    except MainspringError as error:
        # A store that is away, a port that another program has, a crash: that may be otherwise the next time. What is wrong
        # with the settings from the start on, as with a login, is not.
        taken = getattr(error.__context__, "errno", None) == errno.EADDRINUSE
        lasting = error.fault == "config" and not taken and GroupState.RUNNING not in seen
        raise UserError(str(error), WRONG_USE if lasting else FAILED) from error
    finally:
        if group.report is not None and not options.log_json:  # else the last log line is the report
            say(f"{_who(group, worker)}{group.report}", keep="\n")
    if worker is not None and report.reason not in {signum.name for signum in signal.Signals}:
        worker.tell_finished()
    return report.exit_status


def _tell_when_used_up(group: LoopGroup, budget: MessageBudget) -> None:
    """Tell the supervisor once this number of messages was handled."""
    left = itertools.count(budget.messages - 1, -1)

    def count_handled(event: MessageFinished) -> None:
        if event.began and not next(left):
            budget.tell_used_up()

    group.dispatcher.subscribe(MessageFinished, count_handled)


def _warn_of_own_mailboxes(group: LoopGroup) -> None:
    """Say which mailboxes are in memory: what one worker sends there, no other receives."""
    from mainspring.worker.main_loop import MainLoop

    for name in dict.fromkeys(
        loop.mailbox.name
        for loop in group.loops
        if isinstance(loop, MainLoop) and not loop.mailbox.capabilities.cross_process
    ):
        text = "%s: mailbox %r is not shared by the worker processes: each has one of its own"
        Logger("mainspring.group").warning(text, group.name, name)


def _who(group: LoopGroup, worker: WorkerProcess | None) -> str:
    """Return what a report begins with: the number of its worker process, and the name of its group, where there are such."""
    names = [str(worker)] if worker is not None else []
    return ": ".join([*names, group.name, ""] if group.name != "mainspring" else [*names, ""])


def _on_state(group: LoopGroup, seen: set[GroupState], event: GroupStateChanged) -> None:
    """Note a state of the group. Once it runs, log where its health server is."""
    seen.add(event.new)
    if event.new is GroupState.RUNNING and group.health_url is not None:
        Logger("mainspring.group").info("%s: health server at %s", group.name, group.health_url)


def _set_health_address(group: LoopGroup, options: RunOptions, worker: WorkerProcess | None) -> None:
    """Prefer the command line's host and port to a supervisor's socket, and that to the group's own.

    Each worker of several takes its own port, counting up.
    """
    socket = os.environ.get("MAINSPRING_SOCKET")
    if socket and worker is None and options.health_port is None and options.health_host is None:
        group.settings = replace(group.settings, health_host=f"unix:{socket}", health_port=0)
        return
    port = group.settings.health_port if options.health_port is None else options.health_port
    if port and worker is not None:
        port += worker.number - 1
    host = options.health_host or group.settings.health_host
    group.settings = replace(group.settings, health_host=host, health_port=port)
