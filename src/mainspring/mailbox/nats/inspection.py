"""Inspection of a mailbox on NATS: counts, purge, dead letters, and the removal of abandoned transient mailboxes."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from mainspring.core import clock
from mainspring.errors import MailboxConnectionError, MailboxError
from mainspring.mailbox.backend import TRANSIENT, TRANSIENT_LIFE
from mainspring.mailbox.message import Counts
from mainspring.mailbox.nats.client import NO_STREAM, ApiError, is_gone, parse
from mainspring.mailbox.nats.connection import Request
from mainspring.mailbox.nats.listing import WIDEST
from mainspring.mailbox.nats.messages import read_dead, token_of
from mainspring.mailbox.nats.names import CONSUMER, Names, encoded
from mainspring.mailbox.nats.streams import Add

if TYPE_CHECKING:
    from mainspring.mailbox.message import ClaimedMessage, Dead
    from mainspring.mailbox.nats.claims import Claims
    from mainspring.mailbox.nats.connection import NatsConnection
    from mainspring.mailbox.nats.messages import StoredMessage
    from mainspring.mailbox.nats.streams import Store, Stored

_CALL: Final = re.compile(rb'\{"task":"([A-Za-z0-9_.:/-]+)","args":')


async def has_streams(connection: NatsConnection, names: Names) -> bool:
    """See :meth:`Mailbox.exists`: return True if the server has any of the mailbox's streams."""
    for answer in await connection.request_all([Request(f"$JS.API.STREAM.INFO.{stream}") for stream in names.streams]):
        if isinstance(answer, MailboxError):
            raise answer
        try:
            parse(answer)
        except ApiError as error:
            if error.code != NO_STREAM:
                raise
        else:
            return True
    return False


async def counts(store: Store, claims: Claims) -> Counts:
    """See :meth:`Backend.counts`.

    The accepted messages are all that were ever added to the queue and the delayed stream, less the additions that only
    moved one. A settled message is in no stream. So the parts add up, whatever moves meanwhile.
    """
    names = store.names
    streams = (names.queue, names.delayed, names.dead, names.moves)
    requests = [Request(f"$JS.API.STREAM.INFO.{stream}") for stream in streams]
    requests.append(Request(f"$JS.API.CONSUMER.INFO.{names.queue}.{CONSUMER}"))
    async with store.lock.reading():
        await claims.await_consumer()
        over = await claims.ended_leases()
        answers = []
        for request, answer in zip(requests, await store.connection.request_all(requests), strict=True):
            if isinstance(answer, MailboxError):
                raise answer
            try:
                answers.append(parse(answer))
            except ApiError as error:
                if not is_gone(error):
                    raise
                answers.append(await store.api(request.subject.removeprefix("$JS.API.")))
    queue, delayed, dead, moves = (answer["state"] for answer in answers[:4])
    in_flight = min(max(0, answers[4]["num_ack_pending"] - len(over)), queue["messages"])
    pending = queue["messages"] - in_flight
    age = await _queue_age(store, answers[4]["delivered"]["stream_seq"], over) if pending else 0.0
    accepted = queue["last_seq"] + delayed["last_seq"] - moves["last_seq"]
    present = queue["messages"] + delayed["messages"] + dead["messages"]
    return Counts(
        delayed["messages"],
        pending,
        in_flight,
        max(0, accepted - present),
        dead["messages"],
        queue_age=age,
    )


async def _queue_age(store: Store, delivered: int, over: list[Stored]) -> float | None:
    """Return the seconds since the send of the oldest of two kinds: the first message behind those delivered, and
    those in ``over``.

    None if there is neither: then only the consumer knows which messages are pending.
    """
    first = await store.next(store.names.queue, delivered + 1, ">")
    known = over if first is None else [first, *over]
    now = clock.utc_now().timestamp()
    return max((max(0.0, now - there.record.enqueued_at) for there in known), default=None)


async def purge(store: Store) -> int:
    """See :meth:`Backend.purge`."""
    names = store.names
    async with store.lock.writing():
        dropped = await store.purge(names.delayed) + await store.purge(names.queue)
        await store.purge(names.expiries)
        await store.purge(names.checkpoints)
    return dropped


async def sweep_transient(store: Store) -> None:
    """Delete the transient mailboxes that no process has had open for a day."""
    beginning = f"mainspring-queue_{encoded(TRANSIENT)}"
    offset = 0
    while True:
        page = await store.connection.api("STREAM.LIST", {"subject": "mainspring.*.queue.*", "offset": offset})
        streams = page.get("streams") or []
        for stream in streams:
            name = stream["config"]["name"]
            if name.startswith(beginning) and _old(stream["created"]) and await _unused(store, name):
                await store.destroy(Names.of_encoded(name.removeprefix("mainspring-queue_")))
        offset += len(streams)
        if not streams or offset >= page.get("total", 0):
            return


