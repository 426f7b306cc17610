"""Replies to a mailbox on another store: sent while the lease is held, then acknowledged; twice is once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring.errors import MailboxConnectionError, ReceiptHandleExpiredError, ReplyNotAvailableError
from mainspring.mailbox import replies as replies_module
from mainspring.mailbox.memory import InMemoryMailbox
from mainspring.mailbox.open import open_mailbox

if TYPE_CHECKING:
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
