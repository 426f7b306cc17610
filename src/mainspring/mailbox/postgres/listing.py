"""The parts of a list of messages, and the places between its pages.

Each index has some messages of a list in an order. So a list goes through them part by part, and a page ends at a place in one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple

from mainspring.mailbox.limits import is_name
from mainspring.mailbox.message import MessagePlace

if TYPE_CHECKING:
    from collections.abc import Iterable

LOOK_AT_MOST: Final = 5_000
"""Messages that one page looks at."""
_STATES: Final = {MessagePlace.PENDING: (0, 5, 3, 4), MessagePlace.DELAYED: (1,), MessagePlace.IN_FLIGHT: (2,)}
_AT_LIMITERS: Final = (3, 4)


class ListPart(NamedTuple):
    """The messages of one state, all of them, or those of ``task`` that have a key, or none."""

    state: int
    task: str | None
    has_key: bool

    def after(self, got_to: list[str]) -> str:
        """Return a place in it as a text."""
        return json.dumps([*self, got_to])


def parts_of(place: MessagePlace, tasks: list[str], limited: list[str], key: str | None) -> list[ListPart]:
    """Return the parts of a list, in order: of ``tasks``; or, without any, of all messages, ``limited`` tasks apart."""
    parts = []
    for state in _STATES[place]:
        if not tasks and state not in _AT_LIMITERS:
            parts.append(ListPart(state, None, False))
        for task in sorted(tasks or limited) if tasks or state in _AT_LIMITERS else ():
            parts += [ListPart(state, task, has_key) for has_key in ((True,) if key is not None else (True, False))]
    return parts


def parts_behind(parts: list[ListPart], after: str | None, key: str | None) -> tuple[list[ListPart], list[str] | None]:
    """Return the parts that are left at the place ``after``, and the place in the first one, if it is one of the same list.

    A text that is no place is the beginning.
    """
    try:
        state, task, has_key, got_to = json.loads(after or "")
        reached = ListPart(state, task, has_key)
        order = [*dict.fromkeys(part.state for part in parts)]
        left = [part for part in parts if _rank(part, order) >= _rank(reached, order)]
        _check(reached, got_to, key)
    except (ValueError, TypeError, RecursionError):
        return parts, None
    return left, got_to if left and left[0] == reached else None


def _rank(part: ListPart, order: list[int]) -> tuple[int, str, bool]:
    return order.index(part.state), part.task or "", not part.has_key


def _check(part: ListPart, got_to: Iterable[str], key: str | None) -> None:
    """Raise ValueError or TypeError if it is not a place in that part."""
    *rest, message_id = got_to
    numbers = rest[1:] if part.has_key and key is None else rest
    if part.task is None and part.state in (1, 2):
        (due,) = numbers
        float(due)
    else:
        rank, pos = map(int, numbers)
        if not -(2**15) <= rank < 2**15 or not 0 <= pos < 2**63:
            raise ValueError(rank, pos)
    if not all(map(is_name, (message_id, *rest))):
        raise ValueError(rest)
