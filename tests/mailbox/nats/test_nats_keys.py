"""Dedup keys on NATS, where a sender looks twice: what happens between its looks loses nothing."""

from __future__ import annotations

from contextlib import suppress

import anyio
import pytest

from mainspring import MailboxConnectionError
from mainspring.mailbox.message import Counts, Envelope
from mainspring.mailbox.nats.records import Record
from nats_support import ON_ASYNCIO

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ON_ASYNCIO, ids=("asyncio", "uvloop")),
]


async def test_what_is_put_off_while_its_sender_still_looks_is_not_taken_for_another(here, monkeypatch):
    """The sender finds its own message among the delayed, just while the receiver has it in both places."""
    put_off, sent, looks = anyio.Event(), anyio.Event(), 0
    async with here.box() as sender, here.box() as receiver, anyio.create_task_group() as tasks:
        look, remove = sender._store.last, receiver._store.remove

        async def nack():
            (message,) = await receiver.receive(wait_time_seconds=10)
            await message.nack(delay=60)

        async def look_late(stream, subject):
            nonlocal looks
            looks += 1
            if looks == 2:
                tasks.start_soon(nack)
                await put_off.wait()
            return await look(stream, subject)

        async def remove_late(stream, sequence):
            put_off.set()
            await sent.wait()
            return await remove(stream, sequence)

        monkeypatch.setattr(sender._store, "last", look_late)
        monkeypatch.setattr(receiver._store, "remove", remove_late)
        with anyio.fail_after(30):
            try:
                await sender.send("x", dedup_key="k")
            finally:
                sent.set()
    async with here.box() as box:
        assert await box.counts() == Counts(delayed=1)


def look_together(monkeypatch, *boxes):
    """Have the senders of a key find nothing at first, and go on with their second look once all of them have had theirs."""
    all_have, seen = anyio.Event(), set()

    def follow(box):
        last, looks = box._store.last, []

        async def look(stream, subject):
            looks.append(stream)
            if len(looks) == 1:  # before any has stored anything
                return None
            found = await last(stream, subject)
            if len(looks) == 2:
                seen.add(box)
                if len(seen) == len(boxes):
                    all_have.set()
                await all_have.wait()
            return found

        monkeypatch.setattr(box._store, "last", look)

    for box in boxes:
        follow(box)


async def test_of_two_senders_who_find_one_another_one_stays(here, monkeypatch):
    """One sends with a delay, one without; each has stored its message when it sees the other's."""
    ids = {}
    async with here.box() as soon, here.box() as later:
        look_together(monkeypatch, soon, later)

        async def send(box, delay):
            ids[delay] = await box.send("x", dedup_key="k", delay=delay)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send, soon, 0)
                tasks.start_soon(send, later, 60)
        monkeypatch.undo()
        assert (await soon.counts()).waiting == 1
        assert ids[0] == ids[60] == await soon.send("x", dedup_key="k")


@pytest.mark.parametrize("first", ["soon", "later"])
async def test_of_two_senders_who_find_one_another_one_stays_whatever_becomes_of_the_other(here, first, monkeypatch):
    """Neither relies on what the other still has to do: it may be cut off just then."""
    stored, told = anyio.Event(), anyio.Event()
    ids = []
    async with here.box() as soon, here.box() as later:
        look_together(monkeypatch, soon, later)
        boxes = {"soon": soon, "later": later}
        for name, box in boxes.items():
            add, adds = box._store.add, []

            async def add_once(message, add=add, adds=adds, name=name):
                adds.append(message)
                if len(adds) > 1:
                    raise MailboxConnectionError("cut off")
                if name != first:
                    await stored.wait()
                added = await add(message)
                stored.set()
                return added

            monkeypatch.setattr(box._store, "add", add_once)
        remove = later._store.remove

        async def remove_late(stream, sequence):
            await told.wait()
            return await remove(stream, sequence)

        monkeypatch.setattr(later._store, "remove", remove_late)

        async def send(box, delay):
            with suppress(MailboxConnectionError):
                ids.append(await box.send("x", dedup_key="k", delay=delay))
            if box is soon:
                told.set()

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send, soon, 0)
                tasks.start_soon(send, later, 60)
        monkeypatch.undo()
        assert (await soon.counts()).waiting == 1
        assert set(ids) == {await soon.send("x", dedup_key="k")}


@pytest.mark.parametrize("delay", [0, 60])
async def test_a_sender_who_finds_one_that_is_about_to_give_way_is_told_the_id_of_the_other(here, delay):
    async with here.box() as box:
        stays = await box.send("x", dedup_key="k")
        goes = Record.of(Envelope("goes", b'"x"', 60, dedup_key="k"), box._sends._wall())
        await box._store.add(box._sends._first(goes))
        assert await box.send("x", dedup_key="k", delay=delay) == stays
