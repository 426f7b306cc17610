"""Steps on NATS between which somebody else does something: nothing is lost, and nothing that was ended comes again."""

from __future__ import annotations

import anyio
import pytest

from mainspring.errors import MailboxFullError, ReceiptHandleExpiredError
from mainspring.mailbox.message import Counts, Envelope
from mainspring.mailbox.nats.records import Record
from mainspring.mailbox.nats.streams import Add
from nats_support import ON_ASYNCIO, limit, several

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ON_ASYNCIO, ids=("asyncio", "uvloop")),
]


async def one(box, lease=60.0, wait=10.0):
    (message,) = await box.receive(visibility_timeout=lease, wait_time_seconds=wait)
    return message


def is_moved(adds):
    """Whether these are what moves due messages to the queue."""
    return bool(adds) and (adds[0].message_id or "").startswith("due-")


async def test_a_replay_whose_key_is_taken_just_then_loses_nothing(here, monkeypatch):
    async with here.box() as box, here.box() as sender:
        await box.send("first", dedup_key="k")
        await (await one(box)).dead_letter("no")
        add = box._store.add

        async def add_late(what):
            monkeypatch.undo()
            await sender.send("second", dedup_key="k")
            return await add(what)

        monkeypatch.setattr(box._store, "add", add_late)
        assert await box.replay_dead_letters() == 1
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
    async with here.box() as box:
        sent = await box.send("x")
        held = await one(box, lease=600)
        if how == "cancelled":
            assert await box.cancel(sent) == "cancelled"
        add = box._store.add
        with anyio.CancelScope() as scope:

            async def add_and_cancel(what):
                added = await add(what)
                scope.cancel()
                await anyio.sleep(0)
                return added

            box._store.add = add_and_cancel
            try:
                await held.nack(delay=0.1)
            except ReceiptHandleExpiredError:
                assert how == "cancelled"
        del box._store.add
        assert await box.counts() == (Counts(settled=1) if how == "cancelled" else Counts(delayed=1))


@pytest.mark.parametrize("when", ["before", "between"])
async def test_what_is_cancelled_as_it_comes_due_does_not_come(here, monkeypatch, when):
    """Somebody has it in hand already to move it to the queue, and has not added it there, or not removed it here."""
    said = []
    async with here.box() as box:
        sent = await box.send("x", delay=0.1)
        add_all = box._store.add_all

        async def add_and_cancel(adds):
            if not is_moved(adds):
                return await add_all(adds)
            monkeypatch.undo()
            if when == "before":
                said.append(await box.cancel(sent))
            results = await add_all(adds)
            if when == "between":
                said.append(await box.cancel(sent))
            return results

        monkeypatch.setattr(box._store, "add_all", add_and_cancel)
        with anyio.fail_after(20):
            while not said:
                await anyio.sleep(0.01)
        assert said == ["removed"]
        assert await box.receive(wait_time_seconds=0.5) == []
        assert await box.counts() == Counts(settled=1)


async def test_what_is_cancelled_while_its_dedup_key_is_anothers_does_not_come(here, monkeypatch):
    """It is due, the queue has another one with its key, and it is cancelled just before it gets there without."""
    met = anyio.Event()
    async with here.box() as box:
        mover = box._timed[0]
        meet = mover._meet

        async def meet_late(arrival):
            assert await box.cancel(late.message_id) == "removed"
            await meet(arrival)
            met.set()

        monkeypatch.setattr(mover, "_meet", meet_late)
        await box.send("now", dedup_key="k")
        late = Record.of(Envelope("late", b'"late"', delay=0.01, dedup_key="k"), 1.0)
        await box._store.add(Add(box._names.to_delayed + late.token, late.encode()))
        with anyio.fail_after(20):
            await met.wait()
        assert [message.body for message in await several(box, 1)] == ["now"]
        assert (await box.counts()).waiting == 1


async def test_the_key_of_a_due_message_that_is_done_is_free(here, monkeypatch):
    """It was moved and acknowledged, and its mover has yet to remove it from the delayed."""
    done, sent = anyio.Event(), anyio.Event()
    async with here.box() as box, here.box() as sender:
        for each in (box, sender):
            remove_all = each._store.remove_all

            async def remove_late(stream, sequences, remove_all=remove_all):
                if stream == box._names.delayed and sequences:
                    done.set()
                    await sent.wait()
                return await remove_all(stream, sequences)

            monkeypatch.setattr(each._store, "remove_all", remove_late)
        first = await box.send("first", dedup_key="k", delay=0.1)
        with anyio.fail_after(20):
            await done.wait()
            await (await one(box)).acknowledge()
            second = await sender.send("second", dedup_key="k")
            sent.set()
            assert second != first
            assert (await one(box)).body == "second"
        assert await box.counts() == Counts(in_flight=1, settled=1)


async def test_the_key_of_a_due_message_that_nobody_has_moved_yet_is_taken(here, monkeypatch):
    """Who finds it moves it: so it is in the queue, once."""
    async with here.box() as box, here.box() as sender:
        for each in (box, sender):
            each._timed[0].stop()
            each._wire.end_pulls()
        await anyio.sleep(0.2)
        first = await box.send("first", dedup_key="k", delay=0.1)
        await anyio.sleep(0.2)
        assert await sender.send("second", dedup_key="k") == first
        assert await box.counts() == Counts(pending=1)
        assert (await one(box)).body == "first"


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
        first = await box._put(keyed("a1", "b1"))
        again = await box._put(keyed("b2", "C", "a2", "d1", "d2"))
        assert again[:3] == [first[1], "C", first[0]]
        assert again[3] == again[4]
        assert sorted(message.body for message in await several(box, 4)) == ["C", "a1", "b1", "d1"]
        assert await box.counts() == Counts(in_flight=4)


async def test_of_several_with_dedup_keys_none_stays_where_one_cannot_be_stored(here):
    async with here.box() as box:
        await box._put(keyed("a1"))
        await limit(box, box._names.queue, max_msgs=3)
        with pytest.raises(MailboxFullError):
            await box._put(keyed("a2", "b1", "C", "d1"))
        assert (await box.counts()).waiting == 1
        assert [message.body for message in await several(box, 1)] == ["a1"]
