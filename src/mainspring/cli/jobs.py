"""Look at a mailbox and change its jobs: ``mainspring stats``, ``job``, ``cancel``, ``run-now``, ``reschedule``, ``edit``."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from mainspring.cli.arguments import named_values, typed
from mainspring.cli.limits import limit_line, say_paused, waiting_tasks
from mainspring.cli.send import parse_json
from mainspring.cli.store import know_tasks, mailbox_alone, mailbox_and_ids, tasks_and_ids, with_mailbox
from mainspring.cli.user_errors import FAILED, UserError, printable, say
from mainspring.errors import JobNotFoundError, JobRunningError
from mainspring.mailbox import jobs
from mainspring.mailbox.codec import Codec
from mainspring.mailbox.limits import delay_of
from mainspring.mailbox.message import CancelOutcome
from mainspring.tasks.calls import CallCodec, with_arguments
from mainspring.tasks.chain_runs import find_chain
from mainspring.validation import counted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.jobs import JobStatus
    from mainspring.mailbox.limiters import LimitState
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import Counts
    from mainspring.tasks.chain_runs import ChainStatus
    from mainspring.tasks.tasks import Tasks

PARTS = 20
"""The most parts of a chain that are shown."""
LONGEST = 1_000
"""The most characters of arguments or of a result that are shown on a line."""


def show_stats(words: Sequence[str], as_json: bool) -> int:
    """Print where the messages of a mailbox are, and its limits."""
    mailbox = mailbox_alone(words, "stats")

    async def look(opened: Mailbox[Any, Any]) -> tuple[Counts, list[LimitState]]:
        return await opened.counts(), await opened.limits()

    counts, limits = with_mailbox(mailbox, look)
    if as_json:
        typer.echo(json.dumps({"mailbox": mailbox.name, **asdict(counts), "limits": [asdict(each) for each in limits]}))
        return 0
    for name in ("delayed", "pending", "in_flight", "settled", "dead"):
        typer.echo(f"{name.replace('_', ' '):<10} {getattr(counts, name):,}")
    if counts.queue_age is not None:
        typer.echo(f"{'queue age':<10} {counts.queue_age:,.1f} s")
    for each in limits:
        typer.echo(printable(limit_line(each)))
    return 0


def show_job(words: Sequence[str], as_json: bool) -> int:
    """Print what is known of a job."""
    mailbox, ids = mailbox_and_ids(words)
    if len(ids) != 1:
        raise UserError(f"job: give the id of one job, not {counted(len(ids), 'id')}")
    know_tasks(mailbox)

    async def look(opened: Mailbox[Any, Any]) -> tuple[JobStatus, ChainStatus | None, bytes | None]:
        try:
            status, raw = await jobs.outcome_so_far(opened, ids[0])
        except JobNotFoundError:
            if (chain := await find_chain(opened, ids[0])) is None:
                raise
            await say_paused(opened, waiting_tasks(chain.chain.under_way))
            return chain.job, chain.chain, chain.result
        await say_paused(opened, waiting_tasks([status]))
        return status, None, raw

    try:
        status, chain, raw = with_mailbox(mailbox, look)
    except JobNotFoundError as error:
        raise UserError(str(error), FAILED) from None
    kept = {} if raw is None else {"result": json.loads(raw)}
    if as_json:
        typer.echo(json.dumps({**status_json(status), **({} if chain is None else _chain_json(chain)), **kept}))
        return 0
    shown = asdict(status) if chain is None else _of_chain(status, chain)
    for name, value in {**shown, **kept}.items():
        if value is not None or name in kept:
            typer.echo(printable(f"{name.replace('_', ' '):<18} {_shown(name, value)}"))
    if chain is not None:
        _show_parts(chain)
    return 0


def _of_chain(status: JobStatus, chain: ChainStatus) -> dict[str, Any]:
    """Return what is shown of a chain: it has stages and parts, and no attempts of its own."""
    return {
        "id": status.id,
        "state": status.state,
        "stage": f"{chain.stage} (the first is 0) of {counted(chain.stages, 'stage')}",
        "parts": f"{chain.parts_done:,} of {chain.parts:,} done",
        "enqueued_at": status.enqueued_at,
        "finished_at": status.finished_at,
        "last_error": status.last_error,
        "last_error_type": status.last_error_type,
    }


def _show_parts(chain: ChainStatus) -> None:
    for part in sorted(chain.under_way, key=lambda each: not each.is_finished)[:PARTS]:  # dead ones first
        why = "" if part.last_error is None else f"  {part.last_error_type}: {part.last_error}"
        line = f"{'part':<18} {part.id}  {part.state}  {part.task or '-'}  attempt {part.attempts}{why}"
        typer.echo(printable(line if len(line) <= LONGEST else f"{line[:LONGEST]}…"))
    if len(chain.under_way) > PARTS:
        say(f"and {len(chain.under_way) - PARTS:,} more parts: mainspring jobs --search {chain.id}")


def _chain_json(chain: ChainStatus) -> dict[str, Any]:
    return {
        "stage": chain.stage,
        "stages": chain.stages,
        "parts": chain.parts,
        "parts_done": chain.parts_done,
        "under_way": [status_json(part) for part in chain.under_way],
    }


def _shown(name: str, value: Any) -> str:
    """Return a part of a status on one line."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    if name == "progress":
        done, total = value
        return f"{done:g}" if total is None else f"{done:g} of {total:g}"
    if name in ("arguments", "result"):
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}… (of {len(text):,} characters; --json prints all)"
    return str(value)


