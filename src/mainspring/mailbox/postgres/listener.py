"""How waiting receives hear of messages: by notifications, and by polls.

Notifications come on a connection of their own. Behind a connection pooler in transaction mode they do not arrive. A probe
finds that out, and then waiting receives poll more often.

A poll asks the store in one statement for all mailboxes of the process in which receives wait. It does what is due, counts
what a receive could claim, and has senders notify. It comes when something is due, as far as is known, and at intervals, as
a notification may have been lost. A mailbox in which there is nothing costs it next to nothing, on the server and here.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import psycopg

from mainspring.core import random
from mainspring.core.clock import loop_clock
from mainspring.errors import MainspringError
from mainspring.mailbox.postgres.commands import Statement, call_text
from mainspring.mailbox.postgres.values import Floats, Integers, array
from mainspring.runtime.interval import Periodic
from mainspring.runtime.retry import Retries

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mainspring.errors import MailboxConnectionError
    from mainspring.mailbox.backend import Notifications
    from mainspring.mailbox.batched import Waiters
    from mainspring.mailbox.postgres.commands import Watermark
    from mainspring.mailbox.postgres.connection import ConnectionPool

QUICK_POLLS = (0.005, 0.05, 0.25)
"""Seconds after which the first receive to wait polls again: a sender whose transaction was under way then could not know that
it must notify."""
POLL_INTERVAL = 1.0
"""Seconds after which waiting receives ask the store again, in case a notification was lost."""
POLL_WITHOUT_LISTENING = 0.1
"""The same while no notifications arrive."""
EARLY = 0.5
"""The part of the interval by which a mailbox is asked about early, where a poll leaves anyway."""
PROBE_TIMEOUT = 2.0
"""Seconds in which a notification to oneself must arrive."""
PROBE_AGAIN = 60.0
"""Seconds until it is tried again whether notifications arrive."""
PROCESSES_ASKED = 3
"""Tries to catch a pooler at giving one server process to two connections."""
QUIET = 0.25
"""The part of the ``silence`` without a notification after which the listening connection is asked whether it is alive."""
ANSWER = 0.25
"""The part of it that the answer may take."""
REMEMBERED = 1_000
"""Ids of cancelled messages, and of results, that are remembered, so that each is announced once."""
_PAYLOAD = re.compile(
    r"(?P<number>[0-9]{1,10}) (?:cancelled (?P<cancelled>.*)|results (?P<results>.*)|(?P<count>[0-9]{1,10}))", re.DOTALL
)
"""What a notification says: the number of a mailbox, and which message was cancelled, which ones have left results, or how many
became pending."""


class OpenMailbox(Protocol):
    """What a shared pool has of each of its open mailboxes."""

    waiters: Waiters
    watermark: Watermark
    polling: Polling
    notifications: Notifications

    def fail_claims(self, error: MailboxConnectionError) -> None:
        """Fail the receives that wait, as the server does not answer. They need not find out by a call of their own."""


class Polling:
    """When one mailbox is polled for, and whether it was empty the last time.

    :param interval: seconds between two polls; None: what fits the notifications.
    """

    __slots__ = ("asks_first", "due", "empty_at", "empty_until", "interval", "number", "polls", "quick")

    def __init__(self, number: int, interval: float | None, *, asks_first: bool) -> None:
        self.number = number
        self.asks_first = asks_first
        """True if its receives wait for the first poll before they claim: one poll does for all that opened together."""
        self.due = math.inf
        """Instant of the next poll, on anyio's clock."""
        self.polls = 0
        """How many there were."""
        self.quick: list[float] = []
        """Seconds until each of the next polls, while there are some."""
        self.interval = interval
        self.empty_at = -1
        self.empty_until = -math.inf
        """Until this instant the mailbox is known to be empty, if the signals of its waiters are still ``empty_at``."""

    def must_claim(self) -> None:
        """Note that nothing is known of the mailbox, and that no poll can be waited for."""
        self.asks_first = False
        self.found_empty(-1, -math.inf)

    def found_empty(self, signals: int, until: float) -> None:
        """Note that the mailbox was empty when its waiters had had that number of signals. A poll comes by ``until``."""
        self.empty_at, self.empty_until = signals, until


