"""Lists of the messages of the in-memory queue, in the order in which they came.

The first query makes that of the unfinished messages.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from mainspring.mailbox.memory.queue import QueuedMessage
    from mainspring.mailbox.message import MessageQuery

Group: TypeAlias = tuple[str | None, str | None]
"""A task and a key; None: all of them."""

G = TypeVar("G")

LOOK_AT_MOST: Final = 10_000
"""Messages that one page looks at."""


class NumberedIds(Generic[G]):
    """Ids in the order in which they were added, in groups.

    An id that is gone stays until more are gone than are there.

    :param known: what is there, by id.
    """

    __slots__ = ("_groups", "_known", "_last", "_number_of")

    def __init__(self, known: Mapping[str, object]) -> None:
        self._known = known
        self._groups: dict[G, list[tuple[int, str]]] = {}
        self._number_of: dict[str, int] = {}
        self._last = 0

    def add(self, message_id: str, groups: Iterable[G]) -> None:
        """Add an id at the end of these groups."""
        self._last += 1
        self._number_of[message_id] = self._last
        for group in groups:
            self._groups.setdefault(group, []).append((self._last, message_id))
        if len(self._number_of) > 2 * len(self._known) + LOOK_AT_MOST:
            self._sweep()

    def number_of(self, message_id: str | None) -> int:
        """Return the number of an id, or 0 if it is not there."""
        return 0 if message_id is None or message_id not in self._known else self._number_of[message_id]

    def behind(self, group: G, after: int, most: int) -> tuple[list[tuple[int, str]], int | None]:
        """Look at ``most`` ids of a group behind the number ``after``. Return those that are there, with their numbers.

        Also return the last number that was looked at; None at the end.
        """
        items = self._groups.get(group, [])
        start = bisect_right(items, (after, "\U0010ffff"))
        some = items[start : start + most]
        found = [item for item in some if item[1] in self._known and self._number_of[item[1]] == item[0]]
        return found, some[-1][0] if len(items) > start + most else None

    def _sweep(self) -> None:
        self._number_of = {name: number for name, number in self._number_of.items() if name in self._known}
        number_of = self._number_of
        for group, items in [*self._groups.items()]:
            self._groups[group] = [item for item in items if number_of.get(item[1]) == item[0]]
            if not self._groups[group]:
                del self._groups[group]


class MemoryListing:
    """The unfinished messages, by task and key."""

    __slots__ = ("_ids", "_known")

    def __init__(self, known: Mapping[str, QueuedMessage]) -> None:
        self._known = known
        self._ids: NumberedIds[Group] = NumberedIds(known)
        for entry in sorted(known.values(), key=lambda entry: entry.enqueued_at):
            self.add(entry)

    def add(self, entry: QueuedMessage) -> None:
        """Note a message that has come."""
        self._ids.add(entry.message_id, _groups_of(entry))

    def page(
        self, query: MessageQuery, is_wanted: Callable[[QueuedMessage], bool]
    ) -> tuple[list[QueuedMessage], str | None]:
        """Return up to ``query.limit`` of the wanted messages, and where the next page begins."""
        after = int(query.after) if query.after is not None and query.after.isascii() and query.after.isdigit() else 0
        items, last = self._ids.behind((query.task, query.key), after, LOOK_AT_MOST)
        found: list[QueuedMessage] = []
        for number, message_id in items:
            if len(found) == query.limit:
                return found, str(after)
            entry = self._known[message_id]
            if is_wanted(entry):
                found.append(entry)
            after = number
        return found, None if last is None else str(last)


def _groups_of(entry: QueuedMessage) -> Iterable[Group]:
    yield None, None
    if entry.task is not None:
        yield entry.task, None
        if entry.key is not None:
            yield entry.task, entry.key
            yield None, entry.key


def sent_since(query: MessageQuery) -> float:
    """Return the date from which on messages are wanted."""
    return -math.inf if query.since is None else query.since
