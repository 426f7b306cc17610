"""``MainLoop``: a mailbox, a handler, and the promise that nothing accepted is lost between them."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import anyio

from mainspring.core.dispatcher import Dispatcher, Tally
from mainspring.errors import ConfigError
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.ownership import kept_open
from mainspring.policies import DeadLetterPolicy, LeasePolicy, RetryPolicy
from mainspring.runtime.heartbeat import Heartbeat
from mainspring.runtime.scope import DaemonScope
from mainspring.validation import MAX_VISIBILITY, is_number, is_whole
from mainspring.worker.context import NO_RESOURCES
from mainspring.worker.handler import check_wrapper, handlers_of
from mainspring.worker.inside import is_inside
from mainspring.worker.middleware import checked, wrappers_of
from mainspring.worker.runnable import stop_in_time
from mainspring.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from anyio.abc import TaskStatus

    from mainspring.offload.pool import OffloadPool
    from mainspring.worker.actor import LoopActor
    from mainspring.worker.delivery import Delivery, Wrapper
    from mainspring.worker.handler import Handler, HandlerOf, Handlers
    from mainspring.worker.middleware import Middleware
    from mainspring.worker.slots import Capacity
    from mainspring.worker.worker import OpenReceive, Worker

T = TypeVar("T")
R = TypeVar("R")

CANCEL_GRACE = 5.0
"""Seconds that cancelled handlers get to clean up, where no group says otherwise."""


class MainLoop:
    """Takes messages out of a mailbox, hands each to a handler, and settles it.

    :param mailbox: where messages come from; a LoopGroup, or ``async with loop``, opens it if needed, and closes it at its
        end. Open one that several of them share around all of them.
    :param handler: ``async def handle(job: Job)`` or ``(job: Job, ctx: Context)``; a plain ``def`` runs in a worker thread.
        Its annotation gives the type of the bodies. What it returns is the reply, where the sender asked for one; a generator,
        or a coroutine that it forgot to await, is a failed attempt. Each run has context variables of its own: a copy of those
        that the loop was started with.
    :param name: for logs, metrics and reports; the handler's name by default. A second loop of that name in a group becomes
        ``name-2``.
    :param concurrency: how many handlers run at once, with a message leased for each. While handlers are quick, the messages
        are leased as well that they will begin within 50 ms at their present rate, up to 100 messages in all. Messages that
        have not begun after 100 ms, or when the loop stops or pauses, are released, uncharged.
    :param visibility_timeout: seconds a lease lasts (1 to 43,200). It is renewed while the handler runs. So it says how soon
        another worker takes over after a crash, not how long a handler may take.
    :param wait_time_seconds: how long one receive waits for work.
    :param retry: how long a failed message waits before it is tried again.
    :param dead_letter: when a message is given up.
    :param lease: how leases are renewed.
    :param handler_timeout: seconds after which a handler is cancelled, as a failed attempt; None: no limit.
    :param shutdown_timeout: seconds this loop's handlers may take to finish at a shutdown; None: as long as the group allows.
    :param shutdown_priority: loops with a higher one stop later.
    :param offload: where a plain ``def`` runs: ``"thread"`` (the default), ``"process"``, or an :class:`OffloadPool`. There are
        as many processes as ``concurrency``; the handler takes ``(job)`` alone, and a cancelled one is killed. Loops may share
        a pool; the loop opens it if it is not open.
    :param body: the type of the bodies, where the annotation does not say it.
    :param middleware: what runs around each handler run, the outermost first; see also :meth:`wrap`.
    :raises ConfigError: a value is impossible, or the handler's type is not the mailbox's.
    """

    pausable = True
    actor: LoopActor | None = None
    """The actor that serves its control messages, as in a group, or None."""
    outer_wrappers: Sequence[Wrapper] = ()
    """What its group has around the handlers of all of its loops, the innermost first; set for as long as that runs."""
    resources: Any = NO_RESOURCES
    """What its handlers get as ``ctx.resources``; a group sets it for as long as it runs."""
    handlers: Handlers | Handler
    """The handler of its messages."""
    group: str | None = None
    """The name of the group that runs it; a group sets it for as long as it runs."""

    def __init__(
        self,
        mailbox: Mailbox[T, R],
        handler: HandlerOf[T, R] | Handlers,
        *,
        name: str | None = None,
        concurrency: int = 1,
        visibility_timeout: float = 60,
        wait_time_seconds: float = 30,
        retry: RetryPolicy | None = None,
        dead_letter: DeadLetterPolicy | None = None,
        lease: LeasePolicy | None = None,
        handler_timeout: float | None = None,
        shutdown_timeout: float | None = None,
        shutdown_priority: int = 0,
        offload: Literal["thread", "process"] | OffloadPool | None = None,
        body: Any = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        if not isinstance(mailbox, Mailbox):
            raise ConfigError(f"MainLoop: mailbox must be a Mailbox (see open_mailbox), not {mailbox!r}")
        caller = sys._getframe(1)  # noqa: SLF001 - annotations may name classes local to the calling function
        self.handlers = handlers_of(handler, {**caller.f_globals, **caller.f_locals}, body=body)
        self.name = name or self.handlers.name
        _check(
            self.name, concurrency, visibility_timeout, wait_time_seconds, handler_timeout, shutdown_timeout,
            shutdown_priority, retry, dead_letter, lease,
        )  # fmt: skip
        self._pool = self.handlers.pool(offload, concurrency)
        self._own_pool = None if self._pool is offload else self._pool
        self.handlers.bind(mailbox)
        _ = mailbox.codec  # made now, so that a type which cannot be a body is refused here
        self.mailbox = mailbox
        self.visibility_timeout = float(visibility_timeout)
        self.wait_time_seconds = float(wait_time_seconds)
        self.shutdown_timeout = shutdown_timeout
        self.shutdown_priority = shutdown_priority
        self.outcomes = Tally()
        """How many deliveries ended in which way, since the loop was made."""
        self.dispatcher = Dispatcher()
        self.capacity: Capacity | None = None
        """The slots that its next run shares with other loops, or None."""
        self._wrappers = list(wrappers_of(checked(middleware, f"loop {self.name!r}")))
        self._settings = WorkerSettings(
            handler=self.handlers.name,
            concurrency=concurrency,
            retry=retry or RetryPolicy(),
            dead_letter=dead_letter or DeadLetterPolicy(),
            lease=lease or LeasePolicy(),
            handler_timeout=handler_timeout,
            wants_context=self.handlers.wants_context,
            in_thread=not self.handlers.is_async,
            before=self.handlers.before,
            beside=self.handlers.beside,
        )
        self._heartbeat = Heartbeat()
        self._worker: Worker | None = None
        self._scope: anyio.CancelScope | None = None
        self._stop_asked = self._paused = False
        self._own: DaemonScope | None = None

    def __repr__(self) -> str:
        state = "running" if self.running else "idle"
        return f"<{type(self).__name__} {self.name!r} on {self.mailbox.name!r} {state} in_flight={self.in_flight}>"

    def wrap(self, wrapper: Wrapper) -> Wrapper:
        """Let ``wrapper(message, call)`` run around every handler call: for spans, timing, a transaction, a log context.

        An ``async def`` that awaits ``call()`` once, and returns what that returns::

            @loop.wrap
            async def timed(message, call):
                with timer(message.id):
                    return await call()

        It runs in the handler's context: a context variable that it sets is the handler's, and gone at the end of the run. What
        it raises counts as raised by the handler, a cancellation of the handler passes through it, and it must not settle
        the message. The wrapper that was added last is the outermost. It holds from the next run on.

        :raises ConfigError: it cannot be called, or is a generator, or a class.
        """
        check_wrapper(wrapper)
        self._wrappers.append(wrapper)
        return wrapper

    # ---------------------------------------------------------------------------------------------------- life cycle

    async def run(
        self,
        *,
        max_iterations: int | None = None,
        visibility_timeout: float | None = None,
        wait_time_seconds: float | None = None,
    ) -> None:
        """Work until :meth:`shutdown`, or until ``max_iterations`` receives have been made and handled.

        ``visibility_timeout`` and ``wait_time_seconds`` replace the loop's own for this run. A shutdown that was asked for
        before is remembered: the run returns at once, and uses it up. Cancelled, it cancels its handlers and gives their
        messages back uncharged.

        :raises MailboxClosedError: the mailbox was closed under it, or was never opened.
        :raises ConfigError: it is already running, or a value is impossible.
        """
        if self.running:
            raise self._runs_already()
        visibility = self.visibility_timeout if visibility_timeout is None else visibility_timeout
        wait = self.wait_time_seconds if wait_time_seconds is None else wait_time_seconds
        _check_times(self.name, visibility, wait)
        if max_iterations is not None and not is_whole(max_iterations, 0):
            raise ConfigError(
                f"loop {self.name!r}: max_iterations must be a whole number from 0, or None, not {max_iterations!r}"
            )
        from mainspring.worker.worker import Worker  # late: a program that only sends does not need it

        worker = Worker(
            self.name,
            self.mailbox,
            self._settings,
            partial(self.handlers.runs, self.mailbox, self._settings, self._pool),
            dispatcher=self.dispatcher,
            heartbeat=self._heartbeat,
            outcomes=self.outcomes,
            capacity=self.capacity,
            wrappers=(*self._wrappers, *self.outer_wrappers),
            resources=self.resources,
            group=self.group,
            visibility=float(visibility),
            wait=float(wait),
        )
        self._scope = scope = anyio.CancelScope()
        self._worker = worker
        # Asked once it can be told: a request from another thread is either seen here, or comes to the worker.
        self._follow_pause(worker)
        self._follow_concurrency(worker)
        if self._stop_asked:
            worker.shut_down()
        self._heartbeat.beat()
        try:
            async with self._pool or nullcontext():
                with scope:
                    await worker.run(max_iterations)
        finally:
            self._scope = self._worker = None
            self._stop_asked = False
            worker.ended.set()

    async def shutdown(self, *, timeout: float = 30.0) -> bool:
        """Stop: receive no more, let handlers finish within ``timeout`` seconds, then cancel them.

        Returns whether everything ended by itself. Cancelled handlers' messages go back uncharged; they get 5 s to clean up.
        One that does not end although cancelled (a thread, a shield) is waited for: put a limit of your own around the call.
        Before :meth:`run` it is remembered for the next run. From inside one of the loop's handlers it only asks for the
        shutdown and returns True, since it could not wait for itself.
        """
        if not is_number(timeout, 0, math.inf):
            raise ConfigError(f"shutdown: timeout must be 0 or more seconds, not {timeout!r}")
        if (actor := self.actor) is not None:
            return await actor.shutdown(timeout=timeout)
        self.request_shutdown()
        worker = self._worker
        if worker is None or is_inside(self):
            return True
        return await stop_in_time(self, worker.ended, timeout=timeout, cancel_grace=CANCEL_GRACE)

    # Plain requests may come from any thread or signal handler: each sets its mark first, for a run that is about to begin,
    # and is then handed to the event loop of the run that is under way.

    def request_shutdown(self) -> None:
        """Ask for a shutdown and return: everything :meth:`shutdown` does before it waits. Callable from any thread or
        signal handler."""
        if (actor := self.actor) is not None:
            from mainspring.worker.control import DrainRequest  # late, and quick: the actor has imported it

            actor.tell(DrainRequest())
        else:
            self.stop_intake()

    def announce_shutdown(self) -> None:
        """Tell the handlers (``ctx.shutting_down``) that the end is near."""
        self._tell(lambda worker: worker.shutting_down.set())

    def stop_intake(self) -> None:
        """Receive no more; what was claimed and not begun is released. In a group, its actor calls it."""
        self._stop_asked = True
        self._tell(lambda worker: worker.shut_down())

    def pause(self) -> None:
        """Take no new work until :meth:`resume`; what was claimed and not begun is released, running handlers go on.

        It may be asked before a run, and holds for the runs to come. Callable from any thread or signal handler.
        """
        self._paused = True
        self._tell(self._follow_pause)

    def resume(self) -> None:
        """Take new work again. Callable from any thread or signal handler."""
        self._paused = False
        self._tell(self._follow_pause)

    def set_concurrency(self, concurrency: int) -> None:
        """Run at most ``concurrency`` handlers at once, in the run that is under way and in later ones.

        With more, further messages begin at once. With fewer, running handlers go on, and none begins before fewer of them are
        left. Claimed messages that cannot begin are released, uncharged. A pool that the loop has made for its plain
        functions follows. The last of several calls counts. Callable from any thread or signal handler.

        It is for this loop alone: :meth:`Mailbox.set_concurrency` limits all workers of a mailbox together.

        :raises ConfigError: it is no whole number from 1.
        """
        _check_concurrency(self.name, concurrency)
        self._settings = self._settings._replace(concurrency=concurrency)
        self._tell(self._follow_concurrency)

    @property
    def concurrency(self) -> int:
        """How many handlers run at once, at most."""
        return self._settings.concurrency

    @property
    def paused(self) -> bool:
        """True if it has been told to pause."""
        return self._paused

    async def wait_paused(self) -> None:
        """Wait until a pause holds: no receive is open, and the backlog is released. Return at once if not paused."""
        worker = self._worker
        if worker is not None and (at_rest := await worker.entry.ask(worker.admission.at_rest)) is not None:
            await at_rest.wait()

    def cancel_work(self) -> None:
        """Cancel the running handlers."""
        self._tell(lambda worker: worker.cancel_handlers())

    def abort(self) -> None:
        """Cancel the whole run, settlements that hang included."""
        scope = self._scope
        if scope is not None:
            self._tell(lambda _: scope.cancel())

    def _follow_pause(self, worker: Worker) -> None:
        if self._paused:  # as it is marked now: of requests from several threads the last one counts
            worker.pause()
        else:
            worker.resume()

    def _follow_concurrency(self, worker: Worker) -> None:
        worker.set_concurrency(self._settings.concurrency)
        if self._own_pool is not None:
            self._own_pool.set_workers(self._settings.concurrency)

    def _tell(self, act: Callable[[Worker], object]) -> None:
        worker = self._worker
        if worker is not None:
            worker.entry.call(partial(act, worker))

    @property
    def running(self) -> bool:
        """True while :meth:`run` is under way."""
        return self._worker is not None

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat. It beats at each receive, at the start and end of each message, and whenever a handler does."""
        return self._heartbeat

    async def __aenter__(self) -> Self:
        """Open the mailbox if it is not open, and run in the background; leaving the block shuts down."""
        if self._own is not None:
            raise self._runs_already()
        self._own = own = DaemonScope(f"loop {self.name}")
        try:
            await own.__aenter__()
            try:
                await own.start(self._run_opened, name=self.name, stop=self.request_shutdown)
            except BaseException as error:
                await own.__aexit__(type(error), error, error.__traceback__)
                raise
        except BaseException:
            self._own = None
            raise
        return self

    def _runs_already(self) -> ConfigError:
        return ConfigError(f"loop {self.name!r} is already running; make a second loop, or raise its concurrency")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        own, self._own = self._own, None
        assert own is not None
        try:
            if kind is None:
                try:
                    await self.shutdown(timeout=30.0 if self.shutdown_timeout is None else self.shutdown_timeout)
                except BaseException as stopping:
                    await own.__aexit__(type(stopping), stopping, stopping.__traceback__)
                    raise  # where the scope has nothing to raise by now, this is not to be lost
            return await own.__aexit__(kind, error, trace)
        finally:
            self._stop_asked = False  # this run's end was meant, not the next one's

    async def _run_opened(self, *, task_status: TaskStatus[None]) -> None:
        async with kept_open([self.mailbox], f"loop {self.name!r}"):
            task_status.started()
            await self.run()

    # -------------------------------------------------------------------------------------------------------- status

    @property
    def runs(self) -> tuple[Delivery, ...]:
        """The messages in hand, oldest first."""
        return self._worker.deliveries if self._worker is not None else ()

    @property
    def claims(self) -> tuple[OpenReceive, ...]:
        """The calls of the mailbox that are out just now."""
        return self._worker.open_receives if self._worker is not None else ()

    @property
    def in_flight(self) -> int:
        """How many messages it holds."""
        return self._worker.in_flight if self._worker is not None else 0

    @property
    def trouble(self) -> str | None:
        """The reason why its store does not answer just now, so that it can claim and settle nothing, or None."""
        return self._worker.store_health.trouble if self._worker is not None else None

    @property
    def lease(self) -> LeasePolicy:
        """Its policy for renewing leases."""
        return self._settings.lease

    @property
    def retry(self) -> RetryPolicy:
        """Its policy for the delay of a failed message."""
        return self._settings.retry

    @property
    def dead_letter(self) -> DeadLetterPolicy:
        """Its policy for giving a message up."""
        return self._settings.dead_letter

    @property
    def worker(self) -> Worker | None:
        """The engine of the run that is under way, or None."""
        return self._worker


