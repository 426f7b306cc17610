"""``Context``: what a handler may ask about the message it runs for, and say while it runs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio

from mainspring import clock
from mainspring.errors import SerializationError
from mainspring.loops.run import on_the_loop

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from mainspring.loops.run import Run
    from mainspring.mailbox.message import Message


class Context:
    """A handler's second parameter.

    In a plain ``def`` handler, which runs in a worker thread, the synchronous parts may be used as they are and the others
    by ``anyio.from_thread.run(ctx.checkpoint, state)``.
    """

    __slots__ = ("_restored", "_run")

    def __init__(self, run: Run) -> None:
        self._run = run
        self._restored: Any = None

    @property
    def message(self) -> Message[Any, Any]:
        """The delivery: id, counts, headers. The worker settles it; a handler that does so itself is not overruled."""
        return self._run.message

    @property
    def attempt(self) -> int:
        """Which charged attempt this is, from 1."""
        return self._run.message.attempt

    @property
    def request_id(self) -> str:
        """The message's id: the same for all of its deliveries, so the key to make effects idempotent."""
        return self._run.message.id

    @property
    def run_id(self) -> str:
        """An id that is new at each delivery."""
        return self._run.message.receipt_handle

    def beat(self) -> None:
        """Give a sign of life: the watchdog's clock for this message starts again. Callable from the handler's thread."""
        self._run.beat()

    @property
    def deadline(self) -> datetime | None:
        """When ``handler_timeout`` will cancel the handler (aware UTC), or None."""
        left = self.remaining()
        return None if left is None else on_the_loop(clock.utc_now) + timedelta(seconds=left)

    def remaining(self) -> float | None:
        """Seconds until the deadline (0 when it has passed), or None where there is none."""
        return self._run.remaining()

    @property
    def shutting_down(self) -> bool:
        """Whether the loop has been told to stop: a good moment to checkpoint and return or raise ``Retry``."""
        return self._run.shutting_down.is_set()

    async def wait_shutting_down(self) -> None:
        """Wait until the loop is told to stop; ends with the handler at the latest, which is cancelled then."""
        await self._run.shutting_down.wait()

    @property
    def restored(self) -> Any:
        """What an earlier delivery of this message last gave to :meth:`checkpoint`, or None."""
        if self._restored is None and (raw := self._run.message.checkpoint) is not None:
            from pydantic_core import from_json

            self._restored = from_json(raw)
        return self._restored

    async def checkpoint(self, state: Any) -> None:
        """Keep ``state`` (anything pydantic can write as JSON) with the message, for its next delivery; also a beat.

        It is as durable as the mailbox when this returns. Raises :class:`SerializationError` for what is no JSON and
        :class:`ReceiptHandleExpiredError` where the lease is lost; the earlier checkpoint then stands.
        """
        from pydantic_core import PydanticSerializationError, to_json

        self._run.beat()
        try:
            raw = to_json(state)
        except (PydanticSerializationError, ValueError) as error:
            raise SerializationError(f"a checkpoint of type {type(state).__qualname__} is no JSON: {error}") from error
        await self._run.message.save_checkpoint(raw)
        self._restored = None
        self._run.beat()

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """A transaction of the mailbox's database: what the handler writes in it and the acknowledgement commit together.

        ``async with ctx.transaction() as connection:`` yields the driver's connection (PostgreSQL: a psycopg
        ``AsyncConnection``). So an effect is applied exactly once, however often the message is delivered: where the lease
        was lost, or anything fails, nothing of it remains. See :meth:`Mailbox.transaction` for what it raises. The message
        is settled when the block has been left: return at once, what comes behind it is not tried again.
        """
        message = self._run.message
        return message._mailbox.transaction(message)  # noqa: SLF001 - the worker's own message

    async def progress(self, done: float, total: float | None = None) -> None:
        """Say how far the work is: the group's status (``/status``) shows it. Also a beat, and a point where cancellation
        can come."""
        self._run.progress(done, total)
        await anyio.lowlevel.checkpoint()
