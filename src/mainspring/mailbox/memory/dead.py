"""The dead letters of the in-memory queue, oldest first."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

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

    def __len__(self) -> int:
        return len(self._letters)

    def add(self, entry: QueuedMessage, why: Dead, at: float) -> None:
        """Keep a message that has died."""
        self._letters[entry.message_id] = (entry, why, at)

    def page(self, limit: int, after: str | None) -> list[tuple[ClaimedMessage, Dead, float]]:
        """Return at most ``limit``, behind ``after`` (an unknown id is before all)."""
        found = iter(self._letters.items())
        if after in self._letters:
            for message_id, _ in found:
                if message_id == after:
                    break
        return [letter for _, letter in islice(found, limit)]

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

    def messages(self) -> Iterator[QueuedMessage]:
        """Yield all."""
        for entry, _, _ in self._letters.values():
            yield entry
