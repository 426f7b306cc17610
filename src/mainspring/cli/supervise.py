"""``mainspring run --processes N``, ``--reload`` and ``--max-messages-per-process``: one process that keeps workers running."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
from contextlib import suppress
from subprocess import DEVNULL
from typing import TYPE_CHECKING

import anyio
from anyio.abc import Process, UNIXSocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from mainspring.cli.parent_link import LOAD_TIMEOUT, MARGIN, link_for_child
from mainspring.cli.restart_decisions import (
    AwaitChange,
    Ended,
    GiveUp,
    Restart,
    after_exit,
    how,
    status_of_returncode,
    worst,
)
from mainspring.cli.sources import SourceWatch
from mainspring.cli.user_errors import FAILED, WRONG_USE, say
from mainspring.core import random
from mainspring.core.process import signal_child
from mainspring.policies import RestartPolicy
from mainspring.runtime.hard_exit import last_words
from mainspring.runtime.scope import DaemonScope
from mainspring.runtime.signals import ShutdownCoordinator
from mainspring.validation import counted

if TYPE_CHECKING:
    from socket import socket

    from mainspring.cli.restart_decisions import RestartDecision
    from mainspring.cli.run import RunOptions

NEWS_LIMIT = 1 << 20
"""Bytes of one line of news from a worker; more is a broken worker."""

SPAWN_TIMEOUT = 30.0
"""Seconds that starting a process may take before the supervisor gives up on it."""


class SupervisedWorker:
    """One slot for a worker process, and what its present process has said of itself."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.restarts = 0
        self.process: Process | None = None
        self.change = anyio.Event()
        self.running = anyio.Event()
        self._fresh()

    def _fresh(self) -> None:
        self.heard = False
        self.finished = False
        self.told = False
        self.problem: str | None = None
        self.stop_within = LOAD_TIMEOUT

    def __str__(self) -> str:
        return f"worker {self.number}" + (f" (pid {self.process.pid})" if self.process is not None else "")

    def begins(self, process: Process | None) -> None:
        """Take a new process into the slot; None if it could not be started."""
        self._fresh()
        self.process = process

    def kill(self) -> None:
        """End the process and all that it started (it leads a session of its own)."""
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor:
    """Starts the workers, replaces those that crash, and passes signals on to them."""

    def __init__(self, options: RunOptions, policy: RestartPolicy | None = None) -> None:
        self._options = options
        self._policy = policy or RestartPolicy()
        self._workers = [SupervisedWorker(number) for number in range(1, options.processes + 1)]
        self._stopping = anyio.Event()
        self._coordinator = ShutdownCoordinator(on_repeat=self._on_repeat)
        self._coordinator.register(lambda: self._stop(signal.Signals[self._coordinator.reason]))
        self._statuses: list[int] = []
        self._tell_used_up, self._used_up = anyio.create_memory_object_stream[tuple[SupervisedWorker, Process]](
            math.inf
        )
        self._problems: set[str] = set()
        self._watch = SourceWatch([os.getcwd()]) if options.reload else None

    async def run(self) -> int:
        """Run until a signal, until the workers' work is done, or until one cannot be kept running. Return the exit status."""
        async with DaemonScope("supervisor") as scope, self._coordinator:
            self._scope = scope
            if self._watch is not None:
                scope.start_soon(self._reload, name="reload")
            scope.start_soon(self._renew, name="renewal of workers")
            async with anyio.create_task_group() as slots:
                for worker in self._workers:
                    slots.start_soon(self._keep, worker)
        status = worst(self._statuses)
        if not self._problems:
            say(f"all workers have ended; exit status {status}")
        return status

    # ------------------------------------------------------------------------------------------------------- signals

    def _on_repeat(self, signum: int, count: int) -> None:
        """Pass a further signal on. The workers count them and act on a second one; the third ends all of it here and now."""
        if count >= 3:
            for worker in self._workers:
                worker.kill()
            last_words(
                lambda: "mainspring: the workers were killed; each message in hand comes again when its lease ends"
            )
            os._exit(128 + signum)
        self._stop(signum, repeated=True)

    def _stop(self, signum: int, *, repeated: bool = False) -> None:
        self._stopping.set()
        for worker in self._workers:
            worker.change.set()
            if repeated or not worker.told:  # for one that ends already it would be a second signal
                begun = worker.heard or repeated  # else SIGINT may meet the start of Python, and raise there
                self._ask(worker, signum if begun else signal.SIGTERM)

    def _ask(self, worker: SupervisedWorker, signum: int) -> None:
        """Ask a worker to stop, and kill it if it does not."""
        if worker.process is not None:
            signal_child(worker.process, signum)
            self._scope.start_soon(self._kill_when_overdue, worker, worker.process, name=f"deadline of {worker}")

    def _replace(self, worker: SupervisedWorker) -> None:
        """Ask a worker to stop, for another one to take its place; not twice, which would cancel its work."""
        if worker.process is not None and not worker.told and not self._stopping.is_set():
            worker.told = True
            self._ask(worker, signal.SIGTERM)

    async def _kill_when_overdue(self, worker: SupervisedWorker, process: Process) -> None:
        """Kill a worker that outlives the longest shutdown it announced."""
        with anyio.move_on_after(worker.stop_within + MARGIN) as patience:
            await process.wait()
        if patience.cancelled_caught and worker.process is process:
            say(f"{worker} has not ended {worker.stop_within + MARGIN:g} s after it was told to; killing it")
            worker.kill()

    # ------------------------------------------------------------------------------------------------------- workers

    async def _keep(self, worker: SupervisedWorker) -> None:
        """Run a worker, and another one in its place for as long as the decisions say so."""
        while not self._stopping.is_set():
            began = anyio.current_time()
            returncode = await self._run_once(worker)
            ended = Ended(status_of_returncode(returncode), anyio.current_time() - began, worker.finished)
            if self._stopping.is_set() and not worker.heard and returncode in {-signal.SIGTERM, -signal.SIGINT}:
                ended = Ended(0, ended.ran_for)  # told to stop before it had a handler: nothing was running
            decision = after_exit(
                ended,
                stopping=self._stopping.is_set(),
                reload=self._watch is not None,
                told=worker.told,
                restarts=worker.restarts,
                policy=self._policy,
                rng=random.rng(),
            )
            self._tell(worker, returncode, decision)
            worker.process = None
            if not await self._follow(worker, ended, decision):
                return

    async def _follow(self, worker: SupervisedWorker, ended: Ended, decision: RestartDecision) -> bool:
        """Wait as the decision says. Return True if the worker is to be started again."""
        if isinstance(decision, Restart):
            worker.restarts = decision.restarts
            with anyio.move_on_after(decision.delay):
                await self._stopping.wait()
        elif isinstance(decision, AwaitChange):
            worker.restarts = 0
            await worker.change.wait()
        else:
            self._statuses.append(ended.status)
            if isinstance(decision, GiveUp):
                self._stop(signal.SIGTERM)
            return False
        worker.change = anyio.Event()
        return True

    def _tell(self, worker: SupervisedWorker, returncode: int, decision: RestartDecision) -> None:
        if worker.problem is not None and worker.problem not in self._problems:
            self._problems.add(worker.problem)
            say(worker.problem)
        if isinstance(decision, Restart) and not worker.told:
            nth = f" (restart {decision.restarts} of {self._policy.max_retries})" if decision.restarts else ""
            soon = f"in {decision.delay:.1f} s" if decision.delay else "now"
            say(f"{worker} has ended, {how(returncode)}; starting another one {soon}{nth}")
        elif isinstance(decision, AwaitChange):
            say(f"{worker} has ended, {how(returncode)}; waiting for a source file to change")
        elif isinstance(decision, GiveUp) and status_of_returncode(returncode) != WRONG_USE:
            say(f"{worker} has ended, {how(returncode)}, after {worker.restarts} restarts; stopping the others")

    async def _run_once(self, worker: SupervisedWorker) -> int:
        """Run one process from start to end. Return its return code. Cancelled, it kills the process and its children."""
        try:
            process, ours = await self._start(worker.number)
        except OSError as error:  # no memory, too many processes or files, the program being replaced: it may pass
            worker.begins(None)
            say(f"{worker} cannot be started: {error.strerror}")
            return FAILED
        worker.begins(process)
        stream = await UNIXSocketStream.from_socket(ours)
        try:
            async with stream, anyio.create_task_group() as tasks:
                all_read = anyio.Event()
                tasks.start_soon(self._read_news, worker, stream, all_read)
                if self._stopping.is_set():  # the signal came while it was being started
                    self._ask(worker, signal.SIGTERM)
                returncode = await process.wait()
                with anyio.move_on_after(1):  # its last words may still be on the line
                    await all_read.wait()
                tasks.cancel_scope.cancel()
        finally:
            worker.kill()
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + MARGIN):
                await process.wait()
        return returncode

    async def _start(self, number: int) -> tuple[Process, socket]:
        """Start a process. Return it with our end of its link."""
        ours, theirs, environment = link_for_child(number)
        try:
            # Not to be cancelled half way, which would lose sight of a started process.
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + SPAWN_TIMEOUT):
                return await anyio.open_process(
                    self._options.worker_command(sys.executable),
                    stdin=DEVNULL,
                    stdout=None,
                    stderr=None,
                    env=environment,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                ), ours
            raise TimeoutError(errno.ETIMEDOUT, f"not within {SPAWN_TIMEOUT:g} s")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def _read_news(self, worker: SupervisedWorker, stream: UNIXSocketStream, all_read: anyio.Event) -> None:
        """Read what a worker says of itself, until it closes the link."""
        lines = BufferedByteReceiveStream(stream)
        with suppress(anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.DelimiterNotFound):
            while True:
                news = json.loads(await lines.receive_until(b"\n", NEWS_LIMIT))
                worker.heard = True
                worker.finished = news.get("finished", worker.finished)
                worker.problem = news.get("problem", worker.problem)
                worker.stop_within = news.get("stop_within", worker.stop_within)
                if news.get("running"):
                    worker.running.set()
                if news.get("used_up") and worker.process is not None:
                    self._tell_used_up.send_nowait((worker, worker.process))
                if self._watch is not None:
                    self._watch.add(news.get("directories", ()))
        all_read.set()

    # -------------------------------------------------------------------------------------------------------- renewal

    async def _renew(self) -> None:
        """Replace the workers that have handled their number of messages, one after the other: the rest work meanwhile."""
        async with self._tell_used_up, self._used_up:
            async for worker, process in self._used_up:
                if worker.process is not process or self._stopping.is_set():  # it has ended since, or has been told to
                    continue
                handled = counted(self._options.max_messages_per_process or 0, "message")
                say(f"{worker} has handled {handled}; starting another one")
                worker.running = anyio.Event()
                self._replace(worker)
                await worker.running.wait()

    # -------------------------------------------------------------------------------------------------------- reload

    async def _reload(self) -> None:
        """Start every worker again at each change of a source file."""
        watch = self._watch
        while watch is not None:
            path = await watch.next_change()
            say(f"{path} has changed; starting again")
            self._problems.clear()
            for worker in self._workers:
                worker.change.set()
                self._replace(worker)
