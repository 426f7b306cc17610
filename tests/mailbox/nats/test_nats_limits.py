"""Limits that an owner sets on the streams of a NATS mailbox: what was accepted stays, what cannot be written is refused."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.to_thread
import pytest

from mainspring.errors import (
    ConfigError,
    MailboxFullError,
    MainspringError,
    ReceiptHandleExpiredError,
    SerializationError,
)
from mainspring.mailbox.message import Counts
from mainspring.mailbox.nats.mailbox import NatsMailbox
from mainspring.mailbox.nats.names import Names, check_stream
from nats_line import NatsLine
from nats_support import ACK, one, place, several, until_it_works
from servers import NatsServer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loops("asyncio", "uvloop"),
]


@asynccontextmanager
async def small_server(folder):
    """A server whose storage one megabyte fills. (A stream's own limit of bytes is none that it keeps.)"""
    settings = folder / "server.conf"
    settings.write_text("jetstream { max_file_store: 1MB }\n")
    with NatsServer("-c", str(settings)) as server:
        yield server


async def fill(box):
    """Leave the server no room."""
    with suppress(MailboxFullError):
        while True:
            await box.send("x" * 50_000)
    with pytest.raises(MailboxFullError, match="no room: insufficient resources"):
        await box.send("x")


def leaping(monkeypatch):
    """A function that lets seconds pass at once, for what is opened after this."""
    loop, passed = asyncio.get_running_loop(), [0.0]
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + sum(passed))
    return passed.append


async def next_of(box, body, lease=60.0):
    """The next message with that body; what comes before it is kept in hand."""
    with anyio.fail_after(20):
        while True:
            for message in await box.receive(visibility_timeout=lease, wait_time_seconds=10):
                if message.body == body:
                    return message


async def test_a_full_queue_refuses_and_keeps_what_it_has(here):
    async with here.box() as box:
        await here.server.limit(here.names().queue, max_msgs=3)
        sent = [await box.send("a"), await box.send("b", dedup_key="k"), await box.send("c")]
        with pytest.raises(MailboxFullError, match="no room: maximum messages"):
            await box.send("d")
        with pytest.raises(MailboxFullError):
            await box.send_many("de")
        assert await box.send("b", dedup_key="k") == sent[1]
        got = await several(box, 3)
        assert [message.id for message in got] == sent
        for message in got:
            await message.nack()
        assert sorted(message.body for message in await several(box, 3)) == ["a", "b", "c"]


async def test_storage_that_forgets_is_warned_of_where_other_was_asked_for(here, caplog):
    await here.make_all(storage="memory")
    async with here.box(storage="memory"):
        async with here.box(storage="memory"):
            assert caplog.messages == []
        async with here.box():
            pass
    assert [said.partition(": it forgets")[0] for said in caplog.messages] == [
        f"the stream {stream!r} was made with storage=memory" for stream in here.names().streams
    ]


def test_fewer_replicas_than_asked_for_are_warned_of(caplog, anyio_backend):
    (asked, *_), (less, *_) = (Names.of("jobs").configs(replicas=count, storage="file") for count in (3, 1))
    check_stream(less, asked)
    check_stream(asked, asked)
    assert caplog.messages == []
    check_stream(asked, less)
    (said,) = caplog.messages
    assert said.endswith("; change it on the server: nats stream edit mainspring-queue_jobs --replicas=3")


async def test_a_limit_that_is_kept_by_dropping_is_warned_of_when_a_mailbox_is_opened(here, caplog):
    async with here.box() as box:
        assert caplog.messages == []
        await here.server.limit(here.names().queue, max_msgs=3)
        async with here.box() as other:
            assert other.name == box.name
    (said,) = caplog.messages
    assert f"the stream {here.names().queue!r} has max_msgs" in said


