"""Lists of the unfinished messages of the in-memory queue, in the order in which they came. The first query makes them."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from mainspring.mailbox.memory.queue import QueuedMessage
    from mainspring.mailbox.message import MessageQuery

Group: TypeAlias = tuple[str | None, str | None]
"""A task and a key; None: all of them."""

LOOK_AT_MOST: Final = 10_000
"""Messages that one page looks at."""


class MemoryListing:
    """The ids of messages in the order of their numbers, for each task and key.

    An id that is gone stays until more are gone than are there.
    """

    __slots__ = ("_groups", "_known", "_last", "_number_of")

    def __init__(self, known: Mapping[str, QueuedMessage]) -> None:
        self._known = known
        self._groups: dict[Group, list[tuple[int, str]]] = {(None, None): []}
        self._number_of: dict[str, int] = {}
        self._last = 0
        for entry in sorted(known.values(), key=lambda entry: entry.enqueued_at):
            self.add(entry)

    def add(self, entry: QueuedMessage) -> None:
        """Note a message that has come."""
        self._last += 1
        self._number_of[entry.message_id] = self._last
        for group in _groups_of(entry):
            self._groups.setdefault(group, []).append((self._last, entry.message_id))
        if len(self._number_of) > 2 * len(self._known) + LOOK_AT_MOST:
            self._sweep()

    def page(
        self, query: MessageQuery, is_wanted: Callable[[QueuedMessage], bool]
    ) -> tuple[list[QueuedMessage], str | None]:
        """Return up to ``query.limit`` of the wanted messages, and where the next page begins."""
        items = self._groups.get((query.task, query.key), [])
        after = int(query.after) if query.after is not None and query.after.isascii() and query.after.isdigit() else 0
        start = bisect_right(items, (after, "\U0010ffff"))
        found: list[QueuedMessage] = []
        for number, message_id in items[start : start + LOOK_AT_MOST]:
            if len(found) == query.limit:
                return found, str(after)
            entry = self._known.get(message_id)
            if entry is not None and self._number_of[message_id] == number and is_wanted(entry):
                found.append(entry)
            after = number
        return found, str(after) if len(items) > start + LOOK_AT_MOST else None

    def _sweep(self) -> None:
        self._number_of = {name: number for name, number in self._number_of.items() if name in self._known}
        number_of = self._number_of
        for group, items in [*self._groups.items()]:
            self._groups[group] = [item for item in items if number_of.get(item[1]) == item[0]]
            if not self._groups[group] and group != (None, None):
                del self._groups[group]


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
