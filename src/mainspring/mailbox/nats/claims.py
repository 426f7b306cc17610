"""Claiming on NATS: pull requests, the deliveries made of what they bring, and the leases that this process holds."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core import clock
from mainspring.errors import MailboxConnectionError, MailboxError, MailboxFullError
from mainspring.mailbox.limits import CLOSE_TIMEOUT, lease_over
from mainspring.mailbox.message import EXPIRED, ClaimedMessage
from mainspring.mailbox.nats.client import GoneError
from mainspring.mailbox.nats.connection import MAX_POLL_TIMEOUT, OVERDUE, POLL_TIMEOUT, Request
from mainspring.mailbox.nats.messages import StoredMessage, decode, nanoseconds, token_of
from mainspring.mailbox.nats.names import CONSUMER, UNBOUNDED
from mainspring.mailbox.nats.streams import Add, Added

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from mainspring.mailbox.limiters import LimitState
    from mainspring.mailbox.nats.client import RawMessage
    from mainspring.mailbox.nats.connection import Puller
    from mainspring.mailbox.nats.limits import MailboxLimits
    from mainspring.mailbox.nats.streams import Store, Stored


@dataclass(slots=True)
class Lease:
    """A message that this process holds."""

    sequence: int
    reply: str
    subject: str
    record: StoredMessage
    until: float
    """When the lease ends, on anyio's clock: not later than on the server's."""
    received_at: float
    checkpoint: bool = False
    refused_since: float | None = None
    """When the server first had no room for the message's next place, on anyio's clock."""
    unsure: bool = False
    """True if a settlement was sent and not answered: the server may have made it."""


@dataclass(slots=True)
class Arrival:
    """A message as a pull request brought it."""

    sequence: int
    deliveries: int
    reply: str
    subject: str
    stored_at: float
    record: StoredMessage

    @classmethod
    def of(cls, message: RawMessage) -> Arrival:
        """Read the numbers in the subject to which an acknowledgement of the message would go."""
        parts = message.reply.split(b".")
        first = 4 if len(parts) == 9 else 6  # newer servers put the domain and the account before them
        sequence = int(parts[first + 1])
        stored_at = int(parts[first + 3]) / 1e9
        record = decode(message.data, sequence, stored_at)
        return cls(sequence, int(parts[first]), message.reply.decode(), message.subject.decode(), stored_at, record)


def nak(seconds: float) -> bytes:
    """Return the command to deliver a message again in ``seconds``. Until then its holder keeps it."""
    return b'-NAK {"delay":%d}' % nanoseconds(seconds) if seconds > 0 else b"-NAK"


LONGEST_PULL = 30.0
"""Seconds of one pull request; a longer wait consists of several."""
SHORTEST_PULL = 1.0
"""Seconds that a pull request of a longer wait lasts at least. It lasts at most half the lease: the server has then forgotten
the pulls of a killed process before any lease of that process ends. Server 2.9 gives a message that comes back to such a pull
if no other waits. It then loses sight of that message until the ack wait has passed again. Meanwhile it delivers the message
before it once more, as if for the first time, while its holder works on it."""
FRESH_SHARE = 0.05
"""The share of a lease that a claim may take to arrive. After a longer wait the lease is renewed first."""
YOUNG = 1.0
"""Seconds since a message entered the queue within which a second delivery means that the first reached no caller."""
FULL_RETRY = 5.0
"""Seconds until a message is delivered again for whose next place the server had no room."""
_PROBES = 8
_PRUNE = 1_000
MAX_CHANGES = 1_000
"""How many numbers of messages that are being changed are remembered."""
CONSUMER_LAG = 0.25
"""Seconds within which the server's consumer has noticed that a message entered or left the stream."""
MAX_REMOVED = 2_000
"""How many messages that have left the queue are remembered."""


