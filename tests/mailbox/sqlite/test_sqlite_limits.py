"""The limits of a mailbox file: under any sequence of calls, when workers are killed, and what they cost where none are."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import apsw
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from limits_machine import AliasMachine, LimitsMachine
from mainspring.errors import MailboxError
from mainspring.mailbox import batched
from mainspring.mailbox.job_commands import ChangeLimits, ListLimits, Reschedule, SetTask
from mainspring.mailbox.limiters import ALL_TASKS, Blocks, LimitChange, TaskLimits
from mainspring.mailbox.sqlite import schema as sql
from mainspring.mailbox.sqlite.limits import AT_ONCE, KEY, TASK, KnownLimits
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from mainspring.mailbox.sqlite.store import JoiningAcknowledge, perform
from mainspring.policies import Rate

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

    def set_task(self, delivery: Any, now: float, task: str) -> Any:
        return self.do(SetTask(delivery, task), now)

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
        """The limiters count the permits that messages have, and the mailbox counts the messages that wait at limiters."""
        rows = self.queue.rows
        used: Counter[tuple[str, str]] = Counter()
        unclaimed: Counter[tuple[str, str]] = Counter()
        limited = dict(rows("SELECT task, declared ->> 5 FROM limits"))
        for task, key, permits, claimed in rows(PERMITS):
            for permit, name in ((KEY, f"={key}"), (TASK, "")):
                if task in limited and permits and permits & permit:
                    used[task, name] += 1
                    unclaimed[task, name] += (not claimed) and (limited[task] or not name)
        limiters = rows("SELECT task, name, used, unclaimed, waiting FROM limiters")
        assert {(task, name): count for task, name, count, _, _ in limiters if count} == dict(used)
        counted = {(task, name): count for task, name, _, count, _ in limiters if count and (limited[task] or not name)}
        assert counted == dict(+unclaimed)
        for task, name, count, _, _ in limiters:  # a claim leaves those alone whose claims are not counted
            ((most,),) = rows(f"SELECT declared ->> 1 FROM limits WHERE task = '{task}'")
            assert not name or limited[task] or most is None or count <= most
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


def test_a_message_that_gets_its_permits_during_a_claim_takes_no_place_of_another():
    """It is older than the limits, and comes into the line before a message that the claim has found already."""
    machine = StoredLimitsMachine()
    machine.send("u", "b", 1.0, 0, 0.0, None)
    machine.send(None, None, 1.0, 0, 0.0, None)
    machine.limit("u", 2, Rate(1), None, Rate(1, 2), Blocks.RUNNING)
    assert len(machine.claim(3, 30.0).values) == 2
    machine.the_tables_agree()


class StoredAliasMachine(AliasMachine):
    """The machine of aliases, on the tables of a mailbox file."""

    def new_queue(self) -> StoredQueue:
        return StoredQueue()


TestStoredAliases = StoredAliasMachine.TestCase
TestStoredAliases.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStoredAliases.pytestmark = [pytest.mark.slow]


async def send(mailbox, *bodies, task="t", key=None):
    """Send calls of a task, in one transaction."""
    envelopes = [mailbox.prepare(body) for body in bodies]
    for envelope in envelopes:
        envelope.task, envelope.key = task, key
    return await mailbox.send_prepared(envelopes)


async def limit(mailbox, task="t", **limits):
    await mailbox.backend.change_limits([LimitChange(task, TaskLimits(**limits))])


def rows(path, statement):
    connection = apsw.Connection(path)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


async def parked(mailbox):
    """Return once a receive waits, and nothing is on its way."""
    with anyio.fail_after(30):
        while mailbox.statistics().waiting_receives != 1 or mailbox.statistics().in_flight:
            await anyio.sleep(0.001)


@pytest.mark.anyio
@pytest.mark.parametrize("task", [None, "t"])
async def test_a_file_without_limits_reads_no_page_of_theirs(connections, mailbox, task):
    statements = []
    (connection,) = connections
    connection.exec_trace = lambda cursor, statement, values: statements.append(statement) or True
    for end in ("nack", "release", "dead_letter", "acknowledge"):
        await send(mailbox, end, task=task)
        (message,) = await mailbox.receive()
        await getattr(message, end)(*(["no"] if end == "dead_letter" else []))
    await mailbox.purge()
    assert len(statements) > 30
    assert not [each for each in statements if re.search(r"(FROM|INTO|JOIN|UPDATE) (limits|limiters|waiting)\b", each)]


@pytest.mark.anyio
@pytest.mark.parametrize(("task", "bodies", "looks"), [("t", "abc", 1), ("t", "a", 0), ("u", "abc", 0)])
async def test_a_send_looks_who_waits_for_a_permit_of_its_task_only_if_some_do(
    connections, mailbox, task, bodies, looks
):
    await limit(mailbox, concurrency=1)
    await send(mailbox, *bodies, key="a")
    statements = []
    (connection,) = connections
    connection.exec_trace = lambda cursor, statement, values: statements.append(statement) or True
    await send(mailbox, "d", "e", task=task, key="b")
    assert statements.count(sql.FIRST_WAITING_PLACE) == looks
    assert any("limiters" in each for each in statements) == (task == "t")


@pytest.mark.anyio
@pytest.mark.parametrize(("limits", "touched"), [({}, 0), ({"key_rate": Rate(1, 60)}, 20)])
async def test_a_claim_leaves_the_limiters_of_keys_alone_unless_they_count_claims(
    connections, mailbox, limits, touched
):
    await limit(mailbox, key_concurrency=1, **limits)
    for key in range(20):
        await send(mailbox, "x", key=f"{key}")
    statements = []
    (connection,) = connections
    connection.exec_trace = lambda cursor, statement, values: statements.append(statement) or True
    assert len(await mailbox.receive(max_messages=100)) == 20
    assert statements.count(sql.WRITE_LIMITER) == touched + 1
    assert statements.count(sql.LIMITERS) == (1 if touched else 0)


@pytest.mark.anyio
async def test_the_permits_of_many_keys_go_on_together(connections, mailbox):
    await limit(mailbox, key_concurrency=1)
    for key in range(60):
        await send(mailbox, "first", "second", key=f"{key}")
    first = await mailbox.receive(max_messages=60)
    statements = []
    (connection,) = connections
    connection.exec_trace = lambda cursor, statement, values: statements.append(statement) or True
    await mailbox.acknowledge_many(first)
    assert [each.startswith("DELETE FROM waiting") for each in statements].count(True) == 1
    assert [each.startswith("INSERT INTO ready") for each in statements].count(True) < 15
    connection.exec_trace = None
    second = await mailbox.receive(max_messages=60)
    assert [message.body for message in second] == ["second"] * 60
    assert (await mailbox.counts()).pending == 0


@pytest.mark.anyio
async def test_a_task_gives_its_permit_once_to_a_message_that_needs_its_key_first(mailbox):
    await limit(mailbox, concurrency=1)
    await send(mailbox, *range(3), key="a")
    await limit(mailbox, concurrency=1, key_concurrency=1)
    for body in range(3):
        (message,) = await mailbox.receive(max_messages=3, wait_time_seconds=5)
        assert message.body == body
        await message.acknowledge()


@pytest.mark.anyio
async def test_a_key_rate_that_comes_later_counts_what_is_ready(path, virtual_clock):
    async with SQLiteMailbox(path) as mailbox:
        await limit(mailbox, concurrency=3, key_concurrency=2)
        await send(mailbox, *range(4), key="a")
        await limit(mailbox, concurrency=3, key_concurrency=2, key_rate=Rate(1, 10))
        ready = await mailbox.receive(max_messages=10)
        assert [message.body for message in ready] == [0, 1]
        for message in ready:
            await message.acknowledge()
        assert not await mailbox.receive(max_messages=10, wait_time_seconds=19)
        (third,) = await mailbox.receive(wait_time_seconds=2)
        assert third.body == 2


@pytest.mark.anyio
async def test_keys_with_more_permits_than_are_allowed_now_count_claims_until_a_change_finds_none(path):
    async with SQLiteMailbox(path) as mailbox:
        await limit(mailbox, key_concurrency=2)
        await send(mailbox, *range(4), key="a")
        (first,) = await mailbox.receive(max_messages=1)
        await limit(mailbox, key_concurrency=1)
        assert rows(path, "SELECT declared ->> 5 FROM limits") == [(1,)]
        assert not await mailbox.receive(max_messages=10)
        await first.acknowledge()
        (second,) = await mailbox.receive(max_messages=10)
        assert second.body == 1
        await limit(mailbox, key_concurrency=3)
        assert rows(path, "SELECT declared ->> 5 FROM limits") == [(0,)]
        assert [message.body for message in await mailbox.receive(max_messages=10)] == [2, 3]


@pytest.mark.anyio
async def test_a_message_without_a_task_is_written_by_the_statements_of_before(connections, mailbox):
    """A row for the message and a row for its place, with the same columns as before limits."""
    statements = []
    (connection,) = connections
    connection.exec_trace = lambda cursor, statement, values: statements.append(statement) or True
    await mailbox.send("a")
    written = [each for each in statements if each.startswith(("INSERT", "REPLACE", "UPDATE", "DELETE"))]
    assert written == [sql.ADD_MESSAGE, sql.ADD_READY, sql.ADD_COUNTS, sql.SET_TICK]


@pytest.mark.anyio
@pytest.mark.parametrize("held_back_by", ["concurrency", "a pause of the mailbox", "its concurrency"])
async def test_what_waits_at_a_limit_wakes_no_receive(path, held_back_by, anyio_backend):
    async with SQLiteMailbox(path) as mailbox:
        whole = held_back_by != "concurrency"
        await limit(mailbox, ALL_TASKS if whole else "t", concurrency=1)
        await send(mailbox, "first")
        (first,) = await mailbox.receive()
        if held_back_by == "a pause of the mailbox":
            await mailbox.backend.change_limits([LimitChange(ALL_TASKS, paused=True)])
        received = []

        async def receive():
            received.extend(await mailbox.receive(wait_time_seconds=60))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            await parked(mailbox)
            before = mailbox.transactions
            for number in range(20):
                await send(mailbox, number)
            await anyio.sleep(0.05)
            assert mailbox.transactions - before == 20
            if held_back_by == "a pause of the mailbox":
                await mailbox.backend.change_limits([LimitChange(ALL_TASKS, paused=False)])
            await first.acknowledge()
        assert [message.body for message in received] == [0]


@pytest.mark.anyio
async def test_a_receive_that_waits_for_a_rate_looks_again_when_it_opens(path, virtual_clock):
    async with SQLiteMailbox(path) as mailbox:
        await limit(mailbox, rate=Rate(1, 3_600))
        await send(mailbox, *range(3))
        await mailbox.receive()
        before, begun = mailbox.transactions, anyio.current_time()
        for number in (1, 2):
            (message,) = await mailbox.receive(wait_time_seconds=7_200)
            assert (message.body, anyio.current_time() - begun) == (number, pytest.approx(3_600 * number))
            await message.acknowledge()
        assert mailbox.transactions - before < 12


@pytest.mark.anyio
async def test_a_receive_finds_what_is_behind_more_than_one_transaction_puts_back(mailbox):
    """A task is paused of which more is ready than one transaction puts back to the limiter."""
    for _ in range(5):
        await send(mailbox, *range(AT_ONCE // 2))
    await send(mailbox, "other", task="u")
    await mailbox.backend.change_limits([LimitChange("t", paused=True)])
    before = mailbox.transactions
    assert [message.body for message in await mailbox.receive()] == ["other"]
    assert mailbox.transactions - before == 3


@pytest.mark.anyio
async def test_a_limit_that_is_taken_back_frees_some_at_a_time(mailbox, path):
    await limit(mailbox, concurrency=1)
    for _ in range(5):
        await send(mailbox, *range(AT_ONCE // 2))
    await limit(mailbox)
    assert rows(path, "SELECT count(*) FROM ready") == [(AT_ONCE + 1,)]
    received = 0
    while messages := await mailbox.receive(max_messages=400):
        received += len(messages)
        assert await mailbox.acknowledge_many(messages) == {}
    assert received == 5 * AT_ONCE // 2
    for table in ("limits", "limiters", "waiting"):
        assert rows(path, f"SELECT count(*) FROM {table}") == [(0,)], "nothing is left of the limit"
    assert rows(path, "SELECT limited FROM mailboxes WHERE id = 0") == [(None,)], "the file has no limits any more"


@pytest.mark.anyio
async def test_keys_whose_rate_has_recovered_are_forgotten(path, virtual_clock):
    async with SQLiteMailbox(path) as mailbox:
        await limit(mailbox, key_rate=Rate(1, 10))
        for turn in range(4):
            for key in range(50):
                await send(mailbox, key, key=f"{turn} {key}")
            assert await mailbox.acknowledge_many(await mailbox.receive(max_messages=100)) == {}
            await anyio.sleep(20)
        assert rows(path, "SELECT count(*) FROM limiters")[0][0] <= 51


@pytest.mark.anyio
async def test_a_mailbox_that_is_dropped_takes_its_limits_with_it(path, anyio_backend):
    async with SQLiteMailbox(path, name="stays"), SQLiteMailbox(path, name="~goes") as mailbox:
        await limit(mailbox, concurrency=1)
        await send(mailbox, 1, 2)
        await mailbox.backend.drop()
    assert rows(path, "SELECT count(*) FROM limits") == [(0,)]
    assert rows(path, "SELECT count(*) FROM limiters") == [(0,)]
    assert rows(path, "SELECT count(*) FROM waiting") == [(0,)]


@pytest.mark.anyio
async def test_another_file_at_the_path_has_its_own_limits(path, anyio_backend):
    """It has the same number for them."""
    for most in (1, 2):
        async with SQLiteMailbox(path) as mailbox:
            await limit(mailbox, concurrency=most)
            await send(mailbox, *range(9))
            assert len(await mailbox.receive(max_messages=9)) == most
        os.unlink(path)


@pytest.mark.anyio
async def test_what_a_failed_neighbour_makes_be_done_one_by_one_keeps_limits(mailbox):
    """A change, a send and a claim share a transaction with a message that cannot be stored."""
    failing = mailbox.prepare("x")
    failing.message_id = "\ud800"
    async with anyio.create_task_group() as tasks:

        async def fail():
            with pytest.raises(MailboxError, match="the store cannot do this"):
                await mailbox.send_prepared([failing])

        tasks.start_soon(fail)
        tasks.start_soon(partial(limit, mailbox, concurrency=2))
        tasks.start_soon(send, mailbox, *range(9))
    assert len(await mailbox.receive(max_messages=9)) == 2
    (state,) = await mailbox.backend.limits()
    assert (state.running, state.waiting) == (2, 7)
