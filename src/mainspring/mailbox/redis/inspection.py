"""The operations of a Redis mailbox that look after it: cancellations, purges, counts, and dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mainspring.errors import SerializationError
from mainspring.mailbox.limits import full
from mainspring.mailbox.message import UNKNOWN, Cancelled, CancelOutcome, Counts
from mainspring.mailbox.redis.commands import Operation
from mainspring.mailbox.redis.records import MICRO, letter, micro, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.mailbox.redis.commands import Argument


class Cancel(Operation):
    """End the message of that id; results in a :class:`Cancelled`."""

    __slots__ = ("message_id",)
    turn = 3

    def __init__(self, message_id: str) -> None:
        super().__init__()
        self.message_id = message_id

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("cancel", self.message_id.encode("utf-8", "surrogatepass"))

    def take(self, result: Any) -> None:
        found, value = result
        if not found:
            self.result = UNKNOWN
            return
        outcome = CancelOutcome.REMOVED if found == 1 else CancelOutcome.CANCELLED
        try:
            _, _, reply_to, headers = read(value)
        except SerializationError:
            reply_to, headers = None, {}
        self.result = Cancelled(outcome, reply_to, headers)


class Purge(Operation):
    """Drop all that is not dead; results in how many, or -1 where first more must be done that is due."""

    __slots__ = ()
    turn = 4

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out.append("purge")


class Replay(Operation):
    """Make dead letters pending again; results in how many, or -1 where first more must be done that is due. At most ``most``
    of all where no ids are given.
    """

    __slots__ = ("capacity", "ids", "most")
    turn = 6

    def __init__(self, ids: list[str] | None, most: int, capacity: int | None) -> None:
        super().__init__()
        self.ids = ids
        self.most = most
        self.capacity = capacity

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("replay", -1 if self.capacity is None else self.capacity, self.most)
        _write_ids(self.ids, out)

    def take(self, result: Any) -> None:
        if isinstance(result, list):
            self.error = full(result[1], self.capacity or 0, result[2])
        else:
            self.result = result


class Discard(Operation):
    """Forget dead letters; results in how many, or -1 where first more must be done that is due. At most ``most`` of all
    where no ids are given.
    """

    __slots__ = ("ids", "most")
    turn = 6

    def __init__(self, ids: list[str] | None, most: int) -> None:
        super().__init__()
        self.ids = ids
        self.most = most

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("discard", self.most)
        _write_ids(self.ids, out)


def _write_ids(ids: list[str] | None, out: list[Argument]) -> None:
    if ids is None:
        out.append(-1)
    else:
        out += (len(ids), *(message_id.encode("utf-8", "surrogatepass") for message_id in ids))


class Count(Operation):
    """Results in :class:`Counts`, or None where first more must be done that is due."""

    __slots__ = ()
    turn = 10

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out.append("counts")

    def take(self, result: Any) -> None:
        self.result = Counts(*result[:5], queue_age=result[5] / MICRO) if result else None


class ListDead(Operation):
    """Results in a page of dead letters, or None where first more must be done that is due."""

    __slots__ = ("after", "limit")
    turn = 10

    def __init__(self, limit: int, after: str | None) -> None:
        super().__init__()
        self.limit = limit
        self.after = after

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("list", self.limit, (self.after or "").encode("utf-8", "surrogatepass"))

    def take(self, result: Any) -> None:
        self.result = None if result == -1 else [letter(*row) for row in result]


class FindDead(Operation):
    """Results in the dead letters of those ids, or None where first more must be done that is due."""

    __slots__ = ("ids",)
    turn = 10

    def __init__(self, ids: list[str]) -> None:
        super().__init__()
        self.ids = ids

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out.append("find")
        _write_ids(self.ids, out)

    def take(self, result: Any) -> None:
        self.result = None if result == -1 else [letter(*row) for row in result]


class Recover(Operation):
    """Mend what was lost with a deleted key, where that is due; looks for it every ``interval`` seconds, as the whole fleet.

    Results in how many messages and dead letters were found again, and in how many seconds there is more to do.
    """

    __slots__ = ("interval",)
    asks_only = True
    turn = 11

    def __init__(self, interval: float) -> None:
        super().__init__()
        self.interval = interval

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("recover", micro(self.interval))

    def take(self, result: Any) -> None:
        self.result = result[0], result[1] / MICRO


class Drop(Operation):
    """Forget the mailbox and everything in it."""

    __slots__ = ()
    turn = 12

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out.append("drop")
