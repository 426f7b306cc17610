"""Receives of a Redis mailbox: how they claim and wait, and what becomes of a message whose receive is gone.

A process that finds nothing is put on the mailbox's list of waiters. A call of the library that makes messages pending takes
as many waiters off that list, and wakes each on its own publish/subscribe channel: one message wakes one process. A message
that comes alone is claimed for the waiter and sent to it in the same step. All processes hear, on a channel for all, of the
instant when something is due, if it is sooner than they know, and of cancellations.

The listener reads these channels. Its connection is shared by all mailboxes of the process. For each connection a mailbox has
a new name: so the library can tell what was sent to a lost one, and undo these claims once that name is off the list.

A receive is in one of three states: it claims, it waits in line (woken by a signal, a delivery, an error or its deadline), or
it has ended. Every delivery goes to exactly one receive that is not closed or cancelled, or its claim is undone. A receive that
was woken and cannot claim wakes the next one, here or in another process.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio
import hiredis

from mainspring.core import random
from mainspring.core.clock import loop_clock
from mainspring.core.loggers import Logger
from mainspring.errors import (
    ConfigError,
    MailboxClosedError,
    MailboxConnectionError,
    MainspringError,
    copied,
)
from mainspring.mailbox.batched import Batcher, Open, Unclaim
from mainspring.mailbox.redis.client import Batches
from mainspring.mailbox.redis.commands import (
    MICRO,
    Leave,
    Recover,
    RedisClaim,
    RedisSweep,
    RemoveWaiters,
    WakeOthers,
    base_of,
    claimed_at,
    delivery_of,
    micros,
)
from mainspring.mailbox.redis.connection import LOST, RECONNECT_INITIAL, RECONNECT_MAXIMUM, ServerError, explain
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
_log = Logger("mainspring.mailbox")


@dataclass(eq=False, slots=True)
class WaitingReceive:
    """One receive in line, which wants its lease for ``visible`` microseconds and waits until ``deadline``."""

    visible: int
    deadline: float
    event: anyio.Event = field(default_factory=anyio.Event)
    delivery: ClaimedMessage | None = None
    error: Exception | None = None
    is_late: bool = False


class WaitingReceives:
    """The receives of one mailbox object that wait, in a line. Without any, other processes are woken by ``wake_others``.

    ``alarm`` ends their waits at their deadlines: one timer for all, as a scope for each would cost more than its message.
    """

    __slots__ = ("_now", "_wake_others", "active", "alarm", "line", "signals", "wanted")

    def __init__(self, wake_others: Callable[[int], None]) -> None:
        self.line: deque[WaitingReceive] = deque()
        self.active = 0
        """Receives that have begun with a wait and have not ended, in line or not."""
        self.wanted: dict[int, int] = {}
        """How many active receives want a lease of that many microseconds."""
        self.signals = 0
        """Changes whenever there may be more to claim. A receive compares it with its value before its last claim."""
        self.alarm = Periodic(self._end_waits)
        self._wake_others = wake_others
        self._now = loop_clock()

    async def wait(
        self, seen: int, deadline: float, visible: int, refuse: Callable[[ClaimedMessage], None]
    ) -> ClaimedMessage | None:
        """Wait to be woken, unless ``signals`` is not ``seen`` any more. Return the delivery that it was given, if any.

        Cancelled after it was woken, it wakes the next one; cancelled with a delivery, it calls ``refuse``. Raises the error of
        :meth:`fail_all`.
        """
        receive = WaitingReceive(visible, deadline)
        if deadline < self.alarm.due:
            self.alarm.wake_by(deadline)
        self.line.append(receive)
        try:
            if self.signals == seen:
                await receive.event.wait()
        except BaseException:
            if receive.delivery is not None:
                refuse(receive.delivery)
            elif receive.event.is_set() and receive.error is None and not receive.is_late:
                self.wake_next()
            raise
        finally:
            if not receive.event.is_set():
                self.line.remove(receive)
        if receive.error is not None:
            raise receive.error
        return receive.delivery

    async def _end_waits(self, overslept: float) -> float:
        now = self._now()
        for receive in [receive for receive in self.line if receive.deadline <= now]:
            self.line.remove(receive)
            receive.is_late = True
            receive.event.set()
        return min((receive.deadline for receive in self.line), default=math.inf)

    def give(self, delivery: ClaimedMessage, visible: int) -> bool:
        """Give it to the receive that has waited longest for a lease of that many microseconds; return whether there is one."""
        for receive in self.line:
            if receive.visible == visible:
                self.line.remove(receive)
                receive.delivery = delivery
                receive.event.set()
                return True
        return False

    def wake(self, count: int) -> None:
        """Wake the receives that have waited longest, as messages have come. Without any, wake other processes."""
        self.signals += 1
        if not self.active:
            self._wake_others(count)
        for _ in range(min(count, len(self.line))):
            self.line.popleft().event.set()

    def wake_next(self) -> None:
        """Wake another receive, here or in another process, for a woken receive that cannot claim."""
        if self.line:
            self.line.popleft().event.set()
        else:
            self._wake_others(1)

    def wake_all(self) -> None:
        """Wake all receives in line."""
        self.signals += 1
        while self.line:
            self.line.popleft().event.set()

    def fail_all(self, error: Exception) -> None:
        """Raise ``error`` in all receives in line. Receives that were woken or have a delivery go on."""
        while self.line:
            receive = self.line.popleft()
            receive.error = copied(error)
            receive.event.set()


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
        receives: WaitingReceives,
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
        self._receives = receives
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
                self._receives.wake_all()  # messages that came meanwhile have woken no receive here
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
            self._receives.wake(int(value))
        elif kind == b"d":
            self._events.due(int(value) / MICRO)
        elif kind == b"x":
            self._events.cancelled([value.decode("utf-8", "replace")])


class Receiving:
    """The receives of the mailbox ``name``, and the batcher by which they and all other operations reach the library.

    :param fallback: seconds between two sweeps for receives that wait (see
        :class:`~mainspring.mailbox.redis.mailbox.RedisMailbox`).
    :param recovery: seconds between two recoveries.
    :param on_cancelled: called with the ids of cancelled messages.
    :param on_silence: called with the error of a call that was not answered in time.
    """

    def __init__(
        self,
        name: str,
        topology: Topology,
        client: Client,
        timeout: float,
        silence: float,
        *,
        fallback: float,
        recovery: float,
        on_cancelled: Callable[[list[str]], None],
        on_silence: Callable[[MailboxConnectionError], None],
    ) -> None:
        self.closed = False
        self.receives = WaitingReceives(self._wake_others)
        events = ListenerEvents(
            due=self._due_in,
            cancelled=on_cancelled,
            claimed=self._give,
            leave=self._post,
            lost=self._listener_lost,
        )
        client.on_silence = self._fell_silent
        self.listener = Listener(topology, base_of(name), client, self.receives, events, timeout, silence)
        self.batches = Batches(
            name,
            client,
            timeout,
            waiter=self.listener.waiter,
            on_due=self._due_in,
            on_unconfirmed=self._sweep_soon,
        )
        self.batcher: Batcher[Command] = Batcher(
            self.batches.execute, undo=self._undo, resume=self.batches.resume, name=f"mailbox {name!r}"
        )
        self.sweeper = Periodic(self._sweep)
        self._recoverer = Periodic(self._recover)
        self._name = name
        self._fallback = fallback
        self._recovery = recovery
        self._shield = anyio.CancelScope(shield=True)
        self._client = client
        self._on_silence = on_silence
        self._probes = False  # the next sweep is made even if no receive waits
        self._now = loop_clock()

    # ------------------------------------------------------------------------------------------------------ receiving

    async def claim(self, limit: int, visibility: float, wait: float) -> list[ClaimedMessage]:
        """Claim what is pending, or comes within ``wait`` seconds."""
        if not wait:
            return await self._claim_once(limit, visibility, waits=False)
        receives, visible = self.receives, micros(visibility)
        deadline = self._now() + wait
        receives.active += 1
        self._due_in(self._fallback)
        receives.wanted[visible] = receives.wanted.get(visible, 0) + 1
        woken = False
        found: list[ClaimedMessage] = []
        try:
            while True:
                seen = receives.signals
                try:
                    found = await self._claim_once(limit, visibility, waits=True)
                finally:
                    if not found or receives.active > 1:
                        self.listener.waiter(visible, listed=True)
                woken = False
                if found or self.closed:
                    woken = receives.signals != seen  # woken meanwhile: for these, or for more
                    return found
                given = await receives.wait(seen, deadline, visible, self._undo_claims)
                if given is not None:
                    if not self.closed:
                        return [given]
                    self._undo_claims(given)
                if self.closed or (receives.signals == seen and self._now() >= deadline):
                    return []  # nothing has come; a receive that another one woke claims, and waits on
                woken = True
        finally:
            self._end_receive(visible, woken=woken)

    def _end_receive(self, visible: int, *, woken: bool) -> None:
        """Note that a receive has ended. ``woken``: it was woken and has not claimed since."""
        receives, listener = self.receives, self.listener
        receives.active -= 1
        receives.wanted[visible] -= 1
        if woken:
            receives.wake_next()
        if listener.listed and not receives.active:
            listener.leave()
        if not receives.wanted[visible]:
            del receives.wanted[visible]
            if listener.no_longer_wanted(visible):
                self._list_again()

    async def _claim_once(self, limit: int, visibility: float, *, waits: bool) -> list[ClaimedMessage]:
        while True:
            command = RedisClaim(limit, visibility, waits, self.batches.claimant, bool(self.receives.line))
            found: list[ClaimedMessage] = await self.batcher.call(command)
            if command.again:
                continue
            if found and self.closed:
                self._undo(command)
                return []
            return found

    def close(self) -> None:
        """End all receives, and undo the claims that are still made for them."""
        self.closed = True
        self.receives.wake_all()

    # -------------------------------------------------------------------------------------------- undoing and waking

    def _undo(self, command: Command) -> None:
        """Undo a claim whose receive is gone, before any other operation."""
        if type(command) is RedisClaim:
            self._undo_claims(*(command.result or ()))

    def _undo_claims(self, *claimed: ClaimedMessage) -> None:
        if claimed:
            self.batcher.post(Unclaim(list(claimed)))

    def _wake_others(self, count: int) -> None:
        """Wake other processes: this one was woken for messages that no receive here takes."""
        if self._client.connected and not self.closed:
            self.batcher.post(WakeOthers(count))

    def _post(self, command: Command) -> None:
        self.batcher.post(command)

    # ---------------------------------------------------------------------------------------------- while they wait

    def _give(self, claim: int, strings: list[bytes]) -> None:
        """Give a message that was claimed for a receive here to one, or undo the claim."""
        visible, token, value, *rest = strings
        leased_at = min(self._now(), claim / MICRO + self.batches.clock_offset)
        details = dict(zip(rest[::2], rest[1::2], strict=True)) if rest else None
        delivery = delivery_of(token, value, details, leased_at)
        if self.closed or not self.receives.give(delivery, int(visible)):
            self._undo_claims(delivery)
        self.receives.signals += 1  # this process is off the list: a receive that is about to wait claims once more
        if self.receives.line:
            self._list_again()

    def _list_again(self) -> None:
        """Put this process back on the list of waiters, if receives wait."""
        if self.receives.line:
            self.batcher.post(RedisSweep(self._waiter))

    def _due_in(self, seconds: float) -> None:
        if self.receives.active and (when := self._now() + seconds) < self.sweeper.due:
            self.sweeper.wake_by(when)

    def _listener_lost(self, silent: bool) -> None:
        """Find out at once whether the server is there: it wakes no receive meanwhile. If it was silent, in any case."""
        self._probes = self._probes or silent
        self.sweeper.wake_by(self._now())

    def _fell_silent(self, error: MailboxConnectionError) -> None:
        """Raise the error in receives that wait now, not after a call of their own."""
        self.receives.fail_all(error)
        self._on_silence(error)

    def _sweep_soon(self) -> None:
        self.sweeper.wake_by(self._now() + self._fallback)

    async def _sweep(self, overslept: float) -> float:
        """Let the library do what is due, for receives that wait for it: it wakes them.

        Unconfirmed operations leave with this call, also if no receive waits.
        """
        if not (self.receives.active or self.batches.unconfirmed or self._probes):
            return math.inf
        self._probes = False
        again = self._now() + self._fallback
        try:
            await self.batcher.call(RedisSweep(self._waiter))
        except MainspringError:
            self.receives.wake_all()  # unless it was silence, the next call may succeed
        else:
            if not self.listener.live:  # the library cannot wake them
                self.receives.wake_all()
        return again

    async def open(self) -> None:
        """Make the mailbox known; raise :class:`ConfigError` if the user or its keys do not allow its operations."""
        opening, recover = Open(self._name), Recover(self._recovery)
        try:
            await self.batches.execute([opening])
        except ServerError as error:
            if error.code not in {"NOPERM", "WRONGTYPE"}:
                raise
            opening.result = [f"has no use of it: {error.code} {error.detail}"]
        if opening.error is not None:
            raise opening.error
        if opening.result:
            raise ConfigError(
                f"mailbox {self._name!r}: the user of the URL {', '.join(opening.result)}; grant the commands with ACL SETUSER"
                " (how-to/redis says which), and rename keys that are another program's"
            )
        if not self._name.startswith("~"):  # one for replies lives no longer than its requester
            await self.batches.execute([recover])
            self._recoverer.wake_by(self._now() + self._recovered(recover))

    async def _recover(self, overslept: float) -> float:
        recover = Recover(self._recovery)
        try:
            await self.batcher.call(recover)
        except MailboxClosedError:
            return math.inf
        except MainspringError:  # it is tried again; users of the mailbox hear of it
            return self._now() + self._recovery
        return self._now() + self._recovered(recover)

    def _recovered(self, recover: Recover) -> float:
        if recover.result is None:
            return self._recovery
        found, again = recover.result
        if found:
            _log.warning(
                "mailbox %r: %d messages or dead letters that no index had are back (a key was deleted)",
                self._name,
                found,
            )
        return float(again)

    def _waiter(self) -> str:
        """Return the name on the list for the receive that has waited longest; "" if none waits."""
        if not self.receives.line:
            return ""
        return self.listener.waiter(self.receives.line[0].visible, listed=True)

    async def keep_time(self) -> None:
        """Run the timers until :meth:`end`, also if all around is cancelled: clean-up under a shield has deadlines as well."""
        with self._shield:
            async with anyio.create_task_group() as timers:
                timers.start_soon(self.batches.watch.run)
                timers.start_soon(self.receives.alarm.run)
                timers.start_soon(self.listener.watch.run)
                timers.start_soon(self._recoverer.run)

    def end(self) -> None:
        """End the timers."""
        self._shield.cancel()
