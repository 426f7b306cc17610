"""How many messages each mailbox holds, asked with a deadline: a mailbox that is down must not fail a scrape."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

import anyio

from mainspring.telemetry.status import MailboxStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.mailbox.message import Counts

PARTS = ("delayed", "pending", "in_flight", "settled", "dead")


class Countable(Protocol):
    """What is asked of a mailbox here."""

    name: str

    async def counts(self) -> Counts:
        """Return where its messages are."""


class DepthReader:
    """Reads the counts of all mailboxes at once, at most every ``max_age`` seconds however many ask.

    Each gets ``timeout`` seconds; one that fails or is late is reported with its error and without counts. Two mailboxes of
    one name are told apart by a number (``jobs``, ``jobs#2``): an address could hold a password.
    """

    def __init__(
        self, mailboxes: Callable[[], Sequence[Countable]], *, timeout: float = 1.0, max_age: float = 1.0
    ) -> None:
        self._mailboxes = mailboxes
        self._timeout = timeout
        self._max_age = max_age
        self._lock = anyio.Lock()
        self._read_at = 0.0
        self._read: tuple[MailboxStatus, ...] | None = None

    async def read(self) -> tuple[MailboxStatus, ...]:
        """Return the counts, in the order of the mailboxes. Cancelled, it leaves nothing behind."""
        async with self._lock:  # who waits here finds a fresh answer; the holder has a deadline
            if self._read is None or not 0 <= anyio.current_time() - self._read_at < self._max_age:
                self._read = await self._ask_all()
                self._read_at = anyio.current_time()
            return self._read

    async def _ask_all(self) -> tuple[MailboxStatus, ...]:
        mailboxes = list(self._mailboxes())
        found: list[MailboxStatus] = [MailboxStatus(name, None) for name in _labels(mailboxes)]

        async def ask(index: int) -> None:
            found[index] = await self._ask(mailboxes[index], found[index].name)

        async with anyio.create_task_group() as group:
            for index in range(len(mailboxes)):
                group.start_soon(ask, index)
        return tuple(found)

    async def _ask(self, mailbox: Countable, label: str) -> MailboxStatus:
        try:
            with anyio.fail_after(self._timeout):
                counts = await mailbox.counts()
        except TimeoutError:
            return MailboxStatus(label, None, f"no answer within {self._timeout:g} s")
        except Exception as error:  # whatever the driver of a store raises when it is down
            return MailboxStatus(label, None, " ".join(f"{type(error).__name__}: {error}".split()))
        return MailboxStatus(label, {part: getattr(counts, part) for part in PARTS}, queue_age=counts.queue_age)


def _labels(mailboxes: Sequence[Countable]) -> list[str]:
    seen: Counter[str] = Counter()
    labels = []
    for mailbox in mailboxes:
        seen[mailbox.name] += 1
        count = seen[mailbox.name]
        labels.append(mailbox.name if count == 1 else f"{mailbox.name}#{count}")
    return labels
