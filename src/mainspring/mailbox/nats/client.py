"""The NATS driver's client as a mailbox runs it: strict about TLS, quick to parse, its errors as the mailbox's."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
from nats.aio.client import Client, __version__
from nats.aio.transport import TcpTransport
from nats.errors import Error, MaxPayloadError, ProtocolError
from nats.protocol.parser import PERMISSIONS_ERR, STALE_CONNECTION, Parser

from mainspring.errors import (
    ConfigError,
    MailboxConnectionError,
    MailboxError,
    MainspringError,
    SerializationError,
    describe,
    message_of,
    remedy,
)
from mainspring.runtime.resolver import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from urllib.parse import ParseResult

    from nats.aio.client import Srv
    from nats.aio.subscription import Subscription


class ApiError(MailboxError):
    """What JetStream says where it refuses."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"JetStream refused: {text} (code {code})")
        self.code = code
        self.text = text


class NotAllowedError(ConfigError, MailboxError):
    """The login is good for less than a mailbox needs."""


class GoneError(MailboxConnectionError):
    """A stream or a consumer is not there, or not any more: a server has lost its data, or somebody has deleted it."""


class NoResponderError(GoneError):
    """The server is there, but no stream or consumer takes what was sent: it does not exist, or JetStream is off."""


class PullEndedError(GoneError):
    """A pull request was refused, or did not end: perhaps its consumer is gone."""


NO_STREAM = 10059
NO_CONSUMER = 10014


def is_gone(error: Exception) -> bool:
    """Whether a call failed as a stream or a consumer is not there, or may have."""
    return isinstance(error, GoneError) or (isinstance(error, ApiError) and error.code in (NO_STREAM, NO_CONSUMER))


def refuses_login(error: Exception) -> bool:
    """Whether it is a server's refusal of this user, which the driver raises as text."""
    text = message_of(error).lower()
    return "authorization violation" in text or "authentication" in text


def denied_subject(error: Exception) -> str | None:
    """The subject, in small letters, that this user may not use, where the server says so; other answer it gives none."""
    found = re.search(r'permissions violation for (?:publish|subscription) to "([^"]+)"', message_of(error).lower())
    return found[1] if found else None


def no_connection(name: str, servers: Sequence[str], refusals: Sequence[Exception]) -> MainspringError:
    """Why none of the servers can be connected to, each of which was tried."""
    from mainspring.mailbox.nats.client import LoginError, NoTlsError

    told = "; ".join(dict.fromkeys(map(message_of, refusals)))
    if any(map(refuses_login, refusals)):
        told += "; check the user and the password of the URL, its token or its credentials"
    else:
        told += next(filter(None, map(remedy, refusals)), "")
    lasting = all(isinstance(error, NoTlsError | LoginError) or refuses_login(error) for error in refusals)
    kind = ConfigError if lasting else MailboxConnectionError
    error = kind(f"{name}: no connection to a NATS server at {', '.join(servers)}: {told}")
    error.__cause__ = refusals[-1]
    return error


def translated(error: Exception, name: str, servers: Sequence[str], told: str) -> MainspringError:
    """What the driver raises, in the port's words; ``servers`` are those that were tried, where there was no connection yet."""
    if isinstance(error, MainspringError):
        return error
    if isinstance(error, MaxPayloadError):
        return SerializationError(f"{name}: the message is larger than the server takes (max_payload)")
    what = "the connection to the NATS server is lost"
    if servers:
        what = f"no connection to a NATS server at {', '.join(servers)}"
    failure = MailboxConnectionError(f"{name}: {what}: {told}")
    failure.__cause__ = error
    return failure


def check_credentials(path: str) -> None:
    """Raise :class:`ConfigError` where the driver could make nothing of that credentials file."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(
            f"the credentials file {path!r} cannot be read ({error.strerror}); correct its path"
        ) from None
    if find_spec("nkeys") is None:
        raise ConfigError("credentials= needs nkeys, to sign with what is in the file: pip install 'nats-py[nkeys]'")


def parse(answer: RawMessage) -> dict[str, Any]:
    """An answer of JetStream's. Raises :class:`ApiError` where it refuses, :class:`NoResponderError` where none is."""
    if answer.head and answer.status[0] == "503":
        raise NoResponderError(
            "no JetStream answers at the NATS server: start it with JetStream (nats-server -js), or wait for its leader"
        )
    try:
        found: dict[str, Any] = json.loads(answer.data)
    except ValueError:
        raise ConfigError(f"what answers at the NATS server is no JetStream: {answer.data[:60]!r}") from None
    error = found.get("error")
    if error is not None:
        raise ApiError(int(error.get("err_code", 0)), str(error.get("description", "")))
    return found


