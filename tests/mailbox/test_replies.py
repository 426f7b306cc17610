"""Replies to a mailbox on another store: sent while the lease is held, then acknowledged; twice is once."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring import MainLoop
from mainspring.core.state_machine import MailboxState
from mainspring.errors import ConfigError, MailboxConnectionError, ReceiptHandleExpiredError, ReplyNotAvailableError
from mainspring.mailbox import replies as replies_module
from mainspring.mailbox.memory.mailbox import InMemoryMailbox
from mainspring.mailbox.open import open_mailbox
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox

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


async def test_a_store_that_does_not_answer_holds_up_no_reply_to_another(virtual_clock: Any) -> None:
    class Silent(InMemoryMailbox[Any, Any]):
        async def _open(self, scope: Any) -> None:
            await anyio.sleep_forever()

        def _local_name(self, address: str) -> str | None:
            return "silent" if address == "silent://results" else None

        def _sibling(self, name: str, **_: Any) -> Silent:
            return Silent(name)

    began = anyio.current_time()
    async with (
        Elsewhere("jobs") as jobs,
        open_mailbox("memory://results") as results,
        anyio.create_task_group() as group,
    ):
        jobs.reply_stores = (Silent("store"),)

        async def stuck() -> None:
            with pytest.raises(MailboxConnectionError, match="'silent://results' has not taken the reply within 10 s"):
                await message.reply("answer")
            assert not message.is_settled
            assert anyio.current_time() == began + replies_module.SEND_TIMEOUT

        await jobs.send("x", reply_to="silent://results")
        (message,) = await jobs.receive()
        group.start_soon(stuck)
        await anyio.wait_all_tasks_blocked()
        await jobs.send("x", reply_to=results)
        (other,) = await jobs.receive()
        await other.reply("answer")
        assert anyio.current_time() == began
        assert [m.body for m in await results.receive()] == ["answer"]


class Answers(SQLiteMailbox[Any, Any]):
    """A store of replies that remembers which mailboxes were made on it, each with ``_send_encoded`` as the test wants it."""

    made: list[Answers]

    def _sibling(self, name: str, **_: Any) -> Answers:
        sibling = Answers(self.path, name=name)
        self.made.append(sibling)
        sibling.before = self.before
        return sibling

    async def before(self, mailbox: Answers) -> None:
        """Called before a reply is sent."""

    async def _send_encoded(self, envelope: Any) -> str:
        await self.before(self)
        return await super()._send_encoded(envelope)


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    """The store of the replies, which the mailbox of the requests is to know."""
    store = Answers(f"{tmp_path}/replies.db")
    store.made = []
    return store


async def _answer(jobs: Any, url: str) -> None:
    await jobs.send("x", reply_to=url)
    (message,) = await jobs.receive()
    await message.reply(url)


async def test_only_so_many_mailboxes_are_kept_open_for_replies_those_used_last(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each requester of a fleet has a mailbox of its own, a worker would gather connections without end."""
    monkeypatch.setattr(replies_module, "MOST", 2)

    async def are_open(*names: str) -> None:
        with anyio.fail_after(60):
            while {each.name for each in answers.made if each.state is MailboxState.OPEN} != set(names):
                await anyio.sleep(0.01)

    async with Elsewhere("jobs") as jobs:
        jobs.reply_stores = (answers,)
        for name in ("a", "b", "a", "c"):
            await _answer(jobs, f"sqlite:///{tmp_path}/replies.db?name={name}")
        await are_open("a", "c")
        await _answer(jobs, f"sqlite:///{tmp_path}/replies.db?name=b")  # opened anew
        await are_open("b", "c")
        assert len(answers.made) == 4
    await are_open()


