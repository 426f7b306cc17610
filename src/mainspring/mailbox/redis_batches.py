"""Has the batches of one mailbox object done by the script, and makes good what a lost connection has left open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mainspring import clock, entropy
from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.redis_calls import calls, keys_of
from mainspring.mailbox.redis_commands import Claim, Unheard
from mainspring.mailbox.redis_records import MICRO, claimed_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.mailbox.redis_commands import Operation
    from mainspring.mailbox.redis_link import Link


class Batches:
    """What executes for the batcher of the mailbox ``name``.

    :param waiter: as whom a receive that wants leases of so many microseconds is to be put on the list of waiters.
    :param due_in: told in how many seconds the next thing is due.
    """

    def __init__(self, name: str, link: Link, *, waiter: Callable[[int], str], due_in: Callable[[float], None]) -> None:
        self.claimant = entropy.token(96)
        self._name = name
        self._keys = keys_of(name)
        self._link = link
        self._waiter = waiter
        self._due_in = due_in
        self._now = clock.loop_clock()
        self._heard = 0  # when the last claim was made whose answer has come
        self._owed: list[Operation] = []
        self._ahead = 0.0  # by how much this process's clock is ahead of the server's, at least

    async def execute(self, commands: list[Operation]) -> None:
        """Have commands executed; those whose call fails, or was not made, get its error from the batcher."""
        if self._owed:
            commands, self._owed = [*self._owed, *commands], []
        try:
            for call in calls(self._name, self._keys, commands, self._now(), self._waiter):
                began = self._now()
                due, then = call.take(await self._link.call(call.keys, call.arguments))
                self._ahead = began - then / MICRO
                for claim in call.commands:
                    if type(claim) is Claim:
                        for delivery in (*claim.result[-1:], *claim.unreadable[-1:]):
                            self._heard = max(self._heard, claimed_at(delivery.receipt_handle))
                if due >= 0:
                    self._due_in(due / MICRO)
        except MailboxConnectionError:
            self._owed = [command for command in commands if command.owed and not command.done]
            if any(type(command) is Claim and not command.done for command in commands):
                self._owe_unheard()
            raise

    def _owe_unheard(self) -> None:
        """The call may have claimed: what it did goes back with the next one."""
        if not any(type(command) is Unheard for command in self._owed):
            self._owed.append(Unheard(self.claimant, self._heard))

    def instant(self, micros: int) -> float:
        """An instant of the server's on this process's clock, or a little sooner: by when the last answer was asked for."""
        return min(self._now(), micros / MICRO + self._ahead)
