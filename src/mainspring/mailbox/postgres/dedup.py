"""Sends with a dedup key: one that is held up by somebody's open transaction holds up only those with the same key."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import psycopg

from mainspring.core.clock import loop_clock
from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.batcher import Batcher
from mainspring.mailbox.postgres import commands as do
from mainspring.mailbox.postgres.calls import HASTE
from mainspring.mailbox.postgres.connection import HeldUpError, faulty
from mainspring.mailbox.postgres.values import stored_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.message import Envelope
    from mainspring.mailbox.postgres.pool import Hub

MORE_HASTE = 0.001
"""The same as ``HASTE``, when it is tried again: with others whose keys are held up."""
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 0.25
"""Seconds between two tries of a send that is held up."""


class Transact(Protocol):
    """Executes commands in one transaction, which waits no longer than those seconds for another one that has sent a key.

    ``apart``: where one does, only that send is held up; else all fail.
    """

    async def __call__(self, commands: Sequence[do.Put], haste: float, apart: bool = ...) -> None: ...


class KeyedSends:
    """Two lanes: one for sends as they come, and one for those that were held up, which are tried again and again.

    So nobody waits on the server, with a connection and with what travels along, for a transaction that may never end.
    """

    def __init__(self, hub: Hub, transact: Transact, name: str) -> None:
        self._hub = hub
        self._transact = transact
        self._now = loop_clock()
        self._held_up: Counter[str] = Counter()
        self._first: Batcher[do.Put] = Batcher(self._together, name=name)
        self._again: Batcher[do.Put] = Batcher(self._each_key, name=name)
        self.batchers = (self._first, self._again)

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        """Store them all or none; the ids. Raises :class:`MailboxConnectionError` where a key was held up all the time."""
        known = not self._held_up.keys().isdisjoint(_keys(envelopes)) if self._held_up else False
        return await self.patiently(envelopes, self._again.call if known else self._first.call)

    async def patiently(self, envelopes: list[Envelope], attempt: Callable[[do.Put], Awaitable[Any]]) -> list[str]:
        """``attempt`` to store them, and where they are held up again and again, for as long as a call may last."""
        deadline = self._now() + self._hub.pool.timeout
        put = do.Put(envelopes)
        await attempt(put)
        if not put.held_up:
            return list(put.result)
        if attempt == self._first.call:
            attempt = self._again.call
        keys = _keys(envelopes)
        self._held_up.update(keys)
        try:
            pause = FIRST_PAUSE
            while (left := deadline - self._now()) > 0:
                await anyio.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST_PAUSE)
                put = do.Put(envelopes)
                await attempt(put)
                if not put.held_up:
                    return list(put.result)
        finally:
            self._held_up.subtract(keys)
            self._held_up += Counter()  # without those of zero
        raise not_ended(envelopes, f"within {self._hub.pool.timeout:g} s")

    async def _together(self, puts: list[do.Put]) -> None:
        """The usual way: in one transaction, which nothing holds up."""
        try:
            await self._transact(puts, HASTE)
        except HeldUpError:
            await self._each_key(puts)
        except psycopg.Error as error:
            await self._apart(puts, error)

    async def _each_key(self, puts: list[do.Put]) -> None:
        """All that is not held up, in one transaction; of several with one key, the first goes first."""
        single = {
            stored_key(put.envelopes[0].dedup_key or ""): put for put in reversed(puts) if len(put.envelopes) == 1
        }
        rest = [put for put in puts if len(put.envelopes) == 1 and put not in single.values()]
        await self._singly(list(single.values()))
        free = []
        for put in rest:
            put.held_up = single[stored_key(put.envelopes[0].dedup_key or "")].held_up
            if not put.held_up:
                free.append(put)
        await self._singly(free)
        for put in puts:
            if len(put.envelopes) > 1:
                await self._whole(put)

    async def _singly(self, puts: list[do.Put]) -> None:
        if not puts:
            return
        try:
            await self._transact(puts, MORE_HASTE, apart=True)
        except psycopg.Error as error:
            await self._apart(puts, error)

    async def _apart(self, puts: list[do.Put], error: psycopg.Error) -> None:
        """One has a value that the server does not take: each by itself."""
        if len(puts) == 1:
            puts[0].error = faulty(error)
            return
        for put in puts:
            await self._whole(put)

    async def _whole(self, put: do.Put) -> None:
        put.error = None
        try:
            await self._transact([put], MORE_HASTE)
        except HeldUpError:
            put.held_up = True
        except psycopg.Error as error:
            put.error = faulty(error)


def not_ended(envelopes: list[Envelope], when: str) -> MailboxConnectionError:
    """The error of a send that was held up for too long."""
    keys = ", ".join(map(repr, sorted(_keys(envelopes))[:3]))
    return MailboxConnectionError(
        f"a transaction that has sent the same dedup_key ({keys}) has not ended {when}; nothing was sent"
    )


def _keys(envelopes: list[Envelope]) -> set[str]:
    return {stored_key(envelope.dedup_key) for envelope in envelopes if envelope.dedup_key is not None}
