"""What a killed NATS server leaves behind: removals that it had answered and not written, so that messages are there again.

Its consumers know better: what is not above a consumer's floor is done, was given back, or has moved. It is removed again.
Where the consumer itself is ahead of its stream (a power cut took more of the stream), it would pass over what is sent next:
such a one is made anew, and delivers all that is there.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.errors import MailboxError
from mainspring.mailbox.nats_errors import ApiError, parse
from mainspring.mailbox.nats_names import CONSUMER
from mainspring.mailbox.nats_wire import Ask
from mainspring.periodic import Periodic

if TYPE_CHECKING:
    from mainspring.mailbox.nats_store import Store

EVERY = 30.0
"""Seconds between looks; after a reconnection there is one at once."""


class Tidier:
    """Looks after the streams that have consumers. Every open mailbox has one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._timer = Periodic(self._step)

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        self.look_soon()
        await self._timer.run()

    def look_soon(self) -> None:
        """The server may have been away."""
        self._timer.wake_by(anyio.current_time())

    async def _step(self, overslept: float) -> float:
        with suppress(MailboxError):  # it is looked at again
            await self.look()
        return anyio.current_time() + EVERY

    async def look(self) -> None:
        """Remove what is done."""
        names = self._store.names
        for stream in (names.queue, names.delayed, names.expiries):
            # The consumer first: the stream is never behind what it says then.
            consumer, state = await self._states(stream)
            if consumer["delivered"]["stream_seq"] > state["last_seq"]:
                await self._make_anew(stream)
            elif state["messages"] and state["first_seq"] <= consumer["ack_floor"]["stream_seq"]:
                await self._store.wire.api(f"STREAM.PURGE.{stream}", {"seq": consumer["ack_floor"]["stream_seq"] + 1})

    async def _states(self, stream: str) -> tuple[dict[str, Any], dict[str, Any]]:
        wire = self._store.wire
        consumer = await wire.api(f"CONSUMER.INFO.{stream}.{CONSUMER}")
        return consumer, (await wire.api(f"STREAM.INFO.{stream}"))["state"]

    async def _make_anew(self, stream: str) -> None:
        wire = self._store.wire
        for answer in await wire.ask_all([Ask(f"$JS.API.CONSUMER.DELETE.{stream}.{CONSUMER}")]):
            if not isinstance(answer, MailboxError):
                try:
                    parse(answer)
                except ApiError:  # another one was quicker
                    continue
        await self._store.ensure(self._store.names)
