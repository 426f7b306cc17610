"""The options of a mailbox in memory. Apart from it, as only making one needs pydantic."""

from __future__ import annotations

from typing import ClassVar

from mainspring.mailbox.settings import Capacity, Flag, Options


class MemoryOptions(Options):
    """The options of an :class:`InMemoryMailbox`."""

    kind: ClassVar[str] = "a memory mailbox"
    schemes: ClassVar[tuple[str, ...]] = ("memory",)

    capacity: Capacity = None
    serialize: Flag = True
