"""The handling options that a sender gives one message: headers that its worker heeds instead of its own settings."""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import TYPE_CHECKING, Final

from mainspring.errors import ConfigError
from mainspring.policies import RetryPolicy
from mainspring.validation import is_number

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT: Final = "mainspring-timeout"
"""The header with the seconds after which the handler is cancelled."""
RETRY: Final = "mainspring-retry"
"""The header with the fields of a :class:`RetryPolicy`, as a JSON list."""


def option_headers(timeout: float | None, retry: RetryPolicy | None) -> dict[str, str]:
    """Return the headers that say these."""
    said = {} if timeout is None else {TIMEOUT: repr(float(timeout))}
    return said if retry is None else {**said, RETRY: json.dumps(astuple(retry))}


def timeout_of(headers: Mapping[str, str], usual: float | None) -> float | None:
    """Return the timeout that a message says, or ``usual`` if it says none or an invalid one (any sender may write it)."""
    if TIMEOUT not in headers:
        return usual
    try:
        seconds = float(headers[TIMEOUT])
    except ValueError:
        return usual
    return seconds if seconds and is_number(seconds, 0) else usual


def retry_of(headers: Mapping[str, str], usual: RetryPolicy) -> RetryPolicy:
    """Return the same for the retry policy."""
    if RETRY not in headers:
        return usual
    try:
        return RetryPolicy(*json.loads(headers[RETRY]))
    except (ValueError, TypeError, RecursionError, ConfigError):
        return usual
