"""Lists of the unfinished messages of a mailbox on NATS: a walk along the numbers of a stream.

A stream has no index but its numbers and subjects. So each message is read, and messages that do not fit are left out here.
The delayed messages have a stream of their own. In the queue, the numbers that the consumer has delivered are in flight, and
later numbers are pending, as :mod:`mainspring.mailbox.nats.lookup` tells them apart.
"""

from __future__ import annotations

import math
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from mainspring.mailbox.message import MessagePage, MessagePlace, UnfinishedMessage
from mainspring.mailbox.nats.lookup import seen_queued

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.mailbox.message import MessageQuery
    from mainspring.mailbox.nats.claims import Claims
    from mainspring.mailbox.nats.messages import StoredMessage
    from mainspring.mailbox.nats.streams import Store, Stored

    See: TypeAlias = Callable[[Stored], UnfinishedMessage]

LOOK_AT_MOST: Final = 1_000
"""Numbers of a stream that one page asks for."""
WIDEST: Final = 64
"""Numbers that are asked for at once. Where most of them are missing, fewer are, and the walk jumps from message to message."""


async def list_messages(store: Store, claims: Claims, query: MessageQuery) -> MessagePage:
    """See :meth:`Backend.list_messages`. ``after`` is the number of the last message that was looked at."""
    names = store.names
    after = int(query.after) if query.after is not None and query.after.isascii() and query.after.isdigit() else 0
    if query.place is MessagePlace.DELAYED:
        return await _page(query, store, names.delayed, after, math.inf, _seen_delayed)
    delivered = await store.delivered()
    see = partial(seen_queued, claims=claims, delivered=delivered)
    if query.place is MessagePlace.IN_FLIGHT:
        return await _page(query, store, names.queue, after, delivered, see)
    over = [there for there in await claims.ended_leases() if there.sequence > after]
    over.sort(key=attrgetter("sequence"))
    return await _page(query, store, names.queue, max(after, delivered), math.inf, see, over)


async def _page(
    query: MessageQuery, store: Store, stream: str, after: int, last: float, see: See, first: Sequence[Stored] = ()
) -> MessagePage:
    """Return the wanted messages among ``first`` and those of the stream behind the number ``after``, up to ``last``."""
    found: list[UnfinishedMessage] = []
    looked, width, block = 0, WIDEST, [*first]
    while True:
        for there in block:
            if there.sequence > last:
                return MessagePage(found, None)
            if _is_wanted(there.record, query) and (seen := see(there)).place is query.place:
                found.append(seen)
                if len(found) == query.limit:
                    return MessagePage(found, str(there.sequence))
        if looked >= LOOK_AT_MOST:
            return MessagePage(found, str(after))
        block = await store.block(stream, after + 1, width)
        if not block:
            return MessagePage(found, None)
        looked += width
        after = max(after + width, block[-1].sequence)
        width = min(WIDEST, 2 * width) if 2 * len(block) > width else max(1, width // 2)


def _is_wanted(record: StoredMessage, query: MessageQuery) -> bool:
    return (
        query.task in (None, record.task)
        and query.key in (None, record.key)
        and (query.since is None or record.enqueued_at >= query.since)
    )


def _seen_delayed(there: Stored) -> UnfinishedMessage:
    record = there.record
    return UnfinishedMessage(record.before_delivery(), MessagePlace.DELAYED, record.due, key=record.key)
