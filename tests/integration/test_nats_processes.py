"""The NATS mailbox when a worker is killed, and when the server goes away and comes back."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from mainspring import MainLoop, Message
from mainspring.errors import MailboxConnectionError, ReceiptHandleExpiredError
from mainspring.mailbox.message import Counts
from mainspring.mailbox.nats import scheduler as nats_recovery
from mainspring.mailbox.nats.mailbox import NatsMailbox
from nats_support import place
from servers import NatsServer
from stopwatch import Stopwatch

PROGRAM = Path(__file__).with_name("nats_program.py")
pytestmark = [pytest.mark.anyio, pytest.mark.loops("asyncio", "uvloop"), pytest.mark.slow]


async def send_until_it_fails(box):
    with anyio.fail_after(60):
        while True:
            await box.send(99)


@pytest.mark.parametrize("ack_wait", [60.0, 3.0], ids=["lease set by a nak", "lease of the ack wait"])
async def test_a_killed_workers_message_comes_when_its_lease_ends(nats_url, anyio_backend, ack_wait):
    lease = 3.0
    async with place(nats_url) as here, here.box(ack_wait=ack_wait) as box:
        await box.send("x")
        worker = subprocess.Popen(
            [sys.executable, str(PROGRAM), nats_url, box.name, str(lease)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert worker.stdout is not None
            leased_at = float(await anyio.to_thread.run_sync(worker.stdout.readline))
        finally:
            worker.kill()
            worker.communicate()
        with Stopwatch() as watch:
            (message,) = await box.receive(visibility_timeout=lease, wait_time_seconds=30)
        assert time.time() - leased_at >= lease
        assert watch.seconds <= lease + 1.0
        assert (message.delivery_count, message.attempt) == (2, 2)
        await message.acknowledge()
        assert await box.counts() == Counts(settled=1)


async def test_handlers_go_on_while_the_server_is_away(anyio_backend):
    """A handler at work when the server is killed ends as if nothing had been; nothing sent is lost."""
    started, proceed = anyio.Event(), anyio.Event()
    runs = []

    async def handle(job: int) -> None:
        runs.append(job)
        if job == 0:
            started.set()
            await proceed.wait()

    with NatsServer() as server:
        assert isinstance(server, NatsServer)
        async with NatsMailbox(server.url, name="jobs", timeout=2.0) as box:
            await box.send_many(range(5))
            loop = MainLoop(box, handle, concurrency=1, visibility_timeout=60, wait_time_seconds=30)
            async with anyio.create_task_group() as group:
                group.start_soon(loop.run)
                await started.wait()
                await anyio.to_thread.run_sync(server.stop, signal.SIGKILL)
                with pytest.raises(MailboxConnectionError):
                    await send_until_it_fails(box)
                await anyio.to_thread.run_sync(server.start)
                proceed.set()
                counts, error = Counts(), None
                with anyio.move_on_after(60):
                    while counts.waiting or counts.settled < 5:
                        try:
                            counts = await box.counts()
                        except MailboxConnectionError as failed:
                            error = failed
                        await anyio.sleep(0.1)
                said = (server.directory / "output").read_text(errors="replace")[-2_000:]
                assert not counts.waiting, f"{counts}, {error!r}, {box.statistics()}, {said}"
                assert counts.settled >= 5, f"{counts}, {error!r}, {box.statistics()}, {said}"
                await loop.shutdown()
    assert runs[:5] == [0, 1, 2, 3, 4]


async def test_a_waiting_receive_hears_that_the_connection_is_lost_and_the_next_one_works(anyio_backend):
    with NatsServer() as server:
        assert isinstance(server, NatsServer)
        async with NatsMailbox(server.url, name="jobs", timeout=2.0) as box:
            async with anyio.create_task_group() as group:

                async def wait():
                    with pytest.raises(MailboxConnectionError, match="lost"), anyio.fail_after(10):
                        await box.receive(wait_time_seconds=60)

                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await anyio.to_thread.run_sync(server.stop, signal.SIGKILL)
            await anyio.to_thread.run_sync(server.start)
            with anyio.fail_after(60):
                while True:
                    try:
                        await box.send("back")
                        break
                    except MailboxConnectionError:
                        await anyio.sleep(0.1)
                (message,) = await box.receive(wait_time_seconds=10)
            assert message.body == "back"


async def test_what_a_killed_server_has_forgotten_to_remove_is_removed(anyio_backend, monkeypatch):
    """It has answered that a message is gone and not written it down: such a one is not pending for ever afterwards."""

    async def acknowledge(message: Message) -> None:
        with suppress(ReceiptHandleExpiredError):  # on a busy machine: it comes again
            await message.acknowledge()

    monkeypatch.setattr(nats_recovery, "EVERY", 2.0)
    with NatsServer() as server:
        assert isinstance(server, NatsServer)
        async with NatsMailbox(server.url, name="jobs", timeout=2.0, ack_wait=1.0) as box:
            await box.send_many(range(2_000))
            for _ in range(19):
                messages = await box.receive(max_messages=100, visibility_timeout=1.0)
                async with anyio.create_task_group() as group:
                    for message in messages:
                        group.start_soon(acknowledge, message)
            await anyio.to_thread.run_sync(server.stop, signal.SIGKILL)
            await anyio.to_thread.run_sync(server.start)
            with anyio.fail_after(45):
                while True:
                    try:
                        for message in await box.receive(max_messages=100, visibility_timeout=1.0):
                            await acknowledge(message)
                        counts = await box.counts()
                    except MailboxConnectionError:
                        counts = None
                    if counts is not None and not counts.waiting:
                        break
                    await anyio.sleep(0.1)
        assert counts == Counts(settled=counts.settled)
