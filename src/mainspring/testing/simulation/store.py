"""The store of a run, and how a simulated process reaches it.

The store is one in-memory mailbox. Its calls take effect at once; delays and failures happen in ``SimulatedBackend``. A claim
that waits is served by a ``ClaimSession``, a task of the store, so that a frozen or dead client cannot block other clients.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from mainspring.errors import MailboxConnectionError, ReceiptHandleExpiredError
from mainspring.mailbox.backend import Backend, Capabilities
from mainspring.mailbox.limits import CLOSE_TIMEOUT
from mainspring.mailbox.message import ACK, ClaimedMessage
from mainspring.testing.simulation.workload import fits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from random import Random

    from mainspring.mailbox.codec import Codec
    from mainspring.mailbox.limiters import LimitChange, LimitState
    from mainspring.mailbox.message import Counts, Dead, Envelope, Settlement, UnfinishedMessage
    from mainspring.mailbox.records import Record, RecordWrite
    from mainspring.runtime.scope import DaemonScope
    from mainspring.testing.simulation.event_log import EventLog
    from mainspring.testing.simulation.ledger import Ledger


_VALUES = attrgetter(*(part.name for part in fields(ClaimedMessage)))


class SimulatedStore:
    """The store that all processes of a run share. It reports each change to the ledger."""

    def __init__(self, backend: Backend, codec: Codec, ledger: Ledger, log: EventLog, nursery: trio.Nursery) -> None:
        self.backend = backend
        self.ledger = ledger
        self.log = log
        self.down = False
        """True during an outage. Accepted messages are kept."""
        self._nursery = nursery
        self._context = copy_context()
        self._codec = codec

    async def put(self, lane: str, envelopes: list[Envelope]) -> list[str]:
        """Store messages."""
        ids = await self.backend.send(envelopes)
        broken = len(envelopes) == 1 and not fits(self._codec, envelopes[0].body)
        self.ledger.accepted(lane, ids, [envelope.delay for envelope in envelopes], undecodable=broken)
        return ids

    async def claim(self, lane: str, most: int, visibility: float, wait: float) -> list[ClaimedMessage]:
        """Lease messages. Return copies, because a client of a real store never shares objects with it."""
        deliveries = await self.backend.claim(most, visibility, wait)
        self.ledger.claimed(lane, deliveries, visibility)
        return [_copy(delivery) for delivery in deliveries]

    async def settle(self, lane: str, delivery: ClaimedMessage, settlement: Settlement) -> None:
        """Settle a delivery."""
        try:
            await self.backend.settle(delivery, settlement)
        except ReceiptHandleExpiredError:
            self.ledger.refused(lane, delivery, type(settlement).__name__.lower())
            raise
        self.ledger.settled(lane, delivery, settlement)

    async def acknowledge(self, lane: str, deliveries: list[ClaimedMessage]) -> dict[int, Exception]:
        """Acknowledge several deliveries in one call. Return the errors of refused deliveries, by index."""
        refused = await self.backend.acknowledge_many(deliveries)
        for number, delivery in enumerate(deliveries):
            if number in refused:
                self.ledger.refused(lane, delivery, "ack")
            else:
                self.ledger.settled(lane, delivery, ACK)
        return refused

    async def extend(self, lane: str, delivery: ClaimedMessage, timeout: float) -> None:
        """Extend a lease."""
        try:
            await self.backend.extend(delivery, timeout)
        except ReceiptHandleExpiredError:
            self.ledger.refused(lane, delivery, "renewal")
            raise
        self.ledger.extended(lane, delivery, timeout)

    async def save_checkpoint(self, lane: str, delivery: ClaimedMessage, state: bytes) -> None:
        """Save a checkpoint."""
        try:
            await self.backend.checkpoint(delivery, state)
        except ReceiptHandleExpiredError:
            self.ledger.refused(lane, delivery, "checkpoint")
            raise

    async def write_record(self, lane: str, write: RecordWrite, envelopes: Sequence[Envelope]) -> int | None:
        """Change a record, and store messages with it."""
        version = await self.backend.write_record(write, envelopes)
        if version is not None and envelopes:
            found = {each.message.message_id for each in await self.backend.find([e.message_id for e in envelopes])}
            stored = [
                envelope for envelope in envelopes if envelope.message_id in found
            ]  # without messages that a key kept out
            self.ledger.accepted(lane, [each.message_id for each in stored], [each.delay for each in stored])
        return version

    async def purge(self) -> int:
        """Purge all unfinished messages."""
        dropped = await self.backend.purge()
        self.ledger.purged()
        return dropped

    async def replay(self, message_ids: list[str] | None) -> int:
        """Replay dead letters."""
        return await self._end_deaths(self.backend.replay_dead_letters, message_ids, self.ledger.replayed)

    async def discard_dead(self, message_ids: list[str] | None) -> int:
        """Purge dead letters."""
        return await self._end_deaths(self.backend.purge_dead_letters, message_ids, self.ledger.discarded)

    async def _end_deaths(
        self,
        operation: Callable[[list[str] | None], Awaitable[int]],
        message_ids: list[str] | None,
        report: Callable[[set[str]], None],
    ) -> int:
        before = await self._dead()
        number = await operation(message_ids)
        report(before - await self._dead())
        return number

    async def _dead(self) -> set[str]:
        return {delivery.message_id for delivery, _, _ in await self.backend.dead_letters(1 << 30, None)}

    async def check(self) -> None:
        """Have the ledger compare its counts with those of the store."""
        self.ledger.check(await self.backend.counts())

    # ------------------------------------------------------------------------------------------------------ sessions

    def open_session(self, lane: str) -> ClaimSession:
        """Start a session for one client."""
        session = ClaimSession(self, lane)
        self._start(session.run, f"session of {lane}")
        return session

    def run_later(self, call: Any) -> None:
        """Make a call whose request was in transit when its client gave up. The answer is discarded."""

        async def arrive() -> None:
            try:
                await call()
            except (ReceiptHandleExpiredError, MailboxConnectionError):
                return

        self._start(arrive, "a request that comes late")

    def _start(self, fn: Callable[[], Awaitable[None]], name: str) -> None:
        """Start a task in the store's own context, so that it does not freeze with the process it serves."""
        self._context.run(partial(self._nursery.start_soon, fn, name=name))


