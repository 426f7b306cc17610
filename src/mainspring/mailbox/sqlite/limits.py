"""The limits of a mailbox file in one transaction: which messages get permits or wait, and when a limiter opens.

:mod:`mainspring.mailbox.limiters` says what limits mean. Here the state of a limiter is a row, and so is each message that
waits at it. A transaction reads each limiter that it needs once, and writes each changed limiter once, as it ends. Ended
permits are given on together, before the claims and at the end: at most :data:`AT_ONCE` in one transaction. If more are left,
the limiter is due at once, and the next transaction goes on.

A rate counts in POSIX seconds, so what it has spent outlasts a restart of the machine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mainspring.mailbox.limiters import ALL_TASKS, Blocks, Limiter, LimitState, TaskLimits
from mainspring.mailbox.sqlite import schema as sql
from mainspring.policies import Rate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from apsw import Connection

    from mainspring.mailbox.job_commands import ChangeLimits, ListLimits
    from mainspring.mailbox.limiters import LimitChange
    from mainspring.mailbox.sqlite.unit_of_work import UnitOfWork

KEY: Final = 1
TASK: Final = 2
"""Which permits a message has, as bits: that of its key, and that of its task."""

AT_ONCE: Final = 1_000
"""How many permits one transaction gives, and how many messages it puts back to their limiters."""


@dataclass(frozen=True, slots=True)
class StoredLimits(LimitState):
    """The limits of one task, as the file has them.

    ``counts_claims``: the limiters of its keys know how many of their permits have been claimed. They need it for a rate, and
    where one has more permits out than are allowed now. Else it is not written, and a claim leaves them alone.
    """

    counts_claims: bool = False


States = dict[str, StoredLimits]
"""The limits of the tasks of one mailbox, by task."""


class Limitable(NamedTuple):
    """What limits and turns go by in a message that has a task. A ``weight`` of None is 1."""

    task: str
    key: str | None
    weight: float | None = None
    permits: int = 0

    @classmethod
    def of(cls, task: str | None, key: str | None, weight: float | None, permits: int | None) -> Limitable | None:
        """Return what a row says, None for a message without a task."""
        return None if task is None else cls(task, key, weight, permits or 0)


@dataclass(slots=True)
class StoredLimiter(Limiter):
    """A limiter that is a row: that of a task, or (``key``) of one of its keys, with the limits that hold for it."""

    place: tuple[int, str, str] = (0, "", "")
    """The key of its row: the mailbox, the task, and its name."""
    key: str | None = None
    most: int | None = None
    rate: Rate | None = None
    counts_claims: bool = True
    """Without it, ``unclaimed`` means nothing."""
    waiting: int = 0
    due: float | None = None
    """The instant for which messages wait at it."""
    row: tuple[Any, ...] | None = None
    """What its row holds."""

    def is_open(self, now: float) -> bool:
        """True if it may give a permit."""
        return self.opens_at(self.most, self.rate, now) <= now

    @property
    def has_room(self) -> bool:
        """True if fewer are in flight than it allows."""
        return self.most is None or self.used - self.unclaimed < self.most

    def read(self, used: int, unclaimed: int, spent: float | None, waiting: int, due: float | None, idle: Any) -> None:
        """Take over the values of its row."""
        self.used, self.unclaimed, self.waiting, self.due = used, unclaimed, waiting, due
        self.spent_until = -math.inf if spent is None else spent
        self.row = (used, unclaimed, spent, waiting, due, idle)

    def values(self, now: float) -> tuple[Any, ...] | None:
        """Return the values of its row; None if it has nothing to remember."""
        if not self.waiting and self.is_idle(now):
            return None
        spent = None if self.spent_until == -math.inf else self.spent_until
        unclaimed = self.unclaimed if self.counts_claims else 0
        return self.used, unclaimed, spent, self.waiting, self.due, None if self.used or self.waiting else spent


class Entrant(NamedTuple):
    """A message that is due, with the limits of its task."""

    mailbox: int
    rank: int
    pos: float
    seq: int
    call: Limitable
    state: StoredLimits


class KnownLimits:
    """The limits of a file as they were read last, and committed: under the number that the file has for them."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._states: dict[int, States] = {}

    def at(self, number: int, connection: Connection) -> dict[int, States]:
        """Return the limits by mailbox, read anew unless they are known under that number."""
        if number != self._number:
            self._states = {}
            rows: Iterable[tuple[Any, ...]] = connection.execute(sql.ALL_LIMITS).fetchall()
            for mailbox, task, declared, paused, concurrency in rows:
                limits, counts_claims = _limits_of(declared)
                state = StoredLimits(task, limits, bool(paused), concurrency, counts_claims=counts_claims)
                self._states.setdefault(mailbox, {})[task] = state
            self._number = number
        return self._states


