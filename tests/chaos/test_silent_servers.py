"""A server that does not answer any more, though its connections stay: what a worker with nothing in hand makes of it."""

from __future__ import annotations

import os
from functools import partial
from random import Random
from urllib.parse import urlsplit

import anyio
import pytest
from chaos_proxy import Proxy

from mainspring import LoopGroup, MainLoop, open_mailbox

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def handle(job: dict) -> None: ...


@pytest.mark.loops("asyncio")
async def test_an_idle_worker_ends_clean_and_soon(anyio_backend, redis_url, postgres_url):
    """It has nothing to lose; what its mailboxes have out, each at once, the server may answer or not."""

    async def run(url, count):
        parts = urlsplit(url)
        proxy = Proxy(parts.port)
        async with anyio.create_task_group() as tasks:
            await tasks.start(proxy.serve)
            through = url.replace(f":{parts.port}", f":{proxy.port}")
            names = [f"silent-{os.getpid()}-{number}" for number in range(count)]
            loops = [MainLoop(open_mailbox(through, name=name), handle, name=name) for name in names]
            async with LoopGroup(loops, guardian=False) as group:
                await anyio.sleep(0.1)
                tasks.start_soon(partial(proxy.stall, 1.0, 60, Random(1)))
                await anyio.sleep(1.2)  # a look is out by then
                await group.shutdown()
            assert group.report.exit_status == 0, str(group.report)
            assert group.report.duration < 5
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as both:
        both.start_soon(run, redis_url, 7)
        both.start_soon(run, postgres_url, 1)
