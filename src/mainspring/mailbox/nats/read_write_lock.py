"""The gate that keeps counting and moving apart, so that no message is counted half-way between two streams."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager


class Gate:
    """Lets those through together who do the same, the others in their turn: none can keep others waiting for ever."""

    def __init__(self) -> None:
        self._inside = 0
        self._counting = False
        self._waiting: deque[tuple[bool, anyio.Event]] = deque()

    def __repr__(self) -> str:
        what = "counting" if self._counting else "moving"
        return f"<Gate {self._inside} {what}, {len(self._waiting)} waiting>"

    def moving(self) -> AbstractAsyncContextManager[None]:
        """While a message moves. Never inside another."""
        return self._pass(counting=False)

    def counting(self) -> AbstractAsyncContextManager[None]:
        """While somebody counts: no message is half-way."""
        return self._pass(counting=True)

    @asynccontextmanager
    async def _pass(self, *, counting: bool) -> AsyncIterator[None]:
        if self._waiting or (self._inside and self._counting is not counting):
            await self._turn(counting)
        else:
            self._enter(counting)
        try:
            yield
        finally:
            self._leave()

    async def _turn(self, counting: bool) -> None:
        turn = anyio.Event()
        place = (counting, turn)
        self._waiting.append(place)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self._leave()
            else:
                self._waiting.remove(place)
                self._admit()
            raise

    def _enter(self, counting: bool) -> None:
        self._inside += 1
        self._counting = counting

    def _leave(self) -> None:
        self._inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (not self._inside or self._counting is self._waiting[0][0]):
            counting, turn = self._waiting.popleft()
            self._enter(counting)
            turn.set()