class WorkLimits:
    """The limits and limiters of one transaction."""

    def __init__(self, work: UnitOfWork, states: Mapping[int, States]) -> None:
        self._work = work
        self._states = dict(states)
        self._limiters: dict[tuple[int, str, str], StoredLimiter] = {}
        self._touched: dict[tuple[int, str, str], StoredLimiter] = {}
        self._first_places: dict[tuple[int, str, int], float] = {}
        self._left = AT_ONCE
        self._is_opened = False
        self._changed: set[int] = set()

    # --------------------------------------------------------------------------------------------------- what holds

    @property
    def is_spent(self) -> bool:
        """True if this transaction has given, or put back, as many as it may."""
        return not self._left

    def of_mailbox(self, mailbox: int) -> States:
        """Return the limits of a mailbox; none: nothing in it is limited."""
        return self._states.get(mailbox, {})

    def of_task(self, mailbox: int, call: Limitable | None) -> StoredLimits | None:
        """Return the limits of a message's task, None if it has none."""
        return None if call is None else self.of_mailbox(mailbox).get(call.task)

    def room(self, mailbox: int, most: int) -> int:
        """Return how many messages a claim of ``most`` may take by the limits of the whole mailbox."""
        whole = self.of_mailbox(mailbox).get(ALL_TASKS)
        allowed = None if whole is None else _most(whole)
        if allowed is None:
            return most
        in_flight = self._work.counts(mailbox)[2] + self._work.delta(mailbox).in_flight
        return min(most, allowed - in_flight)

    def keeps(self, mailbox: int, call: Limitable | None, least: Blocks) -> int:
        """Return the permit that a retried (RETRY) or dead (DEAD) message keeps."""
        state = self.of_task(mailbox, call)
        blocks = Blocks.RUNNING if state is None else state.limits.blocks
        return KEY if blocks is Blocks.DEAD or blocks is least else 0

    # ------------------------------------------------------------------------------------------------------ messages

    def first_place(self, mailbox: int, rank: int, call: Limitable) -> float:
        """Return the place of the first message of a rank that waits at the limiter of the task, or infinity."""
        if self.of_task(mailbox, call) is None or not self._limiter(mailbox, call.task).waiting:
            return math.inf
        place = (mailbox, call.task, rank)
        found = self._first_places.get(place)
        if found is None:
            rows = self._work.rows(sql.FIRST_WAITING_PLACE, place)
            found = self._first_places[place] = rows[0][0] if rows else math.inf
        return found

    def enter(self, entrants: list[Entrant]) -> None:
        """Let messages that are due get their permits: they become ready, or wait at a limiter.

        They are counted as pending already, but not as gained.
        """
        wall = self._work.wall
        ready: list[Any] = []
        waiting: list[Any] = []
        for mailbox, rank, pos, seq, call, state in entrants:
            task, key, _, permits = call
            needs = () if permits & TASK else (TASK,)
            if key is not None and not permits & KEY and state.limits.limits_keys:
                needs = (KEY, *needs)
            for permit in needs:
                limiter = self._limiter(mailbox, task, key if permit == KEY else None)
                if limiter.waiting or not limiter.is_open(wall):
                    waiting += (*limiter.place, rank, pos, seq, permits)
                    limiter.waiting += 1
                    self._touched[limiter.place] = limiter
                    self._work.delta(mailbox).waiting += 1
                    break
                limiter.give()
                permits |= permit
            else:
                ready += (mailbox, rank, pos, seq, permits)
                self._work.delta(mailbox).gained += 1
        self._work.insert(sql.ADD_READY, 5, ready)
        self._work.insert(sql.ADD_WAITING, 7, waiting)

    def admit(self, mailbox: int, rank: int, pos: float, seq: int, call: Limitable | None) -> bool | None:
        """True if a ready message is claimed. False if it entered anew: it lacks a permit, as the limits are newer than it, or
        as many are in flight as the limits now allow. None: it is left as it is, as this is enough for one transaction.
        """
        state = self.of_task(mailbox, call)
        if call is None or state is None:
            return True
        own = self._limiter(mailbox, call.task)
        has_key = bool(call.permits & KEY) or call.key is None or not state.limits.limits_keys
        key = None
        if call.permits & KEY and state.counts_claims:
            key = self._limiter(mailbox, call.task, call.key)
            has_key = key.has_room
        if has_key and call.permits & TASK and own.has_room:
            for limiter in (own,) if key is None else (own, key):
                limiter.claimed(limiter.rate, self._work.wall)
                if limiter.waiting and limiter.rate is not None:  # it may be open for the next one
                    self._touched[limiter.place] = limiter
            return True
        if not self._left:
            return None
        self._left -= 1
        self._work.execute(sql.FORGET_READY, (mailbox, rank, pos, seq))
        rest = self.left(mailbox, call, was_claimed=False, keeps=KEY if has_key else 0)
        self.enter([Entrant(mailbox, rank, pos, seq, rest or call, state)])
        return False

    def due_again(self, mailbox: int, call: Limitable | None) -> None:
        """Note that a message which has kept permits is to be claimed again."""
        self._count_unclaimed(mailbox, call, 1)

    def withdraw(self, mailbox: int, call: Limitable, keeps: int) -> int:
        """End the permits of a pending message that waits no more, but for that of ``keeps``. Return what it has then."""
        rest = self.left(mailbox, call, was_claimed=False, keeps=keeps) or call
        self._count_unclaimed(mailbox, rest, -1)
        return rest.permits & keeps

    def _count_unclaimed(self, mailbox: int, call: Limitable | None, change: int) -> None:
        if call is not None and self.of_task(mailbox, call) is not None:
            for limiter in self._held(mailbox, call, call.permits):
                limiter.unclaimed += change

    def left(self, mailbox: int, call: Limitable | None, *, was_claimed: bool, keeps: int = 0) -> Limitable | None:
        """End the permits of a message, but for that of ``keeps``. Return it with the permits that it has then."""
        if call is None or not call.permits or self.of_task(mailbox, call) is None:
            return call
        self._end(mailbox, call, call.permits & ~keeps, was_claimed=was_claimed)
        return call._replace(permits=call.permits & keeps)

    def done(self, mailbox: int, calls: list[Limitable]) -> None:
        """End all permits of messages that are done."""
        self.read(mailbox, calls)
        states = self.of_mailbox(mailbox)
        of_tasks: dict[str, int] = {}
        for call in calls:
            if call.task in states:
                self._end(mailbox, call, call.permits & KEY, was_claimed=True)
                if call.permits & TASK:
                    of_tasks[call.task] = of_tasks.get(call.task, 0) + 1
        for task, count in of_tasks.items():
            limiter = self._limiter(mailbox, task)
            limiter.used -= min(limiter.used, count)
            if limiter.waiting:
                self._touched[limiter.place] = limiter

    def _end(self, mailbox: int, call: Limitable, permits: int, *, was_claimed: bool) -> None:
        for limiter in self._held(mailbox, call, permits):
            limiter.end(was_claimed=was_claimed)
            if limiter.waiting:
                self._touched[limiter.place] = limiter

    def waits_at(
        self, mailbox: int, rank: int, pos: float, seq: int, task: str, key: str | None
    ) -> tuple[str, int] | None:
        """Return the name of the limiter at which a message waits, and its permits, or None if it waits at none."""
        for found in self._work.rows(sql.WAITS_AT, (mailbox, task, _name(key), rank, pos, seq)):
            return found
        return None

    def leave(
        self, mailbox: int, rank: int, pos: float, seq: int, task: str, key: str | None, keeps: int
    ) -> int | None:
        """Take a message away from the limiter at which it waits, with no permits but ``keeps``. Return what it has then, or
        None if it waits at none."""
        found = self.waits_at(mailbox, rank, pos, seq, task, key)
        if found is None:
            return None
        name, permits = found
        limiter = self._limiter(mailbox, task, key if name else None)
        self._work.execute(sql.FORGET_WAITING, (*limiter.place, rank, pos, seq))
        limiter.waiting -= 1
        self._touched[limiter.place] = limiter
        self._work.delta(mailbox).waiting -= 1
        return self.withdraw(mailbox, Limitable(task, key, None, permits), keeps)

    def purge(self, mailbox: int) -> None:
        """Forget all messages of a mailbox but the dead ones, which may have permits. What is spent of a rate stays spent."""
        work = self._work
        self.flush()
        (waiting,) = work.row(sql.HOW_MANY_WAIT, (mailbox,))
        work.delta(mailbox).waiting -= waiting
        for statement in sql.PURGE_LIMITERS:
            work.execute(statement, (mailbox,))
        self._limiters.clear()

    def drop(self, mailbox: int) -> None:
        """Forget a mailbox with its limits."""
        if self._states.pop(mailbox, None) is not None:
            self.flush()
            self._limiters.clear()
            for statement in sql.DROP_ALL_LIMITS:
                self._work.execute(statement, (mailbox,))
            self._number_anew()

    def _held(self, mailbox: int, call: Limitable, permits: int) -> Iterator[StoredLimiter]:
        """Yield the limiters of these permits of a message."""
        if permits & KEY and (limiter := self._limiter(mailbox, call.task, call.key)).used:
            yield limiter
        if permits & TASK and (limiter := self._limiter(mailbox, call.task)).used:
            yield limiter

    # ------------------------------------------------------------------------------------------------------ limiters

    def read(self, mailbox: int, calls: Iterable[Limitable | None]) -> None:
        """Read the limiters of the keys of these messages that are not known yet, all of a task by one statement."""
        states = self.of_mailbox(mailbox)
        known = self._limiters
        new: dict[str, dict[str, str]] = {}
        for call in calls:
            if call is not None and call.key is not None and call.task in states:
                name = f"={call.key}"
                if (mailbox, call.task, name) not in known:
                    new.setdefault(call.task, {})[name] = call.key
        for task, names in new.items():
            if not states[task].limits.limits_keys:  # few are needed, if any, of when keys had limits
                continue
            for name, key in names.items():
                place = (mailbox, task, name)
                known[place] = self._new(mailbox, task, key)
            for name, *row in self._work.rows(sql.LIMITERS, (mailbox, task, json.dumps(list(names)))):
                known[mailbox, task, name].read(*row)

    def read_to_admit(self, mailbox: int, calls: Iterable[Limitable | None]) -> None:
        """Read the limiters that :meth:`admit` needs for these messages."""
        states = self.of_mailbox(mailbox)
        self.read(
            mailbox,
            (
                call
                for call in calls
                if call is not None
                and (state := states.get(call.task)) is not None
                and (state.counts_claims or not call.permits & KEY)
            ),
        )

    def _limiter(self, mailbox: int, task: str, key: str | None = None) -> StoredLimiter:
        place = (mailbox, task, "" if key is None else "=" + key)
        found = self._limiters.get(place)
        if found is None:
            found = self._limiters[place] = self._new(mailbox, task, key)
            for row in self._work.rows(sql.LIMITER, place):
                found.read(*row)
        return found

    def _new(self, mailbox: int, task: str, key: str | None) -> StoredLimiter:
        state = self.of_mailbox(mailbox)[task]
        limits = state.limits
        if key is None:
            return StoredLimiter(place=(mailbox, task, ""), most=_most(state), rate=limits.rate)
        place, counts = (mailbox, task, _name(key)), state.counts_claims
        return StoredLimiter(
            place=place, key=key, most=limits.key_concurrency, rate=limits.key_rate, counts_claims=counts
        )

    def open_due(self) -> None:
        """Let limiters give permits whose instant has come."""
        for mailbox, task, name in self._work.rows(sql.OPENED, (self._work.wall, AT_ONCE)):
            limiter = self._limiter(mailbox, task, name[1:] if name else None)
            self._touched[limiter.place] = limiter
        self._is_opened = True

    def give(self) -> None:
        """Give the permits that there are to the messages that wait for them, the first by priority and place."""
        while self._touched:
            touched, self._touched = self._touched, {}
            entrants: list[Entrant] = []
            for limiter, rows, permits in self._take_waiting(touched.values()):
                entrants += self._let_in(limiter, rows, permits)
            self._left -= len(entrants)
            self.enter(entrants)
            for limiter in touched.values():
                self._look_at(limiter)

    def _take_waiting(self, limiters: Iterable[StoredLimiter]) -> Iterator[tuple[StoredLimiter, list[Any], int]]:
        """Yield limiters that are open with the messages that come next there, and the permits that they have given for them.

        The messages wait there no more. Of all limiters that have one permit to give, one statement takes the next message.
        """
        left = self._left
        singles: dict[tuple[int, str], list[StoredLimiter]] = {}
        for limiter in limiters:
            permits = self._give_permits(limiter, left)
            left -= permits
            if permits == 1:
                singles.setdefault(limiter.place[:2], []).append(limiter)
            elif permits:
                rows = self._work.rows(sql.TAKE_WAITING, (*limiter.place, *limiter.place, permits))
                yield limiter, sorted(rows), permits
        for (mailbox, task), group in singles.items():
            names = json.dumps([limiter.place[2] for limiter in group])
            rows = self._work.rows(sql.TAKE_WAITING_OF, (names, mailbox, task))
            found = {name: row for name, *row in rows}
            for limiter in group:
                row = found.get(limiter.place[2])
                yield limiter, [] if row is None else [row], 1

    def _give_permits(self, limiter: StoredLimiter, left: int) -> int:
        """Let a limiter give permits for the messages that wait there, at most ``left``. Return how many it has given."""
        most = min(left, limiter.waiting)
        for given in range(most):
            if not limiter.is_open(self._work.wall):
                return given
            limiter.give()
        return most

    def _let_in(self, limiter: StoredLimiter, rows: list[Any], given: int) -> list[Entrant]:
        """Return messages that go on with the permits that a limiter has ``given``; permits that none of them has are ended."""
        mailbox, task, _ = limiter.place
        state = self.of_mailbox(mailbox)[task]
        entrants = []
        permit = TASK if limiter.key is None else KEY
        looks_for_key = permit == TASK and state.limits.limits_keys
        for rank, pos, seq, before in rows:
            key, permits = limiter.key, before | permit
            if looks_for_key and not before & KEY:
                key = self._work.value(sql.KEY_OF, (seq,))
                if key is not None:  # no permit of the task while it waits for that of the key
                    permits = before
            given -= permits != before
            entrants.append(Entrant(mailbox, rank, pos, seq, Limitable(task, key, None, permits), state))
        for _ in range(given):
            limiter.end(was_claimed=False)
        limiter.waiting -= len(rows)
        self._work.delta(mailbox).waiting -= len(rows)
        return entrants

    def _look_at(self, limiter: StoredLimiter) -> None:
        """Note when a limiter opens next, or that it has more to give at once."""
        wall = self._work.wall
        opens_at = limiter.opens_at(limiter.most, limiter.rate, wall)
        if not limiter.waiting or opens_at == math.inf:
            limiter.due = None
        else:
            limiter.due = max(opens_at, wall)
            if opens_at <= wall and self._left:
                self._touched[limiter.place] = limiter

    def flush(self) -> None:
        """Give permits, and write the limiters that have changed."""
        self.give()
        work = self._work
        written: list[Any] = []
        dropped = []
        soonest = math.inf
        added = 0
        for limiter in self._limiters.values():
            values = limiter.values(work.wall)
            if values == limiter.row:
                continue
            added += limiter.row is None
            limiter.row = values
            if values is None:
                dropped.append(limiter.place)
            else:
                written += (*limiter.place, *values)
                soonest = min(soonest, math.inf if limiter.due is None else limiter.due)
        work.insert(sql.WRITE_LIMITER, 9, written)
        if dropped:
            work.many(sql.DROP_LIMITER, dropped)
        for mailbox, task in {place[:2] for place in dropped}:
            state = self.of_mailbox(mailbox)[task]
            if not _is_set(state):  # it was taken back, and the last permit may have ended
                self._write(mailbox, state)
        if added:  # as many may go as have come
            work.execute(sql.DROP_IDLE, (work.wall, 2 * added))
        if self._is_opened:
            self._is_opened = False
            work.opens = work.value(sql.FIRST_OPENING)
        if soonest < math.inf:
            work.opens_by(soonest)

    # ------------------------------------------------------------------------------------------------------- changes

    def change(self, mailbox: int, changes: list[LimitChange]) -> None:
        """Change limits. Messages that wait at a limiter of a changed task become ready if they may."""
        work = self._work
        for change in changes:
            before = self.of_mailbox(mailbox).get(change.task) or StoredLimits(change.task, TaskLimits())
            after = replace(
                before,
                limits=before.limits if change.declared is None else change.declared,
                paused=before.paused if change.paused is None else change.paused,
                concurrency=before.concurrency if change.concurrency is None else change.concurrency or None,
            )
            if after == before:
                continue
            self.flush()
            self._limiters.clear()
            self._write(mailbox, self._look_at_claims(mailbox, after))
            if change.task == ALL_TASKS:
                work.execute(sql.SET_MOST, (_most(after), mailbox))
                self._changed.add(mailbox)
            work.execute(sql.OPEN_ALL, (work.wall, mailbox, change.task))
            self.open_due()

    def _look_at_claims(self, mailbox: int, state: StoredLimits) -> StoredLimits:
        """Return limits that have changed with whether the claims of keys are counted now: from here on, or still."""
        limits = state.limits
        counts = limits.key_rate is not None or (
            limits.key_concurrency is not None
            and bool(self._work.rows(sql.ANY_ABOVE, (mailbox, state.task, limits.key_concurrency)))
        )
        if counts and not state.counts_claims:
            self._work.execute(sql.COUNT_UNCLAIMED, (mailbox, state.task))
        return replace(state, counts_claims=counts)

    def _write(self, mailbox: int, state: StoredLimits) -> None:
        """Write the limits of a task, or delete them where nothing is left of them."""
        work = self._work
        states = dict(self.of_mailbox(mailbox))
        states.pop(state.task, None)
        if _is_set(state) or work.rows(sql.ANY_LIMITER, (mailbox, state.task)):
            states[state.task] = state
            values = (mailbox, state.task, _text_of(state), state.paused, state.concurrency)
            work.execute(sql.WRITE_LIMITS, values)
        else:
            work.execute(sql.DROP_LIMITS, (mailbox, state.task))
        self._states[mailbox] = states
        self._number_anew()

    def _number_anew(self) -> None:
        work = self._work
        work.tick += 1
        work.limited = work.tick if work.value(sql.ANY_LIMITS) else None

    def limit_wakes(self, mailboxes: Iterable[int]) -> None:
        """Let no more claims be woken than the limits of whole mailboxes allow, but these if there is room anew."""
        work = self._work
        for mailbox in {box for box in mailboxes if ALL_TASKS in self.of_mailbox(box)} | self._changed:
            work.gained[mailbox] = work.value(sql.READY_WITHIN, (mailbox,))
            if work.gained[mailbox] <= 0:
                del work.gained[mailbox]
        self._changed.clear()

    def states(self, mailbox: int) -> list[LimitState]:
        """Return the limits of each task."""
        self.flush()
        used = {task: (running, waiting) for task, running, waiting in self._work.rows(sql.USED_BY_TASK, (mailbox,))}
        in_flight = self._work.counts(mailbox)[2] + self._work.delta(mailbox).in_flight
        found = []
        for task, state in sorted(self.of_mailbox(mailbox).items()):
            running, waiting = used.get(task, (0, 0))
            if _is_set(state):
                running = in_flight if task == ALL_TASKS else running
                found.append(LimitState(task, state.limits, state.paused, state.concurrency, running, waiting))
        return found


