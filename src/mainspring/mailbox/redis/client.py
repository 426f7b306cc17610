"""How a Redis mailbox calls its library of functions: one call at a time, over the connection that all mailboxes share."""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import anyio

from mainspring.core.clock import loop_clock
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox.limits import SILENCE
from mainspring.mailbox.redis.connection import LOST, ServerError, refused, trouble
from mainspring.mailbox.redis.connections import RECONNECT_INITIAL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.redis.connections import Channel
    from mainspring.mailbox.redis.topology import Directory
    from mainspring.mailbox.redis.url import Host

TRIES: Final = 4
_ELSEWHERE: Final = frozenset({"MOVED", "ASK", "READONLY", "CLUSTERDOWN", "MASTERDOWN"})


def library() -> tuple[bytes, bytes]:
    """The library of functions, joined from its files, and the name of the function that is called.

    The name has a digest of the text: processes of several versions share a server.
    """
    folder = files("mainspring.mailbox.redis").joinpath("lua")
    text = b"\n".join(folder.joinpath(f"{part}.lua").read_bytes() for part in _PARTS)
    name = b"mainspring_" + hashlib.sha1(text, usedforsecurity=False).hexdigest()[:16].encode()
    return b"#!lua name=%b\nlocal NAME = '%b'\n%b" % (name, name, text), name


_PARTS: Final = ("store", "rights", "due", "handing", "messages", "dead", "recovery", "run")


