"""A mailbox file that is deleted or replaced under those who have it open: they say so, and take nothing more in."""

from __future__ import annotations

import os

import anyio
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
