"""A mailbox that is dropped from its store while it is open elsewhere: what is sent into it is refused, receivers are told."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from mainspring import LoopGroup, MailboxError, MainLoop
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["sqlite", "postgresql"])
def make(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    """Makes mailboxes named ``jobs`` on one store."""
    if request.param == "sqlite":
        return partial(SQLiteMailbox, tmp_path / "mail.db", name="jobs")
    return request.getfixturevalue("place").mailbox


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


async def drop(make: Any) -> None:
    """As an operator does, in another process."""
    async with make() as mailbox:
        await mailbox.backend.drop()


async def test_what_is_sent_into_a_dropped_mailbox_is_refused(make: Any, anyio_backend: Any) -> None:
    async with make() as mailbox:
        await mailbox.send("before")
        await drop(make)
        for call in (
            partial(mailbox.send, "x"),
            partial(mailbox.send, "x", delay=60),
            partial(mailbox.send, "x", dedup_key="k"),
            partial(mailbox.send_many, ["x", "y"]),
            mailbox.receive,
            partial(mailbox.receive, wait_time_seconds=30),
            mailbox.counts,
        ):
            with anyio.fail_after(10), pytest.raises(MailboxError, match="was dropped from its store") as caught:
                await call()
            assert not caught.value.retryable
    async with make() as mailbox:  # opened anew, it is a new one
        await mailbox.send("after")
        assert [message.body for message in await mailbox.receive(max_messages=9)] == ["after"]


@pytest.mark.slow
async def test_a_receive_that_waits_and_a_loop_hear_of_it(make: Any, anyio_backend: Any) -> None:
    async def handle(job: str) -> None:
        raise AssertionError(job)

    mailbox = make()
    group = LoopGroup([MainLoop(mailbox, handle, wait_time_seconds=300)], block_threshold=None)

    async def hurt() -> None:
        while not mailbox.statistics().waiting_receives:  # the group runs before its mailbox is open
            await anyio.sleep(0.01)
        await drop(make)

    told: list[BaseException] = []
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hurt)
            try:
                await group.run(install_signals=False)
            except MailboxError as error:
                told.append(error)
    assert "was dropped from its store" in str(told[0])


async def test_a_lease_in_a_dropped_mailbox_is_over(make: Any, anyio_backend: Any) -> None:
    async with make() as mailbox:
        await mailbox.send("x")
        (message,) = await mailbox.receive()
        await drop(make)
        with pytest.raises(MailboxError):
            await message.acknowledge()
