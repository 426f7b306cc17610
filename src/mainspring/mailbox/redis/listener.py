"""How a Redis server tells a mailbox of what has come: the listener, and the claims that wait for it.

A process that finds nothing is put on the mailbox's list of waiters. A call of the library that makes messages pending takes
as many waiters off that list, and wakes each on its own publish/subscribe channel: one message wakes one process. A message
that comes alone is claimed for the waiter and sent to it in the same step. All processes hear, on a channel for all, of the
instant when something is due, if it is sooner than they know, and of cancellations. A process that has waited for a result
hears of results on one more channel.

One listener reads these channels for all mailboxes of the process, each of which has a subscription. For each connection a
subscription has a new name. So the library can tell what was sent to a lost one, and undo these claims once that name is off
the list.

Every message that is sent here goes to exactly one claim that is not closed or cancelled, or its own claim is undone. What
comes before it is known which claims were undone is not taken, as another process may have it. A claim that was woken and
cannot look wakes the next one, here or in another process.
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
from mainspring.mailbox.redis.connection import (
    LOST,
    RECONNECT_INITIAL,
    RECONNECT_MAXIMUM,
    Channel,
    ServerError,
    explain,
    is_refusal,
    pack,
)
from mainspring.mailbox.redis.topology import TO_LISTEN
from mainspring.runtime.interval import Periodic
from mainspring.runtime.retry import Retries

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.mailbox.batched import Command
    from mainspring.mailbox.message import ClaimedMessage
    from mainspring.mailbox.redis.client import Client
    from mainspring.mailbox.redis.topology import Topology
    from mainspring.mailbox.settings import Host
    from mainspring.runtime.interval import Alarms

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

    def __init__(
        self,
        wake_others: Callable[[int], None],
        put_back: Callable[[ClaimedMessage], None],
        alarms: Alarms,
    ) -> None:
        super().__init__(alarms)
        self._wake_others = wake_others
        self._put_back = put_back
        self.active = 0
        """Claims that have begun with a wait and have not ended, in line or not."""
        self.wanted: dict[int, int] = {}
        """How many active claims want a lease of that many microseconds; 0: none any more, since a moment ago."""

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
    """What a subscription calls."""

    due: Callable[[float], None]
    """With the seconds until something is due."""
    cancelled: Callable[[list[str]], None]
    """With ids of messages that were cancelled."""
    results: Callable[[list[str]], None]
    """With ids of messages that were acknowledged with a result; with none when it begins to hear of them."""
    claimed: Callable[[int, list[bytes], bool], None]
    """With a message that was claimed for a receive here, when, and True if that claim may have been undone."""
    leave: Callable[[Command], None]
    """With an operation that takes this process off the list of waiters."""
    lost: Callable[[bool], None]
    """When its connection is lost; with True if the server had fallen silent."""


class Subscription:
    """What is published for one mailbox object, and the names under which this is on the list of waiters.

    :param base: the beginning of the names of its channels.
    """

    def __init__(self, base: bytes, client: Client, waiters: RedisWaiters, events: ListenerEvents) -> None:
        self.base = base
        self.client = client
        self.live = False
        """True while what is published arrives."""
        self.live_since = -math.inf
        self.reconnects = 0
        self.channels: tuple[bytes, ...] = ()
        """The server's channels that it is subscribed to, or is about to be."""
        self.results = base + b"results"
        """The channel of results."""
        self.wants_results = False
        self._now = loop_clock()
        self._waiters = waiters
        self._events = events
        self._name = ""
        self.listed: set[str] = set()
        """The names under which it may be on the list of waiters."""
        self._written: set[str] = set()  # the names that were to be put there, since the connection was made
        self._unwanted: set[str] = set()  # those of them for which no receive waits any more
        self._was_written = False  # since the connection was made
        self._last_claim = 0  # of the messages that came on this connection
        self._last_undone = 0  # of the claims that were undone before the message came
        self._leaving = 0  # the times it has left the list by this name and has not heard what was undone

    def begin(self) -> tuple[bytes, ...]:
        """Take a new name. Return the channels to subscribe to."""
        self._name, self._last_claim, self._last_undone, self._leaving = random.token(96), 0, 0, 0
        self.channels = (self.base + b"all", self.base + self._name.encode())
        if self.wants_results:
            self.channels += (self.results,)
        return self.channels

    def begun(self) -> None:
        """Note that the subscription stands."""
        if self.was_live:
            self.reconnects += 1
        self.live, self.live_since = True, self._now()
        self._waiters.signal_all()  # messages that came meanwhile have woken no receive here
        if self.hears_results:
            self.began_to_hear_results()

    def began_to_hear_results(self) -> None:
        """Let the waits for results look: they have missed those until now."""
        self._events.results([])

    @property
    def hears_results(self) -> bool:
        """True if it is subscribed to results, or is about to be."""
        return self.results in self.channels

    @property
    def was_live(self) -> bool:
        """True once it has stood, so that it is to stand again."""
        return self.live_since > -math.inf

    def end(self, *, silent: bool = False) -> None:
        """Note that nothing more arrives; ``silent``: the server said nothing any more."""
        self.live = False
        self.leave(for_good=True)
        self._events.lost(silent)

    def is_listed(self, visible: int) -> bool:
        """True if a receive that wants such a lease may have this on the list."""
        return self.live and f"{self._name}.{visible}" in self.listed

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
            self._leaving += 1
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

    def _note_undone(self, leave: Leave, when: int) -> None:
        if leave.name == self._name:
            self._leaving -= leave.count
            self._last_undone = max(self._last_undone, when)

    def handle(self, published: bytes) -> None:
        """Do what was published. Raise :class:`MailboxConnectionError` if no mailbox wrote it."""
        try:
            self._handle(published)
        except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise MailboxConnectionError("another program publishes on the mailbox's channels") from error

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
                self._events.claimed(claim, strings, self._leaving > 0)
        elif kind == b"w":
            if len(self.listed) == 1:  # else one of them is off the list, and it is not known which
                self.listed.clear()
            self._waiters.signal(int(value))
        elif kind == b"d":
            self._events.due(int(value) / MICRO)
        elif kind == b"x":
            self._events.cancelled([value.decode("utf-8", "replace")])
        elif kind == b"r":
            self._events.results([value.decode("utf-8", "replace")])


