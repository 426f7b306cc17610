"""A mailbox is removed as its backend's page says: nothing is left, nor of what a consumer of its dead letters writes down."""

from __future__ import annotations

import re
from pathlib import Path

import anyio
import pytest

from mainspring import DLQConsumer, LoopGroup, Verdict
from mainspring.mailbox.nats.names import encoded
from mainspring.mailbox.records import RecordWrite
from nats_support import place as nats_place
from postgres_support import Place, drop_schema, new_schema
from redis_support import place as redis_place

pytestmark = [pytest.mark.anyio, pytest.mark.loops("asyncio")]

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


async def use(mailbox, *, priority=0):
    """Leave something of every kind in ``mailbox``: delayed, keyed, expiring, in hand with a checkpoint, dead, kept dead."""
    kept = anyio.Event()

    async def keep(letter):
        kept.set()
        return Verdict.KEEP

    async with mailbox:
        await mailbox.send_many(["dead", "dead too"])
        for message in await mailbox.receive(max_messages=2):
            await message.dead_letter("unwanted")
        await mailbox.send("in hand", priority=priority)
        (held,) = await mailbox.receive()
        await held.save_checkpoint(b"half")
        await mailbox.send("later", delay=3_600)
        await mailbox.send("once", dedup_key="key", expires_in=3_600)
        if mailbox.capabilities.records:
            await mailbox.backend.write_record(RecordWrite("test", "key", b"value", 3_600))
        async with LoopGroup([DLQConsumer(mailbox, keep)], guardian=False):
            with anyio.fail_after(20):
                await kept.wait()


def examples(page, language):
    """What the page's blocks in that language say."""
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE))


async def test_on_redis(redis_url, anyio_backend):
    with redis_place(redis_url) as here:
        await use(here.mailbox(), priority=3)
        patterns = re.findall(
            r"redis-cli --scan --pattern '(.*?)' \| xargs redis-cli unlink", examples("redis.md", "text")
        )
        assert len(patterns) == 2
        for pattern in patterns:
            _, keys = here.call("SCAN", 0, "MATCH", pattern.replace("{ms:", "{ms:" + here.prefix), "COUNT", 1_000_000)
            assert here.call("UNLINK", *keys) >= 5
        assert here.found() == []
        assert not await here.mailbox().exists()


async def test_on_postgresql(postgres_url, anyio_backend):
    place = Place(postgres_url, new_schema())
    try:
        await use(place.mailbox(), priority=3)
        (statement,) = re.findall(r"SELECT mainspring\.drop_mailbox.*;", examples("postgres.md", "sql"))
        assert len(place.execute(statement.replace("mainspring.", "SCHEMA."))) == 2
        for table in ("mailboxes", "messages", "dead", "tallies", "ranks", "records"):
            assert place.execute(f"SELECT * FROM SCHEMA.{table}") == []
        assert not await place.mailbox().exists()
    finally:
        drop_schema(postgres_url, place.schema)


async def test_on_nats(nats_url, anyio_backend):
    async with nats_place(nats_url) as here:
        await here.make_all()
        await use(here.box())
        loop = examples("nats.md", "text").replace("\\\n", "")
        ((boxes, kinds),) = re.findall(r"for box in (.*?); do\n.*?for part in (.*?); do", loop, re.DOTALL)
        assert len(boxes.split()) == 2
        for box in boxes.split():
            for kind in kinds.split():
                await here.server.delete(f"{kind}_{encoded(here.prefix)}-{box}")
        assert await here.server.streams(encoded(here.prefix)) == []
        assert not await here.box().exists()
