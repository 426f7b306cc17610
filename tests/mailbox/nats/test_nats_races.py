"""Steps on NATS between which somebody else does something: nothing is lost, and nothing that was ended comes again."""

from __future__ import annotations

import anyio
import pytest

from mainspring.errors import MailboxFullError, ReceiptHandleExpiredError
from mainspring.mailbox.message import Counts, Envelope
from mainspring.mailbox.nats.messages import StoredMessage
from nats_support import GET, REMOVE, one, several

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loops("asyncio", "uvloop"),
]
DUE = "*due-*"
"""What the headers of a message say that is moved to the queue as it is due."""


async def test_a_replay_whose_key_is_taken_just_then_loses_nothing(here):
    line, replayed = await here.line(), []

    async def replay():
        replayed.append(await box.replay_dead_letters())

    async with here.box(over=line) as box, here.box() as sender:
        await box.send("first", dedup_key="k")
        await (await one(box)).dead_letter("no")
        add = line.hold(here.names().to_queue + "*")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(replay)
            await add.full()
            await sender.send("second", dedup_key="k")
            add.open()
        assert replayed == [1]
        assert sorted(message.body for message in await several(box, 2)) == ["first", "second"]
        assert await box.counts() == Counts(in_flight=2)


async def test_who_gives_back_what_was_cancelled_does_not_overwrite_another_with_its_key(here):
    async with here.box() as box, here.box() as other:
        sent = await box.send("old", dedup_key="k")
        held = await one(box)
        await other.cancel(sent)
        new = await other.send("new", dedup_key="k", delay=0.3)
        assert new != sent
        with pytest.raises(ReceiptHandleExpiredError):
            await held.nack(delay=0.1)
        assert await other.counts() == Counts(delayed=1, settled=1)
        message = await one(other)
        assert (message.id, message.body) == (new, "new")


@pytest.mark.parametrize("how", ["cancelled", "cut off"])
async def test_a_delayed_nack_that_is_cancelled_half_way_leaves_one_message(here, how):
    line = await here.line()
    async with here.box(over=line) as box:
        sent = await box.send("x")
        held = await one(box, lease=600)
        if how == "cancelled":
            assert await box.cancel(sent) == "cancelled"
        added = line.hold_answers(here.names().to_delayed + "*")
        async with anyio.create_task_group() as tasks:

            async def nack():
                try:
                    await held.nack(delay=60)
                except ReceiptHandleExpiredError:
                    assert how == "cancelled"

            tasks.start_soon(nack)
            await added.full()
            tasks.cancel_scope.cancel()
            added.open()
        assert await box.counts() == (Counts(settled=1) if how == "cancelled" else Counts(delayed=1))


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.slow
async def test_what_is_cancelled_as_it_comes_due_does_not_come(here, when):
    """Somebody has it in hand already to move it to the queue, and has not added it there, or not removed it here."""
    line, names = await here.line(), here.names()
    steps = {"before": (names.to_queue + "*", DUE), "between": (REMOVE + names.delayed, "*")}
    async with here.box(over=line) as box:
        sent = await box.send("x", delay=0.1)
        step = line.hold(*steps[when])
        await step.full()
        assert await box.cancel(sent) == "removed"
        step.open()
        assert await box.receive(wait_time_seconds=0.5) == []
        assert await box.counts() == Counts(settled=1)


async def test_what_is_cancelled_while_its_dedup_key_is_anothers_does_not_come(here):
    """It is due, the queue has another one with its key, and it is cancelled just before it gets there without."""
    await here.make_all()
    line, names = await here.line(), here.names()
    async with here.box(over=line) as box:
        await box.send("now", dedup_key="k")
        late = StoredMessage.of(Envelope("late", b'"late"', delay=0.01, dedup_key="k"), 1.0)
        look = line.hold(GET + names.queue, '{"last_by_subj"*')
        looked = line.watch(GET + names.delayed, '{"seq"*')
        await here.server.ask(names.to_delayed + late.token, late.encode())
        await look.full()
        assert await box.cancel(late.message_id) == "removed"
        look.open()
        await looked.full()
        assert [message.body for message in await several(box, 1)] == ["now"]
        assert await box.counts() == Counts(in_flight=1, settled=1)


async def test_the_key_of_a_due_message_that_is_done_is_free(here):
    """It was moved and acknowledged, and its mover has yet to remove it from the delayed."""
    line = await here.line()
    async with here.box(over=line) as box:
        removal = line.hold(REMOVE + here.names().delayed)
        first = await box.send("first", dedup_key="k", delay=0.1)
        await removal.full()
        await (await one(box)).acknowledge()
        second = await box.send("second", dedup_key="k")
        removal.open()
        assert second != first
        assert (await one(box)).body == "second"
        assert await box.counts() == Counts(in_flight=1, settled=1)


async def test_the_key_of_a_due_message_that_nobody_has_moved_yet_is_taken(here):
    """Who finds it moves it: so it is in the queue, once."""
    line, names = await here.line(), here.names()
    async with here.box(over=line) as box:
        move = line.hold(names.to_queue + "*", DUE)
        first = await box.send("first", dedup_key="k", delay=0.1)
        await move.full()
        assert await box.send("second", dedup_key="k") == first
        assert [(await here.server.state(stream))["messages"] for stream in (names.queue, names.delayed)] == [1, 0]
        move.open()
        assert (await one(box)).body == "first"
        assert await box.counts() == Counts(in_flight=1)


async def test_counts_without_end_keep_nobody_from_giving_back(here):
    async with here.box() as box:
        await box.send("x")
        held = await one(box)

        async def count():
            while True:
                await box.counts()

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(count)
            await anyio.sleep(0.1)
            with anyio.fail_after(10):
                await held.nack()
            tasks.cancel_scope.cancel()
        assert (await one(box)).attempt == 2


# ------------------------------------------------------------------------------------------------ several with a key


def keyed(*names):
    """Envelopes, each with its name as its id and its body, and a key of its first letter (a capital has none)."""
    return [
        Envelope(name, b'"%s"' % name.encode(), dedup_key=None if name.isupper() else name[0], delay=0)
        for name in names
    ]


async def test_several_with_dedup_keys_are_each_sent_once(here):
    async with here.box() as box:
        first = await box.backend.send(keyed("a1", "b1"))
        again = await box.backend.send(keyed("b2", "C", "a2", "d1", "d2"))
        assert again[:3] == [first[1], "C", first[0]]
        assert again[3] == again[4]
        assert sorted(message.body for message in await several(box, 4)) == ["C", "a1", "b1", "d1"]
        assert await box.counts() == Counts(in_flight=4)


async def test_of_several_with_dedup_keys_none_stays_where_one_cannot_be_stored(here):
    async with here.box() as box:
        await box.backend.send(keyed("a1"))
        await here.server.limit(here.names().queue, max_msgs=3)
        with pytest.raises(MailboxFullError):
            await box.backend.send(keyed("a2", "b1", "C", "d1"))
        assert (await box.counts()).waiting == 1
        assert [message.body for message in await several(box, 1)] == ["a1"]
