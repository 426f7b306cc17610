"""``Link`` and ``LinkedMailbox``: how a simulated process reaches the store, and how that fails."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import trio

from mainspring.errors import MailboxConnectionError, ReceiptHandleExpiredError
from mainspring.mailbox.limits import CLOSE_TIMEOUT
from mainspring.mailbox.mailbox import Capabilities, Mailbox
from mainspring.mailbox.message import ACK
from mainspring.testing.simulation.store import Ask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

    from mainspring.mailbox.message import Counts, Dead, Delivery, Envelope, Settlement
    from mainspring.runtime.scope import DaemonScope
    from mainspring.testing.simulation.journal import Journal
    from mainspring.testing.simulation.store import Session, Store

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
        return await self._link.call("counts", self._link.store.mailbox._counts)  # noqa: SLF001

    async def _purge(self) -> int:
        return await self._link.call("purge", self._link.store.purge)

    async def _dead_letters(self, limit: int, after: str | None) -> list[tuple[Delivery, Dead, float]]:
        hook = self._link.store.mailbox._dead_letters  # noqa: SLF001
        return await self._link.call("dead letters", partial(hook, limit, after))

    async def _replay(self, message_ids: list[str] | None) -> int:
        return await self._link.call("replay", partial(self._link.store.replay, message_ids))

    async def _discard_dead(self, message_ids: list[str] | None) -> int:
        return await self._link.call("discard", partial(self._link.store.discard_dead, message_ids))

    def _local_name(self, address: str) -> str | None:
        return self._link.store.mailbox._local_name(address)  # noqa: SLF001
