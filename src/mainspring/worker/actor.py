"""``LoopActor``: a loop with a control channel beside its mailbox, served while it works and while it waits."""

from __future__ import annotations

import inspect
import math
import threading
from collections import deque
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import anyio

from mainspring.core.introspection import check_runs, instead_of, name_of, ran
from mainspring.core.lazy_event import LazyEvent
from mainspring.core.loggers import Logger
from mainspring.core.process import call_soon, event_loop, identity, in_task_of
from mainspring.core.run_in_context import run_in
from mainspring.errors import (
    ConfigError,
    ControlRefusedError,
    InvalidParameterError,
    LoopNotRunningError,
    TaskExitError,
    TicketTimeoutError,
    describe,
)
from mainspring.runtime.cancellation import SpuriousAsError
from mainspring.runtime.scope import DaemonScope
from mainspring.validation import is_number
from mainspring.worker.adapter import LoopAdapter
from mainspring.worker.control import (
    ConcurrencyRequest,
    ControlMessage,
    DrainRequest,
    HealthCheckRequest,
    HealthStatus,
    PauseRequest,
    PingRequest,
    ResumeRequest,
    ShutdownNotice,
    ShutdownRequest,
)
from mainspring.worker.inside import is_inside
from mainspring.worker.main_loop import MainLoop
from mainspring.worker.runnable import AnyRunnable, Runnable, Steerable, stop_in_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from mainspring.runtime.heartbeat import Heartbeat
    from mainspring.threads.ticket import TicketWriter

_log = Logger("mainspring")

T = TypeVar("T")
OnMessage: TypeAlias = "Callable[[Any], object]"
"""A function for messages of a user's own, plain or async. :class:`LoopActor` calls it with the message."""


