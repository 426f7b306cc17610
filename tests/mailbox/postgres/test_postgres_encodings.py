"""Text is what it was, whatever encoding the database, the environment, the URL or a sender's own connection is in."""

from __future__ import annotations

import anyio
import psycopg
import pytest
from psycopg.pq import Format

from mainspring import ConfigError, InvalidParameterError
from mainspring.mailbox.postgres.values import Texts, array, register

pytestmark = pytest.mark.anyio

ENCODINGS = ["LATIN1", "SQL_ASCII", "UTF8"]


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("by", ["environment", "url", "database"])
async def test_text_is_what_it_was(place, monkeypatch, encoding, by, anyio_backend):
    url = place.url
    if by == "environment":
        monkeypatch.setenv("PGCLIENTENCODING", encoding)
    elif by == "url":
        url += f"?client_encoding={encoding}"
    else:
        url = place.url.rpartition("/")[0] + f"/{place.schema}"
        place.execute(
            f"CREATE DATABASE {place.schema} TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
        )
    try:
        async with place.mailbox("jöbs", url=url) as jobs, place.mailbox("antwört", url=url) as answers:
            sent = await jobs.send("ü", headers={"ö": "ä"}, reply_to="antwört", dedup_key="schlüssel")
            assert await jobs.send("again", dedup_key="schlüssel") == sent
            (message,) = await jobs.receive()
            assert (message.id, message.body, message.reply_to) == (sent, "ü", "antwört")
            assert message.headers == {"ö": "ä"}
            await message.reply("é")
            assert [reply.body for reply in await answers.receive()] == ["é"]
            await jobs.send("dies")
            (message,) = await jobs.receive()
            await message.dead_letter("fällt")
            assert [dead.error for dead in await jobs.dead_letters()] == ["fällt"]
    finally:
        if by == "database":
            place.execute(f"DROP DATABASE {place.schema} WITH (FORCE)")


@pytest.mark.slow
async def test_a_name_that_the_database_cannot_keep_harms_no_mailbox_that_opens_with_it(place, anyio_backend):
    url = place.url.rpartition("/")[0] + f"/{place.schema}"
    place.execute(f"CREATE DATABASE {place.schema} TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'")
    opened, refused = [], []

    async def open_one(name):
        try:
            async with place.mailbox(name, url=url) as mailbox:
                await mailbox.send("x")
                opened.append(name)
        except ConfigError as error:
            refused.append(str(error))

    try:
        async with anyio.create_task_group() as tasks:
            for name in ("a", "b", "日本", "c", "d"):
                tasks.start_soon(open_one, name)
        assert sorted(opened) == ["a", "b", "c", "d"]
        (text,) = refused
        assert text.startswith("the database cannot keep the name '日本': character with byte sequence")
    finally:
        place.execute(f"DROP DATABASE {place.schema} WITH (FORCE)")


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_so_it_is_on_a_senders_own_connection(place, encoding, anyio_backend):
    async with place.mailbox() as mailbox:
        async with await place.connect(client_encoding=encoding) as connection:
            sent = [
                await mailbox.send("x", reply_to="antwört", dedup_key=key, connection=connection)
                for key in ("schlüssel", None)
            ]
        assert sent[0] == await mailbox.send("x", dedup_key="schlüssel")
        messages = await mailbox.receive(max_messages=9)
        assert [(message.id, message.reply_to) for message in messages] == [(name, "antwört") for name in sent]


async def test_what_the_encoding_of_a_connection_cannot_say_is_the_senders_mistake(place, anyio_backend):
    async with place.mailbox() as mailbox:
        async with await place.connect(client_encoding="LATIN1") as connection:
            for key in ("☃", None):
                with pytest.raises(InvalidParameterError, match="client_encoding"):
                    await mailbox.send("x", reply_to="☃", dedup_key=key, connection=connection)
            await mailbox.send("y", connection=connection)
        assert [message.body for message in await mailbox.receive(max_messages=9)] == ["y"]


@pytest.mark.parametrize("values", [["ü", None, "", "x" * 300], []])
def test_arrays_of_text_leave_in_the_encoding_of_the_connection(place, values, anyio_backend):
    with psycopg.connect(place.url, client_encoding="LATIN1") as connection:
        cursor = psycopg.RawCursor(connection)
        register(cursor.adapters)
        for form in Format.TEXT, Format.BINARY:
            cursor.execute("SELECT $1", (array(Texts, values),), binary=form == Format.BINARY)
            assert cursor.fetchall() == [(values,)]
