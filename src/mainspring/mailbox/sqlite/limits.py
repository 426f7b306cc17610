"""The limits of a mailbox file in one transaction: who gets permits, who waits, and when a limiter opens.

What they mean is said in :mod:`mainspring.mailbox.limiters`; here is where the state of a limiter is a row, and a message that
waits at it another. A transaction reads each limiter that it needs once, and writes those it has changed once, as it ends. In
between, permits that have ended are given on together, before the claims and at the end: at most :data:`AT_ONCE` in one
transaction. Where that is not enough, the limiter is due at once, and the next transaction goes on.

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

States = dict[str, LimitState]
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
    """A limiter that is a row: that of a task, or (``key``) of one of its keys. ``row`` is what is written of it."""

    mailbox: int = 0
    task: str = ""
    key: str | None = None
    waiting: int = 0
    due: float | None = None
    """The instant for which messages wait at it."""
    row: tuple[Any, ...] | None = None

    @property
    def place(self) -> tuple[int, str, str]:
        """The key of its row."""
        return self.mailbox, self.task, "" if self.key is None else f"={self.key}"

    @property
    def permit(self) -> int:
        """Which permit it gives."""
        return TASK if self.key is None else KEY

    def values(self, now: float) -> tuple[Any, ...] | None:
        """Return what its row is to hold; None if it has nothing to remember."""
        if not self.waiting and self.is_idle(now):
            return None
        spent = None if self.spent_until == -math.inf else self.spent_until
        idle_at = None if self.used or self.waiting else spent
        return self.used, self.unclaimed, spent, self.waiting, self.due, idle_at


class KnownLimits:
    """The limits of a file as they were read last. ``number`` is the file's own, which changes with them."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._states: dict[int, States] = {}

    def at(self, number: int, connection: Connection) -> dict[int, States]:
        """Return the limits by mailbox, read anew unless they are known under that number."""
        if number != self._number:
            self._states = {}
            rows: Iterable[tuple[Any, ...]] = connection.execute(sql.ALL_LIMITS).fetchall()
            for mailbox, task, declared, paused, concurrency in rows:
                state = LimitState(task, _limits_of(declared), bool(paused), concurrency)
                self._states.setdefault(mailbox, {})[task] = state
            self._number = number
        return self._states

    def forget(self) -> None:
        """Read them anew next time: they may be those of a transaction that was rolled back, or of another file."""
        self._number = None


