"""No operation leaves half of its effects: commands that the user may not use, keys of another type, keys that are gone."""

from __future__ import annotations

import logging
import re
from importlib.resources import files

import anyio
import pytest

from mainspring import ConfigError, MailboxConnectionError, MailboxError
from mainspring.mailbox.message import Counts
from redis_support import place, soon
from servers import RedisServer

pytestmark = pytest.mark.anyio

KEYS = [
    *(
        "messages",
        "ready",
        "delayed",
        "leases",
        "state",
        "more",
        "dedup",
        "expiry",
        "dead",
        "dead_order",
        "dead_details",
    ),
    *("waiters", "bodies", "limiters", "waits", "listed", "dead_tasks", "records", "record_names", "record_ends"),
]
LARGE = "x" * 100_000
"""A body that is kept apart."""
LUA = files("mainspring.mailbox.redis").joinpath("lua")
COMMANDS = sorted(
    {
        command
        for part in LUA.iterdir()
        for command in re.findall(r"redis\.p?call\('(\w+)'|bulk\)?,? ?\(?'(\w+)'|look_up\('(\w+)'", part.read_text())
        for command in command
        if command
    }
)


@pytest.fixture
def anyio_backend():
    """What the server does is the same on every event loop."""
    return "asyncio"


@pytest.fixture(scope="module")
def server():
    with RedisServer() as own:
        yield own


class User:
    """A user of a server who has all rights, but for those that are taken away, and a mailbox of the same name."""

    def __init__(self, here, name="plain") -> None:
        self.here = here
        self.name = name
        self.grant()

    def grant(self) -> None:
        self.here.call("ACL", "SETUSER", self.name, "reset", "on", ">secret", "~{ms:*", "&{ms:*", "+@all")

    def revoke(self, command: str) -> None:
        self.here.call("ACL", "SETUSER", self.name, f"-{command.lower()}")

    def key(self, which: str) -> str:
        return self.here.key(which, self.name)

    def mailbox(self, **options):
        return self.here.mailbox(self.name, username=self.name, password="secret", recovery_interval=0.05, **options)


async def each(here, names, scenario) -> None:
    """Have all of them play it at the same time: most of it is waiting."""
    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(scenario, User(here, name), name)


@pytest.fixture
def user(server):
    with place(server.url) as here:
        yield User(here)


async def tried(*acts):
    """What each came to, one after the other: its result, or its error."""
    found: list[object] = []
    for act in acts:
        try:
            found.append(await act())
        except (MailboxError, ConfigError) as error:
            found.append(error)
    return found


async def drained(mailbox, *, idle=0.4):
    """All bodies that come, until none has come for a while in which what was lost is found again."""
    bodies: list[object] = []
    while messages := await mailbox.receive(max_messages=100, wait_time_seconds=idle):
        for message in messages:
            bodies.append(message.body)
            await message.acknowledge()
    return bodies


# ------------------------------------------------------------------------------------------------------------- rights


def test_the_library_is_read_by_these_tests():
    """They find its commands by what they look like."""
    assert {"HSET", "ZADD", "ZREMRANGEBYRANK", "ZMSCORE", "SPUBLISH", "TIME", "TYPE"} <= set(COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "FCALL", "FUNCTION|LOAD", "SSUBSCRIBE"])
async def test_a_user_without_a_command_is_refused_at_opening(user, command):
    user.here.call("FUNCTION", "FLUSH")
    user.revoke(command)
    with pytest.raises(ConfigError, match=rf"(?i){re.escape(command)}.*ACL SETUSER"):
        await user.mailbox().__aenter__()
    assert user.here.found() == []


@pytest.mark.slow
async def test_a_command_that_is_taken_away_later_loses_nothing_and_stores_no_half(user):
    await each(user.here, COMMANDS, play_without_a_command)


