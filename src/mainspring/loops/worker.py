"""The worker engine: receive, handle, settle. Every loop that takes messages from a mailbox runs on it.

The slots are tasks that live on: each takes a claimed message, runs the handler in its own cancel scope, settles, and takes
the next. The receiver claims only as many messages as there are slots without one, so nothing is leased that nobody can
run. A message costs neither a task nor a cancel scope: a slot's scope is renewed only when it was used to cancel.
"""

from __future__ import annotations

import math
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from mainspring import entropy
from mainspring.clock import loop_clock
from mainspring.errors import MainspringError, TaskExitError
from mainspring.events import Dispatcher, MessageFinished, MessageStarted, ReceiveFailed, ReceiveRecovered, Tally
from mainspring.loops.context import Context
from mainspring.loops.lease import LeaseKeeper
from mainspring.loops.outcome import DONE, LOST, RELEASED, Cause, Decision, Outcome, after_failure, before_start
from mainspring.loops.run import Phase, Run
from mainspring.loops.settle import Settler
from mainspring.mailbox.base import MAX_MESSAGES
from mainspring.mailbox.message import Ack
from mainspring.policies import DeadLetterPolicy, LeasePolicy, RetryPolicy, backoff
from mainspring.process import async_library
from mainspring.scope import DaemonScope

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from mainspring.heartbeat import Heartbeat
    from mainspring.loops.capacity import Capacity
    from mainspring.mailbox.base import Mailbox
    from mainspring.mailbox.message import Message

RECONNECT_INITIAL = 0.1
RECONNECT_MAXIMUM = 30.0
"""Seconds between tries to receive from a mailbox that cannot be reached: quick at first, then gentle."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a worker handles messages; see :class:`~mainspring.loops.main.MainLoop` for the meaning of each."""

    concurrency: int = 1
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    dead_letter: DeadLetterPolicy = field(default_factory=DeadLetterPolicy)
    lease: LeasePolicy = field(default_factory=LeasePolicy)
    handler_timeout: float | None = None
    wants_context: bool = False


