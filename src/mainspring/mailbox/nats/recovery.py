"""What a killed NATS server leaves behind, put right: messages that its consumers pass over.

A server that is killed forgets removals that it had answered, so that messages are there again; and its consumer can lose
sight of one that had been redelivered and was still out. Either lies in the stream, was delivered, and is not out. The two
cannot be told apart, and nothing may be lost: so both are put to the tail again. (The consumer's ack floor is no help: in
2.9 it passes over messages that are still out.) The other way round a consumer can have out, for ever, what is not in the
stream any more, and stumbles over it: it is told that this is done. One of these can hide one of the others, as the numbers
then add up: so after a reconnection the first look is a close one, whatever they say, and so is one that finds all as the look
before has left it. And where a consumer is ahead of its
stream (a power cut took more of the stream), it would pass over what is sent next: it is made anew.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.errors import MailboxError
from mainspring.mailbox.nats.connection import Ask
from mainspring.mailbox.nats.errors import is_gone
from mainspring.mailbox.nats.names import CONSUMER
from mainspring.mailbox.nats.streams import Add, Added
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from mainspring.mailbox.nats.claims import Claims
    from mainspring.mailbox.nats.streams import Store, Stored

EVERY = 30.0
"""Seconds between looks; after a reconnection there is one at once, and one ``SOON``. While something seems to be passed over,
each comes after as long again as it has seemed so: it goes to the tail as soon as nothing is out."""
SOON = 1.0
PATIENCE = 300.0
"""Seconds after which what the consumer passes over goes to the tail although the consumer has something out: perhaps just
that, but then its holder is told, and it is run once more."""
WINDOW = 50_000
"""How far back it is looked for messages that are gone and that a consumer still has out."""
_AT_ONCE = 500


class Tidier:
    """Looks after the streams that have consumers. Every open mailbox has one."""

    def __init__(self, store: Store, claims: Claims) -> None:
        self._store = store
        self._claims = claims
        self._timer = Periodic(self._step)
        self._suspected: dict[str, tuple[float, int]] = {}
        self._doubtful = False
        self._found: dict[str, tuple[tuple[int, ...], int]] = {}

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        self._timer.wake_by(anyio.current_time())
        await self._timer.run()

    def doubt(self) -> None:
        """The server may have been away: look soon, and closely."""
        self._doubtful = True
        self._timer.wake_by(anyio.current_time())

    async def _step(self, overslept: float) -> float:
        doubtful, self._doubtful = self._doubtful, False
        soon = doubtful
        try:
            if doubtful:
                await self._store.recognize()
            soon = await self.look(closely=doubtful) or doubtful
        except MailboxError as error:  # it is looked at again
            self._doubtful = self._doubtful or doubtful
            if is_gone(error):  # the server has lost its data, or somebody has deleted a stream
                with suppress(MailboxError):
                    await self._store.mend(error)
        now = anyio.current_time()
        waits = [EVERY, *(max(SOON, now - since) for since, _ in self._suspected.values())]
        return now + (SOON if soon else min(waits))

    async def look(self, *, closely: bool = False) -> bool:
        """Put right what is not, as far as the numbers tell; ``closely``: where something is out they are not trusted.

        Whether the numbers may tell more now, as what they are made of was put right.
        """
        names = self._store.names
        soon = False
        for stream in (names.queue, names.delayed, names.expiries):
            # The consumer first: the stream is never behind what it says then.
            consumer, state = await self._states(stream)
            if consumer["delivered"]["stream_seq"] > state["last_seq"]:
                await self._make_anew(stream)
                continue
            out = consumer["num_ack_pending"]
            if state["messages"] > consumer["num_pending"] + out or (closely and out):
                if closely or not (out and self._bides(stream)):
                    await self._look_closer(stream, consumer)
                continue
            self._suspected.pop(stream, None)
            found = (consumer["delivered"]["consumer_seq"], out, state["messages"], state["last_seq"])
            before, times = self._found.get(stream, ((), 0))
            times = times + 1 if found == before else 0
            self._found[stream] = found, times
            if times == 1 and out and state["messages"]:  # nothing was done since the last look; once is enough
                await self._look_closer(stream, consumer, above=consumer["ack_floor"]["stream_seq"])
                soon = True
        return soon

    def _bides(self, stream: str) -> bool:
        """Whether it was looked closely at what seems to be passed over there, and its time has not come."""
        suspected = self._suspected.get(stream)
        return suspected is not None and anyio.current_time() - suspected[0] < PATIENCE

    async def _look_closer(self, stream: str, consumer: dict[str, Any], *, above: int = 0) -> None:
        """Count those that were delivered and are there: messages that were sent meanwhile are not meant.

        What is gone is told to be done, from the number after ``above`` on.
        """
        delivered = consumer["delivered"]["stream_seq"]
        state = (await self._store.wire.api(f"STREAM.INFO.{stream}", {"deleted_details": True}))["state"]
        first = state["first_seq"]
        gone = [number for number in state.get("deleted") or () if number <= delivered]
        there = max(0, delivered - first + 1) - len(gone)
        out = consumer["num_ack_pending"]
        if not out:
            await self._send_again(stream, delivered)
            return
        oldest = max(1, above + 1, delivered - WINDOW)
        gone = [*range(oldest, min(first, delivered + 1)), *(number for number in gone if number >= oldest)]
        place = f"$JS.ACK.{stream}.{CONSUMER}.1"
        for start in range(0, len(gone), _AT_ONCE):
            some = gone[start : start + _AT_ONCE]
            await self._store.wire.ask_all([Ask(f"{place}.{number}.{number}.0.0", b"+ACK") for number in some])
        if there <= out:
            self._suspected.pop(stream, None)
            return
        since, limit = self._suspected.setdefault(stream, (anyio.current_time(), delivered))
        if anyio.current_time() - since >= PATIENCE:
            del self._suspected[stream]
            await self._send_again(stream, limit)

    async def _send_again(self, stream: str, limit: int) -> None:
        """Put all messages up to number ``limit`` to the tail, each in one step that replaces it."""
        store = self._store
        prefix = {store.names.queue: store.names.to_queue, store.names.delayed: store.names.to_delayed}.get(
            stream, store.names.to_expiries
        )
        number = 1
        while True:
            found: list[Stored] = []
            while len(found) < _AT_ONCE:
                stored = await store.next(stream, number, f"{prefix}*")
                if stored is None or stored.sequence > limit:
                    break
                found.append(stored)
                number = stored.sequence + 1
            if not found:
                return
            await self._replace(stream, found)

    async def _replace(self, stream: str, found: list[Stored]) -> None:
        store = self._store
        queued = stream == store.names.queue
        payloads = [self._claims.lost(stored.record).encode() if queued else stored.payload for stored in found]
        adds = [Add(stored.subject, payload, stored.sequence) for stored, payload in zip(found, payloads, strict=True)]
        async with store.gate.moving():
            results = await store.add_all(adds)
            moved = sum(isinstance(result, Added) and result.sequence > 0 for result in results)
            if moved and stream != store.names.expiries:
                await store.moved(moved)

    async def _states(self, stream: str) -> tuple[dict[str, Any], dict[str, Any]]:
        wire = self._store.wire
        consumer = await wire.api(f"CONSUMER.INFO.{stream}.{CONSUMER}")
        return consumer, (await wire.api(f"STREAM.INFO.{stream}"))["state"]

    async def _make_anew(self, stream: str) -> None:
        # That there is none to delete means that another one was quicker.
        await self._store.wire.ask_all([Ask(f"$JS.API.CONSUMER.DELETE.{stream}.{CONSUMER}")])
        await self._store.ensure(self._store.names)
        self._store.wire.end_pulls()  # those sent meanwhile reached no consumer
