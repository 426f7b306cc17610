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
from nats.aio.subscription import Subscription
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


class ApiError(MailboxError):
    """A refusal of JetStream."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"JetStream refused: {text} (code {code})")
        self.code = code
        self.text = text


class NotAllowedError(ConfigError, MailboxError):
    """The user may not do all that a mailbox does."""


class GoneError(MailboxConnectionError):
    """A stream or a consumer does not exist (any more): a server has lost its data, or an operator has deleted it."""


class NoResponderError(GoneError):
    """The server answers, but no stream or consumer takes the message: it does not exist, or JetStream is off."""


class PullEndedError(GoneError):
    """A pull request was refused, or did not end: its consumer may be gone."""


class RefusedError(Exception):
    """Every server refuses. ``refusals`` are what the driver said of each."""

    def __init__(self, refusals: Sequence[Exception]) -> None:
        super().__init__("every NATS server refuses")
        self.refusals = refusals


NO_STREAM = 10059
NO_CONSUMER = 10014


def is_gone(error: Exception) -> bool:
    """True if a call failed because a stream or a consumer is gone, or may be."""
    return isinstance(error, GoneError) or (isinstance(error, ApiError) and error.code in (NO_STREAM, NO_CONSUMER))


def refuses_login(error: Exception) -> bool:
    """True if a server refuses this user. The driver raises that as text."""
    text = message_of(error).lower()
    return "authorization violation" in text or "authentication" in text


def denied_subject(error: Exception) -> str | None:
    """Return the subject that the server does not allow this user. No other answer will come."""
    found = re.search(r'(?i:permissions violation for (?:publish|subscription) to) "([^"]+)"', message_of(error))
    return found[1] if found else None


_TOO_MANY_SUBSCRIPTIONS = "maximum subscriptions exceeded"


def refuses_subscription(error: Exception) -> bool:
    """True if the server has refused a subscription, of which it does not say which, as this user has too many."""
    return _TOO_MANY_SUBSCRIPTIONS in message_of(error).lower()


def no_connection(name: str, servers: Sequence[str], refusals: Sequence[Exception]) -> MainspringError:
    """Return the error for servers none of which can be connected to; each was tried."""
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
    """Translate an exception of the driver. ``servers`` are the servers that were tried, if there was no connection yet."""
    if isinstance(error, MainspringError):
        return error
    if isinstance(error, RefusedError):
        return no_connection(name, servers, error.refusals)
    if isinstance(error, MaxPayloadError):
        return SerializationError(f"{name}: the message is larger than the server takes (max_payload)")
    what = "the connection to the NATS server is lost"
    if servers:
        what = f"no connection to a NATS server at {', '.join(servers)}"
    failure = MailboxConnectionError(f"{name}: {what}: {told}")
    failure.__cause__ = error
    return failure


def check_credentials(path: str) -> None:
    """Raise :class:`ConfigError` if the driver could not use that credentials file."""
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
    """Return an answer of JetStream. Raise :class:`ApiError` if it refuses, :class:`NoResponderError` if it is not there."""
    if answer.head and answer.status[0] == "503":
        raise NoResponderError(
            "no JetStream answers at the NATS server: start it with JetStream (nats-server -js), or wait for its leader"
        )
    try:
        found: dict[str, Any] = json.loads(answer.data)
    except ValueError:
        raise ConfigError(
            f"what answers at the NATS server is no JetStream: {answer.data[:60]!r}; check the host and the port of the URL"
        ) from None
    error = found.get("error")
    if error is not None:
        raise ApiError(int(error.get("err_code", 0)), str(error.get("description", "")))
    return found


_LINE = b"NATS/1.0"
_END = b"\r\n"
_KINDS = (b"MSG ", b"HMSG ", b"PING", b"PONG", b"+OK", b"INFO ", b"-ERR")
_LONGEST_LINE = 1 << 20
"""Bytes of a line without an end: an INFO names all servers of a cluster."""
_LARGEST = 1 << 28
"""Bytes of a message: four times the largest that a server can be set to take."""


class UnreadableError(ProtocolError):
    """The server sent what is not the NATS protocol. Nothing behind it can be read: the connection must be made anew."""

    def __init__(self, what: str) -> None:
        super().__init__(f"what the NATS server sent cannot be read: {what}")

    def __str__(self) -> str:
        return str(self.args[0])


class RawMessage(NamedTuple):
    """A message as it arrived."""

    subject: bytes
    reply: bytes
    head: bytes
    """Its headers with the status line before them, or nothing."""
    data: bytes

    @property
    def status(self) -> tuple[str, str]:
        """The status code in the line before the headers, which only the server itself writes, and its text."""
        code, _, told = (
            self.head.partition(_END)[0].removeprefix(_LINE).decode("utf-8", "replace").strip().partition(" ")
        )
        return code, told.strip()


class QuickParser(Parser):
    """Replaces the driver's parser: a message of a subscription with a callback costs neither a task switch nor a coroutine.

    A callback may not wait. What it raises goes to the driver's error callback, and does no harm to other messages.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self.callbacks: dict[bytes, Callable[[RawMessage], object]] = {}
        """By the number of the subscription, as it stands in the protocol."""

    def reset(self) -> None:
        """Forget what has arrived so far: another connection begins."""
        super().reset()
        self._whole = 0

    async def parse(self, data: bytes = b"") -> None:
        """Parse what has arrived; the beginning of a message is kept for the next call.

        :raises UnreadableError: goes to the error callback, too, and lets the driver make the connection anew. After
        any other error the driver would stop reading without a word.
        """
        self.nc._pings_outstanding = 0  # noqa: SLF001 - the server is not silent: a pong may be behind large messages
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
                number = int(words[2])
                await self.nc._process_msg(number, message.subject, message.reply, message.data, message.head)  # noqa: SLF001
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
        """Handle a line that is no message."""
        client = self.nc
        if kind == b"PING":
            await client._process_ping()  # noqa: SLF001 - the driver's parser calls these too
        elif kind == b"PONG":
            await client._process_pong()  # noqa: SLF001
        elif kind == b"INFO":
            await client._process_info(json.loads(line[4:]))  # noqa: SLF001
        elif kind == b"-ERR":
            await client._process_err(line[4:].strip().decode("utf-8", "replace"))  # noqa: SLF001
        elif kind != b"+OK":
            raise UnreadableError(f"{line[:60]!r}")


