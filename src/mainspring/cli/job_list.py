"""List the jobs of a mailbox, and drop jobs by filter: ``mainspring jobs`` and ``mainspring purge``."""

from __future__ import annotations

import json
import sys
from datetime import UTC
from typing import TYPE_CHECKING, Any

import typer

from mainspring.cli.jobs import status_json
from mainspring.cli.limits import say_paused, waiting_tasks
from mainspring.cli.store import know_tasks, mailbox_alone, with_mailbox
from mainspring.cli.user_errors import FAILED, UserError, printable, say
from mainspring.mailbox.job_list import UNFINISHED
from mainspring.mailbox.jobs import JobState
from mainspring.validation import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mainspring.mailbox.jobs import JobStatus
    from mainspring.mailbox.mailbox import Mailbox

WIDTH = 160
"""Characters of a line of the list."""


def list_jobs(
    words: Sequence[str], filters: Mapping[str, Any], limit: int | None, after: str | None, as_json: bool
) -> int:
    """Print the jobs that fit, a line each, as the store gives them; and where the list goes on."""
    mailbox = mailbox_alone(words, "jobs")
    know_tasks(mailbox)

    async def show(opened: Mailbox[Any, Any]) -> None:
        listed, last, more = 0, None, ""
        waiting: set[str | None] = set()
        async for job in opened.jobs(**_given(filters), limit=None if limit is None else limit + 1, after=after):
            if last is not None and listed == limit:
                more = f"; the next ones: --after {last.position}"
                break
            typer.echo(json.dumps(status_json(job)) if as_json else _line(job))
            listed, last = listed + 1, job
            waiting |= waiting_tasks([job])
        say(f"{counted(listed, 'job')} of {opened.name}{more}")
        await say_paused(opened, waiting)

    with_mailbox(mailbox, show)
    return 0


def purge_jobs(words: Sequence[str], filters: Mapping[str, Any], yes: bool, as_json: bool) -> int:
    """Drop all unfinished messages of a mailbox, or the jobs that fit, having asked first."""
    mailbox = mailbox_alone(words, "purge")
    know_tasks(mailbox)
    given = _given(filters)

    async def count(opened: Mailbox[Any, Any]) -> int:
        if not given:
            return await opened.approximate_count()
        found = 0
        async for job in opened.jobs(**{"state": UNFINISHED, **given}):
            found += job.id != job.chain
        return found

    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UserError("purge: without a terminal it cannot ask whether to drop them for good; pass --yes")
        waiting = with_mailbox(mailbox, count)
        if not typer.confirm(f"Drop {counted(waiting, 'message')} of {mailbox.name} for good?", err=True):
            raise UserError("nothing was dropped; answer y to drop them", FAILED)
    dropped = with_mailbox(mailbox, lambda opened: opened.purge(**given))
    stay = "" if "state" in given else "; dead letters stay (see `mainspring dead purge`)"
    typer.echo(
        json.dumps({"mailbox": mailbox.name, "purged": dropped})
        if as_json
        else f"{counted(dropped, 'message')} dropped{stay}"
    )
    return 0


def _given(filters: Mapping[str, Any]) -> dict[str, Any]:
    for state in filters.get("state") or ():
        if state not in tuple(JobState):
            raise UserError(f"--state {state:.100}: there is no such state; there are: {', '.join(JobState)}")
    return {name: value for name, value in filters.items() if value is not None and value != []}


def _line(job: JobStatus) -> str:
    kind = "chain" if job.id == job.chain else job.task or "-"
    date = job.due_at or job.finished_at or job.enqueued_at
    shown = [
        job.id,
        f"{job.state:<9}",
        kind,
        f"key {job.key}" if job.key else "",
        f"{date.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}" if date else "",
        f"attempt {job.attempts}" if job.attempts else "",
        f"{job.last_error_type}: {job.last_error}" if job.last_error is not None else "",
    ]
    text = printable("  ".join(part for part in shown if part))
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"