class Claims:
    """The claims and leases of one mailbox object."""

    def __init__(self, store: Store, limits: MailboxLimits) -> None:
        self._store = store
        self._limits = limits
        limits.changed = self._on_limits
        self._on_hold = 0
        self._turn = anyio.Event()
        """Set when a claim that waits for the end of a pause must look again."""
        self.stopped = False
        """True if the mailbox is being closed."""
        self._now = clock.loop_clock()
        self._wall = clock.wall_clock()
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{store.names.queue}.{CONSUMER}"
        self._leases: dict[str, Lease] = {}
        self._prune_at = _PRUNE
        self._removed: deque[tuple[float, str]] = deque(maxlen=MAX_REMOVED)
        self._changes: dict[bytes, None] = {}

    @property
    def waiting(self) -> int:
        """The number of claims that wait: pull requests for messages of the queue, and waits for the end of a pause."""
        return self._on_hold + sum(puller.source == self._next for puller in self._store.connection.pullers)

    @property
    def unconfirmed(self) -> int:
        """The number of leases whose settlement was sent and not answered."""
        now = self._now()
        return sum(lease.unsure and lease.until > now for lease in self._leases.values())

    def stop(self) -> None:
        """Let waiting claims and later ones return nothing: the mailbox is being closed."""
        self.stopped = True
        self.wake()

    def wake(self) -> None:
        """Let claims that wait for the end of a pause look again: it has ended, the mailbox closes, or the server is gone."""
        turn, self._turn = self._turn, anyio.Event()
        turn.set()

    def _on_limits(self, before: LimitState) -> None:
        """Make pulls under way anew where the limits ask for it; what they have brought is put back."""
        limits = self._limits
        self.wake()
        if limits.paused or (limits.is_bounded and before.most is None):
            for puller in list(self._store.connection.pullers):
                if puller.source == self._next:
                    puller.end()

    # ------------------------------------------------------------------------------------------------------ claiming

    async def claim(self, limit: int, visibility: float, wait: float) -> list[ClaimedMessage]:
        """See :meth:`Backend.claim`."""
        deadline = self._now() + wait
        more = False
        while True:
            if self._limits.paused and not await self._resumed(deadline):
                return []
            lasts = max(
                deadline - self._now(), CONSUMER_LAG if more else 0.0
            )  # what went to the tail is there in a moment
            longest = min(LONGEST_PULL, max(SHORTEST_PULL, visibility / 2))
            found, more = await self._claim_once(limit, visibility, min(lasts, longest))
            if found:
                break
            if self.stopped or (not more and self._now() >= deadline):
                return []
        # Messages that went to the tail have left room.
        while more and len(found) < limit and visibility and not self._limits.paused:
            with anyio.CancelScope(shield=True, deadline=self._now() + CLOSE_TIMEOUT):
                try:
                    rest, more = await self._claim_once(limit - len(found), visibility, 0.0)
                except MailboxError:
                    break
                found += rest
        return found

    async def _resumed(self, deadline: float) -> bool:
        """Wait for the end of the pause. Return False if the deadline comes first, or the mailbox is closed.

        :raises MailboxConnectionError: the connection is lost.
        """
        while self._limits.paused:
            if self.stopped:
                return False
            self._store.connection.check_connected()
            self._on_hold += 1
            try:
                with anyio.move_on_after(max(0.0, deadline - self._now())) as scope:
                    await self._turn.wait()
            finally:
                self._on_hold -= 1
            if scope.cancelled_caught:
                return False
        return True

    async def _claim_once(self, limit: int, visibility: float, wait: float) -> tuple[list[ClaimedMessage], bool]:
        """Return the deliveries of one pull, and True if it brought anything else."""
        began = self._now()
        if wait < POLL_TIMEOUT:
            messages = await self._poll(limit)
        elif self._limits.is_bounded:
            messages = await self._pull_within_bounds(limit, wait)
        else:
            messages = await self._pull(limit, wait)
        if not messages:
            return [], False
        if self._limits.paused:  # meanwhile
            with anyio.CancelScope(shield=True, deadline=self._now() + CLOSE_TIMEOUT):
                await self._undo_claim(messages, young=0.0)
            return [], False
        with anyio.CancelScope(shield=True, deadline=self._now() + CLOSE_TIMEOUT):
            deliveries = await self._take(messages, visibility, began)
            return deliveries, len(deliveries) < len(messages)
        raise MailboxConnectionError("the NATS server did not answer in time")

    @asynccontextmanager
    async def _collecting(self) -> AsyncIterator[list[RawMessage]]:
        """Collect what several pulls bring. A cancelled block has claimed nothing. An error is raised only if nothing came."""
        found: list[RawMessage] = []
        try:
            yield found
        except MailboxError:
            if not found:
                raise
        except BaseException:
            with anyio.CancelScope(shield=True, deadline=self._now() + CLOSE_TIMEOUT / 2):
                await self._undo_claim(found, young=0.0)
            raise

    async def _poll(self, limit: int) -> list[RawMessage]:
        """Return what is available now: what several short pulls bring.

        A busy server may not answer a short pull in time. A short pull that ends before the server gets to it must not receive
        a message that comes back (see :data:`SHORTEST_PULL`). So a pull without an end is made first if something may come
        back. If the server says that there is more, longer pulls follow.
        """
        async with self._collecting() as found:
            consumer = await self._store.consumer()
            room = _room(consumer, limit)
            if not room:  # then the server would not end a pull without an end
                found.extend(await self._pull(1, MAX_POLL_TIMEOUT))
            elif consumer["num_ack_pending"]:
                found.extend(await self._pull(room, 0.0))
            lasts = POLL_TIMEOUT
            while len(found) < room:
                found.extend(await self._pull(room - len(found), lasts))
                lasts *= 3
                if lasts > MAX_POLL_TIMEOUT or not (await self._store.consumer())["num_pending"]:
                    break
        return found

    async def _pull_within_bounds(self, limit: int, wait: float) -> list[RawMessage]:
        """Return the next messages where the messages in flight at once are bounded.

        A pull for more than there is room for would keep what it brings, and wait for the rest.
        """
        async with self._collecting() as found:
            ready = await self._ready(limit) if limit > 1 else 0
            if not ready:
                found.extend(await self._pull(1, wait))
                ready = await self._ready(limit - 1) if found and limit > 1 else 0
            if ready:
                found.extend(await self._pull(ready, 0.0))
        return found

    async def _ready(self, limit: int) -> int:
        """Return how many messages, at most ``limit``, the server can deliver now for the first time."""
        consumer = await self._store.consumer()
        return min(_room(consumer, limit), int(consumer["num_pending"]))

    async def _pull(self, limit: int, lasts: float) -> list[RawMessage]:
        """Return what one pull brings. Without an end (0) the server ends it at once if it has nothing to deliver."""
        await self._store.check_identity()  # what is leased from now on counts if the queue was made anew
        await self._limits.read_again()
        puller = await self._store.connection.puller()
        if self.stopped or self._limits.paused:
            return []
        try:
            return await puller.pull(self._next, limit, lasts, self._undo_pull)
        except GoneError as error:
            await self._store.recreate(error)
            raise

    async def _undo_pull(self, broken_off: Puller) -> None:
        """Put back what a withdrawn pull has brought, and what it would have brought.

        A message that the server had in hand for the pull still arrives, or is back with the server as delivered once.
        The server sends everything in one order: so either has happened when the first of two pulls made now is
        answered, and the second pull finds what went back.
        """
        await self._undo_claim(broken_off.take(), young=0.0)
        empty = probes = 0
        while empty < 2 and probes < _PROBES:
            probes += 1
            puller, began = await self._store.connection.puller(), self._now()
            found = await puller.pull(self._next, 1, 0.0, _leave_leased)
            await self._undo_claim(found, young=YOUNG)
            if not found and self._now() - began >= OVERDUE:
                break  # it has waited long enough: as many messages are out as may be
            empty += not found or Arrival.of(found[0]).deliveries == 1  # redeliveries come first
        await self._undo_claim(broken_off.take(), young=0.0)

    async def _undo_claim(self, messages: list[RawMessage], *, young: float) -> None:
        """Put messages that reached no caller back to the tail, as if they had never been claimed.

        A message that was delivered before has had a lease that ended, and is charged for it, unless it is younger
        than ``young`` seconds.
        """
        if not messages:
            return
        moves = []
        wall = self._wall()
        for arrival in await self._not_held(messages):
            record = arrival.record
            if arrival.deliveries > 2 or (arrival.deliveries == 2 and wall - arrival.stored_at >= young):
                record = self.after_lost_lease(record)
            moves.append((arrival, record))
        left = await self._move_to_tail(moves)
        if left:  # no room at the tail: the next caller gets them as they are
            await self._store.connection.request_all([Request(arrival.reply, nak(0)) for arrival, _ in left])

    async def _take(self, messages: list[RawMessage], visibility: float, began: float) -> list[ClaimedMessage]:
        """Make deliveries of messages that arrived. A message that was delivered before goes to the tail first, under a new
        number."""
        wall = self._wall()
        fresh: list[Arrival] = []
        again: list[tuple[Arrival, StoredMessage]] = []
        expired: list[Arrival] = []
        changing: list[tuple[Arrival, StoredMessage]] = []
        for arrival in await self._not_held(messages):
            record = arrival.record
            if arrival.deliveries > 1:
                record = self.after_lost_lease(record)
            elif self._changes and b"%d" % arrival.sequence in self._changes:
                changing.append((arrival, record))
                continue
            if record.expires_at is not None and record.expires_at <= wall:
                arrival.record = record
                expired.append(arrival)
            elif arrival.deliveries > 1:
                again.append((arrival, record))
            else:
                fresh.append(arrival)
        if changing:
            for arrival, _ in await self._move_to_tail(changing):  # there is no room at the tail, so none for a change
                fresh.append(arrival)
        if again:
            numbers = {arrival.sequence for arrival, _ in again}
            fresh = [arrival for arrival in fresh if arrival.sequence not in numbers]  # see _not_held
            fresh += [self._redelivered_in_place(arrival) for arrival, _ in await self._move_to_tail(again)]
        for arrival in expired:
            record = arrival.record
            try:
                await self._store.dead_letter(
                    self._store.names.queue, arrival.sequence, record, EXPIRED, record.expires_at or wall
                )
            except MailboxFullError:
                await self._store.connection.request(arrival.reply, nak(FULL_RETRY))
            else:
                self._removed.append((self._now(), arrival.reply))
        return await self._lease(fresh, visibility, began) if fresh else []

    async def _not_held(self, messages: list[RawMessage]) -> list[Arrival]:
        """Return the arrivals without messages that this process holds: their leases go on.

        By a fault of the server such a message arrives as if for the first time (see :data:`SHORTEST_PULL`).
        """
        now = self._now()
        held = []
        free = []
        for arrival in map(Arrival.of, messages):
            lease = self._leases.get(str(arrival.sequence)) if arrival.deliveries == 1 else None
            if lease is None:
                free.append(arrival)
            elif lease.until > now:
                held.append(Request(arrival.reply, nak(lease.until - now)))
            else:
                arrival.deliveries = 2
                free.append(arrival)
        if held:
            await self._store.connection.request_all(held)
        return free

    def after_lost_lease(self, record: StoredMessage) -> StoredMessage:
        """Return the record of a message whose lease has ended."""
        first = record.first_received_at
        received_at = self._wall() - self._store.ack_wait if first is None else first
        return record.returned(received_at=max(received_at, record.enqueued_at), charge=True, kept=True)

    def _redelivered_in_place(self, arrival: Arrival) -> Arrival:
        """Deliver a message again under its number, as the server has no room to move it; else it would never be delivered.

        Only the earlier holder's own clock keeps that holder off. All deliveries but this one have ended.
        """
        for _ in range(arrival.deliveries - 1):
            arrival.record = self.after_lost_lease(arrival.record)
        for handle in [handle for handle, lease in self._leases.items() if lease.sequence == arrival.sequence]:
            del self._leases[handle]
        return arrival

    async def _move_to_tail(self, moves: list[tuple[Arrival, StoredMessage]]) -> list[tuple[Arrival, StoredMessage]]:
        """Move messages to the tail, each unless it is gone. Return those for which there is no room."""
        adds = [Add(arrival.subject, record.encode(), arrival.sequence) for arrival, record in moves]
        async with self._store.lock.writing():
            results = await self._store.add_all(adds)
            moved = sum(isinstance(result, Added) and result.sequence > 0 for result in results)
            if moved:
                await self._store.count_moves(moved)
        now = self._now()
        self._removed.extend(
            (now, arrival.reply)
            for (arrival, _), result in zip(moves, results, strict=True)
            if isinstance(result, Added)
        )
        return [move for move, result in zip(moves, results, strict=True) if isinstance(result, MailboxFullError)]

    async def _lease(self, fresh: list[Arrival], visibility: float, began: float) -> list[ClaimedMessage]:
        store = self._store
        waited = self._now() - began
        if visibility != store.ack_wait or waited > FRESH_SHARE * visibility:
            began = self._now()
            # A nak with a delay leaves the message with us and says when it is to be delivered again.
            order = nak(visibility)
            for answer in await store.connection.request_all([Request(arrival.reply, order) for arrival in fresh]):
                if isinstance(answer, MailboxError):
                    raise answer
        if (
            waited >= store.ack_wait
        ):  # this process stood still, or its connection did: another one may have had them since
            fresh = await self._still_there(fresh)
        checkpoints = None
        for arrival in fresh:
            if arrival.record.kept:
                checkpoints = await self._checkpoints(fresh)
                break
        until = began + visibility
        wall = self._wall()
        deliveries = []
        leases = self._leases
        for arrival in fresh:
            record = arrival.record
            handle = str(arrival.sequence) if arrival.deliveries == 1 else f"{arrival.sequence}.{arrival.deliveries}"
            checkpoint = checkpoints.get(record.message_id) if checkpoints else None
            delivery = record.delivery(handle, wall, began, checkpoint)
            received_at = delivery.first_received_at
            leases[handle] = Lease(
                arrival.sequence, arrival.reply, arrival.subject, record, until, received_at, checkpoint is not None
            )
            deliveries.append(delivery)
        if len(leases) > self._prune_at:
            self._prune()
        return deliveries

    async def _still_there(self, arrivals: list[Arrival]) -> list[Arrival]:
        """Return the arrivals that no other process has moved to the tail since they came."""
        found = await self._store.last_all(self._store.names.queue, [arrival.subject for arrival in arrivals])
        there = []
        for arrival, stored in zip(arrivals, found, strict=True):
            if isinstance(stored, MailboxError):
                raise stored
            if stored is not None and stored.sequence == arrival.sequence:
                there.append(arrival)
        return there

    async def _checkpoints(self, arrivals: list[Arrival]) -> dict[str, bytes]:
        """Read the checkpoints that messages may have, by message id."""
        records = [arrival.record for arrival in arrivals if arrival.record.kept]
        names = self._store.names
        subjects = [names.to_checkpoints + token_of(record.message_id) for record in records]
        kept = {}
        for record, stored in zip(records, await self._store.last_all(names.checkpoints, subjects), strict=True):
            if isinstance(stored, MailboxError):
                raise stored
            if stored is not None and stored.payload:
                kept[record.message_id] = stored.payload
        return kept

    # -------------------------------------------------------------------------------------------------------- leases

    def held(self, delivery: ClaimedMessage) -> Lease:
        """Return the lease of a delivery. Raise :class:`ReceiptHandleExpiredError` if it has ended."""
        lease = self._leases.get(delivery.receipt_handle)
        if lease is None or lease.until <= self._now():
            raise lease_over(delivery)
        return lease

    def lease_of(self, sequence: int) -> Lease | None:
        """Return the lease of a message that this process holds, or has held, under a number of the queue."""
        return self._leases.get(str(sequence))

    def note_change(self, sequence: bytes) -> None:
        """Hear that a message of the queue is about to be changed. If this process gets it, it puts it back at the tail.

        If the change took place first, there is nothing to put back.
        """
        self._changes[sequence] = None
        if len(self._changes) > MAX_CHANGES:
            del self._changes[next(iter(self._changes))]

    def drop_lease(self, delivery: ClaimedMessage) -> None:
        """Forget the lease of a delivery whose message has left the queue, or its number."""
        lease = self._leases.pop(delivery.receipt_handle, None)
        if lease is not None:
            self._removed.append((self._now(), lease.reply))

    def forget_leases(self) -> None:
        """Forget all leases: their queue was deleted, and their numbers mean other messages."""
        self._leases.clear()
        self._removed.clear()
        self._changes.clear()

    async def redeliver_in_place(self, delivery: ClaimedMessage, seconds: float) -> None:
        """End a delivery by letting the message stay in its place and be delivered again in ``seconds``."""
        lease = self.held(delivery)
        await self._store.connection.request(lease.reply, nak(seconds))
        self._leases.pop(delivery.receipt_handle, None)

    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        """See :meth:`Backend.extend`."""
        store = self._store
        await store.check_identity()
        lease = self.held(delivery)
        until = self._now() + timeout
        if until > lease.until:
            await store.connection.request(lease.reply, nak(timeout))
        if await store.get(store.names.queue, lease.sequence) is None:
            self.drop_lease(delivery)
            raise lease_over(delivery)
        lease.until = max(lease.until, until)

    async def await_consumer(self) -> None:
        """Wait until the consumer has noticed that messages which have just left the queue are gone.

        It notices in the background, a moment later. An acknowledgement of a message that is gone makes it notice at once.
        """
        since = self._now() - CONSUMER_LAG
        replies = [reply for at, reply in self._removed if at >= since]
        self._removed.clear()
        await self._store.connection.request_all([Request(reply, b"+ACK") for reply in replies])

    async def ended_leases(self) -> list[Stored]:
        """Return the messages that are still out with the consumer although their leases, of this process, have ended."""
        now = self._now()
        ended = [(handle, lease) for handle, lease in self._leases.items() if lease.until <= now]
        found = []
        for handle, lease in ended:
            there = await self._store.get(self._store.names.queue, lease.sequence)
            if there is None:
                self._leases.pop(handle, None)
            else:
                found.append(there)
        return found

    def _prune(self) -> None:
        now = self._now()
        for handle in [handle for handle, lease in self._leases.items() if lease.until <= now]:
            del self._leases[handle]
        self._prune_at = 2 * len(self._leases) + _PRUNE


def _room(consumer: dict[str, Any], limit: int) -> int:
    """Return how many messages, at most ``limit``, may still be out with the consumer."""
    most = int(consumer["config"].get("max_ack_pending", UNBOUNDED))
    return limit if most == UNBOUNDED else max(0, min(limit, most - int(consumer["num_ack_pending"])))


async def _leave_leased(puller: Puller) -> None:
    """Do nothing: what a withdrawn probe has brought is delivered again when its lease ends."""
