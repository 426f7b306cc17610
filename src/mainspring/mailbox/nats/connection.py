"""A mailbox's part of the connection to a NATS server: pipelined calls with a deadline each, and pull requests that can be
cancelled."""

from __future__ import annotations

import json
import math
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from mainspring.core.clock import loop_clock
from mainspring.core.process import event_loop
from mainspring.errors import MailboxClosedError, MailboxConnectionError, MailboxError, MainspringError, describe
from mainspring.mailbox.limits import CLOSE_TIMEOUT
from mainspring.mailbox.nats.client import (
    ApiError,
    NoResponderError,
    NotAllowedError,
    PullEndedError,
    parse,
    translated,
)
from mainspring.mailbox.nats.messages import nanoseconds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from nats.aio.subscription import Subscription

    from mainspring.mailbox.nats.client import RawMessage, StrictClient
    from mainspring.mailbox.nats.shared_client import SharedClient


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
    """One mailbox's part of a connection, on asyncio. Its requests that are out when the connection breaks fail at once.

    :param shared: the connection, which other mailboxes may use too.
    :param name: of the mailbox, for errors.
    """

    def __init__(self, shared: SharedClient, name: str) -> None:
        self._shared = shared
        self._name = name
        self.timeout = shared.timeout
        """Seconds that a request may take."""
        self.opening = anyio.CancelScope()
        """The scope of opening, with its deadline. It has no effect any more once the mailbox is open."""
        self._pending: dict[int, tuple[Any, float, str]] = {}
        self._is_deaf = False
        """True if the server has dropped the subscription to the answers."""
        self._bounds_pulls = True
        """False once there was a message that is larger than a portion."""
        self._count = 0
        self._timer: Any = None
        self.pullers: set[Puller] = set()
        self.idle: list[Puller] = []
        self._is_open = False
        self.reconnected: Callable[[], object] = lambda: None
        self.on_loss: Callable[[], object] = lambda: None
        self.on_silence: Callable[[MailboxConnectionError], object] = lambda error: None
        self._listeners: list[tuple[str, Callable[[RawMessage], object]]] = []
        self._subscriptions: list[Subscription] = []
        """Those of its listeners, with the present client."""
        self._quiet: anyio.Event | None = None
        self.epoch = 0
        """How often the connection was lost."""
        self.reconnects = 0
        """How often it was made anew."""

    @property
    def is_connected(self) -> bool:
        """True if the server can be reached, as far as is known."""
        return self._shared.is_connected

    @property
    def in_flight(self) -> int:
        """The number of requests without an answer."""
        return len(self._pending)

    @property
    def max_payload(self) -> int:
        """Bytes of the largest payload that the server takes, as of the latest connection."""
        return self._shared.max_payload

    @property
    def portion(self) -> int | None:
        """Bytes that a pull may bring, of several messages together; None for any number."""
        return self._shared.portion if self._bounds_pulls else None

    def __repr__(self) -> str:
        return f"<NatsConnection {self._name!r} asked {len(self._pending)} pulls {len(self.pullers)}>"

    # ---------------------------------------------------------------------------------------------------- life cycle

    async def open(self) -> None:
        """Connect, within the timeout, or join the connection that there is.

        :raises MailboxConnectionError: no server can be reached; at once if every server refuses.
        :raises ConfigError: each server refuses the login, or the URL wants TLS and the server has none.
        """
        self.loop: Any = event_loop()
        self._now = loop_clock()
        try:
            client = await self._shared.join(self)
        except Exception as error:
            failure = self.failure(error)
            raise failure from failure.__cause__
        self._is_open = True
        self._inbox = f"{client.new_inbox()}."
        try:
            await self.listen(f"{self._inbox}*", self._on_answer)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Wait for the answers that are out, then leave the connection; at most :data:`CLOSE_TIMEOUT` seconds together."""
        self.end_pulls()
        try:
            with anyio.move_on_after(CLOSE_TIMEOUT / 2):
                while self._pending or self.pullers:
                    self._quiet = anyio.Event()
                    await self._quiet.wait()
        finally:  # no later call would leave
            self._is_open = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            subscriptions = self._subscriptions + [puller.subscription for puller in self.idle]
            self._fail_all(MailboxClosedError(f"{self._name} was closed while the operation was out"))
            await self._shared.leave(self, subscriptions)

    def check_quiet(self) -> None:
        """Wake a close that waits, if no request and no pull is out any more."""
        if self._quiet is not None and not (self._pending or self.pullers):
            self._quiet.set()

    def fell_silent(self) -> None:
        """Note that the server answers nothing: waiting receives need not find out by a call of their own."""
        self.on_silence(self._lost_error())

    def deny(self, subject: str) -> None:
        """Fail the requests whose answers this user may not receive, as it may not use ``subject`` any more, or never could.

        A subscription to it is gone: the server does not make it anew when the user may use it again.
        """
        error = NotAllowedError(
            f"{self._name}: the NATS server does not let this user use {subject!r}; grant the user what a mailbox uses"
        )
        self._is_deaf = self._is_deaf or subject == f"{self._inbox}*"
        self._fail_requests(error, None if self._is_deaf else subject)
        for puller in list(self.pullers):
            if subject in (puller.source, puller.subject):
                puller.end(error)
        for puller in [idle for idle in self.idle if idle.subject == subject]:
            self.idle.remove(puller)
            puller.forget()

    def refuse_subscription(self) -> None:
        """Fail what may wait in vain: the server has refused a subscription, the latest of some mailbox."""
        error = MailboxConnectionError(
            f"{self._name}: the NATS server allows this user no more subscriptions; raise max_subscriptions on the server, or"
            " in the account, or open fewer mailboxes in one process"
        )
        if len(self._listeners) == 1:  # the one to the answers: it is being opened
            self._fail_requests(error)
        for puller in list(self.pullers):
            if not puller.has_ended:
                puller.end(error)

    def _fail_requests(self, error: MailboxError, subject: str | None = None) -> None:
        """Fail the requests that are out; only those to ``subject``, if there is one."""
        for token, (future, _, asked) in list(self._pending.items()):
            if subject in (None, asked):
                del self._pending[token]
                if not future.done():
                    future.set_result(_NoAnswer(error))
        self.check_quiet()

    def lose(self) -> None:
        """Fail what is out: the connection is lost."""
        self._is_deaf = False
        self._fail_all(self._lost_error())
        self.on_loss()

    def came_back(self) -> None:
        """Note that the connection was made anew."""
        self.reconnects += 1
        self.reconnected()

    def _lost_error(self) -> MailboxConnectionError:
        told = f": {self._shared.last_error}" if self._shared.last_error else ""
        return MailboxConnectionError(f"{self._name}: the connection to the NATS server is lost{told}")

    def pull_error(self, status: str, told: str) -> MailboxConnectionError:
        """Return the error for a pull request that the server has ended with that status."""
        if status == "503":
            return NoResponderError(
                f"{self._name}: no stream answers: try again, as what was deleted is made anew, or turn JetStream on"
            )
        if "MaxWaiting" in told:
            return MailboxConnectionError(
                f"{self._name}: the consumer of the queue lets no more receives wait, of all processes together; raise its"
                " max_waiting, or let fewer loops receive"
            )
        return PullEndedError(
            f"{self._name}: the NATS server ended a pull request ({status} {told}): try again, as what was deleted is made anew"
        )

    def failure(self, error: Exception) -> MainspringError:
        """Translate an exception of the driver."""
        told = describe(error)
        if isinstance(error, TimeoutError):
            check = "" if self._is_open else "; check that a NATS server listens there"
            told = self._shared.last_error or f"no answer within {self.timeout:g} s{check}"
        return translated(error, self._name, () if self._is_open else self._shared.servers, told)

    def _fail_all(self, error: MailboxError) -> None:
        self.epoch += 1
        self._fail_requests(error)
        for puller in list(self.pullers):
            puller.end(error)
        while self.idle:
            self.idle.pop().forget()

    @property
    def driver(self) -> StrictClient | None:
        """The driver's client, connected or not, if there is one."""
        return self._shared.client

    @property
    def client(self) -> StrictClient:
        """The driver's client, connected; else raise :class:`MailboxConnectionError`."""
        if not self._is_open:
            raise MailboxClosedError(f"{self._name} is closed")
        client = self._shared.client
        if client is None or not client.is_connected:
            raise self._lost_error()
        return client

    def check_connected(self) -> None:
        """Raise :class:`MailboxConnectionError` if the connection is lost."""
        _ = self.client

    async def _reached(self) -> StrictClient:
        """See :attr:`client`. A caller in a loop without success lets the reconnecting task run."""
        if not self._shared.is_connected:
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

    @asynccontextmanager
    async def creation(self) -> AsyncIterator[None]:
        """Hold one of the turns to create a stream or a consumer.

        The wait for it does not count as opening: it depends on how many other mailboxes are being created. It has an end,
        as each creation has one.
        """
        began, until = anyio.current_time(), self.opening.deadline
        self.opening.deadline = math.inf
        async with self._shared.creations:
            self.opening.deadline = until + anyio.current_time() - began
            yield

    async def _start(self, subject: str, payload: bytes, headers: dict[str, str] | None) -> tuple[int, Any]:
        if self._is_deaf:
            await self._listen_for_answers()
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
        client = self._shared.client
        if client is None or not client.is_connected or not self._is_open:
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

    def begin_pull(self, puller: Puller) -> None:
        """Count a pull as under way."""
        self.pullers.add(puller)
        self._shared.pulls += 1

    def finish_pull(self, puller: Puller) -> None:
        """Undo :meth:`begin_pull`."""
        self.pullers.discard(puller)
        self._shared.pulls -= 1
        self.check_quiet()

    def unbound_pulls(self) -> None:
        """Let a pull bring any number of bytes from now on."""
        self._bounds_pulls = False

    async def listen(self, subject: str, callback: Callable[[RawMessage], object]) -> None:
        """Call ``callback``, which may not wait, with what is published on a subject, also after a reconnection."""
        self._subscriptions.append(await self.client.listen(subject, callback))
        self._listeners.append((subject, callback))

    async def _listen_for_answers(self) -> None:
        """Subscribe to the answers once more. If this user may still not do so, the server says so, see :meth:`deny`."""
        self._is_deaf = False
        client = self.client
        try:
            await client.unlisten(self._subscriptions[0])
            self._subscriptions[0] = await client.listen(*self._listeners[0])
        except Exception as error:
            raise self.failure(error) from error

    async def listen_on(self, client: StrictClient) -> list[Subscription]:
        """Listen to the same with a client that takes the place of the present one. Return the subscriptions."""
        return [await client.listen(subject, callback) for subject, callback in self._listeners]

    def move_to(self, subscriptions: list[Subscription]) -> None:
        """Note what :meth:`listen_on` returned: that client has taken the place of the former one."""
        self._subscriptions = subscriptions


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
        """The subject of its latest pull request."""
        self.subject = ""
        """The subject on which it waits for messages."""
        self.has_ended = False
        """True if a pull has ended by itself: its subscription was accepted."""
        self._ended: Any = None

    async def open(self, client: StrictClient) -> None:
        """Subscribe."""
        self._client = client
        self.subject = client.new_inbox()
        try:
            self.subscription = await client.listen(self.subject, self._on_message)
        except Exception as error:
            raise self._connection.failure(error) from error

    def take(self) -> list[RawMessage]:
        """Return what has arrived and was not taken yet."""
        taken, self._messages = self._messages, []
        return taken

    def forget(self) -> None:
        """Drop the subscription: the connection is lost."""
        self._client.forget(self.subscription)

    def end(self, error: MailboxError | None = None) -> None:
        """End the pull under way now, with what has arrived."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)

    async def pull(
        self,
        subject: str,
        wanted: int,
        lasts: float,
        undo: Callable[[Puller], Awaitable[None]],
    ) -> list[RawMessage]:
        """Send a pull request and return what arrives until it ends: by itself, within ``lasts`` seconds, or by :meth:`end`.

        It ends by itself if it has brought ``wanted`` messages, or a portion of large ones. Without a time (0) the server ends
        it at once if it has nothing to deliver.

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
        connection.begin_pull(self)
        timer = loop.call_later(lasts + OVERDUE, self._finish, _OVERDUE)
        ended: Any = _UNFINISHED
        come: list[RawMessage] = []
        try:
            await connection.publish(subject, _pull_request(wanted, lasts, connection.portion), self.subject)
            ended = await self._ended
            if ended is _OVERDUE:
                await self._check_consumer(subject)
                come = self.take()
        finally:
            timer.cancel()
            if ended is not _DONE:
                await self._withdraw(undo)
            connection.finish_pull(self)
        messages, self._messages = self._messages, []
        if ended is _DONE:
            self.has_ended = True
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
                    await client._send_unsubscribe(self.subscription._id)  # noqa: SLF001 - see above
                    await undo(self)
            with suppress(Exception):
                await self._client.unlisten(self.subscription)

    def _on_message(self, message: RawMessage) -> None:
        if message.reply:
            self._messages.append(message)
            if len(self._messages) >= self._wanted:
                self._finish(_DONE)
            return
        status, told = message.status
        if status in ("404", "408"):
            self._finish(_DONE)
        elif "MaxBytes" in told:
            if not self._messages:
                self._connection.unbound_pulls()
            self._finish(_DONE)
        elif status != "100":
            self._finish(self._connection.pull_error(status, told))

    def _finish(self, how: Any) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(how)


def _pull_request(wanted: int, lasts: float, portion: int | None) -> bytes:
    most = b"" if portion is None else b',"max_bytes":%d' % portion
    end = b',"expires":%d' % nanoseconds(lasts) if lasts else b""
    return b'{"batch":%d,"no_wait":true%b%b}' % (wanted, most, end)


class _Sign:
    """A value that equals only itself."""


_DONE = _Sign()
_OVERDUE = _Sign()
_UNFINISHED = _Sign()
