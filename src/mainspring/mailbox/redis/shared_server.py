"""What the mailboxes of a process and event loop on one server share beside their connections: listener and sweeps.

In a cluster, where each mailbox has connections of its own, it shares with none.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import anyio

from mainspring.core import process
from mainspring.errors import MailboxConnectionError, MainspringError
from mainspring.mailbox.redis.client import Client, FunctionCall, silence_of
from mainspring.mailbox.redis.commands import MICRO, keys_of
from mainspring.mailbox.redis.connection import LOST
from mainspring.mailbox.redis.listener import Listener
from mainspring.runtime.shared_task import SharedTask

if TYPE_CHECKING:
    from mainspring.mailbox.redis.commands import Argument
    from mainspring.mailbox.redis.topology import Topology

KIND: Final = "redis servers"
MOST_TOGETHER: Final = 100
"""Mailboxes of one call: the server serves no other client meanwhile."""


class SharedServer:
    """See the module. Get one by :meth:`of`. A mailbox takes part by joining the ``task`` with its scope, and leaves it in the
    end."""

    def __init__(self, topology: Topology) -> None:
        self.listener = Listener(topology)
        self.sweeper = Sweeper(topology)
        listener = self.listener
        self.task = SharedTask(
            "mailboxes of a Redis server", listener.run, listener.watch.run, listener.renewal.run, self.sweeper.run
        )

    @classmethod
    def of(cls, topology: Topology) -> SharedServer:
        """Return that of the running event loop for a server which was reached."""
        if topology.cluster:
            return cls(topology)
        return process.shared(KIND, (process.event_loop(), topology.server), partial(cls, topology))


class SweptMailbox(Protocol):
    """What a sweeper has of a mailbox."""

    name: str

    def sweep_arguments(self) -> tuple[Argument, ...]:
        """Return its name on the list of waiters ("": none), and the microseconds between two recoveries (-1: none now)."""

    def swept(self, due: float, found: int, recover_in: float, dropped: int) -> None:
        """Take the result: seconds until the next thing is due (below 0: nothing is), and what the recovery says."""

    def not_swept(self, silent: MailboxConnectionError | None) -> None:
        """Note that the call failed; with an error: the server did not answer in time."""


class Sweeper:
    """Has the library do what is due in several mailboxes by one call, as most of the time nothing is due in any."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._client: Client | None = None
        self._asked: dict[SweptMailbox, None] = {}
        self._out: dict[SweptMailbox, None] = {}
        self._wake = anyio.Event()

    def ask(self, mailbox: SweptMailbox) -> None:
        """Have a mailbox swept, together with others that ask in the same turn of the event loop."""
        self._asked[mailbox] = None
        self._wake.set()

    def withdraw(self, mailbox: SweptMailbox) -> None:
        """Forget that it asked."""
        self._asked.pop(mailbox, None)
        self._out.pop(mailbox, None)

    async def run(self) -> None:
        """Sweep until cancelled. What was out then is swept when it runs again."""
        while True:
            self._asked, self._out = self._out | self._asked, {}
            while self._asked:
                together = list(self._asked)[:MOST_TOGETHER]
                for mailbox in together:
                    del self._asked[mailbox]
                self._out = dict.fromkeys(together)
                await self._sweep(together)
                self._out = {}
            self._wake = anyio.Event()
            await self._wake.wait()

    async def _sweep(self, together: list[SweptMailbox]) -> None:
        timeout = self._topology.server.timeout
        client = self._client = self._client or Client(self._topology, timeout)
        call = FunctionCall(together[0].name, keys_of(together[0].name))
        silent: MailboxConnectionError | None = None
        rows: object = None
        try:
            with anyio.fail_after(timeout):
                await client.connect()
                call.arguments += ("sweep_each", len(together))
                for mailbox in together:
                    call.arguments += (call.mailbox(mailbox.name), call.records(mailbox.name))
                    call.arguments += mailbox.sweep_arguments()
                rows = (await client.call(call))[0]
        except TimeoutError:
            await client.abandon()
            silent = silence_of(self._topology.server, timeout, connected=True)
        except (*LOST, MainspringError):  # also a refused login: an operator may be changing it just now
            pass
        finally:
            await client.leave()
        for number, mailbox in enumerate(together):
            row = rows[number] if isinstance(rows, list) else None
            if isinstance(row, list):
                due, dropped, found, again = row
                mailbox.swept(due / MICRO, found, again / MICRO, dropped)
            else:
                mailbox.not_swept(silent)