async def _unused(store: Store, stream: str) -> bool:
    info: dict[str, Any] = await store.connection.api(f"CONSUMER.INFO.{stream}.{CONSUMER}")
    last = info["delivered"].get("last_active")
    return not info.get("num_waiting") and (last is None or _old(last))


def _old(date: str) -> bool:
    then = datetime.fromisoformat(date[:19] + "+00:00")
    return (clock.utc_now() - then).total_seconds() > TRANSIENT_LIFE


async def dead_letters(
    store: Store, limit: int, after: str | None, task: str | None = None
) -> list[tuple[ClaimedMessage, Dead, float]]:
    """See :meth:`Backend.dead_letters`. The stream has no index by task: all dead letters are read, in blocks."""
    start = 1
    if after is not None:
        for stored in await _by_ids(store, [after]):
            start = stored.sequence + 1
    return [_letter(stored) for stored in await _page_from(store, start, limit, task)]


async def find_dead_letters(store: Store, message_ids: list[str]) -> list[tuple[ClaimedMessage, Dead, float]]:
    """See :meth:`Backend.find_dead_letters`."""
    return [_letter(stored) for stored in await _by_ids(store, message_ids)]


async def replay_dead_letters(store: Store, message_ids: list[str] | None) -> int:
    """See :meth:`Backend.replay_dead_letters`."""
    count = 0
    start = 1
    while True:
        found = await _page_from(store, start, 100) if message_ids is None else await _by_ids(store, message_ids)
        for stored in found:
            count += await _replay(store, stored)
            start = stored.sequence + 1
        if message_ids is not None or len(found) < 100:
            return count


async def purge_dead_letters(store: Store, message_ids: list[str] | None) -> int:
    """See :meth:`Backend.purge_dead_letters`."""
    names = store.names
    if message_ids is None:
        return await store.purge(names.dead)
    found = await _by_ids(store, message_ids)
    count = 0
    for removed in await store.remove_all(names.dead, [stored.sequence for stored in found]):
        if isinstance(removed, MailboxError):
            raise removed
        count += removed
    return count


async def _replay(store: Store, stored: Stored) -> bool:
    """Add a dead letter to the queue, then remove it here. Return True if this call did: it is sent once, whatever
    others try."""
    names = store.names
    record = stored.record
    other = None
    if record.dedup_key is not None:
        for stream, prefix in ((names.queue, names.to_queue), (names.delayed, names.to_delayed)):
            other = other or await store.last(stream, prefix + record.token)
    taken = other is not None and other.record.message_id != record.message_id
    for _ in range(20):
        again = record.replayed(None if taken else record.dedup_key)
        async with store.writing():
            added = await store.add(Add(names.to_queue + again.token, again.encode(), 0))
            if added.sequence:
                await store.count_moves()
                return await store.remove(names.dead, stored.sequence)
            there = await store.last(names.queue, names.to_queue + again.token)
            if there is not None and there.record.message_id == record.message_id:  # by a process that could not finish
                return await store.remove(names.dead, stored.sequence)
        # Another message took the key just now, or its message has just been settled.
        taken = taken or there is not None
    raise MailboxConnectionError(f"the messages with the dedup key {record.dedup_key!r} came and went too fast")


async def _page_from(store: Store, start: int, limit: int, task: str | None = None) -> list[Stored]:
    """Return the dead letters from the number ``start`` on, of all or of a task. They are read in blocks, as lists are."""
    found: list[Stored] = []
    width = min(limit, WIDEST)
    while len(found) < limit and (block := await store.block(store.names.dead, start, width)):
        found += block if task is None else [stored for stored in block if _task_of(stored.record) == task]
        start = max(start + width, block[-1].sequence + 1)
        width = min(WIDEST, 2 * width) if 2 * len(block) > width else max(1, width // 2)
    return found[:limit]


def _task_of(record: StoredMessage) -> str | None:
    """Return the task of a dead letter. An earlier version wrote it in the body of a call alone."""
    call = _CALL.match(record.body) if record.task is None else None
    return record.task if call is None else call[1].decode()


async def _by_ids(store: Store, message_ids: list[str]) -> list[Stored]:
    """Return the dead letters with these ids, the oldest first."""
    wanted = dict.fromkeys(message_ids)
    subjects = [store.names.to_dead + token_of(each) for each in wanted]
    found: dict[int, Stored] = {}
    for stored in await store.last_all(store.names.dead, subjects):
        if isinstance(stored, MailboxError):
            raise stored
        if stored is not None and stored.record.message_id in wanted:
            found[stored.sequence] = stored
    return [found[sequence] for sequence in sorted(found)]


def _letter(stored: Stored) -> tuple[ClaimedMessage, Dead, float]:
    record = stored.record
    dead, at = read_dead(stored.headers, stored.stored_at)
    return record.before_delivery(), dead, at
