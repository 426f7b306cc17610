"""Many mailbox files in one process: few threads and connections serve them, and none waits for another."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from contextlib import AsyncExitStack, closing
from functools import partial

import anyio
import apsw
import pytest

from mainspring.core.state_machine import MailboxState
from mainspring.mailbox.message import Counts
from mainspring.mailbox.sqlite import schema as sql
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from mainspring.mailbox.sqlite.notifier import ReceivedNotifications
from mainspring.mailbox.sqlite.threads import KEPT, WRITERS

pytestmark = pytest.mark.anyio

MANY = KEPT + 40
LOCKED = 80


@pytest.fixture
async def many(tmp_path, anyio_backend):
    """Mailboxes on a file each."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(SQLiteMailbox(tmp_path / f"{n}.db", name="jobs")) for n in range(MANY)]


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("mainspring sqlite")]


def open_files(folder):
    """The databases among the files that this process has open."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # that of the directory itself
            continue
    return [path for path in found if path.startswith(str(folder)) and path.endswith(".db")]


async def until(condition, seconds=60):
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.005)


async def test_many_files_have_few_threads_and_connections_and_lose_nothing(many, tmp_path):
    async with anyio.create_task_group() as tasks:
        for number, mailbox in enumerate(many):
            tasks.start_soon(mailbox.send, number)
    assert len(threads()) < MANY / 4
    await until(lambda: len(open_files(tmp_path)) <= KEPT + WRITERS)
    for number, mailbox in enumerate(many):
        (message,) = await mailbox.receive()
        assert message.body == number
        await message.acknowledge()
        assert await mailbox.counts() == Counts(settled=1)


async def test_of_many_files_that_are_opened_no_more_than_are_kept_are_open_at_a_time(tmp_path, anyio_backend):
    mailboxes = [SQLiteMailbox(tmp_path / f"{number}.db") for number in range(MANY)]
    end, most = anyio.Event(), 0

    async def use(mailbox):
        async with mailbox:
            await end.wait()

    async with anyio.create_task_group() as tasks:
        for mailbox in mailboxes:
            tasks.start_soon(use, mailbox)
        while any(mailbox.state is not MailboxState.OPEN for mailbox in mailboxes):
            await anyio.sleep(0.001)
            most = max(most, len(open_files(tmp_path)))
        end.set()
    assert most <= KEPT + 10  # one more for each thread


async def test_files_that_rest_are_whole_once_they_are_closed(tmp_path, anyio_backend):
    async with AsyncExitStack() as stack:
        for number in range(MANY):
            mailbox = await stack.enter_async_context(SQLiteMailbox(tmp_path / f"{number}.db"))
            await mailbox.send(number)
    assert sorted(os.listdir(tmp_path)) == sorted(f"{number}.db" for number in range(MANY))
    for number in range(MANY):
        with closing(apsw.Connection(str(tmp_path / f"{number}.db"))) as connection:
            assert connection.execute("SELECT count(*) FROM messages").fetchall() == [(1,)]


async def test_the_file_that_was_used_last_is_the_one_that_stays_open(tmp_path, anyio_backend, monkeypatch):
    """Also if it was used again in the very turn in which it was to rest."""
    monkeypatch.setattr("mainspring.mailbox.sqlite.threads.KEPT", 1)
    first, second = (SQLiteMailbox(tmp_path / f"{number}.db") for number in range(2))
    async with first, second:
        for _ in range(50):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first.send, "x")
                tasks.start_soon(second.send, "y")
            await second.send("z")
            await until(lambda: open_files(tmp_path) == [second.path], seconds=10)


@pytest.mark.slow
async def test_a_receive_on_a_file_that_rests_hears_of_its_own_process_and_of_another(many, tmp_path):
    received = []

    async def receive(mailbox):
        (message,) = await mailbox.receive(wait_time_seconds=120)
        received.append((mailbox.path, message.body))

    async with anyio.create_task_group() as tasks:
        for mailbox in many:
            tasks.start_soon(receive, mailbox)
        await until(lambda: all(mailbox.statistics().waiting_receives for mailbox in many))
        await until(lambda: len(open_files(tmp_path)) <= KEPT + WRITERS)
        resting = [mailbox for mailbox in many if mailbox.path not in open_files(tmp_path)]
        await resting[0].send("from here")
        await until(lambda: received == [(resting[0].path, "from here")])
        await anyio.run_process([sys.executable, "-m", "mainspring", "send", resting[1].address, '"from there"'])
        await until(lambda: received[1:] == [(resting[1].path, "from there")])
        tasks.cancel_scope.cancel()


async def test_a_socket_that_was_deleted_is_made_anew(tmp_path, anyio_backend, monkeypatch):
    """By a cleaner of temporary files; until then what other processes send is seen by looking each second."""
    monkeypatch.setattr("mainspring.mailbox.sqlite.threads.INSPECT_EVERY", 0.1)
    sockets = tmp_path / "a.db-wake"
    async with SQLiteMailbox(tmp_path / "a.db") as mailbox, anyio.create_task_group() as tasks:
        received = []

        async def receive():
            while True:
                received.extend(await mailbox.receive(wait_time_seconds=60))

        tasks.start_soon(receive)
        await until(sockets.is_dir)
        shutil.rmtree(sockets)
        await anyio.run_process([sys.executable, "-m", "mainspring", "send", mailbox.address, "1"])
        await until(lambda: received and sockets.is_dir() and os.listdir(sockets))
        tasks.cancel_scope.cancel()


@pytest.mark.slow
async def test_what_becomes_due_in_a_file_that_rests_is_received(many, tmp_path):
    for mailbox in many[1:]:
        await mailbox.send("x")
    await many[0].send("later", delay=5)
    for mailbox in many[1:]:
        await mailbox.counts()  # which waits for no disk
    await until(lambda: many[0].path not in open_files(tmp_path))
    assert await many[0].receive() == []
    with anyio.fail_after(60):
        (message,) = await many[0].receive(wait_time_seconds=60)
    assert message.body == "later"


@pytest.mark.slow
async def test_files_that_are_locked_hold_up_no_other(many):
    """More of them than there are threads."""
    held = [apsw.Connection(mailbox.path) for mailbox in many[:LOCKED]]
    for connection in held:
        connection.execute("BEGIN IMMEDIATE")
    sent = []

    async def send(mailbox):
        sent.append(await mailbox.send("late"))

    async with anyio.create_task_group() as tasks:
        for mailbox in many[:LOCKED]:
            tasks.start_soon(send, mailbox)
        await anyio.sleep(0.05)
        with anyio.fail_after(4):  # less than the locked ones wait
            for mailbox in many[LOCKED:][:20]:
                await mailbox.send("soon")
        assert sent == []
        for connection in held:
            connection.close()
    assert len(sent) == LOCKED


class SlowFile(apsw.VFSFile):
    def __init__(self, held, name, flags):
        super().__init__("unix", name, flags)
        self._held = held

    def xSync(self, flags):
        self._held()
        super().xSync(flags)

    def xClose(self):
        self._held()
        super().xClose()


class SlowFiles(apsw.VFS):
    """Files of which some wait, as they are synced and closed, while ``free`` is not set."""

    def __init__(self, name, slow, makedefault=False):
        super().__init__(name, "unix", makedefault=makedefault)
        self._slow = slow
        self.waits = threading.Event()
        self.free = threading.Event()
        self.free.set()

    def xOpen(self, name, flags):
        path = name if isinstance(name, str) else name.filename()
        return SlowFile(self._wait if self._slow in path else int, name, flags)

    def _wait(self):
        if not self.free.is_set():
            self.waits.set()
            self.free.wait(60)


async def test_a_file_that_hangs_as_it_is_put_to_rest_holds_up_no_other(tmp_path, anyio_backend):
    disk = SlowFiles("slow", "/0.db", makedefault=True)
    try:
        with anyio.fail_after(30):
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(SQLiteMailbox(tmp_path / "0.db"))
                disk.free.clear()
                stack.callback(disk.free.set)
                for number in range(1, KEPT + 10):
                    await stack.enter_async_context(SQLiteMailbox(tmp_path / f"{number}.db"))
                await until(disk.waits.is_set)
    finally:
        disk.free.set()
        disk.unregister()


class CountedFiles(apsw.VFS):
    """The system's files; counts how often a database was opened, and how often a file was written to the disk."""

    def __init__(self):
        super().__init__("counted", "unix", makedefault=True)
        self.opened = self.synced = 0

    def xOpen(self, name, flags):
        self.opened += bool(flags[0] & apsw.SQLITE_OPEN_MAIN_DB)
        return CountedFile(self, name, flags)


