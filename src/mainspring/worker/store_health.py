"""``StoreHealth``: whether the mailbox of a loop answers, by all that it is asked: receives, renewals and settlements.

``OpenReceive``: what a receiver asks of the mailbox, and how long the answer is overdue.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from mainspring.core.tracebacks import where
from mainspring.errors import MailboxConnectionError, MainspringError, describe
from mainspring.events import ReceiveFailed, ReceiveRecovered
from mainspring.runtime.cancellation import SpuriousAsError
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from mainspring.errors import HandlerStalledError
    from mainspring.events import Dispatcher
    from mainspring.worker.slots import Admission

T = TypeVar("T")

ALLOWANCE = 5.0
"""Seconds past its wait that a receive may take before its answer is overdue: what a busy server may need."""

SILENCE = 10.0
"""Seconds after the last failure of a renewal or a settlement when the mailbox is asked whether it is back."""


class StoreHealth:
    """What the last answers, or the lack of them, say.

    While receives fail, nothing else shows that work can be claimed again. A loop whose slots are all taken does not
    receive: then its renewals and settlements are what tells, and any answer ends their trouble. Where none of them is tried
    again, as with a lost lease whose handler goes on, or in a pause or a long poll, ``ask`` is called until it is answered.
    """

    def __init__(self, name: str, ask: Callable[[], Awaitable[object]], dispatcher: Dispatcher) -> None:
        self._name = name
        self._ask = ask
        self._dispatcher = dispatcher
        self._timer = Periodic(self._look)
        self._ask_at = math.inf
        self.failed_receives = 0
        """How many receives have failed since one was last answered, whichever receiver made them."""
        self._receiving: str | None = None
        self._other: str | None = None
        self._told_of_silence = False

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

    def fell_silent(self, error: MailboxConnectionError, retry_in: float) -> None:
        """Note that the mailbox's server was found not to answer, and tell of it as of a failed receive, unless one has."""
        self.failed(error)
        if self._receiving is None and not self._told_of_silence:
            self._told_of_silence = True
            self._dispatcher.dispatch(ReceiveFailed(self._name, describe(error), retry_in))

    def made(self) -> None:
        """It has answered."""
        self._other = None
        if self._told_of_silence and self._receiving is None:
            self.received()

    def receive_failed(self, error: Exception, retry_in: float) -> None:
        """A receive has failed."""
        self._receiving = describe(error)
        self.failed_receives += 1
        first = self.failed_receives == 1 and not self._told_of_silence
        self._dispatcher.dispatch(ReceiveFailed(self._name, self._receiving, retry_in, first))

    def received(self) -> None:
        """A receive was answered (possibly with nothing)."""
        failures = self.failed_receives + self._told_of_silence
        self.failed_receives, self._told_of_silence = 0, False
        self._receiving = self._other = None
        if failures:  # also of another receiver, or of a receive that a pause has ended
            self._dispatcher.dispatch(ReceiveRecovered(self._name, failures))

    async def run(self) -> None:
        """Ask the mailbox where nothing else does, until cancelled."""
        await self._timer.run()

    async def _look(self, overslept: float) -> float:
        if self._other is None:
            return math.inf
        if anyio.current_time() >= self._ask_at:
            self._ask_at = anyio.current_time() + SILENCE
            try:
                async with SpuriousAsError():
                    with anyio.fail_after(SILENCE):
                        await self._ask()
            except (MainspringError, OSError) as error:
                self.failed(error)
            else:
                self.made()
                return math.inf
        return self._ask_at


class OpenReceive:
    """What one receiver asks of the mailbox, one call after the other, as one subject of the watchdog.

    It is judged by how long an answer is overdue: never while nothing is asked, while the receive waits as it was told to, or
    while the loop is paused or told to stop. A stall cancels ``scope``, in which the receiver runs; the receiver then goes on
    with another claim, so that the watchdog can tell the two apart.
    """

    message_id: str | None = None

    def __init__(self, name: str, mailbox: str, admission: Admission, clock: Callable[[], float]) -> None:
        self.name = name
        self.scope = anyio.CancelScope()
        self.error: MailboxConnectionError | None = None
        """Why it was cancelled by the watchdog, unless the answer came in spite of that."""
        self._mailbox = mailbox
        self._admission = admission
        self._clock = clock
        self._due = math.inf
        self._call: Coroutine[Any, Any, Any] | None = None

    async def ask(self, call: Coroutine[Any, Any, T], wait: float) -> T:
        """Await ``call``, whose answer is due in ``wait`` seconds."""
        self._call = call
        self._due = self._clock() + wait + ALLOWANCE
        try:
            answer = await call
        finally:
            self._due = math.inf
            self._call = None
        self.error = None
        return answer

    @property
    def done(self) -> bool:
        """Whether no answer is owed that the loop still wants."""
        return self._call is None or not self._admission.open

    def beat_age(self) -> float:
        """Seconds for which the answer is overdue."""
        return max(0.0, self._clock() - self._due)

    def where(self) -> str:
        """The line that the call stands on."""
        if self._call is None:
            return ""
        return f"a receive that mailbox {self._mailbox!r} has not answered: {where(self._call)}"

    def stall(self, error: HandlerStalledError) -> None:
        """Cancel it; it counts as a failed receive."""
        self.error = MailboxConnectionError(
            f"mailbox {self._mailbox!r} did not answer a receive, which was overdue by {self.beat_age():.0f} s and is cancelled"
        )
        self.error.__cause__ = error
        self.scope.cancel()
