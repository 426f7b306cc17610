"""How the receives of one mailbox object claim and wait, and what becomes of what was claimed for one that is gone.

Receives that wait hear of messages over a second connection, on which the library calls.

A process that has found nothing is noted in the mailbox as a waiter. Whoever makes messages pending takes as many waiters
off that list as there are messages, and calls each on its own channel, so one message wakes one process; a message that comes
alone is claimed for the waiter and sent to it in the same step, so that it need not ask. All processes hear, on a channel for
all, of an instant that something is due at, if it is sooner than they know, and of cancellations.

All mailboxes of a process share that connection. For each time that it is made, each mailbox has a
channel, and a name, of its own. So what was sent to one that broke can be told from all else, and taken back once its name is
off the list.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio

from mainspring.core import random
from mainspring.core.clock import loop_clock
from mainspring.core.loggers import Logger
from mainspring.errors import (
    ConfigError,
    MailboxClosedError,
    MailboxConnectionError,
    MainspringError,
    ReceiptHandleExpiredError,
)
from mainspring.mailbox import waiting
from mainspring.mailbox.batcher import Batcher
from mainspring.mailbox.redis.batches import Batches
from mainspring.mailbox.redis.commands import (
    UNREADABLE,
    Bury,
    Claim,
    Leave,
    Look,
    Open,
    Operation,
    Pass,
    Recover,
    Unclaim,
    Unlist,
    base_of,
    claimed_at,
    delivered,
    micro,
)
from mainspring.mailbox.redis.connection import LOST, RECONNECT_MAXIMUM, Gate, ServerError, parsed, trouble
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from mainspring.mailbox.message import Delivery
    from mainspring.mailbox.redis.client import Directory, Link
    from mainspring.mailbox.redis.connection import Channel
    from mainspring.mailbox.settings import Host

ASK_SHARE: Final = 0.15
"""The part of the ``silence`` after which the listener asks whether the server is still there."""
ANSWER_SHARE: Final = 0.25
"""The part of it that the answer may take, which leaves the rest to the calls that find the server away."""
MOST_NAMES: Final = 100
"""Names that this process keeps in mind though it wants to be called by them no more, as they might still be on the list."""


class Waiters(waiting.Waiters):
    """The receives of one mailbox object that wait. Those that nobody here can take are called for elsewhere.

    ``active`` counts them from their first look on (see :meth:`enter`). ``alarm`` ends their waits in time, as long as it runs:
    one timer for all of them, as a scope for each would cost more than to hand it its message.
    """

    __slots__ = ("_alike", "_given", "_now", "_pass_on", "_until", "_wanted", "active", "alarm")

    def __init__(self, pass_on: Callable[[int], None]) -> None:
        super().__init__()
        self.active = 0
        self.alarm = Periodic(self._end_waits)
        self._pass_on = pass_on
        self._now = loop_clock()
        self._wanted: dict[anyio.Event, int] = {}  # for how long the parked ones want their leases
        self._until: dict[anyio.Event, float] = {}  # how long they wait
        self._given: dict[anyio.Event, Delivery] = {}
        self._alike: dict[int, int] = {}  # how many are active that want leases of so many microseconds

    def enter(self, visible: int) -> None:
        """A receive begins that wants a lease of so many microseconds."""
        self.active += 1
        self._alike[visible] = self._alike.get(visible, 0) + 1

    def exit(self, visible: int) -> bool:
        """It has ended. Whether it was the last one that wanted such a lease."""
        self.active -= 1
        self._alike[visible] -= 1
        if self._alike[visible]:
            return False
        del self._alike[visible]
        return True

    @property
    def wanted(self) -> int | None:
        """The microseconds for which the one that has waited longest wants its lease."""
        return self._wanted[self._line[0]] if self._line else None

    async def wait_for(
        self, seen: int, deadline: float, visible: int, refuse: Callable[[Delivery], None]
    ) -> Delivery | None:
        """As :meth:`wait`; also what it was given meanwhile, leased for ``visible`` microseconds.

        Cancelled once it was given something, it hands that to ``refuse``. Raises the error of :meth:`fail_all`.
        """
        event = anyio.Event()
        self._wanted[event] = visible
        self._until[event] = deadline
        self.alarm.wake_by(deadline)
        try:
            await self._park(event, seen)
        except BaseException:
            if event in self._given:
                refuse(self._given.pop(event))
            elif event.is_set() and event in self._until and self._failed.pop(event, None) is None:
                self.forsake()
            raise
        finally:
            del self._wanted[event]
            self._until.pop(event, None)
        self._raise_for(event)
        return self._given.pop(event, None)

    async def _end_waits(self, overslept: float) -> float:
        now = self._now()
        for event in [event for event in self._line if self._until[event] <= now]:
            self._line.remove(event)
            del self._until[event]
            event.set()
        return min((self._until[event] for event in self._line), default=math.inf)

    def give(self, delivery: Delivery, visible: int) -> bool:
        """Let the one have it that has waited longest for a lease of so many microseconds; whether there is one."""
        for event in self._line:
            if self._wanted[event] == visible:
                self._line.remove(event)
                self._given[event] = delivery
                event.set()
                return True
        return False

    def forsake(self) -> None:
        """A receive whose turn it was cannot take it: the next one shall, here or elsewhere."""
        if self.parked:
            super().forsake()
        else:
            self._pass_on(1)

    def wake(self, count: int) -> None:
        """Messages have come: let the receives that have waited longest look again. Without any, others are called."""
        self.signals += 1
        if not self.active:
            self._pass_on(count)
        super().wake(count)

    def wake_all(self) -> None:
        self.signals += 1
        super().wake_all()


class Told(NamedTuple):
    """Who is told what a listener hears.

    ``given`` is told of a message that was claimed for a receive here. ``leave`` has that done. ``lost`` is told of a lost
    connection, and whether the server had fallen silent.
    """

    due: Callable[[float], None]
    cancelled: Callable[[list[str]], None]
    given: Callable[[list[bytes]], None]
    leave: Callable[[Leave | Unlist], None]
    lost: Callable[[bool], None]


class Listener:
    """What one mailbox has of the connection on which the server calls. It comes back by itself; meanwhile ``live`` is False.

    ``watch`` asks, as long as it runs, whether the server is still there where it has been silent.
    """

    def __init__(
        self,
        directory: Directory,
        base: bytes,
        link: Link,
        waiters: Waiters,
        told: Told,
        timeout: float,
        silence: float,
    ) -> None:
        self.live = False
        self.live_since = -math.inf
        self.reconnects = 0
        self.watch = Periodic(self._watch)
        self._now = loop_clock()
        self._wire: Channel | None = None
        self._silent = False  # whether the connection was left for that
        self._directory = directory
        self._base = base
        self._link = link
        self._waiters = waiters
        self._told = told
        self._timeout = timeout
        self._ask_after = ASK_SHARE * silence
        self._patience = min(timeout, ANSWER_SHARE * silence)
        self._name = ""
        self._listed: set[str] = set()  # as whom it may be on the list
        self._written: set[str] = set()  # as whom it was to be put there, since the connection was made
        self._unwanted: set[str] = set()  # those of them as whom nobody here wants to be called any more
        self._was_written = False  # since the connection was made
        self._heard = 0  # when the last message was claimed that came on this connection
        self._left = 0  # when the last one was claimed that has gone back before it came
        self._gate = Gate()
        self._host: Host | None = None
        self._scope = anyio.CancelScope()
        link.on_connect = self._follow

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Listen until cancelled; started once it listens. Raises only before that."""
        started = False
        while True:
            wire: Channel | None = None
            try:
                await self._gate.wait()
                with anyio.fail_after(self._timeout):
                    wire = await self._directory.listen()
                    await self._subscribe(wire)
                self._wire, self._silent = wire, False
                self.live, self._host, self.live_since = True, wire.host, self._now()
                await self._meet()
                if started:
                    self.reconnects += 1
                else:
                    started = True
                    task_status.started()
                self._waiters.wake_all()  # what came meanwhile has called nobody here
                with self._scope:
                    await self._listen(wire)
                if self._silent:
                    raise MailboxConnectionError("the Redis server has fallen silent")
                self._failed()
            except (*LOST, MainspringError) as error:
                if not started:
                    if isinstance(error, MainspringError):
                        raise
                    raise MailboxConnectionError(f"the Redis server: {trouble(error)}") from error
                self._failed()
                if (
                    self.live and self._wire is not None and not self._wire.current
                ):  # else the server has said nothing of it
                    await self._link.suspect()
            finally:
                self.live, self._wire = False, None
                if wire is not None:
                    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                        await wire.close()
            self.leave(for_good=True)
            self._told.lost(self._silent)

    def waiter(self, visible: int) -> str:
        """As whom a receive is on the list that wants a lease of so many microseconds; "" where nobody could call it.

        Whoever asks is about to have it written there, whatever becomes of that call.
        """
        if not self.live:
            return ""
        waiter = f"{self._name}.{visible}"
        self._written.add(waiter)
        self._unwanted.discard(waiter)
        self._was_written = True
        return waiter

    def listed(self, visible: int) -> None:
        """A receive here may be on the list now, if anybody can call it."""
        if self.live:
            self._listed.add(self.waiter(visible))

    def leave(self, *, for_good: bool = False) -> None:
        """Have this process taken off the list, where it may be on it, and given back what was claimed for it and not heard.

        ``for_good``: nothing more is heard on this connection.
        """
        if self._listed or (for_good and self._was_written):
            names = self._written if for_good else self._listed
            self._told.leave(Leave(self._name, self._heard, sorted(names), self._has_left, for_good=for_good))
            self._listed.clear()
            if for_good:
                self._written.clear()
                self._unwanted.clear()
                self._was_written = False

    def unwanted(self, visible: int) -> bool:
        """No receive here wants a lease of so many microseconds any more. Whether names are to leave the list for that.

        It may have been the only one by which those were called that wait still.
        """
        waiter = f"{self._name}.{visible}"
        if waiter not in self._written:
            return False
        self._unwanted.add(waiter)
        if waiter not in self._listed and len(self._unwanted) <= MOST_NAMES:
            return False
        self._told.leave(Unlist(self._unwanted))
        self._listed -= self._unwanted
        self._written -= self._unwanted
        self._unwanted = set()
        return True

    def _has_left(self, name: str, when: int) -> None:
        if name == self._name:
            self._left = max(self._left, when)

    async def _meet(self) -> None:
        """Where calls go to another server than this one, which was found later, they are to come here; or both look again."""
        self._scope = anyio.CancelScope()
        if self._link.host not in {None, self._host}:
            await self._link.suspect()
            self._follow(self._link.host)

    def _failed(self) -> None:
        """Connections that break as soon as they are made become rarer."""
        if self.live and self._now() - self.live_since >= RECONNECT_MAXIMUM:
            self._gate.succeeded()
        self._gate.failed()

    def _follow(self, host: Host | None) -> None:
        """Calls go to ``host`` now: where that is another server than this connection's, it calls nobody here."""
        if None not in {host, self._host} and host != self._host:
            self._leave_it()

    def _leave_it(self) -> None:
        """Listen on this connection no more; other mailboxes that do so still leave it when they find the same."""
        if self._wire is not None:
            self._wire.retire()
        self._scope.cancel()

    async def _subscribe(self, wire: Channel) -> None:
        self._name, self._heard, self._left = random.token(96), 0, 0
        for channel in ("all", self._name):  # one by one: a cluster takes only channels of one slot, which these are
            await wire.subscribe(self._base + channel.encode())

    async def _listen(self, wire: Channel) -> None:
        self.watch.wake_by(wire.heard_at + self._ask_after)
        while True:
            message: Any = await wire.hear()
            if message[0] == b"smessage":
                try:
                    self._hear(message[2])
                except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
                    raise MailboxConnectionError("somebody else speaks on the mailbox's channels") from error
            elif message[0] == b"sunsubscribe":
                wire.retire()
                raise MailboxConnectionError("the mailbox has moved to another node")

    async def _watch(self, overslept: float) -> float:
        wire, now = self._wire, self._now()
        if wire is None:
            return math.inf
        if wire.asked_at is not None:
            if now >= wire.asked_at + self._patience:
                self._silent = True
                self._leave_it()
                return math.inf
            return wire.asked_at + self._patience
        if now < wire.heard_at + self._ask_after:
            return wire.heard_at + self._ask_after
        with suppress(*LOST):  # what is wrong with the connection, reading tells
            await wire.ask(now)
        return now + self._patience

    def _hear(self, said: bytes) -> None:
        kind, what = said[:1], said[1:]
        if kind == b"m":
            self._hear_of_message(parsed(what))
        elif kind == b"w":
            if len(self._listed) == 1:  # else one of them is off the list, and it is not known which
                self._listed.clear()
            self._waiters.wake(int(what))
        elif kind == b"d":
            self._told.due(int(what) / 1e6)
        elif kind == b"x":
            self._told.cancelled([what.decode("utf-8", "replace")])

    def _hear_of_message(self, strings: list[bytes]) -> None:
        """It was claimed for a receive here, which is off the list by that."""
        self._listed.discard(f"{self._name}.{int(strings[0])}")
        when = claimed_at(strings[1].decode())
        self._heard = max(self._heard, when)
        if when > self._left:
            self._told.given(strings)