def _check_concurrency(name: str, concurrency: int) -> None:
    if not is_whole(concurrency, 1):
        raise ConfigError(f"loop {name!r}: concurrency must be a whole number from 1, not {concurrency!r}")


def _check_times(name: str, visibility: float, wait: float) -> None:
    if not is_number(visibility, 1, MAX_VISIBILITY):
        raise ConfigError(
            f"loop {name!r}: visibility_timeout must be 1 to {MAX_VISIBILITY:.0f} seconds, not {visibility!r}"
        )
    if not is_number(wait, 0):
        raise ConfigError(f"loop {name!r}: wait_time_seconds must be 0 or more seconds and finite, not {wait!r}")


def _check(
    name: str,
    concurrency: int,
    visibility: float,
    wait: float,
    handler_timeout: float | None,
    shutdown_timeout: float | None,
    shutdown_priority: int,
    retry: object,
    dead_letter: object,
    lease: object,
) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"loop {name!r}: name must be a string")
    _check_concurrency(name, concurrency)
    _check_times(name, visibility, wait)
    check_handling(f"loop {name!r}", "handler_timeout", handler_timeout, retry, dead_letter)
    if shutdown_timeout is not None and not is_number(shutdown_timeout, 0):
        raise ConfigError(
            f"loop {name!r}: shutdown_timeout must be 0 or more seconds, or None, not {shutdown_timeout!r}"
        )
    if not is_whole(shutdown_priority):
        raise ConfigError(f"loop {name!r}: shutdown_priority must be a whole number, not {shutdown_priority!r}")
    if lease is not None and not isinstance(lease, LeasePolicy):
        raise ConfigError(f"loop {name!r}: LeasePolicy expected, not {lease!r}")


def check_handling(owner: str, option: str, timeout: float | None, retry: object, dead_letter: object) -> None:
    """Raise :class:`ConfigError` for a timeout of handlers (``option`` is its name) or a policy that cannot be."""
    if timeout is not None and not (is_number(timeout, 0) and timeout):
        raise ConfigError(f"{owner}: {option} must be above 0 seconds, or None, not {timeout!r}")
    for policy, kind in ((retry, RetryPolicy), (dead_letter, DeadLetterPolicy)):
        if policy is not None and not isinstance(policy, kind):
            raise ConfigError(f"{owner}: {kind.__name__} expected, not {policy!r}")
