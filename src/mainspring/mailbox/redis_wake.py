"""How those who wait for messages hear of them: over a connection of its own, on which the script calls.

A process that has found nothing is noted in the mailbox as a waiter. Whoever makes a message pending takes as many waiters
off that list as there are messages, and calls each on its own channel; so one message wakes one process. All processes
hear, on a channel for all, of an instant that something is due at, if it is sooner than they know, and of cancellations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio

from mainspring.errors import MailboxConnectionError, MainspringError
from mainspring.mailbox import waiting
from mainspring.mailbox.redis_link import Gate
from mainspring.mailbox.redis_wire import LOST, trouble

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from mainspring.mailbox.redis_link import Link
    from mainspring.mailbox.redis_server import Directory
    from mainspring.mailbox.redis_url import Host
    from mainspring.mailbox.redis_wire import Wire

SILENCE: Final = 10.0
"""Seconds of silence after which the listener asks whether the server is still there."""


class Waiters(waiting.Waiters):
    """The receives of one mailbox object that wait. Those that nobody here can take are called for elsewhere.

    ``active`` counts them from their first look on.
    """

    __slots__ = ("_pass_on", "active")

    def __init__(self, pass_on: Callable[[int], None]) -> None:
        super().__init__()
        self.active = 0
        self._pass_on = pass_on

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


class Listener:
    """The connection on which the server calls. It comes back by itself; meanwhile ``live`` is False."""

    def __init__(
        self,
        directory: Directory,
        channels: tuple[bytes, bytes],
        link: Link,
        waiters: Waiters,
        on_due: Callable[[float], None],
        on_cancelled: Callable[[list[str]], None],
        timeout: float,
    ) -> None:
        self.live = False
        self._directory = directory
        self._channels = channels
        self._link = link
        self._waiters = waiters
        self._on_due = on_due
        self._on_cancelled = on_cancelled
        self._timeout = timeout
        self._gate = Gate()
        self._host: Host | None = None
        self._scope = anyio.CancelScope()
        link.on_connect = self._follow

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Listen until cancelled; started once it listens. Raises only before that."""
        started = False
        while True:
            wire: Wire | None = None
            try:
                await self._gate.wait()
                with anyio.fail_after(self._timeout):
                    wire = await self._directory.connect()
                    await self._subscribe(wire)
                self._gate.succeeded()
                self.live, self._host = True, wire.host
                if not started:
                    started = True
                    task_status.started()
                self._waiters.wake_all()  # what came meanwhile has called nobody here
                with anyio.CancelScope() as self._scope:
                    await self._listen(wire)
                self._gate.failed()
            except (*LOST, MainspringError) as error:
                if not started:
                    if isinstance(error, MainspringError):
                        raise
                    raise MailboxConnectionError(f"the Redis server: {trouble(error)}") from error
                self._gate.failed()
                await self._link.suspect()
            finally:
                self.live = False
                if wire is not None:
                    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 1):
                        await wire.close()
            self._waiters.wake_all()  # they look for themselves whether the server is there

    def _follow(self, host: Host) -> None:
        """Calls go to ``host`` now: where that is another server than this connection's, it calls nobody here."""
        if self._host not in {None, host}:
            self._scope.cancel()

    async def _subscribe(self, wire: Wire) -> None:
        for channel in self._channels:  # one by one: a cluster takes only channels of one slot, which these are
            await wire.call("SSUBSCRIBE", channel)

    async def _listen(self, wire: Wire) -> None:
        asked = False
        while True:
            message: Any = None
            with anyio.move_on_after(self._timeout if asked else SILENCE):
                message = await wire.read()
            if message is None:
                if asked:
                    raise MailboxConnectionError("the Redis server has fallen silent")
                asked = True
                with anyio.fail_after(self._timeout):
                    await wire.send(("PING",))
                continue
            asked = False
            if message[0] == b"smessage":
                self._hear(message[2])
            elif message[0] == b"sunsubscribe":
                raise MailboxConnectionError("the mailbox has moved to another node")

    def _hear(self, said: bytes) -> None:
        kind, what = said[:1], said[1:]
        if kind == b"w":
            self._waiters.wake(int(what))
        elif kind == b"d":
            self._on_due(int(what) / 1e6)
        elif kind == b"x":
            self._on_cancelled([what.decode("utf-8", "replace")])
