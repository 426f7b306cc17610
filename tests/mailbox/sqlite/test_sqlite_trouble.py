"""Files that cannot be used, and trouble that comes and goes: one clear error, nothing lost, and then it works again."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import socket
import sys
import threading
from functools import partial

import anyio
import apsw
import pytest

from mainspring.core import clock
from mainspring.errors import ConfigError, MailboxConnectionError, MailboxError, SerializationError
from mainspring.mailbox.message import Ack, Counts, Envelope
from mainspring.mailbox.sqlite import schema as sql
from mainspring.mailbox.sqlite.connection import check_sqlite
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from mainspring.mailbox.sqlite.threads import Writers
from support import outcomes

pytestmark = pytest.mark.anyio


@pytest.fixture
async def mailbox(path, anyio_backend):
    async with SQLiteMailbox(path, name="jobs", busy_timeout=0.2) as made:
        yield made


async def refused(path, kind, says, **options):
    """Opening raises ``kind``, in one line."""
    with pytest.raises(kind, match=re.escape(says)) as caught:
        async with SQLiteMailbox(path, **options):
            pass
    assert "\n" not in str(caught.value)


async def works(mailbox):
    await mailbox.send("again")
    assert "again" in [message.body for message in await mailbox.receive(max_messages=100)]


async def threads_end():
    """Wait for them: the writer thread that told us may be on its last line."""
    with anyio.fail_after(60):
        while any("mainspring sqlite" in thread.name for thread in threading.enumerate()):
            await anyio.sleep(0.001)


# ------------------------------------------------------------------------------------------------- cannot be opened


async def test_a_file_that_is_no_database(path, anyio_backend):
    with open(path, "wb") as file:
        file.write(b"This is a letter, and quite a long one. " * 200)
    await refused(path, ConfigError, "is no SQLite database; name another file")


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "link to a pipe"])
async def test_what_is_no_regular_file(path, kind, anyio_backend):
    """It is refused when it is opened, in a moment: SQLite would call some of these busy, for ever."""
    if kind == "device":
        path = "/dev/null"
    elif kind == "directory":
        os.mkdir(path)
    else:
        os.mkfifo(path)
    if kind == "link to a pipe":
        os.symlink(path, f"{path}-link")
        path = f"{path}-link"
    with anyio.fail_after(20):
        await refused(path, ConfigError, "is no regular file; name another one for the mailbox")


async def test_another_programs_database(path, anyio_backend):
    connection = apsw.Connection(path)
    connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    await refused(path, ConfigError, "is the database of another program; name another file")
    connection = apsw.Connection(path)
    assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("theirs",)]


async def test_a_file_in_which_another_process_makes_its_tables_meanwhile(path, anyio_backend):
    """Just when the opening one asks what is in the empty file, another one fills it."""
    fills = []
    open(path, "wb").close()

    def fill(cursor, statement, bindings):
        if "sqlite_schema" in statement and not fills:
            fills.append(apsw.Connection(path))
            with contextlib.suppress(apsw.BusyError):  # then nobody can come in between
                fills[0].execute(f"BEGIN IMMEDIATE; {sql.SCHEMA}")
                fills[0].execute(sql.START, ("another boot", "its id"))
                fills[0].execute("COMMIT")
            fills[0].close()
        return True

    def watch(connection):
        if not fills:
            connection.exec_trace = fill

    apsw.connection_hooks.append(watch)
    try:
        async with SQLiteMailbox(path, name="jobs") as mailbox:
            await works(mailbox)
    finally:
        apsw.connection_hooks.remove(watch)
    assert fills


async def test_a_newer_schema(path, anyio_backend):
    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send("keep me")
    connection = apsw.Connection(path)
    connection.execute(f"PRAGMA user_version = {sql.SCHEMA_VERSION + 1}")
    await refused(path, ConfigError, "was written by a newer Mainspring (schema 8, this one knows 7); upgrade")
    connection.execute(f"PRAGMA user_version = {sql.SCHEMA_VERSION}")
    connection.close()
    async with SQLiteMailbox(path) as mailbox:
        assert [message.body for message in await mailbox.receive()] == ["keep me"]


async def test_no_directory(tmp_path, anyio_backend):
    await refused(tmp_path / "nowhere" / "mail.db", ConfigError, "nowhere first")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_a_directory_without_write_access(tmp_path, anyio_backend):
    tmp_path.chmod(0o500)
    try:
        await refused(tmp_path / "mail.db", MailboxConnectionError, "cannot be")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("left", [0, 1, 2])
async def test_too_few_descriptors_are_left(path, anyio_backend, left):
    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send("opens the file")
        with few_descriptors(left):
            await refused(
                f"{path}-other", MailboxConnectionError, "may open no more files: raise its limit (`ulimit -n`)"
            )
            await works(mailbox)


@contextlib.contextmanager
def few_descriptors(left):
    """Let this process open ``left`` more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_file_that_others_keep_locked(path, anyio_backend):
    async with SQLiteMailbox(path, name="first"):
        pass
    with locked(path):
        await refused(path, MailboxConnectionError, "is locked by another process", name="new", busy_timeout=0.1)
    async with SQLiteMailbox(path, name="new") as mailbox:
        await works(mailbox)


