"""``StoreHealth``: whether the mailbox of a loop answers, by all that it is asked: receives, renewals and settlements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

from mainspring.errors import MailboxConnectionError, MainspringError, describe
from mainspring.events import ReceiveFailed, ReceiveRecovered
from mainspring.runtime.cancellation import SpuriousAsError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.runtime.interval import Alarms

SILENCE = 10.0
"""Seconds after the last failure of a renewal or a settlement when the mailbox is asked whether it is back."""


class StoreHealth:
    """What the last answers, or the lack of them, say.

    While receives fail, only an answered receive shows that work can be claimed again. A loop whose slots are all taken does
    not receive: then its renewals and settlements count, and any answer to them ends the trouble. It can be that none of them
    is tried again: a lease is lost and its handler goes on, or the loop pauses or is in a long poll. Then ``ask`` is called
    until it is answered.
    """

    def __init__(self, name: str, ask: Callable[[], Awaitable[object]], dispatcher: Dispatcher, alarms: Alarms) -> None:
        self._name = name
        self._ask = ask
        self._dispatcher = dispatcher
        self._alarms = alarms
        self._alarm = alarms.alarm(self._look)
        self._ask_at = math.inf
        self.answers = True
        """False from a failure until the mailbox answers again: then call :meth:`answered` or :meth:`received`."""
        self.failed_receives = 0
        """How many receives have failed since one was last answered, whichever receiver made them."""
        self._receiving: str | None = None
        self._other: str | None = None
        self._told_of_silence = False

    @property
    def trouble(self) -> str | None:
        """The reason why the mailbox does not answer, or None."""
        return self._receiving or self._other

    def failed(self, error: Exception) -> None:
        """Note that a renewal or a settlement has failed. Only a lost connection says something of the mailbox."""
        if isinstance(error, (MailboxConnectionError, OSError)):
            self._other = describe(error)
            self.answers = False
            self._ask_at = anyio.current_time() + SILENCE
            self._alarm.wake_by(self._ask_at)

    def fell_silent(self, error: MailboxConnectionError, retry_in: float) -> None:
        """Note that the mailbox's server was found not to answer, and tell of it as of a failed receive, unless one has."""
        self.failed(error)
        if not self.failed_receives and not self._told_of_silence:
            self._told_of_silence = True
            self._dispatcher.dispatch(ReceiveFailed(self._name, describe(error), retry_in))

    def answered(self) -> None:
        """Note that the mailbox has answered."""
        if self._receiving is None:
            self.received()
        self._other = None

    def receive_failed(self, error: Exception, retry_in: float) -> None:
        """Note that a receive has failed."""
        self._receiving = describe(error)
        self.answers = False
        self.failed_receives += 1
        first = self.failed_receives == 1 and not self._told_of_silence
        self._dispatcher.dispatch(ReceiveFailed(self._name, self._receiving, retry_in, first))

    def received(self) -> None:
        """Note that a receive was answered (possibly with nothing)."""
        failures = self.failed_receives + self._told_of_silence
        self.failed_receives, self._told_of_silence = 0, False
        self._receiving = self._other = None
        self.answers = True
        if failures:  # also of another receiver, or of a receive that a pause has ended
            self._dispatcher.dispatch(ReceiveRecovered(self._name, failures))

    def receives_end(self) -> None:
        """Note that receiving has ended or pauses. If the last receive failed, ask whether the mailbox answers again."""
        if self._receiving is not None:
            self._other, self._receiving = self._receiving, None
            self._ask_at = anyio.current_time() + SILENCE
            self._alarm.wake_by(self._ask_at)

    async def probe(self) -> None:
        """Ask the mailbox. Raise if it does not answer within ``SILENCE`` seconds."""
        with anyio.fail_after(SILENCE):
            await self._ask()

    def _look(self, overslept: float) -> float:
        if self._other is None:
            return math.inf
        if anyio.current_time() >= self._ask_at:
            self._ask_at = anyio.current_time() + SILENCE  # by then this one has ended
            self._alarms.start_soon(self._ask_again)
        return self._ask_at

    async def _ask_again(self) -> None:
        try:
            async with SpuriousAsError():
                await self.probe()
        except (MainspringError, OSError) as error:
            self.failed(error)
        else:
            self.answered()
