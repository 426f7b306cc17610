"""Has the batches of one mailbox object done by the library, and makes good what a lost connection has left open."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mainspring.core import clock, random
from mainspring.core.loggers import Logger
from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.redis.calls import calls, keys_of
from mainspring.mailbox.redis.claims import Claim, Unheard, joined
from mainspring.mailbox.redis.records import MICRO, claimed_at
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from mainspring.mailbox.redis.calls import Call
    from mainspring.mailbox.redis.client import Link
    from mainspring.mailbox.redis.commands import Operation

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
