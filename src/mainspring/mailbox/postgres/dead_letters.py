"""Dead letters in a PostgreSQL database: listed, found, sent again, forgotten. What is done to all is done some at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mainspring.mailbox.limits import full, is_name
from mainspring.mailbox.postgres.arrays import texts
from mainspring.mailbox.postgres.values import dead_row, portions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.message import Dead, Delivery
    from mainspring.mailbox.postgres.pool import Hub

AT_ONCE: Final = 1_000
"""Dead letters of one call at most, where it is to be done to all: however many there are, each call ends in time."""


class DeadLetters:
    """The dead letters of the mailbox with that number; see :class:`MailboxHooks` for what is done to them."""

    def __init__(self, hub: Hub, number: int, capacity: int | None) -> None:
        self._hub = hub
        self._number = number
        self._capacity = capacity

    async def page(self, limit: int, after: str | None) -> list[tuple[Delivery, Dead, float]]:
        """The oldest ones behind the one with id ``after``."""
        behind = None if after is None else known([after])[0]
        rows = await self._hub.rows("dead_letters", self._number, min(limit, 2**31 - 1), behind, None)
        return [dead_row(row) for row in rows]

    async def find(self, message_ids: list[str]) -> list[tuple[Delivery, Dead, float]]:
        """Those with these ids."""
        named = texts(known(message_ids))
        rows = await self._hub.rows("dead_letters", self._number, len(message_ids), None, named)
        return [dead_row(row) for row in rows]

    async def replay(self, message_ids: list[str] | None) -> int:
        """Send those of the ids again, or (None) all; how many that were. Where they have to find room, in one step."""
        if message_ids is None and self._capacity is None:
            return await self._do_to_all(self._replay)
        return await self._replay(message_ids)

    async def discard(self, message_ids: list[str] | None) -> int:
        """Forget those of the ids, or (None) all; how many that were."""
        return await self._do_to_all(self._discard) if message_ids is None else await self._discard(message_ids)

    async def _replay(self, message_ids: list[str] | None) -> int:
        named = None if message_ids is None else texts(known(message_ids))
        number, waiting = (await self._hub.rows("replay", self._number, named, self._capacity))[0]
        if waiting is not None and self._capacity is not None:
            raise full(waiting, self._capacity, number)
        self._hub.wake(self._number, number)
        return int(number)

    async def _discard(self, message_ids: list[str]) -> int:
        return int(await self._hub.value("forget", self._number, texts(known(message_ids))))

    async def _do_to_all(self, do: Callable[[list[str]], Awaitable[int]]) -> int:
        """Do it to all that are dead by now, the oldest first; to how many it was done."""
        hub, box = self._hub, self._number
        await hub.rows("sweep_all", box)  # what has expired is dead, too
        dead = f"{hub.schema}.dead WHERE mailbox = $1"
        ((last,),) = await hub.ask(f"SELECT coalesce(max(place), 0) FROM {dead}", box)  # noqa: S608 - a checked name
        some = (
            f"SELECT place, id, octet_length(body) FROM {dead} AND place > $2 AND place <= $3 ORDER BY place LIMIT $4"  # noqa: S608
        )
        through = done = 0
        while rows := await hub.ask(some, box, through, last, AT_ONCE):
            for letters in portions(rows, lambda row: int(row[2])):
                done += await do([name for _, name, _ in letters])
            through = rows[-1][0]
        return done


def known(message_ids: list[str]) -> list[str]:
    """Ids as the server takes them: what it cannot keep is the id of nothing."""
    return [message_id if is_name(message_id) else "" for message_id in message_ids]
