"""``LoopGroup``: loops that start together, are watched together, and stop in order."""

from __future__ import annotations

import signal
from contextlib import asynccontextmanager, suppress
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self

import anyio

from mainspring.core import process
from mainspring.core.dispatcher import Dispatcher
from mainspring.core.state_machine import GroupState
from mainspring.errors import ConfigError, LoopNotRunningError
from mainspring.group.settings import GroupSettings, OnCrash
from mainspring.runtime.scope import DaemonScope
from mainspring.threads.ticket import Ticket
from mainspring.validation import is_number
from mainspring.worker.inside import is_inside
from mainspring.worker.main_loop import MainLoop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from mainspring.group.calibration import Timeouts
    from mainspring.group.lifetime import Lifetime
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.policies import RestartPolicy
    from mainspring.runtime.shutdown_report import ShutdownReport
    from mainspring.telemetry.status import GroupStatus
    from mainspring.threads.loop_thread import LoopThread
    from mainspring.threads.ticket import TicketWriter
    from mainspring.worker.actor import LoopActor
    from mainspring.worker.control import HealthStatus
    from mainspring.worker.middleware import Middleware
    from mainspring.worker.runnable import AnyRunnable, Steerable


class LoopGroup:
    """Runs loops as tasks of one scope, and takes them down in phases that each have an end.

    ``anyio.run(group.run)`` is the entry point of a program; ``async with group`` and ``lifespan=group.lifespan`` embed it in
    another one, which then owns the signals.

    A shutdown has phases. *Drain delay*: readiness answers 503, and work goes on. *Stop intake*: waits for work end at once.
    *Finish*: the work in hand has at most ``shutdown_timeout``. *Cancel*: handlers get ``cancel_grace`` to clean up, and their
    messages go back uncharged. Then the daemons end in the reverse order of their start, the health server last.

    :param loops: MainLoops, or any ``Runnable``. Of several with one name, the second becomes ``name-2``, and so on.
    :param name: for logs, status and reports.
    :param shutdown_timeout: seconds that the work in hand may take to finish at a shutdown: one for all loops together.
    :param cancel_grace: seconds that cancelled handlers get to clean up.
    :param drain_delay: seconds for which a shutdown lets load balancers notice before intake stops.
    :param max_concurrency: how many messages may be in hand at once across the loops.
    :param health_host: where the health server listens: a host name, an address, or ``unix:/path`` for a Unix socket.
    :param health_port: its port (0: any free one); None: no health server.
    :param checks: functions by name, on which readiness depends. One fails by raising, by returning False, or by being late.
    :param check_timeout: seconds that a check may take. Give probes longer, so that they hear which check is late: Kubernetes
        gives them 1 s (``timeoutSeconds``), from which the default leaves some.
    :param check_interval: seconds between two calls of a check. While a check keeps the group from being ready, probes call it
        too, at most once a second.
    :param check_max_failures: how many failures in a row of a check that has passed before make the group not ready. One
        success makes it ready again.
    :param restart: how crashed loops are restarted; None: a crash ends the group.
    :param watchdog_threshold: seconds without a beat after which a message counts as stalled, and a receive whose answer is
        overdue; None: no watchdog.
    :param watchdog_interval: seconds between the watchdog's looks.
    :param block_threshold: seconds for which the event loop may not turn before the process is killed; None: no limit.
    :param guardian: whether a tiny process watches over a blocked interpreter; None: in a ``run()`` that owns the signals.
    :param on_crash: what an embedded group does when a loop crashes for good. ``"terminate"`` sends its own process SIGTERM,
        so that the server around it ends too, and ends the block with the error. If the process has no handler for SIGTERM,
        no signal is sent. ``"report"`` turns not-ready, and raises the error when the block is left.
    :param lifespan: an async context manager's function that opens what handlers share. Each run of the group calls it once in
        its process, without arguments, before the loops start. What it yields is ``ctx.resources``. It is left after the loops
        have ended and before the mailboxes are closed, and then has ``cancel_grace`` seconds. It runs in a task of its own, so
        that handlers do not see context variables that it sets. An error in it ends the group, and is raised.
    :param middleware: what runs around each handler run of its loops, the outermost first.
    :raises ConfigError: a value is impossible.
    """

    def __init__(
        self,
        loops: Iterable[AnyRunnable],
        *,
        name: str | None = None,
        shutdown_timeout: float = 30,
        cancel_grace: float = 5,
        drain_delay: float = 0,
        max_concurrency: int | None = None,
        health_host: str = "127.0.0.1",
        health_port: int | None = None,
        checks: Mapping[str, Callable[[], object]] | None = None,
        check_timeout: float = 0.8,
        check_interval: float = 10,
        check_max_failures: int = 3,
        restart: RestartPolicy | None = None,
        watchdog_threshold: float | None = 720,
        watchdog_interval: float = 60,
        block_threshold: float | None = 30,
        guardian: bool | None = None,
        on_crash: OnCrash = "terminate",
        lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        if name is not None and not (isinstance(name, str) and name):
            raise ConfigError(f"LoopGroup: name must be text, or None, not {name!r}")
        self.name = name or "mainspring"
        self.settings = GroupSettings(
            shutdown_timeout=shutdown_timeout,
            cancel_grace=cancel_grace,
            drain_delay=drain_delay,
            max_concurrency=max_concurrency,
            health_host=health_host,
            health_port=health_port,
            checks={} if checks is None else checks,
            check_timeout=check_timeout,
            check_interval=check_interval,
            check_max_failures=check_max_failures,
            restart=restart,
            watchdog_threshold=watchdog_threshold,
            watchdog_interval=watchdog_interval,
            block_threshold=block_threshold,
            guardian=guardian,
            on_crash=on_crash,
            lifespan=lifespan,
            middleware=middleware,
        )
        from mainspring.group.managed_loop import actors_of  # late: it imports the events, so the class alone is quick

        self.actors: Sequence[LoopActor] = actors_of(loops)
        """Its loops as actors, which serve control messages while the group runs."""
        self.loops: Sequence[Steerable] = [actor.loop for actor in self.actors]
        self.dispatcher = Dispatcher()
        self._lifetime: Lifetime | None = None
        self._thread = 0
        self._report: ShutdownReport | None = None
        self._crash: Exception | None = None
        self._asked: tuple[str, float | None] | None = None
        self._own: DaemonScope | None = None
        self._health_url: str | None = None

    def __repr__(self) -> str:
        state = self._lifetime.machine.state if self._lifetime is not None else GroupState.IDLE
        return f"<LoopGroup {self.name!r} {state} of {[loop.name for loop in self.loops]}>"

    # ----------------------------------------------------------------------------------------------------------- run

    async def run(
        self,
        *,
        install_signals: bool = True,
        visibility_timeout: float | None = None,
        wait_time_seconds: float | None = None,
        until_empty: bool = False,
    ) -> ShutdownReport:
        """Run until a signal, :meth:`shutdown`, or the end of all loops. Return how the shutdown went.

        With ``install_signals`` it receives SIGTERM and SIGINT and owns its process. A second signal skips to cancelling, and a
        third leaves at once. Past ``shutdown_timeout + cancel_grace + 1`` seconds it prints the report and all stacks, and
        leaves with status 70. While it runs, garbage collections leave out what existed once it had started (``gc.freeze()``),
        unless the program has frozen objects itself.

        ``until_empty`` ends it once nothing is delayed, pending or in flight in any of its mailboxes. The other keywords are
        handed to the loops.

        A loop that crashes for good stops the others gracefully, and its error is raised. Cancelled from outside, handlers
        are cancelled and their messages released.

        :raises ConfigError: it or one of its loops is running already, or, with ``install_signals``, this is not the main
            thread.
        """
        if install_signals and not process.in_main_thread():
            raise ConfigError(
                "LoopGroup.run() receives signals, which only the main thread can: run it there, or pass install_signals=False"
            )
        return await self._run(
            owner=install_signals,
            keywords={"visibility_timeout": visibility_timeout, "wait_time_seconds": wait_time_seconds},
            until_empty=until_empty,
            ready=lambda: None,
        )

    def start_in(self, thread: LoopThread) -> Ticket[ShutdownReport]:
        """Run in a LoopThread, without signals, and return once all has started, or the start has failed: the ticket gets the
        report or the error. The thread's ``stop()`` shuts the group down. Called in an event loop it does not wait.
        """
        begun: Ticket[None] = Ticket(f"start of group {self.name}")
        report = thread.submit(
            self._run_in, begun.writer(), stop=self.request_shutdown, stop_timeout=self.settings.stop_within
        )
        while not (begun.is_ready or report.is_ready or process.in_event_loop()):
            with suppress(Exception):  # the report has it; or it is time to see whether the event loop broke
                begun.wait_sync(1)
        return report

    async def _run_in(self, begun: TicketWriter[None]) -> ShutdownReport:
        with begun:
            return await self._run(owner=False, keywords={}, until_empty=False, ready=lambda: begun.offer(None))

    async def _run(
        self, *, owner: bool, keywords: dict[str, Any], until_empty: bool, ready: Callable[[], object]
    ) -> ShutdownReport:
        from mainspring.group.calibration import all_rules  # late: only a group that runs needs these
        from mainspring.group.lifetime import Lifetime
        from mainspring.telemetry import logs

        if self._lifetime is not None:
            raise ConfigError(f"group {self.name!r} is already running; wait for its end, or make a second group")
        for loop in self.loops:  # now, as what follows would change it under the other run
            if isinstance(loop, MainLoop) and loop.running:
                raise ConfigError(f"group {self.name!r}: loop {loop.name!r} is already running; make a second loop")
        ends = [loop.dispatcher.pass_on_to(self.dispatcher) for loop in self.loops if isinstance(loop, MainLoop)]
        ends.append(logs.subscribe(self.dispatcher))
        lifetime = Lifetime(
            self.name,
            self.actors,
            self.settings,
            self.dispatcher,
            owner=owner,
            keywords={key: value for key, value in keywords.items() if value is not None},
            until_empty=until_empty,
            warnings=[str(rule) for rule in all_rules(self.timeouts()) if not rule.ok],
            serve=self._serve if self.settings.health_port is not None else None,
        )
        self._lifetime, self._thread = lifetime, get_ident()
        # Asked once it can be told: a request from another thread is either seen here, or comes to the lifetime.
        if self._asked is not None:
            lifetime.request(*self._asked)
        try:
            await lifetime.run(ready)
        finally:
            self._report = lifetime.report
            self._lifetime = self._asked = self._health_url = None
            self._crash = lifetime.crash
            for end in ends:
                end()
        assert self._report is not None
        if lifetime.crash is not None:
            raise lifetime.crash
        return self._report

    async def __aenter__(self) -> Self:
        """Start everything, without signals. Leaving the block shuts down; a crash of a loop is raised there.

        Where the block is cancelled from outside, handlers are cancelled and their messages released, as by :meth:`run`.
        After a shutdown that was asked for before, nothing starts: the block runs with a group that has ended.
        """
        if self._own is not None or self._lifetime is not None:
            raise ConfigError(f"group {self.name!r} is already running; wait for its end, or make a second group")
        self._crash = None
        self._own = DaemonScope(f"group {self.name}")
        await self._own.__aenter__()
        try:
            await self._own.start(
                self._run_embedded, name=self.name, stop=lambda: self.request_shutdown("end of the block")
            )
        except BaseException as error:
            own, self._own = self._own, None
            await own.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def _run_embedded(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        begun = False

        def ready() -> None:
            nonlocal begun
            begun = True
            task_status.started()

        try:
            await self._run(owner=False, keywords={}, until_empty=False, ready=ready)
        except Exception as error:
            if error is not self._crash or self.settings.on_crash != "report":
                raise
        if not begun:
            task_status.started()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        own = self._own
        assert own is not None
        if self._lifetime is not None:
            lifetime = self._lifetime
            lifetime.request("end of the block")
            # The loops get their phases, which have an end, so this shield has one; a cancelled block cancels them as well.
            with anyio.CancelScope(shield=True):
                await lifetime.ended.wait()
        self._own = None
        handled = await own.__aexit__(kind, error, trace)
        if error is None and self._crash is not None:
            raise self._crash
        return handled

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """Run the group for as long as a Starlette or FastAPI app does: ``Starlette(lifespan=group.lifespan)``."""
        async with self:
            yield

    # ------------------------------------------------------------------------------------------------------ stopping

    async def shutdown(self, *, timeout: float | None = None) -> bool:
        """Shut down and wait for the end. Return False if something had to be cancelled.

        ``timeout`` (seconds) replaces the group's ``shutdown_timeout``. Before a run it is remembered, and the next run uses it
        up. From inside one of the group's handlers it only asks. In both cases it returns True at once. Cancelled, it stops
        waiting, and the shutdown goes on.

        :raises ConfigError: ``timeout`` is no number of seconds.
        """
        if timeout is not None and not is_number(timeout, 0, float("inf")):
            raise ConfigError(f"shutdown: timeout must be 0 or more seconds, not {timeout!r}")
        return await self._stop("shutdown()", timeout)

    async def drain(self) -> bool:
        """Take no new work, let the work in hand finish however long it takes, and wait for the end.

        A signal or :meth:`shutdown` during a drain puts the usual limit on what is left.
        """
        return await self._stop("drain()", float("inf"))

    async def _stop(self, reason: str, timeout: float | None) -> bool:
        lifetime = self._request(reason, timeout)
        if lifetime is None or any(map(is_inside, self.loops)):
            return True
        await lifetime.ended.wait()
        return lifetime.report is not None and lifetime.report.clean

    def request_shutdown(self, reason: str = "request_shutdown()") -> None:
        """Ask for a shutdown and return at once; before a run it is remembered, as by :meth:`shutdown`. Callable from any
        thread, signal handler or event loop, as are :meth:`request_drain` and :meth:`force_shutdown`."""
        self._request(reason, None)

    def request_drain(self, reason: str = "request_drain()") -> None:
        """Ask for a drain and return at once; asking again changes nothing."""
        self._request(reason, float("inf"))

    def force_shutdown(self, signum: int = signal.SIGTERM) -> None:
        """Skip to the cancelling, as a second signal ``signum`` does. Begin a shutdown if none is under way.

        Handlers get ``cancel_grace``, and the report's exit status is 128 + ``signum``. Without a run it does nothing.

        :raises ConfigError: ``signum`` is no signal.
        """
        if signum not in signal.valid_signals():
            raise ConfigError(f"force_shutdown: signum must be a signal such as signal.SIGTERM, not {signum!r}")
        lifetime = self._lifetime
        if lifetime is not None:
            lifetime.entry.call(partial(lifetime.force, signum))

    def _request(self, reason: str, timeout: float | None) -> Lifetime | None:
        """Mark the request for a run that is about to begin, and hand it to the run that is under way. Return that run."""
        self._asked = (reason, timeout)
        lifetime = self._lifetime
        if lifetime is not None:
            lifetime.entry.call(partial(lifetime.request, reason, timeout))
        return lifetime

    # ------------------------------------------------------------------------------------------------------- pausing

    async def pause(self, reason: str = "pause()", *, timeout: float | None = None) -> None:
        """Take no new work until :meth:`resume`. Return once every loop has paused and has released what it had not begun.

        Running handlers go on and keep their leases, restarted loops stay paused, and readiness says so. A shutdown ends the
        pause. A ``timeout`` ends the wait only: the loops pause even if ``timeout`` seconds pass before all have answered.

        :raises LoopNotRunningError: the group does not run, is starting or is shutting down.
        :raises ControlRefusedError: one of its loops cannot be paused; none is then.
        :raises TicketTimeoutError: ``timeout`` has passed.
        """
        await self._running("pause").pause(reason, timeout)

    async def resume(self, reason: str = "resume()", *, timeout: float | None = None) -> None:
        """Take new work again. Return once every loop has resumed; raise as :meth:`pause` does.

        A ``timeout`` (seconds), or a cancellation, ends the wait only: the loops resume.
        """
        await self._running("resume").resume(reason, timeout)

    def _running(self, what: str) -> Lifetime:
        if self._lifetime is None:
            raise LoopNotRunningError(f"group {self.name!r} cannot {what}: it is not running")
        return self._lifetime

    # -------------------------------------------------------------------------------------------------------- status

    @property
    def running(self) -> bool:
        """True while a run is under way."""
        return self._lifetime is not None

    @property
    def report(self) -> ShutdownReport | None:
        """The report of the last run, or None before one has ended."""
        return self._report

    @property
    def health_url(self) -> str | None:
        """The URL of the health server while it runs, with the real port if 0 was asked for."""
        return self._health_url

    def mailboxes(self) -> list[Mailbox[Any, Any]]:
        """Return the mailboxes of the running loops."""
        return self._lifetime.mailboxes() if self._lifetime is not None else []

    async def refresh_checks(self) -> None:
        """Ask again the checks that keep the group from being ready, where their answers are older than a second.

        :raises ConfigError: the group runs in another thread.
        """
        if self._lifetime is not None:
            self._check_thread()
            await self._lifetime.checks.refresh()

    def status(self) -> GroupStatus:
        """Return the present status of the group and its loops.

        :raises ConfigError: the group runs in another thread.
        """
        from mainspring.group.status import status_at_rest, status_of

        if self._lifetime is None:
            return status_at_rest(self.name, self._crash)
        self._check_thread()
        return status_of(self._lifetime)

    def _check_thread(self) -> None:
        if self._thread != get_ident():
            raise ConfigError(
                f"group {self.name!r} runs in another thread: ask there, by an async function for its LoopThread's submit()"
            )

    async def check_health(self, timeout: float = 5.0) -> list[HealthStatus]:
        """Return how its loops are, each by its own answer. They have ``timeout`` seconds together.

        A loop that does not answer in time is reported so. Cancelled, it leaves nothing behind. See
        :func:`~mainspring.worker.actor.check_health`.
        """
        from mainspring.worker.actor import check_health  # late, as above; the actors have imported it

        return await check_health(self.actors, timeout)

    def timeouts(self) -> list[Timeouts]:
        """Return the timeouts that its loops run under, for the calibration rules."""
        return [self.settings.timeouts_of(loop) for loop in self.loops if isinstance(loop, MainLoop)]

    async def _serve(self, scope: DaemonScope) -> None:
        """Start the health server in ``scope``."""
        from mainspring.http.serve_group import start

        assert self.settings.health_port is not None
        self._health_url = await start(self, scope, self.settings.health_host, self.settings.health_port)
