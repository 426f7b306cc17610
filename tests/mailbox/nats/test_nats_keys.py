"""Dedup keys on NATS, where a sender looks twice: what happens between its looks loses nothing."""

from __future__ import annotations

import time
from contextlib import suppress

import anyio
import pytest

from mainspring import MailboxConnectionError
from mainspring.mailbox.message import Counts, Envelope
from mainspring.mailbox.nats.messages import StoredMessage
from nats_support import GET, REMOVE, one

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loops("asyncio", "uvloop"),
]


async def test_what_is_put_off_while_its_sender_still_looks_is_not_taken_for_another(here):
    """The sender finds its own message among the delayed, just while the receiver has it in both places."""
    names, of_sender, of_receiver = here.names(), await here.line(), await here.line()
    look = of_sender.hold(GET + names.delayed, '{"last_by_subj"*', skip=1)
    removal = of_receiver.hold(REMOVE + names.queue)

    async def nack():
        await (await one(receiver)).nack(delay=60)

    async with here.box(over=of_sender) as sender, here.box(over=of_receiver) as receiver:
        async with anyio.create_task_group() as putting_off:
            async with anyio.create_task_group() as sending:
                sending.start_soon(lambda: sender.send("x", dedup_key="k"))
                await look.full()
                putting_off.start_soon(nack)
                await removal.full()
                look.open()
            removal.open()
        assert await receiver.counts() == Counts(delayed=1)


class Senders:
    """Two who send with one key, one of them with a delay. Both find nothing, both store, then both look again."""

    async def prepare(self, here):
        await here.make_all()
        self.soon, self.later = await here.line(), await here.line()
        names = here.names()
        self.adds = {
            self.soon: self.soon.hold(names.to_queue + "*"),
            self.later: self.later.hold(names.to_delayed + "*"),
        }
        self.looks = {
            self.soon: self.soon.hold(GET + names.delayed, '{"last_by_subj"*', skip=1),
            self.later: self.later.hold(GET + names.queue, '{"last_by_subj"*', skip=1),
        }

    async def store(self, *lines):
        """Let them store their messages in that order, and look again at once."""
        for add in self.adds.values():
            await add.full()
        for line in lines:
            self.adds[line].open()
            await self.looks[line].full()
        for look in self.looks.values():
            look.open()


async def test_of_two_senders_who_find_one_another_one_stays(here):
    """One sends with a delay, one without; each has stored its message when it sees the other's."""
    ids, senders = {}, Senders()
    await senders.prepare(here)

    async def send(box, delay):
        ids[delay] = await box.send("x", dedup_key="k", delay=delay)

    async with here.box(over=senders.soon) as soon, here.box(over=senders.later) as later:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, soon, 0)
            tasks.start_soon(send, later, 60)
            await senders.store(senders.soon, senders.later)
        assert (await soon.counts()).waiting == 1
        assert ids[0] == ids[60] == await soon.send("x", dedup_key="k")


@pytest.mark.parametrize("first", ["soon", "later"])
async def test_of_two_senders_who_find_one_another_one_stays_whatever_becomes_of_the_other(here, first):
    """Neither relies on what the other still has to do: what it would add or remove later does not get through, or late."""
    ids, senders, names = [], Senders(), here.names()
    await senders.prepare(here)
    senders.soon.hold(names.to_queue + "*", skip=1)
    senders.later.hold(names.to_delayed + "*", skip=1)
    removal = senders.later.hold(REMOVE + names.delayed)

    async def send(box, delay):
        with suppress(MailboxConnectionError):
            ids.append(await box.send("x", dedup_key="k", delay=delay))
        if not delay:
            removal.open()

    async with (
        here.box(over=senders.soon, timeout=2) as soon,
        here.box(over=senders.later, timeout=2) as later,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(send, soon, 0)
        tasks.start_soon(send, later, 60)
        order = [senders.soon, senders.later]
        await senders.store(*(order if first == "soon" else reversed(order)))
    async with here.box() as box:
        assert (await box.counts()).waiting == 1
        assert set(ids) == {await box.send("x", dedup_key="k")}


@pytest.mark.parametrize("delay", [0, 60])
async def test_a_sender_who_finds_one_that_is_about_to_give_way_is_told_the_id_of_the_other(here, delay):
    await here.make_all()
    async with here.box() as box:
        stays = await box.send("x", dedup_key="k")
        goes = StoredMessage.of(Envelope("goes", b'"x"', 60, dedup_key="k"), time.time())
        await here.server.ask(here.names().to_delayed + goes.token, goes.encode())
        assert await box.send("x", dedup_key="k", delay=delay) == stays