@pytest.mark.slow
async def test_what_there_is_no_room_to_give_back_comes_again_where_it_is(anyio_backend, tmp_path):
    async with small_server(tmp_path) as server, NatsMailbox(server.url, name="jobs") as box:
        await box.send_many(["nack", "later", "release", "dead", "gone"])
        await fill(box)
        nack, later, release, dead, gone = await several(box, 5)
        await nack.nack()
        again = await next_of(box, "nack")
        assert (again.delivery_count, again.attempt) == (2, 2)
        for call in (nack.acknowledge, lambda: nack.extend_visibility(60)):
            with pytest.raises(MainspringError, match="settled"):
                await call()
        await later.nack(delay=0.3)
        await anyio.sleep(0.5)
        assert (await next_of(box, "later")).delivery_count == 2
        await release.release()
        assert (await next_of(box, "release")).delivery_count == 2
        with pytest.raises(MailboxFullError):
            await dead.dead_letter("no")
        with pytest.raises(MailboxFullError):
            await box.send("late", delay=60)
        for message in (gone, again):
            await message.acknowledge()
        for message in await several(box, (await box.counts()).pending):
            await message.acknowledge()
        await dead.dead_letter("no")
        counts = await box.counts()
        assert (counts.dead, counts.delayed, counts.pending) == (1, 0, 0)


@pytest.mark.slow
async def test_an_ended_lease_with_a_full_server_is_another_ones_delivery(anyio_backend, tmp_path):
    async with (
        small_server(tmp_path) as server,
        NatsMailbox(server.url, ack_wait=1) as dead,
        NatsMailbox(server.url) as other,
    ):
        await dead.send("here")
        await dead.send("elsewhere")
        await fill(dead)
        olds = await several(dead, 2, lease=1.0)
        await anyio.sleep(1.5)
        news = [await next_of(dead, "here"), await next_of(other, "elsewhere")]
        for old, new in zip(olds, news, strict=True):
            assert (new.body, new.attempt, new.delivery_count) == (old.body, 2, 2)
            assert new.receipt_handle != old.receipt_handle
            with pytest.raises(ReceiptHandleExpiredError):
                await old.acknowledge()
            await new.extend_visibility(60)
            await new.acknowledge()
        assert (await other.counts()).settled == 2


async def test_a_cancelled_receive_with_a_full_server_leaves_what_came_to_the_next(anyio_backend, tmp_path):
    async with small_server(tmp_path) as server, place(server.url) as here:
        line = await here.line()
        async with here.box(over=line) as box:
            await fill(box)
            end = line.hold_all(lambda frame: frame.text.startswith("NATS/1.0 40"), count=1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: box.receive(max_messages=100, wait_time_seconds=10))
                await end.full()
                tasks.cancel_scope.cancel()
            messages = await several(box, (await box.counts()).waiting)
            assert min(message.delivery_count for message in messages) == 2


async def test_a_death_without_room_leaves_the_message(here):
    await here.make_all()
    async with here.box() as box:
        await here.server.limit(here.names().dead, max_msgs=1)
        await box.send_many(["a", "b"])
        first, second = await several(box, 2)
        await first.dead_letter("first")
        with pytest.raises(MailboxFullError):
            await second.dead_letter("second")
        assert [letter.error for letter in await box.dead_letters()] == ["first"]
        assert await box.counts() == Counts(in_flight=1, dead=1)
        await second.extend_visibility(60)
        await box.purge_dead_letters()
        await second.dead_letter("second")
        assert [letter.error for letter in await box.dead_letters()] == ["second"]


async def test_a_death_without_room_leaves_its_holder_after_ten_seconds(here, monkeypatch):
    leap = leaping(monkeypatch)
    await here.make_all()
    naks = await here.server.connection.subscribe(f"{ACK}{here.names().queue}.>")
    async with here.box() as box:
        await here.server.limit(here.names().dead, max_msgs=1)
        await box.send_many(["a", "b"])
        first, second = await several(box, 2)
        await first.dead_letter("first")
        for passed in (9, 1, 0):
            with pytest.raises(MailboxFullError):
                await second.dead_letter("second")
            leap(passed)
        with pytest.raises(ReceiptHandleExpiredError):
            await second.dead_letter("second")
        assert (await naks.next_msg(10)).data == b'-NAK {"delay":5000000000}'
        await here.server.deliver_again(here.names().queue, 2)
        again = await one(box)
        assert (again.body, again.attempt) == ("b", 2)
        await box.purge_dead_letters()
        await again.dead_letter("second")
        assert [letter.error for letter in await box.dead_letters()] == ["second"]


