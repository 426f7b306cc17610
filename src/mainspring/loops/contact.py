"""``Contact``: whether the mailbox of a loop answers, by all that it is asked: receives, renewals and settlements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

from mainspring.errors import MailboxConnectionError, MainspringError, describe
from mainspring.periodic import Periodic
from mainspring.scope import nobody_asked

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SILENCE = 10.0
"""Seconds after the last failure of a renewal or a settlement when the mailbox is asked whether it is back."""


class Contact:
    """What the last answers, or the lack of them, say.

    While receives fail, nothing else shows that work can be claimed again. A loop whose places are all taken does not
    receive: then its renewals and settlements are what tells, and any answer ends their trouble. Where none of them is tried
    again, as with a lost lease whose handler goes on, or in a pause or a long poll, ``ask`` is called until it is answered.
    """

    def __init__(self, ask: Callable[[], Awaitable[object]]) -> None:
        self._ask = ask
        self._timer = Periodic(self._look)
        self._ask_at = math.inf
        self.failed_receives = 0
        """How many receives have failed since one was last answered, whichever receiver made them."""
        self._receiving: str | None = None
        self._other: str | None = None

    @property
    def trouble(self) -> str | None:
        """Why the mailbox does not answer, or None."""
        return self._receiving or self._other

    def failed(self, error: Exception) -> None:
        """A renewal or a settlement has failed; errors of other kinds than a lost connection say nothing of the mailbox."""
        if isinstance(error, (MailboxConnectionError, OSError)):
            self._other = describe(error)
            self._ask_at = anyio.current_time() + SILENCE
            self._timer.wake_by(self._ask_at)

    def made(self) -> None:
        """It has answered."""
        self._other = None

    def receive_failed(self, error: Exception) -> bool:
        """A receive has failed; whether it is the first one since one was answered."""
        self._receiving = describe(error)
        self.failed_receives += 1
        return self.failed_receives == 1

    def received(self) -> int:
        """A receive was answered, be it with nothing; how many had failed before."""
        failures, self.failed_receives = self.failed_receives, 0
        self._receiving = self._other = None
        return failures

    async def run(self) -> None:
        """Ask the mailbox where nothing else does, until cancelled."""
        await self._timer.run()

    async def _look(self, overslept: float) -> float:
        if self._other is None:
            return math.inf
        if anyio.current_time() >= self._ask_at:
            self._ask_at = anyio.current_time() + SILENCE
            try:
                with anyio.fail_after(SILENCE):
                    await self._ask()
            except (MainspringError, OSError) as error:
                self.failed(error)
            except anyio.get_cancelled_exc_class():
                if not await nobody_asked():
                    raise
            else:
                self.made()
                return math.inf
        return self._ask_at
