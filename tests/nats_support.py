"""What the tests of the NATS mailbox share: names of their own, a plain client to look at and change what is on the server,
lines to it (see nats_line.py), and the removal of what they made."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import anyio
import nats
import pytest

from mainspring.core import random
from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.nats.mailbox import NatsMailbox
from mainspring.mailbox.nats.names import CONSUMER, Names, encoded
from nats_line import NatsLine

NO_STREAM = 10059
GET = "$JS.API.STREAM.MSG.GET."
"""What a mailbox asks the server to get a message of a stream: this, then the stream."""
REMOVE = "$JS.API.STREAM.MSG.DELETE."
PULL = "$JS.API.CONSUMER.MSG.NEXT."
ACK = "$JS.ACK."


class Refused(Exception):
    """What JetStream says where it refuses."""

    def __init__(self, code, text):
        super().__init__(f"{text} (code {code})")
        self.code = code


class Client:
    """A client of the driver's own, no mailbox: what an operator, or another program, can see and do."""

    def __init__(self, connection):
        self.connection = connection

    async def ask(self, subject, payload=b"", headers=None):
        """What JetStream answers. Raises :class:`Refused`."""
        answer = json.loads((await self.connection.request(subject, payload, 10, headers=headers)).data)
        if "error" in answer:
            raise Refused(answer["error"]["err_code"], answer["error"]["description"])
        return answer

    async def api(self, subject, request=None):
        """Call JetStream's API."""
        return await self.ask(f"$JS.API.{subject}", b"" if request is None else json.dumps(request).encode())

    async def streams(self, part=""):
        """Every stream in whose name ``part`` is."""
        listed = []
        while True:  # the server lists some at a time
            page = await self.api("STREAM.NAMES", {"offset": len(listed)})
            listed += page.get("streams") or []
            if not page.get("streams") or len(listed) >= page["total"]:
                return [stream for stream in listed if part in stream]

    async def limit(self, stream, **settings):
        """Change settings of a stream, as its owner may."""
        config = (await self.api(f"STREAM.INFO.{stream}"))["config"]
        await self.api(f"STREAM.UPDATE.{stream}", config | settings)

    async def delete(self, *streams):
        """Delete streams, those that are there."""
        for stream in streams:
            try:
                await self.api(f"STREAM.DELETE.{stream}")
            except Refused as error:
                if error.code != NO_STREAM:  # listed twice, as the pages moved, or ended by itself
                    raise

    async def consumer(self, stream):
        """What the consumer of a stream says of itself."""
        return await self.api(f"CONSUMER.INFO.{stream}.{CONSUMER}")

    async def state(self, stream):
        """What a stream says of what is in it."""
        return (await self.api(f"STREAM.INFO.{stream}"))["state"]

    async def change_consumer(self, stream, **settings):
        """Make the consumer of a stream anew, with other settings."""
        config = (await self.consumer(stream))["config"]
        await self.api(f"CONSUMER.DELETE.{stream}.{CONSUMER}")
        request = {"stream_name": stream, "config": config | settings}
        await self.api(f"CONSUMER.DURABLE.CREATE.{stream}.{CONSUMER}", request)

    async def deliver_again(self, stream, number):
        """Have message ``number`` of a stream delivered again now, whatever its holder thinks of its lease."""
        await self.connection.publish(f"$JS.ACK.{stream}.{CONSUMER}.1.{number}.{number}.0.0", b"-NAK")
        await self.connection.flush()


@asynccontextmanager
async def client(url):
    """A :class:`Client` of a server."""
    connection = await nats.connect(url, connect_timeout=10)
    try:
        yield Client(connection)
    finally:
        await connection.close()


async def remove(url, part):
    """Delete every stream in whose name ``part`` is."""
    async with client(url) as server:
        while streams := await server.streams(part):
            await server.delete(*streams)


async def found(url, part):
    """Every stream in whose name ``part`` is."""
    async with client(url) as server:
        return await server.streams(part)


class Place:
    """A server, and mailbox names that nobody else has."""

    def __init__(self, url, server):
        self.url = url
        self.server = server
        self.prefix = f"test-{random.token(48)}"
        self.lines = []

    def box(self, name="jobs", *, over=None, **options):
        """An unopened mailbox: on the server, or ``over`` a line, which makes it another connection."""
        return NatsMailbox(self.url if over is None else over.url, name=f"{self.prefix}-{name}", **options)

    def names(self, name="jobs"):
        """What the streams and subjects of a mailbox are called."""
        return Names.of(f"{self.prefix}-{name}")

    async def make_all(self, name="jobs", *, storage="file"):
        """Make all streams of a mailbox, as an earlier revision did when a mailbox was opened."""
        names = self.names(name)
        for config in names.configs(replicas=1, storage=storage):
            await self.server.api(f"STREAM.CREATE.{config['name']}", config)
        for stream, config in names.consumers(60.0).items():
            request = {"stream_name": stream, "config": config}
            await self.server.api(f"CONSUMER.DURABLE.CREATE.{stream}.{CONSUMER}", request)

    async def line(self):
        """A new line to the server."""
        line = NatsLine(self.url)
        await line.open()
        self.lines.append(line)
        return line


@asynccontextmanager
async def place(url):
    """A :class:`Place`, whose streams are gone afterwards."""
    async with client(url) as server:
        made = Place(url, server)
        try:
            yield made
        finally:
            for line in made.lines:
                await line.close()
            for stream in await server.streams(encoded(made.prefix)):
                await server.delete(stream)


async def reconnected(box, times=1):
    """Wait until a mailbox has connected anew that often."""
    with anyio.fail_after(20):
        while box.statistics().reconnects < times:
            await anyio.sleep(0.01)


async def until_it_works(call):
    """What a call returns once the mailbox is connected again."""
    with anyio.fail_after(20):
        while True:
            try:
                return await call()
            except MailboxConnectionError:
                await anyio.sleep(0.02)


async def cut_off(line, trap, call):
    """Make a call, which fails as its connection ends once ``trap`` has caught all that it can."""

    async def cut():
        await trap.full()
        line.cut()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cut)
        with pytest.raises(MailboxConnectionError):
            await call()


async def one(box, lease=60.0, wait=10.0):
    """The next message."""
    (message,) = await box.receive(visibility_timeout=lease, wait_time_seconds=wait)
    return message


async def several(box, count, lease=60.0):
    """So many messages, the oldest first."""
    found = []
    with anyio.fail_after(20):
        while len(found) < count:
            found += await box.receive(max_messages=count - len(found), visibility_timeout=lease, wait_time_seconds=10)
    return found
