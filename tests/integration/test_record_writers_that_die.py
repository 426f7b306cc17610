"""Processes that write a record with a message, and are killed at any moment: each write that took place sends its message."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import anyio
import pytest

from mainspring.mailbox.records import RecordWrite
from stores import on

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

KILLS = 8
PATIENCE = 60.0
"""Seconds within which something is written between two kills, and what a killed writer left undone is done."""
WRITER = """
import sys
import anyio
from mainspring import open_mailbox
from mainspring.mailbox.records import RecordWrite

async def main():
    async with open_mailbox(sys.argv[1]) as box:
        while True:
            (found,) = await box.backend.find_records("test", ["n"])
            n = int(found.value) + 1
            write = RecordWrite("test", "n", b"%d" % n, 3_600 if n % 3 else None, found.version)
            await box.backend.write_record(write, [box.prepare(n, delay=0.05 if n % 5 == 0 else 0)])

anyio.run(main)
"""


async def last_written(box):
    """The last number, once no write of a killed writer can take place any more, as this one has replaced its version."""
    version = None
    while version is None:
        (found,) = await box.backend.find_records("test", ["n"])
        version = await box.backend.write_record(RecordWrite("test", "n", found.value, None, found.version))
    return int(found.value)


@on("sqlite", "redis", "postgres", "nats", everywhere=False)
async def test_each_write_that_took_place_has_sent_its_message_once(store):
    """The writers count up, each time on the version that they have read, and send the number."""
    url, moments = store.url(), random.Random(7)
    got: Counter[int] = Counter()

    def writer() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", WRITER, url], stderr=subprocess.DEVNULL)

    async def take(box, seconds):
        messages = await box.receive(max_messages=100, wait_time_seconds=seconds)
        for message in messages:
            got[message.body] += 1
            await message.acknowledge()

    async with store.box() as box:
        await box.backend.write_record(RecordWrite("test", "n", b"0"))
        writers = [writer() for _ in range(3)]
        try:
            for kill in range(KILLS):
                until, before = anyio.current_time() + moments.uniform(0.5, 1.0), len(got)
                with anyio.fail_after(PATIENCE):
                    while anyio.current_time() < until or len(got) == before:
                        await take(box, 0.1)
                writers[kill % 3].kill()
                writers[kill % 3].wait()
                writers[kill % 3] = writer()
        finally:
            for each in writers:
                each.kill()
                each.wait()
        numbers = set(range(1, await last_written(box) + 1))
        with anyio.move_on_after(PATIENCE):
            while got.keys() != numbers:
                await take(box, 1.0)
        await take(box, 0.5)
    assert got == dict.fromkeys(numbers, 1)
