"""A mailbox of your own: a ``Backend`` on the simplest store there is, a list in memory.

    pytest -q test_list_mailbox.py        runs the contract of a mailbox on it

The public calls (send, receive, acknowledge, …), their checks and the encoding are those of every mailbox; what is below them
is the backend's. What it cannot do it says in its capabilities, here: no priorities, no deduplication, no expiry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio

from mainspring import Backend, Capabilities, Mailbox, MailboxStatistics
from mainspring.core.clock import wall_clock
from mainspring.errors import ReceiptHandleExpiredError
from mainspring.mailbox.message import Ack, ClaimedMessage, Counts, Dead, Envelope, Nack, Settlement

if TYPE_CHECKING:
    from mainspring.runtime.scope import DaemonScope


@dataclass(eq=False)
class Row:
    """A message in the store. ``due`` is when its delay or its lease ends, on the event loop's clock."""

    envelope: Envelope
    enqueued_at: float
    due: float
    lease: str = ""
    deliveries: int = 0
    attempt: int = 1
    first_received_at: float = 0.0
    checkpoint: bytes | None = None


class Queue:
    """What there is of one name: the messages in their order, the dead ones, and how many are done."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.dead: list[tuple[ClaimedMessage, Dead, float]] = []
        self.settled = 0
        self.changed = anyio.Event()

    def wake_receives(self) -> None:
        """Wake the receives that wait: they look again."""
        self.changed.set()
        self.changed = anyio.Event()

    def to_tail(self, row: Row, due: float) -> None:
        """End its lease and put it last. It can be claimed from ``due`` on."""
        row.lease, row.due = "", due
        self.rows.remove(row)
        self.rows.append(row)
        self.wake_receives()

    def expire(self, now: float) -> None:
        """Take the messages back whose leases have ended: a charged attempt."""
        for row in [row for row in self.rows if row.lease and row.due <= now]:
            row.attempt += 1
            self.to_tail(row, now)


class ListBackend(Backend):
    """A queue in a list. Mailboxes of one ``store`` (any dictionary) can send replies to each other."""

    capabilities = Capabilities(priority=False, expiry=False, dedup=False, cancel=False, siblings=False, history=False)

    def __init__(self, store: dict[str, Queue], name: str) -> None:
        super().__init__(name)
        self._store = store
        self._waiting = 0
        self._leases = count()

    async def open(self, scope: DaemonScope) -> None:
        self._is_closing = False
        self._queue = self._store.setdefault(self.name, Queue())
        self._wall = wall_clock()

    async def close(self) -> None:
        pass

    def stop_claims(self) -> None:
        self._is_closing = True
        self._queue.wake_receives()

    def statistics(self) -> MailboxStatistics:
        return MailboxStatistics(waiting_receives=self._waiting, connected=True)

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        await anyio.lowlevel.checkpoint()
        self._add(self._queue, envelopes)
        return [envelope.message_id for envelope in envelopes]

    def _add(self, queue: Queue, envelopes: list[Envelope]) -> None:
        now = anyio.current_time()
        queue.rows += [Row(envelope, self._wall(), now + envelope.delay) for envelope in envelopes]
        queue.wake_receives()

    async def claim(
        self, max_messages: int, visibility_timeout: float, wait_time_seconds: float
    ) -> list[ClaimedMessage]:
        await anyio.lowlevel.checkpoint()
        queue = self._queue
        deadline = anyio.current_time() + wait_time_seconds
        while not self._is_closing:
            now = anyio.current_time()
            queue.expire(now)
            free = [row for row in queue.rows if not row.lease and row.due <= now][:max_messages]
            if free or now >= deadline:
                return [self._lease(row, now, visibility_timeout) for row in free]
            changed = queue.changed
            next_due = min((row.due for row in queue.rows), default=math.inf)
            self._waiting += 1
            try:
                with anyio.move_on_at(min(deadline, next_due)):
                    await changed.wait()
            finally:
                self._waiting -= 1
        return []

    def _lease(self, row: Row, now: float, seconds: float) -> ClaimedMessage:
        row.deliveries += 1
        row.first_received_at = row.first_received_at or self._wall()
        row.lease, row.due = f"lease {next(self._leases)}", now + seconds
        return self._delivery(row, now)

    def _delivery(self, row: Row, now: float) -> ClaimedMessage:
        sent = row.envelope
        return ClaimedMessage(
            sent.message_id, sent.body, row.lease, row.deliveries, row.attempt, row.enqueued_at, row.first_received_at,
            sent.reply_to, sent.headers, row.checkpoint, now,
        )  # fmt: skip

    def _held(self, delivery: ClaimedMessage) -> Row:
        """Return the row that this delivery holds. Raise an error if its lease has ended."""
        self._queue.expire(anyio.current_time())
        for row in self._queue.rows:
            if row.lease and row.lease == delivery.receipt_handle:
                return row
        raise ReceiptHandleExpiredError(
            f"message {delivery.message_id}: its lease is not held by this delivery any more"
        )

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        await anyio.lowlevel.checkpoint()
        row, queue = self._held(delivery), self._queue
        if isinstance(settlement, Nack):
            row.attempt += settlement.charge
            queue.to_tail(row, anyio.current_time() + settlement.delay)
            if settlement.front:
                queue.rows.insert(0, queue.rows.pop())
            return
        queue.rows.remove(row)
        if isinstance(settlement, Dead):
            queue.dead.append((delivery, settlement, self._wall()))
            return
        queue.settled += 1
        if isinstance(settlement, Ack) and settlement.reply is not None:
            self._add(self._store.setdefault(settlement.reply.reply_to or "", Queue()), [settlement.reply])

    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        await anyio.lowlevel.checkpoint()
        row = self._held(delivery)
        row.due = max(row.due, anyio.current_time() + timeout)

    async def checkpoint(self, delivery: ClaimedMessage, state: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        self._held(delivery).checkpoint = state

    async def counts(self) -> Counts:
        now, queue = anyio.current_time(), self._queue
        queue.expire(now)
        in_flight = sum(bool(row.lease) for row in queue.rows)
        delayed = sum(not row.lease and row.due > now for row in queue.rows)
        pending = len(queue.rows) - in_flight - delayed
        return Counts(delayed, pending, in_flight, settled=queue.settled, dead=len(queue.dead))

    async def purge(self) -> int:
        dropped = len(self._queue.rows)
        self._queue.rows.clear()
        self._queue.settled += dropped  # so that the counts still add up to all that was accepted
        return dropped

    async def dead_letters(self, limit: int, after: str | None) -> list[tuple[ClaimedMessage, Dead, float]]:
        ids = [letter[0].message_id for letter in self._queue.dead]
        first = ids.index(after) + 1 if after in ids else 0
        return self._queue.dead[first : first + limit]

    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        again = [d for d, _, _ in self._queue.dead if message_ids is None or d.message_id in message_ids]
        envelopes = [Envelope(d.message_id, d.body, reply_to=d.reply_to, headers=d.headers) for d in again]
        self._remove_dead(message_ids)
        self._add(self._queue, envelopes)
        return len(again)

    async def purge_dead_letters(self, message_ids: list[str] | None) -> int:
        forgotten = self._remove_dead(message_ids)
        self._queue.settled += forgotten
        return forgotten

    def _remove_dead(self, message_ids: list[str] | None) -> int:
        """Remove these dead letters, or all. Return how many they were."""
        before = len(self._queue.dead)
        keep = [] if message_ids is None else [x for x in self._queue.dead if x[0].message_id not in message_ids]
        self._queue.dead = keep
        return before - len(keep)


def list_mailbox(store: dict[str, Queue], name: str, *, body: Any = None, reply: Any = None) -> Mailbox[Any, Any]:
    """A mailbox on it, unopened."""
    return Mailbox(ListBackend(store, name), body=body, reply=reply)