class LoopActor:
    """A loop that can be asked and told things while it runs, from any task or thread.

    It runs ``loop`` and, beside it, serves control messages in the order in which they came, also while every handler is busy
    or the loop waits for work. A LoopGroup makes one of each of its loops (``group.actors``), and steers them by these messages
    alone. An actor that you made may be given to a group as a loop, or run by :meth:`run`.

    :param loop: a MainLoop, or any ``Runnable``. One of foreign make can be paused where it has plain methods ``pause()``
        and ``resume()``.
    :param on_message: called with each control message of a kind of your own (a subclass of :class:`ControlMessage`). A plain
        function is called on the event loop, an async one in a task of its own that holds up no other message. What it returns
        is the answer; what it raises fails the ticket, and ends nothing. It may answer the ticket by itself instead. An async
        one that runs when the loop ends is cancelled, and its ticket fails with :class:`LoopNotRunningError`. Each call has
        context variables of its own: a copy of what the loop was started with.
    :raises ConfigError: it is no loop, or is an actor already; or ``on_message`` cannot be called.
    """

    def __init__(self, loop: AnyRunnable, *, on_message: OnMessage | None = None) -> None:
        if isinstance(loop, LoopActor):
            raise ConfigError(f"LoopActor: {loop!r} is an actor already; use it as it is")
        if not isinstance(loop, Runnable):
            raise ConfigError(
                f"LoopActor: {loop!r} is no loop; it needs run(), shutdown(), running and heartbeat (see Runnable)"
            )
        if on_message is not None:
            if not callable(on_message):
                raise ConfigError(
                    f"LoopActor: on_message must be a function of (message), {instead_of(on_message, 'LoopActor')}"
                )
            check_runs(on_message, "on_message")
        self._on_message = on_message
        self._context = copy_context()
        self.loop: Steerable = loop if isinstance(loop, Steerable) else LoopAdapter(loop)
        self.stopped = LazyEvent()
        """Set once it is told to stop."""
        self.stop_began: float | None = None
        """When it was told to stop (anyio's clock), or None."""
        self.stop_within = math.inf
        """Seconds that it then had before its work is cancelled, as far as its sender knew."""
        self.cancelled_at: tuple[str, ...] | None = None
        """The lines its work stood on when that was cancelled, or None."""
        self._on_stop: Callable[[], object] | None = None
        self._belong_here()
        self._inbox: deque[tuple[ControlMessage[Any], TicketWriter[Any]]] = deque()
        self._event_loop: object | None = None  # while it serves; None refuses messages
        self._wake = anyio.Event()
        self._ended = LazyEvent()
        self._scope = DaemonScope("control")
        self._stops: list[TicketWriter[bool]] = []
        self._at_work = False
        self._crashed = False

    def __repr__(self) -> str:
        return f"<LoopActor {self.name!r} {'running' if self.running else 'idle'}>"

    @property
    def name(self) -> str:
        """The loop's name."""
        return self.loop.name

    # ------------------------------------------------------------------------------------------------------ messages

    def tell(self, message: ControlMessage[Any]) -> None:
        """Hand ``message`` over and return; the answer comes on its ticket. Callable from any task, thread or signal handler.

        Told from a task of the loop's own event loop, it has been served when this returns.

        The ticket fails with :class:`LoopNotRunningError` at once if the actor does not run or has ended, or else when it ends
        before it came to the message. It fails with :class:`ControlRefusedError` if the actor does not know such a message and
        has no ``on_message``, or if its loop cannot do that.

        :raises InvalidParameterError: it is no :class:`ControlMessage`.
        :raises ConfigError: it has been told before; make a new one. Or the actor runs in the process from which this one was
            forked, which does not see it.
        """
        if not isinstance(message, ControlMessage):
            raise InvalidParameterError(f"{self!r} takes control messages such as PauseRequest(), not {message!r}")
        if not self._process.here:
            self._come_from_a_fork()
        answer = message.ticket.writer()
        with self._lock:
            loop = self._event_loop
            if loop is not None:
                self._inbox.append((message, answer))
        if loop is None:
            answer.offer_error(self._not_running(message))
        elif in_task_of(loop):
            self._serve_inbox()
        else:
            call_soon(loop, self._rouse)

    def _belong_here(self) -> None:
        # A signal handler may come in between and tell it something of its own, hence the R. A forked child needs one of
        # its own: a thread of the parent may have held the other one as it forked.
        self._lock = threading.RLock()
        self._process = identity()

    def _come_from_a_fork(self) -> None:
        """Raise where the parent runs it; else it is this process's own from here on."""
        if self._event_loop is not None:
            raise ConfigError(
                f"loop {self.name!r} runs in process {self._process.pid}, from which this one was forked; make a new"
                " LoopActor after the fork"
            )
        self._belong_here()

    async def ask(self, message: ControlMessage[T], timeout: float | None = None) -> T:
        """Tell it ``message`` and wait for the answer, at most ``timeout`` seconds (None: for as long as the actor runs).

        From a thread without an event loop: ``actor.tell(message)``, then ``message.ticket.wait_sync(timeout)``. A handler of
        the loop itself may tell it to stop, and must not wait for that.

        :raises TicketTimeoutError: no answer came in time; the message is still served.
        :raises LoopNotRunningError: as :meth:`tell` has it, and likewise :class:`ControlRefusedError`.
        """
        self.tell(message)
        return await message.ticket.wait(timeout)

    def _rouse(self) -> None:
        self._wake.set()

    async def _serve(self) -> None:
        while True:
            self._wake = anyio.Event()
            self._serve_inbox()
            await self._wake.wait()

    def _serve_inbox(self) -> None:
        while self._inbox:
            message, answer = self._inbox.popleft()
            try:
                self._context.copy().run(self._act, message, answer)
            except Exception as error:  # a loop of foreign make may raise anything: it is the asker's to know
                answer.offer_error(error)

    def _act(self, message: ControlMessage[Any], answer: TicketWriter[Any]) -> None:
        match message:
            case HealthCheckRequest():
                answer.offer(self.health())
            case PingRequest():
                answer.offer(message.made.elapsed())
            case PauseRequest() | ResumeRequest() if not self.loop.pausable:
                what = "it has no plain methods pause() and resume()"
                answer.offer_error(ControlRefusedError(f"loop {self.name!r} cannot be paused: {what}"))
            case PauseRequest():
                self.loop.pause()
                self._scope.start_soon(self._answer_when_paused, answer, name=f"{self.name} pauses")
            case ResumeRequest():
                self.loop.resume()
                answer.offer(None)
            case ConcurrencyRequest():
                if not isinstance(self.loop, MainLoop):
                    raise ControlRefusedError(f"loop {self.name!r} is no MainLoop, and has no concurrency")
                self.loop.set_concurrency(message.concurrency)
                answer.offer(None)
            case ShutdownNotice():
                self.loop.announce_shutdown()
                answer.offer(None)
            case DrainRequest():
                self._stop(answer, message.within)
            case ShutdownRequest():
                self._stop(answer, message.timeout)
                self._hurry(message)
            case _ if self._on_message is not None:
                self._hand_over(self._on_message, message, answer)
            case _:
                known = "health check, ping, pause, resume, concurrency, drain and shutdown"
                how = "give LoopActor on_message= for others"
                answer.offer_error(
                    ControlRefusedError(f"loop {self.name!r} knows no {_called(message)}: it knows {known}; {how}")
                )

    def _hand_over(self, on_message: OnMessage, message: ControlMessage[Any], answer: TicketWriter[Any]) -> None:
        """Have ``on_message`` answer, or begin to."""
        try:
            outcome = on_message(message)
            if not inspect.isawaitable(outcome):
                answer.offer(ran(outcome, f"on_message {name_of(on_message)}"))
                return
        except BaseException as error:
            answer.offer_error(_bearable(on_message, error))
            return
        self._scope.start_soon(self._answer_of, on_message, outcome, message, answer, name=f"{self.name} answers")

    async def _answer_of(
        self,
        on_message: OnMessage,
        outcome: Awaitable[object],
        message: ControlMessage[Any],
        answer: TicketWriter[Any],
    ) -> None:
        try:
            async with SpuriousAsError(f"on_message {name_of(on_message)} was cancelled by itself"):
                result = await run_in(copy_context(), lambda: outcome, self._ended.is_set)
            answer.offer(ran(result, f"on_message {name_of(on_message)}"))
        except anyio.get_cancelled_exc_class():
            answer.offer_error(self._not_running(message))
            raise
        except BaseException as error:
            answer.offer_error(_bearable(on_message, error))

    async def _answer_when_paused(self, answer: TicketWriter[None]) -> None:
        with answer:
            await self.loop.wait_paused()
            answer.offer(None)

    def _stop(self, answer: TicketWriter[bool], within: float) -> None:
        self._stops.append(answer)
        if not self.stopped.is_set():
            self.stop_began, self.stop_within = anyio.current_time(), within
            self.stopped.set()
            if self._on_stop is not None:
                self._on_stop()
            if self._at_work:  # else the loop would remember it, and its next run would end before it began
                self.loop.stop_intake()

    def _hurry(self, message: ShutdownRequest) -> None:
        if message.timeout <= 0:
            self.cancel_work()  # at once: turns of the event loop can be rare, where handlers are what is wrong with it
            if message.cancel_grace <= 0:
                self.abort()
                return
        self._scope.start_soon(self._stop_in_time, message, name=f"{self.name} stops")

    async def _stop_in_time(self, message: ShutdownRequest) -> None:
        await stop_in_time(self, self._ended, timeout=message.timeout, cancel_grace=message.cancel_grace)

    # ---------------------------------------------------------------------------------------------------- life cycle

    async def run(self, **keywords: Any) -> None:
        """Run the loop, and serve control messages until it has ended; ``keywords`` are those of its own ``run``.

        A pause ends with it. :raises ConfigError: it is running already.
        """
        async with self.serving() as run_loop:
            if not self.stopped.is_set():
                await run_loop(**keywords)

    @asynccontextmanager
    async def serving(
        self, on_stop: Callable[[], object] | None = None
    ) -> AsyncIterator[Callable[..., Awaitable[None]]]:
        """Serve control messages while the block runs. It is given what runs the loop once, and may call that repeatedly.

        ``on_stop()`` is called once the loop is told to stop, by whichever call.
        """
        if self._event_loop is not None:
            raise ConfigError(f"{self!r} is already running; make a second one")
        self.stop_began = self.cancelled_at = None
        self.stopped, self._ended, self._wake = LazyEvent(), LazyEvent(), anyio.Event()
        self._on_stop = on_stop
        self._crashed = False
        self._context = copy_context()
        async with DaemonScope(f"control of {self.name}") as self._scope:
            self._scope.start_soon(self._serve, name=f"control of {self.name}")
            if not self._process.here:
                self._come_from_a_fork()
            with self._lock:
                self._event_loop = event_loop()
            self.loop.actor = self
            try:
                yield self._run_loop
            finally:
                self.loop.actor = None
                self._end()

    async def _run_loop(self, **keywords: Any) -> None:
        self._at_work = True
        try:
            await self.loop.run(**keywords)
        except BaseException:
            self._crashed = True
            raise
        finally:
            self._at_work = False

    def _end(self) -> None:
        with self._lock:
            self._event_loop = None
            left = [*self._inbox]
            self._inbox.clear()
        self._on_stop = None  # so that the group's part of the loop goes with the group
        self._ended.set()
        for message, answer in left:
            answer.offer_error(self._not_running(message))
        stops, self._stops = self._stops, []
        for answer in stops:
            answer.offer(self.cancelled_at is None and not self._crashed)
        if self.loop.paused:
            try:
                self.loop.resume()
            except Exception:  # one of foreign make; how its run ended is what the caller has to know
                _log.exception("loop %r has ended paused, and its resume() raised", self.name)

    def _not_running(self, message: ControlMessage[Any]) -> LoopNotRunningError:
        return LoopNotRunningError(
            f"loop {self.name!r} is not running, so it cannot take the {_called(message)}; send it while the loop runs"
        )

    async def shutdown(self, *, timeout: float = 30.0) -> bool:
        """Shut the loop down and wait for its end. Return False if work had to be cancelled.

        Work in hand has ``timeout`` seconds. A running loop is told by a :class:`ShutdownRequest`; a loop that does not run is
        shut down by its own method. From inside one of the loop's handlers it only asks, and returns True. Cancelled, it stops
        waiting, and the shutdown goes on.
        """
        if self._event_loop is None:
            return await self.loop.shutdown(timeout=timeout)
        request = ShutdownRequest(timeout=timeout)
        self.tell(request)
        return True if is_inside(self.loop) else await request.ticket.wait()

    @property
    def running(self) -> bool:
        """True while it runs and serves control messages."""
        return self._event_loop is not None and self._process is identity()

    @property
    def heartbeat(self) -> Heartbeat:
        """The loop's own."""
        return self.loop.heartbeat

    # ------------------------------------------------------------------------- what the messages come down to

    def cancel_work(self) -> None:
        """Cancel its work, remembering the lines that it stood on; once."""
        if not self._ended.is_set() and self.cancelled_at is None:
            self.cancelled_at = self.where()
            self.loop.cancel_work()

    def abort(self) -> None:
        """Cancel its run, settlements included, where cancelling the work was not enough; remembers the lines again."""
        if not self._ended.is_set():
            self.cancelled_at = tuple(dict.fromkeys((*(self.cancelled_at or ()), *self.where())))
            self.loop.abort()

    def where(self) -> tuple[str, ...]:
        """Return the lines that its work waits on, and its receives if they are out."""
        return tuple(sorted({line for at in (*self.loop.runs, *self.loop.claims) if (line := at.where())}))

    def health(self) -> HealthStatus:
        """Return the answer to a :class:`HealthCheckRequest`; call it on the loop's own event loop."""
        loop = self.loop
        reason = None
        if not self.running:
            reason = "not running"
        elif self.stopped.is_set():
            reason = "stopping"
        elif loop.trouble is not None:
            reason = loop.trouble
        elif loop.paused:
            reason = "paused"
        elif not self._at_work:
            reason = "to be restarted"
        return HealthStatus(
            name=self.name,
            healthy=reason is None,
            reason=reason,
            paused=loop.paused,
            stopping=self.stopped.is_set(),
            in_flight=loop.in_flight,
            oldest_beat_age=max((run.beat_age() for run in loop.runs), default=0.0),
            heartbeat_age=loop.heartbeat.elapsed(),
        )


