"""The GET of an HTTP probe, and where it goes."""

from __future__ import annotations

import os
import stat

from mainspring.http.client import HttpAnswerError, Origin, get
from mainspring.services.addresses import http_target

UNIX = "unix:"


async def ask_http(url: str, socket: str | None) -> str | None:
    """Return None where a GET of ``url`` is answered with a status from 200 to 399, else why not.

    :param socket: the Unix socket that a ``unix:`` URL may begin with; without one, the first socket on its path is taken.
    :raises OSError: there is no connection.
    """
    origin, path = place_of(url, socket)
    try:
        answer = await get(origin, path, agent="mainspring-probe", limit=None)
    except HttpAnswerError as error:
        return str(error)
    return None if 200 <= answer.status <= 399 else f"it answered with status {answer.status}"


def place_of(url: str, socket: str | None) -> tuple[Origin, str]:
    """Return the server that an HTTP probe asks, and the path of its request."""
    if url.startswith(UNIX):
        unix, path = _split(url.removeprefix(UNIX), socket)
        return Origin("localhost", unix=unix), path
    target = http_target(url)
    return Origin(target.host_header, *target.address, tls=target.tls), target.path


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
