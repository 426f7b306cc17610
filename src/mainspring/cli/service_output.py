"""Output of services as lines of the supervisor: ``worker.1 | line``, or JSON with the level if it can be told."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Protocol

from mainspring.cli.user_errors import printable

if TYPE_CHECKING:
    from mainspring.events import ServiceOutput

_LEVELS = {
    "TRACE": "DEBUG", "DEBUG": "DEBUG", "INFO": "INFO", "NOTICE": "INFO", "WARN": "WARNING", "WARNING": "WARNING",
    "ERR": "ERROR", "ERROR": "ERROR", "CRIT": "CRITICAL", "CRITICAL": "CRITICAL", "FATAL": "CRITICAL", "ALERT": "CRITICAL",
    "EMERG": "CRITICAL", "PANIC": "CRITICAL",
}  # fmt: skip
_SYSLOG = ("CRITICAL", "CRITICAL", "CRITICAL", "ERROR", "WARNING", "INFO", "INFO", "DEBUG")
_WORDS = "|".join(sorted(_LEVELS, key=len, reverse=True))
_IN_TEXT = re.compile(rf"\b({_WORDS})\b|\[(?i:({_WORDS}))\]|(?i:\b(?:level|lvl|severity)=\"?({_WORDS})\b)")
_HEAD = 120
"""Characters of a line in which its level stands."""
_COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[1;31m", "DEBUG": "\x1b[2m"}
_PLAIN = "\x1b[0m"
_DESCRIPTORS = {"stdout": 1, "stderr": 2}


def level_of(line: str) -> str | None:
    """Return the level that a line of output names, as :mod:`logging` calls it; None if it names none.

    It may be a JSON object with ``level``, ``levelname`` or ``severity``, begin with ``<3>`` as journald has it, or have a word
    such as ``ERROR``, ``[error]`` or ``level=error`` near its beginning.
    """
    return _level_of_record(_record(line)) or _level_of_text(line)


def _level_of_record(record: dict[str, Any] | None) -> str | None:
    for key in ("level", "levelname", "severity"):
        value = (record or {}).get(key)
        if isinstance(value, str) and value.upper() in _LEVELS:
            return _LEVELS[value.upper()]
    return None


def _level_of_text(line: str) -> str | None:
    if len(line) > 2 and line[0] == "<" and line[2] == ">" and line[1] in "01234567":
        return _SYSLOG[int(line[1])]
    found = _IN_TEXT.search(line, 0, _HEAD)
    return _LEVELS[next(word for word in found.groups() if word).upper()] if found is not None else None


def _record(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class LineSink(Protocol):
    """What lines are written to, such as a :class:`~mainspring.cli.line_writer.LineWriter`."""

    def put(self, descriptor: int, line: str) -> None:
        """Write a line, without its end, to a stream: 1 or 2."""


class ServiceLines:
    """Writes :class:`~mainspring.events.ServiceOutput` to the stream that the process wrote to."""

    def __init__(self, writer: LineSink, *, as_json: bool, coloured: frozenset[int] = frozenset()) -> None:
        self._writer = writer
        self._as_json = as_json
        self._coloured = coloured

    def __call__(self, event: ServiceOutput) -> None:
        """Write one line."""
        descriptor = _DESCRIPTORS.get(event.stream, 1)
        self._writer.put(descriptor, self._json(event) if self._as_json else self._text(event, descriptor))

    def _text(self, event: ServiceOutput, descriptor: int) -> str:
        line = event.line if event.line.isprintable() else printable(event.line, keep="\t\x1b")
        text = f"{event.service}.{event.replica} | {line}"
        colour = _COLOURS.get(level_of(event.line) or "") if descriptor in self._coloured else None
        return text if colour is None else f"{colour}{text}{_PLAIN}"

    def _json(self, event: ServiceOutput) -> str:
        record = _record(event.line)
        level = _level_of_record(record) or _level_of_text(event.line)
        said: dict[str, Any] = {
            "time": event.at.isoformat(timespec="milliseconds"),
            **({} if level is None else {"level": level}),
            "service": event.service,
            "replica": event.replica,
            "stream": event.stream,
            "message": event.line,
        }
        if record is not None:
            said["record"] = record
        return json.dumps(said, ensure_ascii=False)
