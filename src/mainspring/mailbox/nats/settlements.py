"""Settlements on NATS: ack, nack, release and dead-letter, with a reply if one is wanted; and checkpoints."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from mainspring.core import clock
from mainspring.errors import (
    ConfigError,
    MailboxConnectionError,
    MailboxError,
    MailboxFullError,
    ReceiptHandleExpiredError,
    ReplyNotAvailableError,
)
from mainspring.mailbox.limits import lease_over
from mainspring.mailbox.message import EXPIRED, Ack, Dead, Nack
from mainspring.mailbox.nats.claims import FULL_RETRY
from mainspring.mailbox.nats.client import GoneError
from mainspring.mailbox.nats.messages import RESERVED_FOR_DEATH, StoredMessage, token_of
from mainspring.mailbox.nats.names import Names
from mainspring.mailbox.nats.streams import Add

if TYPE_CHECKING:
    from mainspring.mailbox.message import ClaimedMessage, Envelope, Settlement
    from mainspring.mailbox.nats.claims import Claims, Lease
    from mainspring.mailbox.nats.records import Records
    from mainspring.mailbox.nats.streams import Store

PATIENCE = 10.0
"""Seconds for which a holder may try to write a dead letter without room; then the message is left to another delivery."""


class Settlements:
    """The settlements of one mailbox object.

    An acknowledged message is removed by its number, a released one replaced by its number: one step each, and the server tells
    whether the lease was held. A message that goes to another stream (a delay, a dead letter) is added there first and then
    removed here, so that it is never in neither. If the removal finds that the lease was lost, the copy is removed again.
    """

    def __init__(self, store: Store, claims: Claims, records: Records) -> None:
        self._store = store
        self._claims = claims
        self._records = records
        self._wall = clock.wall_clock()

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        """See :meth:`Backend.settle`."""
        await self._store.check_identity()
        lease = self._claims.held(delivery)
        await self._store.finish_writes([lease.record])
        try:
            if isinstance(settlement, Ack):
                if settlement.reply is not None or settlement.result is not None:
                    held = await self._acknowledge_with(lease, delivery, settlement)
                else:
                    held = await self._store.remove(self._store.names.queue, lease.sequence)
            elif isinstance(settlement, Dead):
                held = await self._dead_letter(lease, delivery, settlement)
            else:
                held = await self._nack(lease, settlement)
        except MailboxConnectionError:
            lease.unsure = True
            raise
        except MailboxFullError:
            if await self._handle_full(lease, delivery, settlement):
                return
            raise
        self._drop(delivery, lease, held)
        if lease.checkpoint and isinstance(settlement, Ack):
            await self._store.forget_checkpoint(lease.record)

    async def _acknowledge_with(self, lease: Lease, delivery: ClaimedMessage, ack: Ack) -> bool:
        """Send the reply and keep the result, then remove the message. Return True if it was there.

        A result of a message that was not there any more is removed again.
        """
        store = self._store
        await self._check_present(lease, delivery)
        if ack.reply is not None:
            await self._reply(delivery, ack.reply)
        if ack.result is None:
            return await store.remove(store.names.queue, lease.sequence)
        with anyio.CancelScope(shield=True):  # every call has a deadline
            version = await self._records.keep_result(delivery.message_id, ack.result)
            held = await store.remove(store.names.queue, lease.sequence)
            if not held and not lease.unsure:
                await self._records.drop_result(delivery.message_id, version)
            else:
                with suppress(MailboxConnectionError):  # a wait for the result looks by itself
                    await store.connection.publish(store.names.to_results, delivery.message_id.encode())
        return held

    async def _check_present(self, lease: Lease, delivery: ClaimedMessage) -> None:
        """Raise :class:`ReceiptHandleExpiredError` if the message is not there under its number any more."""
        store = self._store
        if await store.get(store.names.queue, lease.sequence) is None and not lease.unsure:
            self._claims.drop_lease(delivery)
            raise lease_over(delivery)

    async def acknowledge(self, deliveries: list[ClaimedMessage]) -> dict[int, Exception]:
        """See :meth:`Backend.acknowledge_many`: one request each, all at once."""
        store = self._store
        await store.check_identity()
        refused: dict[int, Exception] = {}
        leases: dict[int, Lease] = {}
        for number, delivery in enumerate(deliveries):
            try:
                leases[number] = self._claims.held(delivery)
            except ReceiptHandleExpiredError as error:
                refused[number] = error
        await store.finish_writes([lease.record for lease in leases.values()])
        removed = await store.remove_all(store.names.queue, [lease.sequence for lease in leases.values()])
        for (number, lease), held in zip(leases.items(), removed, strict=True):
            if isinstance(held, MailboxError):
                lease.unsure = lease.unsure or isinstance(held, MailboxConnectionError)
                refused[number] = held
                continue
            try:
                self._drop(deliveries[number], lease, held)
            except ReceiptHandleExpiredError as error:
                refused[number] = error
        async with anyio.create_task_group() as tasks:
            for number in leases.keys() - refused.keys():
                if leases[number].checkpoint:
                    tasks.start_soon(self._store.forget_checkpoint, leases[number].record)
        return refused

    def _drop(self, delivery: ClaimedMessage, lease: Lease, held: bool) -> None:
        """Forget the lease of a settled delivery. Raise :class:`ReceiptHandleExpiredError` if it was not ``held``."""
        self._claims.drop_lease(delivery)
        if not held and not lease.unsure:  # if unsure, the unanswered try has done it
            raise lease_over(delivery)

    async def _handle_full(self, lease: Lease, delivery: ClaimedMessage, settlement: Settlement) -> bool:
        """Leave a message in place whose next place has no room. Return True if that is what the settlement wanted.

        A released message is delivered again from there. So is, after a while, one whose dead letter cannot be
        written: a worker whose slots all wait for room would make none.
        """
        if isinstance(settlement, Nack):
            await self._claims.redeliver_in_place(delivery, settlement.delay)
            return True
        now = anyio.current_time()
        if lease.refused_since is None:
            lease.refused_since = now
        if isinstance(settlement, Dead) and now - lease.refused_since >= PATIENCE:
            await self._claims.redeliver_in_place(delivery, FULL_RETRY)
        return False

    async def _nack(self, lease: Lease, how: Nack) -> bool:
        store = self._store
        record = self._ended_record(lease, how.charge, how.history)
        now = self._wall()
        if record.expires_at is not None and record.expires_at <= now:
            return await self._store.dead_letter(store.names.queue, lease.sequence, record, EXPIRED, record.expires_at)
        if how.delay <= 0:
            async with store.lock.writing():
                added = await store.add(Add(lease.subject, record.encode(), lease.sequence))
                if added.sequence:
                    await store.count_moves()
            return added.sequence > 0
        record.due = now + how.delay
        token = lease.subject.removeprefix(store.names.to_queue)
        async with store.writing():
            added = await store.add(Add(store.names.to_delayed + token, record.encode(), 0))
            fresh = added.sequence > 0
            if not fresh:  # left there by a process that could not finish
                added = await store.add_or_replace(
                    Add(store.names.to_delayed + token, record.encode()), record.message_id
                )
            if not added.sequence:  # another message has its dedup key by now
                record.dedup_key = None
                subject = store.names.to_delayed + record.token
                added = await store.add_or_replace(Add(subject, record.encode()), record.message_id)
                fresh = True
            await store.count_moves()
            held = await store.remove(store.names.queue, lease.sequence)
            if not held and fresh and not lease.unsure:
                await store.remove(store.names.delayed, added.sequence)
        return held

    def _ended_record(self, lease: Lease, charge: bool, history: str | None) -> StoredMessage:
        """Return the record with which the message goes on, or is dead."""
        record = lease.record.returned(
            received_at=lease.received_at, charge=charge, kept=lease.checkpoint, history=history
        )
        return record.within(self._store.connection.max_payload - RESERVED_FOR_DEATH)

    async def _dead_letter(self, lease: Lease, delivery: ClaimedMessage, dead: Dead) -> bool:
        if dead.reply is not None:
            await self._check_present(lease, delivery)
            await self._reply(delivery, dead.reply)
        record = self._ended_record(lease, True, dead.history)
        return await self._store.dead_letter(self._store.names.queue, lease.sequence, record, dead, self._wall())

    async def _reply(self, delivery: ClaimedMessage, reply: Envelope) -> None:
        """Send a reply to a mailbox on this store while the lease is held. The server drops a second one by its id."""
        try:
            await self._send_reply(reply, f"reply-{delivery.message_id}")
        except ConfigError as error:
            raise ReplyNotAvailableError(f"the reply cannot be sent: {error}") from error

    async def _send_reply(self, reply: Envelope, once: str) -> None:
        store = self._store
        names = Names.of(reply.reply_to or "")
        record = StoredMessage.of(reply, self._wall())
        record.reply_to = None
        add = Add(names.to_queue + record.token, record.encode(), None, once)
        try:
            await store.add_elsewhere(add)
        except GoneError:
            if names.transient:  # the requester is gone
                return
            await store.ensure(names)
            await store.add_elsewhere(add)

    async def checkpoint(self, delivery: ClaimedMessage, state: bytes) -> None:
        """See :meth:`Backend.checkpoint`."""
        store = self._store
        await store.check_identity()
        lease = self._claims.held(delivery)
        if await store.get(store.names.queue, lease.sequence) is None:
            self._claims.drop_lease(delivery)
            raise lease_over(delivery)
        await store.add(Add(store.names.to_checkpoints + token_of(lease.record.message_id), state))
        lease.checkpoint = True
