"""``Journal``: what happened in a run, as data that becomes text when somebody reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened: when, to whom (``w0.2``: the second life of worker 0), what, and to which message."""

    at: float
    lane: str
    what: str
    message: str = ""
    detail: str = ""

    def __str__(self) -> str:
        message = f" {self.message}" if self.message else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.at:12.3f} {self.lane:<8} {self.what}{message}{detail}"


class Journal:
    """The entries of a run, in order. Messages are named m1, m2 … in the order in which the store accepted them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: list[tuple[float, str, str, str, str]] = []
        self.closed_at: float | None = None

    def add(self, lane: str, what: str, message: str = "", detail: str = "") -> None:
        """Note it; after the end of the run nothing is noted any more."""
        if self.closed_at is None:
            self._entries.append((self._clock(), lane, what, message, detail))

    def close(self) -> None:
        """The run is over."""
        if self.closed_at is None:
            self.closed_at = self._clock()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return (Entry(*entry) for entry in self._entries)

    def lines(self) -> list[str]:
        """All of it as text, one line an entry."""
        return [str(entry) for entry in self]

    def of(self, messages: Iterable[str], most: int = 20) -> list[str]:
        """The last ``most`` lines about ``messages``."""
        wanted = set(messages)
        return [str(Entry(*entry)) for entry in self._entries if entry[3] in wanted][-most:]
