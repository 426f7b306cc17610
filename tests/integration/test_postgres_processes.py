"""The PostgreSQL mailbox with real processes: workers that are killed, and a server that is."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import anyio
import pytest

from mainspring import MailboxConnectionError
from mainspring.mailbox.message import Counts
from postgres_support import Place, drop_schema, new_schema
from restarts import goes_on_after_a_restart
from servers import PATIENCE, PostgresServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("postgres_program.py")
MESSAGES = 600
KILLS = 8


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def server():
    with PostgresServer("autovacuum=off") as own:
        yield own


class Workers:
    """Worker processes, each with a file for what it says."""

    def __init__(self, place, folder):
        self.place = place
        self.folder = folder
        self.running = []
        self.started = 0

    def start(self):
        self.started += 1
        with (self.folder / f"{self.started}").open("wb") as output:
            command = [sys.executable, str(PROGRAM), self.place.url, self.place.schema]
            self.running.append(subprocess.Popen(command, stdout=output))

    def kill(self, process):
        process.kill()
        process.wait()
        self.running.remove(process)

    def begun(self):
        lines = [line for path in self.folder.iterdir() for line in path.read_text().splitlines()]
        return [int(line.split()[1]) for line in lines]


async def test_effects_happen_once_though_workers_are_killed(postgres_url, tmp_path):
    """Each message's effect is there exactly once, although many were begun more than once."""
    place = Place(postgres_url, new_schema())
    workers = Workers(place, tmp_path)
    chance = random.Random(7)
    try:
        async with place.mailbox() as mailbox:
            place.execute("CREATE TABLE SCHEMA.effects (job integer)")
            await mailbox.send_many(range(MESSAGES))
            for _ in range(3):
                workers.start()
            for kill in range(1, KILLS + 1):
                with anyio.fail_after(60):
                    while len(workers.begun()) < MESSAGES * kill / (KILLS + 2):
                        await anyio.sleep(0.01)
                workers.kill(chance.choice(workers.running))
                workers.start()
            with anyio.fail_after(60):
                while (await mailbox.counts()).waiting:
                    await anyio.sleep(0.05)
            counts = await mailbox.counts()
        effects = Counter(job for (job,) in place.execute("SELECT job FROM SCHEMA.effects"))
        begun = Counter(workers.begun())
        assert counts == Counts(settled=MESSAGES)
        assert effects == Counter(range(MESSAGES))
        assert sum(begun.values()) > MESSAGES, "no kill hit a handler: the test shows nothing"
    finally:
        for process in list(workers.running):
            workers.kill(process)
        drop_schema(postgres_url, place.schema)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
async def test_a_restart_loses_nothing_and_harms_no_handler(server, how):
    await goes_on_after_a_restart(server, Place(server.url, new_schema()).mailbox(body=int), how)


async def test_what_was_sent_survives_the_servers_kill(server):
    """Every id that send returned is there after SIGKILL of the whole server, in flight or pending."""
    place = Place(server.url, new_schema())
    sent: list[str] = []
    async with place.mailbox() as mailbox:

        async def send():
            try:
                while True:
                    sent.append(await mailbox.send("x"))
            except MailboxConnectionError:
                pass

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(send)
            with anyio.fail_after(PATIENCE):
                while len(sent) < 500:
                    await anyio.sleep(0.005)
            server.stop(signal.SIGKILL)
        server.start()
        found: list[str] = []
        with anyio.fail_after(PATIENCE):
            while True:
                try:
                    batch = await mailbox.receive(max_messages=1_000)
                except MailboxConnectionError:
                    await anyio.sleep(0.05)
                    continue
                if not batch:
                    break
                found += [message.id for message in batch]
    assert len(sent) >= 500
    assert set(sent) <= set(found)
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("name", "needs", "prints"),
    [
        ("orders.py", "psycopg", "shipped 1 times\n"),
        ("shop.py", "asyncpg", "shipped 1 times\n"),
        ("plain_shop.py", "psycopg2", "1 order, 1 message\nshipped 1 times\n"),
        ("asyncpg_shop.py", "asyncpg", "shipped 1 times\n"),
        ("django_shop.py", "django", "2 calls\nshipped 2\n"),
    ],
)
async def test_the_examples_of_the_how_to(postgres_url, tmp_path, name, needs, prints):
    """The page's programs, as they stand there."""
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    page = Path(__file__).parents[2] / "docs" / "how-to" / "postgres.md"
    program = page.read_text(encoding="utf-8").partition(f'```python title="{name}"\n')[2].partition("```")[0]
    (tmp_path / name).write_text(program)
    schema = new_schema()
    try:
        ran = await anyio.run_process(
            [sys.executable, name],
            cwd=tmp_path,
            env={**os.environ, "DATABASE_URL": f"{postgres_url}?schema={schema}"},
            check=False,
        )
    finally:
        drop_schema(postgres_url, schema)
    assert (ran.returncode, ran.stdout.decode()) == (0, prints), ran.stderr.decode()
