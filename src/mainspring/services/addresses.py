"""The addresses of probes, read from text."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

PORTS = {"http": 80, "https": 443}


class HostPort(NamedTuple):
    """A TCP address."""

    host: str
    port: int


class HttpTarget(NamedTuple):
    """Where a GET goes: a TCP address, and ``path`` with the query as it is sent."""

    address: HostPort
    tls: bool
    host_header: str
    path: str


def host_port(text: str) -> HostPort:
    """Read ``host:port``; an IPv6 address stands in brackets.

    :raises ValueError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (host and colon and port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
        raise ValueError("host:port, with a port from 1 to 65535")
    return HostPort(host, int(port))


def http_target(url: str) -> HttpTarget:
    """Read an ``http://`` or ``https://`` URL.

    :raises ValueError: it is something else, or has a login in it.
    """
    expected = "http://host:port/path, https://host:port/path or unix:/path.sock/path"
    if not url.isascii() or any(character <= " " for character in url):
        raise ValueError(f"{expected}, of ASCII characters without spaces")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(expected) from None
    if parts.scheme not in PORTS or not parts.hostname or port == 0:
        raise ValueError(expected)
    if "@" in parts.netloc:
        raise ValueError(f"{expected}, without a login")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    address = HostPort(parts.hostname, port or PORTS[parts.scheme])
    return HttpTarget(address, parts.scheme == "https", parts.netloc, path)