async def play_without_a_command(user, command):
    async with user.mailbox() as mailbox:
        bodies = ["acked", "nacked", "released", "died", "delayed again", "kept"]
        await mailbox.send_many(bodies)
        ack, nack, release, die, late, kept = await mailbox.receive(max_messages=6, visibility_timeout=0.4)
        await mailbox.send("dies")
        (dead,) = await mailbox.receive()
        await dead.dead_letter("no")
        pending = await mailbox.send("pending", dedup_key="pending", expires_in=600)
        user.revoke(command)
        sent = await tried(
            lambda: mailbox.send("keyed", dedup_key="k"),
            lambda: mailbox.send("plain"),
            lambda: mailbox.send("expiring", expires_in=600),
            lambda: mailbox.send("delayed", delay=0.1),
            lambda: mailbox.send_many(["one", "two"], headers={"a": "b"}),
            lambda: mailbox.send(LARGE),
        )
        done = await tried(
            ack.acknowledge,
            nack.nack,
            release.release,
            lambda: late.nack(delay=0.1),
            lambda: die.dead_letter("no"),
            lambda: kept.save_checkpoint(b"1"),
            mailbox.replay_dead_letters,
        )
        cancelled = await tried(lambda: mailbox.cancel(pending))
        claimed = await tried(lambda: mailbox.receive(max_messages=3))
        user.grant()
        again = await mailbox.send("keyed once more", dedup_key="k")
        got = await drained(mailbox, idle=0.6)
        if isinstance(claimed[0], list):
            got += [message.body for message in claimed[0]]
            for message in claimed[0]:
                await message.acknowledge()
        await mailbox.replay_dead_letters()
        got += await drained(mailbox)
        assert await mailbox.counts() == Counts(settled=(await mailbox.counts()).settled)
    stored = {
        "keyed": sent[0],
        "plain": sent[1],
        "expiring": sent[2],
        "delayed": sent[3],
        "one": sent[4],
        "two": sent[4],
        LARGE: sent[5],
    }
    for body, outcome in stored.items():
        if isinstance(outcome, Exception):
            assert body not in got, f"{body} was refused"
        else:
            assert body in got, f"{body} was accepted"
    assert ("keyed once more" in got) == isinstance(sent[0], Exception), again
    for body, outcome in zip(["acked", "nacked", "released", "delayed again", "died", "kept"], done, strict=False):
        if body != "acked" or isinstance(outcome, Exception):
            assert body in got, body
    assert "dies" in got
    if isinstance(cancelled[0], Exception):
        assert "pending" in got


async def test_what_is_owed_and_fails_is_done_later(user):
    """A receive that ends leaves the list of those that wait, once its user may do that again."""
    async with user.mailbox() as mailbox:
        user.revoke("ZREM")
        assert await mailbox.receive(wait_time_seconds=0.05) == []
        assert await mailbox.receive() == []
        assert user.here.call("ZCARD", user.key("waiters")) == 1
        user.grant()
        assert await mailbox.receive() == []
        await soon(lambda: user.here.call("ZCARD", user.key("waiters")) == 0)


async def test_a_reply_that_its_mailbox_does_not_take_leaves_the_request_as_it_was(user):
    here = user.here
    async with user.mailbox() as mailbox, here.mailbox("replies") as replies:
        await mailbox.send("asked", reply_to=replies.name)
        (message,) = await mailbox.receive()
        here.call("SET", here.key("ready", "replies"), "another program's")
        with pytest.raises(MailboxConnectionError, match="WRONGTYPE"):
            await message.reply("answer")
        here.call("DEL", here.key("ready", "replies"))
        assert (await mailbox.counts()).in_flight == 1
        assert await replies.counts() == Counts()
        await message.acknowledge()


# --------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize("key", KEYS)
async def test_a_key_of_another_program_is_refused_at_opening(user, key):
    user.here.call("SET", user.key(key), "another program's")
    with pytest.raises(ConfigError, match=rf"(:{key}, which is a string|WRONGTYPE).*rename keys"):
        await user.mailbox().__aenter__()


@pytest.mark.slow
async def test_where_a_key_is_of_another_type_operations_fail_whole(user):
    """What is accepted is stored, what is refused is not, and the rest is as it was."""
    await each(user.here, KEYS, play_with_another_type)


async def play_with_another_type(user, key):
    async with user.mailbox() as mailbox:
        await mailbox.send_many(["acked", "nacked", "died"])
        ack, nack, die = await mailbox.receive(max_messages=3, visibility_timeout=0.4)
        user.here.call("SET", user.key(key), "another program's")
        sent = await tried(
            lambda: mailbox.send("keyed", dedup_key="k"),
            lambda: mailbox.send("plain"),
            lambda: mailbox.send("expiring", expires_in=600),
            lambda: mailbox.send("delayed", delay=0.1),
            lambda: mailbox.send(LARGE),
        )
        acked, *_ = await tried(ack.acknowledge, nack.nack, lambda: die.dead_letter("no"))
        user.here.call("DEL", user.key(key))
        await mailbox.send("keyed once more", dedup_key="k")
        got = await drained(mailbox, idle=0.6)
        await mailbox.replay_dead_letters()
        got += await drained(mailbox)
    for body, outcome in zip(["keyed", "plain", "expiring", "delayed", LARGE], sent, strict=True):
        assert (body in got) == isinstance(outcome, str), body
    assert "keyed once more" in got or isinstance(sent[0], str)
    if key != "messages":
        assert "nacked" in got
        assert "died" in got or key == "dead"
        assert ("acked" in got) == isinstance(acked, Exception)


