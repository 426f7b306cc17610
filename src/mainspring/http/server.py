"""Where the health app listens, and the daemon that serves it: uvicorn on asyncio, anycorn on trio."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from mainspring.core.process import async_library
from mainspring.errors import ConfigError
from mainspring.runtime.resolver import resolve

if TYPE_CHECKING:
    from anyio.abc import TaskStatus
    from starlette.types import ASGIApp

_BACKLOG = 128
_UNIX = "unix:"


class HealthServer:
    """Serves one app on one listening socket, as a daemon: ``await scope.start(server.serve, stop=server.stop)``.

    The socket (from :func:`listen`) is the server's from the moment it is made. Nothing ticks between requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        grace: float = 2.0,
        head_timeout: float = 5.0,
        connections: int | None = None,
    ) -> None:
        """
        :param grace: seconds that requests still under way at :meth:`stop` may take before they are cut off. Answers of
            the health app take far less; what could last longer is a stream of an app of your own.
        :param head_timeout: seconds within which the head of a request must have come, from the connection's start or the
            last answer on; the connection is closed then.
        :param connections: how many connections are kept at most. By default 100, and at most a quarter of the descriptors that
            the process may have. See :mod:`mainspring.http.connections` for what happens at the limit.
        """
        self._app = app
        self._sock = sock
        self._grace = grace
        self._head_timeout = head_timeout
        self._connections = connections
        self._stopping = anyio.Event()
        self._file = _identity(sock)
        self.url = url(sock)
        """Where it is reached, for people: the port is the real one where 0 was asked for."""

    def __repr__(self) -> str:
        return f"<HealthServer {self.url}>"

    def stop(self) -> None:
        """Ask it to end: no new connections, finish the requests under way. Before :meth:`serve` it is remembered."""
        self._remove_file()  # while it still listens, so that a successor's file cannot be meant
        self._stopping.set()

    async def serve(self, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until :meth:`stop`. ``started`` hands over the URL. Cancelled, it closes every socket without grace.

        :raises ConfigError: it runs on trio and anycorn is not installed.
        """
        try:
            from mainspring.http.connections import Connections, default_limit

            if async_library() == "trio":
                from mainspring.http.on_trio import serve
            else:
                from mainspring.http.on_asyncio import serve
            await serve(
                self._app,
                self._sock,
                self._stopping,
                grace=self._grace,
                head_timeout=self._head_timeout,
                connections=Connections(self._connections or default_limit()),
                started=lambda: task_status.started(self.url),
            )
        finally:
            self._remove_file()
            self._sock.close()

    def _remove_file(self) -> None:
        file, self._file = self._file, None
        if file is not None and _inode(file[0]) == file[1]:
            Path(file[0]).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------ listening


async def listen(host: str, port: int) -> socket.socket:
    """Bind as :func:`bind` does, with a host name looked up on a thread of the library's own."""
    name = _bare(host)
    if not name or host.startswith(_UNIX):
        return bind(host, port)
    try:
        addresses = await resolve(name)
    except OSError as error:
        raise _unresolved(host, error) from None
    return bind(host, port, _preferred(addresses))


def _preferred(addresses: list[str]) -> str:
    """Prefer IPv4 where a name has both kinds: most probes ask that."""
    return next((address for address in addresses if ":" not in address), addresses[0])


def _bare(host: str) -> str:
    return host.strip().removeprefix("[").removesuffix("]")


def _unresolved(host: str, error: OSError | UnicodeError) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(
        f"health_host {host!r} cannot be resolved ({reason}): give an address of this machine, such as 127.0.0.1"
    )


def bind(host: str, port: int, address: str | None = None) -> socket.socket:
    """Return a listening socket on ``host`` and ``port``; port 0 takes a free one. A host ``unix:/path`` is a Unix socket.

    ``address`` is that of a host name which was looked up. ``::`` takes IPv4 as well. A Unix socket can be used by this
    user only, and replaces the file of a program that is gone.

    :raises ConfigError: one line on what is wrong and what to do: the port is taken, needs privileges, the host is none
        of this machine's, the path cannot be used.
    """
    if host.startswith(_UNIX):
        return _bind_unix(host.removeprefix(_UNIX))
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65_535:
        raise ConfigError(f"health_port must be a whole number from 0 (any free one) to 65535, not {port!r}")
    if not (name := _bare(host)):
        raise ConfigError("health_host is empty: say 127.0.0.1 for this machine only, or 0.0.0.0 for every interface")
    try:
        found = socket.getaddrinfo(address or name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise _unresolved(host, error) from None
    family, kind, protocol, _, place = next((one for one in found if one[0] == socket.AF_INET), found[0])
    try:
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"health_host {host!r}: this machine cannot use such addresses ({error.strerror})") from None
    try:
        # Lets a restart have the port while old connections are still in TIME_WAIT; two listeners remain impossible.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(name != "::"))
        sock.bind(place)
        sock.listen(_BACKLOG)  # here, not in the server: a port that is taken can be noticed as late as this
    except OSError as error:
        sock.close()
        raise ConfigError(_why(error, host, port)) from None
    sock.setblocking(False)
    return sock


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"health_port {port} on {host} is in use by another program: choose another one (0 takes any free one),"
            " or stop that program"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"health_port {port} on {host} needs privileges ({error.strerror}): choose one from 1024 up"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"health_host {host!r} is not an address of this machine: say 127.0.0.1 for this machine only,"
            " or 0.0.0.0 for every interface"
        )
    return f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another health_host or health_port"


def _bind_unix(path: str) -> socket.socket:
    if not path:
        raise ConfigError("health_host 'unix:' names no path: say unix:/path/to/socket")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        os.fchmod(sock.fileno(), 0o600)  # on Linux the file is made with the mode that its socket has before
        sock.bind(path)
        sock.listen(_BACKLOG)
    except ConfigError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on unix:{path}: {error.strerror or error}; choose a path of at most 107 bytes in a directory"
            " that exists and that this user may write to"
        ) from None
    sock.setblocking(False)
    return sock


def _remove_stale(path: str) -> None:
    """Remove the socket file of a program that is gone. Raise if one still listens or the file is no socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen on unix:{path}: the file exists and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
    raise ConfigError(f"unix:{path} is in use by another program: choose another path, or stop that program")


def _identity(sock: socket.socket) -> tuple[str, int | None] | None:
    """Return the path of a Unix socket and its inode, or None for others."""
    if sock.family != socket.AF_UNIX:
        return None
    path = str(sock.getsockname())
    return path, _inode(path)


def _inode(path: str) -> int | None:
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None


def is_loopback(sock: socket.socket) -> bool:
    """True if only this machine can reach the listener."""
    return sock.family == socket.AF_UNIX or ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def url(sock: socket.socket) -> str:
    """Return the address of the listener as people write it: ``http://127.0.0.1:8080``, ``unix:/run/app.sock``."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"{_UNIX}{name}"
    host, port = name[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"
