"""How a Redis server tells a mailbox of what has come: the listener, and the claims that wait for it.

A process that finds nothing is put on the mailbox's list of waiters. A call of the library that makes messages pending takes
as many waiters off that list, and wakes each on its own publish/subscribe channel: one message wakes one process. A message
that comes alone is claimed for the waiter and sent to it in the same step. All processes hear, on a channel for all, of the
instant when something is due, if it is sooner than they know, and of cancellations.

The listener reads these channels. Its connection is shared by all mailboxes of the process. For each connection a mailbox has a
new name. So the library can tell what was sent to a lost one, and undo these claims once that name is off the list.

Every message that is sent here goes to exactly one claim that is not closed or cancelled, or its own claim is undone. A claim
that was woken and cannot look wakes the next one, here or in another process.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio
import hiredis

from mainspring.core import random
from mainspring.core.clock import loop_clock
from mainspring.errors import MailboxConnectionError, MainspringError
from mainspring.mailbox.batched import Waiters
from mainspring.mailbox.redis.commands import MICRO, Leave, RemoveWaiters, claimed_at
from mainspring.mailbox.redis.connection import LOST, RECONNECT_INITIAL, RECONNECT_MAXIMUM, explain
from mainspring.mailbox.redis.topology import TO_LISTEN
from mainspring.runtime.interval import Periodic
from mainspring.runtime.retry import Retries

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from mainspring.mailbox.batched import Command
    from mainspring.mailbox.message import ClaimedMessage
    from mainspring.mailbox.redis.client import Client
    from mainspring.mailbox.redis.connection import Channel
    from mainspring.mailbox.redis.topology import Topology
    from mainspring.mailbox.settings import Host

PING_SHARE: Final = 0.15
"""The part of ``silence`` after which the listener pings the server."""
PONG_SHARE: Final = 0.25
"""The part of it that the reply may take. The rest is left to the calls that find the server away."""
MOST_NAMES: Final = 100
"""Names without a receive that are kept in mind, as they might still be on the list."""


class RedisWaiters(Waiters):
    """The claims of one mailbox object that wait. Without any, other processes are woken by ``wake_others``.

    ``put_back`` undoes the claim of a message.
    """

    __slots__ = ("_put_back", "_wake_others", "active", "wanted")

    def __init__(self, wake_others: Callable[[int], None], put_back: Callable[[ClaimedMessage], None]) -> None:
        super().__init__()
        self._wake_others = wake_others
        self._put_back = put_back
        self.active = 0
        """Claims that have begun with a wait and have not ended, in line or not."""
        self.wanted: dict[float, int] = {}
        """How many active claims want a lease of that many seconds."""

    @property
    def visibility(self) -> float | None:
        """The seconds of the lease that the claim wants which has waited longest."""
        return self._line[0].visibility if self._line else None

    def refuse(self, delivery: ClaimedMessage) -> None:
        self._put_back(delivery)

    def signal(self, count: int) -> None:
        super().signal(count)
        if not self.active:
            self._wake_others(count)

    def pass_turn_on(self) -> None:
        if self.parked:
            super().pass_turn_on()
        else:
            self._wake_others(1)


class ListenerEvents(NamedTuple):
    """What a listener calls."""

    due: Callable[[float], None]
    """With the seconds until something is due."""
    cancelled: Callable[[list[str]], None]
    """With ids of messages that were cancelled."""
    claimed: Callable[[int, list[bytes]], None]
    """With a message that was claimed for a receive here, and when."""
    leave: Callable[[Command], None]
    """With an operation that takes this process off the list of waiters."""
    lost: Callable[[bool], None]
    """When its connection is lost; with True if the server had fallen silent."""


class Listener:
    """Reads what the library publishes for one mailbox. It reconnects by itself; meanwhile ``live`` is False.

    ``watch`` pings a server that has been silent, as long as it runs.
    """

    def __init__(
        self,
        topology: Topology,
        base: bytes,
        client: Client,
        waiters: RedisWaiters,
        events: ListenerEvents,
        timeout: float,
        silence: float,
    ) -> None:
        self.live = False
        self.live_since = -math.inf
        self.reconnects = 0
        self.watch = Periodic(self._watch)
        self._now = loop_clock()
        self._channel: Channel | None = None
        self._silent = False  # the connection was left as the server was silent
        self._topology = topology
        self._base = base
        self._client = client
        self._waiters = waiters
        self._events = events
        self._timeout = timeout
        self._ping_after = PING_SHARE * silence
        self._patience = min(timeout, PONG_SHARE * silence)
        self._name = ""
        self.listed: set[str] = set()
        """The names under which it may be on the list of waiters."""
        self._written: set[str] = set()  # the names that were to be put there, since the connection was made
        self._unwanted: set[str] = set()  # those of them for which no receive waits any more
        self._was_written = False  # since the connection was made
        self._last_claim = 0  # of the messages that came on this connection
        self._last_undone = 0  # of the claims that were undone before the message came
        self._retries = Retries(initial=RECONNECT_INITIAL, maximum=RECONNECT_MAXIMUM)
        self._next_try = -math.inf
        self._host: Host | None = None
        self._scope = anyio.CancelScope()
        client.on_connect = self._follow

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Listen until cancelled; started once it listens. Raises only before that."""
        started = False
        while True:
            channel: Channel | None = None
            try:
                await anyio.sleep_until(self._next_try)
                with anyio.fail_after(self._timeout):
                    channel = await self._topology.open_channel(TO_LISTEN)
                    await self._subscribe(channel)
                self._channel, self._silent = channel, False
                self.live, self._host, self.live_since = True, channel.host, self._now()
                await self._meet()
                if started:
                    self.reconnects += 1
                else:
                    started = True
                    task_status.started()
                self._waiters.signal_all()  # messages that came meanwhile have woken no receive here
                with self._scope:
                    await self._listen(channel)
                if self._silent:
                    raise MailboxConnectionError("the Redis server has fallen silent")
                self._failed()
            except (*LOST, MainspringError) as error:
                if not started:
                    if isinstance(error, MainspringError):
                        raise
                    raise MailboxConnectionError(f"the Redis server: {explain(error)}") from error
                self._failed()
                if self.live and self._channel is not None and not self._channel.current:
                    await self._client.suspect()  # else the server has said nothing of it
            finally:
                self.live, self._channel = False, None
                if channel is not None:
                    await channel.close()
            self.leave(for_good=True)
            self._events.lost(self._silent)

    def waiter(self, visible: int, *, listed: bool = False) -> str:
        """Return the name on the list for a receive that wants a lease of that many microseconds; "" if it could not be woken.

        The caller is about to have it put there, whatever becomes of that call; with ``listed``, it may be there already.
        """
        if not self.live:
            return ""
        waiter = f"{self._name}.{visible}"
        self._written.add(waiter)
        self._unwanted.discard(waiter)
        self._was_written = True
        if listed:
            self.listed.add(waiter)
        return waiter

    def leave(self, *, for_good: bool = False) -> None:
        """Take this process off the list, if it may be on it, and undo claims that were made for it and have not come.

        ``for_good``: nothing more is read from this connection.
        """
        if self.listed or (for_good and self._was_written):
            names = self._written if for_good else self.listed
            self._events.leave(Leave(self._name, self._last_claim, sorted(names), self._note_undone, for_good=for_good))
            self.listed.clear()
            if for_good:
                self._written.clear()
                self._unwanted.clear()
                self._was_written = False

    def no_longer_wanted(self, visible: int) -> bool:
        """Note that the last receive that wanted such a lease has ended. Return True if names leave the list for that.

        Receives that wait still may have been on the list by these names only.
        """
        waiter = f"{self._name}.{visible}"
        if waiter not in self._written:
            return False
        self._unwanted.add(waiter)
        if waiter not in self.listed and len(self._unwanted) <= MOST_NAMES:
            return False
        self._events.leave(RemoveWaiters(self._unwanted))
        self.listed -= self._unwanted
        self._written -= self._unwanted
        self._unwanted = set()
        return True

    def _note_undone(self, name: str, when: int) -> None:
        if name == self._name:
            self._last_undone = max(self._last_undone, when)

    async def _meet(self) -> None:
        """Let calls and this connection meet at one server: after a failover one of them may have found the new one first."""
        self._scope = anyio.CancelScope()
        if self._client.host not in {None, self._host}:
            await self._client.suspect()
            self._follow(self._client.host)

    def _failed(self) -> None:
        """Delay the next try: longer, the more connections break as soon as they are made."""
        if self.live and self._now() - self.live_since >= RECONNECT_MAXIMUM:
            self._retries.succeeded()
        self._next_try = self._now() + self._retries.failed()

    def _follow(self, host: Host | None) -> None:
        """Leave this connection if calls go to another server now: this one would wake no receive here."""
        if None not in {host, self._host} and host != self._host:
            self._leave_it()

    def _leave_it(self) -> None:
        """Leave this connection; other mailboxes leave it when they find out."""
        if self._channel is not None:
            self._channel.shared.retire(pause=False)
        self._scope.cancel()

    async def _subscribe(self, channel: Channel) -> None:
        self._name, self._last_claim, self._last_undone = random.token(96), 0, 0
        for suffix in ("all", self._name):  # one by one: a cluster takes only channels of one slot, which these are
            await channel.subscribe(self._base + suffix.encode())

    async def _listen(self, channel: Channel) -> None:
        self.watch.wake_by(channel.shared.last_read_at + self._ping_after)
        while True:
            message: Any = await channel.next(channel.messages)
            if message[0] == b"smessage":
                try:
                    self._handle(message[2])
                except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
                    raise MailboxConnectionError("another program publishes on the mailbox's channels") from error
            elif message[0] == b"sunsubscribe":
                channel.shared.retire(pause=False)
                raise MailboxConnectionError("the mailbox has moved to another node")

    async def _watch(self, overslept: float) -> float:
        channel, now = self._channel, self._now()
        if channel is None:
            return math.inf
        shared = channel.shared
        if shared.pinged_at is not None:
            if now >= shared.pinged_at + self._patience:
                self._silent = True
                self._leave_it()
                return math.inf
            return shared.pinged_at + self._patience
        if now < shared.last_read_at + self._ping_after:
            return shared.last_read_at + self._ping_after
        with suppress(*LOST):  # reading tells what is wrong with the connection
            await channel.ping(now)
        return now + self._patience

    def _handle(self, published: bytes) -> None:
        kind, value = published[:1], published[1:]
        if kind == b"m":  # a message was claimed for a receive here, which is off the list by that
            reader = hiredis.Reader()
            reader.feed(value)
            strings = reader.gets()
            self.listed.discard(f"{self._name}.{int(strings[0])}")
            claim = claimed_at(strings[1])
            self._last_claim = max(self._last_claim, claim)
            if claim > self._last_undone:
                self._events.claimed(claim, strings)
        elif kind == b"w":
            if len(self.listed) == 1:  # else one of them is off the list, and it is not known which
                self.listed.clear()
            self._waiters.signal(int(value))
        elif kind == b"d":
            self._events.due(int(value) / MICRO)
        elif kind == b"x":
            self._events.cancelled([value.decode("utf-8", "replace")])
