"""Dead letters on PostgreSQL: what is done to all of them ends, however many there are."""

from __future__ import annotations

import pytest

from mainspring.mailbox.postgres import dead_letters as postgres_dead_letters

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


async def bury(mailbox, bodies):
    for body in bodies:
        await mailbox.send(body)
        (message,) = await mailbox.receive()
        await message.dead_letter("no")


async def test_so_many_that_no_single_call_could_replay_them_in_time(place, monkeypatch):
    monkeypatch.setattr(postgres_dead_letters, "AT_ONCE", 5)
    async with place.mailbox(timeout=3) as mailbox:
        await bury(mailbox, range(40))
        place.execute(
            "CREATE FUNCTION SCHEMA.slow() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN PERFORM pg_sleep(0.1); RETURN NEW; END'"
        )
        place.execute(
            "CREATE TRIGGER slow BEFORE INSERT ON SCHEMA.messages FOR EACH ROW EXECUTE FUNCTION SCHEMA.slow()"
        )
        assert await mailbox.replay_dead_letters() == 40
        assert [message.body for message in await mailbox.receive(max_messages=100)] == list(range(40))
        assert (await mailbox.counts()).dead == 0


async def test_all_are_those_that_were_dead_by_then(place, monkeypatch):
    monkeypatch.setattr(postgres_dead_letters, "AT_ONCE", 2)
    async with place.mailbox() as mailbox, place.mailbox("other") as other:
        await bury(other, ["not this one"])
        for do in (mailbox.replay_dead_letters, mailbox.purge_dead_letters):
            await bury(mailbox, range(5))
            rows = mailbox._here.rows

            async def while_another_dies(function, *values, call=rows):
                if function in ("replay", "forget"):
                    monkeypatch.setattr(mailbox._here, "rows", call)
                    await bury(mailbox, ["late"])
                return await call(function, *values)

            monkeypatch.setattr(mailbox._here, "rows", while_another_dies)
            assert await do() == 5
            assert [letter.body for letter in await mailbox.dead_letters()] == ["late"]
            assert await mailbox.purge() == (5 if do == mailbox.replay_dead_letters else 0)
            assert await mailbox.purge_dead_letters() == 1
        assert (await other.counts()).dead == 1
