"""Background work of an open mailbox on NATS: delays and expiries that come due, and recovery after a server crash."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core import clock
from mainspring.errors import MailboxError
from mainspring.mailbox.message import EXPIRED
from mainspring.mailbox.nats.claims import LONGEST_PULL, Arrival, nak
from mainspring.mailbox.nats.client import NO_STREAM, ApiError, GoneError, is_gone
from mainspring.mailbox.nats.connection import Request
from mainspring.mailbox.nats.messages import nanoseconds, token_of, tokens_of
from mainspring.mailbox.nats.names import CONSUMER
from mainspring.mailbox.nats.streams import Add, Added
from mainspring.runtime.interval import Periodic
from mainspring.runtime.retry import Retries

if TYPE_CHECKING:
    from mainspring.mailbox.nats.claims import Claims
    from mainspring.mailbox.nats.connection import Puller
    from mainspring.mailbox.nats.limits import MailboxLimits
    from mainspring.mailbox.nats.messages import StoredMessage
    from mainspring.mailbox.nats.names import Names
    from mainspring.mailbox.nats.records import Records
    from mainspring.mailbox.nats.streams import Store, Stored


_BATCH = 256
LEFT_BEHIND = 10.0
"""Seconds after which an older copy in the queue counts as left behind for good: longer than a call lasts."""
_AGAIN = 0.25
"""Seconds until a message is looked at again whose older copy has not left the queue yet."""
LOOK_AGAIN_MIN = 0.25
"""Seconds until the scheduler looks again for an expired message that is in flight: as long as it has been expired,
but at least this."""
LOOK_AGAIN_MAX = 30.0
"""Seconds between two such looks at most."""


def move_to_queue(names: Names, token: str, record: StoredMessage, sequence: int) -> Add:
    """Return the addition that moves number ``sequence`` of the delayed to the queue.

    Several processes may send it: the server takes it once in two minutes.
    """
    payload = replace(record, due=None).encode()
    return Add(names.to_queue + token, payload, 0, f"due-{record.message_id}-{sequence}")


class Scheduler:
    """Acts on what a stream holds, when it is due. Every open mailbox has one for each such stream.

    What is not due stays with the server, by a nak with a delay, and is delivered when it is due to one of the schedulers.
    """

    def __init__(self, store: Store, stream: str) -> None:
        self._store = store
        self._wall = clock.wall_clock()
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{CONSUMER}"
        self._stopping = False

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopping = True

    async def run(self) -> None:
        """Work until stopped or cancelled. A server that cannot be reached is tried again."""
        retries = Retries(initial=0.1, maximum=5.0)
        while not self._stopping:
            try:
                await self._pull()
                retries.succeeded()
            except MailboxError as error:
                if isinstance(error, GoneError):
                    with suppress(MailboxError):
                        await self._store.recreate(error)
                await retries.pause()

    async def _pull(self) -> None:
        puller = await self._store.connection.puller()
        messages = await puller.pull(self._next, _BATCH, LONGEST_PULL, self._nak_at_once)
        if messages:
            await self._handle([Arrival.of(message) for message in messages])

    async def _nak_at_once(self, broken_off: Puller) -> None:
        """Give what has arrived to another scheduler at once. What arrives late is another's in two seconds."""
        await self._store.connection.request_all(
            [Request(message.reply.decode(), b"-NAK") for message in broken_off.take()]
        )

    async def _handle(self, arrivals: list[Arrival]) -> None:
        now = self._wall()
        early: list[Request] = []
        due: list[Arrival] = []
        for arrival in arrivals:
            left = (arrival.record.due or 0.0) - now
            if left > 0:
                early.append(Request(arrival.reply, b'-NAK {"delay":%d}' % nanoseconds(max(left, 0.001))))
            else:
                due.append(arrival)
        if early:
            await self._store.connection.request_all(early)
        if due:
            await self._act(due)

    async def _act(self, due: list[Arrival]) -> None:
        """Act on what is due."""
        raise NotImplementedError


