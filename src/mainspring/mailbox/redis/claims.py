"""The operations of a Redis mailbox's receives: to claim, to wait, and to give back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mainspring.mailbox.redis.commands import Operation
from mainspring.mailbox.redis.records import delivered, micro

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.mailbox.message import Delivery
    from mainspring.mailbox.redis.commands import Argument


class Unclaim(Operation):
    """Take claims back as if they had not been made."""

    __slots__ = ("receipts",)
    owed = True

    def __init__(self, receipts: list[str]) -> None:
        super().__init__()
        self.receipts = receipts

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("unclaim", len(self.receipts), *self.receipts)


class Unheard(Operation):
    """Take back what ``claimant`` claimed after the instant ``known``: the connection broke before it heard of it."""

    __slots__ = ("claimant", "known")
    owed = True

    def __init__(self, claimant: str, known: int) -> None:
        super().__init__()
        self.claimant = claimant
        self.known = known

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("unheard", self.claimant, self.known)


class Pass(Operation):
    """This process was woken for nothing: so many others shall look."""

    __slots__ = ("count",)
    asks_only = True
    turn = 7

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("pass", self.count)


class Claim(Operation):
    """Lease what is there; results in deliveries. ``again``: first more must be done that is due.

    ``claimant`` marks the receipts. ``waits``: it is put on the list of waiters where nothing is there; with ``others``,
    more of its receives wait, whatever is there.
    """

    __slots__ = ("again", "claimant", "limit", "others", "unreadable", "visibility", "waits")
    first = True
    turn = 8

    def __init__(self, limit: int, visibility: float, claimant: str, waits: bool, others: bool) -> None:
        super().__init__()
        self.limit = limit
        self.visibility = visibility
        self.claimant = claimant
        self.waits = waits
        self.others = others
        self.unreadable: list[Delivery] = []
        self.again = False


def claim_alike(
    claims: list[Claim], leased_at: float, waiter: Callable[[int], str], out: list[Argument]
) -> Callable[[Any], None]:
    """Write claims of one visibility as one; what takes the result, and shares it out in the order of the calls."""
    first = claims[0]
    waiting = [claim for claim in claims if claim.waits]
    others = len(waiting) > 1 or any(claim.others for claim in waiting)
    visible = micro(first.visibility)
    out += ("claim", sum(claim.limit for claim in claims), visible, first.claimant)
    out += (waiter(visible) if waiting else "", int(others))

    def take(result: Any) -> None:
        receipts, values, extras, *again = result
        start = 0
        few: dict[int, dict[bytes, bytes]] = {}
        for at in range(0, len(extras), 3):
            few.setdefault(extras[at], {})[extras[at + 1]] = extras[at + 2]
        for claim in claims:
            claim.result, claim.again = [], bool(again)
            for number in range(start, min(start + claim.limit, len(receipts))):
                delivery, readable = delivered(receipts[number], values[number], few.get(number), leased_at)
                (claim.result if readable else claim.unreadable).append(delivery)
            start += claim.limit

    return take


class Look(Operation):
    """Let what is due be done, for the receives that wait for it. ``waiter``: says as it leaves who, if any, is to be on the
    list of waiters.
    """

    __slots__ = ("waiter",)
    asks_only = True
    turn = 9

    def __init__(self, waiter: Callable[[], str]) -> None:
        super().__init__()
        self.waiter = waiter

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("look", self.waiter())


class Leave(Operation):
    """Nobody waits as one of ``waiters`` any more: they go, and so does back what was sent to ``name`` after ``heard``.

    ``heard`` is when the last message was claimed that came there; ``left`` is told that of the last one that has gone back.
    ``for_good``: nobody listens there any more.
    """

    __slots__ = ("for_good", "heard", "left", "name", "waiters")
    asks_only = True
    owed = True

    def __init__(
        self, name: str, heard: int, waiters: list[str], left: Callable[[str, int], None], *, for_good: bool
    ) -> None:
        super().__init__()
        self.name = name
        self.heard = heard
        self.waiters = waiters
        self.left = left
        self.for_good = for_good

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("leave", self.name, self.heard, int(self.for_good), len(self.waiters), *self.waiters)

    def take(self, result: Any) -> None:
        self.left(self.name, result)


class Unlist(Operation):
    """No receive here wants to be called as one of ``waiters`` any more. What is on its way to them is heard still."""

    __slots__ = ("waiters",)
    asks_only = True
    owed = True

    def __init__(self, waiters: set[str]) -> None:
        super().__init__()
        self.waiters = waiters

    def write(self, out: list[Argument], number: Callable[[str], int]) -> None:
        out += ("unlist", len(self.waiters), *sorted(self.waiters))


def joined(owed: list[Operation]) -> list[Operation]:
    """What is owed, without what one of them says for several: where calls fail for long, each receive that ends leaves.

    Until a listener has left, no receive waits to be sent something there. So what came after the first one left goes back.
    """
    others: list[Operation] = []
    leaves: dict[str, Leave] = {}
    unlisted: set[str] = set()
    for command in owed:
        if type(command) is Unlist:
            unlisted |= command.waiters
        elif type(command) is not Leave:
            others.append(command)
        elif command.name not in leaves:
            leaves[command.name] = command
        else:
            one = leaves[command.name]
            leaves[command.name] = Leave(
                one.name,
                min(one.heard, command.heard),
                sorted({*one.waiters, *command.waiters}),
                one.left,
                for_good=one.for_good or command.for_good,
            )
    if unlisted:
        others.append(Unlist(unlisted))
    return [*others, *leaves.values()]
