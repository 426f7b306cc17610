"""One delivery in the hands of a worker, from its claim to its settlement, and the handler run on it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import anyio

from mainspring.core import random
from mainspring.core.clock import thread_clock, utc_clock
from mainspring.core.introspection import close_unbegun, name_of, ran
from mainspring.core.process import end_returned_child, identity
from mainspring.core.run_in_context import resumed
from mainspring.core.tracebacks import where, where_thread
from mainspring.errors import (
    DeadlineExceededError,
    HandlerStalledError,
    HandlerTimeoutError,
    Retry,
    SerializationError,
    TaskExitError,
    text_and_type,
)
from mainspring.events import MessageStarted
from mainspring.mailbox import replies
from mainspring.mailbox.message import Ack, Dead, Nack, header_of, history_until, history_with
from mainspring.mailbox.records import RESULT_TTL
from mainspring.policies import DeadLetterPolicy
from mainspring.runtime.cancellation import is_spurious_cancellation
from mainspring.runtime.deadline import deadline_of, enter
from mainspring.runtime.scope import lone_error
from mainspring.runtime.wrong_loop import explained
from mainspring.worker.call_options import retry_of, timeout_of
from mainspring.worker.context import Context
from mainspring.worker.outcome import (
    CANCELLED,
    DONE,
    LOST,
    RELEASED,
    Cause,
    Decision,
    Outcome,
    after_deadline,
    after_failure,
    before_start,
    is_unanswered,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from contextvars import Context as CallContext

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.core.lazy_event import LazyEvent
    from mainspring.mailbox.message import ClaimedMessage, Envelope, Message, Result
    from mainspring.runtime.deadline import Deadline
    from mainspring.runtime.heartbeat import Heartbeat
    from mainspring.worker.settings import WorkerSettings


class Clocks:
    """The clocks of the event loop that is running, to be read in any thread."""

    __slots__ = ("now", "utc_now")

    def __init__(self) -> None:
        self.now = thread_clock()
        self.utc_now = utc_clock()


class Phase:
    """Where a delivery is; it can be cancelled only while it is being handled.

    Plain numbers: before Python 3.12 each mention of an enum's member costs 0.07 us, and a delivery passes all of them.
    """

    WAITING = 0
    HANDLING = 1
    ENDED = 2
    SETTLING = 3
    DONE = 4


class Delivery:
    """A delivery with its lease and its signs of life. The watchdog sees it as one of its subjects."""

    phase: int = Phase.WAITING
    began = True
    """False if it was released before its handler began."""
    cause: Cause | None = None
    """Why the engine cancelled its handler."""
    error: BaseException | None = None
    decision: Decision | None = None
    settling_since = 0.0
    scope: anyio.CancelScope | None = None
    coroutine: Any = None
    thread_id: int | None = None
    due: Deadline | None = None
    revoked = False
    waits = False
    """True while it waits for a worker of its pool: its handler has not begun."""
    progress_made: tuple[float, float | None] | None = None
    clocks: Clocks
    _beaten_elsewhere = False
    _timeout_at = math.inf
    _due: Deadline | None = None
    _due_at = math.inf
    _left = math.inf

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        heartbeat: Heartbeat,
        shutting_down: LazyEvent,
        lease_seconds: float,
        now: float,
        message: Message[Any, Any],
    ) -> None:
        leased_at = message.delivery.leased_at
        self.name = name
        self.message = message
        self.shutting_down = shutting_down
        self.renewed_at = now if leased_at is None else leased_at
        self.trusted_until = self.renewed_at + lease_seconds
        self.renew_at = math.inf
        self.deadline: float | None = None
        self.lost = False
        self.started = self.last_beat = now
        self._clock = clock
        self._heartbeat = heartbeat

    # ------------------------------------------------------------------------------------------------ signs of life

    @property
    def message_id(self) -> str:
        """The message's id."""
        return self.message.id

    @property
    def done(self) -> bool:
        """True if no handler of it runs: it was claimed ahead, or is being settled, for which there is another deadline."""
        return self.phase != Phase.HANDLING

    def beat(self) -> None:
        """Note a sign of life, for its loop too; from the event loop or from the handler's thread."""
        self._heartbeat.beat()
        try:
            self.last_beat = anyio.current_time()
        except RuntimeError:  # in the handler's thread: stamped when the watchdog next looks
            self._beaten_elsewhere = True

    def beat_age(self) -> float:
        """Return the seconds since the last beat."""
        now = self._clock()
        if self._beaten_elsewhere:
            self._beaten_elsewhere = False
            self.last_beat = now
        return max(0.0, now - self.last_beat)

    def progress(self, done: float, total: float | None) -> None:
        """Note how far the work is."""
        self.progress_made = (done, total)
        self.beat()

    def where(self) -> str:
        """Return the line that the coroutine or thread of its handler stands on, or that it is being settled."""
        if self.phase == Phase.SETTLING:
            return f"the settlement of message {self.message_id}: its mailbox has not answered"
        return where_thread(self.thread_id) if self.thread_id is not None else where(self.coroutine)

    def remaining(self) -> float | None:
        """Return the seconds until ``handler_timeout`` strikes or the message's own deadline passes, or None; in any thread."""
        return None if self.deadline is None else max(0.0, self.deadline - self.clocks.now())

    # ------------------------------------------------------------------------------------------------- cancellation

    def end_within(self, timeout: float | None, due: Deadline | None) -> None:
        """Have the handler cancelled after ``timeout`` seconds, or at its message's deadline, whichever is earlier."""
        now = self._clock()
        self._timeout_at = math.inf if timeout is None else now + timeout
        self._due, self._due_at = due, math.inf if due is None else now + due.remaining()
        self._arm()

    def _arm(self) -> None:
        assert self.scope is not None
        self.due = self._due if self._due_at < self._timeout_at else None
        end = min(self._timeout_at, self._due_at)
        self.deadline = None if end == math.inf else end
        self.scope.deadline = end

    def wait_for_worker(self, waits: bool) -> None:
        """Stop its timeout while it waits for a worker, as it is not at work; let it go on when it has one."""
        self.waits = waits
        now = self._clock()
        if waits:
            self._left = self._timeout_at - now
        else:
            self.started = self.last_beat = now
        if self._left < math.inf:
            self._timeout_at = math.inf if waits else now + self._left
            self._arm()

    def cancel(self, cause: Cause) -> bool:
        """Cancel the handler. True if it ran and had not been cancelled before."""
        if self.phase != Phase.HANDLING or self.cause is not None or self.scope is None:
            return False
        self.cause = cause
        self.scope.cancel()
        return True

    def revoke(self) -> None:
        """Cancel the handler: its message was cancelled, so nothing is to be settled."""
        if self.phase < Phase.ENDED and not self.message.is_settled:
            self.lost = self.revoked = True
            self.renew_at = math.inf
            self.cancel(Cause.CANCELLED)

    @property
    def fate(self) -> Decision:
        """The outcome to report for it, if it is ``lost``."""
        return CANCELLED if self.revoked else LOST

    def stall(self, error: HandlerStalledError) -> None:
        """Cancel it as a failed attempt, for the watchdog."""
        self.error = error
        del error  # on trio the traceback of the cancellation, which becomes its cause, refers to this frame
        self.cancel(Cause.STALLED)

    def give_up_settling(self) -> None:
        """Stop waiting for a settlement that hangs; the message comes again when its lease ends."""
        if self.phase == Phase.SETTLING and self.scope is not None:
            self.scope.cancel()

    def too_late(self, due: Deadline) -> DeadlineExceededError:
        """Return the error of a message whose deadline has passed."""
        return DeadlineExceededError(f"the deadline of the message, {due}, passed before it was done")

    def timed_out(self, seconds: float, option: str) -> HandlerTimeoutError:
        """Return the error of a handler that its timeout has cancelled; ``option`` is what the option is called."""
        return HandlerTimeoutError(f"the handler ran longer than its {option} of {seconds:g} s")


