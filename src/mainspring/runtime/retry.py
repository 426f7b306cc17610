"""The one retry loop with backoff: count failures in a row, and wait between tries.

    retries = Retries(initial=0.1, maximum=5.0)
    while True:
        try:
            await attempt()
        except MailboxError:
            await retries.pause()
        else:
            retries.succeeded()

The loop itself stays with its owner, who knows which errors are worth another try, and who hears of them.
"""

from __future__ import annotations

import anyio

from mainspring.core import random
from mainspring.policies import backoff


class Retries:
    """Failures in a row of one undertaking, and the waits between its tries.

    The waits are random: up to ``initial`` seconds after the first failure, twice as long after each further one, and never
    above ``maximum``. So clients that lost their server together do not come back together.
    """

    __slots__ = ("_initial", "_maximum", "failures")

    def __init__(self, *, initial: float, maximum: float) -> None:
        self._initial = initial
        self._maximum = maximum
        self.failures = 0
        """How many tries have failed since one succeeded."""

    def failed(self) -> float:
        """Count a failure. Return the seconds to wait before the next try."""
        self.failures += 1
        return backoff(
            self.failures, initial=self._initial, maximum=self._maximum, factor=2.0, jitter="full", rng=random.rng()
        )

    async def pause(self) -> None:
        """Count a failure, and wait before the next try."""
        await anyio.sleep(self.failed())

    def succeeded(self) -> int:
        """Forget the failures. Return how many there were."""
        failures, self.failures = self.failures, 0
        return failures
