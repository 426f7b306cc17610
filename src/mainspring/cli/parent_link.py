"""The line between a process and the one that started it: a socket that shows each when the other is gone.

The parent hands one end of a socket pair to the child. When the parent dies, however it dies, the child reads the end of
the stream and shuts down, so that no orphan stays behind. (The kernel's parent-death signal would fire at the end of the
*thread* that started the child.) The child tells the parent, one JSON object a line, what an exit status cannot say.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from contextlib import suppress
from typing import Any

from mainspring.core import process

VARIABLE = "MAINSPRING_PARENT_LINK"
"""Holds ``FD:NUMBER``: the inherited socket, and which worker this is, from 1."""

LOAD_TIMEOUT = 10.0
"""Seconds that a process told to stop has while it has not said how long its shutdown may take."""

MARGIN = 5.0
"""Seconds beyond the longest shutdown after which a process that still lives is killed."""


class ParentLink:
    """The child's end. Everything on it is best effort: a parent that is gone hears nothing and needs nothing."""

    def __init__(self, end: socket.socket, number: int) -> None:
        self.number = number
        self._end = end
        process.on_fork(self, ParentLink._forget)
        self._stop_within = LOAD_TIMEOUT

    @classmethod
    def from_environment(cls) -> ParentLink | None:
        """Return the link that the parent passed, or None if this process was started by hand. Works once."""
        text = os.environ.pop(VARIABLE, None)  # not for the processes that the handlers start
        if text is None:
            return None
        descriptor, _, number = text.partition(":")
        try:
            os.set_inheritable(int(descriptor), False)
            return cls(socket.socket(fileno=int(descriptor)), int(number))
        except (ValueError, OSError):  # the variable came down from somewhere, the descriptor did not
            return None

    def start(self) -> None:
        """Watch the parent from a thread: it works during an import, and where the event loop is stuck."""
        threading.Thread(target=self._watch, name="mainspring parent link", daemon=True).start()

    def _forget(self) -> None:
        """Close it in a forked child: the parent must see the end of this process, not of its children."""
        self._end.close()

    def tell(self, **news: Any) -> bool:
        """Send one object to the parent. Return True if it was sent. ``stop_within``: how long a shutdown may take."""
        self._stop_within = news.get("stop_within", self._stop_within)
        try:
            self._end.sendall(json.dumps(news).encode() + b"\n")
        except OSError:
            return False
        return True

    def _watch(self) -> None:
        with suppress(OSError):
            while self._end.recv(1024):
                pass
        # To the main thread itself: only there a signal cuts a blocking system call short.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        threading.Event().wait(self._stop_within + MARGIN)
        os.kill(os.getpid(), signal.SIGKILL)


def link_for_child(number: int) -> tuple[socket.socket, socket.socket, dict[str, str]]:
    """Return a new link: the parent's end, the child's (to pass on and then close), and the child's environment."""
    ours, theirs = socket.socketpair()
    return ours, theirs, {**os.environ, VARIABLE: f"{theirs.fileno()}:{number}"}
