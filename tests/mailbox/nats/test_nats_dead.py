"""Dead letters on NATS: many at once, and a server that goes away meanwhile."""

from __future__ import annotations

import anyio
import pytest

from nats_support import GET, REMOVE, cut_off, several, until_it_works

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loops("uvloop"),
]


async def test_no_more_calls_are_out_at_once_than_there_is_room_for_their_answers(here):
    """An answer has a message in base64, up to 2 MiB where payloads have 1 MiB: 16 of them fit into the 32 MiB."""
    line = await here.line()
    async with here.box(over=line, timeout=30) as box, anyio.create_task_group() as tasks:
        looks = line.hold(GET + here.names().dead, count=16)
        further = line.hold(GET + here.names().dead, count=4, skip=16)
        tasks.start_soon(box.purge_dead_letters, [f"none-{number}" for number in range(20)])
        await looks.full()
        await box.counts()  # which leaves after all that has left
        assert not further.caught
        looks.open()
        await further.full()
        further.open()


async def test_who_purges_hears_that_the_server_has_gone(here):
    line = await here.line()
    async with here.box(over=line) as box:
        await box.send_many(range(3))
        for message in await several(box, 3):
            await message.dead_letter("no")
        ids = [letter.message_id for letter in await box.dead_letters()]
        removals = line.hold(REMOVE + here.names().dead, count=2, skip=1)
        await cut_off(line, removals, lambda: box.purge_dead_letters(ids))
        assert await until_it_works(lambda: box.purge_dead_letters(ids)) == 2