class CountedFile(apsw.VFSFile):
    def __init__(self, files, name, flags):
        super().__init__("unix", name, flags)
        self._files = files

    def xSync(self, flags):
        self._files.synced += 1
        super().xSync(flags)


async def test_files_in_which_nothing_was_sent_cost_no_flush_and_are_opened_once(tmp_path, anyio_backend, monkeypatch):
    """What is in a new file at first was on the disk before it had a name."""
    monkeypatch.setattr("mainspring.mailbox.sqlite.threads.KEPT", 1)
    monkeypatch.setattr("mainspring.mailbox.sqlite.threads.INSPECT_EVERY", 0.05)
    files = CountedFiles()
    try:
        async with AsyncExitStack() as stack:
            many = [await stack.enter_async_context(SQLiteMailbox(tmp_path / f"{n}.db")) for n in range(4)]
            await anyio.sleep(0.1)  # until the time of a change tells it from the next one
            tasks = await stack.enter_async_context(anyio.create_task_group())
            for mailbox in many:
                assert await mailbox.receive() == []
            await until(lambda: len(open_files(tmp_path)) == 1)
            before = files.opened
            for mailbox in many:
                tasks.start_soon(partial(mailbox.receive, wait_time_seconds=60))
            await anyio.sleep(0.5)  # several looks at the files
            tasks.cancel_scope.cancel()
        assert (files.opened, files.synced) == (before, 0)
    finally:
        files.unregister()
    assert {name for name in os.listdir(tmp_path) if not name.endswith("-wake")} == {f"{n}.db" for n in range(4)}


