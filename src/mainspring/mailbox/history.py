"""A message's history: what went wrong in its attempts. Plain text that a store keeps with it; decided here, not there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime

LAST = 10
"""The most failures that are kept: the latest ones."""
ERROR_SIZE = 500
"""Characters that are kept of each error's text."""
LEASE_EXPIRED = "LeaseExpired"
"""The ``error_type`` of an attempt that ended without a word: its worker died, or lost the store."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One charged attempt of a message that came to nothing.

    ``at`` is None, and ``error_type`` ``"LeaseExpired"``, for an attempt whose lease ran out: nobody saw its end.
    """

    attempt: int
    error: str
    error_type: str
    at: datetime | None


def remember(history: str | None, attempt: int, error: str, error_type: str, at: float) -> str:
    """``history`` with the failure of attempt number ``attempt`` at ``at`` (POSIX seconds), and those nobody told of before."""
    failures = _gaps(_rows(history), attempt)
    failures.append((attempt, error[:ERROR_SIZE], error_type, at))
    return json.dumps(failures[-LAST:])


def silences(history: str | None, attempt: int) -> str:
    """``history`` with the attempts before number ``attempt`` that nobody told of: their leases ran out."""
    return json.dumps(_gaps(_rows(history), attempt)[-LAST:])


def without_oldest(history: str) -> str | None:
    """``history`` without its oldest failure; None where there is none left."""
    rows = _rows(history)[1:]
    return json.dumps(rows) if rows else None


def read_history(history: str | None) -> tuple[Failure, ...]:
    """The failures, oldest first; none where another program has written what is no history."""
    return tuple(
        Failure(attempt, error, kind, None if at is None else datetime.fromtimestamp(at, UTC))
        for attempt, error, kind, at in _rows(history)
    )


_Row = tuple[int, str, str, float | None]


def _rows(history: str | None) -> list[_Row]:
    if history is None:
        return []
    try:
        return [
            (int(attempt), str(error), str(kind), None if at is None else float(at))
            for attempt, error, kind, at in json.loads(history)
        ]
    except (ValueError, TypeError, RecursionError):
        return []


def _gaps(rows: list[_Row], attempt: int) -> list[_Row]:
    seen = rows[-1][0] if rows else 0
    silence = "its lease ran out: its worker died, or lost the store"
    return rows + [(silent, silence, LEASE_EXPIRED, None) for silent in range(max(seen + 1, attempt - LAST), attempt)]