class Listener:
    """Reads what the library publishes for the mailboxes of one connection. It reconnects by itself.

    ``renewal`` subscribes the mailboxes again that have no subscription any more: all of them after a lost connection, one
    that was refused, one whose channels another program has used. It tries until all stand. Subscriptions that stand are not
    disturbed.

    A server that has said nothing for its ``silence`` is taken to be gone. ``watch`` pings a server that has been silent. Both
    run as long as :meth:`run` does.
    """

    def __init__(self, topology: Topology) -> None:
        self.watch = Periodic(self._watch)
        self.renewal = Periodic(self._renew)
        self._topology = topology
        self._timeout = topology.server.timeout
        self._silence = topology.server.silence
        self._now = loop_clock()
        self._subscriptions: dict[Subscription, None] = {}
        self._by_channel: dict[bytes, list[Subscription]] = {}
        self._channel: Channel | None = None
        self._connected_at = -math.inf
        self._silent = False  # the connection was left as the server was silent
        self._retries = Retries(initial=RECONNECT_INITIAL, maximum=RECONNECT_MAXIMUM)
        self._refusals = Retries(initial=RECONNECT_INITIAL, maximum=RECONNECT_MAXIMUM)
        self._next_try = -math.inf
        self._turn = anyio.Lock()
        self._added = anyio.Event()
        self._scope = anyio.CancelScope()

    async def add(self, subscription: Subscription) -> None:
        """Listen for a mailbox, from now on until :meth:`remove`. The caller sets a deadline.

        :raises ServerError: the user may not subscribe to its channels.
        :raises MailboxConnectionError: that cannot be done now, and is not done later.
        """
        self._subscriptions[subscription] = None
        subscription.client.on_connect = self._follow
        try:
            async with self._turn:
                channel = self._channel or await self._connect()
            refused = await self._subscribe(channel, [subscription])
            if subscription in refused:
                raise refused[subscription]
        except BaseException as error:
            await self.remove(subscription)
            if isinstance(error, LOST):
                raise MailboxConnectionError(f"the Redis server: {explain(error)}") from error
            raise
        self._added.set()
        self.watch.wake_by(channel.shared.last_read_at + PING_SHARE * self._silence)

    async def remove(self, subscription: Subscription) -> None:
        """Listen for it no more; the last one closes the connection."""
        self._subscriptions.pop(subscription, None)
        subscription.live = False
        with anyio.CancelScope(shield=True, deadline=self._now() + 1):
            if self._subscriptions:
                await self._unsubscribe(subscription)
            else:
                await self._close()

    async def hear_results(self, subscription: Subscription) -> None:
        """Listen for the results of a mailbox, too. Where that is refused or lost, the waits for results look by themselves."""
        subscription.wants_results = True
        listening, name = self._channel, subscription.results
        if listening is None or not subscription.live or subscription.hears_results:
            return  # the next one begins with them
        subscription.channels += (name,)
        self._by_channel.setdefault(name, []).append(subscription)
        channel = Channel(listening.shared)
        try:
            with suppress(*LOST, ServerError), anyio.move_on_after(self._timeout):
                await channel.send(pack(("SSUBSCRIBE", name)))
                await _refusal(channel, (name,))
                subscription.began_to_hear_results()
        finally:
            await channel.close()

    async def run(self) -> None:
        """Listen until cancelled, as soon as there is a subscription."""
        try:
            while True:
                if self._subscriptions:
                    await self._listen_once()
                else:
                    self._added = anyio.Event()
                    await self._added.wait()
        finally:
            if not self._subscriptions:
                await self._close()

    async def _listen_once(self) -> None:
        """Listen until the connection is lost, or could not be made, or the last mailbox has closed it."""
        self._scope = anyio.CancelScope()
        channel: Channel | None = None
        try:
            if self._channel is None:
                self._added = anyio.Event()
                with anyio.move_on_at(self._next_try):  # sooner, if a mailbox that opens has connected
                    await self._added.wait()
            with anyio.fail_after(self._timeout):
                async with self._turn:
                    channel = self._channel or await self._connect()
            self.watch.wake_by(channel.shared.last_read_at + PING_SHARE * self._silence)
            self.renewal.wake_by(self._now())
            with self._scope:
                await self._listen(channel)
            raise MailboxConnectionError("the Redis server has fallen silent, or calls go to another one")
        except (*LOST, MainspringError):
            if channel is self._channel:
                with anyio.CancelScope(shield=True, deadline=self._now() + 5):
                    await self._lost()

    async def _connect(self) -> Channel:
        self._channel = channel = await self._topology.open_channel(TO_LISTEN)
        channel.shared.subscriber = channel
        self._connected_at, self._silent = self._now(), False
        return channel

    async def _lost(self) -> None:
        """Leave the connection; delay the next try: longer, the more connections break as soon as they are made."""
        channel = self._channel
        if channel is not None and self._now() - self._connected_at >= RECONNECT_MAXIMUM:
            self._retries.succeeded()
        self._next_try = self._now() + self._retries.failed()
        gone = channel.host if channel is not None and not channel.current else None  # None: it said nothing of it
        await self._close()
        for subscription in [one for one in self._subscriptions if one.live]:
            if gone is not None and subscription.client.host == gone:  # else calls have followed to another one
                await subscription.client.suspect()
            subscription.end(silent=self._silent)

    async def _close(self) -> None:
        channel, self._channel = self._channel, None
        self._by_channel.clear()
        if channel is not None:
            await channel.shared.disconnect()  # also channels that are about to subscribe

    async def _renew(self, _: float) -> float:
        """Subscribe all again that have lost their subscription; the refused ones once more, later."""
        channel, wanted = self._channel, [one for one in self._subscriptions if one.was_live and not one.live]
        if channel is None or not wanted:
            return math.inf
        try:
            with anyio.fail_after(self._timeout):
                refused = await self._subscribe(channel, wanted)
        except (*LOST, ServerError):
            if channel is self._channel:
                self._leave_it()
            return math.inf  # the next connection is for all
        if refused:
            return self._now() + self._refusals.failed()
        self._refusals.succeeded()
        return math.inf

    async def _subscribe(
        self, listening: Channel, subscriptions: list[Subscription]
    ) -> dict[Subscription, ServerError]:
        """Subscribe each of them under a new name, all together. Return those which the user may not have; the others stand.

        :raises ServerError: another error, which concerns all of them.
        """
        refused: dict[Subscription, ServerError] = {}
        asked: list[tuple[Subscription, tuple[bytes, ...]]] = []
        channel = Channel(listening.shared)
        try:
            for subscription in subscriptions:
                await self._unsubscribe(subscription)  # the half of it that an earlier try has left
                names = subscription.begin()
                asked.append((subscription, names))
                for name in names:  # one by one: a cluster takes channels of one slot only
                    self._by_channel.setdefault(name, []).append(subscription)
                    await channel.send(pack(("SSUBSCRIBE", name)))
            for subscription, names in asked:
                refusal = await _refusal(channel, names)
                if refusal is not None:
                    refused[subscription] = refusal
                elif subscription.channels == names:  # else it was removed meanwhile
                    subscription.begun()  # first, so that it ends if the connection is lost meanwhile
                    await self._meet(subscription, channel.host)
        finally:
            await channel.close()
        return refused

    async def _unsubscribe(self, subscription: Subscription) -> None:
        names, subscription.channels = subscription.channels, ()
        left = [name for name in names if self._by_channel.get(name) == [subscription]]
        for name in names:
            sharers = self._by_channel.get(name, [])
            if subscription in sharers:
                sharers.remove(subscription)
        for name in left:
            del self._by_channel[name]
            if self._channel is not None:
                with suppress(*LOST):
                    await self._channel.shared.write("SUNSUBSCRIBE", pack(("SUNSUBSCRIBE", name)))

    async def _meet(self, subscription: Subscription, host: Host) -> None:
        """Let calls and this connection meet at one server: after a failover one of them may have found the new one first."""
        if subscription.client.host not in {None, host}:
            await subscription.client.suspect()
            self._follow(subscription.client.host)

    def _follow(self, host: Host | None) -> None:
        """Leave this connection if calls go to another server now: this one would wake no receive here."""
        if self._channel is not None and host not in {None, self._channel.host}:
            self._leave_it()

    def _leave_it(self) -> None:
        """Leave this connection."""
        if self._channel is not None:
            self._channel.shared.retire(pause=False)
        self._scope.cancel()

    async def _listen(self, channel: Channel) -> None:
        by_channel, next_message, messages = self._by_channel, channel.next, channel.messages
        while True:
            message: Any = await next_message(messages)
            if message[0] == b"sunsubscribe":
                channel.shared.retire(pause=False)
                raise MailboxConnectionError("the mailbox has moved to another node")
            for subscription in tuple(by_channel.get(message[1], ())):
                try:
                    subscription.handle(message[2])
                except MailboxConnectionError:  # what else has come on these channels is not to be trusted
                    subscription.end()
                    await self._unsubscribe(subscription)
                    self.renewal.wake_by(self._now() + RECONNECT_MAXIMUM)

    async def _watch(self, overslept: float) -> float:
        channel, now = self._channel, self._now()
        if channel is None:
            return math.inf
        shared = channel.shared
        patience = min(PONG_SHARE * self._silence, self._timeout)
        if shared.pinged_at is not None:
            if now >= shared.pinged_at + patience:
                self._silent = True
                self._leave_it()
                return math.inf
            return shared.pinged_at + patience
        if now < shared.last_read_at + PING_SHARE * self._silence:
            return shared.last_read_at + PING_SHARE * self._silence
        with suppress(*LOST):  # reading tells what is wrong with the connection
            await channel.ping(now)
        return now + patience


async def _refusal(channel: Channel, names: tuple[bytes, ...]) -> ServerError | None:
    """Read the answers to a subscription. Return the error if the user may not have it; raise any other."""
    refusal: ServerError | None = None
    for _ in names:
        try:
            await channel.next(channel.replies)
        except ServerError as error:
            if not is_refusal(error):
                raise
            refusal = error
    return refusal