async def test_what_is_in_the_log_but_not_committed_is_seen_once_it_is(tmp_path, anyio_backend, monkeypatch):
    """Another process waits for the disk in its COMMIT, and its notification is lost."""
    monkeypatch.setattr("mainspring.mailbox.sqlite.threads.INSPECT_EVERY", 0.1)
    disk = SlowFiles("slow", "-wal")
    received = []
    try:
        async with SQLiteMailbox(tmp_path / "a.db") as mailbox, anyio.create_task_group() as tasks:
            await mailbox.send("x")
            (held,) = await mailbox.receive()

            async def receive():
                received.extend(await mailbox.receive(wait_time_seconds=60))

            tasks.start_soon(receive)
            await until(lambda: mailbox.statistics().waiting_receives)
            with closing(apsw.Connection(mailbox.path, vfs="slow")) as other:
                other.execute("PRAGMA synchronous = full; BEGIN IMMEDIATE")
                other.execute(sql.UNLEASE, (f"[{held.receipt_handle}]", 1))
                other.execute("DELETE FROM leases; UPDATE mailboxes SET in_flight = 0, pending = 1 WHERE id = 1")
                disk.free.clear()
                commit = threading.Thread(target=other.execute, args=("COMMIT",))
                commit.start()
                await until(disk.waits.is_set)
                await anyio.sleep(0.5)  # several looks at the file
                assert received == []
                disk.free.set()
                commit.join()
                await until(lambda: received)
    finally:
        disk.free.set()
        disk.unregister()