@pytest.mark.parametrize("version", ["3.40.1", "3.51.2"])
def test_a_sqlite_with_the_bug_that_corrupts(version):
    with pytest.raises(ConfigError, match=r"SQLite 3\.51\.3 or newer"):
        check_sqlite(version)
    check_sqlite("3.51.3")
    check_sqlite("4.0.0")


# ---------------------------------------------------------------------------------------------- trouble in between


def locked(path):
    """Another user of the file inside a transaction."""
    connection = apsw.Connection(path)
    connection.execute("BEGIN IMMEDIATE")
    return _Closing(connection)


class _Closing:
    def __init__(self, connection):
        self.connection = connection

    def __enter__(self):
        return self.connection

    def __exit__(self, *exc):
        self.connection.close()


@pytest.mark.slow
async def test_locked_for_too_long(mailbox, path):
    await mailbox.send("before")
    [message] = await mailbox.receive()
    with locked(path):
        for operation in (mailbox.send("during"), mailbox.receive(), message.acknowledge(), mailbox.counts()):
            with pytest.raises(MailboxConnectionError, match=r"is locked by another process for longer than 0\.2 s"):
                await operation
    assert not message.is_settled
    await message.acknowledge()
    assert await mailbox.counts() == Counts(settled=1)


async def test_locked_for_a_moment_is_waited_for(path, anyio_backend):
    async with SQLiteMailbox(path, busy_timeout=30) as mailbox:
        connection = locked(path).connection
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(mailbox.send, "patient")
            await anyio.wait_all_tasks_blocked()
            connection.close()
        assert (await mailbox.counts()).pending == 1


async def test_a_long_poll_hears_of_trouble(mailbox, path):
    with locked(path), pytest.raises(MailboxConnectionError):
        await mailbox.receive(wait_time_seconds=30)


async def test_a_full_disk(connections, mailbox):
    kept = await mailbox.send("kept")
    (connection,) = connections
    connection.pragma("max_page_count", connection.pragma("page_count") + 1)
    with pytest.raises(MailboxConnectionError, match="the disk is full; free some space"):
        await mailbox.send_many(["x" * 1_000] * 100)
    assert await mailbox.counts() == Counts(pending=1)
    connection.pragma("max_page_count", 1_000_000)
    await mailbox.send_many(["x" * 1_000] * 100)
    assert await mailbox.counts() == Counts(pending=101)
    [first] = await mailbox.receive()
    assert first.id == kept