class DelayScheduler(Scheduler):
    """Moves due messages to the tail of the queue: adds them there, then removes them here.

    If it dies between the two, another scheduler repeats it, and the queue refuses the second copy.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store, store.names.delayed)

    async def _act(self, due: list[Arrival]) -> None:
        store = self._store
        names = store.names
        await store.finish_writes([arrival.record for arrival in due])
        adds = []
        for arrival in due:
            token = arrival.subject.removeprefix(names.to_delayed)
            adds.append(move_to_queue(names, token, arrival.record, arrival.sequence))
        async with store.lock.writing():
            results = await store.add_all(adds)
            moved = [
                (arrival, result)
                for arrival, result in zip(due, results, strict=True)
                if isinstance(result, Added) and result.sequence
            ]
            fresh = sum(not added.duplicate for _, added in moved)
            if fresh:
                await store.count_moves(fresh)
            removed = await store.remove_all(names.delayed, [arrival.sequence for arrival, _ in moved])
        for (arrival, added), was_there in zip(moved, removed, strict=True):
            if was_there is False and not added.duplicate:
                await self._resolve_change(arrival, added.sequence)
        for arrival, result in zip(due, results, strict=True):
            if isinstance(result, Added) and not result.sequence:
                await self._resolve_conflict(arrival)

    async def _resolve_change(self, arrival: Arrival, sequence: int) -> None:
        """Decide where a message was changed (``lookup.py``) while it was moved to that number of the queue: the change holds,
        unless a worker has the message."""
        store = self._store
        names = store.names
        there = await store.last(names.delayed, arrival.subject)
        if there is None or (there.record.message_id, there.record.deliveries) != (
            arrival.record.message_id,
            arrival.record.deliveries,
        ):
            return  # it was cancelled, or a worker has given it back
        is_free = await store.begin_change(sequence)
        async with store.writing():
            if not (is_free and await store.remove(names.queue, sequence)):
                await store.remove(names.delayed, there.sequence)

    async def _resolve_conflict(self, arrival: Arrival) -> None:
        """Decide where the queue holds another message in its place: a copy of it, or another one with its dedup key."""
        store = self._store
        names = store.names
        subject = names.to_queue + arrival.subject.removeprefix(names.to_delayed)
        there = await store.last(names.queue, subject)
        if there is None:
            await store.connection.request(arrival.reply, b"-NAK")
        elif there.record.message_id != arrival.record.message_id:
            record = replace(arrival.record, due=None, dedup_key=None)
            async with store.writing():
                if await store.get(names.delayed, arrival.sequence) is None:
                    return  # it was cancelled, or another scheduler was quicker
                subject = names.to_queue + token_of(record.message_id)
                await store.add_or_replace(Add(subject, record.encode()), record.message_id)
                await store.count_moves()
                await store.remove(names.delayed, arrival.sequence)
        elif there.record.deliveries >= arrival.record.deliveries:
            await store.remove(names.delayed, arrival.sequence)  # the queue has it: this copy was left over
        elif self._wall() - (arrival.record.due or 0.0) > LEFT_BEHIND:
            # The process that delayed it died before the removal, or the server before writing it: this is the newer copy.
            record = replace(arrival.record, due=None)
            async with store.lock.writing():
                added = await store.add(Add(subject, record.encode(), there.sequence))
                if added.sequence:
                    await store.count_moves()
                    await store.remove(names.delayed, arrival.sequence)
        else:  # the process that delayed it has yet to remove it from the queue
            await store.connection.request(arrival.reply, b'-NAK {"delay":%d}' % nanoseconds(_AGAIN))


class ExpiryScheduler(Scheduler):
    """Moves messages to the dead letters when they expire, unless a worker has them.

    A note of an expiry stays until its message is settled or dead. While the message is in flight, or may be, the note comes
    again. A message that a cancelled receive, or a nack at its expiry, then puts back has no other reminder.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store, store.names.expiries)

    async def _act(self, due: list[Arrival]) -> None:
        store = self._store
        names = store.names
        needed: set[int] = set()
        for stream in (names.delayed, names.queue, names.delayed):  # a nack moves it from the second to the first
            found = await self._expired_in(stream, due)
            delivered = await store.delivered() if found and stream == names.queue else 0
            for note, there in found:
                record = there.record
                in_flight = there.sequence <= delivered  # or it was
                if in_flight or not await store.dead_letter(
                    stream, there.sequence, record, EXPIRED, record.expires_at or 0.0
                ):
                    needed.add(note.sequence)
        now = self._wall()
        again = [
            Request(note.reply, nak(min(LOOK_AGAIN_MAX, max(LOOK_AGAIN_MIN, now - (note.record.due or now)))))
            for note in due
            if note.sequence in needed
        ]
        await store.connection.request_all(again)
        await store.remove_all(names.expiries, [note.sequence for note in due if note.sequence not in needed])

    async def _expired_in(self, stream: str, notes: list[Arrival]) -> list[tuple[Arrival, Stored]]:
        """Return those of the messages that the notes name which are in ``stream``, each with its note."""
        names = self._store.names
        prefix = names.to_delayed if stream == names.delayed else names.to_queue
        asked = [(note, prefix + token) for note in notes for token in tokens_of(note.record.message_id)]
        found = []
        stored = await self._store.last_all(stream, [subject for _, subject in asked])
        for (note, _), there in zip(asked, stored, strict=True):
            if isinstance(there, MailboxError):
                raise there
            if there is None:
                continue
            record = there.record
            if record.message_id == note.record.message_id and record.expires_at is not None:
                found.append((note, there))
        return found


