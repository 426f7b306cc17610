"""Dead letters on NATS: a stream of their own, each with its reason in headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mainspring.errors import MailboxConnectionError, MailboxError
from mainspring.mailbox.nats.records import read_dead, token_of
from mainspring.mailbox.nats.streams import Add

if TYPE_CHECKING:
    from mainspring.mailbox.message import Dead, Delivery
    from mainspring.mailbox.nats.streams import Store, Stored


class DeadLetters:
    """The dead letters of one mailbox."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def page(self, limit: int, after: str | None) -> list[tuple[Delivery, Dead, float]]:
        """See :meth:`MailboxHooks._dead_letters`."""
        start = 1
        if after is not None:
            for stored in await self._of([after]):
                start = stored.sequence + 1
        return [_letter(stored) for stored in await self._from(start, limit)]

    async def find(self, message_ids: list[str]) -> list[tuple[Delivery, Dead, float]]:
        """See :meth:`MailboxHooks._find_dead`."""
        return [_letter(stored) for stored in await self._of(message_ids)]

    async def replay(self, message_ids: list[str] | None) -> int:
        """See :meth:`MailboxHooks._replay`."""
        count = 0
        start = 1
        while True:
            found = await self._from(start, 100) if message_ids is None else await self._of(message_ids)
            for stored in found:
                count += await self._revive(stored)
                start = stored.sequence + 1
            if message_ids is not None or len(found) < 100:
                return count

    async def discard(self, message_ids: list[str] | None) -> int:
        """See :meth:`MailboxHooks._discard_dead`."""
        store = self._store
        names = store.names
        if message_ids is None:
            return await store.purge(names.dead)
        found = await self._of(message_ids)
        count = 0
        for removed in await store.remove_all(names.dead, [stored.sequence for stored in found]):
            if isinstance(removed, MailboxError):
                raise removed
            count += removed
        return count

    async def _revive(self, stored: Stored) -> bool:
        """Add it to the queue, then remove it here; whether this call did. It is sent once, whoever else tries."""
        store = self._store
        names = store.names
        record = stored.record
        other = None
        if record.dedup_key is not None:
            for stream, prefix in ((names.queue, names.to_queue), (names.delayed, names.to_delayed)):
                other = other or await store.last(stream, prefix + record.token)
        taken = other is not None and other.record.message_id != record.message_id
        for _ in range(20):
            again = record.revived(None if taken else record.dedup_key)
            async with store.moving():
                added = await store.add(Add(names.to_queue + again.token, again.encode(), 0))
                if added.sequence:
                    await store.moved()
                    return await store.remove(names.dead, stored.sequence)
                there = await store.last(names.queue, names.to_queue + again.token)
                if there is not None and there.record.message_id == record.message_id:  # by one who could not finish
                    return await store.remove(names.dead, stored.sequence)
            # The key was taken just now, or what had it has just been finished.
            taken = taken or there is not None
        raise MailboxConnectionError(f"the messages with the dedup key {record.dedup_key!r} came and went too fast")

    async def _from(self, start: int, limit: int) -> list[Stored]:
        store = self._store
        found: list[Stored] = []
        while len(found) < limit:
            stored = await store.next(store.names.dead, start, f"{store.names.to_dead}*")
            if stored is None:
                break
            found.append(stored)
            start = stored.sequence + 1
        return found

    async def _of(self, message_ids: list[str]) -> list[Stored]:
        """Those of some ids, the oldest first."""
        store = self._store
        wanted = dict.fromkeys(message_ids)
        subjects = [store.names.to_dead + token_of(each) for each in wanted]
        found: dict[int, Stored] = {}
        for stored in await store.last_all(store.names.dead, subjects):
            if isinstance(stored, MailboxError):
                raise stored
            if stored is not None and stored.record.message_id in wanted:
                found[stored.sequence] = stored
        return [found[sequence] for sequence in sorted(found)]


def _letter(stored: Stored) -> tuple[Delivery, Dead, float]:
    record = stored.record
    dead, at = read_dead(stored.headers, stored.stored_at)
    delivery = record.delivery("", 0.0, None, None)
    delivery.delivery_count = record.deliveries
    delivery.attempt = record.charged
    return delivery, dead, at
