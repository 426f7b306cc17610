"""What the tests of the NATS mailbox share: names of their own, and the removal of what they made."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio

from mainspring.core import random
from mainspring.mailbox.nats.connection import Wire
from mainspring.mailbox.nats.errors import NO_STREAM, ApiError
from mainspring.mailbox.nats.mailbox import NatsMailbox
from mainspring.mailbox.nats.names import encoded

ON_ASYNCIO = [
    ("asyncio", {"use_uvloop": False}),
    ("asyncio", {"use_uvloop": True}),
]


async def remove(url, part):
    """Delete every stream in whose name ``part`` is."""
    async with _wire(url) as wire:
        while streams := await _streams(wire, part):
            for stream in streams:
                try:
                    await wire.api(f"STREAM.DELETE.{stream}")
                except ApiError as error:
                    if error.code != NO_STREAM:  # listed twice, as the pages moved, or ended by itself
                        raise


async def found(url, part):
    """Every stream in whose name ``part`` is."""
    async with _wire(url) as wire:
        return await _streams(wire, part)


async def _streams(wire, part):
    listed = []
    while True:  # the server lists some at a time
        page = await wire.api("STREAM.NAMES", {"offset": len(listed)})
        listed += page.get("streams") or []
        if not page.get("streams") or len(listed) >= page["total"]:
            return [stream for stream in listed if part in stream]


@asynccontextmanager
async def _wire(url):
    wire = Wire([url], {}, 10.0, "tidying")
    await wire.open()
    try:
        yield wire
    finally:
        await wire.close()


class Place:
    """A server, and mailbox names that nobody else has."""

    def __init__(self, url):
        self.url = url
        self.prefix = f"test-{random.token(48)}"

    def box(self, name="jobs", **options):
        """An unopened mailbox."""
        return NatsMailbox(self.url, name=f"{self.prefix}-{name}", **options)


@asynccontextmanager
async def place(url):
    """A :class:`Place`, whose streams are gone afterwards."""
    made = Place(url)
    try:
        yield made
    finally:
        await remove(url, encoded(made.prefix))


async def limit(box, stream, **settings):
    """Change settings of a stream, as its owner may."""
    wire = box._store.wire
    config = (await wire.api(f"STREAM.INFO.{stream}"))["config"]
    await wire.api(f"STREAM.UPDATE.{stream}", config | settings)


async def several(box, count, lease=60.0):
    """So many messages, the oldest first."""
    found = []
    with anyio.fail_after(20):
        while len(found) < count:
            found += await box.receive(max_messages=count - len(found), visibility_timeout=lease, wait_time_seconds=10)
    return found
