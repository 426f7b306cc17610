"""The limits of a mailbox file: under any sequence of calls, when workers are killed, and what they cost where none are."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import apsw
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from limits_machine import LimitsMachine
from mainspring.mailbox import batched
from mainspring.mailbox.job_commands import ChangeLimits, ListLimits, Reschedule
from mainspring.mailbox.sqlite import schema as sql
from mainspring.mailbox.sqlite.limits import KEY, TASK, KnownLimits
from mainspring.mailbox.sqlite.store import JoiningAcknowledge, perform

PERMITS = """SELECT m.task, m.key, p.permits, p.claimed FROM (
        SELECT seq, permits, 0 AS claimed FROM ready UNION ALL SELECT seq, permits, 0 FROM waiting
        UNION ALL SELECT seq, permits, 1 FROM delayed UNION ALL SELECT seq, permits, 1 FROM leases
    ) AS p JOIN messages AS m USING (seq) WHERE m.task IS NOT NULL
    UNION ALL SELECT task, key, permits, 1 FROM dead WHERE task IS NOT NULL"""

LEASED = "SELECT m.task, m.key, l.permits FROM leases AS l JOIN messages AS m USING (seq) WHERE lease ="


class StoredQueue:
    """The store alone, on a file in memory, with the methods of :class:`MemoryQueue`: each is a transaction."""

    def __init__(self) -> None:
        self.file = apsw.Connection(":memory:")
        self.file.execute(sql.SCHEMA)
        self.file.execute(sql.START, ("boot", "file"))
        self.known = KnownLimits()
        self.limits = SimpleNamespace(change=self.change, states=lambda in_flight: self.do(ListLimits(), 0.0))
        self.now = 0.0
        self.mailbox = 0
        self.mailbox = self.do(batched.Open("m"), 0.0)

    def do(self, command: batched.Command, now: float) -> Any:
        self.now = max(now, self.now)
        command.mailbox = self.mailbox
        self.file.execute("BEGIN")
        perform(self.file, [command], self.now, self.now + 1_000_000.0, self.known)
        self.file.execute("COMMIT")
        if command.error is not None:
            raise command.error
        return command.result

    def put(self, envelopes: list[Any], now: float) -> None:
        self.do(batched.Send(envelopes), now)

    def claim(self, most: int, now: float, lease: float) -> list[Any]:
        found = []
        for delivery in self.do(batched.Claim(most, min(lease, 1e12), False), now):
            ((task, key, permits),) = self.rows(f"{LEASED} {delivery.receipt_handle}")
            values = {"task": task, "key": key, "permits": permits or 0, "lease_until": now + lease}
            found.append(SimpleNamespace(**values, **{name: getattr(delivery, name) for name in delivery.__slots__}))
        return found

    def acknowledge(self, deliveries: list[Any], now: float) -> Any:
        return self.do(JoiningAcknowledge(deliveries), now)

    def nack(self, delivery: Any, now: float, how: Any) -> None:
        self.do(batched.NackCommand(delivery, how), now)

    def dead_letter(self, delivery: Any, now: float, why: Any) -> None:
        self.do(batched.DeadLetterCommand(delivery, why), now)

    def cancel(self, message_id: str, now: float) -> Any:
        return self.do(batched.Cancel(message_id), now)

    def reschedule(self, message_id: str, now: float, delay: float) -> None:
        self.do(Reschedule(message_id, delay), now)

    def replay(self, message_ids: Any, now: float) -> int:
        return int(self.do(batched.ReplayDead(message_ids, None), now))

    def purge_dead(self, message_ids: Any, now: float) -> int:
        return int(self.do(batched.PurgeDead(message_ids), now))

    def purge(self, now: float) -> int:
        return int(self.do(batched.Purge(), now))

    def counts(self, now: float) -> Any:
        return self.do(batched.Count(), now)

    def advance(self, now: float) -> None:
        self.do(batched.Sweep(), now)

    def change(self, changes: Any, now: float) -> None:
        self.do(ChangeLimits(changes), now)

    @property
    def waiting(self) -> int:
        return int(self.counts(self.now).waiting)

    def rows(self, statement: str) -> list[Any]:
        return self.file.execute(statement).fetchall()


class StoredLimitsMachine(LimitsMachine):
    """The machine, on the tables of a mailbox file."""

    def new_queue(self) -> StoredQueue:
        return StoredQueue()

    @invariant()
    def the_tables_agree(self) -> None:
        """The limiters count the permits that messages have, and the mailbox those that wait at them."""
        rows = self.queue.rows
        used: Counter[tuple[str, str]] = Counter()
        unclaimed: Counter[tuple[str, str]] = Counter()
        limited = {task for (task,) in rows("SELECT task FROM limits")}
        for task, key, permits, claimed in rows(PERMITS):
            for permit, name in ((KEY, f"={key}"), (TASK, "")):
                if task in limited and permits and permits & permit:
                    used[task, name] += 1
                    unclaimed[task, name] += not claimed
        limiters = rows("SELECT task, name, used, unclaimed, waiting FROM limiters")
        assert {(task, name): count for task, name, count, _, _ in limiters if count} == dict(used)
        assert {(task, name): count for task, name, _, count, _ in limiters if count} == dict(+unclaimed)
        waiting = rows("SELECT task, name, count(*) FROM waiting GROUP BY task, name")
        assert {(task, name): count for task, name, _, _, count in limiters if count} == {
            (t, n): c for t, n, c in waiting
        }
        ((known, pending),) = rows("SELECT waiting, pending FROM mailboxes WHERE id > 0")
        assert known == sum(count for _, _, count in waiting)
        assert pending - known == rows("SELECT count(*) FROM ready")[0][0]


TestStoredLimits = StoredLimitsMachine.TestCase
TestStoredLimits.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestStoredLimits.pytestmark = [pytest.mark.slow]
