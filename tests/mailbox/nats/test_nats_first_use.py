"""Of a mailbox on NATS only the queue is made when it is opened, every other stream when a message first needs it."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest

from mainspring.errors import MailboxClosedError, MailboxConnectionError, MailboxFullError
from mainspring.mailbox.message import Counts
from mainspring.mailbox.nats.mailbox import NatsMailbox
from mainspring.mailbox.nats.shared_client import MAX_CREATIONS
from nats_support import GET, one, reconnected, several, until_it_works
from servers import NatsServer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loops("asyncio", "uvloop"),
]


async def made(here):
    """The streams of the mailbox that are there, in the order in which it names them."""
    there = await here.server.streams(here.names().queue.partition("_")[2])
    return [stream for stream in here.names().streams if stream in there]


async def nack(box, **how):
    await box.send("x")
    await (await one(box)).nack(**how)


async def die(box):
    await box.send("x")
    await (await one(box)).dead_letter("no")


async def checkpoint(box):
    await box.send("x")
    await (await one(box)).save_checkpoint(b"1")


USES = {
    "queue": (lambda box: box.send("x"), ()),
    "delay": (lambda box: box.send("x", delay=60), ("delayed",)),
    "expiry": (lambda box: box.send("x", expires_in=60), ("expiries",)),
    "nack": (nack, ("moves",)),
    "delayed nack": (lambda box: nack(box, delay=60), ("delayed", "moves")),
    "death": (die, ("dead",)),
    "checkpoint": (checkpoint, ("checkpoints",)),
}


@pytest.mark.parametrize("use", USES)
async def test_a_stream_is_made_when_a_message_first_needs_it(here, use):
    does, streams = USES[use]
    names = here.names()
    async with here.box() as box:
        assert await made(here) == [names.queue]
        await does(box)
        assert set(await made(here)) == {names.queue, *(getattr(names, stream) for stream in streams)}


LOOKS = {
    "counts": (lambda box: box.counts(), Counts()),
    "cancel": (lambda box: box.cancel("x"), "unknown"),
    "purge": (lambda box: box.purge(), 0),
    "dead letters": (lambda box: box.dead_letters(), []),
    "replay": (lambda box: box.replay_dead_letters(), 0),
    "replay by id": (lambda box: box.replay_dead_letters(["x"]), 0),
    "purge dead letters": (lambda box: box.purge_dead_letters(), 0),
}


@pytest.mark.parametrize("look", LOOKS)
async def test_what_only_looks_makes_no_stream(here, look):
    looks, finds = LOOKS[look]
    async with here.box() as box:
        assert await looks(box) == finds
        assert await made(here) == [here.names().queue]


async def test_a_look_that_no_stream_answers_finds_nothing_out(here):
    """JetStream is off, or has no leader: that is not an empty stream."""
    line, names = await here.line(), here.names()
    async with here.box(over=line) as box:
        line.hold(GET + names.dead).end("503")
        info = line.hold(f"$JS.API.STREAM.INFO.{names.dead}")
        info.end("503")
        with pytest.raises(MailboxConnectionError, match="no JetStream answers"):
            await box.dead_letters()
        assert await box.dead_letters() == []


async def test_many_first_uses_at_once_make_one_stream(here):
    """By several mailbox objects, on several connections."""
    boxes = [here.box(over=await here.line()) for _ in range(3)]
    async with boxes[0], boxes[1], boxes[2], anyio.create_task_group() as tasks:
        for number in range(30):
            tasks.start_soon(lambda box, body: box.send(body, delay=0.05), boxes[number % 3], number)
        got = await several(boxes[0], 30)
        assert sorted(message.body for message in got) == list(range(30))
        with anyio.fail_after(10):
            while await boxes[1].counts() != Counts(in_flight=30):  # another mailbox object may be moving some
                await anyio.sleep(0.05)


@pytest.mark.slow
async def test_streams_that_are_made_at_the_same_moment_are_one(here):
    """The server refuses some of the creations for the subjects of the other."""
    lines = [await here.line() for _ in range(3)]
    for number in range(60):
        boxes = [here.box(f"box-{number}", over=line) for line in lines]
        async with boxes[0], boxes[1], boxes[2], anyio.create_task_group() as tasks:
            for box in boxes:
                tasks.start_soon(lambda box: box.send("x", delay=60), box)
        async with boxes[0]:
            assert await boxes[0].counts() == Counts(delayed=3)


@pytest.mark.parametrize("how", ["told", "reconnected"])
async def test_what_another_process_delays_first_is_moved_by_one_that_was_open_before(here, how):
    """That process is gone when it is due."""
    line = await here.line()
    async with here.box(over=line) as box:
        if how == "reconnected":
            line.refuses = True
            line.cut()
        async with here.box() as sender:
            await sender.send("late", delay=0.3)
            await sender.send("dead", expires_in=0.3)
        if how == "reconnected":
            line.refuses = False
            await reconnected(box)
        with anyio.fail_after(10):  # sooner than the next look for what the server may have forgotten
            while await until_it_works(box.counts) != Counts(pending=1, dead=1):
                await anyio.sleep(0.05)
            assert (await one(box)).body == "late"


@asynccontextmanager
async def turns_taken(here, line):
    """Two other mailboxes on the line create streams, until the trap is opened: further creations wait for their turn."""
    async with (
        here.box("a", over=line) as first,
        here.box("b", over=line) as second,
        anyio.create_task_group() as tasks,
    ):
        turns = line.hold("$JS.API.STREAM.CREATE.*", count=MAX_CREATIONS)
        for other in (first, second):
            tasks.start_soon(lambda other: other.send("x", delay=60), other)
        await turns.full()
        yield turns


async def begins(here, line, tasks, call):
    """Start a call that needs a stream for the first time, and return when it waits for its turn to create one."""
    asked = line.watch(f"$JS.API.CONSUMER.INFO.{here.names().expiries}.*")
    tasks.start_soon(call)
    await asked.full()
    await anyio.sleep(0.1)


async def test_a_mailbox_that_closes_finishes_what_is_half_way_on_a_first_use(here):
    """The message has moved, and is not counted as such yet."""
    line = await here.line()
    async with here.box() as other, here.box(over=line) as box:
        await box.send("x")
        message = await one(box)
        async with turns_taken(here, line) as turns, anyio.create_task_group() as tasks:
            await begins(here, line, tasks, message.nack)
            tasks.start_soon(box.close)
            await anyio.sleep(0.1)
            turns.open()
        assert await other.counts() == Counts(pending=1)


async def test_a_first_use_that_waits_for_its_turn_ends_with_its_mailbox(here):
    """No answer would come any more."""
    line = await here.line()
    async with here.box(over=line) as box, turns_taken(here, line) as turns, anyio.create_task_group() as tasks:
        refused = anyio.Event()

        async def send():
            with pytest.raises(MailboxClosedError):
                await box.send("x", delay=60)
            refused.set()

        await begins(here, line, tasks, send)
        await box.close()
        turns.open()
        with anyio.fail_after(2):
            await refused.wait()


@pytest.mark.slow
async def test_an_account_with_no_room_for_a_stream_keeps_the_message(anyio_backend, tmp_path):
    config = tmp_path / "server.conf"
    config.write_text(
        "no_auth_user: user\naccounts { ONE { jetstream { max_streams: 1 }, users: [{user: user, password: x}] } }\n"
    )
    with NatsServer("-c", str(config)) as server:
        async with NatsMailbox(server.url, name="jobs") as box:
            with pytest.raises(MailboxFullError, match="maximum number of streams"):
                await box.send("late", delay=1)
            await box.send("x")
            await (await one(box)).nack(delay=0.2)
            again = await one(box)
            assert (again.body, again.delivery_count) == ("x", 2)
            with pytest.raises(MailboxFullError):
                await again.dead_letter("no")
            await again.acknowledge()
