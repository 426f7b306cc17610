"""Batches on their way: each becomes one call of the library, and its results are given out.

Operations of a lost call that must be done are retried with the next call, which also undoes the claims of the lost one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mainspring.core import clock, random
from mainspring.core.loggers import Logger
from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.redis.commands import MICRO, OPERATIONS, Claim, UndoLostClaims, are_alike, joined, keys_of
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mainspring.mailbox.batcher import Command
    from mainspring.mailbox.redis.client import Client
    from mainspring.mailbox.redis.commands import Argument

MOST_ARGUMENTS: Final = 50_000
"""Of one call, unless a single operation has more: the server serves no other client meanwhile."""
_log = Logger("mainspring.mailbox")


@dataclass(eq=False, slots=True)
class FunctionCall:
    """One call of the library for the mailbox ``name``."""

    name: str
    keys: list[bytes]
    leased_at: float = 0.0
    """The instant (anyio's clock) just before the call."""
    waiter: Callable[[int], str] = lambda _: ""
    """Returns the name on the list of waiters for a receive that wants leases of that many microseconds."""
    arguments: list[Argument] = field(default_factory=list)
    failed: list[Command] = field(default_factory=list)
    """The commands that failed on the server."""
    last_claim: int = 0
    """When the last of its claims was made."""
    _groups: list[Sequence[Command]] = field(default_factory=list)
    _others: dict[str, int] = field(default_factory=dict)

    def number(self, name: str) -> int:
        """Return the number of another mailbox of the call; 0 is this one."""
        if name == self.name:
            return 0
        if name not in self._others:
            self._others[name] = len(self._others) + 1
            self.keys += keys_of(name)
        return self._others[name]

    def add(self, group: Sequence[Command]) -> None:
        """Write operations of one kind, which have one result."""
        OPERATIONS[type(group[0])].write(self, group)
        self._groups.append(group)

    def take(self, results: list[Any]) -> tuple[int, int, int]:
        """Give the results out. Return the microseconds until more is due (-1: unknown), the server's time, and the number of
        index entries without a record that were dropped.

        An operation that failed on the server fails alone.
        """
        due, now, dropped, *failures = results[-1]
        for number, message in zip(failures[::2], failures[1::2], strict=True):
            for command in self._groups[number]:
                command.error = MailboxConnectionError(f"the Redis server says: {message.decode('utf-8', 'replace')}")
                self.failed.append(command)
        for group, result in zip(self._groups, results, strict=False):
            if not failures or group[0].error is None:
                OPERATIONS[type(group[0])].take(self, group, result)
            for command in group:
                command.done = True
        return due, now, dropped


def calls_for(
    name: str, keys: tuple[bytes, ...], commands: list[Command], leased_at: float, waiter: Callable[[int], str]
) -> Iterator[FunctionCall]:
    """Yield the calls that do ``commands``, in the order of the operations; as a rule it is one call.

    The callers of one batch do not know of each other, so any order is right. Neighbours of one kind are written as one.
    """
    call = FunctionCall(name, list(keys), leased_at, waiter)
    group: list[Command] = []
    for command in commands if len(commands) == 1 else sorted(commands, key=_order):
        if group and not are_alike(group[0], command):
            call.add(group)
            group = []
            if len(call.arguments) >= MOST_ARGUMENTS:
                yield call
                call = FunctionCall(name, list(keys), leased_at, waiter)
        group.append(command)
    call.add(group)
    yield call


def _order(command: Command) -> int:
    return OPERATIONS[type(command)].order


class Batches:
    """Executes the batches of the mailbox ``name`` for its batcher.

    :param timeout: seconds that a reply may take.
    :param waiter: see :class:`FunctionCall`.
    :param on_due: called with the seconds until the next thing is due.
    :param on_unconfirmed: called when an operation is to be retried with the next call.
    """

    def __init__(
        self,
        name: str,
        client: Client,
        timeout: float,
        *,
        waiter: Callable[[int], str],
        on_due: Callable[[float], None],
        on_unconfirmed: Callable[[], None],
    ) -> None:
        self.watch = Periodic(self._watch)
        """Ends the calls that are not answered in time; runs as long as batches are executed."""
        self.claimant = random.token(96)
        self.clock_offset = 0.0
        """Seconds by which this process's clock is ahead of the server's, at least."""
        self._name = name
        self._keys = keys_of(name)
        self._client = client
        self._timeout = timeout
        self._commands: list[Command] = []
        self._calls: Iterator[FunctionCall] = iter(())
        self._call: FunctionCall | None = None
        self._asked_at = 0.0
        self._waiter = waiter
        self._on_due = on_due
        self._on_unconfirmed = on_unconfirmed
        self._now = clock.loop_clock()
        self._last_claim = 0  # whose answer has come
        self._unconfirmed: list[Command] = []

    @property
    def unconfirmed(self) -> int:
        """The number of operations that are retried with the next call."""
        return len(self._unconfirmed)

    async def execute(self, commands: list[Command]) -> None:
        """Execute commands; if a call fails, its commands and those of the calls behind it get the error from the batcher."""
        if self._unconfirmed:
            commands, self._unconfirmed = [*self._unconfirmed, *commands], []
        self._commands, self._call = commands, None
        self._calls = calls_for(self._name, self._keys, commands, self._now(), self._waiter)
        await self._make_calls(resumed=False)

    async def resume(self) -> None:
        """Continue what was cancelled: the reply, if the call was made, is still to come."""
        if not self._client.awaiting:
            self._keep_unconfirmed()
            raise MailboxConnectionError("the call was cancelled before it was made")
        await self._make_calls(resumed=True)

    async def _make_calls(self, *, resumed: bool) -> None:
        try:
            while (call := self._call or next(self._calls, None)) is not None:
                if resumed:
                    results = await self._client.resume()
                    resumed = False
                else:
                    self._call, self._asked_at = call, self._now()
                    self.watch.wake_by(self._asked_at + self._timeout)
                    results = await self._client.call(call.keys, call.arguments)
                due, then, dropped = call.take(results)
                self._call = None
                self.clock_offset = self._asked_at - then / MICRO
                self._last_claim = max(self._last_claim, call.last_claim)
                if due >= 0:
                    self._on_due(due / MICRO)
                if dropped or call.failed:
                    self._note_trouble(call, dropped)
            self._commands = []  # they may be large, and the next ones may be long in coming
        except Exception:
            self._keep_unconfirmed()
            raise

    def _note_trouble(self, call: FunctionCall, dropped: int) -> None:
        if dropped:
            _log.warning(
                "mailbox %r: %d index entries without a message were dropped (a key was deleted)", self._name, dropped
            )
        retried = [command for command in call.failed if OPERATIONS[type(command)].retried]
        for command in retried:
            command.error, command.done = None, False
        if retried:
            self._unconfirmed = joined([*self._unconfirmed, *retried])
            self._on_unconfirmed()

    def _keep_unconfirmed(self) -> None:
        """Keep what a failed call must do for the next call, with an operation that undoes its claims."""
        self._call = None
        retried = [command for command in self._commands if OPERATIONS[type(command)].retried and not command.done]
        self._unconfirmed = joined([*self._unconfirmed, *retried])
        claimed = any(type(command) is Claim and not command.done for command in self._commands)
        if claimed and not any(type(command) is UndoLostClaims for command in self._unconfirmed):
            self._unconfirmed.append(UndoLostClaims(self.claimant, self._last_claim))
        self._commands, self._calls = [], iter(())
        if self._unconfirmed:
            self._on_unconfirmed()

    async def _watch(self, overslept: float) -> float:
        if self._call is None:
            return math.inf
        now, deadline = self._now(), self._asked_at + self._timeout
        if now < deadline:
            return deadline
        await self._client.abandon()
        return now + self._timeout / 10  # where it was about to be made