def cancel_jobs(words: Sequence[str], as_json: bool) -> int:
    """End jobs before they are done. The status is 1 where one is not unfinished."""

    async def cancel(tasks: Tasks, job_id: str) -> str:
        outcome = await tasks.job(job_id).cancel()
        if outcome is CancelOutcome.UNKNOWN:
            raise JobNotFoundError(f"job {job_id}: no such message is scheduled, pending or running")
        return outcome

    return _for_each(words, "cancel", cancel, as_json)


def reschedule_jobs(words: Sequence[str], delay: float | None, at: datetime | None, as_json: bool, *, verb: str) -> int:
    """Let jobs that wait begin at another time, or now. The status is 1 where one cannot."""
    if verb == "reschedule" and (delay is None) == (at is None):
        raise UserError("reschedule: say when: --in 5m, or --at 2026-01-10T09:00:00Z")

    async def reschedule(tasks: Tasks, job_id: str) -> str:
        await jobs.reschedule(tasks.mailbox, job_id, delay_of(delay or 0, at))
        return "rescheduled"

    return _for_each(words, verb, reschedule, as_json)


def edit_job(words: Sequence[str], as_json: bool) -> int:
    """Give a job other arguments, or a message another body. The status is 1 if it is not waiting."""
    mailbox, rest = mailbox_and_ids(words)
    if len(rest) < 2:
        raise UserError("edit: give the id of one job and NAME=VALUE of its arguments, or JSON, behind the mailbox")
    job_id, *texts = rest
    is_checked = mailbox.is_bound
    know_tasks(mailbox)

    async def edit(opened: Mailbox[Any, Any]) -> None:
        body = (await jobs.waiting(opened, job_id)).message.body
        codec = opened.codec
        if (task := codec.task_of(body)) is None:
            changed = _one_value(texts)
            if is_checked:
                codec.decode(changed)
        else:
            given = named_values("edit", texts)
            if is_checked and isinstance(codec, CallCodec):
                typed("edit", codec.task_named(task), {**(codec.arguments_of(body) or {}), **given})
            changed = with_arguments(body, given)
        jobs.check_changed(job_id, await opened.backend.replace_body(job_id, changed))

    try:
        with_mailbox(mailbox, edit)
    except (JobNotFoundError, JobRunningError) as error:
        raise UserError(str(error), FAILED) from None
    typer.echo(json.dumps({"mailbox": mailbox.name, "edited": job_id}) if as_json else printable(f"{job_id} edited"))
    return 0


def _one_value(texts: Sequence[str]) -> bytes:
    """Return the JSON of the body of a message that calls no task."""
    try:
        (text,) = texts
        return Codec().encode(parse_json(text))
    except ValueError as error:
        raise UserError(f"edit: the message calls no task: give one JSON value as its new body: {error}") from None


def _for_each(words: Sequence[str], verb: str, act: Callable[[Tasks, str], Awaitable[str]], as_json: bool) -> int:
    tasks, ids = tasks_and_ids(words)
    if not ids:
        raise UserError(f"{verb}: give the ids of jobs, behind the mailbox")

    async def act_on_each(_: Mailbox[Any, Any]) -> dict[str, str]:
        outcomes: dict[str, str] = {}
        for job_id in ids:
            try:
                outcomes[job_id] = await act(tasks, job_id)
            except (JobNotFoundError, JobRunningError) as error:
                say(str(error))
        return outcomes

    done = with_mailbox(tasks.mailbox, act_on_each)
    if as_json:
        typer.echo(json.dumps({"mailbox": tasks.mailbox.name, "done": done}))
    else:
        for job_id, outcome in done.items():
            typer.echo(printable(f"{job_id} {outcome}"))
    return 0 if len(done) == len(set(ids)) else FAILED


def status_json(status: JobStatus) -> dict[str, Any]:
    """Return the status of a job, for JSON."""
    said = asdict(status)
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in said.items()}
