"""How the receives of one mailbox object claim and wait, and what becomes of what was claimed for one that is gone."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from mainspring.core import clock
from mainspring.core.loggers import Logger
from mainspring.errors import (
    ConfigError,
    MailboxClosedError,
    MailboxConnectionError,
    MainspringError,
    ReceiptHandleExpiredError,
)
from mainspring.mailbox.batcher import Batcher
from mainspring.mailbox.redis.batches import Batches
from mainspring.mailbox.redis.calls import base_of
from mainspring.mailbox.redis.claims import Claim, Leave, Look, Pass, Unclaim, Unlist
from mainspring.mailbox.redis.commands import Bury, Open, Operation
from mainspring.mailbox.redis.connection import ServerError
from mainspring.mailbox.redis.inspection import Recover
from mainspring.mailbox.redis.listener import Listener, Told, Waiters
from mainspring.mailbox.redis.records import UNREADABLE, claimed_at, delivered, micro
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.mailbox.message import Delivery
    from mainspring.mailbox.redis.client import Link
    from mainspring.mailbox.redis.topology import Directory

_log = Logger("mainspring.mailbox")


class Receiving:
    """The receives of the mailbox ``name``, and the batcher by which they, and all other operations, reach the library.

    :param fallback: seconds between two looks of those who wait (see :class:`~mainspring.mailbox.redis.mailbox.RedisMailbox`).
    :param recovery: seconds between two looks for what is to be mended.
    :param usable: whether receives may still have messages; once it is not, what is claimed for them goes back.
    :param on_cancelled: told the ids of messages that somebody has cancelled.
    :param on_silence: told why, when the server has not answered a call in time.
    """

    def __init__(
        self,
        name: str,
        directory: Directory,
        link: Link,
        timeout: float,
        silence: float,
        *,
        fallback: float,
        recovery: float,
        usable: Callable[[], bool],
        on_cancelled: Callable[[list[str]], None],
        on_silence: Callable[[MailboxConnectionError], None],
    ) -> None:
        self.waiters = Waiters(self._pass_on)
        told = Told(
            due=self._due_in, cancelled=on_cancelled, given=self._given, leave=self._leave, lost=self._listener_lost
        )
        link.on_silence = self._fell_silent
        self.listener = Listener(directory, base_of(name), link, self.waiters, told, timeout, silence)
        self.batches = Batches(
            name, link, timeout, waiter=self.listener.waiter, due_in=self._due_in, owing=self._look_soon
        )
        self.batcher: Batcher[Operation] = Batcher(
            self.batches.execute, undo=self._undo, resume=self.batches.resume, name=f"mailbox {name!r}"
        )
        self.sweeper = Periodic(self._look)
        self._recoverer = Periodic(self._recover)
        self._name = name
        self._fallback = fallback
        self._recovery = recovery
        self._shield = anyio.CancelScope(shield=True)
        self._link = link
        self._usable = usable
        self._on_silence = on_silence
        self._probes = False  # the next look is made even if no receive waits
        self._now = clock.loop_clock()

    # ------------------------------------------------------------------------------------------------------ receiving

    async def claim(self, limit: int, visibility: float, wait: float) -> list[Delivery]:
        """What is there for a receive, or comes within ``wait`` seconds."""
        if not wait:
            return await self._claim_once(limit, visibility, waits=False)
        waiters, visible = self.waiters, micro(visibility)
        deadline = self._now() + wait
        self._look_soon()
        waiters.enter(visible)
        turn = False
        found: list[Delivery] = []
        try:
            while True:
                seen = waiters.signals
                try:
                    found = await self._claim_once(limit, visibility, waits=True)
                finally:
                    if not found or waiters.active > 1:
                        self.listener.listed(visible)
                turn = False
                if found or not self._usable():
                    turn = waiters.signals != seen  # called meanwhile: for these, or for more
                    return found
                given = await waiters.wait_for(seen, deadline, visible, self._refuse)
                if given is not None:
                    if self._usable():
                        return [given]
                    self._refuse(given)  # closed meanwhile
                if not self._usable() or (waiters.signals == seen and self._now() >= deadline):
                    return []  # nothing has come; one to whom another's turn was passed looks, and waits on
                turn = True
        finally:
            last = waiters.exit(visible)
            if turn:  # it was called and has not looked
                waiters.forsake()
            if not waiters.active:
                self.listener.leave()
            if last and self.listener.unwanted(visible):
                self._list_again()

    async def _claim_once(self, limit: int, visibility: float, *, waits: bool) -> list[Delivery]:
        while True:
            command = Claim(limit, visibility, self.batches.claimant, waits, self.waiters.parked > 0)
            found: list[Delivery] = await self.batcher.call(command)
            buried = 0
            for delivery in command.unreadable:
                with suppress(ReceiptHandleExpiredError):  # it comes again
                    await self.batcher.call(Bury(delivery, UNREADABLE))
                    buried += 1
            if command.again or (buried and not found):
                continue
            if found and not self._usable():  # closed meanwhile
                self._undo(command)
                return []
            return found

    # ----------------------------------------------------------------------------------------- what goes back or on

    def _undo(self, command: Operation) -> None:
        """A claim whose receiver is gone goes back, before anything else is done."""
        if type(command) is Claim:
            self._refuse(*(command.result or ()), *command.unreadable)

    def _refuse(self, *claimed: Delivery) -> None:
        """What was claimed for a receive here that cannot have it goes back."""
        if claimed:
            self.batcher.post(Unclaim([delivery.receipt_handle for delivery in claimed]))

    def _pass_on(self, count: int) -> None:
        """This process was called for messages that nobody here takes."""
        if self._link.connected and self._usable():
            self.batcher.post(Pass(count))

    def _leave(self, leave: Leave | Unlist) -> None:
        self.batcher.post(leave)

    # ------------------------------------------------------------------------------------------------ while they wait

    def _given(self, strings: list[bytes]) -> None:
        """A message was claimed for a receive that waits here: one has it now, or it goes back."""
        visible, token, value, *few = strings
        leased_at = self.batches.instant(claimed_at(token.decode()))
        more = dict(zip(few[::2], few[1::2], strict=True)) if few else None
        delivery, readable = delivered(token, value, more, leased_at)
        if not readable:
            self.batcher.post(Bury(delivery, UNREADABLE))
        elif not self._usable() or not self.waiters.give(delivery, int(visible)):
            self._refuse(delivery)
        self.waiters.signals += 1  # this process is off the list: who is about to wait looks again
        self._list_again()

    def _list_again(self) -> None:
        """This process may be on the list no more: for those that wait it is put there again."""
        if self.waiters.parked:
            self.batcher.post(Look(self._waiter))

    def _due_in(self, seconds: float) -> None:
        if self.waiters.active:
            self.sweeper.wake_by(self._now() + seconds)

    def _listener_lost(self, silent: bool) -> None:
        """Look at once whether the server is there: no call comes from it meanwhile. If it was silent, look in any case."""
        self._probes = self._probes or silent
        self.sweeper.wake_by(self._now())

    def _fell_silent(self, error: MailboxConnectionError) -> None:
        """A call was not answered in time: receives that are parked raise that now, and not after a call of their own."""
        self.waiters.fail_all(error)
        self._on_silence(error)

    def _look_soon(self) -> None:
        self.sweeper.wake_by(self._now() + self._fallback)

    async def _look(self, overslept: float) -> float:
        """Let what is due by now be done, for the receives that wait for it: the library calls those it is for.

        What is owed goes along, also where nobody waits, or calls any more.
        """
        if not (self.waiters.active or self.batches.unconfirmed or self._probes):
            return float("inf")
        self._probes = False
        again = self._now() + self._fallback
        try:
            await self.batcher.call(Look(self._waiter))
        except MainspringError:
            self.waiters.wake_all()  # unless it was silence, the next call may succeed
        else:
            if not self.listener.live:  # nobody can call
                self.waiters.wake_all()
        return again

    async def open(self) -> None:
        """Make the mailbox known; raises :class:`ConfigError` where the user or its keys do not allow its operations."""
        opening, recover = Open(), Recover(self._recovery)
        try:
            await self.batches.execute([opening])
        except ServerError as error:
            if error.code not in {"NOPERM", "WRONGTYPE"}:
                raise
            opening.result = [f"has no use of it: {error.code} {error.detail}"]
        if opening.error is not None:
            raise opening.error
        if opening.result:
            raise ConfigError(
                f"mailbox {self._name!r}: the user of the URL {', '.join(opening.result)}; grant the commands with ACL SETUSER"
                " (how-to/redis says which), and rename keys that are another program's"
            )
        if not self._name.startswith("~"):  # one for replies lives no longer than those who wait for them
            await self.batches.execute([recover])
            self._recoverer.wake_by(self._now() + self._recovered(recover))

    async def _recover(self, overslept: float) -> float:
        recover = Recover(self._recovery)
        try:
            await self.batcher.call(recover)
        except MailboxClosedError:
            return math.inf
        except MainspringError:  # it is tried again; who uses the mailbox hears of it
            return self._now() + self._recovery
        return self._now() + self._recovered(recover)

    def _recovered(self, recover: Recover) -> float:
        if recover.result is None:
            return self._recovery
        found, again = recover.result
        if found:
            _log.warning(
                "mailbox %r: %d messages or dead letters that no index had are back (a key was deleted)",
                self._name,
                found,
            )
        return float(again)

    def _waiter(self) -> str:
        """As whom this process is on the list for those who wait here: for the one that has waited longest."""
        wanted = self.waiters.wanted
        if wanted is None:
            return ""
        self.listener.listed(wanted)
        return self.listener.waiter(wanted)

    async def keep_time(self) -> None:
        """Run the timers until :meth:`end`, also where all around is cancelled: who cleans up under a shield has waits, too."""
        with self._shield:
            async with anyio.create_task_group() as timers:
                timers.start_soon(self.batches.watch.run)
                timers.start_soon(self.waiters.alarm.run)
                timers.start_soon(self.listener.watch.run)
                timers.start_soon(self._recoverer.run)

    def end(self) -> None:
        """End the timers: there is nothing more to wait for."""
        self._shield.cancel()