_LINE = b"NATS/1.0"
_END = b"\r\n"
_KINDS = (b"MSG ", b"HMSG ", b"PING", b"PONG", b"+OK", b"INFO ", b"-ERR")
_LONGEST_LINE = 1 << 20
"""Bytes of a line that has no end yet: an INFO names all servers of a cluster."""
_LARGEST = 1 << 28
"""Bytes of a message: four times what a server can be set to take."""


class UnreadableError(ProtocolError):
    """What came is no protocol of NATS, so that nothing behind it can be read either: the connection must be made anew."""

    def __init__(self, what: str) -> None:
        super().__init__(f"what the NATS server sent cannot be read: {what}")

    def __str__(self) -> str:
        return str(self.args[0])


class RawMessage(NamedTuple):
    """A message as it came."""

    subject: bytes
    reply: bytes
    head: bytes
    """Its headers with the line before them, or nothing."""
    data: bytes

    @property
    def status(self) -> tuple[str, str]:
        """The status in the line before the headers, which only the server's own word has, and what it says of that."""
        code, _, told = (
            self.head.partition(_END)[0].removeprefix(_LINE).decode("utf-8", "replace").strip().partition(" ")
        )
        return code, told.strip()


class QuickParser(Parser):
    """In the place of the driver's parser; messages of subscriptions that have a ``callback`` are what that is called with.

    A callback may not wait; what it raises goes where the driver's other errors go, and costs the others nothing.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.callbacks: dict[bytes, Callable[[RawMessage], object]] = {}
        """By the number of the subscription, as it stands in the protocol."""

    def reset(self) -> None:
        """Forget what has come so far: another connection begins."""
        super().reset()
        self._whole = 0

    async def parse(self, data: bytes = b"") -> None:
        """Take apart what has come; the beginning of something is kept for the next call.

        Raises :class:`UnreadableError`, which is told as the driver's other errors are, and whereupon the driver makes the
        connection anew. After any other error it would read no more, without a word.
        """
        try:
            await self._take_apart(data)
        except OSError:
            raise
        except Exception as error:
            unreadable = error if isinstance(error, UnreadableError) else UnreadableError(describe(error))
            await self.nc._error_cb(unreadable)  # noqa: SLF001 - the driver's own way for errors
            raise unreadable from error

    async def _take_apart(self, data: bytes) -> None:
        if self.buf:
            self.buf += data
            if len(self.buf) < self._whole:
                return
            data = bytes(self.buf)
            self.buf.clear()
        self._whole = start = 0
        while (line := data.find(_END, start)) >= 0:
            words = data[start:line].split()
            kind = words[0] if words else b""
            if kind != b"MSG" and kind != b"HMSG":
                await self._obey(kind, data[start:line])
                start = line + 2
                if not self.nc.is_connected:  # that was the last word: the rest is of no connection any more
                    return
                continue
            size, head, replied = _sizes(words)
            end = line + 2 + size
            if len(data) < end + 2:
                self._whole = end + 2 - start
                break
            if not data.startswith(_END, end):
                raise UnreadableError(f"{data[start:line][:60]!r} has another size")
            start = line + 2
            message = _made(
                (words[1], words[3] if replied else b"", data[start : start + head], data[start + head : end])
            )
            start = end + 2
            callback = self.callbacks.get(words[2])
            if callback is None:
                await self.nc._process_msg(int(words[2]), message.subject, message.reply, message.data, message.head)  # noqa: SLF001
                continue
            try:
                callback(message)
            except Exception as error:
                await self.nc._error_cb(error)  # noqa: SLF001
        if not self.nc.is_connected:  # the rest never comes: what does is of a new connection
            return
        rest = data[start:]
        if rest and not self._whole and (len(rest) > _LONGEST_LINE or not _begins(rest)):
            raise UnreadableError(f"{rest[:60]!r}")
        self.buf += rest

    async def _obey(self, kind: bytes, line: bytes) -> None:
        """Do what a line wants that is no message."""
        client = self.nc
        if kind == b"PING":
            await client._process_ping()  # noqa: SLF001 - the driver's parser calls these too
        elif kind == b"PONG":
            await client._process_pong()  # noqa: SLF001
        elif kind == b"INFO":
            await client._process_info(json.loads(line[4:]))  # noqa: SLF001
        elif kind == b"-ERR":
            await client._process_err(line[4:].strip().decode("utf-8", "replace").lower())  # noqa: SLF001
        elif kind != b"+OK":
            raise UnreadableError(f"{line[:60]!r}")


_made: Callable[[tuple[bytes, bytes, bytes, bytes]], RawMessage] = partial(tuple.__new__, RawMessage)
"""A :class:`RawMessage`, without the Python function that a named tuple has for it."""


def _sizes(words: list[bytes]) -> tuple[int, int, bool]:
    """What the line before a message says: the bytes of all of it, of its headers, and whether it names a reply subject."""
    count = len(words)
    size = head = -1
    if words[0] == b"MSG":
        if 4 <= count <= 5 and words[-1].isdigit():
            size, head = int(words[-1]), 0
    elif 5 <= count <= 6 and words[-1].isdigit() and words[-2].isdigit():
        size, head = int(words[-1]), int(words[-2])
        count -= 1
    if 0 <= head <= size <= _LARGEST:
        return size, head, count == 5
    raise UnreadableError(f"{b' '.join(words)[:60]!r}")


def _begins(rest: bytes) -> bool:
    """Whether a line can begin so."""
    return any(rest.startswith(kind[: len(rest)]) for kind in _KINDS)


class NoTlsError(Error):
    """The URL says ``tls://`` and the server does not offer it."""