async def test_a_mailbox_that_a_reply_is_on_its_way_to_is_not_closed(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = anyio.Event()

    async def before(mailbox: Answers) -> None:
        if mailbox.name == "slow":
            await go_on.wait()

    answers.before = before  # type: ignore[method-assign]
    monkeypatch.setattr(replies_module, "MOST", 0)
    slow = f"sqlite:///{tmp_path}/replies.db?name=slow"
    async with Elsewhere("jobs") as jobs:
        jobs.reply_stores = (answers,)
        async with anyio.create_task_group() as group:
            group.start_soon(_answer, jobs, slow)
            while not answers.made or answers.made[0].state is not MailboxState.OPEN:
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


async def test_addresses_of_queues_that_nobody_has_leave_nothing_open() -> None:
    async with Elsewhere("jobs") as jobs:
        for number in range(5):
            with pytest.raises(ReplyNotAvailableError, match="nobody has a mailbox"):
                await _answer(jobs, f"memory://nobody-{number}")
        with anyio.fail_after(10):
            while len(replies_module.open_mailboxes()) > 1:
                await anyio.sleep(0.001)


# ------------------------------------------------------------------------------ an address is what a sender says, no setting


async def test_a_reply_goes_to_no_store_that_only_its_message_names(tmp_path: Path) -> None:
    """Neither a file is made, nor a server of the sender's choice called."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        schemes = ["postgresql", "redis", "nats", "tls"]
        for url in [f"sqlite:///{tmp_path}/made.db", *(f"{scheme}://127.0.0.1:{port}/0" for scheme in schemes)]:
            async with SQLiteMailbox(tmp_path / "jobs.db") as jobs:
                await jobs.send("x", reply_to=url)
                (message,) = await jobs.receive()
                with pytest.raises(ReplyNotAvailableError, match="reply_stores"):
                    await message.reply("answer")
                with pytest.raises(ReplyNotAvailableError, match="reply_stores"):
                    await jobs._send_late_reply(jobs.reply_to(message, "answer"))
                await message.dead_letter("no")  # with news for a requester, which goes nowhere either
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not (tmp_path / "made.db").exists()


async def test_a_loop_dead_letters_at_once_what_asks_for_a_reply_to_a_strange_store(tmp_path: Path) -> None:
    ran: list[int] = []

    async def handle(job: int) -> int:
        ran.append(job)
        return job

    jobs = InMemoryMailbox[Any, Any]("jobs")
    async with MainLoop(jobs, handle) as loop:
        await jobs.send(1, reply_to=f"sqlite:///{tmp_path}/made.db")
        with anyio.fail_after(10):
            while not loop.outcomes:
                await anyio.sleep(0.001)
        (dead,) = await jobs.dead_letters()
    assert (ran, dead.error_type, dead.attempt) == ([1], "ReplyNotAvailableError", 1)


async def test_a_store_that_the_configuration_names_may_be_replied_to(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/replies.db"
    async with (
        open_mailbox(f"sqlite:///{tmp_path}/jobs.db", reply_stores=[store]) as jobs,
        open_mailbox(f"{store}?name=answers") as results,
    ):
        await _answer(jobs, results.address)
        (answer,) = await results.receive()
        assert answer.body == results.address


async def test_a_store_of_which_a_mailbox_is_open_here_may_be_replied_to(tmp_path: Path) -> None:
    async with (
        SQLiteMailbox(tmp_path / "jobs.db") as jobs,
        SQLiteMailbox(tmp_path / "replies.db", name="another"),
    ):
        url = f"sqlite:///{tmp_path}/replies.db?name=answers&synchronous=off"  # only the name counts
        await _answer(jobs, url)
    async with SQLiteMailbox(tmp_path / "jobs.db") as jobs:  # the other one is closed
        with pytest.raises(ReplyNotAvailableError):
            await _answer(jobs, url)


def test_stores_of_replies_are_checked_when_they_are_named() -> None:
    for stores in ("redis://host", 5, ["host"], [5]):
        with pytest.raises(ConfigError):
            open_mailbox("memory://jobs", reply_stores=stores)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no option 'reply_stores'"):
        open_mailbox("memory://jobs?reply_stores=redis://host")
