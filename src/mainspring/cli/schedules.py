"""Look at the schedules of a mailbox and change them: ``mainspring schedules`` and its verbs."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer

from mainspring.cli.store import tasks_and_ids, with_mailbox
from mainspring.cli.user_errors import FAILED, UserError, printable, say
from mainspring.errors import ConfigError, ScheduleNotFoundError
from mainspring.tasks.schedule_times import Times
from mainspring.validation import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.tasks.schedules import ScheduleStatus

DONE = {"pause": "paused", "resume": "resumed", "remove": "removed"}
"""What a verb has done to a schedule; ``run-now`` tells the id of the call."""


def list_schedules(words: Sequence[str], as_json: bool) -> int:
    """Print the schedules of a mailbox, a line each."""
    tasks, rest = tasks_and_ids(words)
    if rest:
        raise UserError(f"schedules list: takes a mailbox alone, not {' '.join(rest)!r:.100}")
    found: list[ScheduleStatus] = with_mailbox(tasks.mailbox, lambda _: tasks.schedules.list())
    if as_json:
        typer.echo(json.dumps([_as_json(each) for each in found]))
        return 0
    for each in found:
        typer.echo(printable(_line(each)))
    typer.echo(counted(len(found), "schedule"))
    return 0


def change_schedules(words: Sequence[str], verb: str, as_json: bool) -> int:
    """Pause, resume, remove or run schedules now. The status is 1 where there is none of a name."""
    tasks, names = tasks_and_ids(words)
    if not names:
        raise UserError(f"schedules {verb}: give the names of schedules, behind the mailbox")
    act = getattr(tasks.schedules, verb.replace("-", "_"))

    async def act_on_each(_: Mailbox[Any, Any]) -> dict[str, str]:
        outcomes: dict[str, str] = {}
        for name in names:
            try:
                outcome = await act(name)
                outcomes[name] = DONE.get(verb) or f"sent {outcome}"
            except ScheduleNotFoundError:
                say(
                    f"there is no schedule {name!r:.200} in this mailbox; `mainspring schedules list` shows those there are"
                )
            except ConfigError as error:
                say(str(error))
        return outcomes

    done = with_mailbox(tasks.mailbox, act_on_each)
    if as_json:
        typer.echo(json.dumps({"mailbox": tasks.mailbox.name, "done": done}))
    else:
        for name, outcome in done.items():
            typer.echo(printable(f"{name} {outcome}"))
    return 0 if len(done) == len(set(names)) else FAILED


def _line(status: ScheduleStatus) -> str:
    at = None if status.at is None else status.at.timestamp()
    next_tick = "over" if status.next_at is None else f"next {status.next_at:%Y-%m-%d %H:%M:%SZ}"
    following = "paused" if status.paused else next_tick
    made = "declared" if status.declared else "added"
    return f"{status.name}  {status.task}  {Times(status.cron, status.every, at, status.tz)}  {following}  {made}"


def _as_json(status: ScheduleStatus) -> dict[str, Any]:
    return {name: each.isoformat() if isinstance(each, datetime) else each for name, each in asdict(status).items()}
