"""The numbers that users give: which are seconds and which are counts, and the longest times there can be."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any, TypeAlias, TypeGuard, TypeVar

MAX_DELAY = 366 * 86_400.0
"""The longest delay of a message, in seconds."""
MAX_LIMIT = 1_000_000_000
"""The most of a concurrency and of a rate, as each store keeps it."""
MAX_VISIBILITY = 43_200.0
"""The longest lease, in seconds: twelve hours."""

V = TypeVar("V")

Seconds: TypeAlias = float | timedelta
"""A time that callers give: a number of seconds, or a timedelta."""


def as_seconds(value: timedelta | V) -> float | V:
    """Return ``value`` in seconds where it is a timedelta, else as it is."""
    return value.total_seconds() if isinstance(value, timedelta) else value


UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
"""The seconds of each unit that a duration may be written in."""


def duration(value: Any) -> float | None:
    """Return the seconds of a number, a timedelta or a text (``"90s"``, ``"5m"``, ``"1h"``, ``"30d"``); None if it is none."""
    seconds = as_seconds(value)
    if isinstance(seconds, str):
        number, unit = (seconds[:-1], seconds[-1]) if seconds and seconds[-1] in UNITS else (seconds, "s")
        try:
            seconds = float(number) * UNITS[unit]
        except ValueError:
            return None
    return float(seconds) if is_number(seconds, 0) else None


def is_number(value: object, least: float, most: float = sys.float_info.max) -> bool:
    """True if ``value`` is a number from ``least`` to ``most``, finite where nothing else is said; a bool and NaN are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def is_whole(value: Any, least: int | None = None) -> TypeGuard[int]:
    """True if ``value`` is a whole number (a bool is none), and not below ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def counted(number: int, noun: str) -> str:
    """Return the number with the noun in its form: ``1 message``, ``2 messages``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(value: object) -> str:
    """Return ``value`` for a message to people, also where it is a number that Python refuses to print for its length."""
    try:
        return repr(value)
    except ValueError:
        return f"a number of type {type(value).__name__} with thousands of digits"
