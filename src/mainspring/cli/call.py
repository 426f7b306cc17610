"""``mainspring call``: one call of a task, checked as ``task.send`` checks it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import anyio
import typer

from mainspring.cli.arguments import named_values, typed
from mainspring.cli.limits import say_paused
from mainspring.cli.store import ENVIRONMENT, is_url, no_such_task, open_shared, target_and_words
from mainspring.cli.target import instead, load_attribute
from mainspring.cli.user_errors import UserError, printable, say
from mainspring.mailbox.jobs import outcome_of
from mainspring.tasks.registry import NO_TASKS
from mainspring.tasks.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.tasks.task import Task

KEPT = 3_600.0
"""Seconds for which the result of a call is kept that is waited for, where its task does not say."""


def call_task(words: Sequence[str], *, wait: float | None, as_json: bool, **options: Any) -> int:
    """Send the call, and print the id of its job, or, with ``wait``, its result.

    :param options: those of :meth:`Task.options`; None: what the task says.
    """
    tasks, rest = _tasks_and_words(words)
    if not rest:
        raise UserError(f"call: name a task behind the tasks: {_names_of(tasks)}")
    task = tasks.registered.get(rest[0])
    if task is None:
        raise no_such_task("call", rest[0], sorted(tasks.registered))
    arguments = typed("call", task, named_values("call", rest[1:]))
    if wait is not None and not task.sending.result_ttl:
        options["result_ttl"] = KEPT
    done = anyio.run(_call, task.options(**options), arguments, wait)
    if as_json:
        typer.echo(json.dumps({"mailbox": tasks.mailbox.name, "task": task.name, **done}))
    else:
        typer.echo(printable(json.dumps(done["result"], ensure_ascii=False)) if wait is not None else done["id"])
    return 0


async def _call(task: Task[..., Any], arguments: dict[str, Any], wait: float | None) -> dict[str, Any]:
    async with task.tasks:
        job = await task.send(**arguments)
        if not job.new:
            say(f"nothing was sent: job {job.id} has the same key and is not finished")
        done: dict[str, Any] = {"id": job.id, "new": job.new}
        if wait is not None:
            say(f"waiting for job {job.id}")
            await say_paused(task.tasks.mailbox, {task.name})
            _, raw = await outcome_of(task.tasks.mailbox, job.id, wait)
            done["result"] = None if raw is None else json.loads(raw)
        return done


def _tasks_and_words(words: Sequence[str]) -> tuple[Tasks, list[str]]:
    usual = os.environ.get(ENVIRONMENT, "")
    if usual and not is_url(usual) and words and ":" in words[0]:  # the name of a task may have a colon as well
        tasks = _load(usual)
        if words[0] in tasks.registered:
            return tasks, list(words)
    if words and ":" not in words[0] and not usual:
        raise UserError(f"call: name the Tasks as MODULE:ATTR, as {words[0]:.100}:tasks, not {words[0]!r:.100} alone")
    target, rest = target_and_words(words)
    return _load(target), rest


def _load(target: str) -> Tasks:
    if is_url(target):
        raise UserError(
            "call: name the Tasks as MODULE:ATTR, as app:tasks: it says which arguments a task takes, and a URL does not"
        )
    tasks = load_attribute(target, Tasks)
    if not isinstance(tasks, Tasks):
        raise UserError(f"{target} is an object of type {type(tasks).__name__}; name a Tasks{instead(target, Tasks)}")
    if tasks.mailbox.address.startswith("memory:"):
        open_shared(tasks.mailbox.address)  # says why no worker would receive it
    tasks.import_modules()
    return tasks


def _names_of(tasks: Tasks) -> str:
    return ", ".join(sorted(tasks.registered)) or f"there are none: {NO_TASKS}"
