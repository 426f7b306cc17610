"""``InMemoryMailbox``: a mailbox of one process and one event loop, with all the semantics of the durable ones."""

from __future__ import annotations

import asyncio
import math
import threading
from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, Never, Self, overload
from urllib.parse import quote, unquote, urlsplit
from weakref import WeakSet, finalize

import anyio
from anyio.lowlevel import current_token
from typing_extensions import TypeVar

from mainspring.core import clock, process, random
from mainspring.errors import ConfigError, MailboxClosedError, ReplyNotAvailableError
from mainspring.mailbox.backend import TRANSIENT, Backend, Capabilities, MailboxStatistics
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.memory.queue import MemoryQueue
from mainspring.mailbox.message import Ack, CancelOutcome, Nack
from mainspring.mailbox.records import RESULT, RecordWrite
from mainspring.runtime.interval import Periodic
from mainspring.validation import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from mainspring.mailbox.limiters import LimitChange, LimitState
    from mainspring.mailbox.message import (
        Cancelled,
        ClaimedMessage,
        Counts,
        Dead,
        Envelope,
        MessagePage,
        MessageQuery,
        RescheduleOutcome,
        Result,
        Settlement,
        UnfinishedMessage,
    )
    from mainspring.mailbox.records import Record
    from mainspring.runtime.scope import DaemonScope

T = TypeVar("T", default=Any)
R = TypeVar("R", default=Any)

KIND = "memory://"
YIELD_EVERY = 64
"""Sends after which a sender that never waits lets the other tasks have a turn."""


class InMemoryMailbox(Mailbox[T, R]):
    """A queue in this process's memory, on one event loop; nothing of it outlives the process.

    :param name: for messages to people and metrics. Whatever its name, a mailbox made by the constructor is a queue of its
        own; ``open_mailbox("memory://name")`` gives the one queue of that name on the event loop.
    :param capacity: the most messages that may wait or be in flight; a send beyond it raises :class:`MailboxFullError`.
    :param serialize: pass bodies and replies through JSON, as a durable mailbox does, so that a test meets what production
        would; False hands the objects themselves over after checking their type: quicker, and of no use to such a test.
    :param body: the type of the bodies; else the handler's annotation gives it, else anything goes.
    :param reply: the type of the replies.

    It works without being entered, too: delays and leases then end at the next call, and a waiting receive wakes for them.
    It belongs to the event loop that it is used on, and its messages end with that; on the next one it begins empty. Used on
    another loop while its own lives, or after its own has ended with messages that were not done, it raises
    :class:`ConfigError`.
    """

    if TYPE_CHECKING:

        @overload
        def __init__(
            self,
            name: str | None = None,
            *,
            body: type[T],
            reply: type[R],
            capacity: int | None = None,
            serialize: bool = True,
        ) -> None: ...
        @overload
        def __init__(
            self: InMemoryMailbox[T, Any],
            name: str | None = None,
            *,
            body: type[T],
            reply: Any = None,
            capacity: int | None = None,
            serialize: bool = True,
        ) -> None: ...
        @overload
        def __init__(
            self,
            name: str | None = None,
            *,
            body: Any = None,
            reply: Any = None,
            capacity: int | None = None,
            serialize: bool = True,
        ) -> None: ...

    def __init__(
        self,
        name: str | None = None,
        *,
        capacity: int | None = None,
        serialize: bool = True,
        body: Any = None,
        reply: Any = None,
        **unknown: Never,
    ) -> None:
        from mainspring.mailbox.memory.settings import MemoryOptions

        name = f"memory-{random.token(32)}" if name is None else name
        if isinstance(name, str) and name.startswith(KIND):
            raise ConfigError(f"InMemoryMailbox takes a name, and {name!r} is a URL: that is for open_mailbox()")
        options = MemoryOptions.of(f"{KIND}{name}", capacity=capacity, serialize=serialize, **unknown)
        backend = MemoryBackend(name, capacity=options.capacity, key=f"{name}@{random.token(64)}")
        super().__init__(backend, body=body, reply=reply, serialize=options.serialize)

    @classmethod
    def from_url(cls, url: str, *, body: Any = None, reply: Any = None, **options: Any) -> Self:
        """Return the mailbox for ``memory://host``: the one queue of that name on the event loop it is used on."""
        from mainspring.mailbox.memory.settings import MemoryOptions
        from mainspring.mailbox.settings import with_query

        place, given = with_query(url, options, MemoryOptions)
        if not place.places or place.path not in ("", "/"):
            raise ConfigError(f"{url!r}: a memory mailbox is named memory://NAME, as in memory://jobs")
        read = MemoryOptions.of(place.bare, **given)
        name = unquote(place.places)
        mailbox = cls(name, capacity=read.capacity, serialize=read.serialize, body=body, reply=reply)
        mailbox.backend = MemoryBackend(name, capacity=read.capacity, key=name)
        return mailbox


