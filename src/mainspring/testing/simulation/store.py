"""The store's side of a run: one real in-memory mailbox, the sessions of its clients, and the ledger that watches both."""

from __future__ import annotations

from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from mainspring.errors import MailboxConnectionError, ReceiptHandleExpiredError, SerializationError
from mainspring.mailbox.message import ACK, Delivery

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.codec import Codec
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import Envelope, Settlement
    from mainspring.testing.simulation.ledger import Ledger

# The hooks of the mailbox that is the store are called as a server would call them: this module is that server.
# ruff: noqa: SLF001


class Store:
    """What all processes of a run share. Its calls take effect at once; what is slow or fails is the way to it."""

    def __init__(self, mailbox: Mailbox[Any, Any], codec: Codec, ledger: Ledger, nursery: trio.Nursery) -> None:
        self.mailbox = mailbox
        self.ledger = ledger
        self.down = False
        self.calls = 0
        self._nursery = nursery
        self._context = copy_context()
        self._up = trio.Event()
        self._codec = codec

    async def put(self, lane: str, envelopes: list[Envelope]) -> list[str]:
        """Store messages."""
        self.calls += 1
        ids = await self.mailbox._put(envelopes)
        broken = len(envelopes) == 1 and not self._is_understood(envelopes[0].body)
        self.ledger.accepted(lane, ids, [envelope.delay for envelope in envelopes], undecodable=broken)
        return ids

    def _is_understood(self, raw: bytes) -> bool:
        try:
            self._codec.decode(raw)
        except SerializationError:
            return False
        return True

    async def claim(self, lane: str, most: int, visibility: float, wait: float) -> list[Delivery]:
        """Lease messages; copies, since nothing that a store hands out stays its own on the other side."""
        self.calls += 1
        entries = await self.mailbox._claim(most, visibility, wait)
        if not entries:
            return []
        self.ledger.claimed(lane, entries, visibility)
        return [_copy(entry) for entry in entries]

    async def settle(self, lane: str, delivery: Delivery, settlement: Settlement) -> None:
        """End a delivery."""
        self.calls += 1
        try:
            await self.mailbox._settle(delivery, settlement)
        except ReceiptHandleExpiredError:
            self.ledger.refused(lane, delivery, type(settlement).__name__.lower())
            raise
        self.ledger.settled(lane, delivery, settlement)

    async def acknowledge(self, lane: str, deliveries: list[Delivery]) -> dict[int, Exception]:
        """Acknowledge deliveries, in one step."""
        self.calls += 1
        refused = await self.mailbox._acknowledge_many(deliveries)
        for number, delivery in enumerate(deliveries):
            if number in refused:
                self.ledger.refused(lane, delivery, "ack")
            else:
                self.ledger.settled(lane, delivery, ACK)
        return refused

    async def extend(self, lane: str, delivery: Delivery, timeout: float) -> None:
        """Extend a lease."""
        self.calls += 1
        try:
            await self.mailbox._extend(delivery, timeout)
        except ReceiptHandleExpiredError:
            self.ledger.refused(lane, delivery, "renewal")
            raise
        self.ledger.extended(lane, delivery, timeout)

    async def save_checkpoint(self, lane: str, delivery: Delivery, state: bytes) -> None:
        """Keep a checkpoint."""
        self.calls += 1
        try:
            await self.mailbox._save_checkpoint(delivery, state)
        except ReceiptHandleExpiredError:
            self.ledger.refused(lane, delivery, "checkpoint")
            raise

    async def purge(self) -> int:
        """Drop what waits."""
        dropped = await self.mailbox._purge()
        self.ledger.purged()
        return dropped

    async def replay(self, message_ids: list[str] | None) -> int:
        """Send dead letters again."""
        before = await self._dead()
        replayed = await self.mailbox._replay(message_ids)
        self.ledger.replayed(before, await self._dead())
        return replayed

    async def discard_dead(self, message_ids: list[str] | None) -> int:
        """Forget dead letters."""
        before = await self._dead()
        discarded = await self.mailbox._discard_dead(message_ids)
        self.ledger.discarded(before, await self._dead())
        return discarded

    async def _dead(self) -> set[str]:
        return {delivery.message_id for delivery, _, _ in await self.mailbox._dead_letters(1 << 30, None)}

    async def check(self) -> None:
        """Have the ledger compare its numbers with the store's."""
        self.ledger.check(await self.mailbox._counts())

    # ------------------------------------------------------------------------------------------------------- outages

    def stop(self) -> None:
        """The store is away from now on; what it has accepted it keeps."""
        self.down = True
        self._up = trio.Event()

    def start(self) -> None:
        """It is back."""
        self.down = False
        self._up.set()

    # ------------------------------------------------------------------------------------------------------ sessions

    def session(self, lane: str) -> Session:
        """A session for one client: the task of the store's that waits on the client's behalf."""
        session = Session(self, lane)
        self._start(session.run, f"session of {lane}")
        return session

    def run_later(self, call: Any) -> None:
        """Make a call whose request was on its way when its client went; nobody hears the answer."""

        async def arrive() -> None:
            try:
                await call()
            except (ReceiptHandleExpiredError, MailboxConnectionError):
                return

        self._start(arrive, "a request that comes late")

    def _start(self, fn: Callable[[], Awaitable[None]], name: str) -> None:
        """A task of the store's own, whoever's request it serves: it does not stand still with that process."""
        self._context.run(partial(self._nursery.start_soon, fn, name=name))