async def test_a_commit_that_fails_is_reported_to_everybody_in_it(mailbox, path):
    """The disk refuses to write; nobody of the group is told that it went well, and nothing of it stays."""
    await mailbox.send("kept")
    size = 4_096  # less than the file and its log have, so that the first commit fails as well as one behind it
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    outcomes = []

    async def send(number):
        try:
            await mailbox.send("x" * 5_000)
            outcomes.append("sent")
        except MailboxConnectionError as error:
            outcomes.append(str(error))

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(send, number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(outcomes) == 10
    assert all("cannot be read or written" in outcome for outcome in outcomes), outcomes
    assert await mailbox.counts() == Counts(pending=1)
    await works(mailbox)


async def test_a_damaged_file_says_so_and_works_once_it_is_mended(path, anyio_backend):
    async with SQLiteMailbox(path, name="jobs") as mailbox:
        await mailbox.send_many([f"message {number} " + "x" * 400 for number in range(100)])
    with open(path, "rb") as file:
        whole = file.read()
    with open(path, "r+b") as file:
        file.seek(4_096)
        file.write(b"\xa5" * (len(whole) - 4_096))
    await refused(path, MailboxConnectionError, "is damaged", name="jobs")
    with open(path, "wb") as file:
        file.write(whole)
    async with SQLiteMailbox(path, name="jobs") as mailbox:
        assert (await mailbox.counts()).pending == 100


async def test_bytes_that_are_no_json_in_the_file_go_to_the_dead_letters(mailbox, path):
    await mailbox.send_many([1, 2, 3])
    connection = apsw.Connection(path)
    connection.execute("UPDATE messages SET body = x'ff00fe' WHERE seq = (SELECT max(seq) - 1 FROM messages)")
    connection.close()
    assert [message.body for message in await mailbox.receive(max_messages=10)] == [1, 3]
    [dead] = await mailbox.dead_letters()
    assert (dead.raw, dead.body, dead.error_type) == (b"\xff\x00\xfe", None, "NotJsonError")


class Long(bytes):
    """Bytes that say that they are more than they are."""

    def __new__(cls, size):
        made = super().__new__(cls, b'"x"')
        made.size = size
        return made

    def __len__(self):
        return self.size


async def test_what_is_larger_than_a_row_can_be_is_its_senders_mistake_alone(mailbox):
    """SQLite would refuse what is above 1 GB, and the file be left with what can be stored and never be buried."""
    most, backend = 400_000_000, mailbox.backend
    await mailbox.send_many(["held", "asked"], reply_to="replies")
    (held,) = await mailbox.receive()
    (asked,) = await backend.claim(1, 60.0, 0.0)
    reply = Envelope("reply", Long(most), reply_to="replies", headers={"request_id": "id"})
    calls = (
        partial(mailbox.send, "before"),
        partial(backend.send, [Envelope("long", Long(most + 1))]),
        partial(backend.send, [Envelope("long with its headers", Long(most - 3), headers={"h": "123"})]),
        partial(backend.send, [Envelope("short", b'"y"'), Envelope("long, too", Long(most + 1))]),
        partial(held.save_checkpoint, Long(most + 1)),
        partial(backend.settle, asked, Ack(reply)),
        partial(backend.send, [Envelope("longest", Long(most))]),
    )
    found = await outcomes(*calls)
    sizes = [*["a message of 400,000,001"] * 3, "a checkpoint of 400,000,001", "a reply of 400,000,012"]
    says = (
        "bytes is larger than the 400,000,000 that a mailbox in a SQL database takes; send a reference to larger data"
    )
    assert [str(error) for error in found if isinstance(error, SerializationError)] == [f"{n} {says}" for n in sizes]
    await held.save_checkpoint(Long(most))
    await backend.settle(asked, Ack())
    assert sorted(message.body for message in await mailbox.receive(max_messages=9)) == ["before", "x"]
    assert await mailbox.counts() == Counts(in_flight=3, settled=1)


async def test_an_error_that_is_no_valid_text_can_be_dead_lettered(mailbox):
    await mailbox.send("job")
    [message] = await mailbox.receive()
    await message.dead_letter(ValueError("no such file: \udcff"))
    [dead] = await mailbox.dead_letters()
    assert dead.error == r"no such file: \udcff"


# ------------------------------------------------------------------------------------------------------------ threads


async def test_no_thread_is_left_of_mailboxes_that_were_used_for_a_moment(path, anyio_backend):
    for _ in range(20):
        async with SQLiteMailbox(path) as mailbox:
            await mailbox.send("x")
    await threads_end()


async def test_writer_threads_that_are_told_to_end_are_given_no_help(anyio_backend):
    """The last turn may be the first one that ends: it looks held up then."""
    began, may_end = threading.Event(), threading.Event()

    class Turn:
        def serve(self, writers):
            began.set()
            may_end.wait(60)
            writers.served()

    writers = Writers(lambda: None)
    writers.start()
    writers.serve(Turn())
    began.wait(60)
    writers.end()
    assert not writers.help(clock.monotonic())
    may_end.set()
    await threads_end()


async def test_nothing_is_left_when_the_last_mailbox_is_closed(path, anyio_backend):
    async with SQLiteMailbox(path, name="a") as a:
        async with SQLiteMailbox(path, name="b") as b:
            with anyio.move_on_after(0.05):
                await b.receive(wait_time_seconds=30)
            assert any("mainspring sqlite" in thread.name for thread in threading.enumerate())
        await works(a)
    await threads_end()
    assert os.listdir(path + "-wake") == []


@pytest.mark.slow
async def test_the_threads_end_one_after_the_other_also_where_they_are_switched_at_each_step(tmp_path, anyio_backend):
    rounds, ended = 100, threading.Event()

    def busy() -> None:
        while not ended.is_set():
            sum(range(200))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    hogs = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
    try:
        for hog in hogs:
            hog.start()
        for number in range(rounds):
            async with SQLiteMailbox(tmp_path / f"{number}.db") as mailbox:
                with anyio.move_on_after(0.003):
                    await mailbox.receive(wait_time_seconds=30)
        with anyio.fail_after(60):
            while any("mainspring sqlite" in thread.name for thread in threading.enumerate()):
                await anyio.sleep(0.001)
    finally:
        ended.set()
        sys.setswitchinterval(before)
        for hog in hogs:
            await anyio.to_thread.run_sync(hog.join)
    assert [left for beside in tmp_path.glob("*-wake") for left in os.listdir(beside)] == []


async def test_a_cancelled_program_still_releases_under_a_shield(path, anyio_backend):
    with anyio.CancelScope() as scope:
        async with SQLiteMailbox(path) as mailbox:
            await mailbox.send("job")
            [message] = await mailbox.receive()
            scope.cancel()
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 5):
                    await message.release()
    async with SQLiteMailbox(path) as mailbox:
        assert await mailbox.counts() == Counts(pending=1)


