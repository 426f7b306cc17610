"""What a process knows of a mailbox's queue, so that a claim need not read again what is settled but not yet vacuumed."""

from __future__ import annotations

LOOK_BACK = 1.0
"""Seconds after which a claim starts from the very front again: what a long transaction or another process put behind the
floors waits at most so long."""
SWEEP = 1_000
"""How many messages the server moves at most, as their time has come, in one claim."""


class View:
    """The floors of one mailbox: for each rank the place before which this process has claimed everything.

    A message can come to lie behind a floor: another process released it, or the transaction that sent it took longer than
    those after it. Claims that find too little look there anyway, and every :data:`LOOK_BACK` seconds one does so first.
    """

    __slots__ = ("_floors", "_full_at", "_swept_at")

    def __init__(self) -> None:
        self._floors: dict[int, int] = {}
        self._swept_at: float | None = None
        self._full_at = float("-inf")

    def start(self, now: float) -> tuple[list[int], list[int], float | None]:
        """For a claim at ``now`` (anyio's clock): ranks, their floors, and since when things can be due (server's clock)."""
        if now - self._full_at >= LOOK_BACK:
            self._full_at = now
            self._floors.clear()
            return [], [], None
        return list(self._floors), list(self._floors.values()), self._swept_at

    def swept(self, at: float, moved: int) -> None:
        """All that was due by ``at`` (the server's clock) has been done, but for what was committed late.

        Where as many were ``moved`` as one sweep may, the next one goes on just there: it shall not read again what this one
        has moved.
        """
        self._swept_at = at if moved >= SWEEP else at - LOOK_BACK

    def claimed(self, rank: int, pos: int) -> None:
        """A claim got to that place."""
        if pos > self._floors.get(rank, 0):
            self._floors[rank] = pos

    def returned(self, rank: int, pos: int) -> None:
        """A message is at that place again."""
        if pos < self._floors.get(rank, 0):
            self._floors[rank] = pos