ALREADY_DONE: Final = object()
"""What a wrapper returns instead of calling the handler where its work is recorded as done: no result is kept or sent."""
Wrapper: TypeAlias = "Callable[[Message[Any, Any], Callable[[], Awaitable[Any]]], Awaitable[Any]]"
"""What :meth:`MainLoop.wrap` takes."""


class Runs(Protocol):
    """The handler runs of a worker: of one function, or of each message's own (see ``tasks``)."""

    cancelled: bool
    """True once the loop itself is being cancelled, and its handlers with it."""

    def shut_down(self) -> None:
        """Begin what waits for further messages: none come."""

    def resize(self, slots: int) -> None:
        """Expect at most ``slots`` messages at once from now on."""

    def make(self, delivery: Delivery, scope: anyio.CancelScope) -> Coroutine[Any, Any, Decision]:
        """Run the handler once; see :meth:`HandlerRuns.make`."""

    def judge(self, delivery: Delivery, error: BaseException) -> Decision:
        """Decide what a failure of the handler, or of its reply, means for the message."""

    def handler_of(self, delivery: Delivery) -> str:
        """Return the name of its handler."""


class HandlerRuns:
    """The runs of one function, as :class:`Runs`.

    ``call`` is what :meth:`Handler.caller` returns, and ``reply_to`` makes the reply of what it returns. ``inner`` and
    ``outer`` are wrappers inside and around those of the loop. ``encode_result`` gives the JSON of what it returns, for
    messages whose result is to be kept.
    """

    def __init__(
        self,
        name: str,
        dispatcher: Dispatcher,
        clock: Callable[[], float],
        context: CallContext,
        wrappers: Sequence[Wrapper],
        resources: Any,
        call: Callable[..., Coroutine[Any, Any, Any]],
        settings: WorkerSettings,
        reply_to: Callable[[Message[Any, Any], Any], Envelope],
        *,
        inner: Sequence[Wrapper] = (),
        outer: Sequence[Wrapper] = (),
        encode_result: Callable[[Any], bytes] | None = None,
    ) -> None:
        self.wrappers = wrappers = (*inner, *wrappers, *outer)
        self._encode_result = encode_result
        self.cancelled = False
        self._context = context
        self._name = name
        self._resources = resources
        self._call = call
        self._reply_to = reply_to
        self._settings = settings
        self._called = f"the handler {settings.handler}".rstrip()
        self._timeout = settings.handler_timeout
        self._wants_context = settings.wants_context
        self._in_thread = settings.in_thread
        self._is_direct = not (settings.wants_context or settings.in_thread or wrappers)
        self._misfits = DeadLetterPolicy(settings.dead_letter.max_attempts)
        self._dispatcher = dispatcher
        self._clock = clock
        self._clocks = Clocks()
        self._process = identity()

    def shut_down(self) -> None:
        """Do nothing: no run waits for further messages."""

    def resize(self, slots: int) -> None:
        """Do nothing, likewise."""

    async def make(self, delivery: Delivery, scope: anyio.CancelScope) -> Decision:
        """Run the handler once and decide what its end means.

        Raise nothing but a cancellation: ``delivery.decision`` then says what it means. An error's traceback refers to this
        frame. So the frame keeps no error: a reference cycle would hold all that the handler has made.
        """
        now = self._clock()
        delivery.started = delivery.last_beat = now
        try:
            prepared = self._prepare(delivery, now)
        except Exception as error:  # whatever is wrong with one message, its neighbours are handled
            delivery.phase = Phase.ENDED
            misfit = isinstance(error, SerializationError)
            return self._after(delivery, error, self._misfits) if misfit else self.judge(delivery, error)
        if isinstance(prepared, Decision):
            delivery.phase = Phase.ENDED
            return prepared
        body, due = prepared
        delivery.phase = Phase.HANDLING
        try:
            context = self._context.copy()
            headers = delivery.message.delivery.headers
            timeout = timeout_of(headers, self._timeout) if headers else self._timeout
            if due is not None or timeout is not None:
                if due is not None:
                    context.run(enter, due)
                delivery.end_within(timeout, due)
            delivery.coroutine = coroutine = self._call(body) if self._is_direct else self._begin(delivery, body)
            try:
                yielded = context.run(coroutine.send, None)
            except StopIteration as ended:  # it has waited for nothing, and is spared the cost of what is below
                result = ended.value
            else:
                steps = resumed(coroutine, context, yielded, partial(self._is_cancelled, scope))
                del yielded  # see `resumed`
                result = await steps
            claimed = delivery.message.delivery
            usual = result is None and claimed.reply_to is None and not claimed.headers and not delivery.lost
            return DONE if usual else self._succeeded(delivery, result)
        except anyio.get_cancelled_exc_class() as error:
            decision = await self._cancelled(delivery, scope, error)
            if decision is None:
                raise
            return decision
        except Exception as error:
            return self._failed(delivery, scope, error)
        except BaseException as error:
            return self._failed(
                delivery,
                scope,
                _as_failure(error, f"the handler raised {error!r}; raise Reject, or call shutdown() of the group"),
            )
        finally:
            if not self._process.here:
                end_returned_child()
            delivery.phase = Phase.ENDED
            delivery.coroutine = None
            if delivery.deadline is not None:
                scope.deadline = math.inf

    def _begin(self, delivery: Delivery, body: Any) -> Coroutine[Any, Any, Any]:
        """Return the coroutine that runs the handler, with its context, in a thread if need be, inside of the wrappers."""
        args: tuple[Any, ...] = (body,)
        if self._wants_context:
            delivery.clocks = self._clocks
            args = (body, Context(delivery, self._resources))
        if self._in_thread:
            args = (delivery, *args)
        return self._wrapped(delivery.message, args) if self.wrappers else self._call(*args)

    def _is_cancelled(self, scope: anyio.CancelScope) -> bool:
        """True if the handler in ``scope`` has been cancelled, by itself or with its loop."""
        return self.cancelled or scope.cancel_called

    def _prepare(self, delivery: Delivery, now: float) -> tuple[Any, Deadline | None] | Decision:
        """Return the handler's arguments and the message's deadline, or a decision if the handler is not to be called."""
        message = delivery.message
        claimed = message.delivery
        if (
            delivery.lost or now >= delivery.trusted_until
        ):  # this process stood still meanwhile (SIGSTOP, a suspended machine)
            return delivery.fate
        if claimed.attempt > 1:  # the first is always made
            given_up = before_start(
                claimed.attempt, self._settings.dead_letter, partial(history_until, message.mailbox, claimed)
            )
            if given_up is not None:
                return given_up
        if self._dispatcher.wants(MessageStarted):
            self._dispatcher.dispatch(
                MessageStarted(
                    self._name,
                    message.id,
                    message.receipt_handle,
                    message.delivery_count,
                    message.attempt,
                    self._settings.handler,
                )
            )
        body = message.body
        due = deadline_of(claimed.headers) if claimed.headers else None
        return after_deadline(delivery.too_late(due)) if due is not None and due.passed else (body, due)

    async def _wrapped(self, message: Message[Any, Any], args: tuple[Any, ...]) -> Any:
        """Return the handler's call inside of the wrappers, of which the last one is the outermost."""
        begun: list[Coroutine[Any, Any, Any]] = []

        def checked(call: Callable[[], Awaitable[Any]], name: str) -> Callable[[], Awaitable[Any]]:
            async def run() -> Any:
                return ran(await call(), name, TaskExitError)

            def begin() -> Coroutine[Any, Any, Any]:
                begun.append(coroutine := run())
                return coroutine

            return begin

        call = checked(partial(self._call, *args), self._called)
        for wrapper in self.wrappers:
            call = checked(partial(wrapper, message, call), name_of(wrapper))
        try:
            result = await call()
        finally:
            unbegun = [coroutine for coroutine in begun if close_unbegun(coroutine)]
        if unbegun:
            raise TaskExitError(
                "a wrapper has called call() without `await`, so the handler has not run; write `return await call()`"
            )
        return result

    def _succeeded(self, delivery: Delivery, result: Any) -> Decision:
        if delivery.lost:
            return delivery.fate
        if result is ALREADY_DONE:
            return DONE
        if result is not None:
            ran(result, self._called, TaskExitError)
        message = delivery.message
        claimed = message.delivery
        is_kept = bool(claimed.headers) and header_of(claimed.headers, RESULT_TTL) is not None
        if not (is_kept or claimed.reply_to) or (message.is_settled and not is_unanswered(message.settlement)):
            return DONE
        reply = None if claimed.reply_to is None else self._reply_to(message, result)
        kept = self._kept(claimed, result) if is_kept else None
        return Decision(Outcome.ACKNOWLEDGED, Ack(reply, kept))

    def _kept(self, claimed: ClaimedMessage, result: Any) -> Result | None:
        if self._encode_result is None:
            return None
        from mainspring.mailbox import jobs

        return jobs.result_of(claimed, self._settings.handler, self._encode_result(result))

    def _failed(self, delivery: Delivery, scope: anyio.CancelScope, error: BaseException) -> Decision:
        """Decide what an error of the handler means. If the engine cancelled the handler, the reason for that counts."""
        cause = delivery.cause
        if cause is None and scope.cancel_called:
            cause = Cause.TIMEOUT
        if delivery.lost:
            return delivery.fate
        if cause is Cause.SHUTDOWN or _makes_way(delivery, error) or (cause is Cause.STALLED and delivery.waits):
            return RELEASED  # the last one has waited for a worker all the time: it is no attempt
        verdict = error
        if cause is Cause.TIMEOUT and delivery.due is not None:
            late = delivery.too_late(delivery.due)
            late.__cause__ = error
            return after_deadline(late)
        if cause is Cause.TIMEOUT:
            seconds = timeout_of(delivery.message.headers, None)  # that of the call
            option = self._settings.timeout_option if seconds is None else "timeout"
            verdict = delivery.timed_out(seconds or self._timeout or 0.0, option)
        elif cause is Cause.STALLED and delivery.error is not None:
            verdict = delivery.error
        if verdict is not error:
            verdict.__cause__ = error  # its traceback says where the handler was
        elif not self._in_thread:
            verdict = explained(error, self._called)
        return self.judge(delivery, verdict)

    def judge(self, delivery: Delivery, error: BaseException) -> Decision:
        """Decide what a failure of the handler, or of its reply, means for the message."""
        return self._after(delivery, error, self._settings.dead_letter)

    def handler_of(self, delivery: Delivery) -> str:
        """Return the name of the handler, the same for each delivery."""
        return self._settings.handler

    def _after(self, delivery: Delivery, error: BaseException, dead_letter: DeadLetterPolicy) -> Decision:
        message = delivery.message
        decision = after_failure(
            error,
            attempt=message.attempt,
            delivery_count=message.delivery_count,
            retry=retry_of(message.headers, self._settings.retry),
            dead_letter=dead_letter,
            rng=random.rng(),
        )
        settlement = decision.settlement
        if isinstance(settlement, Ack):  # a ReplyError
            said = decision.error or error
            reply = None if message.reply_to is None else replies.failure_reply(message, said)
            if header_of(message.headers, RESULT_TTL) is None or self._encode_result is None:
                return decision._replace(settlement=Ack(reply))
            from mainspring.mailbox import jobs

            return decision._replace(
                settlement=Ack(reply, jobs.failure_of(message.delivery, self._settings.handler, said))
            )
        if isinstance(settlement, Nack) and settlement.charge:
            history = history_with(message.mailbox, message.delivery, *text_and_type(lone_error(error)))
            return _with_history(decision, history)
        return decision

    async def _cancelled(self, delivery: Delivery, scope: anyio.CancelScope, error: BaseException) -> Decision | None:
        """Decide what a cancellation means. Return None if it must go on: then ``delivery.decision`` says it."""
        if not scope.cancel_called and await is_spurious_cancellation():
            # The handler raised it by itself (a cancelled future, say), or its task was cancelled from outside of anyio.
            why = "the handler raised a spurious cancellation; catch it where it arises"
            return self._failed(delivery, scope, _as_failure(error, why))
        delivery.decision = self._failed(delivery, scope, error) if scope.cancel_called else RELEASED
        return None


def _as_failure(error: BaseException, why: str) -> TaskExitError:
    """Return a failure that stands for an error which is none by its kind, such as a cancellation."""
    failure = TaskExitError(why)
    failure.__cause__ = error
    return failure


def _with_history(decision: Decision, history: str | None) -> Decision:
    """Return the decision with the message's history from now on."""
    if history is None or not isinstance(decision.settlement, Nack | Dead):
        return decision
    return decision._replace(settlement=replace(decision.settlement, history=history))


def _makes_way(delivery: Delivery, error: BaseException) -> bool:
    """True if a handler releases its message for a shutdown: it then goes to the front, as if cancelled for it."""
    return isinstance(error, Retry) and not error.charge and not error.delay and delivery.shutting_down.is_set()