# --------------------------------------------------------- I/O errors, and tables that lack what they should have


class FaultyFiles(apsw.VFS):
    """The system's files, which can neither be read nor written while ``broken``."""

    broken = False

    def __init__(self):
        super().__init__("faulty", "unix")

    def xOpen(self, name, flags):
        return FaultyFile(self, name, flags)


class FaultyFile(apsw.VFSFile):
    def __init__(self, files, name, flags):
        super().__init__("unix", name, flags)
        self._files = files

    def xRead(self, amount, offset):
        if self._files.broken:
            raise apsw.IOError("disk I/O error")
        return super().xRead(amount, offset)

    def xWrite(self, data, offset):
        if self._files.broken:
            raise apsw.IOError("disk I/O error")
        return super().xWrite(data, offset)


@pytest.fixture
def files():
    made = FaultyFiles()
    apsw.set_default_vfs("faulty")
    yield made
    apsw.set_default_vfs("unix")


async def test_an_io_error_is_told_as_what_it_is_and_passes(path, files, anyio_backend):
    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send("before")
        files.broken = True
        for _ in range(3):  # on the connection, and as it is opened anew
            with pytest.raises(MailboxConnectionError, match=r"cannot be read or written: .*I/O error"):
                await mailbox.send("refused")
        files.broken = False
        assert [message.body for message in await mailbox.receive()] == ["before"]
    files.broken = True
    await refused(path, MailboxConnectionError, "cannot be read or written")


@pytest.mark.slow
async def test_an_io_error_while_others_wait_ends_no_thread(path, files, anyio_backend):
    async with SQLiteMailbox(path) as mailbox, SQLiteMailbox(path) as sender:
        heard = []

        async def wait():
            try:
                await mailbox.receive(wait_time_seconds=60)
            except MailboxConnectionError as error:
                heard.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.sleep(0.1)
            files.broken = True
            with pytest.raises(MailboxConnectionError):
                await sender.send("refused")
            with anyio.fail_after(10):
                while not heard:
                    await anyio.sleep(0.01)
        files.broken = False
        await works(mailbox)


async def test_a_full_disk_says_so_also_where_it_shows_as_an_io_error(path, files, anyio_backend, monkeypatch):
    files.broken = True
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    await refused(path, MailboxConnectionError, "cannot grow: the disk is full; free some space")


async def tamper(path, *statements):
    connection = apsw.Connection(str(path))
    for statement in statements:
        connection.execute(statement)
    connection.close()


async def test_expired_messages_of_which_the_index_of_expiries_lacks_some_are_buried(mailbox, path):
    for number in range(3):
        await mailbox.send(number, expires_in=0.01)
    await mailbox.send("lasts", expires_in=1_000)
    await tamper(path, "DELETE FROM expiring WHERE seq % 2")
    await anyio.sleep(0.02)
    with anyio.fail_after(10):
        assert [message.body for message in await mailbox.receive(max_messages=10)] == ["lasts"]
    assert len(await mailbox.dead_letters()) == 3
    assert await mailbox.counts() == Counts(in_flight=1, dead=3)


