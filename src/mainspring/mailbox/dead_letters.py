"""The dead letters of a mailbox as a mailbox of its own, so that a loop can work on them with leases.

A dead letter stays among the dead letters of its mailbox until the work on it is done. A *ticket* says which worker holds it: a
message with its id in a sibling mailbox. Its ``dedup_key`` allows one ticket at a time. The lease of a ticket is the lease of
its dead letter: so two consumers, in whatever processes, do not handle one dead letter at once. A crash between two steps
leaves a ticket for a dead letter that is gone. That ticket is dropped when it is next received. Where the message has died
again by then, its next ticket is made as the last one ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio
from pydantic_core import from_json, to_json

from mainspring.errors import ConfigError, InvalidParameterError, MainspringError
from mainspring.mailbox.backend import Backend
from mainspring.mailbox.codec import Unserialized
from mainspring.mailbox.limits import CLOSE_TIMEOUT
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.message import Ack, ClaimedMessage, Counts, Dead, DeadLetter, Envelope, Nack
from mainspring.mailbox.ownership import open_in
from mainspring.runtime.deadline import without_deadline
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.mailbox.message import Settlement
    from mainspring.mailbox.records import Record, RecordWrite
    from mainspring.runtime.scope import DaemonScope

PAGE = 500
_ACK = Ack()
_RELEASE = Nack(charge=False, front=True)


@dataclass(frozen=True, slots=True)
class Replay(Ack):
    """The settlement that sends a dead letter to its mailbox again."""


class _ClaimedLetter(ClaimedMessage):
    """A dead letter that is worked on: a delivery of its ticket, with the letter as the body."""

    __slots__ = ("ticket",)
    ticket: ClaimedMessage


class DeadLetterView(Mailbox[DeadLetter, None]):
    """The dead letters of ``source``: received and leased like messages, until they are acknowledged (then they are purged).

    A nack makes one come again. ``dead_letter`` *parks* it: it stays among the dead letters of ``source`` and does not come
    again. A replay that ends in another death, or ``replay_dead_letters`` of the view, lets it come. New dead letters come at
    once where they died through the same mailbox object, else within ``look_every`` seconds.

    It takes no messages, and opens ``source`` where it is not open. :raises ConfigError: the store of ``source`` cannot do it.
    """

    def __init__(self, source: Mailbox[Any, Any], *, look_every: float) -> None:
        able = source.capabilities
        if not (able.siblings and able.dedup):
            raise ConfigError(
                f"mailbox {source.name!r}: {type(source).__name__} cannot lease dead letters (that takes Capabilities.siblings"
                " and dedup); use dead_letters(), replay_dead_letters() and purge_dead_letters()"
            )
        super().__init__(DeadLetterBackend(source, look_every), serialize=False)

    def bind(self, *, body: Any = None, reply: Any = None) -> None:
        """Ignore the types: the bodies are dead letters, whatever the handler says, and there are no replies."""

    @property
    def is_bound(self) -> bool:
        """True: the bodies are dead letters."""
        return True


class DeadLetterBackend(Backend):
    """What leases the dead letters of ``source``."""

    def __init__(self, source: Mailbox[Any, Any], look_every: float) -> None:
        super().__init__(f"{source.name} (dead letters)")
        self.capabilities = replace(
            source.capabilities,
            ordered=False,
            joined_acks=False,
            cancel=False,
            siblings=False,
            transactions=False,
            listing=False,
        )
        self.notifications.silence = source.backend.notifications.silence
        self.source = source
        self._look_every = look_every
        self._tickets = source.sibling(source.backend.tickets_name)
        self._after: tuple[str, float] | None = None

    def renewed(self) -> DeadLetterBackend:
        """Return another one, for a source that has another store by now."""
        return DeadLetterBackend(self.source, self._look_every)

    # ---------------------------------------------------------------------------------------------------- life cycle

    async def open(self, scope: DaemonScope) -> None:
        await open_in(scope, [self.source, self._tickets], f"the dead letters of {self.source.name!r}")
        self._feeder = Periodic(self._feed, first=anyio.current_time())
        self._stop_hearing = self.source.backend.notifications.dead.subscribe(self._on_death)
        self._after = None
        scope.start_soon(self._feeder.run, name=f"tickets of {self.name}")

    async def close(self) -> None:
        self._stop_hearing()

    def stop_claims(self) -> None:
        self._tickets.backend.stop_claims()

    def _on_death(self, message_id: str) -> None:
        if self._after is not None and self._after[0] == message_id:
            self._after = None  # dead once more, and so behind all others, maybe at the very same instant
        self._feeder.wake_by(anyio.current_time())

    async def _feed(self, overslept: float) -> float:
        """Make a ticket for each dead letter that has none."""
        try:
            if self._after is None:
                await self._forget_parked()
            elif not await self._is_dead(*self._after):
                self._after = None  # it is done, and maybe dead once more, behind all others
            while await self._feed_page():
                pass
        except (MainspringError, OSError):  # it is tried again
            self._after = None
        return anyio.current_time() + self._look_every

    async def _feed_page(self) -> bool:
        """Do so for some; whether there may be more. The parked have a ticket that is dead itself."""
        after = None if self._after is None else self._after[0]
        page = await self.source.backend.dead_letters(PAGE, after)
        if not page:
            return False
        await self._put_tickets(page)
        self._after = (page[-1][0].message_id, page[-1][2])
        return len(page) == PAGE

    async def _put_tickets(self, letters: list[tuple[ClaimedMessage, Dead, float]]) -> None:
        """Make a ticket for each that has none and is not parked. One whose message has a ticket of an earlier death has to
        wait for the end of that."""
        ids = [delivery.message_id for delivery, _, _ in letters]
        parked = {
            delivery.message_id: _ticket_of(delivery)
            for delivery, _, _ in await self._tickets.backend.find_dead_letters(_named(ids))
        }
        wanted, stale = [], []
        for delivery, _, died_at in letters:
            ticket = _ticket(delivery.message_id, died_at)
            if ticket.message_id in parked:
                if parked[ticket.message_id] == (delivery.message_id, died_at):
                    continue
                stale.append(ticket.message_id)  # it was replayed meanwhile, and has died again
            wanted.append(ticket)
        if stale:
            await self._tickets.backend.purge_dead_letters(stale)
        if wanted:
            await self._tickets.backend.send(wanted)

    async def _forget_parked(self) -> None:
        """Drop the tickets of parked dead letters that are gone."""
        after = None
        while page := await self._tickets.backend.dead_letters(PAGE, after):
            tickets = [delivery.message_id for delivery, _, _ in page]
            ids = [ticket[0] for delivery, _, _ in page if (ticket := _ticket_of(delivery)) is not None]
            found = await self.source.backend.find_dead_letters(ids)
            living = set(_named([delivery.message_id for delivery, _, _ in found]))
            gone = [ticket for ticket in tickets if ticket not in living]
            if gone:
                await self._tickets.backend.purge_dead_letters(gone)
            kept = [ticket for ticket in tickets if ticket in living]
            if len(page) < PAGE or not kept:
                return
            after = kept[-1]

    # ----------------------------------------------------------------------------------------------------- messages

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        raise InvalidParameterError(
            f"{self.name}: it takes no messages; what dies in mailbox {self.source.name!r} comes"
        )

    async def claim(
        self, max_messages: int, visibility_timeout: float, wait_time_seconds: float
    ) -> list[ClaimedMessage]:
        deadline = anyio.current_time() + wait_time_seconds
        while True:
            wait = max(0.0, deadline - anyio.current_time())
            tickets = await self._tickets.backend.claim(max_messages, visibility_timeout, wait)
            if not tickets:
                return []
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT):
                held = await self._held(tickets)
                if held:
                    return held

    async def _held(self, tickets: list[ClaimedMessage]) -> list[ClaimedMessage]:
        """Return the dead letters of claimed tickets. Drop a ticket whose dead letter is gone."""
        known = {ticket.receipt_handle: _ticket_of(ticket) for ticket in tickets}
        try:
            ids = [message_id for message_id, _ in filter(None, known.values())]
            found = await self.source.backend.find_dead_letters(ids)
        except BaseException:
            for ticket in reversed(tickets):
                await self._tickets.backend.settle(ticket, _RELEASE)
            raise
        letters = {(delivery.message_id, at): (delivery, dead, at) for delivery, dead, at in found}
        held: list[ClaimedMessage] = []
        for ticket in tickets:
            wanted = known[ticket.receipt_handle] or ("", 0.0)
            letter = letters.get(wanted)
            if letter is None:
                await self._tickets.backend.settle(ticket, _ACK)
                await self._follow(wanted[0])
            else:
                body = self.source.as_dead_letter(*letter)
                held.append(_hold(ticket, letter[0], body))
        return held

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        ticket = _ticket_in(delivery)
        if isinstance(settlement, Nack):
            await self._tickets.backend.settle(ticket, settlement)
            return
        # Refused where the lease is lost; the letter goes first, as a ticket without one is dropped and not the other
        # way round.
        await self._tickets.backend.extend(ticket, 0.0)
        is_dead = await self._is_dead(*(_ticket_of(ticket) or ("", 0.0)))
        ids = [delivery.message_id]
        if isinstance(settlement, Dead) and is_dead:
            await self._tickets.backend.settle(ticket, replace(settlement, reply=None))
            return
        if is_dead and isinstance(settlement, Replay):
            await self.source.backend.replay_dead_letters(ids)
        elif is_dead:
            await self.source.backend.purge_dead_letters(ids)
        await self._tickets.backend.settle(ticket, _ACK)
        await self._follow(delivery.message_id)

    async def _follow(self, message_id: str) -> None:
        """Make the next ticket of a message whose last one has ended, if the message has died again by now."""
        try:
            await self._put_tickets(await self.source.backend.find_dead_letters([message_id]))
        except (MainspringError, OSError):  # what was settled is settled: all are looked at again
            self._after = None

    async def _is_dead(self, message_id: str, died_at: float) -> bool:
        """True if that dead letter is still there: not replayed or purged meanwhile, and maybe dead again."""
        found = await self.source.backend.find_dead_letters([message_id])
        return any(at == died_at for _, _, at in found)

    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        await self._tickets.backend.extend(_ticket_in(delivery), timeout)

    async def checkpoint(self, delivery: ClaimedMessage, state: bytes) -> None:
        await self._tickets.backend.checkpoint(_ticket_in(delivery), state)

    async def write_record(self, write: RecordWrite, envelopes: Sequence[Envelope] = ()) -> int | None:
        return await self.source.backend.write_record(write, envelopes)

    async def find_records(self, kind: str, keys: list[str]) -> list[Record]:
        return await self.source.backend.find_records(kind, keys)

    async def list_records(self, kind: str, limit: int, after: str | None) -> list[Record]:
        return await self.source.backend.list_records(kind, limit, after)

    async def counts(self) -> Counts:
        """Return the counts of dead letters: those not received yet are pending, and the parked ones are ``dead``."""
        tickets, source = await self._tickets.counts(), await self.source.counts()
        pending = max(0, source.dead - tickets.dead - tickets.in_flight - tickets.delayed)
        age = tickets.queue_age if tickets.pending else None if pending else 0.0
        return Counts(tickets.delayed, pending, tickets.in_flight, tickets.settled, tickets.dead, queue_age=age)

    async def purge(self) -> int:
        """Forget all dead letters, and who works on which."""
        await self._tickets.backend.purge()
        await self._tickets.backend.purge_dead_letters(None)
        return await self.source.backend.purge_dead_letters(None)

    async def dead_letters(self, limit: int, after: str | None) -> list[tuple[ClaimedMessage, Dead, float]]:
        return await self._tickets.backend.dead_letters(limit, after)

    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        return await self._tickets.backend.replay_dead_letters(message_ids)

    async def purge_dead_letters(self, message_ids: list[str] | None) -> int:
        return await self._tickets.backend.purge_dead_letters(message_ids)


def _ticket(message_id: str, died_at: float) -> Envelope:
    """Return the message that stands for the dead letter of an id that died at that instant."""
    (name,) = _named([message_id])
    return Envelope(name, to_json([message_id, died_at]), dedup_key=name)


def _named(message_ids: list[str]) -> list[str]:
    """Return the ids of the tickets for those dead letters: a store may want ids to be its own, whatever the mailbox."""
    return [f"{message_id}~" for message_id in message_ids]


def _ticket_of(delivery: ClaimedMessage) -> tuple[str, float] | None:
    """Return which dead letter a ticket is for, or None if it is no ticket."""
    try:
        message_id, died_at = from_json(delivery.body)
        return str(message_id), float(died_at)
    except (ValueError, TypeError):
        return None


def _ticket_in(delivery: ClaimedMessage) -> ClaimedMessage:
    if not isinstance(delivery, _ClaimedLetter):
        raise InvalidParameterError(f"message {delivery.message_id}: it was not received from a view of dead letters")
    return delivery.ticket


def _hold(ticket: ClaimedMessage, letter: ClaimedMessage, body: DeadLetter) -> ClaimedMessage:
    held = _ClaimedLetter(
        letter.message_id,
        Unserialized(body, None),
        ticket.receipt_handle,
        ticket.delivery_count,
        ticket.attempt,
        ticket.enqueued_at,
        ticket.first_received_at,
        headers=without_deadline(letter.headers),  # which was the message's; looking after it has none
        checkpoint=ticket.checkpoint,
        leased_at=ticket.leased_at,
        history=ticket.history,
    )
    held.ticket = ticket
    return held
