"""Talks to a supervisor or to the health server of a group: HTTP over TCP or over a Unix socket. Failures are one line."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from mainspring.cli.control_socket import running_supervisors
from mainspring.cli.user_errors import FAILED, WRONG_USE, UserError
from mainspring.core import clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONTROL = "MAINSPRING_CONTROL"
ADMIN_TOKEN = "MAINSPRING_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
TIMEOUT = 10.0
"""Seconds that an answer may take, beyond what the request waits for."""
_AGAIN = 0.05
_UNIX = "unix:"
_LONGEST = 16 << 20
_WRONG_URL = "write http://HOST:PORT or unix:/PATH"


class NotReachedError(UserError):
    """No answer came: nothing listens there, the connection broke, or time was up."""

    def __init__(self, text: str) -> None:
        super().__init__(text, FAILED)


class LateAnswerError(NotReachedError):
    """Time was up, and it may still be there: busy, or suspended."""


class ControlClient:
    """One server. Each request has a connection of its own, so that threads may share a client."""

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        self.url = url.rstrip("/") if not url.startswith(_UNIX) else url
        self._timeout = timeout
        self._parts = urlsplit(url)
        try:
            port = self._parts.port
        except ValueError:
            port = -1
        usable = self._parts.path if url.startswith(_UNIX) else self._parts.hostname
        if self._parts.scheme not in ("http", "https", "unix") or not usable or port == -1:
            raise UserError(f"{url!r:.200} is no address of a supervisor; {_WRONG_URL}")

    def status(self) -> dict[str, Any]:
        """Return what ``/status`` says, of an orchestrator or of a group.

        :raises UserError: it cannot be reached, or is no Mainspring.
        """
        found = self.get("/status")
        if not isinstance(found, dict) or found.get("kind") not in ("orchestrator", "group"):
            raise self._stranger()
        return found

    def get(self, path: str, *, within: float = TIMEOUT) -> Any:
        """Return the JSON that a GET is answered with. ``within``: seconds that the answer may take, at most."""
        with self._request("GET", path, {}, min(within, self._timeout)) as response:
            return self._content(response)

    def post(self, path: str, query: Mapping[str, object] | None = None, *, wait: float = 0.0) -> Any:
        """Return the JSON that a POST is answered with. ``wait``: seconds that the server is asked to take, at most."""
        with self._request("POST", path, query or {}, self._timeout + wait) as response:
            return {**self._content(response), "done": response.status == 200}

    def lines(self, path: str, query: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """Yield the objects of an answer of JSON lines, until it ends; a line may be long in coming."""
        with self._request("GET", path, query, None) as response:
            while line := response.readline():
                try:
                    yield json.loads(line)
                except ValueError:
                    raise self._stranger() from None

    # --------------------------------------------------------------------------------------------------------- requests

    @contextmanager
    def _request(
        self, method: str, path: str, query: Mapping[str, object], timeout: float | None
    ) -> Iterator[HTTPResponse]:
        token = os.environ.get(ADMIN_TOKEN)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        base = "" if self.url.startswith(_UNIX) else self._parts.path.rstrip("/")
        target = base + path + (f"?{urlencode(query)}" if query else "")
        with closing(self._connection()) as connection:
            try:
                connection.connect()
                connection.sock.settimeout(timeout)
                connection.request(method, target, headers=headers)
                response = connection.getresponse()
                if response.status >= 300:
                    raise self._refusal(response)
                yield response
            except ConnectionRefusedError:
                raise NotReachedError(f"nothing listens on {self.url}; is it running?") from None
            except FileNotFoundError:
                raise NotReachedError(f"there is no socket {self.url}; is it running?") from None
            except TimeoutError:
                raise LateAnswerError(f"{self.url} has not answered within {timeout or self._timeout:g} s") from None
            except ConnectionError as error:
                raise NotReachedError(f"{self.url} has closed the connection ({error})") from None
            except HTTPException as error:
                raise NotReachedError(
                    f"{self.url} has given no whole answer of HTTP ({type(error).__name__})"
                ) from None
            except OSError as error:
                raise NotReachedError(f"{self.url} cannot be reached: {error.strerror or error}") from None

    def _connection(self) -> HTTPConnection:
        if self._parts.scheme == "unix":
            return _UnixConnection(self._parts.path, timeout=self._timeout)
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout)

    def _content(self, response: HTTPResponse) -> Any:
        try:
            return json.loads(response.read(_LONGEST))
        except ValueError:
            raise self._stranger() from None

    def _stranger(self) -> UserError:
        return UserError(f"what answers on {self.url} is no Mainspring of this version", FAILED)

    def _refusal(self, response: HTTPResponse) -> UserError:
        text = response.read(2000).decode("utf-8", "replace").strip()
        line = text.splitlines()[0] if text else response.reason
        if response.status in (401, 403):
            hint = "" if os.environ.get(ADMIN_TOKEN) else f"; set {ADMIN_TOKEN} to the token of that server"
            return UserError(f"{self.url}: {line}{hint}", FAILED)
        if response.status == 409:
            return UserError(line, FAILED)
        if response.status in (400, 404) and "text/plain" in (response.getheader("content-type") or ""):
            missing = "it has no such page; is it a Mainspring of this version?"
            return UserError(f"{self.url}: {missing if line == 'Not Found' else line}", WRONG_USE)
        return UserError(f"{self.url} answered with status {response.status}: {line}", FAILED)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, *, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        until = clock.monotonic() + (self.timeout or 0.0)
        while True:
            try:
                return self.sock.connect(self._path)
            except BlockingIOError:  # too many wait for it at once: such a socket does not queue up
                if clock.monotonic() >= until:
                    raise TimeoutError from None
                Event().wait(_AGAIN)


def find_server(url: str | None) -> ControlClient:
    """Return the server that is meant: that of ``url``, of ``MAINSPRING_CONTROL``, or the only supervisor on this machine.

    :raises UserError: none runs, or several do.
    """
    if named := url or os.environ.get(CONTROL):
        return ControlClient(named)
    found = running_supervisors()
    if not found:
        raise UserError(
            "no supervisor of this user runs on this machine; start one by `mainspring up FILE`, or say its --url",
            FAILED,
        )
    if len(found) > 1:
        them = ", ".join(f"{_UNIX}{path}" for path in found)
        raise UserError(f"{len(found)} supervisors run; say which one by --url: {them}")
    return ControlClient(_UNIX + found[0])
