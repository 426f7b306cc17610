"""The connection to a NATS server: pipelined calls with a deadline each, and pull requests that can be cancelled."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
from nats.errors import StaleConnectionError

from mainspring.core.clock import loop_clock
from mainspring.core.process import event_loop
from mainspring.errors import MailboxClosedError, MailboxConnectionError, MailboxError, MainspringError, describe
from mainspring.mailbox.limits import CLOSE_TIMEOUT, COURTESY, SILENCE
from mainspring.mailbox.nats.client import (
    ApiError,
    NoResponderError,
    NotAllowedError,
    PullEndedError,
    StrictClient,
    denied_subject,
    no_connection,
    parse,
    translated,
)
from mainspring.runtime.retry import Retries

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.nats.client import RawMessage


RECONNECT_WAIT = 0.2
"""Seconds between two tries to reach a server again."""
PING_SHARE = 0.3
"""The share of the allowed silence between two pings. Two may be unanswered; at the third the connection is given up."""
_TIMEOUT_INTERVAL = 0.25
"""Seconds between two checks for requests that took too long."""


class Request(NamedTuple):
    """A message that is answered."""

    subject: str
    payload: bytes = b""
    headers: dict[str, str] | None = None


class _NoAnswer(NamedTuple):
    """Stands for an answer that will not come, with the reason."""

    error: MailboxError


class NatsConnection:
    """One connection, for one mailbox, on asyncio. It reconnects by itself; requests that are out when it breaks fail at once.

    :param servers: their URLs.
    :param options: further options of the driver's ``connect``.
    :param timeout: seconds that a request may take.
    :param name: the name shown in the server's monitoring.
    :param silence: seconds without an answer after which the connection is given up.
    """

    def __init__(
        self, servers: Sequence[str], options: dict[str, Any], timeout: float, name: str, silence: float = SILENCE
    ) -> None:
        self._servers = list(servers)
        self._options = options
        self.timeout = timeout
        self._name = name
        self._silence = silence
        self._client: StrictClient | None = None
        self._pending: dict[int, tuple[Any, float, str]] = {}
        self._denied: NotAllowedError | None = None
        self._count = self._max_payload = 0
        self._timer: Any = None
        self._last_error = ""
        self._opening: anyio.CancelScope | None = None
        self._refusals: list[Exception] = []
        self.pullers: set[Puller] = set()
        self.idle: list[Puller] = []
        self._was_connected = False
        self.reconnected: Callable[[], object] = lambda: None
        self.on_silence: Callable[[MailboxConnectionError], object] = lambda error: None
        self._listeners: list[tuple[str, Callable[[RawMessage], object]]] = []
        self._quiet: anyio.Event | None = None
        self.epoch = 0
        """How often the connection was lost."""
        self.reconnects = 0
        """How often it was made anew."""

    @property
    def is_connected(self) -> bool:
        """True if the server can be reached, as far as is known."""
        return self._client is not None and self._client.is_connected

    @property
    def in_flight(self) -> int:
        """The number of requests without an answer."""
        return len(self._pending)

    @property
    def max_payload(self) -> int:
        """Bytes of the largest payload that the server takes, as of the latest connection."""
        client = self._client
        if client is not None and client.is_connected:
            self._max_payload = client.max_payload
        return self._max_payload

    def __repr__(self) -> str:
        return f"<NatsConnection {self._name!r} asked {len(self._pending)} pulls {len(self.pullers)}>"

    # ---------------------------------------------------------------------------------------------------- life cycle

    async def open(self) -> None:
        """Connect, within the timeout.

        :raises MailboxConnectionError: no server can be reached; at once if every server refuses.
        :raises ConfigError: each server refuses the login, or the URL wants TLS and the server has none.
        """
        self.loop: Any = event_loop()
        self._now = loop_clock()
        self._closed = anyio.Event()
        await self._connect(patient=False)

    async def keep_connected(self) -> None:
        """Connect anew whenever the driver has given up its connection, as it does if the server closes it for good.

        A connection that is merely lost is restored by the driver.
        """
        while True:
            await self._closed.wait()
            retries = Retries(initial=RECONNECT_WAIT, maximum=5.0)
            while self._closed.is_set():
                await retries.pause()
                self._closed = anyio.Event()
                try:
                    await self._connect(patient=True)
                except MainspringError:
                    self._closed.set()
                else:
                    self._came_back()

    async def _connect(self, *, patient: bool) -> None:
        """Connect. ``patient``: keep trying until the timeout, as the servers were there before."""
        self._client = client = StrictClient()
        self._refusals, self._denied = [], None
        try:
            with anyio.fail_after(self.timeout) as opening:
                self._opening = None if patient else opening
                await client.connect(
                    self._servers,
                    name=self._name,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnect,
                    closed_cb=self._on_closed,
                    reconnected_cb=self._on_reconnected,
                    reconnect_time_wait=RECONNECT_WAIT,  # type: ignore[arg-type]
                    max_reconnect_attempts=-1,
                    connect_timeout=self.timeout / len(self._servers),  # type: ignore[arg-type]
                    flush_timeout=self.timeout,
                    flusher_queue_size=0,
                    ping_interval=PING_SHARE * self._silence,  # type: ignore[arg-type]
                    max_outstanding_pings=2,
                    **self._options,
                )
                self._opening = None
                self._was_connected, self._max_payload = True, client.max_payload
                self._inbox = f"{client.new_inbox()}."
                await client.listen(f"{self._inbox}*", self._on_answer)
                for subject, callback in self._listeners:
                    await client.listen(subject, callback)
                await client.flush()
                if self._denied is not None:
                    raise self._denied
            if opening.cancel_called:
                raise no_connection(self._name, self._servers, self._refusals)
        except BaseException as error:
            if self._client is client:
                await self._abandon()
            else:  # closed meanwhile
                await client.hang_up(CLOSE_TIMEOUT / 2)
            raise self.failure(error) if isinstance(error, Exception) else error
        finally:
            self._opening = None
        if self._client is not client:
            await client.hang_up(CLOSE_TIMEOUT / 2)
            raise MailboxClosedError(f"{self._name} is closed")

    async def close(self) -> None:
        """Wait for the answers that are out, then disconnect; at most :data:`CLOSE_TIMEOUT` seconds together."""
        self.end_pulls()
        try:
            with anyio.move_on_after(CLOSE_TIMEOUT / 2):
                while self._pending or self.pullers:
                    self._quiet = anyio.Event()
                    await self._quiet.wait()
        finally:  # no later call would hang up
            self._was_connected = False
            await self._abandon()

    def check_quiet(self) -> None:
        """Wake a close that waits, if no request and no pull is out any more."""
        if self._quiet is not None and not (self._pending or self.pullers):
            self._quiet.set()

    async def _abandon(self) -> None:
        client, self._client = self._client, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._fail_all(MailboxClosedError(f"the connection of {self._name} was closed while the operation was out"))
        if client is not None:  # a connected one may have something to write
            await client.hang_up(CLOSE_TIMEOUT / 2 if client.is_connected else COURTESY)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = "it does not answer" if isinstance(error, TimeoutError) else describe(error)
        if (subject := denied_subject(error)) is not None:
            told = f"{self._name}: the NATS server does not let this user use {subject!r}; grant the user what a mailbox uses"
            self._deny(subject, NotAllowedError(told))
        if isinstance(error, StaleConnectionError):
            self.on_silence(self._lost_error())
        if self._opening is not None:
            self._refusals.append(error)
            if len(self._refusals) >= len(self._servers):
                self._opening.cancel()

    def _deny(self, subject: str, error: NotAllowedError) -> None:
        """Fail the requests whose answers this user may not receive."""
        if subject == f"{self._inbox}*".lower():
            self._denied = error
        for token, (future, _, asked) in list(self._pending.items()):
            if (self._denied is not None or asked.lower() == subject) and not future.done():
                del self._pending[token]
                future.set_result(_NoAnswer(error))
        for puller in list(self.pullers):
            if puller.source.lower() == subject:
                puller.end(error)
        self.check_quiet()

    async def _on_disconnect(self) -> None:
        self._denied = None
        self._fail_all(self._lost_error())

    async def _on_reconnected(self) -> None:
        self._came_back()

    def _came_back(self) -> None:
        self.reconnects += 1
        self.reconnected()

    async def _on_closed(self) -> None:
        self._fail_all(self._lost_error())
        if self._client is not None:  # the driver did it, not we
            self._closed.set()

    def _lost_error(self) -> MailboxConnectionError:
        told = f": {self._last_error}" if self._last_error else ""
        return MailboxConnectionError(f"{self._name}: the connection to the NATS server is lost{told}")

    def failure(self, error: Exception) -> MainspringError:
        """Translate an exception of the driver."""
        told = describe(error)
        if isinstance(error, TimeoutError):
            told = self._last_error or f"no answer within {self.timeout:g} s"
        return translated(error, self._name, () if self._was_connected else self._servers, told)

    def _fail_all(self, error: MailboxError) -> None:
        self.epoch += 1
        asked, self._pending = self._pending, {}
        for future, _, _ in asked.values():
            if not future.done():
                future.set_result(_NoAnswer(error))
        for puller in list(self.pullers):
            puller.end(error)
        while self.idle:
            self.idle.pop().forget()
        self.check_quiet()

    @property
    def driver(self) -> StrictClient | None:
        """The driver's client, connected or not, if there is one."""
        return self._client

    @property
    def client(self) -> StrictClient:
        """The driver's client, connected; else raise :class:`MailboxConnectionError`."""
        client = self._client
        if client is None and not self._was_connected:
            raise MailboxClosedError(f"{self._name} is closed")
        if client is None or not client.is_connected:
            raise self._lost_error()
        return client

    async def _reached(self) -> StrictClient:
        """See :attr:`client`. A caller in a loop without success lets the reconnecting task run."""
        if self._client is None or not self._client.is_connected:
            await anyio.lowlevel.checkpoint()
        return self.client

    # ----------------------------------------------------------------------------------------------------------- calls

    async def request(self, subject: str, payload: bytes = b"", headers: dict[str, str] | None = None) -> RawMessage:
        """Send a message and wait for its answer. Raise :class:`MailboxConnectionError` if none comes in time."""
        token, future = await self._start(subject, payload, headers)
        return await self._finish(token, future)

    async def request_all(self, requests: Sequence[Request]) -> list[RawMessage | MailboxError]:
        """Send messages at once and wait for all answers; an error takes the place of a missing one.

        If the connection does not take one, those behind it are not sent.
        """
        begun: list[tuple[int, Any] | MailboxError] = []
        answers: list[RawMessage | MailboxError] = []
        lost: MailboxConnectionError | None = None
        try:
            for request in requests:
                try:
                    begun.append(await self._start(*request) if lost is None else lost)
                except MailboxError as error:
                    begun.append(error)
                    lost = error if isinstance(error, MailboxConnectionError) else None
            for each in begun:
                if isinstance(each, MailboxError):
                    answers.append(each)
                    continue
                try:
                    answers.append(await self._finish(*each))
                except MailboxError as error:
                    answers.append(error)
        finally:
            for each in begun[len(answers) :]:
                if not isinstance(each, MailboxError):
                    self._pending.pop(each[0], None)
        return answers

    async def api(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call JetStream's API. Raise :class:`ApiError` if it refuses."""
        payload = b"" if request is None else json.dumps(request, separators=(",", ":")).encode()
        return parse(await self.request(f"$JS.API.{subject}", payload))

    async def _start(self, subject: str, payload: bytes, headers: dict[str, str] | None) -> tuple[int, Any]:
        if self._denied is not None:
            raise NotAllowedError(*self._denied.args)
        self._count += 1
        token = self._count
        future = self.loop.create_future()
        self._pending[token] = (future, self._now() + self.timeout, subject)
        if self._timer is None:
            self._timer = self.loop.call_later(_TIMEOUT_INTERVAL, self._time_out)
        try:
            await self.publish(subject, payload, f"{self._inbox}{token}", headers)
        except BaseException:
            self._pending.pop(token, None)
            raise
        return token, future

    async def publish(
        self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send a message. Raise :class:`MailboxConnectionError` for any failure of the driver or its transport."""
        client = self._client
        if client is None or not client.is_connected:
            client = await self._reached()
        try:
            await client.publish(subject, payload, reply, headers)
        except Exception as error:  # also what uvloop says of a connection that was closed just now: a RuntimeError
            raise self.failure(error) from error

    async def _finish(self, token: int, future: Any) -> RawMessage:
        try:
            answer = await future
        except BaseException:
            self._pending.pop(token, None)
            self.check_quiet()
            raise
        if type(answer) is _NoAnswer:
            raise type(answer.error)(*answer.error.args)
        return answer  # type: ignore[no-any-return]

    def _on_answer(self, message: RawMessage) -> None:
        found = self._pending.pop(int(message.subject[len(self._inbox) :]), None)
        if found is not None and not found[0].done():
            found[0].set_result(message)
        if self._quiet is not None:
            self.check_quiet()

    def _time_out(self) -> None:
        """Fail the requests that took too long: the oldest are first."""
        self._timer = None
        now = self._now()
        for token, (future, until, _) in list(self._pending.items()):
            if until > now:
                break
            del self._pending[token]
            if not future.done():
                late = f"{self._name}: the NATS server did not answer within {self.timeout:g} s"
                future.set_result(_NoAnswer(MailboxConnectionError(late)))
        if self._pending:
            self._timer = self.loop.call_later(_TIMEOUT_INTERVAL, self._time_out)
        self.check_quiet()

    # ------------------------------------------------------------------------------------------------- pulls and news

    async def puller(self) -> Puller:
        """Return an idle puller, or a new one."""
        if self.idle:
            return self.idle.pop()
        puller = Puller(self)
        await puller.open(await self._reached())
        return puller

    def end_pulls(self) -> None:
        """End every pull under way. What it has brought is put back."""
        for puller in list(self.pullers):
            puller.end()

    async def listen(self, subject: str, callback: Callable[[RawMessage], object]) -> None:
        """Call ``callback``, which may not wait, with what is published on a subject, also after a reconnection."""
        await self.client.listen(subject, callback)
        self._listeners.append((subject, callback))


POLL_TIMEOUT = 0.02
"""Seconds that a pull lasts at least. Without an end the server answers at once that there is nothing, at times
wrongly: it may not have noticed what was just sent. And where what it has counted was removed, it waits for ever."""
MAX_POLL_TIMEOUT = 0.5
"""Seconds that the last of some short pulls lasts, if the server says that there is something and does not deliver it."""
OVERDUE = 0.5
"""Seconds after its end at which a pull counts as ended although the server does not say so. If several wait, server 2.9 now
and then drops a finished one silently."""


class Puller:
    """A subscription for one pull at a time. Once it is removed, the server knows at once that no caller waits."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._messages: list[RawMessage] = []
        self._wanted = 0
        self.source = ""
        self._ended: Any = None
        self._arrived: Callable[[], object] | None = None

    async def open(self, client: StrictClient) -> None:
        """Subscribe."""
        self._client = client
        self._subject = client.new_inbox()
        try:
            self._subscription = await client.listen(self._subject, self._on_message)
        except Exception as error:
            raise self._connection.failure(error) from error

    def take(self) -> list[RawMessage]:
        """Return what has arrived and was not taken yet."""
        taken, self._messages = self._messages, []
        return taken

    def forget(self) -> None:
        """Drop the subscription: the connection is lost."""
        self._client.forget(self._subscription)

    def end(self, error: MailboxError | None = None) -> None:
        """End the pull under way now, with what has arrived."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)

    async def pull(
        self,
        subject: str,
        request: bytes,
        wanted: int,
        lasts: float,
        undo: Callable[[Puller], Awaitable[None]],
    ) -> list[RawMessage]:
        """Send a pull request and return what arrives until it ends: by itself, within ``lasts`` seconds, or by :meth:`end`.

        A pull that the server does not end in time, but has not lost, returns what has arrived. If the call is
        cancelled, or the pull is ended, ``undo`` is called under a shield, to put back what has arrived or still arrives.
        """
        connection = self._connection
        loop = connection.loop
        self._messages = []
        self._wanted = wanted
        self.source = subject
        epoch = connection.epoch
        self._ended = loop.create_future()
        connection.pullers.add(self)
        timer = loop.call_later(lasts + OVERDUE, self._finish, _OVERDUE)
        ended: Any = _UNFINISHED
        come: list[RawMessage] = []
        try:
            await connection.publish(subject, request, self._subject)
            ended = await self._ended
            if ended is _OVERDUE:
                await self._check_consumer(subject)
                come = self.take()
        finally:
            timer.cancel()
            if ended is not _DONE:
                await self._withdraw(undo)
            connection.pullers.discard(self)
            connection.check_quiet()
        messages, self._messages = self._messages, []
        if ended is _DONE:
            if epoch == connection.epoch:
                connection.idle.append(self)
            else:  # lost just now
                self.forget()
            return messages
        if ended is None or ended is _OVERDUE:
            return come
        raise type(ended)(*ended.args)

    async def _check_consumer(self, subject: str) -> None:
        """Raise :class:`MailboxConnectionError` if a pull is overdue because the server or the consumer is gone."""
        consumer = subject.removeprefix("$JS.API.CONSUMER.MSG.NEXT.")
        try:
            await self._connection.api(f"CONSUMER.INFO.{consumer}")
        except ApiError as error:
            raise PullEndedError(f"the NATS server did not end a pull request in time: {error}") from error

    async def _withdraw(self, undo: Callable[[Puller], Awaitable[None]]) -> None:
        """Tell the server that no caller waits any more, and put back what it has delivered, or still delivers.

        The driver's own ``drain`` would throw away what the server had in hand for this subscription.
        """
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT / 2):
            with suppress(Exception):  # a lost connection: what was delivered comes again when its lease ends
                client = self._connection.driver
                if client is self._client and client.is_connected:
                    await client._send_unsubscribe(self._subscription._id)  # noqa: SLF001 - see above
                    await undo(self)
            with suppress(Exception):
                await self._client.unlisten(self._subscription)

    def _on_message(self, message: RawMessage) -> None:
        if message.reply:
            self._messages.append(message)
            if len(self._messages) >= self._wanted:
                self._finish(_DONE)
            return
        status, told = message.status
        if status in ("404", "408"):
            self._finish(_DONE)
        elif status == "503":
            self._finish(NoResponderError("no stream or consumer answers: it was deleted, or JetStream is off"))
        elif status != "100":
            kind: type[MailboxConnectionError] = PullEndedError
            if "MaxWaiting" in told:
                kind = MailboxConnectionError
                told = "the consumer of the queue lets no more receives wait, of all processes together (max_waiting)"
            self._finish(kind(f"the NATS server ended a pull request: {status} {told}"))

    def _finish(self, how: Any) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(how)


class _Sign:
    """A value that equals only itself."""


_DONE = _Sign()
_OVERDUE = _Sign()
_UNFINISHED = _Sign()
