"""List the loops that work on a mailbox: ``mainspring workers``."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer

from mainspring.cli.store import mailbox_and_ids, with_mailbox
from mainspring.cli.user_errors import UserError, printable
from mainspring.core import clock
from mainspring.validation import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.mailbox.workers import WorkerStatus


def show_workers(words: Sequence[str], as_json: bool) -> int:
    """Print the loops that work on a mailbox, a line each."""
    mailbox, rest = mailbox_and_ids(words)
    if rest:
        raise UserError(f"workers: takes a mailbox alone, not {' '.join(rest)!r:.100}")
    found: list[WorkerStatus] = with_mailbox(mailbox, lambda opened: opened.workers())
    if as_json:
        typer.echo(json.dumps([_as_json(each) for each in found]))
        return 0
    now = clock.utc_now()
    for each in found:
        typer.echo(printable(_line(each, now)))
    typer.echo(counted(len(found), "loop"))
    return 0


def _line(status: WorkerStatus, now: datetime) -> str:
    group = "" if status.group is None else f"  in {status.group}"
    seen = max(0.0, (now - status.last_seen).total_seconds())
    return (
        f"{status.worker}  {status.loop}{group}  {status.state}  {status.in_flight} in hand of {status.concurrency}"
        f"  since {status.started_at:%Y-%m-%d %H:%M:%SZ}  mainspring {status.version}  last seen {seen:.0f} s ago"
    )


def _as_json(status: WorkerStatus) -> dict[str, Any]:
    return {name: each.isoformat() if isinstance(each, datetime) else each for name, each in asdict(status).items()}
