"""Retention: dead letters are purged once they are older than ``DeadLetterPolicy(keep=…)``. Each loop of a mailbox does so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio

from mainspring.core import clock, random
from mainspring.core.loggers import Logger
from mainspring.errors import MailboxError, describe
from mainspring.runtime.interval import Periodic
from mainspring.validation import counted

if TYPE_CHECKING:
    from mainspring.mailbox.mailbox import Mailbox

SWEEP_EVERY: Final = 3_600.0
"""Seconds between two sweeps at most; of dead letters that are kept for a shorter time, half of that time."""
FIRST_WITHIN: Final = 60.0
"""Seconds within which the first sweep of a run is made, at random: the workers of a deploy start together."""
PAGE: Final = 1_000

_log = Logger("mainspring.mailbox")


class Retention:
    """Purges the dead letters of a mailbox that are older than ``keep`` seconds."""

    def __init__(self, name: str, mailbox: Mailbox[Any, Any], keep: float) -> None:
        self._name = name
        self._mailbox = mailbox
        self._keep = keep
        self._every = min(SWEEP_EVERY, max(1.0, keep / 2))
        self._failed = False

    async def run(self) -> None:
        """Sweep now and then, until cancelled."""
        first = anyio.current_time() + random.rng().uniform(0, min(FIRST_WITHIN, self._every))
        await Periodic(self._step, first=first).run_on(self._every)

    async def _step(self, overslept: float) -> float:
        try:
            purged = await self.sweep()
        except (MailboxError, OSError) as error:
            if not self._failed:
                _log.warning("%s: old dead letters could not be purged: %s", self._name, describe(error))
            self._failed = True
        else:
            self._failed = False
            if purged:
                _log.info("%s: %s purged, kept for %g s", self._name, counted(purged, "dead letter"), self._keep)
        return anyio.current_time() + self._every

    async def sweep(self) -> int:
        """Purge dead letters that are too old, the oldest first. Return how many."""
        backend, purged = self._mailbox.backend, 0
        while True:
            page = await backend.dead_letters(PAGE, None)
            until = clock.utc_now().timestamp() - self._keep
            old = [delivery.message_id for delivery, _, died_at in page if died_at < until]
            if not old:
                return purged
            purged += await backend.purge_dead_letters(old)
            if len(old) < PAGE:
                return purged
