"""Listening sockets that the supervisor holds for its services, so that a restart of a service refuses no connection; and the
paths of the sockets that their processes open for probes.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

from mainspring.errors import ConfigError
from mainspring.services.addresses import host_port

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.services.spec import ServiceSpec

BACKLOG = 4096
"""Connections that wait in the kernel while a service restarts; the kernel's own limit may be lower."""


class ListeningSockets:
    """The sockets of all services, by address. Each is opened once, and held until its address is no longer used."""

    def __init__(self) -> None:
        self._open: dict[str, socket.socket] = {}

    def of(self, spec: ServiceSpec) -> tuple[socket.socket, ...]:
        """Return the sockets of a service, in the order of its ``listen``."""
        return tuple(self._open[address] for address in spec.listen)

    def open(self, specs: Sequence[ServiceSpec]) -> None:
        """Open what is not open. Raises if one cannot be opened; then none of the new ones is.

        :raises ConfigError: an address is malformed, in use, not of this machine, or named twice.
        """
        fresh: dict[str, socket.socket] = {}
        owners: dict[str, str] = {}
        try:
            for spec in specs:
                for address in spec.listen:
                    if address in owners:
                        raise ConfigError(
                            f"service {spec.name!r}: listen has {address!r}, which service {owners[address]!r} has too"
                        )
                    owners[address] = spec.name
                    if address not in self._open:
                        fresh[address] = _opened(address, spec.name)
        except ConfigError:
            for address, opened in fresh.items():
                _close(address, opened)
            raise
        self._open.update(fresh)

    def keep_only(self, specs: Sequence[ServiceSpec]) -> None:
        """Close the sockets that none of these services names."""
        used = {address for spec in specs for address in spec.listen}
        for address in [address for address in self._open if address not in used]:
            _close(address, self._open.pop(address))


class SocketPlaces:
    """A directory for the sockets that processes open themselves (``MAINSPRING_SOCKET``). Leaving the block removes it.

    :raises ConfigError: it cannot be made.
    """

    def __enter__(self) -> SocketPlaces:
        try:
            self._directory = tempfile.mkdtemp(prefix="mainspring-")
            os.chmod(self._directory, 0o711)  # noqa: S103 - for services that run as another user
        except OSError as error:
            raise ConfigError(
                f"no directory for the sockets of services can be made in {tempfile.gettempdir()} (TMPDIR):"
                f" {error.strerror}"
            ) from None
        self._numbers: dict[str, int] = {}
        return self

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def path_of(self, spec: ServiceSpec, replica: int) -> str:
        """Return the path for a replica. It is short, as that of a socket must be, and only its user can use it."""
        number = self._numbers.setdefault(spec.name, len(self._numbers) + 1)
        place = os.path.join(self._directory, str(number))
        with suppress(OSError, LookupError):  # then the process says so, which is to use it
            os.makedirs(place, mode=0o700, exist_ok=True)
            if spec.user is not None and os.geteuid() == 0:
                shutil.chown(place, spec.user)
        return os.path.join(place, f"{replica}.sock")


def _opened(address: str, service: str) -> socket.socket:
    where = f"service {service!r}: it cannot listen on {address!r}"
    try:
        return _listen_unix(address.removeprefix("unix:")) if address.startswith("unix:") else _listen_tcp(address)
    except ValueError:
        raise ConfigError(
            f"service {service!r}: listen takes unix:/path, and host:port with an IP address or localhost as host,"
            f" not {address!r}"
        ) from None
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise ConfigError(
            f"{where}: " + ("the address is in use" if in_use else error.strerror or str(error))
        ) from None


def _listen_tcp(address: str) -> socket.socket:
    host, port = host_port(address)
    try:  # without a name server, which might keep the supervisor waiting
        family, kind, protocol, _, where = socket.getaddrinfo(
            "127.0.0.1" if host == "localhost" else host,
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_NUMERICHOST,
        )[0]
    except socket.gaierror:
        raise ValueError(address) from None
    return _listening(socket.socket(family, kind, protocol), where)


def _listen_unix(path: str) -> socket.socket:
    if not path:
        raise ValueError(path)
    _remove_stale(path)
    return _listening(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), path)


def _listening(made: socket.socket, where: tuple[object, ...] | str) -> socket.socket:
    try:
        made.setblocking(False)
        if made.family != socket.AF_UNIX:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _remove_stale(path: str) -> None:
    """Remove the socket that an earlier run has left there, unless a process still listens on it."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.setblocking(False)
        try:
            asked.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:  # its backlog is full: it is alive
            return


def _close(address: str, opened: socket.socket) -> None:
    opened.close()
    if address.startswith("unix:"):
        with suppress(OSError):
            os.unlink(address.removeprefix("unix:"))