@pytest.mark.slow
async def test_what_is_past_its_time_waits_for_room_among_the_dead(here):
    names = here.names()
    naks = await here.server.connection.subscribe(f"{ACK}{names.queue}.>")
    async with here.box() as box:
        await box.send("a")
        await (await one(box)).dead_letter("first")
        await here.server.limit(names.dead, max_msgs=1)
        await box.send("b", expires_in=0.1)
        await box.send("c")
        await anyio.sleep(0.3)
        assert [message.body for message in await several(box, 1)] == ["c"]
        assert (await naks.next_msg(10)).data == b'-NAK {"delay":5000000000}'
        await box.purge_dead_letters()
        await here.server.deliver_again(names.queue, 2)
        assert await box.receive(wait_time_seconds=0.3) == []
        assert [letter.body for letter in await box.dead_letters()] == ["b"]


@pytest.mark.slow
async def test_a_due_message_waits_for_room_in_the_queue(here):
    async with here.box() as box:
        await here.server.limit(here.names().queue, max_msgs=1)
        await box.send("first")
        await box.send("late", delay=0.1)
        await anyio.sleep(0.5)
        assert await box.counts() == Counts(delayed=1, pending=1)
        await (await one(box)).acknowledge()
        assert (await one(box)).body == "late"


async def test_a_checkpoint_without_room_is_refused_and_none_is_lost(here):
    await here.make_all()
    async with here.box() as box:
        await here.server.limit(here.names().checkpoints, max_msgs=1)
        await box.send_many(["a", "b"])
        first, second = await several(box, 2)
        await first.save_checkpoint(b'"kept"')
        with pytest.raises(MailboxFullError):
            await second.save_checkpoint(b'"refused"')
        await first.nack()
        assert (await one(box)).checkpoint == b'"kept"'


async def test_streams_of_an_older_version_are_brought_up(here):
    await here.make_all()
    async with here.box() as box:
        await box.send("x")
        names = here.names()
        for stream in names.streams:
            await here.server.limit(stream, discard="old")
        async with here.box() as other:
            found = {
                stream: (await here.server.api(f"STREAM.INFO.{stream}"))["config"]["discard"]
                for stream in names.streams
            }
            reminders = {names.expiries, names.moves}
            assert found == {stream: "old" if stream in reminders else "new" for stream in names.streams}
            assert (await one(other)).body == "x"


@pytest.mark.parametrize(
    "setting", [{"max_bytes": 1_000_000}, {"discard_new_per_subject": True}], ids=lambda setting: next(iter(setting))
)
async def test_settings_under_which_messages_would_be_lost_are_refused(here, setting):
    """A stream that is full by its bytes drops its oldest message at times, whatever its discard is."""
    queue = here.names().queue
    async with here.box():
        await here.server.limit(queue, **setting)
        with pytest.raises(ConfigError, match=f"{queue}' is there with {next(iter(setting))}"):
            async with here.box():
                pass


async def test_streams_that_cannot_be_brought_up_are_named(here):
    line, dead = await here.line(), here.names().dead
    await here.make_all()
    async with here.box():
        await here.server.limit(dead, discard="old")
        update = line.hold(f"$JS.API.STREAM.UPDATE.{dead}")

        async def refuse():
            await update.full()
            update.answer(b'{"error":{"code":500,"err_code":10052,"description":"not yours"}}')

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refuse)
            with pytest.raises(ConfigError, match=f"{dead}' would drop accepted .*not yours"):
                async with here.box(over=line):
                    pass


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
async def test_the_largest_message_is_what_the_server_says_that_is_connected_now(tmp_path, anyio_backend, late):
    """Also where the driver, which connects and sends again before it says so, has yet to say so."""
    settings = tmp_path / "server.conf"
    settings.write_text("max_payload: 100000")
    with NatsServer("-c", str(settings)) as server:
        line = NatsLine(server.url)
        await line.open()
        async with NatsMailbox(line.url, timeout=2.0) as box:
            for most in (60_000, 200_000):
                pongs = line.hold_all(lambda frame: frame.verb == b"PONG", skip=1) if late else None
                settings.write_text(f"max_payload: {most}")
                await anyio.to_thread.run_sync(server.stop)
                await anyio.to_thread.run_sync(server.start)
                await until_it_works(lambda: box.send("x" * 40_000))
                await box.send("x" * (most - 20_000))
                with pytest.raises(
                    SerializationError, match=f"{most - 16_384:,} that this NATS server's max_payload leaves"
                ):
                    await box.send("x" * (most - 10_000))
                if pongs is not None:
                    assert pongs.caught
                    pongs.open()
        await line.close()