# ------------------------------------------------------------------------------------------------------- other contents


@pytest.mark.slow
async def test_contents_that_no_mailbox_wrote_stop_nothing(user, caplog):
    here = user.here
    async with user.mailbox() as mailbox:
        await mailbox.send_many(["returned", "died", "kept"])
        returned, died, _ = await mailbox.receive(max_messages=3, visibility_timeout=0.3)
        await returned.nack()
        await died.dead_letter("no")
        here.call("HSET", user.key("state"), "settled", "many", "recovery", "soon", "recovered", "once")
        here.call("HSET", user.key("more"), f"b{returned.id}", "often")
        here.call("ZADD", user.key("leases"), 1, "mine", 2, "1.2.3")
        here.call("ZADD", user.key("delayed"), 1, "soon")
        here.call("ZADD", user.key("ready"), 0, "first")
        here.call("ZADD", user.key("expiry"), 1, "nothing")
        here.call("ZADD", user.key("dead_order"), 1, "nobody")
        here.call("HSET", user.key("dead_details"), f"w{died.id}", "{", f"m{died.id}", "a b c")
        (letter,) = await mailbox.dead_letters()
        assert letter.body == "died"
        got = await drained(mailbox)
        assert await mailbox.replay_dead_letters() == 1
        assert sorted([*got, *await drained(mailbox)]) == ["died", "kept", "returned"]
        counts = await mailbox.counts()
        assert counts == Counts(settled=counts.settled)
    assert "index entries without a message were dropped" in caplog.text


# ----------------------------------------------------------------------------------------------------- keys that are gone


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.slow
async def test_no_message_whose_record_is_there_is_lost_with_another_key(user, key, caplog):
    """One message in each state."""
    here = user.here
    caplog.set_level(logging.WARNING, "mainspring.mailbox")
    async with user.mailbox() as mailbox:
        await mailbox.send_many(["returned", "held", "died"])
        returned, held, died = await mailbox.receive(max_messages=3, visibility_timeout=600)
        await returned.save_checkpoint(b"1")
        await returned.nack()
        await died.dead_letter("no")
        await mailbox.send("keyed", dedup_key="k")
        await mailbox.send("expiring", expires_in=600)
        await mailbox.send("delayed", delay=600)
        await mailbox.send("plain")
        here.call("DEL", user.key(key))
        got = await drained(mailbox)
        letters = [letter.body for letter in await mailbox.dead_letters()]
        counts = await mailbox.counts()
        acknowledged = await tried(held.acknowledge)
        assert await mailbox.counts() == Counts(
            delayed=counts.delayed, dead=counts.dead, settled=(await mailbox.counts()).settled
        )
    assert letters == ([] if key == "dead" else ["died"])
    if key == "messages":
        assert got == []
        assert "index entries without a message were dropped" in caplog.text
        return
    living = {"returned", "keyed", "expiring", "plain"}
    assert set(got) == living | {"ready": set(), "leases": {"held"}, "delayed": {"delayed"}}.get(key, set())
    assert len(got) == len(set(got))
    assert counts.delayed == (key != "delayed")
    assert isinstance(acknowledged[0], MailboxError) == (key == "leases")
    if key in {"ready", "leases", "delayed"}:
        assert (
            f"{len(living) if key == 'ready' else 1} messages or dead letters that no index had are back" in caplog.text
        )


@pytest.mark.slow
async def test_one_process_of_a_fleet_looks_at_a_time(user):
    """And goes on where another has stopped; where nothing is amiss, none goes through the messages."""
    here = user.here
    here.call("CONFIG", "RESETSTAT")
    async with user.mailbox() as one, user.mailbox() as two:
        await one.send_many(["x" * 100] * 1_000)
        await anyio.sleep(0.2)
        assert b"cmdstat_hscan" not in here.call("INFO", "commandstats")
        here.call("DEL", user.key("ready"))
        with anyio.fail_after(10):
            while (await two.counts()).pending < 1_000:
                await anyio.sleep(0.02)
        scans = here.call("INFO", "commandstats")
        assert int(re.search(rb"cmdstat_hscan:calls=(\d+)", scans)[1]) <= 20
        assert (await one.counts()).pending == 1_000


