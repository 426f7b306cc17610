"""Find, cancel or reschedule a message on NATS by its id, or replace its body, in any place.

A pending message can be claimed while it is changed, as the server knows no step that depends on the consumer. So the change is
announced first: all mailbox objects hear its number. Then the consumer is asked. If it had delivered the message before, the
message is left as it is. Else the server delivers it later, to a process that has heard of the change. That process puts the
message back in one step that replaces it (:meth:`Claims.note_change`). Of the two steps, the change and the return, the server
takes one. Between the servers of a cluster the announcement may be late: then the holder's lease is revoked, and it learns so
when it renews.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from mainspring.core import clock
from mainspring.errors import MailboxConnectionError, MailboxError, MailboxFullError
from mainspring.mailbox.message import (
    UNKNOWN,
    Cancelled,
    CancelOutcome,
    MessagePlace,
    RescheduleOutcome,
    UnfinishedMessage,
)
from mainspring.mailbox.nats.messages import tokens_of
from mainspring.mailbox.nats.scheduler import move_to_queue
from mainspring.mailbox.nats.sends import check_message_size
from mainspring.mailbox.nats.streams import Add

if TYPE_CHECKING:
    from mainspring.mailbox.nats.claims import Claims
    from mainspring.mailbox.nats.streams import Store, Stored

_TRIES = 20


async def find(store: Store, claims: Claims, message_ids: list[str]) -> list[UnfinishedMessage]:
    """See :meth:`Backend.find`. A message on its way from one stream to another is seen in one of them at least."""
    names = store.names
    found: dict[str, tuple[str, Stored]] = {}
    for stream, prefix in (
        (names.delayed, names.to_delayed),
        (names.queue, names.to_queue),
        (names.delayed, names.to_delayed),
    ):
        asked = [(each, token) for each in dict.fromkeys(message_ids) if each not in found for token in tokens_of(each)]
        stored = await store.last_all(stream, [prefix + token for _, token in asked])
        for (message_id, _), there in zip(asked, stored, strict=True):
            if isinstance(there, MailboxError):
                raise there
            if there is not None and there.record.message_id == message_id:
                found[message_id] = (stream, there)
    is_queued = any(stream == names.queue for stream, _ in found.values())
    delivered = await store.delivered() if is_queued else 0
    return [
        _seen_delayed(there) if stream == names.delayed else seen_queued(there, claims, delivered)
        for stream, there in found.values()
    ]


def _seen_delayed(there: Stored) -> UnfinishedMessage:
    message = there.record.before_delivery()
    due = there.record.due
    if due is None or due <= clock.utc_now().timestamp():
        return UnfinishedMessage(message, MessagePlace.PENDING, key=there.record.key)
    return UnfinishedMessage(message, MessagePlace.DELAYED, due, key=there.record.key)


def seen_queued(there: Stored, claims: Claims, delivered: int) -> UnfinishedMessage:
    """Return the state of a message in the queue. If another process holds it, only its number tells."""
    message = there.record.before_delivery()
    lease = claims.lease_of(there.sequence)
    if there.sequence > delivered or (lease is not None and lease.until <= anyio.current_time()):
        return UnfinishedMessage(message, MessagePlace.PENDING, key=there.record.key)
    message.delivery_count += 1
    message.attempt += 1
    if lease is not None:
        message.first_received_at = lease.received_at
    return UnfinishedMessage(message, MessagePlace.IN_FLIGHT, key=there.record.key)


async def cancel(store: Store, message_id: str) -> Cancelled:
    """See :meth:`Backend.cancel`."""
    names = store.names
    for stream, prefix in (
        (names.delayed, names.to_delayed),
        (names.queue, names.to_queue),
        (names.delayed, names.to_delayed),
    ):
        for token in tokens_of(message_id):
            while (there := await store.last(stream, prefix + token)) is not None:
                record = there.record
                if record.message_id != message_id:
                    break
                await store.finish_writes([record])
                delivered = await store.delivered() if stream == names.queue else 0
                if not await store.remove(stream, there.sequence):
                    continue
                if stream == names.delayed and await _was_under_way(store, token, there):
                    return await cancel(store, message_id)
                if record.kept:
                    await store.forget_checkpoint(record)
                outcome = CancelOutcome.CANCELLED if there.sequence <= delivered else CancelOutcome.REMOVED
                return Cancelled(outcome, record.reply_to, record.headers)
    return UNKNOWN


async def _was_under_way(store: Store, token: str, removed: Stored) -> bool:
    """True if a message that was removed from the delayed stream is in the queue, or was: a due message may be on its
    way there.

    What a scheduler that has it in hand adds later, the server takes for a second copy of the one added here.
    """
    if (removed.record.due or 0.0) > clock.utc_now().timestamp():
        return False
    with suppress(MailboxFullError):  # then no scheduler has found room for it either
        async with store.writing():
            added = await store.add(move_to_queue(store.names, token, removed.record, removed.sequence))
            if added.sequence and not added.duplicate:
                await store.count_moves()
        if added.sequence:
            return True
    there = await store.last(store.names.queue, store.names.to_queue + token)
    return there is not None and there.record.message_id == removed.record.message_id


async def replace_body(store: Store, message_id: str, body: bytes) -> RescheduleOutcome:
    """See :meth:`Backend.replace_body`. It is one step, by which a pending message goes to the tail."""
    names = store.names
    for _ in range(_TRIES):
        there = await _waiting(store, message_id)
        if there is None:
            return RescheduleOutcome.UNKNOWN
        stream, prefix, stored = there
        record = replace(stored.record, body=body)
        payload = record.encode()
        check_message_size(len(payload), store)
        if stream == names.delayed:
            if (record.due or 0.0) <= clock.utc_now().timestamp():
                await _change_due(store, stored.subject.removeprefix(prefix), stored, 0.0)
                continue
        elif not await store.begin_change(stored.sequence):
            return RescheduleOutcome.IN_FLIGHT
        async with store.writing():
            added = await store.add(Add(stored.subject, payload, stored.sequence))
            if added.sequence:
                await store.count_moves()
                return RescheduleOutcome.RESCHEDULED
    raise _moved_too_often(message_id)


async def reschedule(store: Store, message_id: str, delay: float) -> RescheduleOutcome:
    """See :meth:`Backend.reschedule`."""
    names = store.names
    for _ in range(_TRIES):
        there = await _waiting(store, message_id)
        if there is None:
            return RescheduleOutcome.UNKNOWN
        stream, prefix, stored = there
        token = stored.subject.removeprefix(prefix)
        if stream == names.delayed:
            if await _change_due(store, token, stored, delay):
                return RescheduleOutcome.RESCHEDULED
        elif not delay and stored.sequence > await store.delivered():
            return RescheduleOutcome.RESCHEDULED
        elif not await store.begin_change(stored.sequence):
            return RescheduleOutcome.IN_FLIGHT
        elif await _delay(store, token, stored, delay):
            return RescheduleOutcome.RESCHEDULED
    raise _moved_too_often(message_id)


def _moved_too_often(message_id: str) -> MailboxConnectionError:
    return MailboxConnectionError(f"message {message_id}: other processes moved it {_TRIES} times during one call")


async def _waiting(store: Store, message_id: str) -> tuple[str, str, Stored] | None:
    """Return the stream that holds a message, the beginning of its subjects, and the message."""
    names = store.names
    for stream, prefix in (
        (names.delayed, names.to_delayed),
        (names.queue, names.to_queue),
        (names.delayed, names.to_delayed),
    ):
        for token in tokens_of(message_id):
            there = await store.last(stream, prefix + token)
            if there is not None and there.record.message_id == message_id:
                return stream, prefix, there
    return None


async def _change_due(store: Store, token: str, there: Stored, delay: float) -> bool:
    """Let a delayed message be due at another time, in one step. Return False if it has moved.

    A message that is due may be on its way to the queue: it is moved there first.
    """
    names, now = store.names, clock.utc_now().timestamp()
    await store.finish_writes([there.record])
    async with store.writing():
        if delay and (there.record.due or 0.0) > now:
            later = replace(there.record, due=now + delay)
            added = await store.add(Add(names.to_delayed + token, later.encode(), there.sequence))
            if added.sequence:
                await store.count_moves()
            return added.sequence > 0
        added = await store.add(move_to_queue(names, token, there.record, there.sequence))
        if not added.sequence:
            return False
        was_there = await store.remove(names.delayed, there.sequence)
        if not added.duplicate:
            await store.count_moves()
            if not was_there:  # it was cancelled just now
                await store.remove(names.queue, added.sequence)
                return False
    return not delay


async def _delay(store: Store, token: str, there: Stored, delay: float) -> bool:
    """Move a pending message to the delayed ones. Return False if it has left the queue."""
    names = store.names
    await store.finish_writes([there.record])
    later = replace(there.record, due=clock.utc_now().timestamp() + delay)
    async with store.writing():
        added = await store.add_or_replace(Add(names.to_delayed + token, later.encode()), later.message_id)
        if not added.sequence:
            return False
        await store.count_moves()
        if not await store.remove(names.queue, there.sequence):
            await store.remove(names.delayed, added.sequence)
            return False
    return True
