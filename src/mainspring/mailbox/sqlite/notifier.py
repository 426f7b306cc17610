"""How the processes that share a mailbox file wake each other: a socket of each in a directory beside the file.

A notification is sent after the COMMIT, so what it tells of can be seen. It can be lost: waiting receives look again once
a second. A process has one socket, of which each directory has a hard link with a name of its own; a notification says to
which name it was sent, and so which file has news. Where a file system cannot link, a file gets a socket of its own.

Processes of earlier releases have a socket for each file, and do not say the name: then all files are looked at.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mainspring.core import clock, random
from mainspring.core.directory import open_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTE_SIZE = 512
"""The most bytes that are read of a notification: that of a cancelled message, and that of results, have ids in them."""
NEWS = "!"
RESULTS = "="
SHORTEST_QUEUE = 10
"""How many notifications any system keeps for a socket. Where as many have come, others may have been refused."""
SETTLED = 0.03
"""Seconds after which a change of a file or directory surely has another time than the one before: clocks of file systems tick
each 10 ms, or finer; some have whole seconds."""


def note_of(mailbox: int, message_id: str) -> bytes:
    """Return the notification that a message in flight was cancelled."""
    return f"{mailbox} {message_id}".encode()


def notes_of_results(mailbox: int, message_ids: list[str]) -> Iterator[bytes]:
    """Yield notifications that these messages were acknowledged with results: as few as have room for all ids."""
    head = note = f"{RESULTS} {mailbox}".encode()
    for message_id in message_ids:
        longer = note + f" {message_id}".encode()
        if len(longer) > NOTE_SIZE and note != head:
            yield note
            longer = head + longer[len(note) :]
        note = longer
    yield note


class Notifier:
    """Wakes the other processes that listen beside one file. No :class:`OSError` leaves it: a notification may be lost."""

    def __init__(self, path: str) -> None:
        self.directory = f"{path}-wake"
        self._names: list[str] = []
        self._as_of = 0

    def notify(self, own: str, note: bytes | None = None) -> None:
        """Wake every other process that listens, and hand it ``note``; this one listens under the name ``own``."""
        names = [name for name in self._found() if name != own]
        if not names:
            return
        with (
            contextlib.suppress(OSError),
            open_directory(self.directory) as folder,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            sender.setblocking(False)
            for name in names:
                try:
                    sender.sendto(os.fsencode(f"{NEWS} {name}") if note is None else note, _address(folder, name))
                except ConnectionRefusedError:  # its process died
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=folder)
                except OSError:  # it is being taken down, or has notifications enough
                    continue

    def has(self, name: str) -> bool:
        """True if a process can be notified under that name."""
        return os.path.exists(f"{self.directory}/{name}")

    def _found(self) -> list[str]:
        """Return the names in the directory, which is read only where it has changed."""
        try:
            changed = os.stat(self.directory).st_mtime_ns
            if changed != self._as_of:
                self._names = os.listdir(self.directory)
                self._as_of = changed if has_settled(changed) else 0
        except OSError:  # no such directory: no process has ever waited
            return []
        return self._names


@dataclass
class ReceivedNotifications:
    """What was received: the ``names`` they were sent to, messages that were ``cancelled`` (mailbox and id), and the ids of
    messages that left ``results``, by mailbox.

    ``unknown``: there may be others, of any file.
    """

    names: set[str] = field(default_factory=set)
    cancelled: list[tuple[int, str]] = field(default_factory=list)
    results: dict[int, list[str]] = field(default_factory=dict)
    unknown: bool = False

    def add(self, note: bytes) -> None:
        """Take one in."""
        kind, _, name = note.decode(errors="replace").partition(" ")
        if kind.isdecimal() and name:
            self.cancelled.append((int(kind), name))
        elif kind == NEWS and name:
            self.names.add(name)
        elif kind == RESULTS and (mailbox := name.partition(" ")[0]).isdecimal():
            self.results.setdefault(int(mailbox), []).extend(name.split(" ")[1:])
        else:
            self.unknown = True


@dataclass(eq=False, slots=True)
class Receiver:
    """A socket, the device that it is on, and the directory of each of its names."""

    socket: socket.socket
    device: int
    directories: dict[str, str]


class NotificationListener:
    """The sockets of this process to which notifications are sent. All methods may be called from any thread; none raises.

    The lock is not held while a disk is used: a disk that hangs holds up its own file alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receivers: list[Receiver] = []
        self._interrupts, self._interrupter = socket.socketpair()
        self._interrupts.setblocking(False)
        self._interrupter.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._interrupts, selectors.EVENT_READ)

    def add(self, directory: str) -> str:
        """Listen under a new name in that directory, which is made if need be. Return the name, "" where that cannot be."""
        name = f"{os.getpid()}-{random.token()}"
        try:
            os.makedirs(directory, exist_ok=True)
            device = os.stat(directory).st_dev
            if not self._link(directory, name, device):
                self._bind(directory, name, device)
        except OSError:
            return ""
        return name

    def remove(self, name: str) -> None:
        """Listen no longer under that name."""
        with self._lock:
            receiver = next((receiver for receiver in self._receivers if name in receiver.directories), None)
        if receiver is not None:
            with contextlib.suppress(OSError):
                os.unlink(f"{receiver.directories[name]}/{name}")
            self._forget(receiver, name)

    def wait(self, seconds: float | None) -> ReceivedNotifications:
        """Return what has come, or nothing once ``seconds`` are over or it was interrupted."""
        received = ReceivedNotifications()
        for key, _ in self._selector.select(seconds):
            count = 0
            try:
                while note := key.fileobj.recv(NOTE_SIZE):  # type: ignore[union-attr]
                    count += 1
                    if key.fileobj is not self._interrupts:
                        received.add(note)
            except OSError:  # no more, or it was removed
                pass
            received.unknown = received.unknown or count >= SHORTEST_QUEUE
        return received

    def interrupt(self) -> None:
        """Let :meth:`wait` return at once."""
        with contextlib.suppress(OSError):  # it has interrupts enough
            self._interrupter.send(b"!")

    def close(self) -> None:
        """Let go of everything; no thread may wait any more, and no name be left."""
        self._selector.close()
        self._interrupts.close()
        self._interrupter.close()

    def _link(self, directory: str, name: str, device: int) -> bool:
        """Give the newest socket of that device one more name. Return False if there is none, or it cannot have one."""
        with self._lock:
            receiver = next((receiver for receiver in reversed(self._receivers) if receiver.device == device), None)
            if receiver is None:
                return False
            other, there = next(iter(receiver.directories.items()))
            receiver.directories[name] = directory  # before it is there: the socket must not be closed meanwhile
        try:
            os.link(f"{there}/{other}", f"{directory}/{name}")
        except OSError:
            self._forget(receiver, name)
            return False
        return True

    def _bind(self, directory: str, name: str, device: int) -> None:
        new = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            new.setblocking(False)
            with open_directory(directory) as folder:
                new.bind(_address(folder, name))
            with self._lock:
                self._selector.register(new, selectors.EVENT_READ)
                self._receivers.append(Receiver(new, device, {name: directory}))
        except BaseException:
            new.close()
            raise

    def _forget(self, receiver: Receiver, name: str) -> None:
        with self._lock:
            del receiver.directories[name]
            if not receiver.directories:
                self._receivers.remove(receiver)
                self._selector.unregister(receiver.socket)
                receiver.socket.close()


def has_settled(changed: int) -> bool:
    """True if what changes from now on has another time than ``changed`` (nanoseconds, POSIX)."""
    seconds, rest = divmod(changed, 1_000_000_000)
    return seconds + (rest / 1e9 if rest else 1.0) + SETTLED < clock.wall_clock()()


def _address(folder: int, name: str) -> str:
    """Return a short path to a socket in an open directory: an address holds 107 bytes, and directories can be deep."""
    return f"/proc/self/fd/{folder}/{name}"
