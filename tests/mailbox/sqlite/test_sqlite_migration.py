"""A mailbox file of an earlier schema is brought up to date when it is opened, with all that is in it."""

from __future__ import annotations

import apsw
import pytest

from mainspring import Tasks
from mainspring.mailbox.message import CancelOutcome, Dead, Envelope, Nack
from mainspring.mailbox.records import RecordWrite
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox

pytestmark = pytest.mark.anyio

TO_SIXTH = """
DROP INDEX delayed_by_mailbox;
DROP INDEX dead_by_task;
CREATE INDEX delayed_by_seq ON delayed (seq);
DROP INDEX leases_by_end;
ALTER TABLE leases RENAME TO leases_later;
CREATE TABLE leases (
    lease INTEGER PRIMARY KEY, mailbox INTEGER NOT NULL, seq INTEGER NOT NULL, pos ANY NOT NULL, until REAL NOT NULL,
    claimed_at REAL NOT NULL, permits INTEGER
) STRICT;
CREATE INDEX leases_by_end ON leases (until);
INSERT INTO leases SELECT * FROM leases_later;
DROP TABLE leases_later;
PRAGMA user_version = 6;
"""
TO_FIFTH = f"""{TO_SIXTH}
DROP TABLE limits;
DROP TABLE limiters;
DROP TABLE waiting;
DROP INDEX messages_by_task;
DROP INDEX messages_in_turn;
ALTER TABLE mailboxes DROP COLUMN waiting;
ALTER TABLE mailboxes DROP COLUMN most;
ALTER TABLE mailboxes DROP COLUMN limited;
ALTER TABLE mailboxes DROP COLUMN opens_at;
ALTER TABLE messages DROP COLUMN task;
ALTER TABLE messages DROP COLUMN key;
ALTER TABLE messages DROP COLUMN weight;
ALTER TABLE messages DROP COLUMN place;
ALTER TABLE delayed DROP COLUMN permits;
ALTER TABLE dead DROP COLUMN task;
ALTER TABLE dead DROP COLUMN key;
ALTER TABLE dead DROP COLUMN weight;
ALTER TABLE dead DROP COLUMN permits;
ALTER TABLE ready RENAME TO ready_later;
CREATE TABLE ready (
    mailbox INTEGER NOT NULL, rank INTEGER NOT NULL, pos INTEGER NOT NULL, seq INTEGER NOT NULL,
    PRIMARY KEY (mailbox, rank, pos)
) STRICT, WITHOUT ROWID;
INSERT INTO ready SELECT mailbox, rank, pos, seq FROM ready_later;
DROP TABLE ready_later;
ALTER TABLE leases DROP COLUMN permits;
PRAGMA user_version = 5;
"""
TO_FOURTH = f"""{TO_FIFTH}
DROP TABLE records;
ALTER TABLE mailboxes DROP COLUMN records_end;
PRAGMA user_version = 4;
"""
TO_THIRD = f"""{TO_FOURTH}
ALTER TABLE store DROP COLUMN file_id;
PRAGMA user_version = 3;
"""
TO_SECOND = f"""{TO_THIRD}
ALTER TABLE store ADD COLUMN tick INTEGER NOT NULL DEFAULT 0;
UPDATE store SET tick = (SELECT tick FROM mailboxes WHERE id = 0);
DELETE FROM mailboxes WHERE id = 0;
ALTER TABLE mailboxes DROP COLUMN tick;
PRAGMA user_version = 2;
"""
TO_FIRST = f"""{TO_SECOND}
ALTER TABLE messages DROP COLUMN history;
ALTER TABLE dead DROP COLUMN history;
ALTER TABLE mailboxes DROP COLUMN used_at;
DROP INDEX messages_by_id;
DROP INDEX delayed_by_seq;
PRAGMA user_version = 1;
"""


def made_of(path: str) -> dict[str, list[str]]:
    """The columns of each table, in order, and the names of the indexes."""
    connection = apsw.Connection(path)
    rows = connection.execute(
        "SELECT type, name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
    ).fetchall()
    found = {
        name: [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
        for kind, name in rows
        if kind == "table"
    }
    found["indexes"] = [name for kind, name in rows if kind == "index"]
    connection.close()
    return found


@pytest.mark.parametrize(
    "to_earlier",
    [TO_FIRST, TO_SECOND, TO_THIRD, TO_FOURTH, TO_FIFTH, TO_SIXTH],
    ids=["first", "second", "third", "fourth", "fifth", "sixth"],
)
async def test_a_file_of_an_earlier_schema_is_migrated_with_all_its_messages(path, to_earlier):
    async with SQLiteMailbox(path) as mailbox:
        ids = [await mailbox.send(f"job {n}", delay=60 if n == 3 else 0) for n in range(4)]
        (message,) = await mailbox.receive()
        await message.dead_letter("the first one died")
        (held,) = await mailbox.receive(visibility_timeout=600)
    fresh = made_of(path)
    connection = apsw.Connection(path)
    connection.execute(to_earlier)
    connection.close()
    assert made_of(path) != fresh

    async with SQLiteMailbox(path) as mailbox:
        assert made_of(path) == fresh
        assert [letter.body for letter in await mailbox.dead_letters()] == ["job 0"]
        assert await mailbox.cancel(ids[3]) is CancelOutcome.REMOVED
        await mailbox.backend.settle(held.delivery, Nack(charge=False, front=True))  # its lease is held still
        assert await mailbox.replay_dead_letters() == 1
        await mailbox.send("new")  # with a number that no other message has
        assert await mailbox.backend.write_record(RecordWrite("test", "a", b"", 60))
        assert [record.key for record in await mailbox.backend.list_records("test", 10, None)] == ["a"]
        received = await mailbox.receive(max_messages=10)
        assert [message.body for message in received] == ["job 1", "job 2", "job 0", "new"]
        await received[0].nack(error="not yet")
        (again,) = await mailbox.receive()
        await again.dead_letter("it died, too")
        (letter,) = await mailbox.dead_letters()
        assert [failure.error for failure in letter.history] == ["not yet", "it died, too"]


async def test_dead_letters_of_calls_that_an_earlier_schema_had_no_task_for_are_found_by_it(path):
    tasks = Tasks(f"sqlite:///{path}")

    @tasks.task
    async def work(text: str) -> None: ...

    async with tasks:
        await work.send("a call")
        await tasks.mailbox.backend.send([Envelope("no-call", b'{"task":"\xff","args":{}}')])
        for message in await tasks.mailbox.backend.claim(2, 60, 0):
            await tasks.mailbox.backend.settle(message, Dead("it died", "Error", ""))
    connection = apsw.Connection(path)
    connection.execute(TO_SIXTH)
    connection.execute("UPDATE dead SET task = NULL")
    connection.close()
    async with SQLiteMailbox(path) as mailbox:
        assert len(await mailbox.dead_letters()) == 2
        (letter,) = await mailbox.dead_letters(task="work")
        assert letter.body["args"] == {"text": "a call"}