async def check_health(actors: Iterable[LoopActor], timeout: float = 5.0) -> list[HealthStatus]:
    """Return how the actors are, in their order. All are asked at once, and have ``timeout`` seconds together.

    An actor that does not answer in time, or does not run, is reported as that (``answered`` is False).

    :raises InvalidParameterError: ``timeout`` is no number of seconds, or one is no actor.
    """
    asked = list(actors)
    if not all(isinstance(actor, LoopActor) for actor in asked):
        raise InvalidParameterError(f"check_health: actors are LoopActor objects, not {asked!r}")
    answers = await ask_all(asked, HealthCheckRequest, timeout)
    return [
        HealthStatus(actor.name, False, describe(answer), answered=False, heartbeat_age=actor.heartbeat.elapsed())
        if isinstance(answer, Exception)
        else answer
        for actor, answer in zip(asked, answers, strict=True)
    ]


async def ask_all(
    actors: Iterable[LoopActor], make: Callable[[], ControlMessage[T]], timeout: float | None = None
) -> list[T | Exception]:
    """Ask all at once, with one deadline: each one's answer, or the error in its place."""
    if timeout is not None and not is_number(timeout, 0):
        raise InvalidParameterError(f"timeout must be 0 or more seconds, or None, not {timeout!r}")
    asked = list(actors)
    messages = [make() for _ in asked]
    for actor, message in zip(asked, messages, strict=True):
        actor.tell(message)
    end = math.inf if timeout is None else anyio.current_time() + timeout
    answers: list[T | Exception] = []
    for actor, message in zip(asked, messages, strict=True):
        left = None if timeout is None else max(0.0, end - anyio.current_time())
        try:
            answers.append(await message.ticket.wait(left))
        except TicketTimeoutError:
            answers.append(TicketTimeoutError(f"loop {actor.name!r} has not answered within {timeout:g} s"))
        except Exception as error:
            answers.append(error)
    return answers


def _bearable(on_message: OnMessage, error: BaseException) -> Exception:
    """Return the error that fails a ticket: an exit or a cancellation of the function's own must not become its reader's."""
    if isinstance(error, Exception):
        return error
    exit_error = TaskExitError(
        f"on_message {name_of(on_message)} raised {error!r}; call shutdown() of the loop to end it"
    )
    exit_error.__cause__ = error
    return exit_error


def _called(message: ControlMessage[Any]) -> str:
    return type(message).__qualname__
