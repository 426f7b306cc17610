"""The stream that writes at once: all of what is written arrives, whatever the socket takes at a time, and every wait ends."""

from __future__ import annotations

import socket

import anyio
import pytest
from anyio.abc import SocketAttribute

from mainspring.mailbox.redis.connection import DirectStream

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["", "watched"])
async def ends(request, anyio_backend):
    """Both ends of a connection: the stream, and an ordinary one of anyio's."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    other: list = []
    async with anyio.create_task_group() as group:

        async def serve() -> None:
            async with listener:
                await listener.serve(keep)

        async def keep(stream) -> None:
            async with stream:
                other.append(stream)
                await anyio.sleep_forever()

        group.start_soon(serve)
        stream = DirectStream(await anyio.connect_tcp("127.0.0.1", port))
        if request.param:
            stream.watch()
        with anyio.fail_after(60):
            while not other:
                await anyio.sleep(0.001)
            yield stream, other[0]
        await anyio.aclose_forcefully(stream)
        group.cancel_scope.cancel()


async def write(stream: DirectStream, data: bytes) -> None:
    """Write until the socket has taken all of it."""
    await stream.send(data)
    await stream.flush()


async def test_what_is_written_is_read_on_the_other_side(ends):
    stream, other = ends
    await stream.send(b"ping")
    assert await other.receive() == b"ping"
    await other.send(b"pong")
    assert await stream.receive() == b"pong"
    assert stream.extra(SocketAttribute.remote_port) == other.extra(SocketAttribute.local_port)


async def test_more_than_the_socket_takes_arrives_whole(ends):
    stream, other = ends
    body = bytes(range(256)) * 65_536
    got = bytearray()
    async with anyio.create_task_group() as group:
        group.start_soon(write, stream, body)
        while len(got) < len(body):
            got += await other.receive(262_144)
    assert bytes(got) == body


async def test_a_read_that_is_cancelled_loses_nothing(ends):
    stream, other = ends
    with anyio.move_on_after(0.01):
        await stream.receive()
    await other.send(b"later")
    assert await stream.receive() == b"later"


async def test_the_end_is_heard(ends):
    stream, other = ends
    await stream.send_eof()
    with pytest.raises(anyio.EndOfStream):
        await other.receive()
    await other.aclose()
    with pytest.raises(anyio.EndOfStream):
        await stream.receive()


@pytest.mark.parametrize("way", ["receive", "send"])
async def test_who_waits_hears_of_a_close(ends, way):
    stream, _ = ends
    heard: list[type[Exception]] = []

    async def wait() -> None:
        try:
            while True:
                await (stream.receive() if way == "receive" else write(stream, b"x" * 1_000_000))
        except Exception as error:  # whatever it is
            heard.append(type(error))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.sleep(0.1)
        await anyio.aclose_forcefully(stream)
    assert heard == [anyio.ClosedResourceError]
    for call in (stream.receive(), stream.send(b"x"), stream.send_eof()):
        with pytest.raises(anyio.ClosedResourceError):
            await call
    await stream.aclose()


async def test_a_connection_that_is_closed_by_the_time_it_is_made_is_broken(anyio_backend):
    """The event loop may have heard of it, and have no socket any more."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        stream = await anyio.connect_tcp("127.0.0.1", listener.extra(SocketAttribute.local_port))
    await stream.aclose()
    with pytest.raises(anyio.BrokenResourceError):
        DirectStream(stream)


async def test_a_broken_connection_is_named_so(ends):
    stream, other = ends
    raw = other.extra(SocketAttribute.raw_socket)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    await stream.send(b"unread")
    await anyio.aclose_forcefully(other)
    with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
        await stream.receive()

    async def write_on() -> None:
        while True:
            await stream.send(b"x" * 1_000)
            await anyio.sleep(0.001)

    with pytest.raises(anyio.BrokenResourceError):
        await write_on()


async def test_writes_of_several_tasks_arrive_whole_and_in_order_though_some_are_cancelled(ends):
    stream, other = ends
    items = [bytes([number]) * 3_000_000 for number in range(4)]
    got = bytearray()
    async with anyio.create_task_group() as group:
        for number, item in enumerate(items):
            scope = anyio.CancelScope()

            async def send(item=item, scope=scope) -> None:
                with scope:
                    await write(stream, item)

            group.start_soon(send)
            await anyio.wait_all_tasks_blocked()
            if number < 3:
                scope.cancel()
        while len(got) < 12_000_000:
            got += await other.receive(262_144)
    assert bytes(got) == b"".join(items)
    assert not stream.unsent


async def test_a_write_does_not_wait_and_leaves_the_rest_to_a_flush(ends):
    quick, other = ends
    body = b"x" * 9_000_000
    await quick.send(body[:-1])
    await quick.send(b"y")
    assert quick.unsent
    got = bytearray()
    async with anyio.create_task_group() as group:
        group.start_soon(quick.flush)
        while len(got) < len(body):
            got += await other.receive(262_144)
    assert bytes(got) == body[:-1] + b"y"