@pytest.mark.slow
async def test_large_messages_are_gone_through_one_by_one(user):
    """A step copies what it looks at: the server would stand still for all of them."""
    here = user.here
    async with user.mailbox() as mailbox:
        await mailbox.send_many(["x" * 1_000_000] * 20)
        here.call("DEL", user.key("ready"))
        here.call("CONFIG", "RESETSTAT")
        with anyio.fail_after(10):
            while (await mailbox.counts()).pending < 20:
                await anyio.sleep(0.02)
        stats = here.call("INFO", "commandstats")
        assert int(re.search(rb"cmdstat_hscan:calls=(\d+)", stats)[1]) >= 5


async def test_a_dedup_key_without_its_message_is_free(user):
    here = user.here
    async with user.mailbox() as mailbox:
        lost = await mailbox.send("x", dedup_key="k")
        here.call("HDEL", user.key("messages"), lost)
        assert await mailbox.send("y", dedup_key="k") != lost
        assert await drained(mailbox, idle=0.05) == ["y"]


async def test_what_is_sent_after_the_counters_are_gone_comes_behind(user):
    async with user.mailbox() as mailbox:
        await mailbox.send_many([1, 2, 3])
        user.here.call("DEL", user.key("state"))
        await mailbox.send_many([4, 5])
        assert await drained(mailbox, idle=0.05) == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------------------------- eviction


async def test_a_server_that_evicts_is_refused(user, caplog):
    here = user.here
    try:
        for policy, loses in (("allkeys-lru", "messages"), ("volatile-ttl", "the replies to requests")):
            here.call("CONFIG", "SET", "maxmemory-policy", policy)
            async with user.mailbox():
                pass  # nothing is evicted where there is no limit
            here.call("CONFIG", "SET", "maxmemory", 1_000_000_000)
            with pytest.raises(
                ConfigError, match=rf"{policy}\), and with them {loses}; set maxmemory-policy noeviction"
            ):
                await user.mailbox().__aenter__()
            async with user.mailbox(allow_eviction=True) as mailbox:
                await mailbox.send("x")
            here.call("CONFIG", "SET", "maxmemory", 0)
    finally:
        here.call("CONFIG", "SET", "maxmemory", 0, "maxmemory-policy", "noeviction")


async def test_an_error_of_one_operation_is_nothing_to_the_others_of_its_batch(user):
    here = user.here
    async with user.mailbox() as mailbox:
        await mailbox.send("x")
        (message,) = await mailbox.receive()
        here.call("SET", user.key("delayed"), "another program's")
        errors: list[object] = []

        async def act(call) -> None:
            errors.extend(await tried(call))

        async with anyio.create_task_group() as group:
            for call in (message.acknowledge, lambda: mailbox.send("y", delay=5), lambda: mailbox.send("z")):
                group.start_soon(act, call)
        here.call("DEL", user.key("delayed"))
        assert [type(error) for error in errors if isinstance(error, Exception)] == [MailboxConnectionError]
        assert await mailbox.counts() == Counts(pending=1, settled=1)


async def test_dead_letters_of_an_earlier_version_are_found_by_their_task(user):
    """It kept no task with them, and had no index."""
    here, bodies = user.here, [{"task": "work", "args": {"n": 1}}, {"task": "work"}, {"task": "other", "args": {}}]
    async with user.mailbox() as mailbox:
        ids = await mailbox.send_many(bodies, headers={"h": "1"})
        ids += await mailbox.send_many(bodies[:1])
        for message in await mailbox.receive(max_messages=9):
            await message.dead_letter("no")
    here.call("HDEL", user.key("state"), "by_task")
    async with user.mailbox() as mailbox:
        assert [letter.message_id for letter in await mailbox.dead_letters(task="work")] == [ids[0], ids[3]]
        assert await mailbox.replay_dead_letters([ids[0]]) == 1
        assert [letter.message_id for letter in await mailbox.dead_letters(task="work")] == [ids[3]]
        assert [job.id async for job in mailbox.jobs(task="work", state="pending")] == [ids[0]], "it has its task again"
