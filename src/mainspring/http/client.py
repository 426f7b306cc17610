"""One GET over TCP, TLS or a Unix socket, on asyncio and trio.

h11 speaks HTTP; it comes with uvicorn, and does no I/O. An HTTP client would be one more dependency, with pools and redirects
that a probe has no use for.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import h11

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from anyio.abc import ByteStream

RECEIVE = 16_384


class Origin(NamedTuple):
    """A server: a host and its port, or the path of a Unix socket. ``host_header`` is what requests call it."""

    host_header: str
    host: str = ""
    port: int = 0
    tls: bool = False
    unix: str | None = None


class HttpAnswerError(Exception):
    """A server was reached, and has not answered as it should. The text says how, in a few words."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What a server has answered. The names of ``headers`` are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


async def get(origin: Origin, path: str, *, agent: str, accept: str = "*/*", limit: int | None) -> HttpAnswer:
    """Return what ``origin`` answers to a GET of ``path``. The deadline is the caller's. Cancelled, it leaves nothing behind.

    Redirects are not followed. The certificate of an https server is not checked, as in a kubelet's probes: nothing secret
    is sent, and a server is often asked by an address that its certificate does not name.

    :param limit: the most bytes of a body that are taken; None: the body is not read at all.
    :raises OSError: there is no connection.
    :raises HttpAnswerError: it does not answer in HTTP, hangs up, or sends a longer body.
    """
    connecting: Coroutine[Any, Any, ByteStream]
    if origin.unix is not None:
        connecting = anyio.connect_unix(origin.unix)
    elif origin.tls:
        connecting = anyio.connect_tcp(origin.host, origin.port, ssl_context=_trusting(), tls_standard_compatible=False)
    else:
        connecting = anyio.connect_tcp(origin.host, origin.port)
    headers = [("Host", origin.host_header), ("User-Agent", agent), ("Accept", accept), ("Connection", "close")]
    async with await connecting as stream:
        return await _ask(stream, h11.Request(method="GET", target=path, headers=headers), limit)


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _ask(stream: ByteStream, request: h11.Request, limit: int | None) -> HttpAnswer:
    connection = h11.Connection(h11.CLIENT)
    await stream.send((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
    answer: h11.Response | None = None
    body = bytearray()
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            raise HttpAnswerError("it does not answer in HTTP") from None
        if isinstance(event, h11.Response):
            answer = event
        if isinstance(event, h11.Data):
            body += event.data
            if limit is not None and len(body) > limit:
                raise HttpAnswerError(f"its answer is longer than {limit} bytes")
        if answer is not None and (limit is None or isinstance(event, h11.EndOfMessage)):
            headers = {name.decode("ascii"): value.decode("latin-1") for name, value in answer.headers}
            return HttpAnswer(answer.status_code, headers, bytes(body))
        if event is h11.NEED_DATA:
            await _receive(stream, connection, answer)


async def _receive(stream: ByteStream, connection: h11.Connection, answer: h11.Response | None) -> None:
    try:
        received = await stream.receive(RECEIVE)
    except anyio.EndOfStream:
        if answer is None:
            raise HttpAnswerError("the connection was closed without an answer") from None
        received = b""  # h11 knows whether the answer may end so
    connection.receive_data(received)
