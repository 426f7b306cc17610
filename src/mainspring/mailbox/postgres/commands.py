"""Turn commands into calls of the server's functions, and their rows into results. Nothing here does I/O but :func:`execute`.

Commands of one kind become one call, or several where their bytes are too many for one. The callers of one batch do not know
of each other, so any order of the kinds is right. Settlements come first, then sends, then claims: a claim finds what its
own batch has released and sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from psycopg import AsyncRawCursor
from psycopg.rows import tuple_row

from mainspring.errors import MailboxConnectionError
from mainspring.mailbox import batched
from mainspring.mailbox.batched import AcknowledgeMany
from mainspring.mailbox.codec import headers_of
from mainspring.mailbox.job_commands import SetTask, WriteRecord
from mainspring.mailbox.limits import full, lease_over, size_of
from mainspring.mailbox.message import ClaimedMessage, Counts
from mainspring.mailbox.postgres.values import (
    Blobs,
    Floats,
    Integers,
    Longs,
    Shorts,
    Texts,
    array,
    has_options,
    headers_text,
    leases,
    options_values,
    portions,
    record_values,
    register,
    results_values,
    settle_values,
    size_of_settlement,
    stored_key,
    stored_name,
    task_of,
    task_values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg import AsyncConnection

    from mainspring.mailbox.batched import Command
    from mainspring.mailbox.message import Ack, Dead, Envelope


@dataclass(eq=False, repr=False, slots=True)
class PostgresSend(batched.Send):
    """``blocked``: nothing was stored, because an open transaction has sent one of the keys."""

    blocked: bool = field(default=False, init=False)


@dataclass(eq=False, repr=False, slots=True)
class Settle(batched.OfDelivery):
    """The message is done, with a reply, or dead. ``target`` is the number of the mailbox of its reply."""

    settlement: Ack | Dead
    target: int | None


@dataclass(eq=False, repr=False, slots=True)
class SettleWithResult(Settle):
    """The message is done, maybe with a reply, and its result is kept."""

    joins: ClassVar[bool] = True


_PLACE = itemgetter(11, 12)

RESET_AFTER = 1.0
"""Seconds after which a claim starts from the very front again. A message that a long transaction or another process puts
behind the floors waits at most this long."""
SWEEP = 1_000
"""Messages that are due and that the server moves in one claim, at most."""


class Watermark:
    """The floors of one mailbox: for each rank the place before which this process has claimed everything.

    A message can come to lie behind a floor: another process released it, or the transaction that sent it took longer than
    those after it. Claims that find too little look there anyway, and every :data:`RESET_AFTER` seconds one does so first.
    """

    __slots__ = ("_floors", "_full_at", "_swept_at")

    def __init__(self) -> None:
        self._floors: dict[int, int] = {}
        self._swept_at: float | None = None
        self._full_at = float("-inf")

    def start(self, now: float) -> tuple[list[int], list[int], float | None]:
        """Return, for a claim at ``now`` (anyio's clock), ranks, their floors, and the server's instant before
        which nothing is due."""
        if now - self._full_at >= RESET_AFTER:
            self._full_at = now
            self._floors.clear()
            return [], [], None
        return list(self._floors), list(self._floors.values()), self._swept_at

    def swept(self, at: float, moved: int) -> None:
        """Note that all due by ``at`` (the server's clock) has been done, except what was committed late.

        Where as many were ``moved`` as one sweep may, the next one goes on just there: it shall not read again what this one
        has moved.
        """
        self._swept_at = at if moved >= SWEEP else at - RESET_AFTER

    def claimed(self, rank: int, pos: int) -> None:
        """Note that a claim got to that place."""
        if pos > self._floors.get(rank, 0):
            self._floors[rank] = pos

    def returned(self, rank: int, pos: int) -> None:
        """Note that a message is at that place again."""
        if pos < self._floors.get(rank, 0):
            self._floors[rank] = pos


LOCK_WAIT = 0.01
"""Seconds that a send waits for an open transaction that has sent its key. Then the others of its batch go without it."""


class Statement(NamedTuple):
    """One statement of a batch: its text, its parameters, and the function that takes its rows, if it has one."""

    text: bytes
    values: tuple[Any, ...]
    finish: Callable[[list[tuple[Any, ...]]], None] | None = None

    def take(self, rows: list[tuple[Any, ...]]) -> None:
        """Give the rows to ``finish``."""
        if self.finish is not None:
            self.finish(rows)


@lru_cache(maxsize=1_000)
def call_text(schema: str, function: str, arguments: int) -> bytes:
    """Return the text that calls a function of the schema."""
    marks = ", ".join(f"${number}" for number in range(1, arguments + 1))
    return f"SELECT * FROM {schema}.{function}({marks})".encode()  # noqa: S608 - a checked name


@dataclass(eq=False, repr=False, slots=True)
class StatementBatch:
    """The statements for one batch of commands of one mailbox, and what their rows said beyond the results of the commands."""

    schema: str
    box: int
    """The mailbox's number."""
    watermark: Watermark
    now: float
    """When it began, on anyio's clock."""
    lock_wait: float = LOCK_WAIT
    """Seconds that a send may wait for another transaction that has sent its key. Then the whole batch fails."""
    apart: bool = False
    """True if then that send alone is blocked."""
    patience: float | None = None
    """The same seconds in a sender's own transaction, which goes on if the send is blocked."""
    statements: list[Statement] = field(default_factory=list)
    became_pending: Counter[int] = field(default_factory=Counter)
    """How many messages became pending, by mailbox."""
    due_in: float | None = None
    """Seconds until something is due, as far as the batch has learnt."""
    newly_listening: bool = False
    """True if a claim waits that no sender had to notify before."""
    results: list[str] = field(default_factory=list)
    """The ids of messages that were acknowledged with a result."""

    def build(self, commands: Sequence[Command]) -> list[Statement]:
        """Return the statements for ``commands``, in the order in which they are to be executed."""
        kinds: dict[type, list[Any]] = {}
        for command in commands:
            kinds.setdefault(type(command), []).append(command)
        for kind, add in _IN_ORDER:
            if kind in kinds:
                add(self, kinds[kind])
        return self.statements

    def _add(
        self, function: str, values: tuple[Any, ...], finish: Callable[[list[tuple[Any, ...]]], None] | None = None
    ) -> None:
        values = (self.box, *values)
        self.statements.append(Statement(call_text(self.schema, function, len(values)), values, finish))

    # --------------------------------------------------------------------------------------------------------- sending

    def add_send(self, sends: list[PostgresSend]) -> None:
        plain: list[Envelope] = []
        with_options: list[Envelope] = []
        of_tasks: list[Envelope] = []
        dedup: list[tuple[PostgresSend, int, Envelope]] = []
        for send in sends:
            send.result = []
            rest: list[Envelope] = []  # in one statement, as they are in order
            some_options = some_tasks = False
            for place, envelope in enumerate(send.envelopes):
                send.result.append(envelope.message_id)
                if envelope.dedup_key is not None:
                    dedup.append((send, place, envelope))
                else:
                    rest.append(envelope)
                    some_options = some_options or has_options(envelope)
                    some_tasks = some_tasks or envelope.task is not None
            (of_tasks if some_tasks else with_options if some_options else plain).extend(rest)
        if dedup:
            self._send_dedup(dedup)
        for some in portions(plain, size_of):
            self._add("send", _bodies(some))
        for some in portions(with_options, size_of):
            self._add("send_with_options", (*_bodies(some), *options_values(some)))
        for some in portions(of_tasks, size_of):
            self._add("send_tasks", _with_tasks(some))
        self.became_pending[self.box] += len(plain)
        for envelope in (*with_options, *of_tasks):
            self._sent(envelope)

    def _send_dedup(self, dedup: list[tuple[PostgresSend, int, Envelope]]) -> None:
        if self.patience is not None:
            for one in dedup:
                e = one[2]
                values = (e.message_id, e.body, e.delay, -e.priority, e.reply_to, headers_text(e), e.expires_in)
                key = stored_key(e.dedup_key or "")
                given = (*values, key, *task_of(e), self.patience)
                self._add("send_dedup_within", given, partial(self._dedup_sent, [one]))
            return
        for some in portions(dedup, lambda one: size_of(one[2])):
            envelopes = [envelope for _, _, envelope in some]
            keys = array(Texts, [stored_key(envelope.dedup_key or "") for envelope in envelopes])
            given = (*_bodies(envelopes), *options_values(envelopes), keys, *task_values(envelopes))
            values = (*given, self.lock_wait, self.apart)
            self._add("send_many_dedup", values, partial(self._dedup_sent, some))

    def _dedup_sent(self, dedup: list[tuple[PostgresSend, int, Envelope]], rows: list[tuple[Any, ...]]) -> None:
        for (send, place, envelope), (found,) in zip(dedup, rows, strict=True):
            name = found.decode() if isinstance(found, bytes) else found  # on a sender's connection in SQL_ASCII
            send.result[place] = name
            send.blocked = name is None
            if name == envelope.message_id:
                self._sent(envelope)

    def add_write(self, writes: list[WriteRecord]) -> None:
        for write in writes:
            plain = [one for one in write.envelopes if one.dedup_key is None]
            keyed = [one for one in write.envelopes if one.dedup_key is not None]
            keys = array(Texts, [stored_key(one.dedup_key or "") for one in keyed])
            messages = (*_with_tasks(plain), *_with_tasks(keyed), keys)
            values = (*record_values(write.write), write.capacity, self.lock_wait, *messages)
            self._add("write_record_and_send", values, partial(self._written, write, plain, keyed))

    def _written(
        self, write: WriteRecord, plain: list[Envelope], keyed: list[Envelope], rows: list[tuple[Any, ...]]
    ) -> None:
        ((write.result, waiting, more, sent),) = rows
        if waiting is not None:
            write.error = full(waiting, write.capacity or 0, more)
        if write.result is not None:
            for envelope in (
                *plain,
                *(one for one, name in zip(keyed, sent or (), strict=True) if name == one.message_id),
            ):
                self._sent(envelope)

    def _sent(self, envelope: Envelope) -> None:
        if not envelope.delay:
            self.became_pending[self.box] += 1
        elif self.due_in is None or envelope.delay < self.due_in:
            self.due_in = envelope.delay

    # ------------------------------------------------------------------------------------------------------- receiving

    def add_claim(self, claims: list[batched.Claim]) -> None:
        alike: dict[float, list[batched.Claim]] = {}
        for claim in claims:
            alike.setdefault(claim.visibility, []).append(claim)
        for visibility, group in alike.items():
            ranks, floors, since = self.watermark.start(self.now)
            want, waits = 0, False
            for claim in group:
                want += claim.limit
                waits = waits or claim.waits
            known = (array(Shorts, ranks), array(Longs, floors))
            self._add("claim", (want, visibility, *known, since, waits), partial(self._claimed, group))

    def _claimed(self, claims: list[batched.Claim], rows: list[tuple[Any, ...]]) -> None:
        _, _, moved, newly_listening, let_in, swept_at, due_in, *_ = rows.pop()  # the row that is no message comes last
        self.watermark.swept(swept_at, moved)
        self.became_pending[self.box] += moved + (let_in or 0)
        if due_in is not None:
            self.due_in = due_in
        self.newly_listening = self.newly_listening or bool(newly_listening)
        rows.sort(key=_PLACE)
        deliveries = self._deliveries(rows)
        start = 0
        for claim in claims:
            claim.result = deliveries[start : start + claim.limit]
            start += claim.limit

    def _deliveries(self, rows: list[tuple[Any, ...]]) -> list[ClaimedMessage]:
        deliveries = []
        last: dict[int, int] = {}  # of each rank, as they are in order
        rows.reverse()
        while rows:  # a row goes as its delivery comes: the garbage collector has less to look at
            name, body, lease, count, charged, sent, first, reply_to, headers, checkpoint, history, rank, pos = (
                rows.pop()
            )
            last[rank] = pos
            known = {} if headers is None else headers_of(headers)
            delivery = ClaimedMessage(
                name,
                body,
                f"{name}.{lease}",
                count,
                charged + 1,
                sent,
                first,
                reply_to,
                known or {},
                checkpoint,
                self.now,
                history,
                known is not None,
            )
            deliveries.append(delivery)
        for rank, pos in last.items():
            self.watermark.claimed(rank, pos)
        return deliveries

    def add_unclaim(self, commands: list[batched.Unclaim]) -> None:
        self._add("unclaim", leases([one for command in commands for one in command.deliveries]), self._returned)

    def _returned(self, rows: list[tuple[Any, ...]]) -> None:
        for rank, pos in rows:
            self.watermark.returned(rank, pos)
        self.became_pending[self.box] += len(rows)

    def add_count(self, counts: list[batched.Count]) -> None:
        parts: list[int] = []

        def finish_counts(rows: list[tuple[Any, ...]]) -> None:
            parts[:] = rows[0]

        def finish(rows: list[tuple[Any, ...]]) -> None:
            for count in counts:
                count.result = Counts(*parts, queue_age=rows[0][0])

        self._add("counts", (), finish_counts)
        self._add("queue_age", (), finish)

    # -------------------------------------------------------------------------------------------------------- settling

    def add_acknowledge(self, acks: list[batched.Acknowledge]) -> None:
        acks = once_each(acks)

        def finish(rows: list[tuple[Any, ...]]) -> None:
            for number in rows[0][0] or ():
                acks[number - 1].error = lease_over(acks[number - 1].delivery)

        self._add("acknowledge", leases([ack.delivery for ack in acks]), finish)

    def add_acknowledge_many(self, commands: list[AcknowledgeMany]) -> None:
        def finish(rows: list[tuple[Any, ...]]) -> None:
            refused = set(rows[0][0] or ())
            number = 0
            for command in commands:
                command.result = {}
                for place, delivery in enumerate(command.deliveries) if refused else ():
                    number += 1
                    if number in refused:
                        command.result[place] = lease_over(delivery)

        self._add("acknowledge", leases([one for command in commands for one in command.deliveries]), finish)

    def add_settle(self, commands: list[Settle]) -> None:
        for some in portions(once_each(commands), size_of_settlement):
            self._settle("settle", some, settle_values(some))

    def add_settle_with_result(self, commands: list[SettleWithResult]) -> None:
        for some in portions(once_each(commands), size_of_settlement):
            self._settle("settle_with_results", some, (*settle_values(some), *results_values(some)))

    def _settle(self, function: str, commands: list[Any], values: tuple[Any, ...]) -> None:
        def finish(rows: list[tuple[Any, ...]]) -> None:
            refuse_all_but(rows, commands)
            for (number,) in rows:
                if number < 0:
                    commands[-number - 1].error = NoSuchTargetError()
            for command in commands:
                if command.target is not None and command.error is None:
                    self.became_pending[command.target] += 1
                if type(command) is SettleWithResult and command.error is None:
                    self.results.append(command.delivery.message_id)

        self._add(function, values, finish)

    def add_nack(self, commands: list[batched.NackCommand]) -> None:
        commands = once_each(commands)

        def finish(rows: list[tuple[Any, ...]]) -> None:
            refuse_all_but(rows, commands)
            self._returned([(rank, pos) for _, rank, pos, pending in rows if pending])
            delays = [command.how.delay for command in commands if command.how.delay and command.error is None]
            if delays:
                self.due_in = min(delays)

        values = (
            array(Floats, [command.how.delay for command in commands]),
            array(Integers, [int(command.how.charge) for command in commands]),
            array(Integers, [int(command.how.front) for command in commands]),
            array(Texts, [command.how.history for command in commands]),
        )
        self._add("nack", (*leases([command.delivery for command in commands]), *values), finish)

    def add_set_task(self, commands: list[SetTask]) -> None:
        for command in commands:
            finish = partial(self._take_task_set, command)
            self._add("set_task", (*leases([command.delivery]), stored_name(command.task)), finish)

    def _take_task_set(self, command: SetTask, rows: list[tuple[Any, ...]]) -> None:
        refuse_all_but(rows, [command])
        released = [(rank, pos) for _, rank, pos, pending in rows if pending]
        self._returned(released)
        command.result = bool(released)

    def add_extend(self, commands: list[batched.Extend]) -> None:
        longest: dict[str, batched.Extend] = {}
        for command in commands:
            handle = command.delivery.receipt_handle
            if handle not in longest or longest[handle].timeout < command.timeout:
                longest[handle] = command
        chosen = list(longest.values())
        self._held("extend", chosen, array(Floats, [one.timeout for one in chosen]), commands)

    def add_checkpoint(self, commands: list[batched.Checkpoint]) -> None:
        last = list({command.delivery.receipt_handle: command for command in commands}.values())
        for some in portions(last, lambda one: len(one.state)):
            kept = {one.delivery.receipt_handle for one in some}
            those = [command for command in commands if command.delivery.receipt_handle in kept]
            self._held("save_checkpoint", some, array(Blobs, [one.state for one in some]), those)

    def _held(self, function: str, sent: list[Any], values: Any, commands: list[Any]) -> None:
        def finish(rows: list[tuple[Any, ...]]) -> None:
            held = {sent[row[0] - 1].delivery.receipt_handle for row in rows}
            refuse(command for command in commands if command.delivery.receipt_handle not in held)

        self._add(function, (*leases([command.delivery for command in sent]), values), finish)


class NoSuchTargetError(MailboxConnectionError):
    """The mailbox for a reply was dropped after its number was read."""

    def __init__(self) -> None:
        super().__init__(
            "the mailbox for the reply was dropped just now; nothing was settled, and it may be tried again"
        )


_IN_ORDER: tuple[tuple[type, Callable[[StatementBatch, Any], None]], ...] = (
    (batched.Unclaim, StatementBatch.add_unclaim),
    (batched.Acknowledge, StatementBatch.add_acknowledge),
    (AcknowledgeMany, StatementBatch.add_acknowledge_many),
    (Settle, StatementBatch.add_settle),
    (SettleWithResult, StatementBatch.add_settle_with_result),
    (batched.NackCommand, StatementBatch.add_nack),
    (SetTask, StatementBatch.add_set_task),
    (batched.Extend, StatementBatch.add_extend),
    (batched.Checkpoint, StatementBatch.add_checkpoint),
    (PostgresSend, StatementBatch.add_send),
    (WriteRecord, StatementBatch.add_write),
    (batched.Claim, StatementBatch.add_claim),
    (batched.Count, StatementBatch.add_count),
)


async def execute(connection: AsyncConnection[Any], statement: Statement) -> list[tuple[Any, ...]]:
    """Execute a statement on a connection, whatever its settings. Return its rows."""
    cursor = AsyncRawCursor(connection, row_factory=tuple_row)
    register(cursor.adapters)
    await cursor.execute(statement.text, statement.values, binary=True)
    return await cursor.fetchall()


async def call(connection: AsyncConnection[Any], schema: str, function: str, *values: Any) -> list[tuple[Any, ...]]:
    """Call a function of the schema on a connection. Return its rows."""
    return await execute(connection, Statement(call_text(schema, function, len(values)), values))


def _bodies(envelopes: list[Envelope]) -> tuple[Any, ...]:
    """Return the ids and the bodies, as the functions take them."""
    return array(Texts, [e.message_id for e in envelopes]), array(Blobs, [e.body for e in envelopes])


def _with_tasks(envelopes: list[Envelope]) -> tuple[Any, ...]:
    """Return all of the messages but dedup keys."""
    return *_bodies(envelopes), *options_values(envelopes), *task_values(envelopes)


def once_each(commands: list[Any]) -> list[Any]:
    """Return the first command of each lease. Refuse later ones: the lease ends with the first."""
    seen: dict[str, Any] = {}
    for command in commands:
        if seen.setdefault(command.delivery.receipt_handle, command) is not command:
            command.error = lease_over(command.delivery)
    return list(seen.values())


def refuse_all_but(rows: list[tuple[Any, ...]], commands: list[Any]) -> None:
    """Refuse the commands whose numbers, from 1, are not in the rows: they did not hold their leases."""
    held = {row[0] for row in rows}
    refuse(command for number, command in enumerate(commands, 1) if number not in held)


def refuse(commands: Any) -> None:
    """Set the error of commands that did not hold their leases."""
    for command in commands:
        command.error = lease_over(command.delivery)
