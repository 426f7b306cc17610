"""How much work a worker may take: admission, slots, claim ahead, and the capacity that loops share.

``Admission`` says whether it may claim at all: it is running, paused or stopped. ``Slots`` says how many messages it may claim
now. ``ClaimAhead`` decides how many it may have in hand: the messages in its slots, and the next ones they will begin.
``Capacity`` is the limit of a group: a loop that shares it claims no message without a slot of it, and nothing ahead. Whatever
has not begun when admission closes is released by the worker.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core.lazy_event import LazyEvent
from mainspring.mailbox.mailbox import MAX_MESSAGES
from mainspring.runtime.cancellation import native_cancels
from mainspring.threads.entry import AnywhereEvent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from mainspring.mailbox.message import Message
    from mainspring.runtime.heartbeat import Heartbeat
    from mainspring.worker.delivery import Delivery


BEAT_EVERY = 10.0
"""Seconds between the beats of a loop that is paused: it waits, and lives."""


class Admission:
    """Runs a worker's receiving, interrupts it for a pause, and ends it for good.

    ``open`` says whether what was claimed may begin; a worker asks at every message.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.open = True
        self.stopped = False
        self._heartbeat = heartbeat
        self._paused = False
        self._scope = anyio.CancelScope()
        self._changed = LazyEvent()
        self._at_rest = AnywhereEvent("pause")

    def stop(self) -> None:
        """Receive no more, paused or not: a wait for work ends at once."""
        self.stopped = True
        self.open = False
        self._scope.cancel()
        self._changed.set()
        self._at_rest.set()

    def pause(self) -> None:
        """Receive no more until :meth:`resume`: a wait for work ends at once."""
        if not self._paused:
            self._paused = True
            self.open = False
            self._changed = LazyEvent()
            self._at_rest = AnywhereEvent("pause")
            self._scope.cancel()

    def resume(self) -> None:
        """Receive again."""
        if self._paused:
            self._paused = False
            self.open = not self.stopped
            self._changed.set()
            self._at_rest.set()

    @property
    def paused(self) -> bool:
        """True from :meth:`pause` to :meth:`resume`."""
        return self._paused

    def at_rest(self) -> AnywhereEvent | None:
        """Return the event of a pause: no claim is out and what had not begun is released, or the pause is over."""
        return self._at_rest if self._paused else None

    async def run(self, receive: Callable[[], Awaitable[None]], hand_back: Callable[[], Awaitable[None]]) -> None:
        """Receive until that ends by itself or is stopped; each pause begins with ``hand_back()``."""
        try:
            while not self.stopped:
                if self._paused:
                    await hand_back()
                    self._at_rest.set()
                    await self._until_changed()
                else:
                    with anyio.CancelScope() as self._scope:
                        await receive()
                    if not self._scope.cancel_called:
                        return
        finally:
            self._at_rest.set()

    async def _until_changed(self) -> None:
        changed = self._changed
        while not changed.is_set():
            self._heartbeat.beat()
            with anyio.move_on_after(BEAT_EVERY):
                await changed.wait()


IDLE_HOLD = 1.0
"""Seconds for which a loop may hold a slot while it waits for work and another loop wants one."""


