"""A mailbox file that is deleted or replaced under those who have it open: they say so, and take nothing more in."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import apsw
import pytest

from mainspring import LoopGroup, MailboxError, MainLoop
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path):
    return tmp_path / "mail.db"


def delete(path):
    for suffix in ("", "-wal", "-shm"):
        os.unlink(f"{path}{suffix}")


async def test_a_send_into_a_deleted_file_is_refused(path):
    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send("before")
        delete(path)
        with pytest.raises(MailboxError, match="was deleted while this process had it open") as caught:
            await mailbox.send("after")
        assert not caught.value.retryable
        assert not path.exists()  # nobody made a new one on the way


async def test_a_file_in_its_place_is_not_taken_for_it(path):
    async with SQLiteMailbox(path, name="letters") as mailbox:
        await mailbox.send("before")
        delete(path)
        path.write_bytes(b"")
        with pytest.raises(MailboxError, match="was replaced by another one"):
            await mailbox.send("after")
        assert path.read_bytes() == b""
    async with SQLiteMailbox(path, name="parcels") as mailbox:  # opened anew, it is the new one
        assert (await mailbox.counts()).waiting == 0


@pytest.mark.slow
async def test_a_service_that_waits_hears_of_it_and_ends_with_the_error(path):
    async def handle(letter: str) -> None:
        raise AssertionError(letter)

    mailbox = SQLiteMailbox(path)
    group = LoopGroup([MainLoop(mailbox, handle, wait_time_seconds=300)])

    async def hurt():
        while not mailbox.statistics().waiting_receives:
            await anyio.sleep(0.001)
        delete(path)

    with anyio.fail_after(30), pytest.raises(MailboxError, match="was deleted"):  # noqa: PT012 - it is the run that raises
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hurt)
            try:
                await group.run(install_signals=False)
            except MailboxError as error:
                raised = error
            tasks.cancel_scope.cancel()
        raise raised


@pytest.fixture
async def resting(path, tmp_path, monkeypatch):
    """A mailbox with five messages and two leases, whose file has no connection just now."""
    monkeypatch.setattr("mainspring.mailbox.sqlite.threads.KEPT", 1)
    async with SQLiteMailbox(path, name="letters") as mailbox, SQLiteMailbox(tmp_path / "other.db") as other:
        await mailbox.send_many(range(5))
        await mailbox.receive(max_messages=2)
        await other.send("x")
        with anyio.fail_after(10):
            while str(path) in open_files():
                await anyio.sleep(0.001)
        yield mailbox


def open_files():
    descriptors = Path("/proc/self/fd")
    return {os.readlink(descriptor) for descriptor in descriptors.iterdir() if descriptor.is_symlink()}


def overwrite(path, content):
    """Put a database into the file that is there: so it keeps its inode, as one made right after a deletion often does."""
    path.write_bytes(content)
    for suffix in ("-wal", "-shm"):
        os.unlink(f"{path}{suffix}")


async def test_another_database_under_the_inode_of_one_that_rests_is_not_taken_for_it(resting, path, tmp_path):
    """It is ahead in its numbers, and has a mailbox under the same number."""
    async with SQLiteMailbox(tmp_path / "new.db", name="parcels") as parcels:
        await parcels.send_many(range(100))
        await parcels.receive(max_messages=50)
    overwrite(path, (tmp_path / "new.db").read_bytes())
    for call in (partial(resting.send, "letter"), resting.receive, resting.counts):
        with pytest.raises(MailboxError, match="was replaced by another one") as caught:
            await call()
        assert not caught.value.retryable
    with closing(apsw.Connection(str(path))) as connection:
        assert connection.execute("SELECT count(*) FROM messages").fetchall() == [(100,)]


async def test_an_earlier_copy_of_a_file_that_rests_is_not_taken_for_it(path, tmp_path, monkeypatch):
    """A lease of it would have the number of an earlier lease."""
    async with SQLiteMailbox(path, name="letters") as mailbox:
        await mailbox.send_many(range(3))
    before = path.read_bytes()
    monkeypatch.setattr("mainspring.mailbox.sqlite.threads.KEPT", 1)
    async with SQLiteMailbox(path, name="letters") as mailbox, SQLiteMailbox(tmp_path / "other.db") as other:
        (message,) = await mailbox.receive()
        await other.send("x")
        with anyio.fail_after(10):
            while str(path) in open_files():
                await anyio.sleep(0.001)
        overwrite(path, before)
        for call in (message.acknowledge, partial(mailbox.send, "letter"), mailbox.receive):
            with pytest.raises(MailboxError, match="was replaced by an earlier copy"):
                await call()


class FilesThatChange(apsw.VFS):
    """The system's files; ``change`` is called once as a log is written to the disk."""

    def __init__(self):
        super().__init__("that change", "unix", makedefault=True)
        self.change = None

    def xOpen(self, name, flags):
        return FileThatChanges(self, name, flags)


class FileThatChanges(apsw.VFSFile):
    def __init__(self, files, name, flags):
        super().__init__("unix", name, flags)
        self._files = files

    def xSync(self, flags):
        change, self._files.change = self._files.change, None
        if change is not None:
            change()
        super().xSync(flags)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_a_send_into_a_file_that_goes_away_meanwhile_is_refused(path, tmp_path, how):
    files = FilesThatChange()
    try:
        async with SQLiteMailbox(tmp_path / "new.db"):
            pass
        async with SQLiteMailbox(path) as mailbox:
            await mailbox.send("before")
            files.change = partial(delete, path) if how == "deleted" else partial(os.replace, tmp_path / "new.db", path)
            with pytest.raises(MailboxError, match=f"was {how}"):
                await mailbox.send("meanwhile")
    finally:
        files.unregister()


@pytest.mark.parametrize("gone", [("-wal",), ("-wal", "-shm")])
async def test_what_is_sent_after_the_log_was_deleted_is_seen_by_other_processes(path, gone):
    async with SQLiteMailbox(path) as mailbox:
        await mailbox.send("before")
        for suffix in gone:
            os.unlink(f"{path}{suffix}")
        await mailbox.send("after")
        look = f"import apsw; print(apsw.Connection({str(path)!r}).execute('SELECT count(*) FROM messages').fetchall())"
        assert (await anyio.run_process([sys.executable, "-c", look])).stdout == b"[(2,)]\n"
        assert (await mailbox.counts()).pending == 2
