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
from mainspring.errors import ConfigError, ReplyNotAvailableError
from mainspring.mailbox.backend import TRANSIENT, MailboxStatistics
from mainspring.mailbox.mailbox import Capabilities, Mailbox
from mainspring.mailbox.memory.queue import JSON, Entry, MemoryQueue
from mainspring.mailbox.message import Ack, CancelOutcome, Return
from mainspring.runtime.deadline import inherited, with_deadline
from mainspring.runtime.interval import Periodic
from mainspring.validation import is_whole

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from datetime import datetime

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from mainspring.mailbox.message import Cancelled, Counts, Dead, Delivery, Envelope, Settlement
    from mainspring.runtime.deadline import Deadline, Inherited
    from mainspring.runtime.scope import DaemonScope
    from mainspring.validation import Seconds


class Bell:
    """Wakes those who wait at a queue, through an anyio memory object stream of tokens.

    A token says only that looking again may be worth while, so a lost one must never matter: the stream keeps one token for
    somebody who is on the way to waiting, whoever leaves passes the wake on, and whoever takes messages rings for the rest.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._rung = False
        self._streams: list[MemoryObjectSendStream[None] | MemoryObjectReceiveStream[None]] = []
        self._sender: MemoryObjectSendStream[None] | None = None
        self._receiver: MemoryObjectReceiveStream[None] | None = None
        # A mailbox that was never entered is never closed, and a stream that is collected open warns.
        finalize(self, _close_streams, self._streams)

    def ring(self) -> None:
        """Wake one receive. Until a receive has woken, further calls do nothing."""
        if self.waiting and not self._rung and self._sender is not None:
            self._rung = True
            with suppress(anyio.WouldBlock):  # there is a token still, and no receive has come since
                self._sender.send_nowait(None)

    def ring_all(self) -> None:
        """Wake everybody who waits or is on the way to."""
        _close_streams(self._streams)
        self._sender = self._receiver = None
        self._rung = False

    async def wait(self, until: float) -> None:
        """Wait for a ring, or until the instant ``until``."""
        if self._receiver is None:
            self._sender, self._receiver = anyio.create_memory_object_stream[None](1)
            self._streams[:] = [self._sender, self._receiver]
        receiver = self._receiver
        self.waiting += 1
        try:
            if until == math.inf:
                await _token(receiver)
            else:
                with anyio.CancelScope(deadline=until):
                    await _token(receiver)
        finally:
            self.waiting -= 1
            self._rung = False

    def forget(self) -> None:
        """Forget the receives that waited: their event loop has ended."""
        self.waiting = 0
        self.ring_all()


async def _token(receiver: MemoryObjectReceiveStream[None]) -> None:
    with suppress(anyio.EndOfStream, anyio.ClosedResourceError):  # ring_all
        await receiver.receive()


def _close_streams(streams: list[Any]) -> None:
    for stream in streams:
        stream.close()
    streams.clear()


class MemoryStore:
    """A queue on its event loop. Several mailbox objects of one name share it.

    ``thread`` and ``is_current`` tell cheaply whether the caller is on that loop; the clocks and checkpoints are those of
    the loop, looked up once.
    """

    def __init__(self, capacity: int | None) -> None:
        self.queue = MemoryQueue(capacity)
        self.bell = Bell()
        self.reapers: list[Periodic] = []
        self.members: WeakSet[Any] = WeakSet()
        self.loop: Any = None
        self.thread = 0
        self.is_current: Callable[[], bool] = bool
        self.clock: Callable[[], float] = anyio.current_time
        self.checkpoint = anyio.lowlevel.checkpoint
        self.checkpoint_if_cancelled = anyio.lowlevel.checkpoint_if_cancelled
        self._watched = -math.inf  # the latest instant by which one who waits looks again
        self._bound_at = (0.0, 0.0)

    @property
    def is_gone(self) -> bool:
        """Whether it was on an event loop that has ended."""
        return self.loop is not None and _has_ended(self.loop)

    def bind(self) -> None:
        """Move to the running event loop, from none or from one that has ended."""
        before, self.loop = self.loop, process.event_loop()
        old_start, old_monotonic = self._bound_at
        self.clock, self.queue.wall = clock.loop_clock(), clock.wall_clock()
        now, monotonic = self.clock(), clock.monotonic()
        self._bound_at = (now, monotonic)
        backend = current_token().backend_class
        self.checkpoint, self.checkpoint_if_cancelled = backend.checkpoint, backend.checkpoint_if_cancelled
        self.thread = threading.get_ident()
        self.is_current = _currency(self.loop)
        if before is not None:
            self.bell.forget()
            self.reapers.clear()
            # Clocks differ from loop to loop: what it was on the old one by now, at least what it was last seen to be.
            old_now = max(self.queue.seen, old_start + monotonic - old_monotonic)
            self.queue.rebase(now - old_now, now)

    def changed(self) -> None:
        """Wake one receive for a message that came, or the tasks that watch the time."""
        if self.queue.pending:
            self.bell.ring()
        self.arm()

    def arm(self) -> None:
        """Something may be due sooner than all before: let those who watch the time know what is due first now."""
        earliest = self.queue.earliest
        for reaper in self.reapers:
            reaper.wake_by(earliest)
        if earliest < self._watched and self.bell.waiting and not self.reapers:
            self._watched = -math.inf
            self.bell.ring_all()  # each bounded its wait by what was due first when that began

    async def wait(self, deadline: float) -> None:
        """Wait until there may be something to claim, at most until ``deadline``.

        Without a reaper, a waiting receive watches the time, and wakes at the earliest instant at which something is due.
        """
        until = deadline if self.reapers else min(deadline, self.queue.next_due())
        self._watched = max(self._watched, until) if self.bell.waiting else until
        try:
            await self.bell.wait(until)
        except BaseException:
            if self.queue.pending:
                self.bell.ring()
            raise

    def add_reaper(self, reaper: Periodic) -> None:
        """``reaper`` watches the time from now on."""
        self.reapers.append(reaper)

    def remove_reaper(self, reaper: Periodic) -> None:
        """``reaper`` has stopped. Those who wait watch the time themselves once they have been woken."""
        if reaper in self.reapers:
            self.reapers.remove(reaper)


class Slot:
    """A name, and the store that it means now."""

    def __init__(self) -> None:
        self.store: MemoryStore | None = None
        self._lock = threading.Lock()

    def enter(self, name: str, capacity: int | None) -> MemoryStore:
        """The store for a new mailbox object: the present one, unless its event loop has ended."""
        with self._lock:
            store = self.store
            if store is None or store.is_gone:
                store = self.store = MemoryStore(capacity)
            elif capacity is not None:
                if store.queue.capacity not in (None, capacity):
                    raise ConfigError(
                        f"memory mailbox {name!r} has capacity={store.queue.capacity} already, not {capacity};"
                        " open_mailbox gives one queue by that name, so give it one capacity"
                    )
                store.queue.capacity = capacity
            return store

    def rejoin(self, name: str, own: MemoryStore) -> MemoryStore:
        """The store that a mailbox object with the store ``own`` has on the running event loop.

        It keeps its messages where its event loop has ended: it moves to this one, or, where others have begun a new queue
        of that name here, joins them. Raises :class:`ConfigError` where its loop (or theirs) still lives.
        """
        with self._lock:
            here = process.event_loop()
            current = own if self.store is None or self.store.is_gone else self.store
            for store in (own, current):
                if store.loop is not here and store.loop is not None and not store.is_gone:
                    raise ConfigError(
                        f"memory mailbox {name!r} is in use on another event loop; a memory:// queue belongs to one loop:"
                        " give each loop a name of its own, or use sqlite://"
                    )
            for store in (own, current):
                if store.loop is not here:
                    store.bind()
            if current is not own:
                current.queue.absorb(own.queue)
                current.bell.ring()
            self.store = current
            return current


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
    """What a probe of a trio run runs there."""


def _currency(loop: Any) -> Callable[[], bool]:
    """A quick test, for the loop's own thread, of whether ``loop`` is the one that runs there."""
    if isinstance(loop, asyncio.AbstractEventLoop):
        return loop.is_running
    import trio

    def is_current() -> bool:
        try:
            return trio.lowlevel.current_trio_token() is loop
        except RuntimeError:
            return False

    return is_current


