"""What ties worker processes to the life of their owner: pipes of which the owner alone holds the other ends.

The kernel closes those when the owner dies, however it dies, and does to the workers what they have asked it to: it kills
them, whatever they are doing. A child that the owner forks must not hold them, or it would keep the workers alive.
"""

from __future__ import annotations

import os

from mainspring.core import process


class Lifeline:
    """One worker's pipe. ``theirs`` is the descriptor that the worker gets."""

    def __init__(self) -> None:
        self.theirs, self._ours = os.pipe()
        process.on_fork(self, Lifeline._forget)

    def given(self) -> None:
        """The worker has its end, or never will."""
        os.close(self.theirs)

    def close(self) -> None:
        """Let go of the worker, which dies of it where it has not ended."""
        process.off_fork(self)  # first: a child forked in between would close what has the number next
        self._forget()

    def _forget(self) -> None:
        os.close(self._ours)
