"""``mainspring dead`` on each server: what it lists, shows, sends again and forgets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anyio
import psycopg
import pytest
from cli_helpers import only_line

from mainspring import open_mailbox
from mainspring.cli.app import call
from mainspring.mailbox.nats.names import encoded
from nats_support import found
from ports import free_port
from postgres_support import drop_schema, new_schema
from redis_support import Place
from stores import SERVERS

if TYPE_CHECKING:
    from mainspring import Message
    from mainspring.mailbox.message import Counts
    from stores import Store

VERBS = (["list"], ["show", "an-id"], ["replay", "--all", "--yes"], ["purge", "--all", "--yes"])

pytestmark = pytest.mark.parametrize("kind", SERVERS)


async def _die(message: Message[Any, Any]) -> None:
    try:
        raise (LookupError if message.body % 2 else TimeoutError)(f"no answer to {message.body}")
    except Exception as error:
        await message.dead_letter(error)


async def fill(store: Store) -> list[str]:
    """Six dead letters, 0 to 5, of which the odd ones died of a LookupError; 0 has failed before, and died last."""
    async with store.box() as mailbox:
        sent = await mailbox.send_many(range(6), headers={"tenant": "a"}, reply_to="elsewhere")
        (first, *others) = await mailbox.receive(max_messages=6)
        await first.nack(error=ConnectionError("at first"))
        for message in others:
            await _die(message)
        await _die((await mailbox.receive(wait_time_seconds=5))[0])
    return [*sent[1:], sent[0]]


async def look(store: Store) -> Counts:
    async with store.box() as mailbox:
        return await mailbox.counts()


@pytest.mark.slow
def test_the_verbs(store: Store, capsys: Any) -> None:
    ids = anyio.run(fill, store)
    url = store.url()

    assert call(["dead", "list", url]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ids
    assert only_line(printed.err) == f"mainspring: 6 dead letter(s) in {store.name}"
    assert call(["dead", "list", url, "--error-type", "LookupError", "--since", "1h", "--limit", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dead"], found["matched"]) == (6, 3)
    assert [letter["message_id"] for letter in found["letters"]] == [ids[0], ids[2]]

    assert call(["dead", "show", url, ids[-1], "--json"]) == 0
    letter = json.loads(capsys.readouterr().out)
    assert (letter["body"], letter["attempt"], letter["reply_to"]) == (0, 2, "elsewhere")
    assert letter["headers"] == {"tenant": "a"}
    assert [one["error"] for one in letter["history"]] == ["at first", "no answer to 0"]
    assert letter["traceback"].startswith("Traceback")
    assert call(["dead", "show", url, "no-such-id"]) == 1
    assert "no dead letter no-such-id" in only_line(capsys.readouterr().err)

    assert call(["dead", "replay", url, ids[0], "no-such-id", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"mailbox": store.name, "replayed": 1, "missing": 1}
    assert call(["dead", "replay", url, "--match", "answer to 2", "--yes"]) == 0
    assert call(["dead", "purge", url, ids[2]]) == 0
    assert call(["dead", "purge", url, "--error-type", "TimeoutError"]) == 2, "nobody can be asked"
    assert call(["dead", "purge", url, "--error-type", "TimeoutError", "--yes"]) == 0
    counts = anyio.run(look, store)
    assert (counts.pending, counts.dead, counts.settled) == (2, 1, 3)
    assert call(["dead", "replay", url, "--all", "--yes"]) == 0
    counts = anyio.run(look, store)
    assert (counts.pending, counts.dead, counts.settled) == (3, 0, 3)


def made(store: Store, schema: str, url: str) -> list[str]:
    """What the server holds of the mailbox, and of those whose names begin alike; the schema too, for PostgreSQL."""
    if store.kind == "redis":
        return [key.decode() for key in Place(url).found(store.name)]
    if store.kind == "nats":
        return anyio.run(found, url, encoded(store.name))
    with psycopg.connect(url) as connection:
        if not connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", [schema]).fetchall():
            return []
        rows = connection.execute(f"SELECT name FROM {schema}.mailboxes WHERE starts_with(name, %s)", [store.name])
        return [schema, *(name for (name,) in rows)]


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_a_mailbox_that_is_not_there_is_told_and_not_made(
    store: Store, words: list[str], request: pytest.FixtureRequest, capsys: Any
) -> None:
    """On a server that holds no mailbox, and on one that holds another."""
    url = request.getfixturevalue(f"{store.kind}_url")
    schema = new_schema()
    options = {"schema": schema} if store.kind == "postgres" else {}
    verb, *more = words
    try:
        for _ in range(2):
            before = made(store, schema, url)
            assert call(["dead", verb, store.url("-typo", **options), *more]) == 1
            told = only_line(capsys.readouterr().err)
            assert told.startswith("mainspring: there is no mailbox ")
            assert f"name={store.name}-typo" in told
            assert made(store, schema, url) == before
            anyio.run(open_and_close, store.url(**options))
        assert before, "the other one is there"
        assert call(["dead", "list", store.url(**options)]) == 0
        assert only_line(capsys.readouterr().err) == f"mainspring: 0 dead letter(s) in {store.name}"
    finally:
        if store.kind == "postgres":
            drop_schema(url, schema)


async def open_and_close(url: str) -> None:
    async with open_mailbox(url):
        pass


def test_a_server_that_does_not_answer_is_no_missing_mailbox(kind: str, capsys: Any) -> None:
    scheme = "postgresql" if kind == "postgres" else kind
    assert call(["dead", "list", f"{scheme}://127.0.0.1:{free_port()}?name=emails&timeout=0.5"]) == 1
    told = only_line(capsys.readouterr().err)
    assert "127.0.0.1" in told
    assert "no mailbox" not in told