class Capacity:
    """Slots for messages, shared by loops. A loop claims no message that it has no slot for.

    A loop that waits for work holds one slot only, and after a second gives it up to a loop that wants one. So an idle loop
    starves none, and more loops than slots wait for work in turns.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._taken = 0
        self._waiting: list[anyio.Event] = []
        self._idle: dict[anyio.CancelScope, float] = {}

    @property
    def full(self) -> bool:
        """True if :meth:`receive` would have to wait for a slot."""
        return self._taken >= self._slots

    async def receive(
        self,
        want: int,
        wait: float,
        claim: Callable[[int, float], Awaitable[list[Message[Any, Any]]]],
        admit: Callable[[list[Message[Any, Any]]], None],
    ) -> None:
        """Claim at most ``want`` messages within the free slots. Each admitted message keeps a slot until it is freed."""
        slots = await self._take(want)
        kept = 0
        try:
            messages = await claim(slots, 0.0)
            if not messages and wait > 0:
                self.free_up(slots - 1)
                slots = 1
                with anyio.CancelScope() as turn:
                    self._idle[turn] = anyio.current_time() + IDLE_HOLD
                    try:
                        messages = await claim(1, wait)
                    finally:
                        del self._idle[turn]
            kept = len(messages)
            admit(messages)
        finally:
            self.free_up(slots - kept)

    async def _take(self, want: int) -> int:
        slots = 0
        if self.full:
            event = anyio.Event()
            self._waiting.append(event)
            try:
                while not event.is_set():
                    with anyio.CancelScope(deadline=self._end_a_turn()):
                        await event.wait()
            except BaseException:
                if event in self._waiting:
                    self._waiting.remove(event)
                else:  # a slot was handed over just now
                    self.free_up(1)
                raise
            slots = 1
        more = min(want - slots, self._slots - self._taken)
        if more > 0:
            slots += more
            self._taken += more
        return slots

    def _end_a_turn(self) -> float:
        """Interrupt a loop that has waited for work for its whole turn; when to look again."""
        now = anyio.current_time()
        for turn, until in self._idle.items():
            if until <= now:
                turn.cancel()
                return now + IDLE_HOLD
        return min(self._idle.values(), default=now + IDLE_HOLD)

    def free_up(self, slots: int) -> None:
        """Free ``slots``, and hand them to the loops that wait for one, in the order in which they came.

        They are handed over, as the loop that frees them would else be the first to ask again.
        """
        self._taken -= slots
        while self._waiting and self._taken < self._slots:
            self._taken += 1
            self._waiting.pop(0).set()


class Slot:
    """One task of a worker, and the delivery it has in hand: None while it waits for one."""

    __slots__ = ("delivery", "native_cancels")

    def __init__(self) -> None:
        self.delivery: Delivery | None = None
        self.native_cancels = native_cancels()


AHEAD = 0.05
"""Seconds of work that a loop claims ahead: what its slots will begin in so long, at the rate at which they begin messages."""

FIRST_LOOK = AHEAD / 16
"""Seconds until the first look at the rate of a loop that was out of messages for less than ``AHEAD``."""

MOST_AHEAD = 200
"""The most messages that a loop with up to half as many slots has in hand; with more slots it has two for each at most.

