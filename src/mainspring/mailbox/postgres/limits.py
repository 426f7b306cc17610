"""Encode changes of limits for the server, and decode its rows into states of limits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mainspring.mailbox.limiters import Blocks, LimitState, TaskLimits
from mainspring.mailbox.postgres.values import stored_name
from mainspring.policies import Rate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mainspring.mailbox.limiters import LimitChange


def changes_text(changes: Iterable[LimitChange]) -> str:
    """Return changes as JSON (in ASCII)."""
    return json.dumps([_change(change) for change in changes])


def _change(change: LimitChange) -> dict[str, Any]:
    values: dict[str, Any] = {
        "task": stored_name(change.task) if change.task else "",
        "paused": change.paused,
        "changed_concurrency": change.concurrency,
        "is_declared": change.declared is not None,
    }
    if change.declared is not None:
        declared = change.declared
        values |= {
            "concurrency": declared.concurrency,
            "key_concurrency": declared.key_concurrency,
            "blocks": declared.blocks.value,
            **_rate("rate", declared.rate),
            **_rate("key_rate", declared.key_rate),
        }
    return values


def _rate(name: str, rate: Rate | None) -> dict[str, Any]:
    if rate is None:
        return {}
    per = float(rate.per)  # type: ignore[arg-type]  # it is in seconds
    return {
        f"{name}_limit": rate.limit,
        f"{name}_per": per,
        f"{name}_burst": rate.burst,
    }


def state_row(row: tuple[Any, ...]) -> LimitState:
    """Return the limits of one task from a row of ``limits``."""
    (
        task,
        most,
        limit,
        per,
        burst,
        key_most,
        key_limit,
        key_per,
        key_burst,
        blocks,
        paused,
        changed,
        running,
        waiting,
    ) = row
    rate = None if limit is None else Rate(limit, per, burst)
    key_rate = None if key_limit is None else Rate(key_limit, key_per, key_burst)
    limits = TaskLimits(most, rate, key_most, key_rate, Blocks(blocks))
    return LimitState(task, limits, paused, changed, running, waiting)