class Link:
    """Calls the functions. What of it is lost with the connection raises; only what the server refused is tried again.

    One call of it is out at a time; those of other mailboxes travel beside it. To connect, it has the timeout; how long an
    answer may take is its caller's to say: see :meth:`abandon`. A connection on which the server has said nothing for
    ``silence`` seconds is tried before it is trusted with a call: something between may have dropped it.
    """

    def __init__(self, directory: Directory, timeout: float, silence: float = SILENCE) -> None:
        self._directory = directory
        self._timeout = timeout
        self._silence = silence
        self._library, self._function = library()
        self._now = loop_clock()
        self._wire: Channel | None = None
        self._busy = False
        self._command: tuple[Any, ...] = ()
        self._awaiting = False
        self._abandoned = False
        self._ended = False
        self._connecting = anyio.CancelScope()
        self._welcome = False
        self.reconnects = 0
        """Connections made since the first one."""
        self.failed_at = -math.inf
        """When a call last found the server away, if no connection was made since."""
        self.on_connect: Callable[[Host], None] | None = None
        self.on_silence: Callable[[MailboxConnectionError], None] | None = None
        """Told why, when a call has not been answered in time."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._wire is not None and self._wire.current

    @property
    def host(self) -> Host | None:
        """Where it is connected."""
        return self._wire.host if self._wire is not None and self._wire.current else None

    @property
    def awaiting(self) -> bool:
        """Whether a call is out whose answer has not been read: :meth:`resume` reads it, and the next call hangs up first."""
        return self._awaiting

    async def call(self, keys: Sequence[bytes], arguments: Sequence[str | int | float | bytes]) -> list[Any]:
        """Have a batch done. Cancelled while it waits for the answer, it leaves the call out (see ``awaiting``).

        :raises MailboxConnectionError: the server cannot be reached, does not answer, or refuses. After a lost connection or
            an :meth:`abandon` it may have done what it was asked.
        """
        if self._awaiting:
            await self._drop()
        self._command = (b"FCALL", self._function, len(keys), *keys, *arguments)
        return await self.resume()

    async def resume(self) -> list[Any]:
        """Go on with the call whose caller was cancelled."""
        self._busy = True
        try:
            return await self._call()
        except LOST as error:
            late = self._abandoned or isinstance(error, TimeoutError)
            self.failed_at = self._now()
            await self._mistrust()
            if late:
                silent = MailboxConnectionError(
                    f"the Redis server at {self._place} did not answer within {self._timeout:g} s"
                )
                if self.on_silence is not None:
                    self.on_silence(silent)
                raise silent from error
            raise MailboxConnectionError(f"the Redis server at {self._place}: {trouble(error)}") from error
        except ServerError as error:
            if error.is_last:
                await self._mistrust()
            raise
        except BaseException:
            if not self._awaiting:
                await self._drop()
            raise
        finally:
            self._busy = False
            if not self._awaiting:
                self._command = ()  # it may be large, and the next one may be long in coming

    async def _call(self) -> list[Any]:
        began = self._now()
        for attempt in range(1, TRIES + 1):
            wire = self._wire
            if self._awaiting:
                if wire is None:  # hung up on meanwhile
                    raise anyio.ClosedResourceError
            elif wire is None or not wire.heard_since(began - self._silence):
                wire = await self._connect_by(began + self._timeout)
            try:
                if not self._awaiting:
                    await wire.send(self._command)
                    self._awaiting = True
                result: list[Any] = await wire.read()
            except ServerError as error:
                self._awaiting = False
                if attempt == TRIES:
                    raise
                await self._after(wire, error)
                continue
            self._awaiting = False
            return result
        raise AssertionError

    async def _connect_by(self, deadline: float) -> Channel:
        wire: Channel | None = None
        with anyio.CancelScope(deadline=deadline) as self._connecting:
            wire = await self.connect()
        if wire is None:
            raise anyio.ClosedResourceError if self._ended else TimeoutError
        return wire

    async def abandon(self) -> None:
        """The answer to the call that is out has taken too long: end it, and let the next calls have another connection."""
        if self._wire is not None and (self._busy or self._awaiting):
            self._abandoned = True
            self._wire.retire()
            await self._hang_up()

    async def _after(self, wire: Channel, error: ServerError) -> None:
        """Make ready for another try, where the server has done nothing and another try can help; else raise."""
        if error.code == "ERR" and error.detail.startswith("Function not found"):
            await self._load(wire)
        elif error.code == "OOM":
            self._command = (b"FCALL", self._function + b"_full", *self._command[2:])
        elif error.code in _ELSEWHERE:
            await self._mistrust(pause=True)
        elif error.code in {"LOADING", "TRYAGAIN", "BUSY"}:
            await anyio.sleep(RECONNECT_INITIAL)
        else:
            raise error

    async def _load(self, wire: Channel) -> None:
        try:
            await wire.call("FUNCTION", "LOAD", self._library)
        except ServerError as error:
            if error.code == "OOM":
                raise MailboxConnectionError(
                    f"the Redis server at {self._place} has no memory left for this version's functions: raise maxmemory"
                ) from error
            if "already exists" not in error.detail:  # else another process was quicker
                await self._after(wire, error)

    async def connect(self) -> Channel:
        """The connection, made if there is none, and tried first if the server has said nothing on it for long."""
        while True:
            wire = self._wire
            if wire is None or not wire.current:
                wire = await self._join()
            if wire.heard_since(self._now() - self._silence):
                return wire
            try:
                await wire.call("PING")
            except LOST:
                await self._mistrust()
            else:
                return wire

    async def _join(self) -> Channel:
        await self._drop()
        if self._ended:
            raise anyio.ClosedResourceError
        while True:
            try:
                wire = await self._directory.connect()
            except ServerError as error:
                if refused(error) and not self._welcome:
                    raise ConfigError(f"{error} ({self._place}); check the user and the password of the URL") from error
                if error.code not in _ELSEWHERE and error.code != "LOADING":
                    raise
            except ConfigError as error:
                if not self._welcome:
                    raise
                raise MailboxConnectionError(str(error)) from error
            else:
                break
        if self._welcome:
            self.reconnects += 1
        self._welcome = True  # from now on a refusal may be somebody's passing mistake
        self.failed_at = -math.inf
        self._wire = wire
        if self._ended:  # just then
            await self._hang_up()
            raise anyio.ClosedResourceError
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
            await self._mistrust()

    async def suspect(self) -> None:
        """The server seems to have gone: do not trust the connection, unless a call is out, which will see for itself."""
        if not (self._busy or self._awaiting):
            await self._mistrust()

    async def close(self) -> None:
        """Hang up, and connect no more; a call that is out, or connects still, ends."""
        self._ended = True
        self._connecting.cancel()
        await self._drop()

    async def _mistrust(self, *, pause: bool = False) -> None:
        """Leave the connection, and let no mailbox begin a call on it any more."""
        if self._wire is not None:
            self._wire.retire(pause=pause)
        await self._drop()

    async def _drop(self) -> None:
        """Leave the connection, to take what there is with the next call."""
        self._awaiting = self._abandoned = False
        await self._hang_up()

    async def _hang_up(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                await wire.close()

    @property
    def _place(self) -> str:
        return self._directory.server.address.partition("://")[2]
