"""What goes wrong at the command line, as one line that says what to do."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
from pathlib import Path
from traceback import extract_tb

from mainspring.errors import describe
from mainspring.redaction import without_secrets

WRONG_USE = 2
FAILED = 1


class UserError(Exception):
    """Ends the command with ``status`` and this one line on standard error."""

    def __init__(self, text: str, status: int = WRONG_USE) -> None:
        super().__init__(text)
        self.status = status


def printable(text: str, *, keep: str = "") -> str:
    """Return ``text`` without what a terminal would obey: errors and bodies come from anywhere."""
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def say(text: str, *, keep: str = "") -> None:
    """Write one remark of ours to standard error, in one call, so that several processes' lines do not mix.

    Whatever it repeats of what the user wrote, it shows no password (of a URL). Where no reader is left, that is its right, and
    changes nothing about how the command ends.
    """
    try:
        sys.stderr.write(f"mainspring: {printable(without_secrets(text), keep=keep)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - else the end of the program tries once more


def flush_output() -> None:
    """Write what is still to be written to standard output, unless its reader has gone, or it takes no more."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as above


class Remarks(logging.Handler):
    """Print the package's warnings while a verb works as remarks of the command; leave other records to ``before``.

    It replaces ``logging.lastResort``, which prints records without a logger's name where logging is not set up.
    """

    def __init__(self, before: logging.Handler | None) -> None:
        super().__init__(logging.WARNING)
        self._before = before

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        if record.name.partition(".")[0] == "mainspring" and not record.exc_info:
            say(record.getMessage())
        elif self._before is not None:
            self._before.handle(record)


def one_line(error: BaseException) -> str:
    """Return an exception as one line: its type, and the first line of what it says."""
    text = f"{type(error).__name__}: {error.msg}" if isinstance(error, SyntaxError) else describe(error)
    return text.strip().splitlines()[0]


def user_line(error: BaseException) -> str:
    """Return the innermost line of the user's own code that an exception passed through, as ``"app.py:12"``, or ``""``."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    foreign = foreign_directories()
    for frame in reversed(extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", *foreign)):
            return f"{_shown(frame.filename)}:{frame.lineno}"
    return ""


def explain(error: BaseException) -> str:
    """Return an exception out of the user's code as one line that begins with :func:`user_line`."""
    return ": ".join(filter(None, (user_line(error), one_line(error))))


def foreign_directories() -> tuple[str, ...]:
    """Return the directories of code that is not the user's: this package, the standard library, installed packages."""
    installed = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    own = str(Path(__file__).parents[1])
    return (f"{own}/", *(f"{path}/" for path in installed))


def _shown(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
