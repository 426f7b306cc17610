"""Durations and dates of the command line: what is typed, and what it means."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import typer

from mainspring.validation import UNITS, duration

LONGEST = 1e9
"""Seconds (31 years): more is a slip, and a date so far away may not exist."""


def seconds(given: str | float) -> float:
    """Return the seconds of ``"24h"``, ``"90s"``, ``"1.5d"`` or of a plain number; for options (``parser=seconds``)."""
    text = str(given)  # the default of an option is no text
    found = duration(text)
    if found is None or found > LONGEST:
        raise typer.BadParameter(f"{text!r} is no duration; write for example 90s, 30m, 24h or a number of seconds")
    return found


def duration_text(seconds: float) -> str:
    """Return a duration as an option takes it: ``24h``, ``1.5h``, ``90s``."""
    unit = next((unit for unit in ("h", "m") if seconds >= UNITS[unit] and seconds % (UNITS[unit] / 2) == 0), "s")
    return f"{seconds / UNITS[unit]:g}{unit}"


def instant(text: str) -> datetime:
    """Return the instant of a date and time in ISO 8601 with a time zone; for options (``parser=instant``)."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.utcoffset() is None:
        raise typer.BadParameter(
            f"{text!r} is no date and time with a time zone; write for example 2026-01-10T09:00:00Z or"
            " 2026-01-10T09:00:00+01:00"
        )
    return found


def ago(text: str) -> datetime:
    """Return the instant so long ago (``"24h"``), or of a date (ISO 8601, UTC without a zone); for options (``parser=ago``)."""
    from mainspring.core import clock

    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        try:
            found = clock.utc_now() - timedelta(seconds=seconds(text))
        except typer.BadParameter:
            raise typer.BadParameter(f"{text!r} is no time ago; write for example 30m, 24h, 7d, or a date") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
