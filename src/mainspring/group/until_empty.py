"""``UntilEmpty``: ends a group's run once nothing is left in its mailboxes (``run(until_empty=True)``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from mainspring.errors import MainspringError
from mainspring.events import MessageFinished
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.worker.runnable import Steerable

SOONEST = 0.05
LATEST = 5.0
"""Seconds between looks while nothing of the group's own ends: what is left is delayed, or in other processes' hands."""
ANSWER = 10.0
"""Seconds that a mailbox may take to say how many messages it has."""


class UntilEmpty:
    """Looks whenever one of the group's messages has ended, and otherwise now and then, less and less often."""

    def __init__(
        self,
        loops: Sequence[Steerable],
        mailboxes: Sequence[Mailbox[Any, Any]],
        dispatcher: Dispatcher,
        empty: Callable[[], object],
    ) -> None:
        self._loops = loops
        self._mailboxes = mailboxes
        self._dispatcher = dispatcher
        self._empty = empty
        self._pause = SOONEST
        self._ended = 0
        self._timer = Periodic(self._look)

    async def run(self) -> None:
        """Look until everything is empty, then call ``empty()``; cancelled at the latest when the group stops."""
        end = self._dispatcher.subscribe(MessageFinished, self._on_end)
        self._timer.wake_by(anyio.current_time())
        try:
            await self._timer.run()
        finally:
            end()

    def _on_end(self, _: MessageFinished) -> None:
        self._ended += 1
        self._pause = SOONEST
        if not any(loop.in_flight for loop in self._loops):
            self._timer.wake_by(anyio.current_time())

    async def _look(self, _: float) -> float:
        try:
            empty = await self._is_empty()
        except (MainspringError, OSError):  # a store that cannot be reached is not empty; the loops say what is wrong
            empty = False
        if empty:
            self._empty()
        pause, self._pause = self._pause, min(2 * self._pause, LATEST)
        return anyio.current_time() + pause

    async def _is_empty(self) -> bool:
        """True if nothing is left anywhere. It takes two passes, as a handler may fill another mailbox between two looks."""
        ended = self._ended
        for _ in range(2):
            for mailbox in self._mailboxes:
                with anyio.fail_after(ANSWER):
                    if await mailbox.approximate_count() > 0:
                        return False
        return ended == self._ended and not any(loop.in_flight for loop in self._loops)
