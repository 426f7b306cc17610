"""The arguments of the verbs that talk to a running supervisor, or to the health server of a group."""

from __future__ import annotations

from typing import Annotated

import typer

from mainspring.cli.times import seconds

control_app = typer.Typer(rich_markup_mode="markdown")

_Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="MAINSPRING_CONTROL",
        metavar="URL",
        help="The supervisor: http://HOST:PORT or unix:/PATH; default: that of this user which runs on this machine.",
    ),
]
_Service = Annotated[str, typer.Argument(metavar="SERVICE[.REPLICA]", help="A service, or one replica: worker.2.")]
_MaybeService = Annotated[
    str | None,
    typer.Argument(metavar="[SERVICE[.REPLICA]]", help="A service, or one replica: worker.2; default: all services."),
]
_Wait = Annotated[
    float | None,
    typer.Option(
        metavar="TIME",
        parser=seconds,
        help="Wait at most so long; 0: do not wait; default: until it is done. It goes on in any case.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@control_app.command(epilog="Example: `mainspring status worker`")
def status(service: _MaybeService = None, url: _Url = None, as_json: _Json = False) -> int:
    """Show the services of a supervisor, or the loops of a group (--url is its health server's).

    The exit status is 0 if it is ready (a SERVICE: if a replica works, or its work is done), 1 if it is not or does not answer.
    """
    from mainspring.cli.control_status import show_status

    return show_status(url, service, as_json)


@control_app.command(epilog="Example: `mainspring restart worker`")
def restart(service: _MaybeService = None, url: _Url = None, wait: _Wait = None, as_json: _Json = False) -> int:
    """Restart a service, or all, one replica after the other: the next one when the last is ready.

    Ctrl-C stops waiting, and the restart goes on. The exit status is 1 if a replica does not come to run; the next ones are
    left as they are then.
    """
    from mainspring.cli.control_acts import act_on

    return act_on("restart", url, service, wait, as_json)


@control_app.command(epilog="Example: `mainspring start worker`")
def start(service: _Service, url: _Url = None, wait: _Wait = None, as_json: _Json = False) -> int:
    """Start a service that has ended or was stopped, with all it depends on, and wait until it runs (else: status 1)."""
    from mainspring.cli.control_acts import act_on

    return act_on("start", url, service, wait, as_json)


@control_app.command(epilog="Example: `mainspring stop worker.2`")
def stop(service: _Service, url: _Url = None, wait: _Wait = None, as_json: _Json = False) -> int:
    """Stop a service, after all that depend on it, and wait until it has ended. It stays down until `start` or `restart`."""
    from mainspring.cli.control_acts import act_on

    return act_on("stop", url, service, wait, as_json)


@control_app.command(epilog="Example: `mainspring logs worker --follow`")
def logs(
    service: _MaybeService = None,
    url: _Url = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C, or until the supervisor has ended.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=1_000_000, help="How many lines to begin with, at most.")
    ] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> int:
    """Print the last lines that services have written. A supervisor keeps some hundred lines of each replica."""
    from mainspring.cli.control_logs import show_logs

    return show_logs(url, service, lines, follow, as_json)


@control_app.command(epilog="Example: `mainspring drain --url http://127.0.0.1:8080 --wait 5m`")
def drain(
    url: _Url = None,
    wait: Annotated[
        float,
        typer.Option(
            metavar="TIME", parser=seconds, help="Wait for the end, at most so long; status 1 if it has not come."
        ),
    ] = 0.0,
    as_json: _Json = False,
) -> int:
    """End a supervisor with all its services, or a group, in order: no new work is begun, what is in hand is finished."""
    from mainspring.cli.control_acts import drain as drain_server

    return drain_server(url, wait, as_json)


@control_app.command(epilog="Example: `mainspring top --interval 5s`")
def top(
    url: _Url = None,
    interval: Annotated[
        float, typer.Option(metavar="TIME", parser=seconds, help="How often to ask.", show_default="1s")
    ] = 1.0,
) -> int:
    """Show the services of a supervisor, or the loops of a group, live, and act on them.

    Keys: arrows or j and k select, r restarts, s starts, x stops (after a y), l shows the last lines, q ends.
    """
    from mainspring.cli.top import show_top

    return show_top(url, interval)
