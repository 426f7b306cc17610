"""Several processes on one mailbox file: killed at any instant, woken by one another, forked."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import anyio
import apsw
import pytest

from mainspring.mailbox.limiters import Blocks, LimitChange, TaskLimits
from mainspring.mailbox.message import Counts
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("sqlite_program.py")


class Process:
    """One run of the program; a thread collects what it says."""

    def __init__(self, verb: str, path: str) -> None:
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._silent = False
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), verb, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self._silent = True
            self._said.notify_all()

    def wait_for(self, count: int, word: str = "", seconds: float = 60.0) -> None:
        """Until it has said ``count`` lines that begin with ``word``."""

        def enough() -> bool:
            return sum(line.startswith(word) for line in self.lines) >= count

        with self._said:
            self._said.wait_for(lambda: enough() or self._silent, seconds)
            if not enough():
                ended = f"it ended: {self.process.stderr.read()[-2000:]}" if self._silent else "it runs"
                pytest.fail(f"said {self.lines[-5:]}; {ended}")

    def kill(self) -> list[str]:
        self.process.kill()
        return self.ended()

    def ended(self) -> list[str]:
        self.process.wait(60)
        self._reader.join(60)
        assert self.process.stderr is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.stderr.close()
        return self.lines


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "mail.db")


@pytest.fixture
def start(path):
    started = []

    def starter(verb):
        process = Process(verb, path)
        started.append(process)
        return process

    yield starter
    for process in started:
        process.kill()


def bells(path):
    """The sockets of the processes that wait on the file."""
    return os.listdir(path + "-wake") if os.path.isdir(path + "-wake") else []


def test_sigkill_at_any_instant_loses_nothing(path, start):
    """What a sender was told is sent is in the store, or some worker had it; and each message is in one place."""
    chance = random.Random(5)
    lines: list[str] = []
    for _ in range(4):
        last = start("send")  # so that the workers have something to say when the other senders are dead
        senders = [start("send") for _ in range(2)]
        workers = [start("work") for _ in range(2)]
        for process in chance.sample(senders + workers, 4):
            process.wait_for(chance.randrange(20, 400))
            lines += process.kill()
        lines += last.kill()

    said = Counter(line.split()[0] for line in lines)
    sent = [line.split()[1] for line in lines if line.startswith("sent ")]
    got = {line.split()[1] for line in lines if line.startswith("got ")}
    done = [line.split()[1] for line in lines if line.startswith("done ")]
    assert min(said["sent"], said["done"]) > 50, said
    assert len(set(sent)) == len(sent)
    assert len(set(done)) == len(done), "a message was acknowledged twice"

    connection = apsw.Connection(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    places = Counter(
        seq
        for table in ("ready", "delayed", "leases")
        for (seq,) in connection.execute(f"SELECT seq FROM {table}").fetchall()
    )
    stored = dict(connection.execute("SELECT seq, id FROM messages").fetchall())
    assert places == dict.fromkeys(stored, 1), "a message is in no place, or in two"
    ids = set(stored.values())
    assert len(ids) == len(stored)
    assert set(sent) <= ids | got, "an acknowledged send is lost"
    assert not ids & set(done), "an acknowledged message is still there"
    [counted] = connection.execute(
        "SELECT delayed, pending, in_flight, settled, dead FROM mailboxes WHERE id"
    ).fetchall()
    connection.close()
    assert counted[0] == counted[4] == 0
    assert counted[1] + counted[2] == len(stored)
    assert counted[3] >= len(done)


@pytest.mark.anyio
async def test_after_the_killing_the_work_goes_on(path, start, anyio_backend):
    worker = start("work")
    sender = start("send")
    worker.wait_for(100, "done")
    worker.kill()
    sender.kill()
    async with SQLiteMailbox(path, name="jobs") as mailbox:
        while (counts := await mailbox.counts()).waiting:  # the leases of the dead end, and nothing stays behind
            for message in await mailbox.receive(max_messages=1_000, wait_time_seconds=5):
                await message.acknowledge()
        assert counts.settled >= 100


HELD_BACK = """SELECT m.key, m.seq, (SELECT min(seq) FROM messages AS f WHERE f.key = m.key)
    FROM leases AS l JOIN messages AS m USING (seq)"""


@pytest.mark.anyio
async def test_limits_hold_while_workers_are_killed(path, start, anyio_backend):
    """At no instant are more in flight than may be, or others of a key than its first; and no permit is lost by a kill."""
    chance = random.Random(7)
    keys, of_each = 9, 60
    async with SQLiteMailbox(path, name="jobs") as mailbox:
        strict = TaskLimits(concurrency=5, key_concurrency=1, blocks=Blocks.RETRY)
        await mailbox.backend.change_limits([LimitChange("t", strict)])
        envelopes = [mailbox.prepare(number) for number in range(keys * of_each)]
        for number, envelope in enumerate(envelopes):
            envelope.task, envelope.key = "t", str(number % keys)
        await mailbox.send_prepared(envelopes)
        workers = [start("work") for _ in range(3)]
        connection = apsw.Connection(path)
        kills, seen, killed_at = 0, 0, 0
        with anyio.fail_after(120):
            while (counts := await mailbox.counts()).settled < len(envelopes):
                in_flight = connection.execute(HELD_BACK).fetchall()
                seen = max(seen, len(in_flight))
                assert len(in_flight) <= 5
                assert len({key for key, _, _ in in_flight}) == len(in_flight), "two of one key are in flight"
                assert all(seq == first for _, seq, first in in_flight), (
                    "a message came before an earlier one of its key"
                )
                if kills < 6 and in_flight and counts.settled >= killed_at:
                    kills += 1
                    killed_at = counts.settled + 20
                    workers.pop(chance.randrange(3)).kill()
                    workers.append(start("work"))
        for worker in workers:
            worker.kill()
        assert (kills, await mailbox.counts()) == (6, Counts(settled=len(envelopes)))
        assert seen == 5
        (state,) = await mailbox.backend.limits()
        assert (state.running, state.waiting) == (0, 0)
    assert connection.execute("SELECT count(*) FROM limiters").fetchall() == [(0,)]
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["wait", "look"])
async def test_a_send_wakes_a_long_poll_of_another_process(path, start, verb, anyio_backend):
    """By the bell alone (it looks every hour), and by looking alone (it has no bell)."""
    async with SQLiteMailbox(path, name="jobs") as mailbox:
        other = start(verb)
        await anyio.to_thread.run_sync(other.wait_for, 1, "ready")
        if verb == "wait":
            with anyio.fail_after(60):
                while not bells(path):
                    await anyio.sleep(0.001)
        for count in range(1, 4):
            sent = await mailbox.send("job")
            await anyio.to_thread.run_sync(other.wait_for, count, "done")
            assert other.lines[-1] == f"done {sent}"
        assert await mailbox.counts() == Counts(settled=3)


@pytest.mark.anyio
async def test_the_bell_of_a_dead_process_is_removed(path, start, anyio_backend):
    async with SQLiteMailbox(path, name="jobs") as mailbox:
        other = start("wait")
        await anyio.to_thread.run_sync(other.wait_for, 1, "ready")
        await mailbox.send("job")
        await anyio.to_thread.run_sync(other.wait_for, 1, "done")
        with anyio.fail_after(60):
            while not bells(path):
                await anyio.sleep(0.001)
        other.kill()
        assert len(bells(path)) == 1
        await mailbox.send("nobody is there")
        assert bells(path) == []


def test_a_forked_child_is_told_not_to_use_the_file(start):
    lines = start("fork").ended()
    assert len(lines) == 4, lines
    assert all("must not be used across a fork" in line for line in lines[:3])
    assert [line.split()[0] for line in lines] == ["old", "new", "asked", "parent"]
    assert lines[3] == "parent 1"