T = TypeVar("T", default=Any)
R = TypeVar("R", default=Any)

KIND = "memory://"
YIELD_EVERY = 32
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

    It works without being entered, too: delays and leases then end when somebody looks, and a waiting receive wakes for them.
    A mailbox whose event loop has ended keeps its messages and moves to the next loop it is used on; what was in flight
    counts as expired. Used from another event loop while its own lives, it raises :class:`ConfigError`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(joined_acks=True, queue_age=True)
    _works_unopened: ClassVar[bool] = True

    if TYPE_CHECKING:

        @overload
        def __init__(
            self,
            name: str | None = None,
            *,
            body: type[T],
            reply: type[R],
            capacity: int | None = None,
            serialize: bool = False,
        ) -> None: ...
        @overload
        def __init__(
            self: InMemoryMailbox[T, Any],
            name: str | None = None,
            *,
            body: type[T],
            reply: Any = None,
            capacity: int | None = None,
            serialize: bool = False,
        ) -> None: ...
        @overload
        def __init__(
            self,
            name: str | None = None,
            *,
            body: Any = None,
            reply: Any = None,
            capacity: int | None = None,
            serialize: bool = False,
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
        super().__init__(f"memory-{random.token(32)}" if name is None else name, body=body, reply=reply)
        if self.name.startswith(KIND):
            raise ConfigError(f"InMemoryMailbox takes a name, and {name!r} is a URL: that is for open_mailbox()")
        _check_options(self.name, unknown)
        if capacity is not None and not is_whole(capacity, 1):
            raise ConfigError(f"memory mailbox {self.name!r}: capacity must be a whole number from 1, not {capacity!r}")
        if not isinstance(serialize, bool):
            raise ConfigError(f"memory mailbox {self.name!r}: serialize must be true or false, not {serialize!r}")
        self.serializes = serialize
        self._sends = 0
        self._closings = 0
        self._waiting = 0
        self._reaper: Periodic | None = None
        self._settle_in(f"{self.name}@{random.token(64)}", capacity)

    @classmethod
    def from_url(
        cls, url: str, *, host: str, path: str, options: Mapping[str, Any], body: Any = None, reply: Any = None
    ) -> Self:
        """The mailbox for ``memory://host``: the one queue of that name on the event loop it is used on."""
        if not host or path not in ("", "/"):
            raise ConfigError(f"{url!r}: a memory mailbox is named memory://NAME, as in memory://jobs")
        _check_options(url, options)
        capacity: Any = options.get("capacity")
        serialize: Any = options.get("serialize", True)
        if isinstance(capacity, str):
            capacity = int(capacity) if capacity.isascii() and capacity.isdigit() else capacity
        if isinstance(serialize, str):
            serialize = {"true": True, "1": True, "false": False, "0": False}.get(serialize.lower(), serialize)
        mailbox = cls(host, capacity=capacity, serialize=serialize, body=body, reply=reply)
        mailbox._settle_in(host, capacity)
        return mailbox

    def _settle_in(self, key: str, capacity: int | None) -> None:
        self._key = key
        self._slot = process.shared(KIND, key, Slot)
        self._store = self._slot.enter(self.name, capacity)
        self._store.members.add(self)

    @property
    def address(self) -> str:
        """Its URL: what ``reply_to`` says. That of a mailbox made by the constructor is its alone."""
        return f"memory://{quote(self._key, safe='@')}"

    def _here(self) -> MemoryStore:
        """The store, on the running event loop."""
        store = self._store
        if store.thread != get_ident() or not store.is_current():
            store = self._store = self._slot.rejoin(self.name, store)
            store.members.add(self)
        return store

    # ---------------------------------------------------------------------------------------------------- life cycle

    async def _open(self, scope: DaemonScope) -> None:
        store = self._here()
        self._reaper = reaper = Periodic(self._reap, first=store.queue.next_due())
        store.add_reaper(reaper)
        scope.start_soon(reaper.run, name=f"reaper of mailbox {self.name}")

    def _statistics(self) -> MailboxStatistics:
        return MailboxStatistics(waiting_receives=self._waiting, connected=True)

    async def _close(self) -> None:
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            self._store.remove_reaper(reaper)

    def _wake_all(self) -> None:
        self._closings += 1
        self._store.bell.ring_all()  # also who waits through another object: it may have to watch the time now

    async def _reap(self, overslept: float) -> float:
        store = self._store
        store.queue.advance(store.clock())
        if store.queue.pending:
            store.bell.ring()
        return store.queue.next_due()

    # ------------------------------------------------------------------------------------------------------- sending

    async def send(
        self,
        body: T,
        *,
        delay: Seconds = 0,
        at: datetime | None = None,
        reply_to: str | Mailbox[Any, Any] | None = None,
        dedup_key: str | None = None,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        expires_in: Seconds | None = None,
        deadline: Deadline | Inherited | None = "inherit",
        connection: Any = None,
    ) -> str:
        """Put one message into the mailbox and return its id; see :meth:`Mailbox.send`.

        It never waits. A cancelled send has sent nothing. So that one who sends without end does not keep the event loop to
        itself, every 32nd send lets the other tasks have a turn first; where there is a ``capacity``, every one does.
        """
        await self._turn()
        if deadline != "inherit" or inherited() is not None:
            headers = with_deadline(headers, deadline)
        if (
            delay != 0
            or priority != 0
            or reply_to is not None
            or dedup_key is not None
            or headers
            or expires_in is not None
            or at is not None
            or connection is not None
        ):
            envelope = self._envelope(body, delay, reply_to, dedup_key, priority, headers, expires_in, at)
            if connection is not None:
                return (await self._put_into(connection, [envelope]))[0]
            return self._put_now([envelope], None)[0]
        if not self._usable:
            self._check_open()
        store = self._store
        queue = store.queue
        codec = self._codec or self.codec
        kind = JSON if self.serializes else codec.body_type
        entry = Entry(self.new_id(), self._payload(codec, body), kind, queue.wall())
        queue.put(entry, store.clock(), 0.0)
        if store.bell.waiting:
            store.bell.ring()
        return entry.message_id

    def _turn(self) -> Awaitable[None]:
        """What a sender awaits first: there it can be cancelled, and now and then others have a turn."""
        if not self._usable:
            self._check_open()  # before the event loop is asked for anything: a forked child has none
        store = self._store
        if store.thread != get_ident() or not store.is_current():
            store = self._here()
        self._sends += 1
        if self._sends % YIELD_EVERY and store.queue.capacity is None:
            return store.checkpoint_if_cancelled()
        return store.checkpoint()

    async def _put(self, envelopes: list[Envelope]) -> list[str]:
        await self._turn()
        self._check_open()
        return self._put_now(envelopes, JSON if self.serializes else self.codec.body_type)

    async def _send_encoded(self, envelope: Envelope) -> str:
        """Put an envelope whose body is JSON bytes: a reply from a mailbox on another store."""
        await self._turn()
        self._check_open()
        if len(self._store.members) < 2:  # nobody but the one who sends: it would be lost with this object
            raise ReplyNotAvailableError(f"the reply cannot be sent: nobody has a mailbox {self.address!r} open")
        return self._put_now([envelope], JSON)[0]

    def _put_now(self, envelopes: list[Envelope], kind: Any) -> list[str]:
        store = self._here()
        if kind is None:
            kind = JSON if self.serializes else self.codec.body_type
        return _put_into(store, envelopes, kind)

    # ----------------------------------------------------------------------------------------------------- receiving

    async def _claim(self, max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> list[Delivery]:
        closings = self._closings
        store = self._here()
        deadline = store.clock() + wait_time_seconds
        await store.checkpoint()
        while self._closings == closings:
            store = self._here()
            now = store.clock()
            claimed: list[Delivery] = [*store.queue.claim(max_messages, now, visibility_timeout)]
            if claimed:
                if store.queue.pending and store.bell.waiting:
                    store.bell.ring()
                store.arm()
                return claimed
            if now >= deadline:
                break
            self._waiting += 1
            try:
                await store.wait(deadline)
            finally:
                self._waiting -= 1
        if store.queue.pending:  # woken, maybe, and yet took nothing: it is closed
            store.bell.ring()
        return []

    def _body_of(self, delivery: Delivery) -> Any:
        kind = delivery.kind if isinstance(delivery, Entry) else None
        codec = self._codec or self.codec
        if kind is JSON:
            return codec.decode(delivery.body)
        if kind is not codec.body_type:  # sent under another type than this mailbox has now
            codec.check(delivery.body)
        return delivery.body

    # ------------------------------------------------------------------------------------------------------ settling

    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """Never waits, so a cancellation does not reach it."""
        store = self._store
        if store.thread != get_ident() or not store.is_current():
            store = self._here()
        now = store.clock()
        queue = store.queue
        if type(settlement) is Ack:
            if settlement.reply is not None:
                self._reply_into(store, delivery, settlement.reply, now)
            queue.acknowledge(delivery, now)
        elif type(settlement) is Return:
            queue.give_back(delivery, now, settlement)
            store.changed()
        else:
            dead: Dead = settlement  # type: ignore[assignment]
            if dead.reply is not None:
                self._reply_into(store, delivery, dead.reply, now)
            queue.bury(delivery, now, dead)

    def _reply_into(self, store: MemoryStore, delivery: Delivery, reply: Envelope, now: float) -> None:
        store.queue.leased(delivery, now)
        name = reply.reply_to or ""
        target = process.shared(KIND, name, Slot).store
        if target is not None and target.loop is None:
            target.bind()
        if target is None or target.loop is not store.loop:
            if name.startswith(TRANSIENT):
                return
            raise ReplyNotAvailableError(
                f"message {delivery.message_id}: there is no memory mailbox {name!r} on this event loop to reply to"
            )
        kind = JSON if self.serializes else self.reply_codec.body_type
        reply.reply_to = None
        _put_into(target, [reply], kind)

    def _local_name(self, address: str) -> str | None:
        if "://" not in address:
            return address
        return unquote(urlsplit(address).netloc) if address.startswith(KIND) else None

    async def _extend(self, delivery: Delivery, timeout: float) -> None:
        store = self._here()
        store.queue.extend(delivery, store.clock(), timeout)

    async def _save_checkpoint(self, delivery: Delivery, state: bytes) -> None:
        store = self._here()
        store.queue.leased(delivery, store.clock()).checkpoint = state

    # ------------------------------------------------------------------------------------------------- looking after

    async def _counts(self) -> Counts:
        store = self._here()
        return store.queue.counts(store.clock())

    async def _purge(self) -> int:
        store = self._here()
        return store.queue.purge(store.clock())

    async def _dead_letters(self, limit: int, after: str | None) -> list[tuple[Delivery, Dead, float]]:
        store = self._here()
        store.queue.advance(store.clock())
        return store.queue.dead_letters(limit, after)

    async def _replay(self, message_ids: list[str] | None) -> int:
        store = self._here()
        replayed = store.queue.replay(message_ids, store.clock())
        store.changed()
        return replayed

    async def _find_dead(self, message_ids: list[str]) -> list[tuple[Delivery, Dead, float]]:
        store = self._here()
        store.queue.advance(store.clock())
        return store.queue.find_dead(message_ids)

    async def _cancel(self, message_id: str) -> Cancelled:
        """Never waits. Whoever holds the message is told at once: it is on this event loop."""
        store = self._here()
        cancelled = store.queue.cancel(message_id, store.clock())
        if cancelled.outcome is CancelOutcome.CANCELLED:
            for mailbox in list(store.members):
                mailbox._announce_cancelled([message_id])  # noqa: SLF001 - one of this class
        return cancelled

    def _sibling(self, name: str, *, body: Any = None, reply: Any = None) -> InMemoryMailbox[Any, Any]:
        sibling: InMemoryMailbox[Any, Any] = InMemoryMailbox(name, serialize=self.serializes, body=body, reply=reply)
        sibling._settle_in(name, None)
        return sibling

    def _dead_name(self) -> str:
        return f"{self._key}~dead"

    async def _discard_dead(self, message_ids: list[str] | None) -> int:
        store = self._here()
        store.queue.advance(store.clock())
        return store.queue.discard_dead(message_ids)


def _put_into(store: MemoryStore, envelopes: list[Envelope], kind: Any) -> list[str]:
    now, wall = store.clock(), store.queue.wall()
    entries = []
    for e in envelopes:
        ends = math.inf if e.expires_in is None else now + e.expires_in
        entry = Entry(e.message_id, e.body, kind, wall, e.reply_to, e.headers, e.priority, e.dedup_key, ends)
        entries.append((entry, e.delay))
    ids = store.queue.put_all(entries, now)
    store.changed()
    return ids


def _check_options(place: str, options: Mapping[str, Any]) -> None:
    for key in options:
        if key not in ("capacity", "serialize"):
            raise ConfigError(f"{place!r}: a memory mailbox has no option {key!r}; it has capacity, serialize")