def change_limits(work: UnitOfWork, commands: list[ChangeLimits]) -> None:
    """Change the limits of tasks and mailboxes."""
    for command in commands:
        work.limits = work.limits or WorkLimits(work, {})
        work.limits.change(command.mailbox, command.changes)


def list_limits(work: UnitOfWork, commands: list[ListLimits]) -> None:
    """List the limits of tasks, with the permits that are out and the messages that wait."""
    for command in commands:
        command.result = [] if work.limits is None else work.limits.states(command.mailbox)


def _is_set(state: LimitState) -> bool:
    return state.paused or state.concurrency is not None or state.limits != TaskLimits()


def _most(state: LimitState) -> int | None:
    """Return the concurrency that holds, 0 while it is paused."""
    return 0 if state.paused else state.most


def _name(key: str | None) -> str:
    """Return the name of a limiter among those of its task."""
    return "" if key is None else f"={key}"


def _text_of(state: StoredLimits) -> str:
    limits = state.limits
    rates = [None if rate is None else (rate.limit, rate.per, rate.burst) for rate in (limits.rate, limits.key_rate)]
    return json.dumps([limits.concurrency, limits.key_concurrency, limits.blocks, *rates, state.counts_claims])


def _limits_of(text: str) -> tuple[TaskLimits, bool]:
    concurrency, key_concurrency, blocks, *rates, counts_claims = json.loads(text)
    rate, key_rate = (None if each is None else Rate(*each) for each in rates)
    return TaskLimits(concurrency, rate, key_concurrency, key_rate, Blocks(blocks)), counts_claims
