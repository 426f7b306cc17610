"""Lists of unfinished messages, in pages. A page walks along one index or two, and looks at a bounded number of their entries.

Without a task and a key, a list goes along the small rows of its place: the pending messages as they wait at limiters and then
in the order of delivery, the delayed ones in the order of their sends, those in flight by their leases. With a task or a key it
goes along its messages, and leaves out those of another place; but those in flight are few, and always found by their leases.
With a date, it goes the other way round: what was sent late is mostly at the end. No list looks at rows of another mailbox.

Where a page has ended is said by the walk, and the place of the last entry on it.
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


def list_messages(work: UnitOfWork, commands: list[ListMessages]) -> None:
    """List pages of unfinished messages."""
    for command in commands:
        command.result = _page(work, command.mailbox, command.query)


def _page(work: UnitOfWork, mailbox: int, query: MessageQuery) -> MessagePage:
    walks = _walks(query)
    number, after = _begin(query.after, walks)
    chosen: dict[int, Spot] = {}
    while True:
        walk = walks[number]
        look_at = query.limit if walk in {_WAITING, _READY} and query.since is None else max(query.limit, LOOK_AT)
        entries = _entries(work, walk, mailbox, query, after, look_at)
        wanted = _wanted(work, walk, mailbox, query, entries)
        for entry in entries:
            if len(chosen) == query.limit:
                return _of(work, chosen, json.dumps([number, *after]))
            after = list(entry[:-1])
            if entry[-1] in wanted:
                chosen[entry[-1]] = Spot(query.place, wanted[entry[-1]])
        if len(entries) == look_at:
            return _of(work, chosen, json.dumps([number, *after]))
        number, after = number + 1, []
        if number == len(walks):
            return _of(work, chosen, None)


def _walks(query: MessageQuery) -> list[Walk]:
    """Return the ways to the messages of a list. With a date, the last one comes first."""
    if query.place is MessagePlace.IN_FLIGHT:
        walks = [_LEASES]
    elif query.key is not None:
        walks = [_OF_KEY if query.task is None else _OF_BOTH]
    elif query.task is not None:
        walks = [_OF_TASK]
    else:
        walks = [_DELAYED] if query.place is MessagePlace.DELAYED else [_WAITING, _READY]
    return walks if query.since is None else walks[::-1]


def _begin(after: str | None, walks: list[Walk]) -> tuple[int, list[Any]]:
    """Return the walk to go on with, by number, and the entry to go on behind; none: at its beginning."""
    try:
        number, *entry = json.loads(after or "")
        walk = walks[number]
    except (ValueError, TypeError, IndexError):
        return 0, []
    known = all(isinstance(value, (int, float, str)) for value in entry) and len(entry) in {0, len(walk.order)}
    return (number, entry) if known else (0, [])


def _entries(
    work: UnitOfWork, walk: Walk, mailbox: int, query: MessageQuery, after: list[Any], most: int
) -> list[tuple[Any, ...]]:
    """Return the next entries of a walk: the columns that give its order, and the number of the message."""
    given = {"mailbox": mailbox, "task": query.task, "key": query.key}
    conditions = [f"{column} = ?" for column in walk.equal]
    columns = ", ".join(walk.order)
    back = query.since is not None
    if after:
        conditions.append(f"({columns}) {'<' if back else '>'} ({', '.join('?' * len(after))})")
    order = ", ".join(f"{column} DESC" for column in walk.order) if back else columns
    where = " AND ".join(conditions)
    statement = f"SELECT {columns}, seq FROM {walk.table} WHERE {where} ORDER BY {order} LIMIT ?"  # noqa: S608 - constants
    return work.rows(statement, (*(given[column] for column in walk.equal), *after, most))


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
