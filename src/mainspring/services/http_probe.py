"""The GET of an HTTP probe, over TCP, TLS or a Unix socket, on asyncio and trio.

h11 speaks HTTP; it comes with uvicorn, and does no I/O. An HTTP client would be one more dependency, with pools and redirects
that a probe has no use for.
"""

from __future__ import annotations

import os
import ssl
import stat
from typing import TYPE_CHECKING, Any

import anyio
import h11

from mainspring.services.addresses import http_target

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from anyio.abc import ByteStream

UNIX = "unix:"
RECEIVE = 16_384


async def get(url: str, socket: str | None) -> str | None:
    """Return None where a GET of ``url`` is answered with a status from 200 to 399, else why not.

    Redirects are not followed. The certificate of an https server is not checked, as in a kubelet's probes: nothing secret
    is sent, and a server is often asked by an address that its certificate does not name.

    :param socket: the Unix socket that a ``unix:`` URL may begin with; without one, the first socket on its path is taken.
    :raises OSError: there is no connection.
    """
    if url.startswith(UNIX):
        path, target = _split(url.removeprefix(UNIX), socket)
        async with await anyio.connect_unix(path) as stream:
            return await _ask(stream, "localhost", target)
    where = http_target(url)
    host, port = where.address
    connecting: Coroutine[Any, Any, ByteStream]
    if where.tls:
        connecting = anyio.connect_tcp(host, port, ssl_context=_trusting(), tls_standard_compatible=False)
    else:
        connecting = anyio.connect_tcp(host, port)
    async with await connecting as stream:
        return await _ask(stream, where.host_header, where.path)


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _split(text: str, socket: str | None) -> tuple[str, str]:
    """Return the path of a socket and the path of a request, of one text that is both."""
    if socket is not None and text.startswith(socket):
        return socket, text.removeprefix(socket) or "/"
    end = text.find("/", 1)
    while end > 0 and not _is_socket(text[:end]):
        end = text.find("/", end + 1)
    if end > 0:
        return text[:end], text[end:]
    name, suffix, path = text.partition(".sock/")  # nothing listens there yet: the name says which file is missing
    return (f"{name}.sock", f"/{path}") if suffix else (text, "/")


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


async def _ask(stream: ByteStream, host: str, path: str) -> str | None:
    connection = h11.Connection(h11.CLIENT)
    headers = [("Host", host), ("User-Agent", "mainspring-probe"), ("Accept", "*/*"), ("Connection", "close")]
    request = connection.send(h11.Request(method="GET", target=path, headers=headers))
    await stream.send((request or b"") + (connection.send(h11.EndOfMessage()) or b""))
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return "it does not answer in HTTP"
        if isinstance(event, h11.Response):
            return None if 200 <= event.status_code <= 399 else f"it answered with status {event.status_code}"
        if event is h11.NEED_DATA:
            try:
                connection.receive_data(await stream.receive(RECEIVE))
            except anyio.EndOfStream:
                return "the connection was closed without an answer"
