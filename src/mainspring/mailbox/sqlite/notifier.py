"""How the processes that share a mailbox file wake each other: a socket of each in a directory beside the file.

A notification is sent after the COMMIT, so what it tells of can be seen. It can be lost: waiting receives look again once
a second. A thread of its own hears it (``Writer._watch``). Which receives are woken, and when, is decided in ``writer``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from mainspring.core import random

NOTE_SIZE = 512
"""The most bytes that are read of a notification: that of a cancelled message has its id in it."""


def note_of(mailbox: int, message_id: str) -> bytes:
    """Return the notification that a message in flight was cancelled."""
    return f"{mailbox} {message_id}".encode()


def read_note(note: bytes) -> tuple[int, str] | None:
    """Return the mailbox and the message that a note tells of, or None if it says only that something has come."""
    mailbox, _, message_id = note.decode(errors="replace").partition(" ")
    return (int(mailbox), message_id) if mailbox.isdecimal() and message_id else None


class Notifier:
    """The sockets beside one file. All methods may be called from any thread; none raises for what the others do."""

    def __init__(self, path: str) -> None:
        self._directory = f"{path}-wake"
        self._folder: int | None = None
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._name = ""
        self._closed = threading.Event()

    def listen(self) -> None:
        """Make a socket of this process. Where that cannot be, :meth:`wait` just waits."""
        self._closed.clear()
        with contextlib.suppress(OSError):
            os.makedirs(self._directory, exist_ok=True)
            name = f"{os.getpid()}-{random.token()}"
            notifier = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            try:
                notifier.bind(self._path(name))
            except OSError:
                notifier.close()
                raise
            self._name, self._socket = name, notifier

    def wait(self, seconds: float) -> list[bytes]:
        """Return the notifications that have come; nothing once ``seconds`` are over or it was taken down."""
        notifier = self._socket
        if notifier is None:
            self._closed.wait(seconds)
            return []
        notes: list[bytes] = []
        try:
            notifier.settimeout(seconds)
            notes.append(notifier.recv(NOTE_SIZE))
            notifier.setblocking(False)
            while notes[-1] and len(notes) < 1_000:
                notes.append(notifier.recv(NOTE_SIZE))
        except OSError:  # the timeout, no more notes, or a notifier that was taken down
            pass
        return [note for note in notes if note]

    def notify(self, note: bytes = b"!") -> None:
        """Wake every other process that waits on the file, and hand it ``note``."""
        try:
            names = [name for name in os.listdir(self._opened()) if name != self._name]
        except OSError:  # no such directory: no process has ever waited
            return
        if not names:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            for name in names:
                try:
                    sender.sendto(note, self._path(name))
                except ConnectionRefusedError:  # its process died
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=self._opened())
                except OSError:  # it is being taken down, or has notifications enough
                    continue

    @property
    def interrupted(self) -> bool:
        """True if :meth:`interrupt` was called since :meth:`listen`."""
        return self._closed.is_set()

    def interrupt(self) -> None:
        """Let :meth:`wait` return at once, from now on."""
        self._closed.set()
        notifier = self._socket
        if notifier is not None:
            with contextlib.suppress(OSError):  # a shutdown() of the socket would not wake one who waits with a timeout
                notifier.sendto(b"", socket.MSG_DONTWAIT, self._path(self._name))

    def take_down(self) -> None:
        """Remove one's own notifier; idempotent."""
        notifier, self._socket = self._socket, None
        if notifier is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._opened())
            notifier.close()
            self._name = ""

    def close(self) -> None:
        """Remove the notifier and let go of the directory."""
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
        """Return a short path to a socket: an address holds 107 bytes, and directories can be deep."""
        return f"/proc/self/fd/{self._opened()}/{name}"
