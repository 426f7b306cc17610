"""What a process has made until it runs is kept out of garbage collections while it does.

A full collection looks at every container object of the process, while the event loop stands still. Nearly all of them are
modules, types and functions, which live as long as the process: 40,000 in a small worker, for 10 to 50 ms a collection. A
handler that keeps an object for each message brings one every few ten thousand messages, and what comes meanwhile waits.
Without the objects of the start, a collection takes only as long as the objects of messages need.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mainspring.core import process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


RARER = 4
"""How many times rarer full collections are while groups start. Of garbage, as of an earlier run, more would then be kept."""


class _RareCollections:
    """The thresholds of the process's collector while groups start. Thresholds that the program sets meanwhile stay."""

    def __init__(self) -> None:
        self._starting = 0
        self._before = self._set = gc.get_threshold()

    def __enter__(self) -> None:
        self._starting += 1
        if self._starting == 1:
            young, middle, full = self._before = gc.get_threshold()
            self._set = (young, middle, full * RARER)
            gc.set_threshold(*self._set)

    def __exit__(self, *_: object) -> None:
        self._starting -= 1
        if not self._starting and gc.get_threshold() == self._set:
            gc.set_threshold(*self._before)


def full_collections_rare() -> AbstractContextManager[None]:
    """Make full collections rare until the block ends: what a start makes lives on, and is looked at for nothing.

    They take half of the time that a start of 1,000 loops takes.
    """
    return process.shared("collections", "rare", _RareCollections)


@contextmanager
def startup_objects_frozen() -> Iterator[None]:
    """Freeze all objects that exist now, until the block ends. A program that has frozen its own keeps them as they are.

    A frozen object still goes when its last reference does. Only cycles of them wait until the block ends.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
