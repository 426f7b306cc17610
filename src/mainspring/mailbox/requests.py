"""Request and response through mailboxes: a message that is sent, and a reply that is waited for, across processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

import anyio

from mainspring.core import random
from mainspring.errors import (
    MailboxClosedError,
    MailboxError,
    MainspringError,
    RequestCancelledError,
    RequestFailedError,
    RequestTimeoutError,
    SerializationError,
    copied,
)
from mainspring.mailbox.backend import TRANSIENT
from mainspring.mailbox.limits import CLOSE_TIMEOUT, check_seconds
from mainspring.runtime.retry import Retries

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import CancelOutcome, Envelope, Message
    from mainspring.runtime.scope import DaemonScope

R = TypeVar("R")

REPLY_ERRORS = "mainspring-reply-errors"
"""The header by which a sender says that where there will be no result, ``reply_to`` gets an error reply; any value does.

An error reply has no body (JSON null) and, beside ``request_id``, the headers ``error`` and ``error_type``.
"""
CANCELLED = RequestCancelledError.__name__
"""The ``error_type`` of the error reply to a message that was cancelled."""
REPLIES_AT_ONCE = 100
REPLY_LEASE = 60.0
REPLY_WAIT = 3_600.0
WITHDRAWAL_TIMEOUT = 5.0
"""Seconds that the cancellation of a request that was given up may take, in the background."""


class PendingReply(Generic[R]):
    """A request that was sent and whose reply is still to come, or has come: from :meth:`Mailbox.submit`.

    Once it is no longer referred to, the reply is given up; the request itself goes on.
    """

    __slots__ = ("__weakref__", "_dies_at", "_error", "_ready", "_requester", "_value", "id")

    def __init__(self, requester: Requester, message_id: str, dies_at: float) -> None:
        self.id = message_id
        self._requester = requester
        self._dies_at = dies_at
        self._ready = anyio.Event()
        self._value: Any = None
        self._error: MainspringError | None = None

    def __repr__(self) -> str:
        return f"<PendingReply to {self.id}{' ready' if self.is_ready else ''}>"

    @property
    def is_ready(self) -> bool:
        """True if the reply, or the news that there will be none, has come."""
        return self._ready.is_set()

    async def result(self, *, timeout: float) -> R:
        """Return the reply; waits for it at most ``timeout`` seconds. May be asked again, also after a timeout.

        :raises RequestTimeoutError: no reply has come; the request stays where it is.
        :raises RequestFailedError: the request was dead-lettered.
        :raises RequestCancelledError: it was cancelled.
        :raises SerializationError: the reply does not fit the mailbox's reply type.
        :raises MailboxClosedError: the mailbox was closed meanwhile.
        """
        check_seconds("result: timeout", timeout, math.inf)
        with anyio.move_on_after(timeout):
            await self._until_ready()
        if not self.is_ready:
            raise RequestTimeoutError(
                f"request {self.id}: no reply has come within {timeout:g} s; wait longer, or cancel it"
            )
        return self._outcome()

    async def cancel(self) -> CancelOutcome:
        """Cancel the request (see :meth:`Mailbox.cancel`); who waits for its reply gets :class:`RequestCancelledError`."""
        return await self._requester.mailbox.cancel(self.id)

    def _outcome(self) -> R:
        if self._error is not None:
            raise copied(self._error)  # an error refers to the frames that it passed through, and so would this object
        return cast("R", self._value)

    def _end(self, value: Any, error: MainspringError | None) -> None:
        if not self.is_ready:
            self._value, self._error = value, error
            self._ready.set()

    async def _until_ready(self) -> None:
        """Wait until it is ready. A store buries what is too old without a word: that is looked for."""
        look_at, pause = self._dies_at, 0.1
        while not self.is_ready:
            with anyio.CancelScope(deadline=look_at):
                await self._ready.wait()
            if not self.is_ready:
                await self._requester.look_for_death(self)
                look_at, pause = anyio.current_time() + pause, min(pause * 2, 30.0)


class Requester:
    """The replies to the requests of one mailbox object: a transient mailbox beside it, and the task that empties it."""

    def __init__(self, mailbox: Mailbox[Any, Any], scope: DaemonScope) -> None:
        self.mailbox = mailbox
        self._scope = scope
        self._lock = anyio.Lock()
        self._box: Mailbox[Any, Any] | None = None
        self._waiting: WeakValueDictionary[str, PendingReply[Any]] = WeakValueDictionary()

    async def _address(self) -> str:
        """Return the name of the mailbox for the replies, which is open from the first request on."""
        async with self._lock:
            if self._box is None:
                self._box = await self._scope.start(self._collect, name=f"replies for mailbox {self.mailbox.name}")
            if not self._box.is_bound:  # the type of the replies may have become known meanwhile
                self._box.bind(body=self.mailbox.reply_type)
            return self._box.name

    async def request(self, envelope: Envelope, timeout: float) -> Any:
        """See :meth:`Mailbox.request`."""
        pending = self._expect(envelope)
        try:
            with anyio.move_on_after(timeout):
                await self._send(envelope)
                await pending._until_ready()  # noqa: SLF001 - one module
            if not pending.is_ready:
                raise RequestTimeoutError(f"request {pending.id}: no reply has come within {timeout:g} s")
            return pending._outcome()  # noqa: SLF001 - one module
        finally:
            if not pending.is_ready:
                self._withdraw(pending.id)

    async def submit(self, envelope: Envelope) -> PendingReply[Any]:
        """See :meth:`Mailbox.submit`."""
        pending = self._expect(envelope)
        await self._send(envelope)
        return pending

    def _expect(self, envelope: Envelope) -> PendingReply[Any]:
        """Hand the reply to that message, once it comes, to the object that this returns."""
        message_id, expires_in = envelope.message_id, envelope.expires_in
        dies_at = math.inf if expires_in is None else anyio.current_time() + expires_in
        pending = self._waiting[message_id] = PendingReply[Any](self, message_id, dies_at)
        return pending

    async def _send(self, envelope: Envelope) -> None:
        envelope.reply_to = await self._address()
        await self.mailbox.backend.send([envelope])

    def end(self, message_id: str, error: MainspringError) -> bool:
        """Let the waiter for that reply have an error; whether there was one."""
        pending = self._waiting.pop(message_id, None)
        if pending is not None:
            pending._end(None, error)  # noqa: SLF001 - one module
        return pending is not None

    def _withdraw(self, message_id: str) -> None:
        """Give up that reply, and cancel the request in the background."""
        self._waiting.pop(message_id, None)
        self._scope.start_soon(self._cancel, message_id, name=f"withdrawal of request {message_id}")

    async def look_for_death(self, pending: PendingReply[Any]) -> None:
        """True if the request is a dead letter."""
        try:
            for _, dead, _ in await self.mailbox.backend.find_dead_letters([pending.id]):
                self.end(pending.id, _failed(pending.id, dead.error, dead.error_type))
        except (MailboxError, OSError):  # it is looked for again
            return

    async def _cancel(self, message_id: str) -> None:
        with anyio.move_on_after(WITHDRAWAL_TIMEOUT):
            try:
                await self.mailbox.backend.cancel(message_id)
            except (MainspringError, OSError):  # then it stays in the queue, and its reply is dropped
                return

    async def _collect(self, *, task_status: TaskStatus[Mailbox[Any, Any]]) -> None:
        name = f"{TRANSIENT}{random.token(96)}"
        box = self.mailbox.sibling(name, body=self.mailbox.reply_type)
        error: MainspringError = MailboxClosedError(f"mailbox {self.mailbox.name!r} was closed before the reply came")
        try:
            async with box:
                task_status.started(box)
                try:
                    await self._receive(box)
                finally:
                    with anyio.move_on_after(CLOSE_TIMEOUT / 2, shield=True):
                        await _forget(box)
        except MainspringError as failed:
            if self._box is None:
                raise  # it never opened: the one who waits for the start hears of it
            error = failed
        finally:
            was_used, self._box = self._box is box, None
            if was_used:  # else its opener hears of that, or was cancelled, and the next one opens another
                for message_id in list(self._waiting):
                    self.end(message_id, error)

    async def _receive(self, box: Mailbox[Any, Any]) -> None:
        retries = Retries(initial=0.1, maximum=5.0)
        while True:
            try:
                messages = await box.receive(
                    max_messages=REPLIES_AT_ONCE, visibility_timeout=REPLY_LEASE, wait_time_seconds=REPLY_WAIT
                )
            except MainspringError as error:
                if not error.retryable:
                    raise
                await retries.pause()
                continue
            retries.succeeded()
            async with anyio.create_task_group() as tasks:
                for message in messages:
                    self._hand_over(message)
                    tasks.start_soon(_acknowledge, message)

    def _hand_over(self, message: Message[Any, Any]) -> None:
        headers = message.headers
        request_id = headers.get("request_id", "")
        pending = self._waiting.pop(request_id, None)
        if pending is None:
            self.mailbox.forgotten_replies += 1
            return
        value: Any = None
        failed: MainspringError | None = None
        if "error" in headers:
            failed = _failed(request_id, headers["error"], headers.get("error_type", ""))
        else:
            try:
                value = message.body
            except SerializationError as error:
                failed = SerializationError(f"the reply to request {request_id} cannot be read: {error}")
        pending._end(value, failed)  # noqa: SLF001 - one module


def _failed(message_id: str, error: str, error_type: str) -> MainspringError:
    if error_type == CANCELLED:
        return cancelled_error(message_id)
    return RequestFailedError(f"request {message_id} failed: {error_type}: {error}", error=error, error_type=error_type)


def cancelled_error(message_id: str) -> RequestCancelledError:
    return RequestCancelledError(f"request {message_id} was cancelled before it was done")


async def _acknowledge(message: Message[Any, Any]) -> None:
    try:
        await message.acknowledge()
    except (MainspringError, OSError):  # it comes again, and no request waits for it then
        return


async def _forget(box: Mailbox[Any, Any]) -> None:
    try:
        await box.backend.drop()
    except (MainspringError, OSError):  # its store forgets it by itself in a day
        return
