"""Run by test_sqlite_processes: one process that uses a mailbox file, and says on standard output what it was told."""

from __future__ import annotations

import os
import sys

import anyio

from mainspring.errors import ConfigError
from mainspring.mailbox.sqlite import notifier as sqlite_notifier
from mainspring.mailbox.sqlite import shared_file, threads
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox


def say(*words: object) -> None:
    os.write(1, (" ".join(str(word) for word in words) + "\n").encode())  # one write: a kill leaves whole lines


async def send(path: str) -> None:
    """Twenty senders without end; each id is said once ``send`` has returned it."""
    async with SQLiteMailbox(path, name="jobs") as mailbox, anyio.create_task_group() as tasks:

        async def sender() -> None:
            while True:
                say("sent", await mailbox.send({"text": "x" * 200}))

        for _ in range(20):
            tasks.start_soon(sender)


async def work(path: str) -> None:
    """Receive and acknowledge without end; each id is said before its acknowledgement, and after."""
    async with SQLiteMailbox(path, name="jobs") as mailbox:
        while True:
            messages = await mailbox.receive(max_messages=10, visibility_timeout=1, wait_time_seconds=5)

            async with anyio.create_task_group() as tasks:
                for message in messages:
                    say("got", message.id)
                    tasks.start_soon(finish, message)


async def finish(message) -> None:
    try:
        await message.acknowledge()
    except Exception as error:
        say("lost", message.id, type(error).__name__)
    else:
        say("done", message.id)


async def wait(path: str) -> None:
    """One long poll after the other, which only the bell can wake in time."""
    threads.INSPECT_EVERY = 3_600.0
    await _poll(path)


async def look(path: str) -> None:
    """One long poll after the other, without a bell."""
    sqlite_notifier.NotificationListener.add = lambda self, directory: ""
    await _poll(path)


async def _poll(path: str) -> None:
    async with SQLiteMailbox(path, name="jobs") as mailbox:
        say("ready")
        while True:
            for message in await mailbox.receive(wait_time_seconds=3_600):
                await message.acknowledge()
                say("done", message.id)


async def fork(path: str) -> None:
    """Open the file, fork, and use it in the child: through the same mailbox, and through a new one."""
    async with SQLiteMailbox(path, name="jobs") as mailbox:
        await mailbox.send(1)
        child = os.fork()
        if child == 0:
            try:
                mailbox.backend._shared.submit(None)
            except ConfigError as error:
                say("old", error)
            try:
                shared_file.SharedFile.shared(os.path.realpath(path))
            except ConfigError as error:
                say("new", error)
            try:
                await SQLiteMailbox(path).backend.exists()  # past what looks for the event loop, which is the parent's
            except ConfigError as error:
                say("asked", error)
            os._exit(0)
        os.waitpid(child, 0)
        say("parent", (await mailbox.counts()).pending)


if __name__ == "__main__":
    anyio.run({"send": send, "work": work, "wait": wait, "look": look, "fork": fork}[sys.argv[1]], sys.argv[2])
