"""The dead letters of the in-memory queue, oldest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from mainspring.mailbox.memory.listing import NumberedIds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mainspring.mailbox.memory.queue import QueuedMessage
    from mainspring.mailbox.message import ClaimedMessage, Dead

Letter: TypeAlias = "tuple[QueuedMessage, Dead, float]"
"""A dead message, why it died, and when (POSIX seconds)."""


class MemoryDeadLetters:
    """Messages that were given up, by their ids."""

    def __init__(self) -> None:
        self._letters: dict[str, Letter] = {}
        self._ids: NumberedIds[str | None] = NumberedIds(self._letters)  # of all (None), and by task

    def __len__(self) -> int:
        return len(self._letters)

    def add(self, entry: QueuedMessage, why: Dead, at: float) -> None:
        """Keep a message that has died."""
        self._letters[entry.message_id] = (entry, why, at)
        self._ids.add(entry.message_id, {None, entry.task})

    def page(self, limit: int, after: str | None, task: str | None = None) -> list[tuple[ClaimedMessage, Dead, float]]:
        """Return at most ``limit``, of all or of a task, behind ``after`` (an unknown id is before all)."""
        found: list[tuple[ClaimedMessage, Dead, float]] = []
        last: int | None = self._ids.number_of(after)
        while last is not None and len(found) < limit:
            items, last = self._ids.behind(task, last, limit - len(found))
            found += [self._letters[message_id] for _, message_id in items]
        return found

    def named(self, message_ids: list[str] | None) -> list[str]:
        """Return the ids among these that belong to dead letters, once each; all (None)."""
        if message_ids is None:
            return list(self._letters)
        return [message_id for message_id in dict.fromkeys(message_ids) if message_id in self._letters]

    def find(self, message_ids: list[str]) -> list[tuple[ClaimedMessage, Dead, float]]:
        """Return those of ``message_ids``."""
        return [self._letters[message_id] for message_id in self.named(message_ids)]

    def take(self, message_ids: list[str] | None) -> Iterator[QueuedMessage]:
        """Take out the dead letters of ``message_ids``, or all (None)."""
        for message_id in self.named(message_ids):
            yield self._letters.pop(message_id)[0]
        if not self._letters:
            self._ids = NumberedIds(self._letters)

    def messages(self) -> Iterator[QueuedMessage]:
        """Yield all."""
        for entry, _, _ in self._letters.values():
            yield entry
