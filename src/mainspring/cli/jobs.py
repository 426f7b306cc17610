"""Look at a mailbox and change its jobs: ``mainspring stats``, ``job``, ``cancel``, ``run-now``, ``reschedule``, ``purge``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from mainspring.cli.store import mailbox_and_ids, printable, with_mailbox
from mainspring.cli.user_errors import FAILED, UserError, say
from mainspring.errors import JobNotFoundError, JobRunningError
from mainspring.mailbox import jobs
from mainspring.mailbox.limits import delay_of
from mainspring.mailbox.message import CancelOutcome
from mainspring.validation import counted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.mailbox import Mailbox


def show_stats(words: Sequence[str], as_json: bool) -> int:
    """Print where the messages of a mailbox are."""
    mailbox, rest = mailbox_and_ids(words)
    _no_more(rest, "stats")
    counts = with_mailbox(mailbox, lambda opened: opened.counts())
    if as_json:
        typer.echo(json.dumps({"mailbox": mailbox.name, **asdict(counts)}))
        return 0
    for name in ("delayed", "pending", "in_flight", "settled", "dead"):
        typer.echo(f"{name.replace('_', ' '):<10} {getattr(counts, name):,}")
    if counts.queue_age is not None:
        typer.echo(f"{'queue age':<10} {counts.queue_age:,.1f} s")
    return 0


def show_job(words: Sequence[str], as_json: bool) -> int:
    """Print what is known of a job."""
    mailbox, ids = mailbox_and_ids(words)
    if len(ids) != 1:
        raise UserError(f"job: give the id of one job, not {counted(len(ids), 'id')}")
    _know_tasks(mailbox)
    try:
        status = with_mailbox(mailbox, lambda opened: jobs.status_of(opened, ids[0]))
    except JobNotFoundError as error:
        raise UserError(str(error), FAILED) from None
    facts: dict[str, Any] = {}
    for name, value in asdict(status).items():
        facts[name] = value.isoformat() if isinstance(value, datetime) else value
    if as_json:
        typer.echo(json.dumps(facts))
        return 0
    for name, value in asdict(status).items():
        if value is None:
            continue
        shown = value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ") if isinstance(value, datetime) else value
        if name == "progress":
            done, total = value
            shown = f"{done:g}" if total is None else f"{done:g} of {total:g}"
        typer.echo(printable(f"{name.replace('_', ' '):<18} {shown}"))
    return 0


def cancel_jobs(words: Sequence[str], as_json: bool) -> int:
    """End jobs before they are done. The status is 1 where one is not unfinished."""

    async def cancel(mailbox: Mailbox[Any, Any], job_id: str) -> str:
        outcome = await mailbox.cancel(job_id)
        if outcome is CancelOutcome.UNKNOWN:
            raise JobNotFoundError(f"job {job_id}: no such message is scheduled, pending or running")
        return outcome

    return _for_each(words, "cancel", cancel, as_json)


def reschedule_jobs(words: Sequence[str], delay: float | None, at: datetime | None, as_json: bool, *, verb: str) -> int:
    """Let jobs that wait begin at another time, or now. The status is 1 where one cannot."""
    if verb == "reschedule" and (delay is None) == (at is None):
        raise UserError("reschedule: say when: --in 5m, or --at 2026-01-10T09:00:00Z")

    async def reschedule(mailbox: Mailbox[Any, Any], job_id: str) -> str:
        await jobs.reschedule(mailbox, job_id, delay_of(delay or 0, at))
        return "rescheduled"

    return _for_each(words, verb, reschedule, as_json)


def purge_jobs(words: Sequence[str], yes: bool, as_json: bool) -> int:
    """Drop all messages of a mailbox that are delayed, pending or in flight, having asked first."""
    mailbox, rest = mailbox_and_ids(words)
    _no_more(rest, "purge")
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UserError("purge: without a terminal it cannot ask whether to drop them for good; pass --yes")
        waiting = with_mailbox(mailbox, lambda opened: opened.approximate_count())
        if not typer.confirm(f"Drop {counted(waiting, 'message')} of {mailbox.name} for good?", err=True):
            raise UserError("nothing was dropped; answer y to drop them", FAILED)
    dropped = with_mailbox(mailbox, lambda opened: opened.purge())
    typer.echo(
        json.dumps({"mailbox": mailbox.name, "purged": dropped})
        if as_json
        else f"{counted(dropped, 'message')} dropped; dead letters stay (see `mainspring dead purge`)"
    )
    return 0


def _for_each(
    words: Sequence[str], verb: str, act: Callable[[Mailbox[Any, Any], str], Awaitable[str]], as_json: bool
) -> int:
    mailbox, ids = mailbox_and_ids(words)
    if not ids:
        raise UserError(f"{verb}: give the ids of jobs, behind the mailbox")

    async def act_on_each(opened: Mailbox[Any, Any]) -> dict[str, str]:
        outcomes: dict[str, str] = {}
        for job_id in ids:
            try:
                outcomes[job_id] = await act(opened, job_id)
            except (JobNotFoundError, JobRunningError) as error:
                say(str(error))
        return outcomes

    done = with_mailbox(mailbox, act_on_each)
    if as_json:
        typer.echo(json.dumps({"mailbox": mailbox.name, "done": done}))
    else:
        for job_id, outcome in done.items():
            typer.echo(printable(f"{job_id} {outcome}"))
    return 0 if len(done) == len(set(ids)) else FAILED


def _no_more(rest: Sequence[str], verb: str) -> None:
    if rest:
        raise UserError(f"{verb}: takes a mailbox alone, not {' '.join(rest)!r:.100}")


def _know_tasks(mailbox: Mailbox[Any, Any]) -> None:
    """Let the names of tasks be read from bodies, where the mailbox is bound to nothing else."""
    if not mailbox.is_bound:
        from mainspring.tasks.calls import CallCodec

        mailbox.bind(body=CallCodec({}))