def _size(headers: dict[str, str]) -> int:
    """Return the bytes of headers on their way, which count as part of the payload."""
    lines = (len(name.encode()) + len(value.encode()) + len(b": \r\n") for name, value in headers.items())
    return len(_LINE) + 2 * len(_END) + sum(lines)


_made: Callable[[tuple[bytes, bytes, bytes, bytes]], RawMessage] = partial(tuple.__new__, RawMessage)
"""Makes a :class:`RawMessage` without the Python function that a named tuple has for it."""


def _sizes(words: list[bytes]) -> tuple[int, int, bool]:
    """Read the line before a message: the bytes of the message, of its headers, and True if it names a reply subject."""
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
    """True if a line can begin so."""
    return any(rest.startswith(kind[: len(rest)]) for kind in _KINDS)


class NoTlsError(Error):
    """The URL says ``tls://`` and the server does not offer it."""


class LoginError(Error):
    """The credentials cannot be used to log in."""


class _Transport(TcpTransport):
    """The driver's transport, but names are resolved without the event loop's default executor."""

    def __bool__(self) -> bool:
        """Return True: the driver would take an unconnected transport for none, and make its own."""
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
    "_pings_outstanding",
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
    parser, transport = getattr(client, "_ps", None), TcpTransport()  # type: ignore[no-untyped-call]
    subscription = Subscription(client)
    state = [*((client, name) for name in STATE), (parser, "buf"), (parser, "nc"), (transport, "_io_writer")]
    state += [(subscription, "_message_iterator"), (subscription, "_pending_queue")]
    changed = [name for owner, name in state if not hasattr(owner, name)]
    steps: list[tuple[type, str, tuple[str, ...]]] = [
        (Parser, "parse", ("data",)),
        (Parser, "reset", ()),
        (TcpTransport, "connect", ("uri", "buffer_size", "connect_timeout")),
        *((driver, name, parameters) for name, parameters in STEPS.items()),
    ]
    for kind, name, parameters in steps:
        code = getattr(getattr(kind, name, None), "__code__", None)
        if code is None or code.co_varnames[1 : code.co_argcount] != parameters:
            changed.append(name)
    if changed:
        raise ConfigError(
            f"nats-py {__version__} does not work with this version of mainspring: {', '.join(changed)} changed; install"
            " nats-py 2.14 to 2.16, or a newer mainspring"
        )


