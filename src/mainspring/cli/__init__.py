"""The command line. Verbs are thin: they read their arguments, call the package, and print."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit status: 0 done, 1 failed, 2 wrong use, and for ``run`` that of the shutdown."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_standard_descriptors()
    _escape_what_cannot_be_encoded()
    if (
        signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    ):  # as a parent can leave it: the system forgets how workers end
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if arguments[:1] == ["run"]:
        _take_signals()
    # A process that ends need not look for garbage, which the system frees with it: that was most of the time to leave.
    atexit.register(gc.freeze)
    import logging

    from mainspring.cli.app import call
    from mainspring.cli.user_errors import Remarks

    logging.lastResort = Remarks(logging.lastResort)  # for the verbs that set up no logging of their own
    return call(arguments)


def _open_standard_descriptors() -> None:
    """Open those of the descriptors 0 to 2 that are closed: else the next file would get what is meant for people."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # worker processes have the same need
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process


def _escape_what_cannot_be_encoded() -> None:
    """Let standard output and error escape the characters that their encoding lacks, as of a body, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _take_signals() -> None:
    """Have handlers before anything slow is imported.

    The signals are blocked while the code that installs the handlers is imported. The kernel keeps a blocked one, even for the
    first process of a container, from which it withholds signals that have no handler.
    """
    signals = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        from mainspring.cli.early_signals import CommandSignals

        CommandSignals.install()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    # The end of the interpreter puts the default handlers back, but not over an ignored signal: one that comes that late
    # would replace the exit status by its own.
    for signum in signals:
        atexit.register(signal.signal, signum, signal.SIG_IGN)