class LoginError(Error):
    """No login can be made of the credentials."""


class _Transport(TcpTransport):
    """The driver's, but that it finds the server's addresses without the event loop's default executor."""

    def __bool__(self) -> bool:
        """The driver would take an unconnected one for none, and make its own."""
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        with anyio.fail_after(connect_timeout):
            addresses = await resolve(uri.hostname or "")
            for address in addresses[:-1]:
                with anyio.move_on_after(connect_timeout / len(addresses)), suppress(OSError):
                    await super().connect(_at(uri, address), buffer_size, connect_timeout)
                    return
            await super().connect(_at(uri, addresses[-1]), buffer_size, connect_timeout)


def _at(uri: ParseResult, address: str) -> ParseResult:
    host = f"[{address}]" if ":" in address else address
    return uri._replace(netloc=f"{host}:{uri.port}")


STEPS = {
    "_connect_command": (),
    "_connect_to_server": ("s",),
    "_flush_pending": ("force_flush",),
    "_process_connect_init": (),
    "_process_err": ("err_msg",),
    "_process_info": ("info", "initial_connection"),
    "_process_msg": ("sid", "subject", "reply", "data", "headers"),
    "_process_op_err": ("e",),
    "_process_ping": (),
    "_process_pong": (),
    "_send_command": ("cmd", "priority"),
    "_send_unsubscribe": ("sid", "limit"),
}
"""The driver's private methods that :class:`StrictClient` overrides or calls, each with its parameters."""
STATE = (
    "_current_server",
    "_error_cb",
    "_flush_queue",
    "_flush_timeout",
    "_flusher_task",
    "_max_payload",
    "_pending",
    "_pending_data_size",
    "_ping_interval_task",
    "_ps",
    "_reading_task",
    "_subs",
    "_transport",
)
"""The driver's private attributes that it reads or sets."""


def check_driver(client: Client, driver: type[Client] = Client) -> None:
    """Raise :class:`ConfigError` if the private parts of the driver that a mailbox uses are not as they were.

    A method that the driver does not call any more would be overridden in vain, without any sign.
    """
    changed = [name for name in STATE if not hasattr(client, name)]
    for name, parameters in STEPS.items():
        code = getattr(getattr(driver, name, None), "__code__", None)
        if code is None or code.co_varnames[1 : code.co_argcount] != parameters:
            changed.append(name)
    if changed:
        raise ConfigError(
            f"nats-py {__version__} does not work with this version of mainspring: {', '.join(changed)} changed; install"
            " nats-py 2.14 to 2.16, or a newer mainspring"
        )


