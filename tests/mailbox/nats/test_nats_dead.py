"""Dead letters on NATS: many at once, and a server that goes away meanwhile."""

from __future__ import annotations

import pytest

from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.nats import streams as nats_streams
from nats_support import ON_ASYNCIO

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ON_ASYNCIO[1:], ids=("uvloop",)),
]


async def dead(box, count):
    """The ids of so many dead letters."""
    await box.send_many(range(count))
    for message in await box.receive(max_messages=count, wait_time_seconds=10):
        await message.dead_letter("no")
    return [letter.message_id for letter in await box.dead_letters()]


async def test_no_more_calls_are_out_at_once_than_can_be_answered_in_time(here, monkeypatch):
    monkeypatch.setattr(nats_streams, "WINDOW", 3)
    async with here.box() as box:
        ids = await dead(box, 10)
        assert len(ids) == 10
        together = []
        ask_all = box._store.wire.ask_all

        async def counted(asks):
            together.append(len(asks))
            return await ask_all(asks)

        monkeypatch.setattr(box._store.wire, "ask_all", counted)
        assert await box.purge_dead_letters(ids) == 10
        assert together == [3, 3, 3, 1] * 2  # to find them, and to remove them


async def test_who_purges_hears_that_the_server_has_gone(here, monkeypatch):
    async with here.box() as box:
        ids = await dead(box, 3)
        remove_all = box._store.remove_all

        async def lost(stream, sequences):
            return [*await remove_all(stream, sequences[:1]), *[MailboxConnectionError("gone")] * 2]

        with monkeypatch.context() as patch:
            patch.setattr(box._store, "remove_all", lost)
            with pytest.raises(MailboxConnectionError, match="gone"):
                await box.purge_dead_letters(ids)
        assert await box.purge_dead_letters(ids) == 2
