"""``Capacity``: one bound on the messages in hand across the loops of a group (``max_concurrency``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.message import Message

TURN = 1.0
"""Seconds for which a loop may hold a place while it waits for work and another loop wants one."""


class Capacity:
    """Places for messages, shared by loops. A loop claims no message that it has no place for.

    A loop that waits for work holds one place only, and after a second gives it up to a loop that wants one: none is starved
    by an idle one, and where there are more loops than places they wait for work in turns.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = 0
        self._waiting: list[anyio.Event] = []
        self._idle: dict[anyio.CancelScope, float] = {}

    @property
    def full(self) -> bool:
        """Whether :meth:`receive` would have to wait for a place."""
        return self._taken >= self._places

    async def receive(
        self,
        want: int,
        wait: float,
        poll: Callable[[int, float], Awaitable[list[Message[Any, Any]]]],
        admit: Callable[[list[Message[Any, Any]]], None],
    ) -> None:
        """Poll for at most ``want`` messages within the free places; each admitted one keeps a place until given back."""
        places = await self._take(want)
        kept = 0
        try:
            messages = await poll(places, 0.0)
            if not messages and wait > 0:
                self.give_back(places - 1)
                places = 1
                with anyio.CancelScope() as turn:
                    self._idle[turn] = anyio.current_time() + TURN
                    try:
                        messages = await poll(1, wait)
                    finally:
                        del self._idle[turn]
            kept = len(messages)
            admit(messages)
        finally:
            self.give_back(places - kept)

    async def _take(self, want: int) -> int:
        places = 0
        if self.full:
            event = anyio.Event()
            self._waiting.append(event)
            try:
                while not event.is_set():
                    with anyio.CancelScope(deadline=self._end_a_turn()):
                        await event.wait()
            except BaseException:
                if event in self._waiting:
                    self._waiting.remove(event)
                else:  # a place was handed over just now
                    self.give_back(1)
                raise
            places = 1
        more = min(want - places, self._places - self._taken)
        if more > 0:
            places += more
            self._taken += more
        return places

    def _end_a_turn(self) -> float:
        """Interrupt a loop that has waited for work for its whole turn; when to look again."""
        now = anyio.current_time()
        for turn, until in self._idle.items():
            if until <= now:
                turn.cancel()
                return now + TURN
        return min(self._idle.values(), default=now + TURN)

    def give_back(self, places: int) -> None:
        """Free ``places``, and hand them to the loops that wait for one, in the order in which they came.

        They are handed over rather than put up: the loop that gives back is the first to ask again.
        """
        self._taken -= places
        while self._waiting and self._taken < self._places:
            self._taken += 1
            self._waiting.pop(0).set()