async def test_places_of_no_message_are_cleared_and_nobody_gets_anothers_lease(mailbox, path):
    await mailbox.send_many(["lost", "kept", "last"])
    await tamper(path, "DELETE FROM messages WHERE seq = (SELECT min(seq) FROM messages)")
    kept, last = await mailbox.receive(max_messages=3)
    await kept.acknowledge()
    await last.nack()
    (again,) = await mailbox.receive(max_messages=3)
    assert (kept.body, last.body, again.body) == ("kept", "last", "last")


@pytest.mark.parametrize("place", ["leases", "delayed", "expiring"])
async def test_what_is_due_of_no_message_is_not_due_for_ever(mailbox, path, place):
    options = {"delayed": {"delay": 0.01}, "expiring": {"expires_in": 0.01}}.get(place, {})
    await mailbox.send("lost", **options)
    if place == "leases":
        await mailbox.receive(visibility_timeout=0.01)
    await tamper(path, "DELETE FROM messages")
    await anyio.sleep(0.02)
    before = mailbox.transactions
    assert await mailbox.receive(wait_time_seconds=0.3) == []
    assert mailbox.transactions - before < 10
    connection = apsw.Connection(str(path))
    assert connection.execute(f"SELECT count(*) FROM {place}").fetchall() == [(0,)]
    connection.close()


async def test_a_file_without_its_counter_says_so(mailbox, path):
    await tamper(path, "DELETE FROM mailboxes WHERE id = 0")
    for call in (partial(mailbox.send, "x"), mailbox.receive, mailbox.counts):
        with pytest.raises(MailboxError, match="is damaged: its counter is missing"):
            await call()
    await refused(path, MailboxError, "is damaged: its counter is missing", busy_timeout=0.2)


async def test_a_mailbox_without_its_row_harms_no_other_mailbox(mailbox, path, anyio_backend):
    async with SQLiteMailbox(path, name="other", busy_timeout=0.2) as other:
        await mailbox.send("x")
        await mailbox.receive(visibility_timeout=0.01)
        await tamper(path, "DELETE FROM mailboxes WHERE name = 'jobs'")
        await anyio.sleep(0.02)
        await works(other)
        for call in (partial(mailbox.send, "x"), partial(mailbox.send_many, ["x"]), mailbox.counts, mailbox.purge):
            with pytest.raises(MailboxError, match=r"^the mailbox was dropped"):
                await call()
        await works(other)


# ----------------------------------------------------------------------------------------------- no threads to be had


@pytest.fixture
def refused_threads(monkeypatch):
    """Of threads whose name has a part that is put in here, none can be started."""
    parts: list[str] = []
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if any(part in self.name for part in parts):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return parts


@pytest.mark.parametrize("thread", ["sqlite writer", "sqlite watcher"])
async def test_no_thread_is_to_be_had(thread, path, refused_threads, anyio_backend):
    refused_threads.append(thread)
    await refused(path, MailboxConnectionError, "cannot be opened: can't start new thread")
    refused_threads.clear()
    async with SQLiteMailbox(path) as mailbox:
        await works(mailbox)


# ------------------------------------------------------------------------------------------- trouble at notifications


async def test_a_send_is_done_where_there_is_no_socket_to_notify_with(path, anyio_backend, monkeypatch):
    """Every descriptor is taken. The message is in the file by then, and the directory is left as it was found."""
    real = socket.socket

    class NoneLeft(real):
        def __init__(self, family=-1, *rest, **more):
            if family == socket.AF_UNIX:
                raise OSError(errno.EMFILE, "Too many open files")
            super().__init__(family, *rest, **more)

    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send("opens the file")
        os.makedirs(f"{path}-wake")
        open(f"{path}-wake/another process", "wb").close()
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", NoneLeft)
            with anyio.fail_after(10):
                await mailbox.send("x")
        assert len(os.listdir("/proc/self/fd")) == before
        await works(mailbox)


async def test_a_writer_thread_outlives_whatever_is_raised_in_it(path, anyio_backend, monkeypatch, caplog):
    def fail(*_):
        raise MemoryError

    async with SQLiteMailbox(path) as mailbox:
        with anyio.fail_after(10), monkeypatch.context() as patch:
            patch.setattr("mainspring.mailbox.sqlite.notifier.Notifier.notify", fail)
            await mailbox.send("it is committed")
            patch.setattr("mainspring.mailbox.sqlite.connection.DatabaseFile.soonest_for", fail)
            with pytest.raises(MailboxError, match="could not be used: MemoryError"):
                await mailbox.receive()
        with anyio.fail_after(10):
            assert await mailbox.counts() == Counts(pending=1)
            await works(mailbox)
    assert "could not be served" in caplog.text
