"""The connection on which a Redis mailbox calls its script: one call at a time, each with a deadline."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import anyio

from mainspring import entropy
from mainspring.clock import loop_clock
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox.redis_wire import LOST, ServerError, Wire, refused, trouble
from mainspring.policies import backoff

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.redis_server import Directory
    from mainspring.mailbox.redis_url import Host

RECONNECT_INITIAL: Final = 0.02
RECONNECT_MAXIMUM: Final = 1.0
"""Seconds between tries to connect: callers wait their turn, so a server that is away is asked gently."""
IDLE: Final = 10.0
"""Seconds after which a connection is tried before it is trusted with a call: something between may have dropped it."""
TRIES: Final = 4
_ELSEWHERE: Final = frozenset({"MOVED", "ASK", "READONLY", "CLUSTERDOWN", "MASTERDOWN"})


def script() -> bytes:
    """The script, joined from its files."""
    folder = files("mainspring.mailbox").joinpath("lua")
    return b"\n".join(folder.joinpath(f"{part}.lua").read_bytes() for part in _PARTS)


_PARTS: Final = ("store", "due", "messages", "dead", "run")


class Gate:
    """When to try to connect again."""

    def __init__(self) -> None:
        self._now = loop_clock()
        self._failures = 0
        self._opens = 0.0

    async def wait(self) -> None:
        """Wait for the turn to try."""
        pause = self._opens - self._now()
        if pause > 0:
            await anyio.sleep(pause)

    def failed(self) -> None:
        """A try has failed."""
        self._failures += 1
        self._opens = self._now() + backoff(
            self._failures,
            initial=RECONNECT_INITIAL,
            maximum=RECONNECT_MAXIMUM,
            factor=2.0,
            jitter="full",
            rng=entropy.rng(),
        )

    def succeeded(self) -> None:
        """A try has succeeded."""
        self._failures = 0
        self._opens = 0.0


class Link:
    """Calls the script. What of it is lost with the connection raises; only what the server refused is tried again."""

    def __init__(self, directory: Directory, timeout: float) -> None:
        self._directory = directory
        self._timeout = timeout
        self._script = script()
        self._sha = hashlib.sha1(self._script, usedforsecurity=False).hexdigest().encode()
        self._gate = Gate()
        self._now = loop_clock()
        self._wire: Wire | None = None
        self._busy = False
        self._welcome = False
        self.on_connect: Callable[[Host], None] | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._wire is not None

    async def call(self, keys: Sequence[bytes], arguments: Sequence[str | int | float | bytes]) -> list[Any]:
        """Run the script.

        :raises MailboxConnectionError: the server cannot be reached, does not answer within the timeout, or refuses. After a
            lost connection or a timeout it may have done what it was asked.
        """
        command = (b"EVALSHA", self._sha, len(keys), *keys, *arguments)
        self._busy = True
        try:
            with anyio.CancelScope(deadline=self._now() + self._timeout):
                return await self._call(command)
            raise MailboxConnectionError(f"the Redis server at {self._place} did not answer within {self._timeout:g} s")
        except LOST as error:
            await self.close()
            raise MailboxConnectionError(f"the Redis server at {self._place}: {trouble(error)}") from error
        except BaseException as error:
            if not isinstance(error, ServerError) or error.is_last:
                await self.close()
            raise
        finally:
            self._busy = False

    async def _call(self, command: tuple[Any, ...]) -> list[Any]:
        for attempt in range(1, TRIES + 1):
            wire = self._wire
            if wire is None or self._now() - wire.used_at > IDLE:
                wire = await self.connect()
            try:
                result: list[Any] = await wire.call(*command)
            except ServerError as error:
                if attempt == TRIES:
                    raise
                await self._after(wire, error)
                continue
            wire.used_at = self._now()
            return result
        raise AssertionError

    async def _after(self, wire: Wire, error: ServerError) -> None:
        """Make ready for another try, where the server has done nothing and another try can help; else raise."""
        if error.code == "NOSCRIPT":
            await wire.call("SCRIPT", "LOAD", self._script)
        elif error.code in _ELSEWHERE:
            await self.close()
            self._gate.failed()
        elif error.code in {"LOADING", "TRYAGAIN", "BUSY"}:
            await anyio.sleep(RECONNECT_INITIAL)
        else:
            raise error

    async def connect(self) -> Wire:
        """The connection, made where there is none or where the one there is does not answer any more."""
        if self._wire is not None:
            try:
                await self._wire.call("PING")
            except LOST:
                await self.close()
            else:
                return self._wire
        while True:
            await self._gate.wait()
            try:
                wire = await self._directory.connect()
            except ServerError as error:
                self._gate.failed()
                if refused(error) and not self._welcome:
                    raise ConfigError(f"{error} ({self._place}); check the user and the password of the URL") from error
                if error.code not in _ELSEWHERE and error.code != "LOADING":
                    raise
            except LOST:
                self._gate.failed()
                raise
            except ConfigError as error:
                self._gate.failed()
                if not self._welcome:
                    raise
                raise MailboxConnectionError(str(error)) from error
            else:
                break
        self._gate.succeeded()
        self._welcome = True  # from now on a refusal may be somebody's passing mistake
        wire.used_at = self._now()
        self._wire = wire
        if self.on_connect is not None:
            self.on_connect(wire.host)
        return wire

    async def ask(self, what: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Have ``what`` ask the server things over this connection; call it only while no other call is out.

        Where the server does not answer, or the connection is lost, it is let be: the next call connects anew.
        """
        told = False
        with anyio.move_on_after(self._timeout), suppress(*LOST):
            await what(await self.connect(), *arguments)
            told = True
        if not told:
            await self.close()

    async def suspect(self) -> None:
        """The server seems to have gone: do not trust the connection, unless a call is out, which will see for itself."""
        if not self._busy:
            await self.close()

    async def close(self) -> None:
        """Hang up."""
        wire, self._wire = self._wire, None
        if wire is not None:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                await wire.close()

    @property
    def _place(self) -> str:
        return self._directory.server.address.partition("://")[2]
