"""Sends on NATS: one publication a message, all of a call at once, each acknowledged by the server."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from mainspring.core import clock
from mainspring.errors import InvalidParameterError, MailboxConnectionError, MailboxError
from mainspring.mailbox.limits import CLOSE_TIMEOUT, check_size
from mainspring.mailbox.nats.messages import RESERVED, StoredMessage
from mainspring.mailbox.nats.scheduler import move_to_queue
from mainspring.mailbox.nats.streams import Add, Added

if TYPE_CHECKING:
    from mainspring.mailbox.message import Envelope
    from mainspring.mailbox.nats.streams import Store, Stored


class Sends:
    """The sends of one mailbox object."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._wall = clock.wall_clock()

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        """See :meth:`Backend.send`."""
        records = self.records_of(envelopes)
        sent = []
        has_keys = False
        for record in records:
            sent.append(record.message_id)
            has_keys = has_keys or record.dedup_key is not None
        if has_keys:
            sent = await self._send_in_turn(records)
        elif len(records) == 1:
            await self._store.add(self._addition(records[0]))
        else:
            await self._send_all([self._addition(record) for record in records])
        if envelopes[0].expires_in is not None:
            await self._schedule_expiries(
                [record for record, message_id in zip(records, sent, strict=True) if message_id == record.message_id]
            )
        return sent

    def records_of(self, envelopes: list[Envelope]) -> list[StoredMessage]:
        """Return the records of messages that are about to be sent.

        :raises SerializationError: one is larger than the server takes.
        """
        now = self._wall()
        records = []
        for envelope in envelopes:
            if envelope.priority:
                raise InvalidParameterError(
                    "send: a mailbox on NATS has no priorities (Capabilities.priority); leave it at 0"
                )
            record = StoredMessage.of(envelope, now)
            plain = not (envelope.headers or envelope.reply_to or envelope.dedup_key or envelope.task)
            check_message_size(len(envelope.body if plain else record.encode()), self._store)
            records.append(record)
        return records

    async def send_once(self, name: str, records: list[StoredMessage]) -> None:
        """Send messages that this process or another one may have sent under this name already.

        The server takes each of them once in two minutes.

        :raises MailboxFullError: there is no room; some may have been sent.
        """
        if all(record.dedup_key is None for record in records):
            adds = [
                self._addition(record)._replace(expect=0, message_id=f"{name}-{record.token}") for record in records
            ]
            for result in await self._store.add_all(adds):
                if isinstance(result, MailboxError):
                    raise result
        else:
            for record in records:
                if record.dedup_key is None:
                    await self._store.add(
                        self._addition(record)._replace(expect=0, message_id=f"{name}-{record.token}")
                    )
                else:
                    await self._send_with_dedup_key(record, f"{name}-{record.token}")
        expiring = [record for record in records if record.expires_at is not None]
        if expiring:
            await self._schedule_expiries(expiring)

    async def _send_in_turn(self, records: list[StoredMessage]) -> list[str]:
        """Send messages of which some have a dedup key: all or none, as far as the server can."""
        sent: list[str] = []
        try:
            for record in records:
                if record.dedup_key is None:
                    await self._store.add(self._addition(record))
                    sent.append(record.message_id)
                else:
                    sent.append(await self._send_with_dedup_key(record))
        except BaseException:
            if sent:
                await self.remove_sent(
                    [each for each, sent_as in zip(records, sent, strict=False) if each.message_id == sent_as]
                )
            raise
        return sent

    async def remove_sent(self, records: list[StoredMessage]) -> None:
        """Remove messages that were sent just now, as far as they are still there."""
        store = self._store
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT), suppress(MailboxError):
            async with store.lock.writing():
                for record in records:
                    stream = store.names.queue if record.due is None else store.names.delayed
                    there = await store.last(stream, self._addition(record).subject)
                    if there is not None and there.record.message_id == record.message_id:
                        await store.count_moves(int(await store.remove(stream, there.sequence)))

    async def _schedule_expiries(self, records: list[StoredMessage]) -> None:
        """Add the notes of expiries. A message without one expires when it would be received."""
        store = self._store
        notes = [StoredMessage(record.message_id, b"", record.enqueued_at, due=record.expires_at) for record in records]
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT):
            await store.add_all([Add(store.names.to_expiries + note.token, note.encode()) for note in notes])

    def _addition(self, record: StoredMessage) -> Add:
        names = self._store.names
        prefix = names.to_queue if record.due is None else names.to_delayed
        return Add(prefix + record.token, record.encode())

    async def _send_all(self, adds: list[Add]) -> None:
        """Send all or none, as far as the server can: if one is refused, those stored are removed again."""
        results = await self._store.add_all(adds)
        errors = [result for result in results if isinstance(result, MailboxError)]
        if not errors:
            return
        stored: dict[str, list[int]] = {}
        names = self._store.names
        for add, result in zip(adds, results, strict=True):
            if isinstance(result, Added) and result.sequence:
                stream = names.queue if add.subject.startswith(names.to_queue) else names.delayed
                stored.setdefault(stream, []).append(result.sequence)
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT):
            async with self._store.lock.writing():
                for stream, sequences in stored.items():
                    taken = await self._store.remove_all(stream, sequences)
                    await self._store.count_moves(sum(each is True for each in taken))
        raise errors[0]

    async def _send_with_dedup_key(self, record: StoredMessage, once: str | None = None) -> str:
        """Send a message unless its key is in the queue or delayed. Return the id of the message that has the key.

        The server takes a message that is sent under the id ``once`` one time in two minutes.
        """
        store = self._store
        names = store.names
        mine, other = (names.to_queue, names.to_delayed) if record.due is None else (names.to_delayed, names.to_queue)
        my_stream, other_stream = (names.queue, names.delayed) if record.due is None else (names.delayed, names.queue)
        payload = record.encode()
        for _ in range(20):
            there = await store.last(other_stream, other + record.token)
            if there is not None:
                if await self._is_unfinished(other_stream, there):
                    return await self._surviving_id(there, my_stream, mine + record.token)
                continue
            added = await store.add(Add(mine + record.token, payload, 0, once))
            if added.duplicate:
                return record.message_id
            if not added.sequence:
                there = await store.last(my_stream, mine + record.token)
                if there is not None and await self._is_unfinished(my_stream, there):
                    return await self._surviving_id(there, other_stream, other + record.token)
                continue  # it was settled just now
            there = await store.last(other_stream, other + record.token)
            if there is None or there.record.message_id == record.message_id:  # it was delayed, or came due, meanwhile
                return record.message_id
            # Meanwhile one with this key was sent to the other stream. The later one of the two goes, unless it was claimed
            # already: its sender sees the other one, whose sender may have seen none. So they never both go.
            own = await store.get(my_stream, added.sequence)
            if own is None or not _is_elder(there, own):
                return record.message_id
            async with store.lock.writing():
                if not await store.remove(my_stream, added.sequence):
                    return record.message_id
                await store.count_moves()
        raise _too_fast(record)

    async def _surviving_id(self, there: Stored, stream: str, subject: str) -> str:
        """Return the id of the message that has the key: ``there``, or an older one to which it is about to give way."""
        elder = await self._store.last(stream, subject)
        return (there if elder is None or not _is_elder(elder, there) else elder).record.message_id

    async def _is_unfinished(self, stream: str, there: Stored) -> bool:
        """True if the message that has the key is not settled. A due one may still lie here, and be settled already."""
        store = self._store
        names = store.names
        if stream == names.queue or (there.record.due or 0.0) > self._wall():
            return True
        async with store.writing():
            added = await store.add(move_to_queue(names, there.record.token, there.record, there.sequence))
            if added.sequence and not added.duplicate:
                await store.count_moves()
            if added.sequence:
                await store.remove(names.delayed, there.sequence)
        return not added.duplicate


def check_message_size(size: int, store: Store) -> None:
    """Raise :class:`SerializationError` if a message is larger than the server takes, with what it may gather on its way."""
    most = store.connection.max_payload - RESERVED  # another one after a reconnection, perhaps
    check_size("a message", size, most, "this NATS server's max_payload leaves for one")


def _is_elder(there: Stored, than: Stored) -> bool:
    """True if ``there`` was sent first. A message that was delivered was, whenever it was moved to the tail."""
    return there.record.deliveries > 0 or there.stored_at < than.stored_at


def _too_fast(record: StoredMessage) -> MailboxConnectionError:
    return MailboxConnectionError(f"the messages with the dedup key {record.dedup_key!r} came and went too fast")