class Polls:
    """The polls of a process on one schema. :meth:`run` is for its owner's task."""

    def __init__(self, connections: ConnectionPool, schema: str) -> None:
        self._timer = Periodic(self._step)
        self.listening = False
        """True while notifications arrive."""
        self._connections = connections
        self._schema = schema
        self._mailboxes: dict[OpenMailbox, None] = {}
        self._now = loop_clock()

    def add(self, mailbox: OpenMailbox) -> None:
        """Poll for a mailbox from now on, while receives wait."""
        self._mailboxes[mailbox] = None

    def remove(self, mailbox: OpenMailbox) -> None:
        """Poll for it no more."""
        del self._mailboxes[mailbox]

    def poll_in(self, mailbox: OpenMailbox, seconds: float) -> None:
        """Poll for a mailbox in ``seconds`` at the latest: something may be due then."""
        when = self._now() + seconds
        if when < mailbox.polling.due:
            mailbox.polling.due = when
            if when < self._timer.due:
                self._timer.wake_by(when)

    async def run(self) -> None:
        """Poll until cancelled. A poll that was cancelled is repeated when this runs again."""
        self._timer.wake_by(self._now())
        await self._timer.run()

    def interval(self, mailbox: OpenMailbox) -> float:
        """Return the seconds between two polls for a mailbox."""
        if mailbox.polling.interval is not None:
            return mailbox.polling.interval
        return POLL_INTERVAL if self.listening else POLL_WITHOUT_LISTENING

    async def _step(self, overslept: float) -> float:
        now = self._now()
        due = []
        for mailbox in self._mailboxes:
            polling = mailbox.polling
            if polling.due <= now + EARLY * self.interval(mailbox):
                polling.due = math.inf  # so that what is asked for meanwhile counts
                if mailbox.waiters.parked:
                    due.append(mailbox)
                else:
                    polling.found_empty(-1, -math.inf)  # a receive that comes now must claim
        if due:
            await self._poll(due, now)
        return min((mailbox.polling.due for mailbox in self._mailboxes), default=math.inf)

    async def _poll(self, mailboxes: list[OpenMailbox], began: float) -> None:
        """Poll for these. If that fails, the receives that wait find out by calls of their own."""
        signals = [mailbox.waiters.signals for mailbox in mailboxes]
        try:
            found, polled_at = await self._ask(mailboxes)
        except MainspringError:
            for mailbox in mailboxes:
                mailbox.waiters.signal_all()
            found, polled_at = {}, None
        except BaseException:
            for mailbox in mailboxes:
                mailbox.polling.due = began
            raise
        now = self._now()
        for mailbox, seen in zip(mailboxes, signals, strict=True):
            polling = mailbox.polling
            polling.polls += 1
            polling.asks_first = False
            pending, due_in, newly_listening, moved, at = found.get(polling.number, (0, None, False, 0, polled_at))
            if pending is None:  # it was dropped
                mailbox.waiters.signal_all()
            elif at is not None:
                mailbox.watermark.swept(at, moved)
                if pending:
                    mailbox.waiters.signal(pending)
                else:
                    polling.found_empty(seen, now + 2 * self.interval(mailbox))
            if newly_listening:
                polling.quick = list(QUICK_POLLS)
            again = polling.quick.pop(0) if polling.quick else self.interval(mailbox)
            polling.due = min(polling.due, now + (again if due_in is None else min(again, max(due_in, 0.0))))

    async def _ask(self, mailboxes: Iterable[OpenMailbox]) -> tuple[dict[int, tuple[Any, ...]], float]:
        """Return what was found in mailboxes where there is something, by number, and the server's instant of the poll."""
        sinces = {mailbox.polling.number: mailbox.watermark.start(self._now())[2] for mailbox in mailboxes}
        values = (array(Integers, list(sinces)), array(Floats, list(sinces.values())))
        rows: list[tuple[Any, ...]] = []
        statement = Statement(call_text(self._schema, "poll_all", len(values)), values, rows.extend)
        await self._connections.run([statement], changes=False)
        found = {number: tuple(rest) for number, *rest in rows}
        polled_at: float = found.pop(0)[-1]
        return found, polled_at


