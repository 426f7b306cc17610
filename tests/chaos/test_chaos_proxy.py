"""The proxy of chaos: it passes on, cuts, stalls, and has nothing to offer where there is no server."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from anyio.abc import SocketAttribute
from chaos_proxy import Proxy

from ports import free_port

pytestmark = pytest.mark.anyio
GONE = (anyio.EndOfStream, anyio.BrokenResourceError)


@asynccontextmanager
async def echoing():
    """A proxy before a server that says everything back."""

    async def echo(stream):
        async with stream:
            with suppress(*GONE):
                while True:
                    await stream.send(await stream.receive())

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, echo)
        proxy = Proxy(listener.extra(SocketAttribute.local_port))
        await tasks.start(proxy.serve)
        with anyio.fail_after(30):
            yield proxy
        tasks.cancel_scope.cancel()


async def connect(proxy):
    return await anyio.connect_tcp("127.0.0.1", proxy.port)


async def said_back(stream, data=b"x"):
    await stream.send(data)
    return await stream.receive()


async def all_there(proxy, count):
    while len(proxy) != count:
        await anyio.sleep(0.01)


async def test_it_passes_bytes_on_and_ends_with_either_side(anyio_backend):
    async with echoing() as proxy:
        async with await connect(proxy) as stream:
            assert await said_back(stream, b"over") == b"over"
            assert len(proxy) == 1
        await all_there(proxy, 0)


@pytest.mark.parametrize("seed", range(6))  # by a reset, and by an end
async def test_a_cut_ends_connections_and_lets_new_ones_in(seed, anyio_backend):
    async with echoing() as proxy:
        async with await connect(proxy) as stream:
            await said_back(stream)
            assert await proxy.cut(1.0, random.Random(seed)) == 1
            with pytest.raises(GONE):
                await stream.receive()
        await all_there(proxy, 0)
        async with await connect(proxy) as again:
            assert await said_back(again) == b"x"


async def test_a_cut_takes_its_share(anyio_backend):
    async with echoing() as proxy:
        streams = [await connect(proxy) for _ in range(20)]
        await all_there(proxy, 20)
        cut = await proxy.cut(0.5, random.Random(1))
        assert 0 < cut < 20
        await all_there(proxy, 20 - cut)
        for stream in streams:
            await stream.aclose()


async def test_a_stall_holds_everything_back_and_loses_nothing(anyio_backend):
    async with echoing() as proxy, await connect(proxy) as before, anyio.create_task_group() as tasks:
        await said_back(before)
        stalled = anyio.CancelScope()

        async def stall():
            with stalled:
                await proxy.stall(1.0, 60, random.Random(1))

        tasks.start_soon(stall)
        await anyio.wait_all_tasks_blocked()
        async with await connect(proxy) as meanwhile:
            for stream in (before, meanwhile):
                await stream.send(b"later")
                with anyio.move_on_after(0.2) as held:
                    await stream.receive()
                assert held.cancelled_caught
            stalled.cancel()
            assert await before.receive() == b"later"
            assert await meanwhile.receive() == b"later"


async def test_a_stalled_connection_can_be_cut(anyio_backend):
    async with echoing() as proxy, await connect(proxy) as stream, anyio.create_task_group() as tasks:
        await said_back(stream)
        tasks.start_soon(proxy.stall, 1.0, 60, random.Random(1))
        await anyio.wait_all_tasks_blocked()
        await stream.send(b"never")
        await proxy.cut(1.0, random.Random(1))
        with pytest.raises(GONE):
            await stream.receive()
        tasks.cancel_scope.cancel()


async def test_without_a_server_a_connection_ends(anyio_backend):
    proxy = Proxy(free_port())
    async with anyio.create_task_group() as tasks:
        await tasks.start(proxy.serve)
        with anyio.fail_after(30):
            async with await connect(proxy) as stream:
                with pytest.raises(GONE):
                    await stream.receive()
        tasks.cancel_scope.cancel()
