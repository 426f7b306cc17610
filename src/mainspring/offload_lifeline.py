"""What ties worker processes to the life of their owner: pipes of which the owner alone holds the other ends.

The kernel closes those when the owner dies, however it dies, and does to the workers what they have asked it to: it kills
them, whatever they are doing. A child that the owner forks must not hold them, or it would keep the workers alive.
"""

from __future__ import annotations

import os
from contextlib import suppress

from mainspring.process import inherited, shared


class _Ends:
    """The ends that this process holds."""

    def __init__(self) -> None:
        self.held: set[int] = set()


class Lifeline:
    """One worker's pipe. ``theirs`` is the descriptor that the worker gets."""

    def __init__(self) -> None:
        self._ends = shared("lifelines", "offload", _Ends)
        self.theirs, self._ours = os.pipe()
        self._ends.held.add(self._ours)

    def given(self) -> None:
        """The worker has its end, or never will."""
        os.close(self.theirs)

    def close(self) -> None:
        """Let go of the worker, which dies of it where it has not ended."""
        self._ends.held.discard(self._ours)  # first: a child forked in between would close what has the number next
        os.close(self._ours)


def _let_go() -> None:
    ends = inherited("lifelines", "offload")
    if ends is not None:
        for end in ends.held:
            with suppress(OSError):
                os.close(end)
        ends.held.clear()  # a child of the child finds nothing to close


os.register_at_fork(after_in_child=_let_go)  # after what `process` does there, which is imported before