class MemoryBackend(Backend):
    """A queue in memory. ``key`` is the name under which it is found; one of a mailbox made by the constructor is its alone."""

    capabilities = Capabilities(
        joined_acks=True,
        queue_age=True,
        records=True,
        announces_records=True,
        lookup=True,
        reschedule=True,
        listing=True,
        edit=True,
        limits=True,
        pause=True,
        concurrency=True,
    )
    works_unopened: ClassVar[bool] = True

    def __init__(self, name: str, *, capacity: int | None, key: str) -> None:
        super().__init__(name)
        self._key = key
        self._named: NamedStore = process.shared(KIND, key, NamedStore)
        self._store = self._named.enter(name, capacity)
        self._store.members.add(self)
        self._reaper: Periodic | None = None
        self._opened: MemoryStore | None = None
        """The store while the mailbox is open: then :class:`Mailbox` has seen that the event loop is the right one."""
        self._is_closed = False
        self._sends = 0
        self._closings = 0
        self._waiting = 0

    @property
    def address(self) -> str:
        """Its URL: what ``reply_to`` says."""
        return f"memory://{quote(self._key, safe='@')}"

    @property
    def capacity(self) -> int | None:
        return self._store.queue.capacity

    def local_name(self, address: str) -> str | None:
        if "://" not in address:
            return address
        return unquote(urlsplit(address).netloc) if address.startswith(KIND) else None

    def sibling(self, name: str) -> MemoryBackend:
        return MemoryBackend(name, capacity=None, key=name)

    @property
    def tickets_name(self) -> str:
        return f"{self._key}~dead"

    def _here(self) -> MemoryStore:
        """Return the store, on the running event loop."""
        store = self._store
        if store.thread != get_ident() or not store.is_current():
            store = self._store = self._named.bind(self.name, store)
            store.members.add(self)
        return store

    # --------------------------------------------------------------------------------------------------- life cycle

    async def open(self, scope: DaemonScope) -> None:
        store = self._opened = self._here()
        self._is_closed = False
        self._reaper = reaper = Periodic(store.reap, first=store.queue.next_due())
        store.reapers.append(reaper)
        scope.start_soon(reaper.run, name=f"reaper of mailbox {self.name}")

    async def close(self) -> None:
        """Close. Receives watch the time themselves from now on; :meth:`stop_claims` has woken them."""
        reaper, self._reaper = self._reaper, None
        if reaper in self._store.reapers:
            self._store.reapers.remove(reaper)

    def stop_claims(self) -> None:
        self._is_closed = True
        self._opened = None
        self._closings += 1
        self._store.waker.wake_all()  # also who waits through another object: it may have to watch the time now

    # ------------------------------------------------------------------------------------------------------- messages

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        """Store messages. It never waits, and cancelled it has sent nothing.

        Every 64th send lets the other tasks have a turn first, so that a sender without end does not keep the event loop to
        itself. With a capacity, every send does.
        """
        store = self._opened or self._here()
        self._sends += 1
        if self._sends % YIELD_EVERY and store.queue.capacity is None:
            await store.checkpoint_if_cancelled()
        else:
            await store.checkpoint()
        if self._is_closed:
            raise MailboxClosedError(f"mailbox {self.name!r} was closed")
        return store.put(envelopes)

    async def send_reply(self, envelope: Envelope) -> str:
        if len(self._here().members) < 2:  # none but this one: the reply would be lost with it
            raise ReplyNotAvailableError(f"the reply cannot be sent: no mailbox {self.address!r} is open")
        return (await self.send([envelope]))[0]

    async def claim(
        self, max_messages: int, visibility_timeout: float, wait_time_seconds: float
    ) -> list[ClaimedMessage]:
        closings = self._closings
        store = self._here()
        deadline = store.clock() + wait_time_seconds
        await store.checkpoint()
        while self._closings == closings and not self._is_closed:
            now = store.clock()
            claimed: list[ClaimedMessage] = [*store.queue.claim(max_messages, now, visibility_timeout)]
            if claimed:
                if store.queue.pending and store.waker.waiting:
                    store.waker.wake_one()
                store.arm()
                return claimed
            if store.queue.limits.tasks and store.queue.can_claim:  # it has put back as many as one claim may
                await store.checkpoint()
                continue
            if now >= deadline:
                break
            self._waiting += 1
            try:
                await store.wait(deadline)
            finally:
                self._waiting -= 1
        if store.queue.pending:  # woken, maybe, and yet took nothing: it is closed
            store.waker.wake_one()
        return []

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        """Never waits, so a cancellation does not reach it."""
        store = self._here()
        now = store.clock()
        queue = store.queue
        if type(settlement) is Ack:
            if settlement.reply is not None:
                self._send_reply_to(store, delivery, settlement.reply, now)
            for error in queue.acknowledge([delivery], now).values():
                raise error
            if queue.limits.tasks:
                store.changed()
            if settlement.result is not None:
                self._keep_result(store, delivery.message_id, settlement.result, now)
        elif type(settlement) is Nack:
            queue.nack(delivery, now, settlement)
            store.changed()
        else:
            dead: Dead = settlement  # type: ignore[assignment]
            if dead.reply is not None:
                self._send_reply_to(store, delivery, dead.reply, now)
            queue.dead_letter(delivery, now, dead)
            if queue.limits.tasks:
                store.changed()

    async def acknowledge_many(self, deliveries: list[ClaimedMessage]) -> dict[int, Exception]:
        store = self._here()
        refused = store.queue.acknowledge(deliveries, store.clock())
        if store.queue.limits.tasks:
            store.changed()
        return refused

    def _send_reply_to(self, store: MemoryStore, delivery: ClaimedMessage, reply: Envelope, now: float) -> None:
        """Put a reply into the queue that it is for, while the lease is held."""
        store.queue.leased(delivery, now)
        name = reply.reply_to or ""
        target = process.shared(KIND, name, NamedStore).store
        if target is not None and target.loop is None:
            target.bind()
        if target is None or target.loop is not store.loop:
            if name.startswith(TRANSIENT):
                return
            raise ReplyNotAvailableError(
                f"message {delivery.message_id}: there is no memory mailbox {name!r} on this event loop to reply to"
            )
        reply.reply_to = None
        target.put([reply])

    def _keep_result(self, store: MemoryStore, message_id: str, result: Result, now: float) -> None:
        store.queue.records.write(RecordWrite(RESULT, message_id, result.value, result.expires_in), now)
        for member in list(store.members):
            member.notifications.results.publish([message_id])

    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        store = self._here()
        store.queue.extend(delivery, store.clock(), timeout)

    async def checkpoint(self, delivery: ClaimedMessage, state: bytes) -> None:
        store = self._here()
        store.queue.leased(delivery, store.clock()).checkpoint = state

    async def cancel(self, message_id: str) -> Cancelled:
        """Never waits. The holder of the message hears of it at once, as it is on this event loop."""
        store = self._here()
        cancelled = store.queue.cancel(message_id, store.clock())
        store.changed()
        if cancelled.outcome is CancelOutcome.CANCELLED:
            for member in list(store.members):
                member.notifications.cancelled.publish([message_id])
        return cancelled

    async def find(self, message_ids: list[str]) -> list[UnfinishedMessage]:
        store = self._here()
        return store.queue.find(message_ids, store.clock())

    async def reschedule(self, message_id: str, delay: float) -> RescheduleOutcome:
        store = self._here()
        outcome = store.queue.reschedule(message_id, store.clock(), delay)
        store.changed()
        return outcome

    async def replace_body(self, message_id: str, body: Any) -> RescheduleOutcome:
        store = self._here()
        return store.queue.replace_body(message_id, body, store.clock())

    async def list_messages(self, query: MessageQuery) -> MessagePage:
        store = self._here()
        return store.queue.list_messages(query, store.clock())

    # --------------------------------------------------------------------------------------------------------- limits

    async def change_limits(self, changes: list[LimitChange]) -> None:
        """Never waits, so a cancellation does not reach it."""
        store = self._here()
        now = store.clock()
        store.queue.advance(now)
        store.queue.limits.change(changes, now)
        store.changed()

    async def set_task(self, delivery: ClaimedMessage, task: str) -> bool:
        """Never waits, so a cancellation does not reach it."""
        store = self._here()
        has_changed = store.queue.set_task(delivery, store.clock(), task)
        store.changed()
        return has_changed

    async def limits(self) -> list[LimitState]:
        store = self._here()
        store.queue.advance(store.clock())
        return store.queue.limits.states(store.queue.in_flight)

    # -------------------------------------------------------------------------------------------------------- records

    async def write_record(self, write: RecordWrite, envelopes: Sequence[Envelope] = ()) -> int | None:
        """Never waits, so a cancellation does not reach it."""
        store = self._here()
        version = store.queue.put_with(write, list(envelopes), store.clock())
        if version is None:
            return None
        if envelopes:
            store.changed()
        for member in list(store.members):
            member.notifications.records.publish((write.kind, write.key))
        return version

    async def find_records(self, kind: str, keys: list[str]) -> list[Record]:
        store = self._here()
        return store.queue.records.find(kind, keys, store.clock())

    async def list_records(self, kind: str, limit: int, after: str | None) -> list[Record]:
        store = self._here()
        return store.queue.records.list(kind, limit, after, store.clock())

    # ------------------------------------------------------------------------------------------------- looking after

    def statistics(self) -> MailboxStatistics:
        return MailboxStatistics(waiting_receives=self._waiting, connected=True)

    async def counts(self) -> Counts:
        store = self._here()
        return store.queue.counts(store.clock())

    async def purge(self) -> int:
        store = self._here()
        return store.queue.purge(store.clock())

    async def dead_letters(self, limit: int, after: str | None) -> list[tuple[ClaimedMessage, Dead, float]]:
        store = self._here()
        store.queue.advance(store.clock())
        return store.queue.dead.page(limit, after)

    async def dead_letters_of(
        self, task: str, limit: int, after: str | None
    ) -> list[tuple[ClaimedMessage, Dead, float]]:
        store = self._here()
        store.queue.advance(store.clock())
        return store.queue.dead.page(limit, after, task)

    async def find_dead_letters(self, message_ids: list[str]) -> list[tuple[ClaimedMessage, Dead, float]]:
        store = self._here()
        store.queue.advance(store.clock())
        return store.queue.dead.find(message_ids)

    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        store = self._here()
        replayed = store.queue.replay(message_ids, store.clock())
        store.changed()
        return replayed

    async def purge_dead_letters(self, message_ids: list[str] | None) -> int:
        store = self._here()
        purged = store.queue.purge_dead(message_ids, store.clock())
        store.changed()
        return purged


