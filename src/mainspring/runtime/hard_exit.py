"""How a process leaves when it can no longer end by itself: last words that cannot hang, then the kernel's help."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, NoReturn, TextIO

from mainspring.core.tracebacks import all_stacks

if TYPE_CHECKING:
    from collections.abc import Callable

LAST_WORDS = 0.4
"""Seconds that last words may take: a full pipe or a lock that the stuck thread holds must not keep the process alive."""


def last_words(text: Callable[[], str], stream: TextIO | None = None, *, within: float = LAST_WORDS) -> None:
    """Write ``text()`` to ``stream`` (default: standard error), and wait at most ``within`` seconds for that.

    It runs in a thread of its own, since anything in here may block for ever; whatever it raises is written instead.
    """
    speaker = threading.Thread(target=_speak, args=(text, stream), name="mainspring-last-words", daemon=True)
    try:
        speaker.start()
    except RuntimeError:  # no more threads to be had: then without the safety
        _speak(text, stream)
        return
    speaker.join(within)


def kill_self() -> NoReturn:
    """End this process by SIGKILL, which no handler can keep from working. The status a parent sees is -9 (137 in a shell).

    The first process of a container cannot be killed from inside, so that one exits with status 137.
    """
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)


def kill_with_words(words: str) -> None:
    """Write ``words`` and the stacks of all threads to standard error, and end this process by SIGKILL."""
    last_words(lambda: f"{words}\nThe stacks of its threads:\n{all_stacks(without=(threading.get_ident(),))}")
    kill_self()


def _speak(text: Callable[[], str], stream: TextIO | None) -> None:
    try:
        words = text()
    except BaseException as error:
        words = f"mainspring: the explanation failed: {error!r}"
    out = sys.stderr if stream is None else stream
    try:
        # Past the stream's own lock where there is a file below: the thread that is stuck may hold that lock.
        _write_all(out.fileno(), f"\n{words}\n".encode(errors="backslashreplace"))
    except (OSError, ValueError, AttributeError):  # closed, no file below, or no stream at all
        if out is not None:
            out.write(f"\n{words}\n")
    for each in (out, sys.stdout):
        if each is not None:
            each.flush()


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
