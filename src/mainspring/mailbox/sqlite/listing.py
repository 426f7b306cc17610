"""Lists of unfinished messages, in pages. A page walks along one index or two, and looks at a bounded number of their entries.

A list goes along the small rows of its place: the pending messages as they wait at limiters and then in the order of delivery,
the delayed ones in the order of their sends, those in flight by their leases. If fewer messages are of the task or the key that
is asked for, it goes along those, and leaves out those of another place. With a date, it goes the other way round: the latest
sends are mostly at the end. No list looks at rows of another mailbox.

Where a page has ended is said by the table of the walk, and the place of the last entry on it.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mainspring.mailbox.message import MessagePage, MessagePlace, MessageQuery
from mainspring.mailbox.sqlite import schema as sql
from mainspring.mailbox.sqlite.lookup import Spot, unfinished

if TYPE_CHECKING:
    from mainspring.mailbox.job_commands import ListMessages
    from mainspring.mailbox.sqlite.unit_of_work import UnitOfWork

LOOK_AT: Final = 2_000
"""How many entries one page looks at, where it may find less than it looks at."""
COUNT_AT_MOST: Final = 50_000
"""How many messages of a task or a key are counted to choose a way."""


class Walk(NamedTuple):
    """A way along an index: its table, the columns that are equal for all entries, and the columns of the order."""

    table: str
    equal: tuple[str, ...]
    order: tuple[str, ...]


_WAITING = Walk("waiting", ("mailbox",), ("task", "name", "rank", "pos", "seq"))
_READY = Walk("ready", ("mailbox",), ("rank", "pos", "seq"))
_DELAYED = Walk("delayed", ("mailbox",), ("seq",))
_LEASES = Walk("leases", ("mailbox",), ("lease",))
_OF_TASK = Walk("messages", ("mailbox", "task"), ("seq",))
_OF_KEY = Walk("messages", ("mailbox", "key"), ("task", "rank", "place", "seq"))
_OF_BOTH = Walk("messages", ("mailbox", "key", "task"), ("rank", "place", "seq"))
_BY_PLACE: Final = {
    MessagePlace.DELAYED: [_DELAYED],
    MessagePlace.PENDING: [_WAITING, _READY],
    MessagePlace.IN_FLIGHT: [_LEASES],
}


def list_messages(work: UnitOfWork, commands: list[ListMessages]) -> None:
    """List pages of unfinished messages."""
    for command in commands:
        command.result = _page(work, command.mailbox, command.query)


def _page(work: UnitOfWork, mailbox: int, query: MessageQuery) -> MessagePage:
    walks, after = _begin(query) or (_walks(work, mailbox, query), [])
    chosen: dict[int, Spot] = {}
    look_at, looked_at = query.limit, 0
    while True:
        walk = walks[0]
        entries = _entries(work, walk, mailbox, query, after, look_at)
        looked_at += len(entries)
        wanted = _wanted(work, walk, mailbox, query, entries)
        for entry in entries:
            if len(chosen) == query.limit:
                return _of(work, chosen, json.dumps([walk.table, *after]))
            after = list(entry[:-1])
            if entry[-1] in wanted:
                chosen[entry[-1]] = Spot(query.place, wanted[entry[-1]])
        if len(entries) < look_at:
            walks, after = walks[1:], []
            if not walks:
                return _of(work, chosen, None)
        elif len(chosen) == query.limit or looked_at >= LOOK_AT:
            return _of(work, chosen, json.dumps([walk.table, *after]))
        look_at = min(2 * look_at, max(query.limit, LOOK_AT - looked_at))  # the next ones may not be wanted, either


def _walks(work: UnitOfWork, mailbox: int, query: MessageQuery) -> list[Walk]:
    """Return the ways to the messages of a list: along the place, or along the task or the key if that has fewer messages."""
    by_place, narrow = _ways(query)
    if narrow is None:
        return by_place
    delayed, pending, in_flight, _, _ = work.counts(mailbox)
    there = {MessagePlace.DELAYED: delayed, MessagePlace.PENDING: pending, MessagePlace.IN_FLIGHT: in_flight}[
        query.place
    ]
    at_most = min(there, COUNT_AT_MOST)
    equal = " AND ".join(f"{column} = ?" for column in narrow.equal)
    count = f"SELECT count(*) FROM (SELECT 1 FROM messages WHERE {equal} LIMIT ?)"  # noqa: S608 - constants
    is_less = there > LOOK_AT and work.value(count, (*_given(narrow, mailbox, query), at_most)) < at_most
    return [narrow] if is_less else by_place


def _ways(query: MessageQuery) -> tuple[list[Walk], Walk | None]:
    """Return the walks along a place, and that along a task or a key, if any. With a date, the last one comes first."""
    by_place, narrow = _BY_PLACE[query.place], None
    if query.key is not None:
        narrow = _OF_KEY if query.task is None else _OF_BOTH
    elif query.task is not None:
        narrow = _OF_TASK
    return by_place if query.since is None else by_place[::-1], narrow


def _begin(query: MessageQuery) -> tuple[list[Walk], list[Any]] | None:
    """Return the walks to go on with, and the entry to go on behind in the first; None: a list begins."""
    try:
        table, *entry = json.loads(query.after or "")
    except (ValueError, TypeError):
        return None
    by_place, narrow = _ways(query)
    for walks in ([narrow] if narrow else [], by_place, by_place[1:]):
        known = all(isinstance(value, (int, float, str)) for value in entry)
        if walks and walks[0].table == table and known and len(entry) in {0, len(walks[0].order)}:
            return walks, entry
    return None


def _given(walk: Walk, mailbox: int, query: MessageQuery) -> list[Any]:
    """Return the values of the columns that are equal for all entries of a walk."""
    given = {"mailbox": mailbox, "task": query.task, "key": query.key}
    return [given[column] for column in walk.equal]


def _entries(
    work: UnitOfWork, walk: Walk, mailbox: int, query: MessageQuery, after: list[Any], most: int
) -> list[tuple[Any, ...]]:
    """Return the next entries of a walk: the columns that give its order, and the number of the message."""
    conditions = [f"{column} = ?" for column in walk.equal]
    columns = ", ".join(walk.order)
    back = query.since is not None
    if after:
        conditions.append(f"({columns}) {'<' if back else '>'} ({', '.join('?' * len(after))})")
    order = ", ".join(f"{column} DESC" for column in walk.order) if back else columns
    where = " AND ".join(conditions)
    statement = f"SELECT {columns}, seq FROM {walk.table} WHERE {where} ORDER BY {order} LIMIT ?"  # noqa: S608 - constants
    return work.rows(statement, (*_given(walk, mailbox, query), *after, most))


def _wanted(
    work: UnitOfWork, walk: Walk, mailbox: int, query: MessageQuery, entries: list[tuple[Any, ...]]
) -> dict[int, float | None]:
    """Return the numbers of the messages that are wanted, and since or until when they are where they are."""
    statement = sql.LISTED[query.place if walk.table == "messages" else walk.table]
    numbers = [entry[0 if walk is _LEASES else -1] for entry in entries]
    since = -math.inf if query.since is None else query.since
    narrowed = (query.task, query.task, query.key, query.key)
    return dict(work.rows(statement, (json.dumps(numbers), mailbox, since, *narrowed)))


def _of(work: UnitOfWork, chosen: dict[int, Spot], after: str | None) -> MessagePage:
    rows = {row[0]: row for row in work.rows(sql.FIND_BY_NUMBER, (json.dumps(list(chosen)),))}
    return MessagePage([unfinished(rows[number], spot) for number, spot in chosen.items()], after)