class WaitingClaim:
    """A client's claim that waits for messages. ``answer`` is None until the store has answered, also after a withdrawal."""

    __slots__ = ("answer", "answered", "most", "until", "visibility", "withdrawn")

    def __init__(self, most: int, visibility: float, until: float) -> None:
        self.most = most
        self.visibility = visibility
        self.until = until
        self.answer: list[ClaimedMessage] | None = None
        self.answered = trio.Event()
        self.withdrawn = False


class ClaimSession:
    """The store's side of one client connection: waits for messages on behalf of the client.

    A frozen or dead client therefore neither blocks other clients nor takes their wake-ups. A message that is claimed for a
    client that no longer listens stays leased until its lease ends.
    """

    def __init__(self, store: SimulatedStore, lane: str) -> None:
        self._store = store
        self._lane = lane
        self._claim_waited_for: WaitingClaim | None = None
        self._woken = trio.Event()
        self._scope: trio.CancelScope | None = None
        self.ended = False

    def wait_for(self, claim: WaitingClaim) -> None:
        """Start waiting on behalf of ``claim``."""
        self._claim_waited_for = claim
        self._woken.set()

    def withdraw(self, claim: WaitingClaim) -> None:
        """Stop waiting. The answer is what had been claimed by then, usually nothing."""
        claim.withdrawn = True
        if self._claim_waited_for is claim and self._scope is not None:
            self._scope.cancel()
        elif claim.answer is None:
            self._answer(claim, [])

    def retire(self) -> None:
        """End the session after its present claim."""
        self.ended = True
        self._woken.set()

    def end(self) -> None:
        """End the session at once: the store has noticed that the connection is lost."""
        self.ended = True
        self._claim_waited_for = None
        if self._scope is not None:
            self._scope.cancel()
        self._woken.set()

    async def run(self) -> None:
        """Serve claims until the session ends."""
        while True:
            claim = self._claim_waited_for
            if claim is None or claim.answer is not None:
                if self.ended:
                    return
                self._woken = trio.Event()
                await self._woken.wait()
                continue
            claimed: list[ClaimedMessage] = []
            if not claim.withdrawn:
                with trio.CancelScope() as self._scope:
                    wait = max(0.0, claim.until - trio.current_time())
                    claimed = await self._store.claim(self._lane, claim.most, claim.visibility, wait)
                self._scope = None
            if self.ended:
                self._store.ledger.unheard(claimed)
            self._answer(claim, claimed)

    def _answer(self, claim: WaitingClaim, claimed: list[ClaimedMessage]) -> None:
        claim.answer = claimed
        claim.answered.set()