class WorkLimits:
    """The limits and limiters of one transaction."""

    def __init__(self, work: UnitOfWork, states: Mapping[int, States]) -> None:
        self._work = work
        self._states = dict(states)
        self._limiters: dict[tuple[int, str, str], StoredLimiter] = {}
        self._touched: dict[tuple[int, str, str], StoredLimiter] = {}
        self._left = AT_ONCE
        self._is_opened = False
        self._new = 0
        self._changed: set[int] = set()

    # --------------------------------------------------------------------------------------------------- what holds

    def of_mailbox(self, mailbox: int) -> States:
        """Return the limits of a mailbox; none: nothing in it is limited."""
        return self._states.get(mailbox, {})

    def of_task(self, mailbox: int, call: Limitable | None) -> LimitState | None:
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
        """Return the permit that a message keeps which is tried again (RETRY) or dead (DEAD)."""
        state = self.of_task(mailbox, call)
        blocks = Blocks.RUNNING if state is None else state.limits.blocks
        return KEY if blocks is Blocks.DEAD or blocks is least else 0

    # ------------------------------------------------------------------------------------------------------ messages

    def enter(self, mailbox: int, rank: int, pos: float, seq: int, call: Limitable, state: LimitState) -> None:
        """Let a message that is due get its permits: it becomes ready, or waits at a limiter.

        It is counted as pending already, but not as gained.
        """
        permits = call.permits
        for permit, key in ((KEY, call.key), (TASK, None)):
            if permits & permit or (permit == KEY and (key is None or not state.limits.limits_keys)):
                continue
            limiter = self._limiter(mailbox, call.task, key)
            if limiter.waiting or limiter.opens_at(*_bounds(state, limiter), self._work.wall) > self._work.wall:
                self._work.execute(sql.ADD_WAITING, (*limiter.place, rank, pos, seq, permits))
                self._work.delta(mailbox).waiting += 1
                limiter.waiting += 1
                self._touched[limiter.place] = limiter
                return
            limiter.give()
            permits |= permit
        self._work.execute(sql.ADD_READY, (mailbox, rank, pos, seq, permits))
        self._work.delta(mailbox).gained += 1

    def admits(self, mailbox: int, call: Limitable) -> bool:
        """True if a ready message may be claimed: it has its permits, and the task has not too many out."""
        state = self.of_task(mailbox, call)
        if state is None:
            return True
        most = _most(state)
        if not call.permits & TASK or (most is not None and self._limiter(mailbox, call.task).used > most) or most == 0:
            return False
        return bool(call.permits & KEY) or call.key is None or not state.limits.limits_keys

    def put_back(self, mailbox: int, rank: int, pos: float, seq: int, call: Limitable) -> bool:
        """Let a message that is ready, and may not be claimed, wait at its limiter. False if this is enough for now."""
        state = self.of_task(mailbox, call)
        if state is None or not self._left:
            return False
        self._left -= 1
        self._work.execute(sql.FORGET_READY, (mailbox, rank, pos, seq))
        if call.permits & TASK:
            self._end(self._limiter(mailbox, call.task), was_claimed=False)
        self.enter(mailbox, rank, pos, seq, call._replace(permits=call.permits & KEY), state)
        return True

    def claimed(self, mailbox: int, calls: Iterable[Limitable | None]) -> None:
        """Note that messages were claimed. Claims of a rate may open it for the next one."""
        for call in calls:
            state = self.of_task(mailbox, call)
            if call is not None and state is not None:
                for limiter in self._held(mailbox, call, call.permits):
                    rate = _bounds(state, limiter)[1]
                    limiter.claimed(rate, self._work.wall)
                    if rate is not None and limiter.waiting:
                        self._touched[limiter.place] = limiter

    def comes_again(self, mailbox: int, call: Limitable | None) -> None:
        """Note that a message which has kept permits is to be claimed again."""
        if call is not None and self.of_task(mailbox, call) is not None:
            for limiter in self._held(mailbox, call, call.permits):
                limiter.unclaimed += 1

    def left(self, mailbox: int, call: Limitable | None, *, was_claimed: bool, keeps: int = 0) -> Limitable | None:
        """End the permits of a message, but for that of ``keeps``. Return it with the permits that it has then."""
        if call is None or not call.permits or self.of_task(mailbox, call) is None:
            return call
        for limiter in self._held(mailbox, call, call.permits & ~keeps):
            self._end(limiter, was_claimed=was_claimed)
        return call._replace(permits=call.permits & keeps)

    def waits_at(self, mailbox: int, rank: int, pos: float, seq: int, task: str, key: str | None) -> Limitable | None:
        """Return the message with its permits if it waits at a limiter, None if it does not."""
        place = (mailbox, task, "" if key is None else f"={key}", rank, pos, seq)
        for name, permits in self._work.rows(sql.WAITS_AT, place):
            return Limitable(task, key if name else None, None, permits)
        return None

    def leave(self, mailbox: int, rank: int, pos: float, seq: int, task: str, key: str | None) -> bool:
        """Take a message away from the limiter at which it waits. Return False if it waits at none."""
        found = self.waits_at(mailbox, rank, pos, seq, task, key)
        if found is None:
            return False
        limiter = self._limiter(mailbox, task, found.key)
        self._work.execute(sql.FORGET_WAITING, (*limiter.place, rank, pos, seq))
        limiter.waiting -= 1
        self._touched[limiter.place] = limiter
        self._work.delta(mailbox).waiting -= 1
        self.left(mailbox, Limitable(task, key, None, found.permits), was_claimed=False)
        return True

    def purge(self, mailbox: int) -> None:
        """Forget all messages of a mailbox but the dead ones, which may have permits."""
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
        for permit, key in ((KEY, call.key), (TASK, None)):
            if permits & permit and (limiter := self._limiter(mailbox, call.task, key)).used:
                yield limiter

    def _end(self, limiter: StoredLimiter, *, was_claimed: bool) -> None:
        limiter.end(was_claimed=was_claimed)
        if limiter.waiting:
            self._touched[limiter.place] = limiter

    # ------------------------------------------------------------------------------------------------------ limiters

    def open_due(self) -> None:
        """Let limiters give permits whose instant has come."""
        for place in self._work.rows(sql.OPENED, (self._work.wall, AT_ONCE)):
            limiter = self._limiter(place[0], place[1], place[2][1:] if place[2] else None)
            self._touched[limiter.place] = limiter
        self._is_opened = True

    def give(self) -> None:
        """Give the permits that there are to the messages that wait for them, the first by priority and place."""
        while self._touched:
            _, limiter = self._touched.popitem()
            self._let_in(limiter)

    def _let_in(self, limiter: StoredLimiter) -> None:
        wall = self._work.wall
        state = self.of_mailbox(limiter.mailbox).get(limiter.task) or LimitState(limiter.task, TaskLimits())
        most, rate = _bounds(state, limiter)
        opens_at = limiter.opens_at(most, rate, wall)
        while limiter.waiting and opens_at <= wall and self._left:
            many = self._left if rate is None else min(self._left, rate.burst)
            many = many if most is None else min(many, most - limiter.used)
            given = []
            for row in self._work.rows(sql.FIRST_WAITING, (*limiter.place, many)):
                if opens_at <= wall:
                    given.append(row)
                    limiter.give()
                    opens_at = limiter.opens_at(most, rate, wall)
            self._take(limiter, given, state)
        limiter.due = None if not limiter.waiting or opens_at == math.inf else max(opens_at, wall)

    def _take(self, limiter: StoredLimiter, given: list[tuple[Any, ...]], state: LimitState) -> None:
        """Take messages that have got their permits away from their limiter."""
        self._left -= len(given)
        limiter.waiting -= len(given)
        self._work.delta(limiter.mailbox).waiting -= len(given)
        self._work.execute(sql.TAKE_WAITING, (*limiter.place, *given[-1][:3]))
        for rank, pos, seq, permits in given:
            call = Limitable(limiter.task, limiter.key, None, permits | limiter.permit)
            self.enter(limiter.mailbox, rank, pos, seq, call, state)

    def _limiter(self, mailbox: int, task: str, key: str | None = None) -> StoredLimiter:
        place = (mailbox, task, "" if key is None else f"={key}")
        found = self._limiters.get(place)
        if found is None:
            found = self._limiters[place] = StoredLimiter(mailbox=mailbox, task=task, key=key)
            for used, unclaimed, spent, waiting, due, idle_at in self._work.rows(sql.LIMITER, place):
                found.used, found.unclaimed, found.waiting, found.due = used, unclaimed, waiting, due
                found.spent_until = -math.inf if spent is None else spent
                found.row = (used, unclaimed, spent, waiting, due, idle_at)
        return found

    def flush(self) -> None:
        """Give permits, and write the limiters that have changed."""
        self.give()
        work = self._work
        soonest = math.inf
        dropped = set()
        for limiter in self._limiters.values():
            values = limiter.values(work.wall)
            if values == limiter.row:
                continue
            if values is None:
                work.execute(sql.DROP_LIMITER, limiter.place)
                dropped.add((limiter.mailbox, limiter.task))
            else:
                work.execute(sql.WRITE_LIMITER, (*limiter.place, *values))
                self._new += limiter.row is None
                soonest = min(soonest, math.inf if limiter.due is None else limiter.due)
            limiter.row = values
        for mailbox, task in dropped:
            state = self.of_mailbox(mailbox).get(task)
            if state is not None and not _is_set(state):  # it was taken back, and the last permit has ended
                self._write(mailbox, state)
        if self._new:  # as many may go as have come
            work.execute(sql.DROP_IDLE, (work.wall, 2 * self._new))
            self._new = 0
        if self._is_opened:
            self._is_opened = False
            work.opens = work.value(sql.FIRST_OPENING)
        if soonest < math.inf:
            work.opens_by(soonest)

    # ------------------------------------------------------------------------------------------------------- changes

    def change(self, mailbox: int, changes: list[LimitChange]) -> None:
        """Change limits. What waits at a limiter of a changed task becomes ready if it may."""
        work = self._work
        for change in changes:
            before = self.of_mailbox(mailbox).get(change.task) or LimitState(change.task, TaskLimits())
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
            self._write(mailbox, after)
            if change.task == ALL_TASKS:
                work.execute(sql.SET_MOST, (_most(after), mailbox))
                self._changed.add(mailbox)
            work.execute(sql.OPEN_ALL, (work.wall, mailbox, change.task))
            self.open_due()

    def _write(self, mailbox: int, state: LimitState) -> None:
        """Write the limits of a task, or delete them where nothing is left of them."""
        work = self._work
        states = dict(self.of_mailbox(mailbox))
        states.pop(state.task, None)
        if _is_set(state) or work.rows(sql.ANY_LIMITER, (mailbox, state.task)):
            states[state.task] = state
            values = (mailbox, state.task, _text_of(state.limits), state.paused, state.concurrency)
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
        """Return what is limited."""
        self.flush()
        used = {task: (running, waiting) for task, running, waiting in self._work.rows(sql.USED_BY_TASK, (mailbox,))}
        in_flight = self._work.counts(mailbox)[2] + self._work.delta(mailbox).in_flight
        found = []
        for task, state in sorted(self.of_mailbox(mailbox).items()):
            running, waiting = used.get(task, (0, 0))
            if _is_set(state):
                running = in_flight if task == ALL_TASKS else running
                found.append(replace(state, running=running, waiting=waiting))
        return found


