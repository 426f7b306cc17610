"""``mainspring logs``: what services have written, and what they write, as ``mainspring up`` prints it."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from typing import Any

from mainspring.cli.control_client import NotReachedError, find_server
from mainspring.cli.control_status import find_place
from mainspring.cli.service_output import ServiceLines
from mainspring.cli.user_errors import UserError, say
from mainspring.events import ServiceOutput
from mainspring.validation import counted


class _StandardOutput:
    """Takes the lines of both streams: the reader of ``logs`` wants them in one."""

    def put(self, _: int, line: str) -> None:
        sys.stdout.write(f"{line}\n")


def show_logs(url: str | None, name: str | None, lines: int, follow: bool, as_json: bool) -> int:
    """Print the last lines of all services, of one or of a replica. ``follow``: go on until Ctrl-C or the supervisor's end."""
    server = find_server(url)
    status = server.status()
    if status["kind"] != "orchestrator":
        raise UserError(f"{status['name']!r} is a group of loops, not a supervisor: it keeps no output")
    place = None if name is None else find_place(status, name)
    path = "/logs" if place is None else f"{place.path}/logs"
    query = {**({} if place is None else place.query), "lines": lines, **({"follow": 1} if follow else {})}
    coloured = frozenset((1, 2)) if sys.stdout.isatty() and "NO_COLOR" not in os.environ else frozenset()
    printer = ServiceLines(_StandardOutput(), as_json=as_json, coloured=coloured)
    try:
        for record in server.lines(path, query):
            if "lost" in record:
                _tell_lost(record["lost"], as_json)
            else:
                printer(output_of(record))
            if follow:
                sys.stdout.flush()
    except NotReachedError as problem:
        if not follow:
            raise
        say(str(problem))
    except KeyboardInterrupt:
        if not follow:
            raise
    return 0


def output_of(record: dict[str, Any]) -> ServiceOutput:
    """Return a line of the answer as the event that it was."""
    return ServiceOutput(
        at=datetime.fromisoformat(record["time"]),
        service=record["service"],
        replica=record["replica"],
        stream=record["stream"],
        line=record["line"],
    )


def _tell_lost(lost: int, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"lost": lost}) + "\n")
    else:
        sys.stdout.flush()
        say(f"{counted(lost, 'line')} came too fast, and are not shown here")
