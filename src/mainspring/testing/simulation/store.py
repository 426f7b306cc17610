"""The store's side of a run: one real in-memory mailbox, the sessions of its clients, and the ledger that watches both."""

from __future__ import annotations

from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import trio

from mainspring.errors import MailboxConnectionError, ReceiptHandleExpiredError, SerializationError
from mainspring.mailbox.limits import CLOSE_TIMEOUT
from mainspring.mailbox.mailbox import Capabilities, Mailbox
from mainspring.mailbox.message import ACK, Delivery

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

    from mainspring.mailbox.codec import Codec
    from mainspring.mailbox.message import Counts, Dead, Envelope, Settlement
    from mainspring.runtime.scope import DaemonScope
    from mainspring.testing.simulation.event_log import Journal
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


V = TypeVar("V")

LONGEST_CALL = 5.0
"""Seconds that a slow call may be on its way."""


class Link:
    """One process's connection to the store.

    ``mode`` is what a partition does to calls: ``"hang"`` (they wait until it is over; a request whose caller gives up may
    still arrive then), ``"fail"``, or ``"lost"`` (they take effect, and their answer is lost). A dead link never answers.
    """

    def __init__(self, store: Store, lane: str, rng: Random, journal: Journal, slow_call: float = 0.0) -> None:
        self.store = store
        self.lane = lane
        self.dead = False
        self.slow_call = slow_call
        self._mode: str | None = None
        self._slow_until = 0.0
        self._healed = trio.Event()
        self._rng = rng
        self._journal = journal
        self._late: list[Callable[[], Awaitable[Any]]] = []
        self._sessions: list[Session] = []  # those that wait for nothing just now
        self._asks: dict[Ask, tuple[Session, trio.CancelScope]] = {}

    # --------------------------------------------------------------------------------------------------------- faults

    @property
    def is_cut(self) -> bool:
        """Whether a partition is under way."""
        return self._mode is not None

    @property
    def is_slow(self) -> bool:
        """Whether a call may be on its way for long just now, or was until a moment ago."""
        return self._mode is not None or self.store.down or trio.current_time() < self._slow_until

    def cut(self, mode: str) -> None:
        """The partition begins."""
        self._mode = mode
        self._healed = trio.Event()
        if mode != "hang":
            self._break_waits()

    def heal(self) -> None:
        """The partition is over; requests that were on their way arrive."""
        self._mode = None
        self._slow_until = trio.current_time() + LONGEST_CALL
        self._healed.set()
        late, self._late = self._late, []
        for call in late:
            self.store.run_later(call)

    def reset(self) -> None:
        """The store went away: waits end, and their sessions with them."""
        self._end_sessions()
        self._break_waits()

    def die(self) -> None:
        """The process is gone."""
        self.dead = True
        self._late.clear()
        self._end_sessions()

    def _break_waits(self) -> None:
        for _, scope in self._asks.values():
            scope.cancel()

    def end_waits(self) -> None:
        """The mailbox is being closed: what waits returns with nothing."""
        for ask, (session, _) in list(self._asks.items()):
            session.withdraw(ask)

    def _end_sessions(self) -> None:
        for session in (*self._sessions, *(session for session, _ in self._asks.values())):
            session.end()
        self._sessions.clear()

    # ---------------------------------------------------------------------------------------------------------- calls

    def pieces(self, most: int) -> tuple[bool, int]:
        """Whether what could be one call is ``most`` this time; and at which of them the connection breaks, if it does."""
        apart = self._rng.random() < 0.5
        breaks = apart and self.slow_call > 0 and self._rng.random() < self.slow_call
        return apart, self._rng.randrange(most) if breaks else most

    async def break_in(self, what: str, effect: Callable[[], Awaitable[Any]]) -> None:
        """A call in which the connection breaks: it takes effect, or does not, and nobody hears."""
        await self._request(what, None)
        if self._rng.random() < 0.5:
            with suppress(ReceiptHandleExpiredError):
                await effect()
            self._journal.add(self.lane, f"{what} took effect, answer lost")
        else:
            self._journal.add(self.lane, f"{what} failed", detail="the connection broke")
        raise MailboxConnectionError(f"{what}: the connection broke before the answer came")

    async def call(self, what: str, effect: Callable[[], Awaitable[V]]) -> V:
        """Have the store do ``effect``, as far as the link lets that happen."""
        if not self.dead and self._mode is None and not self.slow_call and not self.store.down:
            return await effect()
        late = await self._request(what, effect)
        answer = await effect()
        await self._answer(what, late)
        return answer

    async def _request(self, what: str, effect: Callable[[], Awaitable[Any]] | None) -> bool:
        """The way there; whether the way back is slow instead."""
        late = False
        if self.slow_call and self._rng.random() < self.slow_call:
            late = self._rng.random() < 0.5
            if not late:
                await self._be_slow(what)
        while True:
            if self.dead:
                await trio.sleep_forever()
            if self._mode == "hang":
                await self._hang(what, effect)
                continue
            if self._mode == "fail" or self.store.down:
                why = "the store is away" if self.store.down else "no route to the store"
                self._journal.add(self.lane, f"{what} failed", detail=why)
                await trio.lowlevel.checkpoint()
                raise MailboxConnectionError(f"{what}: {why}")
            return late

    async def _hang(self, what: str, effect: Callable[[], Awaitable[Any]] | None) -> None:
        try:
            await self._healed.wait()
        except trio.Cancelled:
            if effect is not None and self._mode == "hang" and self._rng.random() < 0.5:
                self._journal.add(self.lane, f"{what} given up, on its way")
                self._late.append(effect)
            raise

    async def _be_slow(self, what: str) -> None:
        seconds = self._rng.random() ** 2 * LONGEST_CALL
        self._slow_until = max(self._slow_until, trio.current_time() + seconds)
        self._journal.add(self.lane, f"{what} is slow", detail=f"{seconds:.3f} s")
        await trio.sleep(seconds)

    async def _answer(self, what: str, late: bool) -> None:
        """The way back."""
        if late:
            await self._be_slow(what)
        if self.dead:
            await trio.sleep_forever()
        while self._mode == "hang":
            await self._healed.wait()
        if self._mode == "lost":
            self._journal.add(self.lane, f"{what} took effect, answer lost")
            raise MailboxConnectionError(f"{what}: the connection broke before the answer came")

    # --------------------------------------------------------------------------------------------------------- claims

    async def claim(self, most: int, visibility: float, wait: float) -> list[Delivery]:
        """A claim, which may wait: then the store waits for the client."""
        late = await self._request("claim", None)
        claimed = await self.store.claim(self.lane, most, visibility, 0.0)
        if not claimed and wait > 0:
            claimed = await self._wait_for_claim(Ask(most, visibility, trio.current_time() + wait))
        if self._mode is None and not late and not self.dead:
            return claimed
        if not claimed:
            await self._answer("claim", late)
            return claimed
        # Something is leased to this process: whoever is cancelled now still takes it, so that it can be handed back.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_TIMEOUT) as scope:
            await self._answer("claim", late)
        if scope.cancelled_caught:
            raise MailboxConnectionError("claim: the answer did not come in time")
        return claimed

    async def _wait_for_claim(self, ask: Ask) -> list[Delivery]:
        session = self._sessions.pop() if self._sessions else self.store.session(self.lane)
        session.ask(ask)
        with trio.CancelScope() as broken:
            self._asks[ask] = session, broken
            try:
                await ask.answered.wait()
            except trio.Cancelled:
                reachable = not broken.cancel_called and self._mode is None and not self.dead
                if reachable and await self._withdrawn(session, ask):
                    return ask.answer or []
                raise
            finally:
                del self._asks[ask]
                if ask.answer is None:
                    session.retire()  # nobody listens, and the store cannot know that
                elif not session.ended:
                    self._sessions.append(session)
        if ask.answer is None:
            self._journal.add(self.lane, "claim failed", detail="the connection broke")
            raise MailboxConnectionError("claim: the connection broke")
        return ask.answer

    async def _withdrawn(self, session: Session, ask: Ask) -> bool:
        """Tell the store that nobody waits any more; whether it had claimed something by then."""
        session.withdraw(ask)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_TIMEOUT):
            await ask.answered.wait()
        return bool(ask.answer)