class Ask:
    """A waiting claim of a client. ``answer`` is None until the store has answered; who withdraws waits for that, too."""

    __slots__ = ("answer", "answered", "most", "until", "visibility", "withdrawn")

    def __init__(self, most: int, visibility: float, until: float) -> None:
        self.most = most
        self.visibility = visibility
        self.until = until
        self.answer: list[Delivery] | None = None
        self.answered = trio.Event()
        self.withdrawn = False


class Session:
    """Waits for messages on behalf of one client, as the store's side of a connection does.

    So the wait is the store's: a client that stands still, or is gone, neither holds up the others nor takes their wake-ups,
    and what is claimed for one that does not listen any more stays leased until that lease ends.
    """

    def __init__(self, store: Store, lane: str) -> None:
        self._store = store
        self._lane = lane
        self._ask: Ask | None = None
        self._asked = trio.Event()
        self._scope: trio.CancelScope | None = None
        self.ended = False

    def ask(self, ask: Ask) -> None:
        """Begin to wait for ``ask``."""
        self._ask = ask
        self._asked.set()

    def withdraw(self, ask: Ask) -> None:
        """The client does not want it any more: it is answered with what had been claimed by then, mostly nothing."""
        ask.withdrawn = True
        if self._ask is ask and self._scope is not None:
            self._scope.cancel()
        elif ask.answer is None:
            self._answer(ask, [])

    def retire(self) -> None:
        """What it waits for is the last."""
        self.ended = True
        self._asked.set()

    def end(self) -> None:
        """The connection is gone, and the store notices."""
        self.ended = True
        self._ask = None
        if self._scope is not None:
            self._scope.cancel()
        self._asked.set()

    async def run(self) -> None:
        """Serve until ended."""
        while True:
            ask = self._ask
            if ask is None or ask.answer is not None:
                if self.ended:
                    return
                self._asked = trio.Event()
                await self._asked.wait()
                continue
            claimed: list[Delivery] = []
            if not ask.withdrawn:
                with trio.CancelScope() as self._scope:
                    wait = max(0.0, ask.until - trio.current_time())
                    claimed = await self._store.claim(self._lane, ask.most, ask.visibility, wait)
                self._scope = None
            self._answer(ask, claimed)

    def _answer(self, ask: Ask, claimed: list[Delivery]) -> None:
        ask.answer = claimed
        ask.answered.set()


def _copy(entry: Delivery) -> Delivery:
    return Delivery(
        entry.message_id,
        entry.body,
        entry.receipt_handle,
        entry.delivery_count,
        entry.attempt,
        entry.enqueued_at,
        entry.first_received_at,
        entry.reply_to,
        entry.headers,
        entry.checkpoint,
        entry.leased_at,
        entry.history,
    )