class StrictClient(Client):
    """The driver's client, changed in four ways.

    - The driver treats ``tls://`` and ``nats://`` alike: it encrypts if the server asks for it, and else sends user and
      password in the clear. This client insists on TLS.
    - The driver has a task and a queue for each subscription, which cost more than the rest of the work on most messages. This
      client calls a function.
    - Where the server says why it hangs up, the driver gives up. This client connects anew.
    - If a server stands still, the driver waits without end, to write and to close. Here each step has a deadline.
    """

    def __init__(self) -> None:
        super().__init__()
        check_driver(self)
        self._ps: QuickParser = QuickParser(self)

    def _connect_command(self) -> bytes:
        """Return the login, which the driver sends first on every connection.

        :raises NoTlsError: others could read it.
        :raises LoginError: the credentials give none.
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
        except Exception as error:  # what the driver and nkeys raise for such a file
            raise LoginError(
                f"no login can be made of the credentials, which must be the file of a user: {describe(error)}"
            ) from error

    async def listen(self, subject: str, callback: Callable[[RawMessage], object]) -> Subscription:
        """Subscribe: ``callback`` is called with each message as it is read, in order."""
        subscription = await self.subscribe(subject)
        subscription._pending_queue = subscription._message_iterator = None  # type: ignore[assignment] # noqa: SLF001 - 3 KiB for nothing
        self._ps.callbacks[b"%d" % subscription._id] = callback  # noqa: SLF001 - nothing can have come yet
        return subscription

    async def unlisten(self, subscription: Subscription) -> None:
        """Unsubscribe. What still arrives is dropped."""
        self.forget(subscription)
        await subscription.unsubscribe()

    def forget(self, subscription: Subscription) -> None:
        """Drop a subscription, and do not renew it on the next connection."""
        self._ps.callbacks.pop(b"%d" % subscription._id, None)  # noqa: SLF001
        self._subs.pop(subscription._id, None)  # noqa: SLF001

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publish without the driver's checks of the two subjects, which take longer than the rest: subjects are the
        mailbox's own.

        All that is published in one turn of the event loop is written at once.
        """
        if headers is not None and _size(headers) + len(payload) > self._max_payload:  # the driver leaves them out
            raise MaxPayloadError
        if headers is not None or self._flush_queue is None or not self.is_connected:
            await super().publish(subject, payload, reply, headers)
            return
        if len(payload) > self._max_payload:
            raise MaxPayloadError
        await self._send_command(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(payload), payload))
        # A flusher that has ended leaves in the queue what it did not come to: nothing would be written any more.
        if self._flush_queue.empty() or self._flusher_task is None or self._flusher_task.done():
            await self._flush_pending()

    async def hang_up(self, seconds: float) -> None:
        """Disconnect from any state, under a shield; by force if the server takes nothing any more.

        What was still to be written is lost then. The driver's own ``close`` waits for it, and leaves tasks behind if
        it is cut short.
        """
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + seconds):
            with suppress(Exception):
                await self.close()
        self._subs.clear()
        self._abort()

    # ------------------------------------------------------------------------ the driver's own steps, each with an end

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """Have the flusher write what is pending. The driver would wait for room in its queue and, if forced, without end.

        :raises TimeoutError: ``force_flush`` (too much is pending), and the server does not take it in time.
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
        """Handle an error that the server sends. It hangs up then, unless the user may not do something, or no more of it.

        The driver would close the connection for good after most of them; it is made anew instead.
        """
        told = err_msg.lower()
        if STALE_CONNECTION in told:
            await super()._process_err(told)
        elif PERMISSIONS_ERR in told or _TOO_MANY_SUBSCRIPTIONS in told:
            await self._error_cb(Error(f"nats: {err_msg}"))
        else:
            await self._process_op_err(Error(f"the server said {err_msg or 'an error without words'}"))

    async def _process_op_err(self, e: Exception) -> None:
        """Handle a lost connection."""
        if not (self.is_closed or self.is_reconnecting):
            if not isinstance(e, ProtocolError):  # the parser has reported it, in more words
                await self._error_cb(e)
            self._let_go()
        await super()._process_op_err(e)

    async def _connect_to_server(self, s: Srv) -> None:
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()  # of a late failure
        self._let_go()
        if self._transport is None:
            self._transport = _Transport()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        """Log in. Any failure becomes one after which the driver tries again; others would end its tries."""
        try:
            await super()._process_connect_init()
        except (OSError, Error, TimeoutError):
            raise
        except Exception as error:
            raise Error(f"what the NATS server said first cannot be read: {describe(error)}") from error
        if not self.is_connected:
            raise Error("the NATS server did not answer the login")

    def _let_go(self) -> None:
        """Drop the connection, and what was still to be written: those requests fail as lost."""
        self._pending.clear()
        self._pending_data_size = 0
        self._abort()

    def _abort(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
