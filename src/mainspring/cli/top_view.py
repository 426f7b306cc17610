"""What ``mainspring top`` shows: the rows, which one is selected, and a screen of text for a size of the terminal."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from mainspring.cli.control_status import aligned, headline, places, table
from mainspring.cli.user_errors import printable
from mainspring.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.cli.control_status import ServicePlace

_HELP = {
    "orchestrator": "arrows/jk select   r restart   s start   x stop   l logs   q quit",
    "group": "arrows/jk select   q quit",
    "logs": "l back   q quit",
}
_STYLES = {"running": "", "degraded": "yellow", "stopped": "dim", "failed": "red", "paused": "dim", "crashed": "red"}
_AROUND = 4
"""Lines of the screen that are no rows: the headline, the head of the table, the message and the keys."""


class TopView:
    """The present screen. It is told what is new, and asked for the screen; it neither asks servers nor reads keys."""

    def __init__(self, url: str, status: dict[str, Any]) -> None:
        self._url = url
        self.status = status
        self.message = ""
        self.logs: list[str] | None = None
        """The lines shown instead of the table; None: the table."""
        self._selected: str | None = None
        self._cpu: dict[tuple[str, int], float] = {}
        self._used = _cpu_seconds(status)

    def update(self, status: dict[str, Any]) -> None:
        """Take a new status, and reckon what share of a core each replica has used since the last one."""
        seconds = (_date(status) - _date(self.status)).total_seconds()
        used = _cpu_seconds(status)
        if seconds > 0:
            self._cpu = {
                (service, number): max(0.0, now - self._used[service, number, pid]) / seconds
                for (service, number, pid), now in used.items()
                if (service, number, pid) in self._used
            }
        self.status, self._used = status, used

    # --------------------------------------------------------------------------------------------------------- selection

    @property
    def selected(self) -> ServicePlace | None:
        """The service or the replica that is selected; None for a group."""
        if self.status["kind"] == "group" or not (shown := places(self.status)):
            return None
        return shown[self._index()]

    def move(self, steps: int) -> None:
        """Select another row."""
        names = self._names()
        if names:
            self._selected = names[min(max(self._index() + steps, 0), len(names) - 1)]

    def _names(self) -> list[str]:
        if self.status["kind"] == "group":
            return [str(loop["name"]) for loop in self.status["loops"]]
        return [place.name for place in places(self.status)]

    def _index(self) -> int:
        names = self._names()
        return names.index(self._selected) if self._selected in names else 0

    # ------------------------------------------------------------------------------------------------------------ screen

    def screen(self, height: int) -> Group:
        """Return the lines of the screen."""
        room = max(1, height - _AROUND)
        body = self._table(room) if self.logs is None else self._log_lines(room)
        kind = "logs" if self.logs is not None else self.status["kind"]
        lines = [_line(f"{headline(self.status)}  ({self._url})", "bold"), *body]
        lines += [_line("")] * (height - 2 - len(lines))
        return Group(*lines, _line(one_line(self.message), "bold yellow"), _line(_HELP[kind], "dim"))

    def _table(self, room: int) -> list[Text]:
        head, rows = table(self.status, self._cpu)
        first, *lines = aligned([[each.upper() for each in head], *rows])
        index = self._index()
        top = max(0, min(index - room // 2, len(lines) - room))
        shown = [
            _line(line, "reverse" if number == index else _STYLES.get(rows[number][1], "cyan"))
            for number, line in list(enumerate(lines))[top : top + room]
        ]
        return [_line(first, "bold"), *shown]

    def _log_lines(self, room: int) -> list[Text]:
        lines: Sequence[str] = self.logs or ["nothing was written yet"]
        name = self.selected.name if self.selected is not None else ""
        return [_line(f"OUTPUT OF {name}", "bold"), *map(_line, lines[-room:])]


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style, no_wrap=True, overflow="ellipsis")


def _date(status: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(status["time"])


def _cpu_seconds(status: dict[str, Any]) -> dict[tuple[str, int, int], float]:
    """Return the CPU time of each process that is known, by service, replica and process."""
    return {
        (service["name"], replica["number"], replica["pid"]): replica["usage"]["cpu_seconds"]
        for service in status.get("services", ())
        for replica in service["replicas"]
        if replica.get("usage")
    }
