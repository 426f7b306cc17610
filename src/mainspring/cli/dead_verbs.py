"""The arguments of ``mainspring dead`` and its verbs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from mainspring.cli.times import ago

dead = typer.Typer(
    name="dead",
    help="Look after the dead letters of a mailbox: messages that were given up, with why.",
    rich_markup_mode="markdown",
    no_args_is_help=False,
)

_Mailbox = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TARGET]", help="The mailbox, by its URL or as MODULE:ATTR of a Tasks."),
]
_Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TARGET] [ID]...",
        help="The mailbox, by its URL or as MODULE:ATTR of a Tasks, and ids. Without one: that of MAINSPRING_URL.",
    ),
]
_All = Annotated[bool, typer.Option("--all", help="All of them.")]
_ErrorType = Annotated[
    str | None,
    typer.Option("--error", "--error-type", metavar="NAME", help="Dead letters with an error of this type."),
]
_Since = Annotated[
    datetime | None,
    typer.Option(metavar="TIME", parser=ago, help="Messages dead since: 30m, 24h, 7d ago, or a date (ISO 8601, UTC)."),
]
_OlderThan = Annotated[
    datetime | None,
    typer.Option(
        metavar="TIME",
        parser=ago,
        help="Messages dead before: 30d, 24h ago, or a date. With --since: between the two.",
    ),
]
_Match = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Dead letters with this text in the error, the body or a header (KEY=VALUE)."),
]
_Task = Annotated[str | None, typer.Option("--task", metavar="NAME", help="Dead letters that call this task.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dead.command("list", epilog="Example: `mainspring dead list 'sqlite:///jobs.db?name=emails' --since 24h`")
def list_(
    target: _Mailbox = None,
    task: _Task = None,
    error_type: _ErrorType = None,
    since: _Since = None,
    older_than: _OlderThan = None,
    match: _Match = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this number, the oldest first.")] = 100,
    by_error: Annotated[
        bool, typer.Option("--by-error", help="A line for each error, the most frequent first.")
    ] = False,
    as_json: _Json = False,
) -> int:
    """List dead letters, a line each, and say how many there are."""
    from mainspring.cli.dead import Choice, group_dead, list_dead

    choice = Choice(False, task, error_type, since, older_than, match)
    show_them = group_dead if by_error else list_dead
    return show_them(target or [], choice, limit, as_json)


@dead.command(epilog="Example: `mainspring dead show 'sqlite:///jobs.db?name=emails' 3f2a…`")
def show(
    target: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TARGET] ID", help="The mailbox, and the id as `dead list` prints it."),
    ] = None,
    as_json: _Json = False,
) -> int:
    """Show one dead letter: body, error, history of its attempts, traceback. Status 1 where there is none of that id."""
    from mainspring.cli.dead import show_dead

    return show_dead(target or [], as_json)


@dead.command(epilog="Example: `mainspring dead replay 'sqlite:///jobs.db?name=emails' --error TimeoutError`")
def replay(
    target: _Words = None,
    everything: _All = False,
    task: _Task = None,
    error_type: _ErrorType = None,
    since: _Since = None,
    older_than: _OlderThan = None,
    match: _Match = None,
    yes: _Yes = False,
    as_json: _Json = False,
) -> int:
    """Send dead letters to their mailbox again, with fresh counts: those named, all, or those that fit every filter.

    Asks, unless they are named. The exit status is 1 where an id is none of a dead letter.
    """
    from mainspring.cli.dead import Choice, replay_dead

    return replay_dead(target or [], Choice(everything, task, error_type, since, older_than, match), yes, as_json)


@dead.command(epilog="Example: `mainspring dead purge 'sqlite:///jobs.db?name=emails' --all --yes`")
def purge(
    target: _Words = None,
    everything: _All = False,
    task: _Task = None,
    error_type: _ErrorType = None,
    since: _Since = None,
    older_than: _OlderThan = None,
    match: _Match = None,
    yes: _Yes = False,
    as_json: _Json = False,
) -> int:
    """Forget dead letters for good: those named, all, or those that fit every filter. Asks, unless they are named.

    The exit status is 1 where an id is none of a dead letter.
    """
    from mainspring.cli.dead import Choice, purge_dead

    return purge_dead(target or [], Choice(everything, task, error_type, since, older_than, match), yes, as_json)
