"""The datagram socket on which one process says what ``sd_notify`` can say: ``READY=1``, ``STATUS=…`` and so on."""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

MOST_BYTES = 65_536
DATAGRAMS_A_STEP = 16
_CREDENTIALS = struct.Struct("iII")


class NotifySocket:
    """Takes notifications of one process. Its name is in the abstract namespace, so no file is left behind.

    ``users``: the uids that may send. Datagrams of others are dropped, except those of the process ``pid`` itself.
    """

    def __init__(self, name: str, users: Container[int], tell: Callable[[Mapping[str, str]], object]) -> None:
        self.name = f"@{name}"
        """The value of ``NOTIFY_SOCKET``."""
        self.pid = 0
        self._users = users
        self._tell = tell
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(f"\0{name}")
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def step(self) -> bool:
        """Tell some notifications. Return True if there may be more."""
        for _ in range(DATAGRAMS_A_STEP):
            try:
                text, ancillary, _, _ = self._socket.recvmsg(MOST_BYTES, 1024, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return False
            if self._is_allowed(ancillary) and (news := parse(text)):
                self._tell(news)
        return True

    def close(self) -> None:
        """Close it (idempotent)."""
        self._socket.close()

    def _is_allowed(self, ancillary: list[tuple[int, int, bytes]]) -> bool:
        allowed = False
        for level, kind, content in ancillary:
            if level != socket.SOL_SOCKET:
                continue
            if kind == socket.SCM_RIGHTS:  # a sender of BARRIER=1 waits until they are closed
                for descriptor in memoryview(content[: len(content) // 4 * 4]).cast("i"):
                    os.close(descriptor)
            elif kind == socket.SCM_CREDENTIALS:
                pid, user, _ = _CREDENTIALS.unpack_from(content)
                allowed = user in self._users or pid == self.pid
        return allowed


def parse(datagram: bytes) -> dict[str, str]:
    """Return the ``NAME=value`` lines of a datagram. Other lines are dropped."""
    lines = datagram.decode("utf-8", "replace").splitlines()
    pairs = (line.partition("=") for line in lines)
    return {name: value for name, equals, value in pairs if name and equals}
