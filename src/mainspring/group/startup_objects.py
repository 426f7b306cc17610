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

if TYPE_CHECKING:
    from collections.abc import Iterator


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
