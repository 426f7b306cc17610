"""The arguments of ``mainspring schedules`` and its verbs."""

from __future__ import annotations

from typing import Annotated

import typer

schedules = typer.Typer(
    name="schedules",
    help="Look after the schedules of a mailbox.",
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
        metavar="[TARGET] NAME...",
        help="The mailbox, by its URL or as MODULE:ATTR of a Tasks, and names. Without one: that of MAINSPRING_URL.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@schedules.command("list", epilog="Example: `mainspring schedules list 'sqlite:///jobs.db?name=emails'`")
def list_(target: _Mailbox = None, as_json: _Json = False) -> int:
    """List schedules, a line each: the task, the times, and the next tick."""
    from mainspring.cli.schedules import list_schedules

    return list_schedules(target or [], as_json)


@schedules.command(epilog="Example: `mainspring schedules pause 'sqlite:///jobs.db?name=emails' nightly`")
def pause(target: _Words = None, as_json: _Json = False) -> int:
    """Let schedules not tick until they are resumed. It holds at once."""
    from mainspring.cli.schedules import change_schedules

    return change_schedules(target or [], "pause", as_json)


@schedules.command(epilog="Example: `mainspring schedules resume 'sqlite:///jobs.db?name=emails' nightly`")
def resume(target: _Words = None, as_json: _Json = False) -> int:
    """Let paused schedules tick again. The ticks of the pause are not sent."""
    from mainspring.cli.schedules import change_schedules

    return change_schedules(target or [], "resume", as_json)


@schedules.command(epilog="Example: `mainspring schedules remove 'sqlite:///jobs.db?name=emails' nightly`")
def remove(target: _Words = None, as_json: _Json = False) -> int:
    """Delete schedules. A declared schedule of running workers is deleted in their code."""
    from mainspring.cli.schedules import change_schedules

    return change_schedules(target or [], "remove", as_json)


@schedules.command("run-now", epilog="Example: `mainspring schedules run-now 'sqlite:///jobs.db?name=emails' nightly`")
def run_now(target: _Words = None, as_json: _Json = False) -> int:
    """Send one call of each schedule now, and print its id. The ticks stay as they are."""
    from mainspring.cli.schedules import change_schedules

    return change_schedules(target or [], "run-now", as_json)