It claims half of them at a time: while its handlers are at one half, the store is at the other. More would save next to no
calls to the store.
"""

OVERDUE = 2 * AHEAD
"""Seconds after which a message that was claimed ahead, and has not begun, goes back: its loop has become slower."""

MOST_OVERDUE = 20 * AHEAD
"""Seconds after which it does so also where handlers block the event loop."""


class ClaimAhead:
    """Decides how many messages a loop may have in hand: as many as it has slots, or as began in the last ``AHEAD`` seconds.

    The rate is looked at when messages are claimed. A loop that was idle, or has just started, begins with its slots alone for
    ``AHEAD``: a message that kills its process costs the others in hand an attempt. After a pause shorter than ``AHEAD`` the
    first look comes after ``FIRST_LOOK``. Else the loop would fall behind its senders each time, and catch up each time.
    """

    def __init__(self, slots: int) -> None:
        self.most = slots
        self._slots = slots
        self._begun = 0
        self._since = -math.inf
        self._look = AHEAD
        self._ran_out = -math.inf  # the first instant since the last claim at which there was nothing to claim
        self._waiting = 0  # messages that had not begun after the last claim

    def resize(self, slots: int) -> None:
        """Have that many slots from now on, and those alone in hand until the rate is known again."""
        self._slots = slots
        self.begin_anew()

    def claimed(self, count: int, waiting: int, now: float) -> None:
        """Note that ``count`` messages were claimed, and that ``waiting`` of those before have not begun."""
        self._begun += self._waiting - waiting
        self._waiting = waiting + count
        seconds = now - self._since
        if self._since == -math.inf:
            self._since, self._look = now, FIRST_LOOK if now - self._ran_out < AHEAD else AHEAD
        elif seconds >= self._look:
            most = max(MOST_AHEAD, 2 * self._slots)
            self.most = max(self._slots, min(int(self._begun * AHEAD / seconds), most))
            self._begun, self._since, self._look = 0, now, AHEAD

    def ran_out(self, when: float) -> None:
        """Note that there was nothing to claim from ``when`` on: the loop waits for what its slots can begin at once."""
        first = when if self._since > -math.inf else self._ran_out
        self.begin_anew()
        self._ran_out = first

    def begin_anew(self) -> None:
        """Have the slots alone in hand, until the rate is known again."""
        self.most = self._slots
        self._begun = self._waiting = 0
        self._since = self._ran_out = -math.inf


class Slots:
    """The messages in hand, oldest first: messages in handlers, messages claimed ahead, and messages being settled.

    If a mailbox keeps the order of its calls (``ordered``), the slot of a message is free as soon as its settlement has been
    asked for. A claim made from then on comes after it, so that the two never hold a lease at once.
    """

    def __init__(self, concurrency: int, *, ordered: bool, capacity: Capacity | None) -> None:
        self.ahead = ClaimAhead(concurrency)
        self.deliveries: dict[Delivery, None] = {}
        self.suspects: set[Delivery] = set()
        """Deliveries of messages whose worker has died before, perhaps by them. With one in hand nothing is claimed ahead."""
        self.ordered = ordered and capacity is None
        self.leaving = 0
        """How many deliveries have a settlement that was asked for, so that their slots count as free."""
        self.claiming = 0
        """How many slots are held for claims whose answers are awaited."""
        self.concurrency = concurrency
        """How many handlers run at once, at most."""
        self._capacity = capacity
        self._freed: anyio.Event
        self._full = False
        """True if a receiver waits for a free slot."""

    @property
    def free(self) -> int:
        """How many messages to claim now; at most as many as one claim may ask for.

        While each slot has a message, more is claimed ahead only when half of what may be in hand has begun; then one claim is
        for the other half at most.
        """
        most = self.concurrency if self.suspects else self.ahead.most
        taken = len(self.deliveries) - min(self.leaving, most) + self.claiming
        if taken >= self.concurrency and 2 * taken > most:
            return 0
        half = max(most, MOST_AHEAD) // 2 if most > self.concurrency else most
        return min(most - taken, half, MAX_MESSAGES)

    def resize(self, concurrency: int) -> None:
        """Let that many handlers run at once from now on. Deliveries in hand stay, also where they are more."""
        self.concurrency = concurrency
        self.ahead.resize(concurrency)
        if self._full and self.free > 0:
            self._tell()

    async def until_free(self) -> None:
        """Wait for a free slot, and a moment longer while more become free at every turn: one claim for all of them."""
        if not self._full:
            self._freed = anyio.Event()
            self._full = True
        await self._freed.wait()
        before = 0
        while self.free > before:
            before = self.free
            await anyio.lowlevel.checkpoint()

    def leave(self, count: int) -> None:
        """Count the slots of ``count`` deliveries as free: their settlements are asked for next, before anything is awaited.

        Only where the mailbox keeps the order of its calls.
        """
        self.leaving += count
        if self._full and self.free > 0:
            self._tell()

    def left(self, deliveries: Collection[Delivery]) -> None:
        """Free the slots of deliveries that are settled, or given up."""
        for delivery in deliveries:
            del self.deliveries[delivery]
        if self.suspects:
            self.suspects.difference_update(deliveries)
        if self.ordered:
            self.leaving -= len(deliveries)
        if self._capacity is not None:
            self._capacity.free_up(len(deliveries))
        if self._full and self.free > 0:
            self._tell()

    def _tell(self) -> None:
        """Let the receivers that wait for a free slot look again."""
        self._full = False
        self._freed.set()
