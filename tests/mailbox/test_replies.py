"""Replies to a mailbox on another store: sent while the lease is held, then acknowledged; twice is once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring.errors import MailboxConnectionError, ReceiptHandleExpiredError, ReplyNotAvailableError
from mainspring.mailbox import replies as replies_module
from mainspring.mailbox.memory import InMemoryMailbox
from mainspring.mailbox.open import open_mailbox
from mainspring.mailbox.sqlite import SQLiteMailbox
from mainspring.states import MailboxState

if TYPE_CHECKING:
    from pathlib import Path

    from mainspring.mailbox.message import Delivery

pytestmark = pytest.mark.anyio


class Elsewhere(InMemoryMailbox[Any, Any]):
    """A mailbox that takes every memory:// address for another store's."""

    acknowledge_fails = False

    def _local_name(self, address: str) -> str | None:
        return None if "://" in address else address

    async def _settle(self, delivery: Delivery, settlement: Any) -> None:
        if self.acknowledge_fails:
            raise MailboxConnectionError("gone")
        await super()._settle(delivery, settlement)


@pytest.fixture(params=[False, True], ids=["objects", "json"])
def serialize(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_a_reply_reaches_a_mailbox_on_another_store(serialize: bool) -> None:
    async with (
        Elsewhere("jobs", reply=int, serialize=serialize) as jobs,
        open_mailbox("memory://results", body=int, serialize=not serialize) as results,
    ):
        for number in range(3):
            request = await jobs.send(number, reply_to=results)
            (message,) = await jobs.receive()
            await message.reply(message.body * 2)
            assert message.is_settled
            (answer,) = await results.receive()
            assert (answer.body, answer.headers) == (number * 2, {"request_id": request})
            await answer.acknowledge()
        assert (await jobs.counts()).settled == 3


async def test_a_reply_whose_acknowledgement_failed_is_sent_again_and_arrives_once() -> None:
    async with Elsewhere("jobs") as jobs, open_mailbox("memory://results") as results:
        await jobs.send("x", reply_to=results)
        (message,) = await jobs.receive()
        jobs.acknowledge_fails = True
        with pytest.raises(MailboxConnectionError):
            await message.reply("answer")
        assert not message.is_settled
        jobs.acknowledge_fails = False
        await message.reply("answer")
        assert [m.body for m in await results.receive(max_messages=5)] == ["answer"]


async def test_no_reply_leaves_once_the_lease_is_lost() -> None:
    async with Elsewhere("jobs") as jobs, open_mailbox("memory://results") as results:
        await jobs.send("x", reply_to=results)
        (message,) = await jobs.receive(visibility_timeout=0)
        with pytest.raises(ReceiptHandleExpiredError):
            await message.reply("answer")
        assert await results.approximate_count() == 0


@pytest.mark.parametrize("address", ["nosuch://results", "memory://", "memory://nobody", "memory://x?colour=red"])
async def test_an_address_that_leads_nowhere_is_refused_and_the_message_stays(address: str) -> None:
    async with Elsewhere("jobs") as jobs:
        await jobs.send("x", reply_to=address)
        (message,) = await jobs.receive()
        with pytest.raises(ReplyNotAvailableError):
            await message.reply("answer")
        assert not message.is_settled
        await message.acknowledge()


async def test_a_mailbox_that_was_not_entered_has_nobody_to_keep_the_connection() -> None:
    jobs = Elsewhere("jobs")
    results = open_mailbox("memory://results")
    await jobs.send("x", reply_to=results)
    (message,) = await jobs.receive()
    with pytest.raises(ReplyNotAvailableError, match="async with"):
        await message.reply("answer")
    await message.acknowledge()


async def test_a_store_that_does_not_answer_holds_up_no_reply_to_another(
    virtual_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(InMemoryMailbox[Any, Any]):
        async def _open(self, scope: Any) -> None:
            await anyio.sleep_forever()

    def opened(url: str) -> Any:
        return Silent("silent") if url == "memory://silent" else open_mailbox(url)

    monkeypatch.setattr(replies_module, "open_mailbox", opened)
    began = anyio.current_time()
    async with (
        Elsewhere("jobs") as jobs,
        open_mailbox("memory://results") as results,
        anyio.create_task_group() as group,
    ):

        async def stuck() -> None:
            with pytest.raises(MailboxConnectionError, match="'memory://silent' has not taken the reply within 10 s"):
                await message.reply("answer")
            assert not message.is_settled
            assert anyio.current_time() == began + replies_module.SEND_TIMEOUT

        await jobs.send("x", reply_to="memory://silent")
        (message,) = await jobs.receive()
        group.start_soon(stuck)
        await anyio.wait_all_tasks_blocked()
        await jobs.send("x", reply_to=results)
        (other,) = await jobs.receive()
        await other.reply("answer")
        assert anyio.current_time() == began
        assert [m.body for m in await results.receive()] == ["answer"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The mailboxes that were opened for replies."""
    made: list[Any] = []

    def open_one(url: str) -> Any:
        made.append(open_mailbox(url))
        return made[-1]

    monkeypatch.setattr(replies_module, "open_mailbox", open_one)
    return made


async def _answer(jobs: Any, url: str) -> None:
    await jobs.send("x", reply_to=url)
    (message,) = await jobs.receive()
    await message.reply(url)


async def test_only_so_many_mailboxes_are_kept_open_for_replies_those_used_last(
    opened: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each requester of a fleet has a mailbox of its own, a worker would gather connections without end."""
    monkeypatch.setattr(replies_module, "MOST", 2)

    async def are_open(*names: str) -> None:
        with anyio.fail_after(60):
            while {each.name for each in opened if each.state is MailboxState.OPEN} != set(names):
                await anyio.sleep(0.01)

    async with Elsewhere("jobs") as jobs:
        for name in ("a", "b", "a", "c"):
            await _answer(jobs, f"sqlite:///{tmp_path}/replies.db?name={name}")
        await are_open("a", "c")
        await _answer(jobs, f"sqlite:///{tmp_path}/replies.db?name=b")  # opened anew
        await are_open("b", "c")
        assert len(opened) == 4
    await are_open()


async def test_a_mailbox_that_a_reply_is_on_its_way_to_is_not_closed(
    opened: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = anyio.Event()
    send = SQLiteMailbox.send_encoded

    async def send_later(mailbox: Any, envelope: Any) -> str:
        if mailbox.name == "slow":
            await go_on.wait()
        return await send(mailbox, envelope)

    monkeypatch.setattr(SQLiteMailbox, "send_encoded", send_later)
    monkeypatch.setattr(replies_module, "MOST", 0)
    slow = f"sqlite:///{tmp_path}/replies.db?name=slow"
    async with Elsewhere("jobs") as jobs:
        async with anyio.create_task_group() as group:
            group.start_soon(_answer, jobs, slow)
            while not opened or opened[0].state is not MailboxState.OPEN:
                await anyio.sleep(0.01)
            await _answer(jobs, f"sqlite:///{tmp_path}/replies.db?name=other")
            go_on.set()
        async with open_mailbox(slow) as results:
            assert [m.body for m in await results.receive()] == [slow]


async def test_what_is_in_memory_only_is_kept_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies_module, "MOST", 1)
    async with Elsewhere("jobs") as jobs:
        for number in range(4):
            async with open_mailbox(f"memory://results-{number}"):
                await jobs.send(number, reply_to=f"memory://results-{number}")
                (message,) = await jobs.receive()
                await message.reply(number)
        for number in range(4):
            async with open_mailbox(f"memory://results-{number}") as results:
                assert [m.body for m in await results.receive()] == [number]
