"""The worker engine: receive, handle, settle. Every loop that takes messages from a mailbox runs on it.

One run of a loop has these tasks: one or two receivers, the slots, and the alarms.

- A **receiver** claims messages for the slots, and appends their deliveries to the backlog.
- A **slot** waits, handles one delivery, settles it, and takes the next. It is started when it is first needed, and lives
  until the run ends. It handles in a cancel scope of its own, which it renews only after the scope was used to cancel. So a
  message costs neither a task nor a cancel scope.
- The **alarms** have the lease of each delivery renewed, from its claim to its settlement (``LeaseKeeper``), release the
  backlog if it waits for too long, and have the store asked whether it answers (``StoreHealth``). They are stopped last.

Invariants: a message is claimed for a free slot, or because a slot will soon be free (``ClaimAhead`` in ``slots.py``). At most
``concurrency`` handlers run at once. There are more slots while some of them settle. If the concurrency is lowered, running
handlers go on, and the surplus slots end when they would be idle. At most one
receiver claims at a time, or two where the mailbox keeps the order of its calls. While the backlog is not empty, a slot is busy
or has been woken. Deliveries whose handlers ended well may be acknowledged together: then some slot is on its way to
:meth:`Worker._acknowledge`.

When the loop is told to stop, the receivers are cancelled and the backlog is released. When the loop itself is cancelled, each
slot settles its delivery under a shield with a deadline. When the store does not answer, receivers try again with backoff and
handlers go on.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core.clock import loop_clock, thread_clock
from mainspring.core.lazy_event import LazyEvent
from mainspring.core.tracebacks import where
from mainspring.errors import MailboxConnectionError, MainspringError, TaskExitError
from mainspring.runtime.cancellation import is_spurious_cancellation
from mainspring.runtime.interval import Alarms
from mainspring.runtime.retry import Retries
from mainspring.runtime.scope import DaemonScope, first_error
from mainspring.threads.entry import AnywhereEvent, Entry
from mainspring.worker.context import NO_RESOURCES
from mainspring.worker.delivery import Delivery, HandlerRuns
from mainspring.worker.inside import context_of
from mainspring.worker.leases import SETTLE_TIMEOUT, LeaseKeeper
from mainspring.worker.outcome import DONE, RELEASED, Cause
from mainspring.worker.presence import Presence
from mainspring.worker.settlement import GRACE, Completion, Settler, bounded
from mainspring.worker.slots import AHEAD, MOST_OVERDUE, OVERDUE, Admission, Slot, Slots
from mainspring.worker.store_health import SILENCE, StoreHealth

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from anyio.abc import TaskGroup

    from mainspring.core.dispatcher import Dispatcher, Tally
    from mainspring.errors import HandlerStalledError
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import Message
    from mainspring.runtime.heartbeat import Heartbeat
    from mainspring.worker.delivery import Runs, Wrapper
    from mainspring.worker.settings import WorkerSettings
    from mainspring.worker.slots import Capacity

RECONNECT_INITIAL = 0.1
RECONNECT_MAXIMUM = 30.0
"""Seconds between tries to receive from a mailbox that cannot be reached, at first and at most."""

ALLOWANCE = 5.0
"""Seconds past its wait that a receive may take before its answer is overdue: what a busy server may need."""

POLL_PAUSE = 0.1
"""Seconds between receives that do not wait and come back empty, so that they do not spin."""

JOIN_FOR = 0.001
"""Seconds for which a slot may handle message after message before it acknowledges them and lets other tasks run."""


class Worker:
    """One run of a loop. Made anew for each run, on the event loop that it runs on."""

    def __init__(
        self,
        name: str,
        mailbox: Mailbox[Any, Any],
        settings: WorkerSettings,
        runs: Callable[[Callable[..., HandlerRuns]], Runs],
        *,
        dispatcher: Dispatcher,
        heartbeat: Heartbeat,
        outcomes: Tally,
        capacity: Capacity | None = None,
        wrappers: Sequence[Wrapper] = (),
        resources: Any = NO_RESOURCES,
        group: str | None = None,
        visibility: float,
        wait: float,
    ) -> None:
        self.name = name
        self.entry = Entry(f"loop {name!r}")
        self.ended = AnywhereEvent(f"end of loop {name}")
        self.settings, self._before = settings, settings.before
        self.admission = Admission(heartbeat)
        self.shutting_down = LazyEvent()
        self._alarms = Alarms()
        self._overdue = self._alarms.alarm(self._release_overdue)
        self.store_health = StoreHealth(name, mailbox.approximate_count, dispatcher, self._alarms)
        self._mailbox = mailbox
        self._dispatcher = dispatcher
        self._heartbeat = heartbeat
        self._capacity = capacity
        self._visibility, self._wait = visibility, wait
        self._clock = loop_clock()
        self._real_clock = thread_clock()  # goes on while no other task has a turn
        self._slots = slots = Slots(settings.concurrency, ordered=mailbox.capabilities.ordered, capacity=capacity)
        self.presence = Presence(name, group, mailbox, self.admission, slots, self._alarms)
        self._backlog: deque[Delivery] = deque()
        self._idle: deque[anyio.Event] = deque()
        self._slot_count = self._waking = self._surplus = 0
        self._resized_at = -math.inf
        self._tasks: TaskGroup | None = None
        self._joined = mailbox.capabilities.joined_acks
        self._turn_ends = 0.0
        self._starved = self._ending = False
        self._receives_left: float = 0
        self._open_receives: list[OpenReceive] = []
        self._releases: set[anyio.CancelScope] = set()  # once the loop is cancelled, they have no longer than all else
        self._lease = LeaseKeeper(
            name, slots.deliveries, settings.lease, visibility, dispatcher, self.store_health, self._alarms
        )
        self._handler_runs = runs(
            partial(HandlerRuns, name, dispatcher, self._clock, context_of(self), wrappers, resources)
        )
        self._completion = Completion(
            Settler(name, mailbox, dispatcher, self._handler_runs, self.store_health),
            slots,
            dispatcher=dispatcher,
            heartbeat=heartbeat,
            outcomes=outcomes,
            clock=self._clock,
        )

    @property
    def deliveries(self) -> tuple[Delivery, ...]:
        """The deliveries in hand, oldest first."""
        return tuple(self._slots.deliveries)

    @property
    def in_flight(self) -> int:
        """The number of deliveries in hand."""
        return len(self._slots.deliveries)

    @property
    def open_receives(self) -> tuple[OpenReceive, ...]:
        """The receives that the mailbox has not answered."""
        return tuple(self._open_receives)

    # ----------------------------------------------------------------------------------------------------- stopping

    def shut_down(self) -> None:
        """Set ``shutting_down`` for the handlers, and receive no more. The backlog is released."""
        self.shutting_down.set()
        self.admission.stop()
        self._handler_runs.shut_down()
        self.presence.change()

    def pause(self) -> None:
        """Receive no more until :meth:`resume`. The backlog is released."""
        self.admission.pause()
        self.presence.change()

    def resume(self) -> None:
        """Receive again."""
        self.admission.resume()
        self.presence.change()

    def cancel_handlers(self) -> None:
        """Cancel the handlers that run. Their messages are released uncharged."""
        for delivery in self.deliveries:
            delivery.cancel(Cause.SHUTDOWN)

    def set_concurrency(self, concurrency: int) -> None:
        """Run at most ``concurrency`` handlers at once from now on. Running handlers go on; the surplus backlog is released."""
        if concurrency == self._slots.concurrency:
            return
        self._slots.resize(concurrency)
        self._handler_runs.resize(concurrency)
        self._resized_at = self._clock()
        self._surplus = max(0, self._slot_count - concurrency)
        if self.admission.open:
            self._release_ahead()
            if self._backlog and not self._waking:
                self._wake_slot()
        for _ in range(min(self._surplus, len(self._idle))):
            self._wake_slot()  # it ends
        self.presence.change()

    # -------------------------------------------------------------------------------------------------------- engine

    async def run(self, max_iterations: int | None) -> None:
        """Work until told to stop, or until ``max_iterations`` receives have been made and handled.

        An error that makes receiving impossible is raised after the deliveries in hand have ended.
        """
        crash: Exception | None = None
        self._receives_left = math.inf if max_iterations is None else max_iterations
        async with DaemonScope(f"{self.name} worker") as scope:
            scope.start_soon(self._run_alarms, name=f"{self.name} leases")
            self.presence.begin()
            if (keep := self.settings.dead_letter.kept_for) is not None:
                from mainspring.worker.retention import Retention

                scope.start_soon(Retention(self.name, self._mailbox, keep).run, name=f"{self.name} retention")
            async with anyio.create_task_group() as self._tasks:
                try:
                    await self._take_work()
                except Exception as error:
                    crash = error
                except BaseException:
                    self.admission.stop()
                    for release in self._releases:
                        release.deadline = min(release.deadline, anyio.current_time() + GRACE)
                    raise
                finally:
                    self._ending = True
                    await self._release_backlog()
                    self._wake_all_slots()
            # Leaving the scope stops the renewal of leases, as the last thing.
        if crash is not None:
            raise crash
        if self._tasks.cancel_scope.cancel_called:  # by a task that was cancelled before it had begun
            raise TaskExitError("a slot was cancelled by itself, and not by the loop")

    async def _take_work(self) -> None:
        """Receive until told to stop, and run meanwhile what the handlers have beside the worker."""
        async with DaemonScope(f"{self.name} intake") as scope:
            if self.settings.beside is not None:
                scope.start_soon(self.settings.beside, name=f"{self.name} beside")
            await self.admission.run(self._receive_until_paused, self._release_backlog)

    async def _run_alarms(self) -> None:
        """Have leases renewed, overdue deliveries released and the store asked whether it answers, until cancelled."""
        notifications = self._mailbox.backend.notifications
        stop_listening = (
            notifications.silence.subscribe(self._fell_silent),
            notifications.cancelled.subscribe(self._lease.revoke),
        )
        try:
            await self._alarms.run()
            # They ring until cancelled: a task of theirs was, and has ended them.
            raise TaskExitError("the renewal of leases was cancelled by itself, and not by the loop")
        finally:
            for stop in stop_listening:
                stop()
            # It is stopped last: handlers that still run are being cancelled with the loop.
            self._handler_runs.cancelled = True
            await self.presence.end()

    def _fell_silent(self, error: MailboxConnectionError) -> None:
        """Record that the server does not answer. An open receive fails soon; without one, the mailbox is asked again."""
        receiving = any(not receive.done for receive in self._open_receives)
        self.store_health.fell_silent(error, RECONNECT_INITIAL if receiving else SILENCE)

    async def _receive_until_paused(self) -> None:
        """Receive until told to stop or to pause. Raise the error that makes receiving impossible.

        If the mailbox keeps the order of its calls, two receivers take turns: while one waits for its answer, the other claims
        for the slots that were freed meanwhile. If receives are counted, there is one.
        """
        if self._backlog and not self._waking:
            self._wake_slot()  # a pause began and ended before it had released what was claimed
        receivers = 2 if self._slots.ordered and self._receives_left == math.inf else 1
        try:
            async with anyio.create_task_group() as tasks:
                for number in range(receivers):
                    tasks.start_soon(self._receiver, name=f"{self.name} receiver {number + 1}")
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        if tasks.cancel_scope.cancel_called:  # by the end of one of the two
            raise TaskExitError("receiving was cancelled by itself, and not by the loop")

    async def _receiver(self) -> None:
        """Receive until told to stop. A receive that failed, or that the watchdog cancelled, is made anew after a pause."""
        retries = Retries(initial=RECONNECT_INITIAL, maximum=RECONNECT_MAXIMUM)
        while self.admission.open and self._receives_left > 0:
            receive = OpenReceive(self.name, self._mailbox, self._visibility, self.admission, self._clock)
            self._open_receives.append(receive)
            try:
                with receive.scope:
                    await self._receive(receive, retries)
            except (MainspringError, OSError) as error:
                if isinstance(error, MainspringError) and not error.retryable:
                    raise
                await self._pause_after(error, retries)
            except anyio.get_cancelled_exc_class():
                if not await is_spurious_cancellation():
                    raise
                await self._pause_after(TaskExitError("a spurious cancellation"), retries)
            else:
                if receive.error is not None:
                    await self._pause_after(receive.error, retries)
            finally:
                self._slots.claiming -= receive.slots
                self._open_receives.remove(receive)

    async def _receive(self, receive: OpenReceive, retries: Retries) -> None:
        """Claim messages for the free slots, and wake slots for them, until told to stop."""
        if self._before is not None:
            await self._before()
            self._before = None
        while self.admission.open and self._receives_left > 0:
            free = self._slots.free
            if free <= 0:
                await self._slots.until_free()
                continue
            if self._starved:
                await anyio.sleep(POLL_PAUSE)
            self._receives_left -= 1
            receive.slots = free
            self._slots.claiming += free
            self._heartbeat.beat()
            if self._capacity is None:
                # After a failure it does not wait: an idle loop must learn that the store answers again before a message comes.
                # Nor does it while it claims ahead: a waiting loop is idle, and takes what its slots can begin at once.
                waits = self.store_health.answers and self._slots.ahead.most == self._slots.concurrency
                asked = self._clock()
                self._admit(await receive.claim(free, self._wait if waits else 0.0), asked)
            else:
                await self._receive_within(self._capacity, receive, free)
            self._slots.claiming -= free
            receive.slots = 0
            self._heartbeat.beat()
            if retries.failures or not self.store_health.answers:
                retries.succeeded()
                self.store_health.received()
            if len(self._backlog) == 1:  # a lone message: its handler begins before the next claim is prepared
                await anyio.lowlevel.checkpoint()

    async def _receive_within(self, capacity: Capacity, receive: OpenReceive, free: int) -> None:
        """Claim messages for slots that are shared with other loops."""
        answers = self.store_health.answers
        if not answers and capacity.full:  # the handlers of other loops may hold all slots for hours
            await self.store_health.probe()
        else:
            admit = partial(self._admit, asked=self._clock())
            await capacity.receive(free, self._wait if answers else 0.0, receive.claim, admit)

    def _admit(self, messages: list[Message[Any, Any]], asked: float) -> None:
        """Take in the messages of a claim that was made at ``asked``."""
        now = self._clock()
        self._starved = not messages and self._wait < POLL_PAUSE
        if not messages:
            self._slots.ahead.ran_out(asked)
            return
        made = partial(Delivery, self.name, self._clock, self._heartbeat, self.shutting_down, self._visibility, now)
        deliveries = list(map(made, messages))
        self._slots.deliveries.update(dict.fromkeys(deliveries))
        if self._capacity is None and self._receives_left == math.inf:
            self._slots.ahead.claimed(len(deliveries), len(self._backlog), now)
            if len(self._slots.deliveries) > self._slots.concurrency:
                self._overdue.wake_by(now + OVERDUE)
        self._lease.track(deliveries)
        self._backlog.extend(deliveries)
        for delivery in deliveries:
            if delivery.message.delivery.attempt > 1 and delivery.message.crashes:
                self._slots.suspects.add(delivery)
        if self._slots.suspects or asked <= self._resized_at:
            # A suspect may end this process again, and the others are charged for it. Or there are fewer slots by now.
            self._release_ahead()
        if self.admission.open and not self._waking:
            self._wake_slot()

    async def _pause_after(self, error: Exception, retries: Retries) -> None:
        """Wait before the next try. The loop is not stalled meanwhile, and its rate is not known afterwards."""
        self._slots.ahead.begin_anew()
        pause = retries.failed()
        self.store_health.receive_failed(error, pause)
        await anyio.sleep(pause)
        self._heartbeat.beat()

    async def _release_backlog(self) -> None:
        """Release the backlog, as the loop takes no more work."""
        if self.admission.open:
            return
        self.store_health.receives_end()
        await self._release(self._take_youngest(len(self._backlog)), bounded())

    def _take_youngest(self, count: int) -> list[Delivery]:
        """Take the youngest ``count`` out of the backlog, the youngest first, as each goes to the front of the queue."""
        self._slots.ahead.begin_anew()
        return [self._backlog.pop() for _ in range(count)]

    async def _release(self, deliveries: list[Delivery], scope: anyio.CancelScope) -> None:
        """Release deliveries that have not begun, within ``scope``."""
        with scope:
            await self._completion.finish_each(deliveries, RELEASED)
        self._releases.discard(scope)
        if self._backlog and self.admission.open and not self._waking:
            self._wake_slot()  # until now they counted as handled

    def _release_soon(self, count: int) -> None:
        """Release the youngest ``count`` of the backlog, while the loop goes on."""
        assert self._tasks is not None
        scope = anyio.CancelScope(deadline=self._clock() + SETTLE_TIMEOUT, shield=True)
        self._releases.add(scope)
        self._tasks.start_soon(self._release, self._take_youngest(count), scope, name=f"{self.name} release")

    def _release_ahead(self) -> None:
        """Release the deliveries that have no slot to begin in."""
        ahead = len(self._backlog) - max(0, self._room())
        if ahead > 0:
            self._release_soon(ahead)

    def _release_overdue(self, overslept: float) -> float:
        """Release messages that were claimed ahead and could not begin in time, for other workers. Return when to look again.

        If the event loop stood still, a handler has blocked it: then the messages get the time again, within ``MOST_OVERDUE``.
        """
        if not self._backlog:
            return math.inf
        now, claimed = self._clock(), self._backlog[0].started
        blocked = overslept >= AHEAD and now < claimed + MOST_OVERDUE
        # While the loop does not take work, its receivers are about to end, and then all is released.
        due = now + OVERDUE if blocked or not self.admission.open else claimed + OVERDUE
        if now < due:
            return due
        self._release_soon(len(self._backlog))
        return math.inf

    # --------------------------------------------------------------------------------------------------------- slots

    def _wake_slot(self) -> None:
        """Wake one idle slot for the backlog, or start one."""
        if self._idle:
            self._waking += 1
            self._idle.popleft().set()
        elif self._slot_count < self._slots.concurrency + self._slots.leaving + bool(self._completion.done):
            # Settlements and handlers may take long: then this slot begins what is waiting, or settles what is done.
            assert self._tasks is not None
            self._slot_count += 1
            self._waking += 1
            self._tasks.start_soon(self._slot, name=f"{self.name} slot {self._slot_count}")

    def _wake_all_slots(self) -> None:
        while self._idle:
            self._wake_slot()

    async def _slot(self) -> None:
        """Serve deliveries, one at a time, until there are none to come."""
        self._waking -= 1
        slot = Slot()
        try:
            while not await self._serve_in_scope(slot):
                pass
        except anyio.get_cancelled_exc_class() as error:
            # The loop itself is cancelled: its message goes back, so that another worker has it at once.
            with bounded() as scope:
                if slot.delivery is not None:
                    await self._completion.finish_late(slot.delivery)
                if self._completion.done:
                    await self._completion.acknowledge(scope)
            slot.delivery = None
            raise error.with_traceback(None)

    async def _serve_in_scope(self, slot: Slot) -> bool:
        """Serve in a new cancel scope. True at the end, False if the scope was used to cancel, or the task by itself."""
        try:
            if slot.delivery is not None:
                # Its handler was cancelled. It is settled outside of the scope that was used for that.
                with bounded(shield=False):
                    await self._completion.finish_late(slot.delivery)
                slot.delivery = None
            with anyio.CancelScope() as scope:
                await self._serve(slot, scope)
        except anyio.get_cancelled_exc_class():
            if not await is_spurious_cancellation():
                raise
            return False
        return not scope.cancel_called

    async def _serve(self, slot: Slot, scope: anyio.CancelScope) -> None:
        """Handle and settle one delivery after the other, until there are none to come or ``scope`` is used up.

        A delivery that could not be settled stays in ``slot``.
        """
        native_cancels = slot.native_cancels
        delivery = slot.delivery = await self._next_delivery(scope)
        while delivery is not None:
            delivery.scope = scope
            decision = await self._handler_runs.make(delivery, scope) if self.admission.open else RELEASED
            if native_cancels():
                # A pending cancellation of asyncio would strike at the next await: at a settlement, and all joined in it.
                delivery.decision = decision
                if not await is_spurious_cancellation():
                    await anyio.lowlevel.checkpoint()  # raises
            if scope.cancel_called:
                delivery.decision = decision
                return
            ends_well = decision is DONE and delivery.message.settlement is None
            if ends_well and self._joined and self._backlog and self._real_clock() < self._turn_ends:
                self._completion.done.append(delivery)  # it is acknowledged with the deliveries that follow
            else:
                if ends_well and self._completion.done:
                    self._completion.done.append(delivery)
                    delivery = slot.delivery = None
                    await self._acknowledge(scope)
                else:
                    if self._backlog and self._slots.ordered and not self._waking:
                        self._wake_slot()  # it begins the next while this one settles
                    await self._completion.finish(delivery, decision)
                if scope.cancel_called:  # just as the mailbox answered
                    return
                self._begin_turn()
            decision = DONE  # an error's traceback holds all that the handler has made
            delivery = slot.delivery = None
            if self._backlog and (self._slot_count <= self._slots.concurrency or self._room() > 0):
                # It goes on before it acknowledges, so that acknowledgements join. If its handler waits, the slot that it has
                # woken acknowledges them; it wakes none while another is waking, so that one serves alone where none waits.
                delivery = slot.delivery = self._backlog.popleft()
                if not self._waking and (self._completion.done or (self._backlog and self._room() > 0)):
                    self._wake_slot()
            else:
                delivery = slot.delivery = await self._next_delivery(scope)

    async def _next_delivery(self, scope: anyio.CancelScope) -> Delivery | None:
        """Return the next delivery for an idle slot, or None at the end, if ``scope`` is used up or the slot is too many.

        It wakes up to two other idle slots, so that the backlog fans out where handlers wait.
        """
        while True:
            if self._completion.done:
                await self._acknowledge(scope)
            self._begin_turn()
            if scope.cancel_called:  # no handler may begin in it
                return None
            if self._backlog and self._room() > 0:
                delivery = self._backlog.popleft()
                more = len(self._backlog) if self._room() > 0 else 0
                for _ in range(min(2, more + bool(self._completion.done))):
                    self._wake_slot()
                return delivery
            if self._ending and not self._backlog:
                return None
            if self._surplus:
                self._surplus -= 1
                self._slot_count -= 1
                return None
            event = anyio.Event()
            self._idle.append(event)
            try:
                await event.wait()
            finally:
                if event.is_set():
                    self._waking -= 1
                else:
                    self._idle.remove(event)

    def _room(self) -> int:
        """Return how many handlers more may run. There can be more slots than may handle at once, as some settle."""
        slots = self._slots
        handled = len(slots.deliveries) - len(self._backlog) - len(self._completion.done) - slots.leaving
        return slots.concurrency - handled

    async def _acknowledge(self, scope: anyio.CancelScope) -> None:
        """Acknowledge the deliveries that are done."""
        while self._completion.done and not scope.cancel_called:
            # Also deliveries that came meanwhile: the slot that added them may have found no idle slot to wake.
            if self._backlog and not self._waking:
                self._wake_slot()
            await self._completion.acknowledge(scope)

    def _begin_turn(self) -> None:
        """Let handlers begin, and their acknowledgements join, from now on; the loop shows a sign of life for all of them."""
        self._turn_ends = self._real_clock() + JOIN_FOR
        self._heartbeat.beat()


class OpenReceive:
    """What one receiver asks of the mailbox, one call after the other, as one subject of the watchdog.

    It is judged by how long an answer is overdue. None is due while nothing is asked, while the receive waits as it was told
    to, or while the loop is paused or told to stop. A stall cancels ``scope``, in which the receiver runs; the receiver then
    goes on with another claim, so that the watchdog can tell the two apart.
    """

    message_id: str | None = None

    def __init__(
        self,
        name: str,
        mailbox: Mailbox[Any, Any],
        visibility: float,
        admission: Admission,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.scope = anyio.CancelScope()
        self.error: MailboxConnectionError | None = None
        """Why it was cancelled by the watchdog, unless the answer came in spite of that."""
        self.slots = 0
        """How many slots it claims messages for; it keeps them in the pause after a failure."""
        self._mailbox = mailbox
        self._visibility = visibility
        self._admission = admission
        self._clock = clock
        self._due = math.inf
        self._call: Coroutine[Any, Any, Any] | None = None

    async def claim(self, most: int, wait: float) -> list[Message[Any, Any]]:
        """Receive up to ``most`` messages. The answer is due in ``wait`` seconds."""
        self._call = call = self._mailbox.receive(
            max_messages=most, visibility_timeout=self._visibility, wait_time_seconds=wait
        )
        self._due = self._clock() + wait + ALLOWANCE
        try:
            messages = await call
        finally:
            self._due = math.inf
            self._call = None
        self.error = None
        return messages

    @property
    def done(self) -> bool:
        """True if no answer is owed that the loop still wants."""
        return self._call is None or not self._admission.open

    def beat_age(self) -> float:
        """Return the seconds for which the answer is overdue."""
        return max(0.0, self._clock() - self._due)

    def where(self) -> str:
        """Return the line that the call stands on."""
        if self._call is None:
            return ""
        return f"a receive that mailbox {self._mailbox.name!r} has not answered: {where(self._call)}"

    def stall(self, error: HandlerStalledError) -> None:
        """Cancel it; it counts as a failed receive."""
        self.error = MailboxConnectionError(
            f"mailbox {self._mailbox.name!r} did not answer a receive, which was overdue by {self.beat_age():.0f} s and is"
            " cancelled"
        )
        self.error.__cause__ = error
        self.scope.cancel()
