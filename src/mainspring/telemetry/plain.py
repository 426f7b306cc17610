"""Values as JSON holds them, for log lines, the status and the dashboard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import Any


def plain(value: Any) -> Any:
    """Return ``value`` as JSON holds it: dataclasses as objects, seconds and dates to the millisecond, infinity as null."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    return str(value)
