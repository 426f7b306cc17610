"""Limits of a mailbox or a task in the whole fleet: ``mainspring pause``, ``resume`` and ``concurrency``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from mainspring.cli.store import know_tasks, mailbox_and_ids, no_such_task, tasks_named, with_mailbox
from mainspring.cli.user_errors import UserError, printable, say
from mainspring.mailbox.jobs import JobState
from mainspring.mailbox.limiters import ALL_TASKS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

    from mainspring.mailbox.jobs import JobStatus
    from mainspring.mailbox.limiters import LimitState
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.policies import Rate

DECLARED = "declared"
"""The concurrency that means what the code says."""


def set_paused(words: Sequence[str], task: str | None, paused: bool, as_json: bool) -> int:
    """Pause or resume a mailbox, or one of its tasks."""
    verb = "pause" if paused else "resume"
    mailbox, rest = mailbox_and_ids(words)
    if rest:
        raise UserError(f"{verb}: takes a mailbox alone, not {' '.join(rest)!r:.100}; name a task with --task")
    _change(verb, words, mailbox, task, lambda opened: opened.pause(task) if paused else opened.resume(task))
    _tell(mailbox.name, task, "paused" if paused else "resumed", as_json)
    return 0


def set_concurrency(words: Sequence[str], task: str | None, as_json: bool) -> int:
    """Change how many messages of a mailbox, or of one of its tasks, are in flight at once."""
    mailbox, rest = mailbox_and_ids(words)
    number = rest[0] if len(rest) == 1 else ""
    if number != DECLARED and not (number.isascii() and number.isdigit() and int(number)):
        raise UserError(
            f"concurrency: give one number from 1, or {DECLARED!r} for what the code says, behind the mailbox; `mainspring"
            " pause` lets none begin"
        )
    most = None if number == DECLARED else int(number)
    _change("concurrency", words, mailbox, task, lambda opened: opened.set_concurrency(most, task))
    _tell(mailbox.name, task, f"concurrency {number}", as_json)
    return 0


def waiting_tasks(jobs: Iterable[JobStatus]) -> set[str | None]:
    """Return the tasks of the jobs that wait for their time or their turn; None for messages that call no task."""
    return {job.task for job in jobs if job.state in (JobState.SCHEDULED, JobState.PENDING)}


async def say_paused(mailbox: Mailbox[Any, Any], tasks: Collection[str | None]) -> None:
    """Say which of these tasks, of jobs that wait, are paused, and whether their mailbox is."""
    for limits in await mailbox.limits() if tasks else ():
        if limits.paused and limits.task == ALL_TASKS:
            say(f"{mailbox.name} is paused: its jobs begin after `mainspring resume`")
        elif limits.paused and limits.task in tasks:
            say(f"task {limits.task} is paused: its jobs begin after `mainspring resume --task {limits.task}`")


def _change(
    verb: str,
    words: Sequence[str],
    mailbox: Mailbox[Any, Any],
    task: str | None,
    act: Callable[[Mailbox[Any, Any]], Awaitable[None]],
) -> None:
    """Change a limit. A task that neither the program nor the mailbox knows may be mistyped.

    It is refused where the command names a Tasks. Else a line on standard error tells of it.
    """
    names = tasks_named(words) if task else []

    async def change(opened: Mailbox[Any, Any]) -> bool:
        known = not task or task in names or await _is_known(opened, task)
        if known or not names:
            await act(opened)
        return known

    know_tasks(mailbox)
    known = with_mailbox(mailbox, change)
    if task and names and not known:
        raise no_such_task(verb, task, names)
    if not known:
        say(f"no job or limit of a task {task!r:.100} is in {mailbox.name} now: check the name")


async def _is_known(mailbox: Mailbox[Any, Any], task: str) -> bool:
    if not mailbox.capabilities.limits or any(state.task == task for state in await mailbox.limits()):
        return True
    return not mailbox.capabilities.listing or bool([job async for job in mailbox.jobs(task=task, limit=1)])


def _tell(mailbox: str, task: str | None, what: str, as_json: bool) -> None:
    of = mailbox if task is None else f"task {task} of {mailbox}"
    typer.echo(json.dumps({"mailbox": mailbox, "task": task, "done": what}) if as_json else printable(f"{of}: {what}"))


def _rate_text(rate: Rate | None) -> str | None:
    if rate is None:
        return None
    return f"{rate.limit:,} in {rate.per:g} s{f' (burst {rate.burst})' if rate.burst > 1 else ''}"


def limit_line(state: LimitState) -> str:
    """Return a line that names the limits of a task."""
    limits = state.limits
    declared = {
        "rate": _rate_text(limits.rate),
        "per key": limits.key_concurrency,
        "rate per key": _rate_text(limits.key_rate),
    }
    concurrency = None if state.most is None else f"{state.most}{'' if state.concurrency is None else ' (changed)'}"
    said = [f"{name} {value}" for name, value in {"concurrency": concurrency, **declared}.items() if value is not None]
    if state.paused:
        said.insert(0, "paused")
    whole = state.task == ALL_TASKS
    of = "all tasks" if whole else f"task {state.task}"
    now = {"running" if whole else "running or next": state.running, "waiting for it": state.waiting}
    counts = [f"{count:,} {what}" for what, count in now.items() if count]
    return "; ".join([f"{of}: {', '.join(said)}", *counts])