class PostgresListener:
    """Passes notifications on to the open mailboxes of a process, by their numbers. :meth:`run` is for its owner's task."""

    def __init__(self, connections: ConnectionPool, schema: str, polls: Polls) -> None:
        self._connections = connections
        self._schema = schema
        self._polls = polls
        self._mailboxes: dict[int, list[OpenMailbox]] = {}
        self._announced: dict[str, None] = {}

    def add(self, number: int, mailbox: OpenMailbox) -> None:
        """Notify a mailbox, from now on, of what is done to the mailbox with that number."""
        self._mailboxes.setdefault(number, []).append(mailbox)

    def remove(self, number: int, mailbox: OpenMailbox) -> bool:
        """Notify it no more. Return True if no other open mailbox has the number."""
        mailboxes = self._mailboxes[number]
        mailboxes.remove(mailbox)
        if not mailboxes:  # transient mailboxes come and go, each with a number of its own
            del self._mailboxes[number]
        return not mailboxes

    def wake(self, number: int, count: int) -> None:
        """Wake waiting receives, as ``count`` messages became pending in that mailbox."""
        for mailbox in self._mailboxes.get(number, ()):
            mailbox.waiters.signal(count)

    def sweep_in(self, number: int, seconds: float) -> None:
        """Let the receives of that mailbox ask the store in ``seconds``, when something will be due."""
        for mailbox in self._mailboxes.get(number, ()):
            self._polls.poll_in(mailbox, seconds)

    def cancelled(self, number: int, message_ids: list[str]) -> None:
        """Announce that messages of that mailbox were cancelled."""
        new = self._new(message_ids)
        for mailbox in self._mailboxes.get(number, ()) if new else ():
            mailbox.notifications.cancelled.publish(new)

    def kept_results(self, number: int, message_ids: list[str]) -> None:
        """Announce that messages of that mailbox were acknowledged with results, if any of its objects wants to know."""
        wanting = [one for one in self._mailboxes.get(number, ()) if one.notifications.results.is_wanted]
        new = self._new(message_ids) if wanting else []
        for mailbox in wanting if new else ():
            mailbox.notifications.results.publish(new)

    def _new(self, message_ids: list[str]) -> list[str]:
        """Return those ids that were not announced yet. They are announced by now.

        A notification of what this process did itself comes back to it, before or after the result of its call.
        """
        new = [message_id for message_id in message_ids if message_id not in self._announced]
        self._announced.update(dict.fromkeys(new))
        while len(self._announced) > REMEMBERED:
            del self._announced[next(iter(self._announced))]
        return new

    async def run(self) -> None:
        """Listen until cancelled."""
        retries = Retries(initial=0.1, maximum=10.0)
        while True:
            try:
                await self._listen()
                retries.succeeded()
                pause = PROBE_AGAIN
            except (MainspringError, psycopg.Error, OSError, TimeoutError) as error:
                if self._polls.listening:
                    retries.succeeded()
                    await self._connections.lose()
                    if isinstance(error, TimeoutError):
                        await self._connections.is_answering()
                pause = retries.failed()
            finally:
                self._polls.listening = False
            self._poll_all()
            await anyio.sleep(pause)

    async def _listen(self) -> None:
        """Pass notifications on until the connection is lost, which raises. Return if they do not arrive."""
        connection = await self._connections.connect()
        connection.is_expendable = True  # closing the last mailbox does not wait for a server that stands still
        try:
            with anyio.fail_after(self._connections.timeout):
                if await self._is_shared(connection):
                    return
                await connection.execute(f"LISTEN {self._schema}".encode())
            if not await self._arrives(connection):
                with anyio.fail_after(self._connections.cancel_timeout, shield=True):
                    await connection.execute(f"UNLISTEN {self._schema}".encode())
                return
            self._polls.listening = True
            self._poll_all()  # for what came before
            for mailbox in [one for some in self._mailboxes.values() for one in some]:
                mailbox.notifications.results.publish([])
            while True:
                async for notification in connection.notifies(timeout=QUIET * self._connections.silence):
                    self._notified(notification.payload)
                with anyio.fail_after(min(self._connections.timeout, ANSWER * self._connections.silence)):
                    await connection.execute(b"SELECT 1")
        finally:
            await self._connections.drop(connection)

    async def _is_shared(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        """True if a pooler lends the server process of this connection to others between transactions.

        This is asked before LISTEN, which would stay with that process and send notifications to other clients. It leaves
        nothing behind. If it cannot tell, the probe will.
        """
        mine = {await _process_of(connection)}
        if connection.pgconn.backend_pid in mine:
            return False  # no pooler: those give numbers of their own
        for _ in range(PROCESSES_ASKED):
            async with self._connections.connection() as other:
                if await _process_of(other) in mine:
                    return True
            mine |= {
                await _process_of(connection),
                await _process_of(connection),
            }  # twice, for poolers that give them in turn
            if len(mine) > 1:
                return True
        return False

    async def _arrives(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        """True if a notification that is sent over another connection arrives on this one."""
        word = f"0 probe {random.token()}"
        await self._connections.run([Statement(b"SELECT pg_notify($1, $2)", (self._schema, word))])
        async for notification in connection.notifies(timeout=PROBE_TIMEOUT):
            if notification.payload == word:
                return True
            self._notified(notification.payload)
        return False

    def _notified(self, payload: str) -> None:
        known = _PAYLOAD.fullmatch(payload)
        if known is None:  # any client of the database may notify
            return
        number, message_id = int(known["number"]), known["cancelled"]
        if message_id is not None:
            self.cancelled(number, [message_id])
        elif known["results"] is not None:
            self.kept_results(number, known["results"].split(" "))
        elif count := int(known["count"]):
            self.wake(number, count)
        else:  # a message was sent with a delay
            self.sweep_in(number, 0.0)

    def fail_claims(self, error: MailboxConnectionError) -> None:
        """Fail the receives that wait, as the server does not answer."""
        for mailboxes in self._mailboxes.values():
            for mailbox in mailboxes:
                mailbox.fail_claims(error)

    def _poll_all(self) -> None:
        for number in self._mailboxes:
            self.sweep_in(number, 0.0)


async def _process_of(connection: psycopg.AsyncConnection[Any]) -> int:
    """Return the id of the server process that has just served the connection."""
    row = await (await connection.execute("SELECT pg_backend_pid()")).fetchone()
    assert row is not None
    return int(row[0])