class Worker:
    """One run of a loop. Made anew for each run, on the event loop that it runs on."""

    def __init__(
        self,
        name: str,
        mailbox: Mailbox[Any, Any],
        call: Callable[..., Awaitable[Any]],
        settings: WorkerSettings,
        *,
        dispatcher: Dispatcher,
        heartbeat: Heartbeat,
        outcomes: Tally,
        capacity: Capacity | None = None,
        visibility: float,
        wait: float,
    ) -> None:
        self.name = name
        self.settings = settings
        self.shutting_down = anyio.Event()
        self.receiving_failed: str | None = None
        self._mailbox = mailbox
        self._call = call
        self._dispatcher = dispatcher
        self._heartbeat = heartbeat
        self._outcomes = outcomes
        self._capacity = capacity
        self._visibility = visibility
        self._wait = wait
        self._clock = loop_clock()
        self._runs: dict[Run, None] = {}
        self._backlog: deque[Run] = deque()
        self._idle: deque[anyio.Event] = deque()
        self._slot_count = 0
        self._slots: TaskGroup | None = None
        self._freed = anyio.Event()
        self._full = False
        self._intake = anyio.CancelScope()
        self._stopping = False
        self._ending = False
        self._lease = LeaseKeeper(name, self._runs, settings.lease, visibility, dispatcher)
        self._settler = Settler(name, dispatcher)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The messages it holds, oldest first."""
        return tuple(self._runs)

    @property
    def in_flight(self) -> int:
        """How many messages it holds."""
        return len(self._runs)

    # ----------------------------------------------------------------------------------------------------- stopping

    def stop_intake(self) -> None:
        """Receive no more: a long poll is interrupted at once, and what nobody has begun is handed back."""
        self._stopping = True
        self._intake.cancel()

    def cancel_handlers(self) -> None:
        """Cancel what is being handled; the messages go back uncharged."""
        for run in list(self._runs):
            run.cancel(Cause.SHUTDOWN)

    # -------------------------------------------------------------------------------------------------------- engine

    async def run(self, max_iterations: int | None) -> None:
        """Work until told to stop, or until ``max_iterations`` receives have been made and handled.

        Raises what made receiving impossible, after the messages in hand have ended.
        """
        crash: Exception | None = None
        async with DaemonScope(f"{self.name} worker") as scope:
            scope.start_soon(self._lease.run, name=f"{self.name} leases")
            async with anyio.create_task_group() as self._slots:
                try:
                    with self._intake:
                        await self._receive_until_stopped(max_iterations)
                except Exception as error:
                    crash = error
                except BaseException:
                    self._stopping = True
                    raise
                finally:
                    self._ending = True
                    await self._hand_back()
                    self._rouse_all()
            # Leaving the scope stops the renewal, as the last thing.
        if crash is not None:
            raise crash

    async def _receive_until_stopped(self, max_iterations: int | None) -> None:
        failures = iterations = 0
        while not self._stopping and (max_iterations is None or iterations < max_iterations):
            free = min(self.settings.concurrency - len(self._runs), MAX_MESSAGES)
            if free <= 0:
                await self._until_freed()
                continue
            iterations += 1
            try:
                await self._receive(free)
            except (MainspringError, OSError) as error:
                if isinstance(error, MainspringError) and not error.retryable:
                    raise
                failures += 1
                await self._pause_after(error, failures)
            else:
                if failures:
                    self._dispatcher.dispatch(ReceiveRecovered(self.name, failures))
                    self.receiving_failed = None
                    failures = 0

    async def _until_freed(self) -> None:
        self._freed = anyio.Event()
        self._full = True
        try:
            await self._freed.wait()
        finally:
            self._full = False

    async def _receive(self, free: int) -> None:
        """Claim what is there for the free slots, and let them begin."""
        self._heartbeat.beat()
        if self._capacity is None:
            self._admit(await self._poll(free, self._wait))
        else:
            await self._capacity.receive(free, self._wait, self._poll, self._admit)
        self._heartbeat.beat()

    async def _poll(self, free: int, wait: float) -> list[Message[Any, Any]]:
        return await self._mailbox.receive(
            max_messages=free, visibility_timeout=self._visibility, wait_time_seconds=wait
        )

    def _admit(self, messages: list[Message[Any, Any]]) -> None:
        now = self._clock()
        for message in messages:
            leased_at = message.leased_at
            run = Run(self.name, message, self._clock, self.shutting_down, now, self._visibility)
            if leased_at is not None:
                run.renewed_at = leased_at
                run.trusted_until = leased_at + self._visibility
            self._runs[run] = None
            self._lease.track(run)
            self._backlog.append(run)
        if messages and not self._stopping:
            self._rouse()

    async def _pause_after(self, error: Exception, failures: int) -> None:
        """A store that cannot be reached is no stall: wait, and try again."""
        pause = backoff(
            failures,
            initial=RECONNECT_INITIAL,
            maximum=RECONNECT_MAXIMUM,
            factor=2.0,
            jitter="full",
            rng=entropy.rng(),
        )
        self.receiving_failed = f"{type(error).__name__}: {error}"
        self._dispatcher.dispatch(ReceiveFailed(self.name, self.receiving_failed, pause))
        await anyio.sleep(pause)
        self._heartbeat.beat()

    async def _hand_back(self) -> None:
        """Release all that was claimed and that no slot has begun, the youngest first, as each goes to the front."""
        if not self._stopping:
            return
        with self._settler.bounded():
            while self._backlog:
                run = self._backlog.pop()
                await self._finish(run, RELEASED, self._clock())

    # --------------------------------------------------------------------------------------------------------- slots

    def _rouse(self) -> None:
        """Let one more slot look at the backlog; it rouses the next, so a slot whose handlers never wait serves alone."""
        if self._idle:
            self._idle.popleft().set()
        elif self._slot_count < self.settings.concurrency:
            assert self._slots is not None
            self._slot_count += 1
            self._slots.start_soon(self._slot, name=f"{self.name} slot {self._slot_count}")

    def _rouse_all(self) -> None:
        while self._idle:
            self._idle.popleft().set()

    async def _slot(self) -> None:
        token = _inside.set(self)
        run: Run | None = None
        try:
            while True:
                with anyio.CancelScope() as scope:
                    while (run := await self._next()) is not None:
                        run.scope = scope
                        decision = await self._attempt(run, scope)
                        if scope.cancel_called:
                            run.decision = decision
                            break
                        await self._finish(run, decision, self._clock())
                if run is None:
                    return
                # The scope is used up: what it cancelled is settled outside of it.
                with self._settler.bounded(shield=False):
                    await self._finish_late(run)
        except anyio.get_cancelled_exc_class():
            # The loop itself is cancelled: its message goes back, so that another worker has it at once.
            if run is not None:
                with self._settler.bounded():
                    await self._finish_late(run)
            raise
        finally:
            _inside.reset(token)

    async def _finish_late(self, run: Run) -> None:
        """Settle a run whose handler was cancelled, unless its settlement was already begun."""
        if run.phase <= Phase.ENDED:
            await self._finish(run, run.decision or RELEASED, self._clock())

    async def _next(self) -> Run | None:
        while not self._backlog:
            if self._ending:
                return None
            event = anyio.Event()
            self._idle.append(event)
            await event.wait()
        run = self._backlog.popleft()
        if self._backlog:
            self._rouse()
        return run

    async def _attempt(self, run: Run, scope: anyio.CancelScope) -> Decision:
        """Run the handler once and decide what its end means.

        Raises nothing but a cancellation, with ``run.decision`` saying what it means.
        """
        message = run.message
        now = self._clock()
        run.started = run.last_beat = now
        self._heartbeat.beat()
        if run.lost:
            run.phase = Phase.ENDED
            return LOST
        given_up = before_start(message.attempt, self.settings.dead_letter)
        if given_up is not None:
            run.phase = Phase.ENDED
            return given_up
        if self._dispatcher.wants(MessageStarted):
            self._dispatcher.dispatch(
                MessageStarted(self.name, message.id, message.receipt_handle, message.delivery_count, message.attempt)
            )
        run.phase = Phase.HANDLING
        if self.settings.handler_timeout is not None:
            scope.deadline = run.deadline = now + self.settings.handler_timeout
        try:
            body = message.body
            run.coroutine = self._call(body, Context(run)) if self.settings.wants_context else self._call(body)
            result = await run.coroutine
            return self._succeeded(run, result)
        except anyio.get_cancelled_exc_class() as error:
            return self._cancelled(run, scope, error)
        except Exception as error:
            return self._failed(run, scope, error)
        except BaseException as error:
            wrapped = TaskExitError(f"the handler raised {error!r}; raise Reject, or call shutdown() of the group")
            wrapped.__cause__ = error
            return self._failed(run, scope, wrapped)
        finally:
            run.phase = Phase.ENDED
            run.coroutine = None
            if run.deadline is not None:
                scope.deadline = math.inf

    def _succeeded(self, run: Run, result: Any) -> Decision:
        if run.lost:
            return LOST
        message = run.message
        if message.reply_to is None or message.is_settled:
            return DONE
        return Decision(Outcome.ACKNOWLEDGED, Ack(self._mailbox.reply_to(message, result)))

    def _failed(self, run: Run, scope: anyio.CancelScope, error: BaseException) -> Decision:
        """What an error means; one that came because the engine cancelled the handler means what the engine meant."""
        cause = run.cause
        if cause is None and scope.cancel_called:
            cause = Cause.TIMEOUT
        if run.lost or cause is Cause.LEASE_LOST:
            return LOST
        if cause is Cause.SHUTDOWN:
            return RELEASED
        if cause is Cause.TIMEOUT:
            error = run.timed_out(self.settings.handler_timeout or 0.0)
        elif cause is Cause.STALLED and run.error is not None:
            error = run.error
        return self._judge(run, error)

    def _judge(self, run: Run, error: BaseException) -> Decision:
        message = run.message
        return after_failure(
            error,
            attempt=message.attempt,
            delivery_count=message.delivery_count,
            retry=self.settings.retry,
            dead_letter=self.settings.dead_letter,
            rng=entropy.rng(),
        )

    def _cancelled(self, run: Run, scope: anyio.CancelScope, error: BaseException) -> Decision:
        if scope.cancel_called:
            run.decision = self._failed(run, scope, error)
            raise error
        if anyio.current_effective_deadline() == -math.inf or _natively_cancelled():
            run.decision = RELEASED
            raise error
        # Nobody cancelled anything: the handler raised it by itself (a cancelled future, say).
        own = TaskExitError("the handler raised a cancellation that nobody asked for; catch it where it arises")
        own.__cause__ = error
        return self._failed(run, scope, own)

    async def _finish(self, run: Run, decision: Decision, now: float) -> None:
        """Write the outcome, count it, and free the slot."""
        run.phase = Phase.SETTLING
        run.settling_since = now
        self._heartbeat.beat()
        try:
            decision = await self._settler.settle(run, decision, self._judge)
        finally:
            run.phase = Phase.DONE
            del self._runs[run]
            if self._capacity is not None:
                self._capacity.give_back(1)
            if self._full:
                self._freed.set()
        self._outcomes[decision.outcome] += 1
        if self._dispatcher.wants(MessageFinished):
            error = None if decision.error is None else f"{type(decision.error).__name__}: {decision.error}"
            message = run.message
            self._dispatcher.dispatch(
                MessageFinished(
                    self.name,
                    message.id,
                    message.receipt_handle,
                    decision.outcome,
                    now - run.started,
                    message.attempt,
                    error,
                )
            )


def inside() -> Worker | None:
    """The worker whose handler this code runs in (or in a task or thread started by it), or None."""
    return _inside.get(None)


_inside: ContextVar[Worker] = ContextVar("mainspring_worker")


def _natively_cancelled() -> bool:
    """Whether somebody called ``cancel()`` of the asyncio task, which no anyio scope knows of."""
    if async_library() != "asyncio":
        return False
    import asyncio

    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
