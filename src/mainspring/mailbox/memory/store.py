"""Where an in-memory queue lives: the event loop it belongs to, those who wait at it, and the name it is found by."""

from __future__ import annotations

import asyncio
import math
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, finalize

import anyio
from anyio.lowlevel import current_token

from mainspring.core import clock, process
from mainspring.errors import ConfigError
from mainspring.mailbox.memory.queue import MemoryQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from mainspring.runtime.interval import Periodic


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
        # Nobody closes a mailbox that was never entered; a stream that is collected open warns.
        finalize(self, _close_streams, self._streams)

    def ring(self) -> None:
        """Wake one who waits. Until somebody has woken, further calls do nothing."""
        if self.waiting and not self._rung and self._sender is not None:
            self._rung = True
            with suppress(anyio.WouldBlock):  # there is a token still, and nobody has come to wait since
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
        """Nobody waits any more: the event loop they waited on has ended."""
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
        """Something came to those that wait: wake one who waits for it, or let those who watch the time know."""
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

        Where no reaper watches the time, whoever waits does, and wakes at the earliest instant at which something is due.
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
