"""``Context``: what a handler may ask about the message it runs for, and say while it runs."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic

import anyio
from typing_extensions import TypeVar

from mainspring.core.process import in_event_loop
from mainspring.errors import ConfigError, InvalidParameterError, MailboxError
from mainspring.worker.tool_calls import Notes, ToolCall, ToolCallBlock, to_json

if TYPE_CHECKING:
    from mainspring.mailbox.message import Message
    from mainspring.worker.delivery import Delivery


Resources = TypeVar("Resources", default=object)

SCHEDULE_NAME = "mainspring-schedule"
"""The header of a message that a schedule has sent: the schedule's name."""
SCHEDULED_FOR = "mainspring-scheduled-for"
"""The header of such a message with the time of its tick, as ISO 8601."""
PROGRESS_EVERY = 1.0
"""Seconds of work before progress is first written to the store, between two writes, and that a write may take."""
NO_RESOURCES = object()
"""In the place of resources where a group has opened none."""


class Context(Generic[Resources]):
    """A handler's second parameter. ``Context[Pool]`` says of which type its :attr:`resources` are.

    In a plain ``def`` handler, which runs in a worker thread, the synchronous parts may be used as they are and the others
    by ``anyio.from_thread.run(ctx.checkpoint, state)``.
    """

    __slots__ = ("_delivery", "_notes", "_progress_due", "_resources")

    def __init__(self, delivery: Delivery, resources: Any = NO_RESOURCES) -> None:
        self._delivery = delivery
        self._resources = resources
        self._notes: Notes | None = None
        self._progress_due = 0.0

    @property
    def message(self) -> Message[Any, Any]:
        """The delivery: id, counts, headers. The worker settles it; a handler that does so itself is not overruled."""
        return self._delivery.message

    @property
    def attempt(self) -> int:
        """The number of this charged attempt, from 1."""
        return self._delivery.message.attempt

    @property
    def request_id(self) -> str:
        """The message's id: the same for all of its deliveries, so the key to make effects idempotent."""
        return self._delivery.message.id

    @property
    def run_id(self) -> str:
        """An id that is new at each delivery of its mailbox."""
        return self._delivery.message.receipt_handle

    @property
    def scheduled_for(self) -> datetime | None:
        """The time of the tick for which a schedule has sent the message (aware UTC), or None if no schedule did.

        It is the time by the schedule, however late the message is: so it names the day, say, that the work is for.
        """
        return _date(self._delivery.message.headers.get(SCHEDULED_FOR))

    @property
    def resources(self) -> Resources:
        """What the ``lifespan=`` of the loop's group has opened.

        :raises ConfigError: the group has none, or the loop runs without a group.
        """
        if self._resources is NO_RESOURCES:
            raise ConfigError(
                "ctx.resources: nothing was opened; run the loop in a group with LoopGroup(…, lifespan=…)"
            )
        return self._resources  # type: ignore[no-any-return]

    def beat(self) -> None:
        """Give a sign of life: the watchdog's clock for this message starts again. Callable from the handler's thread."""
        self._delivery.beat()

    @property
    def deadline(self) -> datetime | None:
        """When the handler will be cancelled (aware UTC): after ``handler_timeout``, or at the deadline that the message was
        sent with, whichever is earlier; or None."""
        left = self.remaining()
        return None if left is None else self._delivery.clocks.utc_now() + timedelta(seconds=left)

    def remaining(self) -> float | None:
        """Return the seconds until the deadline (0 when it has passed), or None if there is none."""
        return self._delivery.remaining()

    @property
    def shutting_down(self) -> bool:
        """True if the loop has been told to stop: a good moment to checkpoint and return or raise ``Retry``."""
        return self._delivery.shutting_down.is_set()

    async def wait_shutting_down(self) -> None:
        """Wait until the loop is told to stop; ends with the handler at the latest, which is cancelled then."""
        await self._delivery.shutting_down.wait()

    @property
    def restored(self) -> Any:
        """The state that an earlier delivery of this message last gave to :meth:`checkpoint`, or None."""
        return self._kept().restored

    async def checkpoint(self, state: Any) -> None:
        """Keep ``state`` with the message, for its next delivery; also a beat.

        It is plain JSON, which :attr:`restored` gives back as equal; or a dataclass or model, of which it gives the JSON data
        that its class reads. It is as durable as the mailbox when this returns.

        :raises SerializationError: it is neither, or would be read as something else; the earlier checkpoint stands.
        :raises ReceiptHandleExpiredError: the lease is lost; the earlier checkpoint stands.
        """
        await self._kept().save(to_json(state))

    def _kept(self) -> Notes:
        if self._notes is None:
            self._notes = Notes(self._delivery)
        return self._notes

    def tool_call(self, name: str, *, key: str | None = None, info: Any = None) -> ToolCallBlock:
        """Mark an effect outside as begun, and as ended when its block is left without an error.

        Write ``async with ctx.tool_call("charge", key=order_id) as call:``, and ``with`` in a plain ``def`` handler.

        Both are written with the message, beside its checkpoint, and are as durable as the mailbox: the first before the
        block runs, the second before what follows it. A delivery whose predecessor died in between, or left the block by an
        exception or a cancellation, finds the call in :attr:`unfinished_calls`. A call of the same name and key as one of
        those takes it up again: ended well, both have. ``call.keep(state)`` is a :meth:`checkpoint` written with the end.

        :param name: what is called.
        :param key: tells this call from others of the name: best the idempotency key that is sent along.
        :param info: anything that is JSON, for the person who must find out later what became of it.
        :raises ConfigError: the mailbox keeps no checkpoints (``Capabilities.checkpoints``).
        :raises InvalidParameterError: a name or key is no text; such a call is under way in this handler; or 100 calls of
            the message have begun and not ended.
        :raises SerializationError: ``info`` is no JSON.
        :raises ReceiptHandleExpiredError: the lease is lost. Raised at the beginning, the effect has not begun; at the end,
            the call stays unfinished. So it is with a store that does not answer (:class:`MailboxConnectionError`).
        """
        if not self._delivery.message.mailbox.capabilities.checkpoints:
            raise ConfigError(
                "ctx.tool_call: this mailbox keeps no checkpoints (Capabilities.checkpoints); use one that does"
            )
        return ToolCallBlock(self._kept(), name, key, info)

    @property
    def unfinished_calls(self) -> tuple[ToolCall, ...]:
        """The calls that an earlier delivery began and that have not ended or been settled. They may have had their effect."""
        return self._kept().unfinished

    async def resolve_call(self, call: ToolCall | ToolCallBlock) -> None:
        """Settle a call that has not ended: it had its effect, or is known to have had none. Settled twice, it stays so.

        Inside the block of the call itself it says that there is nothing to find out, although an exception leaves it.
        """
        if not isinstance(call, ToolCall | ToolCallBlock):
            raise InvalidParameterError(f"resolve_call takes a call of ctx.unfinished_calls, not {call!r}")
        await self._kept().end(call.call if isinstance(call, ToolCallBlock) else call)

    def transaction(self, connection: Any = None) -> TransactionBlock:
        """Return a transaction of the mailbox's database: the handler's writes and the acknowledgement commit together.

        ``async with ctx.transaction() as connection:`` yields the driver's connection (PostgreSQL: a psycopg
        ``AsyncConnection``). So an effect is applied exactly once, however often the message is delivered: where the lease was
        lost, or anything fails, nothing of it remains. See :meth:`Mailbox.transaction` for what it raises. The message is
        settled when the block has been left: return at once, what comes behind it is not tried again. To a requester, ``await
        ctx.message.reply(result)`` in the block commits the result with the rest. What is returned behind it is sent once,
        after the commit, and is lost if the process dies in between.

        ``async with ctx.transaction(session):`` does the same in a transaction of the handler's own session or connection to
        that database, such as an ``AsyncSession`` of SQLAlchemy. The block begins it, if the session has not, and ends it.

        A plain ``def`` handler writes ``with ctx.transaction(session):``, with a ``Session`` of SQLAlchemy, a connection of
        psycopg or psycopg2, or Django's. Only its thread uses that. A settlement in the block, as by
        ``anyio.from_thread.run(ctx.message.reply, result)``, takes place at the end of the block. A handler that is cancelled
        meanwhile still commits a block that it ends.

        :raises ConfigError: ``with`` in an async handler, or in a plain one without a session.
        """
        return TransactionBlock(self._delivery.message, connection)

    async def progress(self, done: float, total: float | None = None) -> None:
        """Say how far the work is: the group's status (``/status``) shows it. Also a beat, and a point where cancellation
        can come.

        Where the store keeps records, it is written there about once a second, from the first second of work on, so that
        ``job.status()`` shows it in any process. A write that fails is left out.
        """
        self._delivery.progress(done, total)
        await anyio.lowlevel.checkpoint()
        now = anyio.current_time()
        if now < self._progress_due:
            return
        if not self._progress_due:  # of a handler that ends at once nothing is written
            self._progress_due = self._delivery.started + PROGRESS_EVERY
            if now < self._progress_due:
                return
        self._progress_due = now + PROGRESS_EVERY
        await self._keep_progress(done, total)

    async def _keep_progress(self, done: float, total: float | None) -> None:
        from mainspring.mailbox import jobs

        backend = self._delivery.message.mailbox.backend
        if backend.capabilities.records:
            with suppress(MailboxError, OSError), anyio.move_on_after(PROGRESS_EVERY):
                await jobs.keep_progress(backend, self.request_id, done, total)


def _date(text: str | None) -> datetime | None:
    """Return the date that a header says, or None if it is none: any sender may have written it."""
    try:
        found = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return None if found.utcoffset() is None else found


class TransactionBlock(AbstractAsyncContextManager[Any], AbstractContextManager[Any]):
    """The block of :meth:`Context.transaction`: ``async with``, or ``with`` in a handler that is a plain ``def``."""

    __slots__ = ("_block", "_connection", "_message", "_thread_block")

    def __init__(self, message: Message[Any, Any], connection: Any) -> None:
        self._message = message
        self._connection = connection

    async def __aenter__(self) -> Any:
        self._block = self._message.mailbox.transaction(self._message, self._connection)
        return await self._block.__aenter__()

    async def __aexit__(self, *raised: Any) -> bool | None:
        return await self._block.__aexit__(*raised)

    def __enter__(self) -> Any:
        if in_event_loop():
            raise ConfigError("`with ctx.transaction(…)` is for plain `def` handlers; write `async with` here")
        mailbox = self._message.mailbox
        anyio.from_thread.run_sync(mailbox.check_open)
        self._thread_block = mailbox.backend.thread_transaction(self._message, self._connection)
        return self._thread_block.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._thread_block.__exit__(*raised)
