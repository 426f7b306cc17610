"""Lists of messages on NATS, and messages that are changed while a worker claims them or the process that changes them dies."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import anyio
import pytest

pytest.importorskip("nats", reason="the extra 'nats' is not installed")

from mainspring.errors import ReceiptHandleExpiredError, SerializationError
from mainspring.mailbox.message import Counts, MessagePlace, MessageQuery, RescheduleOutcome
from mainspring.mailbox.nats.listing import LOOK_AT_MOST, WIDEST
from mainspring.mailbox.nats.messages import MARK
from nats_support import GET, PULL, REMOVE, cut_off, one, place, several, until_it_works

pytestmark = [pytest.mark.anyio, pytest.mark.loops("asyncio")]

HOUR = 3_600.0
DELAYED, PENDING, IN_FLIGHT = MessagePlace.DELAYED, MessagePlace.PENDING, MessagePlace.IN_FLIGHT
RESCHEDULED, HELD, UNKNOWN = RescheduleOutcome.RESCHEDULED, RescheduleOutcome.IN_FLIGHT, RescheduleOutcome.UNKNOWN


@pytest.fixture
async def here(nats_url, anyio_backend):
    async with place(nats_url) as made:
        yield made


async def send(box, body, *, task=None, key=None, **options):
    envelope = box.prepare(body, **options)
    envelope.task, envelope.key = task, key
    return (await box.send_prepared([envelope]))[0]


async def bodies(box, query):
    """The bodies of all pages of a list."""
    found = []
    while True:
        page = await box.backend.list_messages(query)
        found += [box.body_of(each.message) for each in page.messages]
        if page.after is None:
            return found
        query = replace(query, after=page.after)


# ---------------------------------------------------------------------------------------------------------------- lists


async def test_a_message_without_a_task_is_stored_as_before(here):
    async with here.box() as box:
        for task, fields in ((None, {"i", "t"}), ("t", {"i", "t", "o"})):
            sent = await send(box, "x", task=task)
            names = here.names()
            place = {"last_by_subj": f"{names.to_queue}i-{sent}"}
            stored = await here.server.api(f"STREAM.MSG.GET.{names.queue}", place)
            line, _, body = base64.b64decode(stored["message"]["data"]).partition(b"\n")
            assert (set(json.loads(line.removeprefix(MARK))), body) == (fields, b'"x"')


async def test_a_message_keeps_its_task_and_key(here):
    """Through a nack, a delay, a change, its death and its replay."""
    async with here.box() as box:
        sent = await send(box, "x", task="t", key="k")
        wanted = MessageQuery(PENDING, 10, task="t", key="k")
        await (await one(box)).nack()
        assert await bodies(box, wanted) == ["x"]
        assert await box.backend.reschedule(sent, HOUR) is RESCHEDULED
        assert await box.backend.replace_body(sent, b'"y"') is RESCHEDULED
        assert await bodies(box, replace(wanted, place=DELAYED)) == ["y"]
        assert await box.backend.reschedule(sent, 0) is RESCHEDULED
        message = await one(box)
        assert await bodies(box, replace(wanted, place=IN_FLIGHT)) == ["y"]
        await message.dead_letter("no")
        assert await box.backend.replay_dead_letters(None) == 1
        assert await bodies(box, wanted) == ["y"]
        (found,) = await box.backend.find([sent])
        assert found.key == "k"


async def test_gaps_between_messages_are_jumped_over(here):
    """Few messages among many numbers that are gone are found with few requests."""
    line = await here.line()
    async with here.box(over=line) as box:
        await box.send("old")
        old = await one(box)
        await box.send_many(range(LOOK_AT_MOST))
        messages = await several(box, LOOK_AT_MOST)
        await box.acknowledge_many([message for number, message in enumerate(messages) if number % 100])
        await box.send_many(["new", "newer"])
        asked = line.watch(f"{GET}*", count=-1)
        assert await bodies(box, MessageQuery(IN_FLIGHT, 20)) == ["old", *range(0, LOOK_AT_MOST, 100)]
        await old.release()
        assert await bodies(box, MessageQuery(PENDING, 20)) == ["new", "newer", "old"]
        assert len(asked.caught) < 5 * WIDEST


async def test_a_page_looks_at_a_bounded_number_of_messages(here):
    line = await here.line()
    async with here.box(over=line) as box:
        await box.send_many(range(LOOK_AT_MOST + 100))
        last = await send(box, "last", task="t")
        asked = line.watch(f"{GET}*", count=-1)
        page = await box.backend.list_messages(MessageQuery(PENDING, 10, task="t"))
        assert (page.messages, LOOK_AT_MOST <= len(asked.caught) <= LOOK_AT_MOST + WIDEST) == ([], True)
        page = await box.backend.list_messages(MessageQuery(PENDING, 10, page.after, task="t"))
        assert ([each.message.message_id for each in page.messages], page.after) == ([last], None)
        asked.caught.clear()
        assert len((await box.backend.list_messages(MessageQuery(PENDING, 10))).messages) == 10
        assert len(asked.caught) <= WIDEST


async def test_a_message_whose_lease_has_ended_is_listed_as_it_is_found(here):
    """As pending in the mailbox object that held it; in others as in flight, until it is delivered again."""
    async with here.box() as box, here.box() as other:
        await box.send_many(["over", "held", "waits"])
        await one(box, lease=0.05)
        await one(box)
        await anyio.sleep(0.06)
        assert await bodies(box, MessageQuery(PENDING, 1)) == ["over", "waits"]
        assert await bodies(box, MessageQuery(IN_FLIGHT, 1)) == ["held"]
        assert await bodies(other, MessageQuery(PENDING, 1)) == ["waits"]
        assert await bodies(other, MessageQuery(IN_FLIGHT, 1)) == ["over", "held"]


# -------------------------------------------------------------------------------------------------------------- changes


def edit(box, sent):
    return box.backend.replace_body(sent, b'"new"')


def postpone(box, sent):
    return box.backend.reschedule(sent, HOUR)


CHANGES = pytest.mark.parametrize("change", [edit, postpone], ids=["edit", "reschedule"])


def step_of(here, change):
    """The step with which a pending message leaves its number."""
    names = here.names()
    return f"{REMOVE}{names.queue}" if change is postpone else f"{names.to_queue}*"


@CHANGES
async def test_a_message_that_is_claimed_while_it_is_changed_keeps_its_lease(here, change):
    line = await here.line()
    async with here.box(over=line) as box, here.box() as worker:
        sent = await box.send("x")
        step = line.hold(step_of(here, change))
        claimed = []

        async def claim():
            await step.full()
            claimed.append(await one(worker))
            step.open()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(claim)
            assert await change(box, sent) is HELD
        assert (claimed[0].body, claimed[0].delivery_count, claimed[0].attempt) == ("x", 1, 1)
        assert await box.counts() == Counts(in_flight=1)
        await claimed[0].extend_visibility(60)
        await claimed[0].acknowledge()
        assert await box.counts() == Counts(settled=1)


@CHANGES
async def test_a_worker_that_gets_a_message_after_its_change_lets_it_go(here, change):
    """The server had delivered it, and the change was there before the worker could put it back."""
    line, slow = await here.line(), await here.line()
    async with here.box(over=line) as box, here.box(over=slow) as worker:
        sent = await box.send("x")
        step = line.hold(step_of(here, change))
        returned = slow.hold(f"{here.names().to_queue}*")
        received = []

        async def claim():
            received.extend(await worker.receive(visibility_timeout=60, wait_time_seconds=5))

        async def interleave():
            await step.full()
            tasks.start_soon(claim)
            await returned.full()
            step.open()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(interleave)
            assert await change(box, sent) is RESCHEDULED
            returned.open()
            if change is postpone:
                assert await box.backend.reschedule(sent, 0) is RESCHEDULED
        assert [(each.body, each.delivery_count) for each in received] == [("new" if change is edit else "x", 1)]
        await received[0].acknowledge()
        assert await box.counts() == Counts(settled=1)


@CHANGES
async def test_a_worker_that_has_not_heard_of_a_change_loses_the_lease(here, change):
    """As between the servers of a cluster: the message is not lost, and its former holder cannot settle it."""
    line = await here.line()
    async with here.box(over=line) as box, here.box() as worker:
        sent = await box.send("x")
        unheard = line.hold(here.names().to_changes)
        step = line.hold(step_of(here, change))
        claimed = []

        async def claim():
            await step.full()
            claimed.append(await one(worker))
            step.open()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(claim)
            assert await change(box, sent) is RESCHEDULED
        unheard.open()
        with pytest.raises(ReceiptHandleExpiredError):
            await claimed[0].acknowledge()
        assert await box.counts() == Counts(delayed=1) if change is postpone else Counts(pending=1)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, HOUR], ids=["pending", "delayed"])
async def test_an_edit_whose_process_dies_is_made_or_not(here, delay):
    """It is one step: if a process dies before or after it, the message is there once."""
    line = await here.line()
    names = here.names()
    replaced = f"{names.to_delayed if delay else names.to_queue}*"
    async with here.box(over=line) as box:
        sent = await box.send("x", delay=delay, dedup_key="k")
        listed = MessageQuery(DELAYED if delay else PENDING, 10)
        for hold, body in ((line.hold, "x"), (line.hold_answers, "new")):
            await cut_off(line, hold(replaced), lambda: edit(box, sent))
            await until_it_works(box.counts)
            assert await bodies(box, listed) == [body]
        assert await until_it_works(lambda: edit(box, sent)) is RESCHEDULED
        assert await bodies(box, listed) == ["new"]
        assert await box.send("other", dedup_key="k") == sent
        assert await box.backend.reschedule(sent, 0) is RESCHEDULED
        message = await one(box)
        assert (message.body, message.delivery_count) == ("new", 1)
        await message.acknowledge()
        assert await edit(box, sent) is UNKNOWN


@pytest.mark.slow
@pytest.mark.parametrize("step", ["add", "remove"])
async def test_a_due_message_is_edited_in_the_queue(here, step):
    """A scheduler that has it in hand moves it once, and the edit is not lost."""
    line, slow = await here.line(), await here.line()
    async with here.box(over=line) as box:
        sent = await box.send("x", delay=0.3)
        moved = line.hold(f"{here.names().to_queue}*" if step == "add" else f"{REMOVE}{here.names().delayed}")
        await moved.full()
        async with here.box(over=slow) as other:
            assert await edit(other, sent) is RESCHEDULED
            moved.open()
            message = await one(box)
            assert (message.body, message.delivery_count) == ("new", 1)
            await message.acknowledge()
            await anyio.sleep(0.1)
            assert await box.receive(wait_time_seconds=0.3) == []
            assert (await box.counts()).waiting == 0


@pytest.mark.slow
@CHANGES
@pytest.mark.parametrize("is_claimed", [False, True], ids=["free", "claimed"])
async def test_a_change_that_meets_a_message_as_it_comes_due_leaves_one(here, change, is_claimed):
    """It was asked for before that, and took place when a scheduler had added the message to the queue already."""
    line, slow = await here.line(), await here.line()
    names = here.names()
    slow.hold(f"{PULL}{names.delayed}.*", count=-1)  # so the scheduler of the first mailbox moves it
    async with here.box(over=line) as box, here.box(over=slow, timeout=30) as other:
        sent = await box.send("x", delay=0.5)
        removal = line.hold(f"{REMOVE}{names.delayed}")
        step = slow.hold(f"{names.to_delayed}*")
        messages = []

        async def interleave():
            await removal.full()
            if is_claimed:
                messages.append(await one(other))
            step.open()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(interleave)
            assert await change(other, sent) is RESCHEDULED
        removal.open()
        with anyio.fail_after(20):
            while (await other.counts()).waiting != 1:
                await anyio.sleep(0.02)
        if change is postpone and not is_claimed:
            assert await other.counts() == Counts(delayed=1)
            return
        message = messages[0] if is_claimed else await one(other)
        assert (message.body, message.delivery_count) == ("x" if is_claimed else "new", 1)
        await message.acknowledge()
        await anyio.sleep(0.3)
        assert await other.counts() == Counts(settled=1)


async def test_a_body_that_is_too_large_is_refused(here):
    async with here.box() as box:
        sent = await box.send("x")
        with pytest.raises(SerializationError, match="max_payload"):
            await box.backend.replace_body(sent, b'"%s"' % (b"x" * 2**20))
        assert await bodies(box, MessageQuery(PENDING, 10)) == ["x"]


async def test_a_claim_of_many_leaves_those_that_are_being_changed(here):
    """The others of the batch come as ever."""
    line = await here.line()
    async with here.box(over=line) as box, here.box() as worker:
        ids = await box.send_many(["a", "b", "c"])
        step = line.hold(f"{here.names().to_queue}*")
        async with anyio.create_task_group() as tasks:

            async def claim():
                await step.full()
                found = await several(worker, 3)
                assert sorted(each.body for each in found) == ["a", "b", "c"]
                step.open()

            tasks.start_soon(claim)
            assert await edit(box, ids[1]) is HELD
        assert await box.counts() == Counts(in_flight=3)
