"""An event loop that anyio did not start, as a web server's: nothing that is due may come late on it.

Where sniffio is installed (trio brings it), anyio cannot tell in a bare callback of such a loop what it runs on.
"""

from __future__ import annotations

import asyncio

import anyio
import pytest
import trio

from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from mainspring.runtime.interval import Periodic


@pytest.fixture(params=[asyncio.run, trio.run], ids=["asyncio", "trio"])
def run(request):
    """Runs an async function without ``anyio.run``."""
    return (lambda fn: asyncio.run(fn())) if request.param is asyncio.run else request.param


def test_a_delayed_message_wakes_the_receive_that_waits_for_it(run, tmp_path):
    async def scenario():
        async with SQLiteMailbox(tmp_path / "mail.db") as mailbox:

            async def receive():
                received.extend(await mailbox.receive(wait_time_seconds=30))

            received = []
            with anyio.fail_after(10):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(receive)
                    while not mailbox.statistics().waiting_receives:
                        await anyio.sleep(0.001)
                    await mailbox.send("later", delay=0.2)
            assert [message.body for message in received] == ["later"]

    run(scenario)


def test_a_lease_that_ends_wakes_the_receive_that_waits_for_it(run, tmp_path):
    async def scenario():
        async with SQLiteMailbox(tmp_path / "mail.db") as mailbox:
            await mailbox.send("again")
            await mailbox.receive(visibility_timeout=0.2)
            with anyio.fail_after(10):
                (message,) = await mailbox.receive(wait_time_seconds=30)
            assert message.attempt == 2

    run(scenario)


def test_periodic_can_be_woken_by_a_bare_callback():
    async def scenario():
        called = anyio.Event()

        async def step(overslept):
            called.set()
            return float("inf")

        periodic = Periodic(step)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(periodic.run)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            loop.call_soon(periodic.wake_by, loop.time())
            with anyio.fail_after(10):
                await called.wait()
            tasks.cancel_scope.cancel()

    asyncio.run(scenario())
