"""Batches of operations on their way: each becomes one call of the library, and its results are given out.

What a lost connection has left open is made good with the next call.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mainspring.core import clock, random
from mainspring.core.loggers import Logger
from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.redis.commands import (
    MICRO,
    Acknowledge,
    Claim,
    Operation,
    Put,
    Unheard,
    acknowledge,
    claim_alike,
    claimed_at,
    joined,
    keys_of,
    put_alike,
)
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence

    from mainspring.mailbox.redis.client import Link
    from mainspring.mailbox.redis.commands import Argument

MOST_ARGUMENTS: Final = 50_000
"""Of one call, unless a single operation has more: the server serves nobody else meanwhile."""

O = TypeVar("O", bound=Operation)  # noqa: E741


class Call:
    """One call of the library, being put together for the mailbox ``name``."""

    def __init__(self, name: str, keys: tuple[bytes, ...]) -> None:
        self.keys: list[bytes] = list(keys)
        self.arguments: list[Argument] = []
        self.commands: list[Operation] = []
        self.failed: list[Operation] = []
        """Those of the commands that failed on the server."""
        self._takers: list[tuple[Callable[[Any], None], Sequence[Operation]]] = []
        self._numbers = {name: 0}

    @property
    def full(self) -> bool:
        """Whether it should leave before more is added."""
        return len(self.arguments) >= MOST_ARGUMENTS

    def number(self, name: str) -> int:
        """The number of another mailbox of the call."""
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            self.keys += keys_of(name)
        return self._numbers[name]

    def add(self, taker: Callable[[Any], None], commands: Sequence[Operation]) -> None:
        """What takes the result of the operation that was just written, which is that of these commands."""
        self._takers.append((taker, commands))
        self.commands += commands

    def take(self, results: list[Any]) -> tuple[int, int, int]:
        """Give the results out. Return in how many microseconds the next thing is due (-1: not known), the server's time, and
        how many index entries without a record were dropped.

        An operation that failed on the server is the error of its own commands, and nothing to the others.
        """
        due, now, dropped, *failures = results[-1]
        errors: dict[int, bytes] = dict(zip(failures[::2], failures[1::2], strict=True)) if failures else {}
        for number, (taker, commands) in enumerate(self._takers):
            if number in errors:
                self._fail(commands, errors[number])
            else:
                taker(results[number])
        for command in self.commands:
            command.done = True
        return due, now, dropped

    def _fail(self, commands: Sequence[Operation], error: bytes) -> None:
        for command in commands:
            command.error = MailboxConnectionError(f"the Redis server says: {error.decode('utf-8', 'replace')}")
        self.failed += commands


def calls(
    name: str, keys: tuple[bytes, ...], commands: list[Operation], leased_at: float, waiter: Callable[[int], str]
) -> Iterator[Call]:
    """The calls that do ``commands``: what is alike together, in the order of their turns, as a rule all in one call.

    The callers of one batch do not know of each other, so any order is right; this one serves all best.
    """
    call = Call(name, keys)
    if len(commands) == 1 and type(commands[0]) not in {
        Acknowledge,
        Claim,
    }:  # what comes one by one costs its caller least
        commands[0].write(call.arguments, call.number)
        call.add(commands[0].take, commands)
        yield call
        return
    for write in _writers(commands, leased_at, waiter):
        if call.full:
            yield call
            call = Call(name, keys)
        write(call)
    yield call


def _writers(
    commands: list[Operation], leased_at: float, waiter: Callable[[int], str]
) -> Iterator[Callable[[Call], None]]:
    turns: dict[int, list[Operation]] = {}
    for command in commands:
        turns.setdefault(command.turn, []).append(command)
    for turn in sorted(turns):
        some = turns[turn]
        if turn == Acknowledge.turn:
            yield _acks(some)
        elif turn == Put.turn:
            yield from _puts(some)
        elif turn == Claim.turn:
            for claims in _alike(some, lambda claim: claim.visibility):
                yield _claims(claims, leased_at, waiter)
        else:
            yield from map(_single, some)


def _single(command: Operation) -> Callable[[Call], None]:
    def write(call: Call) -> None:
        command.write(call.arguments, call.number)
        call.add(command.take, (command,))

    return write


def _acks(acks: list[Any]) -> Callable[[Call], None]:
    return lambda call: call.add(acknowledge(acks, call.arguments), acks)


def _claims(claims: list[Any], leased_at: float, waiter: Callable[[int], str]) -> Callable[[Call], None]:
    return lambda call: call.add(claim_alike(claims, leased_at, waiter, call.arguments), claims)


def _puts(puts: list[Any]) -> Iterator[Callable[[Call], None]]:
    for kind, some in _by(puts, lambda put: put.kind):
        if kind is None or len(some) == 1:
            yield from map(_single, some)
        else:
            yield _put_alike(some)


def _put_alike(puts: list[Any]) -> Callable[[Call], None]:
    return lambda call: call.add(put_alike(puts, call.arguments), puts)


def _by(commands: Iterable[Any], key: Callable[[Any], Hashable]) -> Iterator[tuple[Hashable, list[Any]]]:
    """Neighbours that are alike, as they come: sends keep their order."""
    last: Hashable = None
    run: list[Any] = []
    for command in commands:
        kind = key(command)
        if run and kind != last:
            yield last, run
            run = []
        run.append(command)
        last = kind
    if run:
        yield last, run


def _alike(commands: list[Any], key: Callable[[Any], Hashable]) -> Iterator[list[Any]]:
    """All that are alike, wherever they stand."""
    found: dict[Hashable, list[Any]] = {}
    for command in commands:
        found.setdefault(key(command), []).append(command)
    return iter(found.values())


_log = Logger("mainspring.mailbox")


class Batches:
    """What executes for the batcher of the mailbox ``name``.

    :param timeout: seconds that an answer may take.
    :param waiter: as whom a receive that wants leases of so many microseconds is to be put on the list of waiters.
    :param due_in: told in how many seconds the next thing is due.
    :param owing: told that something is owed, which leaves with the next call.
    """

    def __init__(
        self,
        name: str,
        link: Link,
        timeout: float,
        *,
        waiter: Callable[[int], str],
        due_in: Callable[[float], None],
        owing: Callable[[], None],
    ) -> None:
        self.watch = Periodic(self._watch)
        """Runs as long as batches are executed: it ends the calls that are not answered in time."""
        self.claimant = random.token(96)
        self._name = name
        self._keys = keys_of(name)
        self._link = link
        self._timeout = timeout
        self._commands: list[Operation] = []
        self._calls: Iterator[Call] = iter(())
        self._call: Call | None = None
        self._asked_at = 0.0
        self._waiter = waiter
        self._due_in = due_in
        self._owing = owing
        self._now = clock.loop_clock()
        self._heard = 0  # when the last claim was made whose answer has come
        self._owed: list[Operation] = []
        self._ahead = 0.0  # by how much this process's clock is ahead of the server's, at least

    @property
    def unconfirmed(self) -> int:
        """How many operations of calls that failed are done with the next call."""
        return len(self._owed)

    async def execute(self, commands: list[Operation]) -> None:
        """Have commands executed; those whose call fails, or was not made, get its error from the batcher."""
        if self._owed:
            commands, self._owed = [*self._owed, *commands], []
        self._commands, self._call = commands, None
        self._calls = calls(self._name, self._keys, commands, self._now(), self._waiter)
        await self._go_on(self._link.call)

    async def resume(self) -> None:
        """Go on with what was cancelled: its answer, if there is to be one, is still to come."""
        if not self._link.awaiting:
            self._owe()
            raise MailboxConnectionError("the call was cancelled before it was made")
        await self._go_on(lambda *_: self._link.resume())

    async def _go_on(self, ask: Callable[..., Awaitable[list[Any]]]) -> None:
        try:
            while (call := self._call or next(self._calls, None)) is not None:
                if self._call is None:
                    self._call, self._asked_at = call, self._now()
                    self.watch.wake_by(self._asked_at + self._timeout)
                self._take(call, await ask(call.keys, call.arguments))
                self._call, ask = None, self._link.call
            self._commands = []  # they may be large, and the next ones may be long in coming
        except Exception:
            self._owe()
            raise

    def _take(self, call: Call, results: list[Any]) -> None:
        due, then, dropped = call.take(results)
        if dropped:
            _log.warning(
                "mailbox %r: %d index entries without a message were dropped (a key was deleted)", self._name, dropped
            )
        if again := [command for command in call.failed if command.owed]:
            for command in again:
                command.error, command.done = None, False
            self._owed = joined([*self._owed, *again])
            self._owing()
        self._ahead = self._asked_at - then / MICRO
        for claim in call.commands:
            if type(claim) is Claim and claim.error is None:
                for delivery in (*claim.result[-1:], *claim.unreadable[-1:]):
                    self._heard = max(self._heard, claimed_at(delivery.receipt_handle))
        if due >= 0:
            self._due_in(due / MICRO)

    def _owe(self) -> None:
        """A call has failed: what is to be done all the same goes with the next, and what takes back its claims."""
        self._call = None
        self._owed = joined(
            [*self._owed, *(command for command in self._commands if command.owed and not command.done)]
        )
        unheard = any(type(command) is Claim and not command.done for command in self._commands)
        if unheard and not any(type(command) is Unheard for command in self._owed):
            self._owed.append(Unheard(self.claimant, self._heard))
        self._commands, self._calls = [], iter(())
        if self._owed:
            self._owing()

    async def _watch(self, overslept: float) -> float:
        if self._call is None:
            return math.inf
        now, patience = self._now(), self._asked_at + self._timeout
        if now < patience:
            return patience
        await self._link.abandon()
        return now + self._timeout / 10  # where it was about to be made

    def instant(self, micros: int) -> float:
        """An instant of the server's on this process's clock, or a little sooner: by when the last answer was asked for."""
        return min(self._now(), micros / MICRO + self._ahead)
