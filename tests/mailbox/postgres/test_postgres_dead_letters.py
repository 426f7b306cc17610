"""Dead letters on PostgreSQL: what is done to all of them ends, however many there are."""

from __future__ import annotations

import anyio
import pytest

from mainspring.errors import MailboxError
from postgres_support import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


async def bury(mailbox, bodies):
    await mailbox.send_many(bodies)
    for message in await mailbox.receive(max_messages=9):
        await message.dead_letter("no")


async def test_messages_with_headers_that_no_mailbox_wrote_are_dead_letters(place):
    """They harm neither their neighbours nor the receive that meets them."""
    async with place.mailbox() as mailbox:
        ids = await mailbox.send_many(["first", "spoiled", "spoiled", "last"], headers={"kind": "letter"})
        place.execute("UPDATE SCHEMA.messages SET headers = '[1]' WHERE id = ANY(%s)", ids[1:3])
        received = [(await mailbox.receive())[0] for _ in range(2)]
        assert [(message.body, message.headers) for message in received] == [
            ("first", {"kind": "letter"}),
            ("last", {"kind": "letter"}),
        ]
        dead = await mailbox.dead_letters()
        assert [(letter.body, letter.headers, letter.error_type) for letter in dead] == [
            ("spoiled", {}, "NotJsonError")
        ] * 2


@pytest.mark.slow
async def test_so_many_that_no_single_call_could_replay_them_in_time(place):
    async with place.mailbox(timeout=2) as mailbox:
        await mailbox.send_many(range(3_000), expires_in=600)
        place.execute("UPDATE SCHEMA.messages SET expires_at = now()")
        assert (await mailbox.counts()).dead == 3_000
        place.execute("CREATE SEQUENCE SCHEMA.replayed")
        place.execute(
            "CREATE FUNCTION SCHEMA.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF nextval('SCHEMA.replayed') %% 100 = 0 THEN PERFORM pg_sleep(0.1); END IF; RETURN NEW; END $$"
        )
        place.execute(
            "CREATE TRIGGER slow BEFORE INSERT ON SCHEMA.messages FOR EACH ROW EXECUTE FUNCTION SCHEMA.slow()"
        )
        assert await mailbox.replay_dead_letters() == 3_000
        place.execute("DROP TRIGGER slow ON SCHEMA.messages")
        found = [message.body for _ in range(3) for message in await mailbox.receive(max_messages=1_000)]
        assert sorted(found) == list(range(3_000))
        assert (await mailbox.counts()).dead == 0


@pytest.mark.parametrize("act", ["replay_dead_letters", "purge_dead_letters"])
async def test_all_are_those_that_were_dead_by_then(place, act):
    done = []

    async def do():
        done.append(await getattr(mailbox, act)())

    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
    async with place.mailbox() as mailbox, place.mailbox("other") as other, await place.connect() as blocker:
        await bury(other, ["not this one"])
        await bury(mailbox, range(5))
        await blocker.execute(f"SELECT FROM {place.schema}.dead FOR UPDATE")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(do)
            await until(lambda: place.execute(waiting, f"%{place.schema}%"))
            await bury(mailbox, ["late"])
            await blocker.rollback()
        assert done == [5]
        assert [letter.body for letter in await mailbox.dead_letters()] == ["late"]
        replayed = [message.body for message in await mailbox.receive(max_messages=9)]
        assert replayed == (list(range(5)) if act == "replay_dead_letters" else [])
        assert (await other.counts()).dead == 1


@pytest.mark.parametrize("do", ["replay_dead_letters", "purge_dead_letters"])
async def test_what_the_server_refuses_to_read_is_an_error_of_the_mailbox(place, do):
    """The table may be damaged. The driver's errors are not for users."""
    async with place.mailbox() as mailbox:
        place.execute("ALTER TABLE SCHEMA.dead RENAME TO damaged")
        place.execute(
            "CREATE VIEW SCHEMA.dead AS SELECT place / (place - place) AS place, mailbox, id FROM SCHEMA.damaged"
        )
        place.execute(
            "INSERT INTO SCHEMA.damaged (place, mailbox, id, dead_at, enqueued_at, lease, deliveries, attempts, rank, body,"
            " error, error_type, traceback) VALUES (1, %s, 'x', now(), now(), 1, 1, 1, 0, '1', '', '', '')",
            place.number(),
        )
        with pytest.raises(MailboxError, match="PostgreSQL refused the operation: division by zero"):
            await getattr(mailbox, do)()


@pytest.mark.slow
@pytest.mark.parametrize(("few", "capacity"), [(0, None), (300, 100_000)])
async def test_no_call_by_an_id_or_for_a_page_reads_all_dead_letters(place, few, capacity):
    """Nor all messages. Connections keep their plans, made here while there were few letters, of one task and mailbox."""

    async def call(ids):
        found = [*await store.find_dead_letters(ids[:1]), *await store.dead_letters(5, ids[2])]
        found += await store.dead_letters_of("rare", 5, ids[2])
        return len(found), await mailbox.replay_dead_letters(ids[:1]), await mailbox.purge_dead_letters(ids[1:2])

    fill = (
        "INSERT INTO SCHEMA.dead (place, mailbox, id, dead_at, enqueued_at, lease, deliveries, attempts, rank, body, task,"
        " dedup_key, error, error_type, traceback) SELECT n, %s, 'd' || n, now(), now(), 1, 1, 1, 0, '1',"
        " CASE WHEN n > 19000 THEN 'rare' ELSE 'common' END, 'k' || n, '', '', '' FROM generate_series(%s::int, %s::int) AS n"
    )
    connected = "SELECT 1 FROM pg_stat_activity WHERE query LIKE %s AND pid <> pg_backend_pid()"
    async with place.mailbox(capacity=capacity) as mailbox, place.mailbox("other") as other:
        store = mailbox.backend
        place.execute(fill, place.number(), 1, few)
        place.execute("ANALYZE SCHEMA.dead")
        for _ in range(9):
            await call(["none", "none", f"d{few - 5}"])
        place.execute(fill, place.number(), few + 1, 20_000)
        await mailbox.send_many(range(5_000))
        assert await call(["d401", "d402", "d403"]) == (11, 1, 1)
        place.execute(fill, place.number("other"), 30_001, 30_003)
        assert len(await other.dead_letters()) == await other.purge_dead_letters() == 3
    await until(lambda: not place.execute(connected, f"%{place.schema}%"))  # then their statistics have come
    read = place.execute(
        "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_all_tables"
        " WHERE schemaname = %s AND relname IN ('dead', 'messages')",
        place.schema,
    )
    assert read[0][0] < 200
    async with place.mailbox() as mailbox:  # the calls for all are portions of such calls
        assert await mailbox.purge_dead_letters() == 19_998