EVERY = 30.0
"""Seconds between two checks. After a reconnection there is one at once, and one ``SOON``. While the consumer seems to pass
over messages, each check waits as long again as that has lasted. The messages move to the tail as soon as nothing is out."""
SOON = 1.0
PATIENCE = 300.0
"""Seconds after which messages that the consumer passes over move to the tail although the consumer has messages out. Should
those be the same, their holders lose their leases, and the messages are run once more."""
WINDOW = 50_000
"""How far back to search for messages that are gone and that a consumer still has out."""
_AT_ONCE = 500


class Recovery:
    """Repairs what a killed NATS server leaves behind. Every open mailbox has one.

    - A message was delivered, lies in the stream, and is not out with the consumer. Either the server has forgotten a removal
      that it had confirmed, or its consumer has lost sight of a message that had been redelivered. The two look alike, and
      nothing may be lost: both go to the tail again. (The consumer's ack floor does not tell them apart: in 2.9 it passes
      over messages that are still out.)
    - A message is out with the consumer, for ever, and is not in the stream any more. The consumer stumbles over it, so it is
      acknowledged.
    - The consumer is ahead of its stream, of which a power cut took more. It would pass over what is sent next, so it is
      made anew.

    The first two can hide each other, as the numbers then add up. So the first look after a reconnection is a close one,
    whatever the numbers say, and so is a look that finds all as the look before has left it.
    """

    def __init__(self, store: Store, claims: Claims, records: Records, limits: MailboxLimits) -> None:
        self._store = store
        self._claims = claims
        self._records = records
        self._limits = limits
        self._timer = Periodic(self._step)
        self._suspected: dict[str, tuple[float, int]] = {}
        self._has_reconnected = False
        self._last_numbers: dict[str, tuple[tuple[int, ...], int]] = {}

    async def run(self) -> None:
        """Check now and then, until cancelled; a new mailbox for the first time after a while."""
        self._timer.wake_by(anyio.current_time() + (EVERY if self._store.is_new else 0.0))
        await self._timer.run()

    def after_reconnect(self) -> None:
        """Check soon, and closely: the server may have been away."""
        self._has_reconnected = True
        self._timer.wake_by(anyio.current_time())

    async def _step(self, overslept: float) -> float:
        has_reconnected, self._has_reconnected = self._has_reconnected, False
        soon = has_reconnected
        try:
            if has_reconnected:
                await self._store.check_identity()
            if self._store.is_new:  # but for what an operator may have left of it
                await self._store.ensure(self._store.names)
            soon = await self.check(closely=has_reconnected) or has_reconnected
            await self._records.tend()
        except MailboxError as error:  # the next check repeats it
            self._has_reconnected = self._has_reconnected or has_reconnected
            if is_gone(error):  # the server has lost its data, or an operator has deleted a stream
                with suppress(MailboxError):
                    await self._store.recreate(error)
        now = anyio.current_time()
        waits = [EVERY, *(max(SOON, now - since) for since, _ in self._suspected.values())]
        return now + (SOON if soon else min(waits))

    async def check(self, *, closely: bool = False) -> bool:
        """Repair what the numbers show. ``closely``: if anything is out, do not trust them.

        Return True if another check may show more, as the numbers have been repaired.
        """
        names = self._store.names
        soon = False
        for stream in (names.queue, names.delayed, names.expiries):
            # The consumer first: the stream is never behind what it says then.
            try:
                consumer, state = await self._states(stream)
            except ApiError as error:
                if error.code != NO_STREAM or stream in self._store.made:
                    raise
                continue  # no message has needed it yet
            self._store.note(stream)
            if "delivered" not in consumer:  # NATS 2.9 answers so while it makes or removes the consumer
                soon = True
                continue
            if stream == names.queue:
                await self._limits.check(consumer)
            if consumer["delivered"]["stream_seq"] > state["last_seq"]:
                await self._recreate_consumer(stream)
                continue
            out = consumer["num_ack_pending"]
            if state["messages"] > consumer["num_pending"] + out or (closely and out):
                if closely or not (out and self._is_waiting(stream)):
                    await self._examine(stream, consumer)
                continue
            self._suspected.pop(stream, None)
            found = (consumer["delivered"]["consumer_seq"], out, state["messages"], state["last_seq"])
            before, times = self._last_numbers.get(stream, ((), 0))
            times = times + 1 if found == before else 0
            self._last_numbers[stream] = found, times
            if times == 1 and out and state["messages"]:  # nothing was done since the last check; once is enough
                await self._examine(stream, consumer, above=consumer["ack_floor"]["stream_seq"])
                soon = True
        return soon

    def _is_waiting(self, stream: str) -> bool:
        """True if messages that seem passed over there were examined, and are not overdue."""
        suspected = self._suspected.get(stream)
        return suspected is not None and anyio.current_time() - suspected[0] < PATIENCE

    async def _examine(self, stream: str, consumer: dict[str, Any], *, above: int = 0) -> None:
        """Count the messages that were delivered and are there; those sent meanwhile do not count.

        Messages that are gone are acknowledged, from the number after ``above`` on.
        """
        delivered = consumer["delivered"]["stream_seq"]
        state = (await self._store.connection.api(f"STREAM.INFO.{stream}", {"deleted_details": True}))["state"]
        first = state["first_seq"]
        gone = [number for number in state.get("deleted") or () if number <= delivered]
        there = max(0, delivered - first + 1) - len(gone)
        out = consumer["num_ack_pending"]
        if not out:
            await self._move_to_tail(stream, delivered)
            return
        oldest = max(1, above + 1, delivered - WINDOW)
        gone = [*range(oldest, min(first, delivered + 1)), *(number for number in gone if number >= oldest)]
        place = f"$JS.ACK.{stream}.{CONSUMER}.1"
        for start in range(0, len(gone), _AT_ONCE):
            some = gone[start : start + _AT_ONCE]
            await self._store.connection.request_all(
                [Request(f"{place}.{number}.{number}.0.0", b"+ACK") for number in some]
            )
        if there <= out:
            self._suspected.pop(stream, None)
            return
        since, limit = self._suspected.setdefault(stream, (anyio.current_time(), delivered))
        if anyio.current_time() - since >= PATIENCE:
            del self._suspected[stream]
            await self._move_to_tail(stream, limit)

    async def _move_to_tail(self, stream: str, limit: int) -> None:
        """Move all messages up to number ``limit`` to the tail, each in one step that replaces it."""
        store = self._store
        prefix = {store.names.queue: store.names.to_queue, store.names.delayed: store.names.to_delayed}.get(
            stream, store.names.to_expiries
        )
        number = 1
        while True:
            found: list[Stored] = []
            while len(found) < _AT_ONCE:
                stored = await store.next(stream, number, f"{prefix}*")
                if stored is None or stored.sequence > limit:
                    break
                found.append(stored)
                number = stored.sequence + 1
            if not found:
                return
            await self._replace(stream, found)

    async def _replace(self, stream: str, found: list[Stored]) -> None:
        store = self._store
        queued = stream == store.names.queue
        payloads = [
            self._claims.after_lost_lease(stored.record).encode() if queued else stored.payload for stored in found
        ]
        adds = [Add(stored.subject, payload, stored.sequence) for stored, payload in zip(found, payloads, strict=True)]
        async with store.lock.writing():
            results = await store.add_all(adds)
            moved = sum(isinstance(result, Added) and result.sequence > 0 for result in results)
            if moved and stream != store.names.expiries:
                await store.count_moves(moved)

    async def _states(self, stream: str) -> tuple[dict[str, Any], dict[str, Any]]:
        connection = self._store.connection
        consumer = await connection.api(f"CONSUMER.INFO.{stream}.{CONSUMER}")
        return consumer, (await connection.api(f"STREAM.INFO.{stream}"))["state"]

    async def _recreate_consumer(self, stream: str) -> None:
        # If there is none to delete, another process was quicker.
        await self._store.connection.request_all([Request(f"$JS.API.CONSUMER.DELETE.{stream}.{CONSUMER}")])
        await self._store.ensure(self._store.names)
        self._store.connection.end_pulls()  # those sent meanwhile reached no consumer