def _copy(delivery: ClaimedMessage) -> ClaimedMessage:
    return ClaimedMessage(*_VALUES(delivery))


V = TypeVar("V")

LONGEST_CALL = 5.0
"""Longest delay of a slow call, in seconds."""


class SimulatedBackend(Backend):
    """The backend of one process's mailbox: the process's connection to the store, with its faults.

    A partition has a mode. ``"hang"``: calls wait until it is over, and a request whose caller gives up may still arrive then.
    ``"fail"``: calls fail. ``"lost"``: calls take effect and their answers are lost. A dead connection never answers.
    """

    capabilities = Capabilities(
        durable=True,
        cross_process=True,
        cancel=False,
        siblings=False,
        joined_acks=True,
        records=True,
        lookup=True,
        limits=True,
        pause=True,
        concurrency=True,
        queue_age=True,
        async_backends=frozenset({"trio"}),
    )

    def __init__(self, name: str, store: SimulatedStore, lane: str, rng: Random, slow_call: float = 0.0) -> None:
        super().__init__(name)
        self.store = store
        self.lane = lane
        self.dead = False
        self.slow_call = slow_call
        self._mode: str | None = None
        self._slow_until = 0.0
        self._healed = trio.Event()
        self._rng = rng
        self._late: list[Callable[[], Awaitable[Any]]] = []
        self._sessions: list[ClaimSession] = []  # the idle ones
        self._waiting: dict[WaitingClaim, tuple[ClaimSession, trio.CancelScope]] = {}

    async def open(self, scope: DaemonScope) -> None:
        """Do nothing: a simulated connection needs no set-up."""

    async def close(self) -> None:
        """Do nothing."""

    # --------------------------------------------------------------------------------------------------------- faults

    @property
    def is_cut(self) -> bool:
        """True during a partition."""
        return self._mode is not None

    @property
    def is_slow(self) -> bool:
        """True if calls may take long now, or did so until a moment ago."""
        return self._mode is not None or self.store.down or trio.current_time() < self._slow_until

    def cut(self, mode: str) -> None:
        """Start a partition."""
        self._mode = mode
        self._healed = trio.Event()
        if mode != "hang":
            self._break_waits()

    def heal(self) -> None:
        """End the partition. Requests in transit arrive now."""
        self._mode = None
        self._slow_until = trio.current_time() + LONGEST_CALL
        self._healed.set()
        self.store.ledger.reachable(self.lane)
        late, self._late = self._late, []
        for call in late:
            self.store.run_later(call)

    def reset(self) -> None:
        """End all waits and sessions, as a store that goes down does."""
        self._end_sessions()
        self._break_waits()

    def die(self) -> None:
        """Never answer again: the process is dead."""
        self.dead = True
        self._late.clear()
        self._end_sessions()

    def _break_waits(self) -> None:
        for _, scope in self._waiting.values():
            scope.cancel()

    def stop_claims(self) -> None:
        for claim, (session, _) in list(self._waiting.items()):
            session.withdraw(claim)

    def _end_sessions(self) -> None:
        for session in (*self._sessions, *(session for session, _ in self._waiting.values())):
            session.end()
        self._sessions.clear()

    # ---------------------------------------------------------------------------------------------------------- calls

    async def _call(self, what: str, function: Callable[..., Awaitable[V]], *args: Any) -> V:
        """Call the store, subject to the faults of this connection."""
        if not self.dead and self._mode is None and not self.slow_call and not self.store.down:
            return await function(*args)
        effect = partial(function, *args)
        late = await self._request(what, effect)
        answer = await effect()
        await self._answer(what, late)
        return answer

    @contextmanager
    def _settling(self, *deliveries: ClaimedMessage) -> Iterator[None]:
        """Report to the ledger if the call that settles ``deliveries`` gets no answer."""
        try:
            yield
        except BaseException:
            for delivery in deliveries:
                self.store.ledger.unanswered(delivery)
            raise

    async def _request(self, what: str, effect: Callable[[], Awaitable[Any]] | None) -> bool:
        """Transmit a request. Return True if the answer, not the request, is slow."""
        late = False
        if self.slow_call and self._rng.random() < self.slow_call:
            late = self._rng.random() < 0.5
            if not late:
                await self._delay(what)
        while True:
            if self.dead:
                await trio.sleep_forever()
            if self._mode == "hang":
                await self._hang(what, effect)
                continue
            if self._mode == "fail" or self.store.down:
                why = "the store is away" if self.store.down else "no route to the store"
                self.store.log.add(self.lane, f"{what} failed", detail=why)
                await trio.lowlevel.checkpoint()
                raise MailboxConnectionError(f"{what}: {why}")
            return late

    async def _hang(self, what: str, effect: Callable[[], Awaitable[Any]] | None) -> None:
        try:
            await self._healed.wait()
        except trio.Cancelled:
            if effect is not None and self._mode == "hang" and self._rng.random() < 0.5:
                self.store.log.add(self.lane, f"{what} given up, on its way")
                self._late.append(effect)
            raise

    async def _delay(self, what: str) -> None:
        seconds = self._rng.random() ** 2 * LONGEST_CALL
        self._slow_until = max(self._slow_until, trio.current_time() + seconds)
        self.store.log.add(self.lane, f"{what} is slow", detail=f"{seconds:.3f} s")
        await trio.sleep(seconds)

    async def _answer(self, what: str, late: bool) -> None:
        """Transmit an answer."""
        if late:
            await self._delay(what)
        if self.dead:
            await trio.sleep_forever()
        while self._mode == "hang":
            await self._healed.wait()
        if self._mode == "lost":
            self.store.log.add(self.lane, f"{what} took effect, answer lost")
            raise MailboxConnectionError(f"{what}: the connection broke before the answer came")

    # --------------------------------------------------------------------------------------------------------- claims

    async def claim(
        self, max_messages: int, visibility_timeout: float, wait_time_seconds: float
    ) -> list[ClaimedMessage]:
        late = await self._request("claim", None)
        claimed = await self.store.claim(self.lane, max_messages, visibility_timeout, 0.0)
        if not claimed and wait_time_seconds > 0:
            until = trio.current_time() + wait_time_seconds
            claimed = await self._wait_for_claim(WaitingClaim(max_messages, visibility_timeout, until))
        if self._mode is None and not late and not self.dead:
            return claimed
        if not claimed:
            await self._answer("claim", late)
            return claimed
        # A message is leased to this process: a caller that is cancelled now must still get it, to release it.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_TIMEOUT) as scope:
            await self._answer("claim", late)
        if scope.cancelled_caught:
            self.store.ledger.unheard(claimed)
            raise MailboxConnectionError("claim: the answer did not come in time")
        return claimed

    async def _wait_for_claim(self, claim: WaitingClaim) -> list[ClaimedMessage]:
        session = self._sessions.pop() if self._sessions else self.store.open_session(self.lane)
        session.wait_for(claim)
        with trio.CancelScope() as broken:
            self._waiting[claim] = session, broken
            try:
                await claim.answered.wait()
            except trio.Cancelled:
                reachable = not broken.cancel_called and self._mode is None and not self.dead
                if reachable and await self._withdrawn(session, claim):
                    return claim.answer or []
                raise
            finally:
                del self._waiting[claim]
                if claim.answer is None:
                    session.retire()  # the store cannot know that its client has stopped listening
                elif not session.ended:
                    self._sessions.append(session)
        if claim.answer is None:
            self.store.log.add(self.lane, "claim failed", detail="the connection broke")
            raise MailboxConnectionError("claim: the connection broke")
        return claim.answer

    async def _withdrawn(self, session: ClaimSession, claim: WaitingClaim) -> bool:
        """Withdraw a claim. Return True if the store had already claimed messages for it."""
        session.withdraw(claim)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_TIMEOUT):
            await claim.answered.wait()
        return bool(claim.answer)

    # ------------------------------------------------------------------------------------------------ other operations

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        return await self._call("send", self.store.put, self.lane, envelopes)

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        with self._settling(delivery):
            what = type(settlement).__name__.lower()
            await self._call(what, self.store.settle, self.lane, delivery, settlement)

    async def acknowledge_many(self, deliveries: list[ClaimedMessage]) -> dict[int, Exception]:
        """Acknowledge in one call or in concurrent single calls: backends do either. The connection may break between those."""
        if self._rng.random() < 0.5:
            breaks = self.slow_call > 0 and self._rng.random() < self.slow_call
            return await self._acknowledge_each(
                deliveries, self._rng.randrange(len(deliveries)) if breaks else len(deliveries)
            )
        with self._settling(*deliveries):
            return await self._call("joint ack", self.store.acknowledge, self.lane, deliveries)

    async def _acknowledge_each(self, deliveries: list[ClaimedMessage], whole: int) -> dict[int, Exception]:
        """Acknowledge each delivery in a call of its own. The connection breaks during all calls but the first ``whole``."""
        refused: dict[int, Exception] = {}

        async def acknowledge(number: int, delivery: ClaimedMessage) -> None:
            try:
                if number < whole:
                    await self.settle(delivery, ACK)
                else:
                    await self._break_ack(delivery)
            except (MailboxConnectionError, ReceiptHandleExpiredError) as error:
                refused[number] = error

        async with trio.open_nursery() as nursery:
            for number, delivery in enumerate(deliveries):
                nursery.start_soon(acknowledge, number, delivery)
        return refused

    async def _break_ack(self, delivery: ClaimedMessage) -> None:
        """Break the connection during an acknowledgement, which may or may not have taken effect, and raise."""
        self.store.ledger.unanswered(delivery)
        await self._request("joint ack", None)
        if self._rng.random() < 0.5:
            with suppress(ReceiptHandleExpiredError):
                await self.store.settle(self.lane, delivery, ACK)
            self.store.log.add(self.lane, "joint ack took effect, answer lost")
        else:
            self.store.log.add(self.lane, "joint ack failed", detail="the connection broke")
        raise MailboxConnectionError("joint ack: the connection broke before the answer came")

    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        await self._call("renewal", self.store.extend, self.lane, delivery, timeout)

    async def checkpoint(self, delivery: ClaimedMessage, state: bytes) -> None:
        await self._call("checkpoint", self.store.save_checkpoint, self.lane, delivery, state)

    # Read-only calls need no entry in the ledger, so they call the store's mailbox directly.
    async def counts(self) -> Counts:
        return await self._call("counts", self.store.backend.counts)

    async def dead_letters(self, limit: int, after: str | None) -> list[tuple[ClaimedMessage, Dead, float]]:
        return await self._call("dead letters", self.store.backend.dead_letters, limit, after)

    async def write_record(self, write: RecordWrite, envelopes: Sequence[Envelope] = ()) -> int | None:
        return await self._call("record", self.store.write_record, self.lane, write, envelopes)

    async def find_records(self, kind: str, keys: list[str]) -> list[Record]:
        return await self._call("records", self.store.backend.find_records, kind, keys)

    async def list_records(self, kind: str, limit: int, after: str | None) -> list[Record]:
        return await self._call("records", self.store.backend.list_records, kind, limit, after)

    async def change_limits(self, changes: list[LimitChange]) -> None:
        await self._call("limits", self.store.backend.change_limits, changes)

    async def set_task(self, delivery: ClaimedMessage, task: str) -> bool:
        return await self._call("limits", self.store.backend.set_task, delivery, task)

    async def limits(self) -> list[LimitState]:
        return await self._call("limits", self.store.backend.limits)

    async def find(self, message_ids: list[str]) -> list[UnfinishedMessage]:
        return await self._call("find", self.store.backend.find, message_ids)

    async def purge(self) -> int:
        return await self._call("purge", self.store.purge)

    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        return await self._call("replay", self.store.replay, message_ids)

    async def purge_dead_letters(self, message_ids: list[str] | None) -> int:
        return await self._call("discard", self.store.discard_dead, message_ids)

    def local_name(self, address: str) -> str | None:
        return self.store.backend.local_name(address)