class LinkedMailbox(Mailbox[Any, Any]):
    """The mailbox of one simulated process: the port's own code on hooks that go through a :class:`Link` to the store."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        durable=True,
        cross_process=True,
        cancel=False,
        siblings=False,
        joined_acks=True,
        queue_age=True,
        async_backends=frozenset({"trio"}),
    )

    def __init__(self, name: str, link: Link, *, body: Any = None, reply: Any = None) -> None:
        super().__init__(name, body=body, reply=reply)
        self._link = link

    async def _open(self, scope: DaemonScope) -> None:
        """There is nothing to connect: each call goes as the link is at that moment."""

    async def _close(self) -> None:
        """As above."""

    def _wake_all(self) -> None:
        self._link.end_waits()

    async def _put(self, envelopes: list[Envelope]) -> list[str]:
        link = self._link
        return await link.call("send", partial(link.store.put, link.lane, envelopes))

    async def _claim(self, max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> list[Delivery]:
        return await self._link.claim(max_messages, visibility_timeout, wait_time_seconds)

    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        link = self._link
        what = type(settlement).__name__.lower()
        try:
            await link.call(what, partial(link.store.settle, link.lane, delivery, settlement))
        except BaseException:
            link.store.ledger.unanswered(delivery)
            raise

    async def _acknowledge_many(self, deliveries: list[Delivery]) -> dict[int, Exception]:
        """In one call, or in one each, all of them out at once: backends do either. The link can break amid those."""
        link = self._link
        apart, whole = link.pieces(len(deliveries))
        if apart:
            return await self._acknowledge_each(deliveries, whole)
        try:
            return await link.call("joint ack", partial(link.store.acknowledge, link.lane, deliveries))
        except BaseException:
            for delivery in deliveries:
                link.store.ledger.unanswered(delivery)
            raise

    async def _acknowledge_each(self, deliveries: list[Delivery], whole: int) -> dict[int, Exception]:
        link = self._link
        refused: dict[int, Exception] = {}

        async def acknowledge(number: int) -> None:
            delivery = deliveries[number]
            try:
                if number < whole:
                    await self._settle(delivery, ACK)
                else:
                    link.store.ledger.unanswered(delivery)
                    await link.break_in("joint ack", partial(link.store.settle, link.lane, delivery, ACK))
            except (MailboxConnectionError, ReceiptHandleExpiredError) as error:
                refused[number] = error

        async with trio.open_nursery() as nursery:
            for number in range(len(deliveries)):
                nursery.start_soon(acknowledge, number)
        return refused

    async def _extend(self, delivery: Delivery, timeout: float) -> None:
        link = self._link
        await link.call("renewal", partial(link.store.extend, link.lane, delivery, timeout))

    async def _save_checkpoint(self, delivery: Delivery, state: bytes) -> None:
        link = self._link
        await link.call("checkpoint", partial(link.store.save_checkpoint, link.lane, delivery, state))

    # The hooks of the mailbox that is the store are what the calls come down to there.
    async def _counts(self) -> Counts:
        return await self._link.call("counts", self._link.store.mailbox._counts)

    async def _purge(self) -> int:
        return await self._link.call("purge", self._link.store.purge)

    async def _dead_letters(self, limit: int, after: str | None) -> list[tuple[Delivery, Dead, float]]:
        hook = self._link.store.mailbox._dead_letters
        return await self._link.call("dead letters", partial(hook, limit, after))

    async def _replay(self, message_ids: list[str] | None) -> int:
        return await self._link.call("replay", partial(self._link.store.replay, message_ids))

    async def _discard_dead(self, message_ids: list[str] | None) -> int:
        return await self._link.call("discard", partial(self._link.store.discard_dead, message_ids))

    def _local_name(self, address: str) -> str | None:
        return self._link.store.mailbox._local_name(address)