class StrictClient(Client):
    """The driver's client.

    By itself the driver takes ``tls://`` and ``nats://`` for the same: it encrypts where the server asks for it, and else
    sends user and password as they are.

    And it has a task and a queue for each subscription, which cost more than all else that is done with most messages.

    And where a server stands still, it waits without an end: to write, and to close a connection that is given up, before it
    makes a new one.
    """

    def __init__(self) -> None:
        super().__init__()
        check_driver(self)
        self._ps: QuickParser = QuickParser(self)

    def _connect_command(self) -> bytes:
        """What the driver sends first, on every connection: the login.

        Raises :class:`NoTlsError` where all could read it, :class:`LoginError` where there is none.
        """
        server = self._current_server
        writer = getattr(self._transport, "_io_writer", None)
        encrypted = writer is not None and writer.get_extra_info("ssl_object") is not None
        if server is not None and server.uri.scheme == "tls" and not encrypted:
            if writer is not None:
                writer.transport.abort()  # the driver, when it reconnects, would forget it
            raise NoTlsError(
                f"{server.uri.hostname}:{server.uri.port} does not offer TLS, and was not told the login: set up TLS on that"
                " server, or write nats:// if everybody between here and there may read all of it"
            )
        try:
            return super()._connect_command()
        except Exception as error:  # whatever the driver and nkeys make of a file that is none of credentials
            raise LoginError(
                f"no login can be made of the credentials, which must be the file of a user: {describe(error)}"
            ) from error

    async def listen(self, subject: str, callback: Callable[[RawMessage], object]) -> Subscription:
        """Subscribe: ``callback`` is called with each message as it is read, in the order in which they come."""
        subscription = await self.subscribe(subject)
        self._ps.callbacks[b"%d" % subscription._id] = callback  # noqa: SLF001 - nothing can have come yet
        return subscription

    async def unlisten(self, subscription: Subscription) -> None:
        """Unsubscribe; what comes nevertheless is not heard any more."""
        self.forget(subscription)
        await subscription.unsubscribe()

    def forget(self, subscription: Subscription) -> None:
        """Hear no more of it, and do not subscribe to it on the next connection."""
        self._ps.callbacks.pop(b"%d" % subscription._id, None)  # noqa: SLF001
        self._subs.pop(subscription._id, None)  # noqa: SLF001

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """The driver's, whose checks of the two subjects take longer than all the rest: they are the mailbox's own.

        All that is published in one turn of the event loop is written at once.
        """
        if headers is not None or self._flush_queue is None or not self.is_connected:
            await super().publish(subject, payload, reply, headers)
            return
        if len(payload) > self._max_payload:
            raise MaxPayloadError
        await self._send_command(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(payload), payload))
        if self._flush_queue.empty():
            await self._flush_pending()

    async def hang_up(self, seconds: float) -> None:
        """Disconnect, in whatever state this is, under a shield; by force where the other side takes nothing any more.

        What was still to be written is lost then. The driver's own ``close`` waits for it, and leaves tasks where it is cut
        short.
        """
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + seconds):
            with suppress(Exception):
                await self.close()
        self._subs.clear()
        self._abort()

    # ------------------------------------------------------------------------ the driver's own steps, each with an end

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """Have written what is pending; the driver's waits for room to say so, and (``force_flush``) for the end of that.

        ``force_flush``, where too much is pending already: raises ``TimeoutError`` where the server does not take it in time.
        """
        flusher, queue = self._flusher_task, self._flush_queue
        if queue is None or not self.is_connected or flusher is None or flusher.done():
            return await super()._flush_pending(force_flush)
        if force_flush:
            written = flusher.get_loop().create_future()
            queue.put_nowait(written)
            with anyio.fail_after(self._flush_timeout):
                await written
        elif queue.empty():  # else the next look at it takes this along
            queue.put_nowait(flusher.get_loop().create_future())
        return None

    async def _process_err(self, err_msg: str) -> None:
        """What the server refuses; it hangs up then, but for what this user may not do."""
        if STALE_CONNECTION not in err_msg and PERMISSIONS_ERR not in err_msg:  # those the driver tells by itself
            await self._error_cb(Error(f"the server said {err_msg or 'an error without words'}"))
            self._let_go()
        await super()._process_err(err_msg)

    async def _process_op_err(self, e: Exception) -> None:
        """The connection is lost."""
        if not (self.is_closed or self.is_reconnecting):
            if not isinstance(e, ProtocolError):  # what cannot be read the parser has told, in more words
                await self._error_cb(e)
            self._let_go()
        await super()._process_op_err(e)

    async def _connect_to_server(self, s: Srv) -> None:
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()  # of a try that failed late: it would go on with the new connection, beside its own
        self._let_go()
        if self._transport is None:
            self._transport = _Transport()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        """The login. Whatever is wrong with it, the driver tries again: other errors than these would end its trying."""
        try:
            await super()._process_connect_init()
        except (OSError, Error, TimeoutError):
            raise
        except Exception as error:
            raise Error(f"what the NATS server said first cannot be read: {describe(error)}") from error
        if not self.is_connected:
            raise Error("the NATS server did not answer the login")

    def _let_go(self) -> None:
        """Let go of the connection at once, and of what was still to be written: whose that is is told that it is lost."""
        self._pending.clear()
        self._pending_data_size = 0
        self._abort()

    def _abort(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