_log = Logger("mainspring.mailbox")


class Receiving:
    """The receives of the mailbox ``name``, and the batcher by which they, and all other operations, reach the library.

    :param fallback: seconds between two looks of those who wait (see :class:`~mainspring.mailbox.redis.mailbox.RedisMailbox`).
    :param recovery: seconds between two looks for what is to be mended.
    :param usable: whether receives may still have messages; once it is not, what is claimed for them goes back.
    :param on_cancelled: told the ids of messages that somebody has cancelled.
    :param on_silence: told why, when the server has not answered a call in time.
    """

    def __init__(
        self,
        name: str,
        directory: Directory,
        link: Link,
        timeout: float,
        silence: float,
        *,
        fallback: float,
        recovery: float,
        usable: Callable[[], bool],
        on_cancelled: Callable[[list[str]], None],
        on_silence: Callable[[MailboxConnectionError], None],
    ) -> None:
        self.waiters = Waiters(self._pass_on)
        told = Told(
            due=self._due_in, cancelled=on_cancelled, given=self._given, leave=self._leave, lost=self._listener_lost
        )
        link.on_silence = self._fell_silent
        self.listener = Listener(directory, base_of(name), link, self.waiters, told, timeout, silence)
        self.batches = Batches(
            name, link, timeout, waiter=self.listener.waiter, due_in=self._due_in, owing=self._look_soon
        )
        self.batcher: Batcher[Operation] = Batcher(
            self.batches.execute, undo=self._undo, resume=self.batches.resume, name=f"mailbox {name!r}"
        )
        self.sweeper = Periodic(self._look)
        self._recoverer = Periodic(self._recover)
        self._name = name
        self._fallback = fallback
        self._recovery = recovery
        self._shield = anyio.CancelScope(shield=True)
        self._link = link
        self._usable = usable
        self._on_silence = on_silence
        self._probes = False  # the next look is made even if no receive waits
        self._now = loop_clock()

    # ------------------------------------------------------------------------------------------------------ receiving

    async def claim(self, limit: int, visibility: float, wait: float) -> list[Delivery]:
        """What is there for a receive, or comes within ``wait`` seconds."""
        if not wait:
            return await self._claim_once(limit, visibility, waits=False)
        waiters, visible = self.waiters, micro(visibility)
        deadline = self._now() + wait
        self._look_soon()
        waiters.enter(visible)
        turn = False
        found: list[Delivery] = []
        try:
            while True:
                seen = waiters.signals
                try:
                    found = await self._claim_once(limit, visibility, waits=True)
                finally:
                    if not found or waiters.active > 1:
                        self.listener.listed(visible)
                turn = False
                if found or not self._usable():
                    turn = waiters.signals != seen  # called meanwhile: for these, or for more
                    return found
                given = await waiters.wait_for(seen, deadline, visible, self._refuse)
                if given is not None:
                    if self._usable():
                        return [given]
                    self._refuse(given)  # closed meanwhile
                if not self._usable() or (waiters.signals == seen and self._now() >= deadline):
                    return []  # nothing has come; one to whom another's turn was passed looks, and waits on
                turn = True
        finally:
            last = waiters.exit(visible)
            if turn:  # it was called and has not looked
                waiters.forsake()
            if not waiters.active:
                self.listener.leave()
            if last and self.listener.unwanted(visible):
                self._list_again()

    async def _claim_once(self, limit: int, visibility: float, *, waits: bool) -> list[Delivery]:
        while True:
            command = Claim(limit, visibility, self.batches.claimant, waits, self.waiters.parked > 0)
            found: list[Delivery] = await self.batcher.call(command)
            buried = 0
            for delivery in command.unreadable:
                with suppress(ReceiptHandleExpiredError):  # it comes again
                    await self.batcher.call(Bury(delivery, UNREADABLE))
                    buried += 1
            if command.again or (buried and not found):
                continue
            if found and not self._usable():  # closed meanwhile
                self._undo(command)
                return []
            return found

    # ----------------------------------------------------------------------------------------- what goes back or on

    def _undo(self, command: Operation) -> None:
        """A claim whose receiver is gone goes back, before anything else is done."""
        if type(command) is Claim:
            self._refuse(*(command.result or ()), *command.unreadable)

    def _refuse(self, *claimed: Delivery) -> None:
        """What was claimed for a receive here that cannot have it goes back."""
        if claimed:
            self.batcher.post(Unclaim([delivery.receipt_handle for delivery in claimed]))

    def _pass_on(self, count: int) -> None:
        """This process was called for messages that nobody here takes."""
        if self._link.connected and self._usable():
            self.batcher.post(Pass(count))

    def _leave(self, leave: Leave | Unlist) -> None:
        self.batcher.post(leave)

    # ------------------------------------------------------------------------------------------------ while they wait

    def _given(self, strings: list[bytes]) -> None:
        """A message was claimed for a receive that waits here: one has it now, or it goes back."""
        visible, token, value, *few = strings
        leased_at = self.batches.instant(claimed_at(token.decode()))
        more = dict(zip(few[::2], few[1::2], strict=True)) if few else None
        delivery, readable = delivered(token, value, more, leased_at)
        if not readable:
            self.batcher.post(Bury(delivery, UNREADABLE))
        elif not self._usable() or not self.waiters.give(delivery, int(visible)):
            self._refuse(delivery)
        self.waiters.signals += 1  # this process is off the list: who is about to wait looks again
        self._list_again()

    def _list_again(self) -> None:
        """This process may be on the list no more: for those that wait it is put there again."""
        if self.waiters.parked:
            self.batcher.post(Look(self._waiter))

    def _due_in(self, seconds: float) -> None:
        if self.waiters.active:
            self.sweeper.wake_by(self._now() + seconds)

    def _listener_lost(self, silent: bool) -> None:
        """Look at once whether the server is there: no call comes from it meanwhile. If it was silent, look in any case."""
        self._probes = self._probes or silent
        self.sweeper.wake_by(self._now())

    def _fell_silent(self, error: MailboxConnectionError) -> None:
        """A call was not answered in time: receives that are parked raise that now, and not after a call of their own."""
        self.waiters.fail_all(error)
        self._on_silence(error)

    def _look_soon(self) -> None:
        self.sweeper.wake_by(self._now() + self._fallback)

    async def _look(self, overslept: float) -> float:
        """Let what is due by now be done, for the receives that wait for it: the library calls those it is for.

        What is owed goes along, also where nobody waits, or calls any more.
        """
        if not (self.waiters.active or self.batches.unconfirmed or self._probes):
            return float("inf")
        self._probes = False
        again = self._now() + self._fallback
        try:
            await self.batcher.call(Look(self._waiter))
        except MainspringError:
            self.waiters.wake_all()  # unless it was silence, the next call may succeed
        else:
            if not self.listener.live:  # nobody can call
                self.waiters.wake_all()
        return again

    async def open(self) -> None:
        """Make the mailbox known; raises :class:`ConfigError` where the user or its keys do not allow its operations."""
        opening, recover = Open(), Recover(self._recovery)
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
        if not self._name.startswith("~"):  # one for replies lives no longer than those who wait for them
            await self.batches.execute([recover])
            self._recoverer.wake_by(self._now() + self._recovered(recover))

    async def _recover(self, overslept: float) -> float:
        recover = Recover(self._recovery)
        try:
            await self.batcher.call(recover)
        except MailboxClosedError:
            return math.inf
        except MainspringError:  # it is tried again; who uses the mailbox hears of it
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
        """As whom this process is on the list for those who wait here: for the one that has waited longest."""
        wanted = self.waiters.wanted
        if wanted is None:
            return ""
        self.listener.listed(wanted)
        return self.listener.waiter(wanted)

    async def keep_time(self) -> None:
        """Run the timers until :meth:`end`, also where all around is cancelled: who cleans up under a shield has waits, too."""
        with self._shield:
            async with anyio.create_task_group() as timers:
                timers.start_soon(self.batches.watch.run)
                timers.start_soon(self.waiters.alarm.run)
                timers.start_soon(self.listener.watch.run)
                timers.start_soon(self._recoverer.run)

    def end(self) -> None:
        """End the timers: there is nothing more to wait for."""
        self._shield.cancel()
