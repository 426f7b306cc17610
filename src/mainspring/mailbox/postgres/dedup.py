"""Sends with a dedup key. A send that an open transaction blocks holds up only sends with the same key."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from mainspring.core.clock import loop_clock
from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.postgres.commands import LOCK_WAIT, PostgresSend
from mainspring.mailbox.postgres.connection import BlockedError, ValueRefusedError
from mainspring.mailbox.postgres.values import stored_key
from mainspring.runtime.retry import Retries

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.batched import Batcher
    from mainspring.mailbox.message import Envelope

SHORT_LOCK_WAIT = 0.001
"""The same as ``LOCK_WAIT``, when it is tried again: with others whose keys are blocked."""
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 0.25
"""The most seconds after the first try of a send that is blocked, and after a later one."""


class Transact(Protocol):
    """Execute sends in one transaction. It waits at most ``lock_wait`` seconds for another transaction that has sent a key.

    After that, the whole transaction fails; with ``apart`` only the send with that key is blocked.
    """

    async def __call__(self, commands: Sequence[PostgresSend], lock_wait: float, apart: bool = ...) -> None: ...


class DedupSends:
    """Two batchers: one for sends as they come, and one for sends that were blocked and are retried.

    So no batch waits on the server, with its connection and its other sends, for a transaction that may never end.
    """

    def __init__(
        self, transact: Transact, timeout: float, batcher: Callable[[Callable[..., Awaitable[None]]], Batcher[Any]]
    ) -> None:
        self._transact = transact
        self._timeout = timeout
        self._now = loop_clock()
        self._blocked: Counter[str] = Counter()
        self._first: Batcher[PostgresSend] = batcher(self._together)
        self._again: Batcher[PostgresSend] = batcher(self._each_key)

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        """Store all or none. Return the ids. Raise :class:`MailboxConnectionError` if a key stays blocked until the timeout."""
        known = not self._blocked.keys().isdisjoint(_keys(envelopes)) if self._blocked else False
        return await self.retry_while_blocked(envelopes, self._again.call if known else self._first.call)

    async def retry_while_blocked(
        self, envelopes: list[Envelope], attempt: Callable[[PostgresSend], Awaitable[Any]]
    ) -> list[str]:
        """Store ``envelopes`` by ``attempt``; while they are blocked, try again until the timeout."""
        deadline = self._now() + self._timeout
        send = PostgresSend(envelopes)
        await attempt(send)
        if not send.blocked:
            return list(send.result)
        if attempt == self._first.call:
            attempt = self._again.call
        keys = _keys(envelopes)
        self._blocked.update(keys)
        try:
            retries = Retries(initial=FIRST_PAUSE, maximum=LONGEST_PAUSE)
            while (left := deadline - self._now()) > 0:
                await anyio.sleep(min(retries.failed(), left))
                send = PostgresSend(envelopes)
                await attempt(send)
                if not send.blocked:
                    return list(send.result)
        finally:
            self._blocked.subtract(keys)
            self._blocked += Counter()  # without those of zero
        raise blocked_error(envelopes, f"within {self._timeout:g} s")

    async def _together(self, sends: list[PostgresSend]) -> None:
        """Store all in one transaction: the usual case, in which no key is blocked."""
        try:
            await self._transact(sends, LOCK_WAIT)
        except BlockedError:
            await self._each_key(sends)
        except ValueRefusedError as error:
            await self._apart(sends, error)

    async def _each_key(self, sends: list[PostgresSend]) -> None:
        """Store all that is not blocked in one transaction. Of several sends with one key, the first goes first."""
        single = {
            stored_key(send.envelopes[0].dedup_key or ""): send for send in reversed(sends) if len(send.envelopes) == 1
        }
        rest = [send for send in sends if len(send.envelopes) == 1 and send not in single.values()]
        await self._singly(list(single.values()))
        free = []
        for send in rest:
            send.blocked = single[stored_key(send.envelopes[0].dedup_key or "")].blocked
            if not send.blocked:
                free.append(send)
        await self._singly(free)
        for send in sends:
            if len(send.envelopes) > 1:
                await self._whole(send)

    async def _singly(self, sends: list[PostgresSend]) -> None:
        if not sends:
            return
        try:
            await self._transact(sends, SHORT_LOCK_WAIT, apart=True)
        except ValueRefusedError as error:
            await self._apart(sends, error)

    async def _apart(self, sends: list[PostgresSend], error: ValueRefusedError) -> None:
        """Store each by itself, because one has a value that the server does not take."""
        if len(sends) == 1:
            sends[0].error = error
            return
        for send in sends:
            await self._whole(send)

    async def _whole(self, send: PostgresSend) -> None:
        send.error = None
        try:
            await self._transact([send], SHORT_LOCK_WAIT)
        except BlockedError:
            send.blocked = True
        except ValueRefusedError as error:
            send.error = error


def blocked_error(envelopes: list[Envelope], when: str) -> MailboxConnectionError:
    """Return the error of a send that was blocked for too long."""
    keys = ", ".join(map(repr, sorted(_keys(envelopes))[:3]))
    return MailboxConnectionError(
        f"a transaction that has sent the same dedup_key ({keys}) has not ended {when}; nothing was sent"
    )


def _keys(envelopes: list[Envelope]) -> set[str]:
    return {stored_key(envelope.dedup_key) for envelope in envelopes if envelope.dedup_key is not None}