def change_limits(work: UnitOfWork, commands: list[ChangeLimits]) -> None:
    """Change the limits of tasks and mailboxes."""
    for command in commands:
        work.limits = work.limits or WorkLimits(work, {})
        work.limits.change(command.mailbox, command.changes)


def list_limits(work: UnitOfWork, commands: list[ListLimits]) -> None:
    """List what is limited, with the permits that are out and the messages that wait."""
    for command in commands:
        command.result = [] if work.limits is None else work.limits.states(command.mailbox)


def _is_set(state: LimitState) -> bool:
    return state.paused or state.concurrency is not None or state.limits != TaskLimits()


def _most(state: LimitState) -> int | None:
    """Return the concurrency that holds, 0 while it is paused."""
    return 0 if state.paused else state.most


def _bounds(state: LimitState, limiter: StoredLimiter) -> tuple[int | None, Rate | None]:
    """Return the concurrency and the rate of a limiter."""
    limits = state.limits
    return (_most(state), limits.rate) if limiter.key is None else (limits.key_concurrency, limits.key_rate)


def _text_of(limits: TaskLimits) -> str:
    rates = [None if rate is None else (rate.limit, rate.per, rate.burst) for rate in (limits.rate, limits.key_rate)]
    return json.dumps([limits.concurrency, limits.key_concurrency, limits.blocks, *rates])


def _limits_of(text: str) -> TaskLimits:
    concurrency, key_concurrency, blocks, *rates = json.loads(text)
    rate, key_rate = (None if each is None else Rate(*each) for each in rates)
    return TaskLimits(concurrency, rate, key_concurrency, key_rate, Blocks(blocks))