class ReceiveWaker:
    """Wakes those who wait at a queue, through an anyio memory object stream of tokens.

    A token says only that looking again may be worth while, so a lost one must never matter. The stream keeps one token for a
    receive that is about to wait. A receive that leaves passes the wake on, and a receive that takes messages wakes the next.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._is_woken = False
        self._streams: list[MemoryObjectSendStream[None] | MemoryObjectReceiveStream[None]] = []
        self._sender: MemoryObjectSendStream[None] | None = None
        self._receiver: MemoryObjectReceiveStream[None] | None = None
        # A mailbox that was never entered is never closed, and a stream that is collected open warns.
        finalize(self, _close_streams, self._streams)

    def wake_one(self) -> None:
        """Wake one receive. Until a receive has woken, further calls do nothing."""
        if self.waiting and not self._is_woken and self._sender is not None:
            self._is_woken = True
            with suppress(anyio.WouldBlock):  # there is a token still, and no receive has come since
                self._sender.send_nowait(None)

    def wake_all(self) -> None:
        """Wake all receives that wait or are about to."""
        _close_streams(self._streams)
        self._sender = self._receiver = None
        self._is_woken = False

    async def wait(self, until: float) -> None:
        """Wait to be woken, or until the instant ``until``."""
        if self._receiver is None:
            self._sender, self._receiver = anyio.create_memory_object_stream[None](1)
            self._streams[:] = [self._sender, self._receiver]
        receiver = self._receiver
        self.waiting += 1
        try:
            with suppress(anyio.EndOfStream, anyio.ClosedResourceError):  # closed by wake_all
                if until == math.inf:
                    await receiver.receive()
                else:
                    with anyio.CancelScope(deadline=until):
                        await receiver.receive()
        finally:
            self.waiting -= 1
            self._is_woken = False


def _close_streams(streams: list[Any]) -> None:
    for stream in streams:
        stream.close()
    streams.clear()


class MemoryStore:
    """A queue on its event loop. Several mailbox objects of one name share it.

    ``thread`` and ``is_current`` tell cheaply whether the caller is on that loop; the clock and the checkpoints are those of
    the loop, looked up once.
    """

    def __init__(self, capacity: int | None) -> None:
        self.queue = MemoryQueue(capacity)
        self.waker = ReceiveWaker()
        self.reapers: list[Periodic] = []
        self.members: WeakSet[MemoryBackend] = WeakSet()
        self.loop: Any = None
        self.thread = 0
        self.is_current: Callable[[], bool] = bool
        self.clock: Callable[[], float] = anyio.current_time
        self.checkpoint = anyio.lowlevel.checkpoint
        self.checkpoint_if_cancelled = anyio.lowlevel.checkpoint_if_cancelled
        self._watched = -math.inf  # the latest instant by which one who waits looks again

    @property
    def is_gone(self) -> bool:
        """True if it was on an event loop that has ended."""
        return self.loop is not None and _has_ended(self.loop)

    def bind(self) -> None:
        """Belong to the running event loop from now on."""
        self.loop = process.event_loop()
        self.clock, self.queue.wall = clock.loop_clock(), clock.wall_clock()
        backend = current_token().backend_class
        self.checkpoint, self.checkpoint_if_cancelled = backend.checkpoint, backend.checkpoint_if_cancelled
        self.thread = threading.get_ident()
        self.is_current = _on_loop(self.loop)

    def put(self, envelopes: list[Envelope]) -> list[str]:
        """Store messages, all or none."""
        queue, heap = self.queue, self.queue.heap
        first_due = heap[0] if heap else None
        ids = queue.put(envelopes, self.clock())
        if queue.pending and self.waker.waiting:
            self.waker.wake_one()
        if heap and heap[0] is not first_due:
            self.arm()
        return ids

    def changed(self) -> None:
        """Wake one receive for a message that came, or the tasks that watch the time."""
        if self.queue.pending:
            self.waker.wake_one()
        self.arm()

    def arm(self) -> None:
        """Let receives that watch the time know the instant at which something is due first now."""
        heap = self.queue.heap
        earliest = heap[0][0] if heap else math.inf
        for reaper in self.reapers:
            if earliest < reaper.due:
                reaper.wake_by(earliest)
        if earliest < self._watched and self.waker.waiting and not self.reapers:
            self._watched = -math.inf
            self.waker.wake_all()  # each bounded its wait by what was due first when that began

    async def wait(self, deadline: float) -> None:
        """Wait until there may be something to claim, at most until ``deadline``.

        Without a reaper, a waiting receive watches the time, and wakes at the earliest instant at which something is due.
        """
        until = deadline if self.reapers else min(deadline, self.queue.next_due())
        self._watched = max(self._watched, until) if self.waker.waiting else until
        try:
            await self.waker.wait(until)
        except BaseException:
            if self.queue.pending:
                self.waker.wake_one()
            raise

    async def reap(self, overslept: float) -> float:
        """Let what is due happen; the instant of the next time."""
        self.queue.advance(self.clock())
        if self.queue.pending:
            self.waker.wake_one()
        return self.queue.next_due()


class NamedStore:
    """The store that a name means now: one for the event loop that uses it, and another one once that has ended."""

    def __init__(self) -> None:
        self.store: MemoryStore | None = None
        self._lock = threading.Lock()

    def enter(self, name: str, capacity: int | None) -> MemoryStore:
        """Return the store for a new mailbox object: the present one, unless its event loop has ended."""
        with self._lock:
            store = self._present(capacity)
            if capacity is not None:
                if store.queue.capacity not in (None, capacity):
                    raise ConfigError(
                        f"memory mailbox {name!r} has capacity={store.queue.capacity} already, not {capacity};"
                        " open_mailbox gives one queue by that name, so give it one capacity"
                    )
                store.queue.capacity = capacity
            return store

    def bind(self, name: str, own: MemoryStore) -> MemoryStore:
        """Return the store of a mailbox object that had ``own``. From now on it belongs to the running event loop."""
        with self._lock:
            if own.is_gone and own.queue.waiting:
                raise ConfigError(
                    f"memory mailbox {name!r} belonged to an event loop that has ended, with"
                    f" {counted(own.queue.waiting, 'message')} not done: have them done or purge() before, make a mailbox"
                    " object for each event loop, or use sqlite://"
                )
            if own.loop is None or own.is_gone:
                own = self._present(own.queue.capacity)
            if own.loop is None:
                own.bind()
            elif own.loop is not process.event_loop():
                raise ConfigError(
                    f"memory mailbox {name!r} is in use on another event loop; a memory:// queue belongs to one loop: give"
                    " each loop a name of its own, or use sqlite://"
                )
            return own

    def _present(self, capacity: int | None) -> MemoryStore:
        if self.store is None or self.store.is_gone:
            self.store = MemoryStore(capacity)
        return self.store


def _has_ended(loop: Any) -> bool:
    if hasattr(loop, "is_closed"):
        return bool(loop.is_closed())
    import trio

    try:
        loop.run_sync_soon(_nothing)
    except trio.RunFinishedError:
        return True
    return False


def _nothing() -> None:
    """Do nothing: a probe of a trio run runs this there."""


def _on_loop(loop: Any) -> Callable[[], bool]:
    """Return a quick test, for the loop's own thread, of whether ``loop`` runs there."""
    if isinstance(loop, asyncio.AbstractEventLoop):
        return loop.is_running
    import trio

    def is_current() -> bool:
        try:
            return trio.lowlevel.current_trio_token() is loop
        except RuntimeError:
            return False

    return is_current
