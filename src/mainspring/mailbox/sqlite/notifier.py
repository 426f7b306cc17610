"""How those who wait for messages hear of them: within the process, and across processes through a bell.

A process that has waiting receives binds a datagram socket in the directory beside the file (``FILE-wake``); whoever has
committed something that can be claimed sends a byte to every socket there. A bell that nobody hears (its process died) is
removed by the next ringer. A lost ring costs a second at most: waiting processes look at the file that often anyway.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from typing import TYPE_CHECKING

from mainspring.core import random
from mainspring.core.process import event_loop
from mainspring.mailbox import waiting

if TYPE_CHECKING:
    from collections.abc import Callable


NOTE_SIZE = 512
"""Bytes that are read of a ring at most: the note that a message was cancelled has its id in it."""


def note_of(mailbox: int, message_id: str) -> bytes:
    """What the bell is rung with for a message that was cancelled while somebody had it in hand."""
    return f"{mailbox} {message_id}".encode()


def read_note(note: bytes) -> tuple[int, str] | None:
    """The mailbox and the message that a note tells of; None where it says only that something has come."""
    mailbox, _, message_id = note.decode(errors="replace").partition(" ")
    return (int(mailbox), message_id) if mailbox.isdecimal() and message_id else None


class Waiters(waiting.Waiters):
    """The receives of one mailbox object that wait, as the store's threads see them.

    ``signals`` is raised by those threads; ``cancelled`` is called with the ids of messages that were cancelled, also while
    nobody waits where ``listens`` is set, and ``due_in`` with the seconds until the next thing is due.
    """

    __slots__ = ("announced", "cancelled", "due_in", "listens", "loop", "mailbox")

    def __init__(self, mailbox: int, due_in: Callable[[float], None], cancelled: Callable[[list[str]], object]) -> None:
        super().__init__()
        self.mailbox = mailbox
        self.loop = event_loop()
        self.due_in = due_in
        self.cancelled = cancelled
        self.listens = False
        self.announced = math.inf


class Bell:
    """The sockets beside one file. All methods may be called from any thread; none raises for what the others do."""

    def __init__(self, path: str) -> None:
        self._directory = f"{path}-wake"
        self._folder: int | None = None
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._name = ""
        self._closed = threading.Event()

    def listen(self) -> None:
        """Hang up a bell of one's own. Where that cannot be, :meth:`wait` just waits."""
        self._closed.clear()
        with contextlib.suppress(OSError):
            os.makedirs(self._directory, exist_ok=True)
            name = f"{os.getpid()}-{random.token()}"
            bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            try:
                bell.bind(self._path(name))
            except OSError:
                bell.close()
                raise
            self._name, self._socket = name, bell

    def wait(self, seconds: float) -> list[bytes]:
        """What the bell was rung with; nothing once ``seconds`` are over or it was taken down."""
        bell = self._socket
        if bell is None:
            self._closed.wait(seconds)
            return []
        notes: list[bytes] = []
        try:
            bell.settimeout(seconds)
            notes.append(bell.recv(NOTE_SIZE))
            bell.setblocking(False)
            while notes[-1] and len(notes) < 1_000:
                notes.append(bell.recv(NOTE_SIZE))
        except OSError:  # the timeout, no more notes, or a bell that was taken down
            pass
        return [note for note in notes if note]

    def ring(self, note: bytes = b"!") -> None:
        """Wake every other process that waits on the file, and hand it ``note``."""
        try:
            names = [name for name in os.listdir(self._opened()) if name != self._name]
        except OSError:  # no such directory: nobody has ever waited
            return
        if not names:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as ringer:
            ringer.setblocking(False)
            for name in names:
                try:
                    ringer.sendto(note, self._path(name))
                except ConnectionRefusedError:  # its process died
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=self._opened())
                except OSError:  # it is being taken down, or has rings enough
                    continue

    @property
    def interrupted(self) -> bool:
        """Whether :meth:`interrupt` was called since the bell was hung up."""
        return self._closed.is_set()

    def interrupt(self) -> None:
        """Let :meth:`wait` return at once, from now on."""
        self._closed.set()
        bell = self._socket
        if bell is not None:
            with contextlib.suppress(OSError):  # a shutdown() of the socket would not wake one who waits with a timeout
                bell.sendto(b"", socket.MSG_DONTWAIT, self._path(self._name))

    def take_down(self) -> None:
        """Remove one's own bell; idempotent."""
        bell, self._socket = self._socket, None
        if bell is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._opened())
            bell.close()
            self._name = ""

    def close(self) -> None:
        """Remove the bell and let go of the directory."""
        self.take_down()
        folder, self._folder = self._folder, None
        if folder is not None:
            os.close(folder)

    def _opened(self) -> int:
        with self._lock:
            if self._folder is None:
                self._folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            return self._folder

    def _path(self, name: str) -> str:
        """A short path to a socket: an address holds 107 bytes, and directories can be deep."""
        return f"/proc/self/fd/{self._opened()}/{name}"
