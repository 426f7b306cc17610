"""A message's history: what went wrong in its attempts. Plain text that a store keeps with it; decided here, not there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

LAST = 10
"""The most failures that are kept: the latest ones."""
ERROR_SIZE = 500
"""Characters that are kept of each error's text."""
LEASE_EXPIRED = "LeaseExpired"
"""The ``error_type`` of an attempt that ended without a word: its worker died, or lost the store."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One charged attempt of a message that came to nothing.

    ``at`` is None, and ``error_type`` ``"LeaseExpired"``, for an attempt whose lease ran out: its worker told no end.
    """

    attempt: int
    error: str
    error_type: str
    at: datetime | None


def remember(history: str | None, attempt: int, error: str, error_type: str, at: float) -> str:
    """Return ``history`` with the failure of this attempt at ``at`` (POSIX seconds), and the silent ones before it."""
    known = _filled(_read(history), attempt)
    return _written(known._replace(rows=[*known.rows, (attempt, error[:ERROR_SIZE], error_type, at)]))


def silences(history: str | None, attempt: int) -> str:
    """Return ``history`` with the attempts before number ``attempt`` of which no failure was told: their leases ran out."""
    return _written(_filled(_read(history), attempt))


def crashes_before(history: str | None, attempt: int) -> int:
    """Return how many attempts before number ``attempt`` ended with their worker: no failure of theirs was told."""
    known = _filled(_read(history), attempt)
    return known.crashes + sum(at is None for _, _, _, at in known.rows)


def without_oldest(history: str) -> str | None:
    """Return ``history`` without its oldest failure, or None if there is none left to drop."""
    known = _read(history)
    return _written(known, len(known.rows) - 1) if known.rows else None


def read_history(history: str | None) -> tuple[Failure, ...]:
    """Return the failures, oldest first; none where another program has written what is no history."""
    return tuple(
        Failure(attempt, error, kind, None if at is None else datetime.fromtimestamp(at, UTC))
        for attempt, error, kind, at in _read(history).rows
    )


_Row = tuple[int, str, str, float | None]


class _Known(NamedTuple):
    """A history, read. Its rows are of consecutive attempts; those up to number ``until`` have none (any more).

    ``crashes`` is how many of these ended with their worker: the number outlives the rows.
    """

    rows: list[_Row]
    until: int = 0
    crashes: int = 0


def _read(history: str | None) -> _Known:
    if history is None:
        return _Known([])
    try:
        found = json.loads(history)
        until, crashes, found = (0, 0, found) if isinstance(found, list) else found["before"] + [found["failures"]]
        rows = [
            (int(attempt), str(error), str(kind), None if at is None else float(at))
            for attempt, error, kind, at in found
        ]
        return _Known(rows, rows[0][0] - 1 if rows else int(until), int(crashes))
    except (ValueError, TypeError, LookupError, RecursionError):
        return _Known([])


def _written(known: _Known, most: int = LAST) -> str:
    """Return ``known`` with its latest ``most`` rows as text: a list of them, unless that would not tell of earlier crashes."""
    dropped = known.rows[: max(0, len(known.rows) - most)]
    rows = known.rows[len(dropped) :]
    until = dropped[-1][0] if dropped else known.until
    crashes = known.crashes + sum(at is None for _, _, _, at in dropped)
    if not crashes and (rows or not until):
        return json.dumps(rows)
    return json.dumps({"before": [until, crashes], "failures": rows})


def _filled(known: _Known, attempt: int) -> _Known:
    """Return ``known`` with a row for each attempt before number ``attempt`` that has none, but at most the last ones."""
    seen = known.rows[-1][0] if known.rows else known.until
    first = max(seen + 1, attempt - LAST)
    silence = "its lease ran out: its worker died, or lost the store"
    silent: list[_Row] = [(number, silence, LEASE_EXPIRED, None) for number in range(first, attempt)]
    if first > seen + 1:  # what was known before is further back than what is kept
        lost = sum(at is None for _, _, _, at in known.rows)
        return _Known(silent, first - 1, known.crashes + lost + first - 1 - seen)
    return known._replace(rows=known.rows + silent)