async def test_a_file_that_is_being_made_has_no_name_yet(tmp_path, anyio_backend, monkeypatch):
    """So a process that is killed meanwhile leaves nothing."""
    names = []
    fsync = os.fsync

    def note(descriptor):
        names.append(os.listdir(tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    async with SQLiteMailbox(tmp_path / "a.db"):
        assert names == [[]]


async def test_a_file_is_made_where_the_file_system_makes_none_without_a_name(tmp_path, anyio_backend, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "link", refuse)
    async with SQLiteMailbox(tmp_path / "a.db") as mailbox:
        await mailbox.send("x")
    assert os.listdir(tmp_path) == ["a.db"]


async def test_a_log_beside_a_file_that_is_gone_is_not_taken_for_that_of_a_new_one(tmp_path, anyio_backend):
    async with SQLiteMailbox(tmp_path / "old.db") as mailbox:
        await mailbox.send("old")
        shutil.copy(f"{mailbox.path}-wal", tmp_path / "new.db-wal")
    async with SQLiteMailbox(tmp_path / "new.db") as mailbox:
        assert await mailbox.counts() == Counts()
        await mailbox.send("new")


@pytest.mark.slow
async def test_a_new_file_is_made_by_one_of_several_processes_at_once(tmp_path, anyio_backend):
    url = f"sqlite:///{tmp_path}/new.db?name=jobs"
    send = partial(anyio.run_process, [sys.executable, "-m", "mainspring", "send", url, "1"])
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(send)
    assert os.listdir(tmp_path) == ["new.db"]
    async with SQLiteMailbox(tmp_path / "new.db", name="jobs") as mailbox:
        assert (await mailbox.counts()).pending == 4


def test_notifications_of_this_and_of_earlier_releases():
    received = ReceivedNotifications()
    received.add(b"! 12-abc")
    received.add(b"7 the-id")
    assert (received.names, received.cancelled, received.unknown) == ({"12-abc"}, [(7, "the-id")], False)
    received.add(b"!")  # it does not say of which file
    assert received.unknown


@pytest.mark.parametrize("call", ["makedirs", "link", "unlink"])
async def test_a_disk_that_hangs_beside_a_file_holds_up_no_other(tmp_path, anyio_backend, monkeypatch, call):
    """Nor the event loop, as listening begins or ends."""
    monkeypatch.setattr("mainspring.mailbox.sqlite.threads.INSPECT_EVERY", 0.05)
    monkeypatch.setattr("mainspring.mailbox.sqlite.shared_file.INSPECT_EVERY", 0.05)
    armed, hangs, free = threading.Event(), threading.Event(), threading.Event()
    received = []
    real = getattr(os, call)

    def hang(*arguments, **options):
        if any("/hung.db" in str(argument) for argument in arguments) and armed.is_set():
            hangs.set()
            free.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, hang)

    async def receive():
        received.extend(await third.receive(wait_time_seconds=60))

    async with (
        SQLiteMailbox(tmp_path / "a.db") as other,
        SQLiteMailbox(tmp_path / "b.db") as third,
        SQLiteMailbox(tmp_path / "hung.db") as hung,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(receive)
        await until(lambda: os.path.isdir(tmp_path / "b.db-wake"))
        if call == "unlink":
            await hung.receive(wait_time_seconds=0.01)
        armed.set()
        if call in {"makedirs", "link"}:
            tasks.start_soon(partial(hung.receive, wait_time_seconds=60))
        try:
            await until(hangs.is_set)
            with anyio.fail_after(20):
                for number in range(3):
                    await other.send(number)
                    await other.receive(wait_time_seconds=1)
                await other.receive(wait_time_seconds=0.01)
                await anyio.run_process([sys.executable, "-m", "mainspring", "send", third.address, '"from there"'])
                await until(lambda: received, 10)
        finally:
            free.set()
        tasks.cancel_scope.cancel()
