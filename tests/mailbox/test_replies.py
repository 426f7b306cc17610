"""Replies to a mailbox on another store: sent while the lease is held, then acknowledged; twice is once."""

from __future__ import annotations

import gc
import socket
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring import Context, Mailbox, MainLoop
from mainspring.core.state_machine import MailboxState
from mainspring.errors import ConfigError, MailboxConnectionError, ReceiptHandleExpiredError, ReplyNotAvailableError
from mainspring.mailbox.memory.mailbox import InMemoryMailbox
from mainspring.mailbox.open import open_mailbox
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from wrapped_backend import WrappedBackend, wrap

if TYPE_CHECKING:
    from pathlib import Path

    from mainspring.mailbox.message import ClaimedMessage, Envelope

pytestmark = pytest.mark.anyio


class Elsewhere(WrappedBackend):
    """Takes every memory:// address for another store's."""

    def local_name(self, address: str) -> str | None:
        return None if "://" in address else address


def elsewhere(**options: Any) -> InMemoryMailbox[Any, Any]:
    """A mailbox all of whose replies go to another store."""
    return wrap(InMemoryMailbox("jobs", **options), Elsewhere)


@pytest.fixture(params=[False, True], ids=["objects", "json"])
def serialize(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_a_reply_reaches_a_mailbox_on_another_store(serialize: bool) -> None:
    async with (
        elsewhere(reply=int, serialize=serialize) as jobs,
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
    class FailsOnce(Elsewhere):
        failed = False

        async def settle(self, delivery: ClaimedMessage, settlement: Any) -> None:
            if not self.failed:
                self.failed = True
                raise MailboxConnectionError("gone")
            await self.inner.settle(delivery, settlement)

    async with wrap(InMemoryMailbox("jobs"), FailsOnce) as jobs, open_mailbox("memory://results") as results:
        await jobs.send("x", reply_to=results)
        (message,) = await jobs.receive()
        with pytest.raises(MailboxConnectionError):
            await message.reply("answer")
        assert not message.is_settled
        await message.reply("answer")
        assert [m.body for m in await results.receive(max_messages=5)] == ["answer"]


async def test_no_reply_leaves_once_the_lease_is_lost() -> None:
    async with elsewhere() as jobs, open_mailbox("memory://results") as results:
        await jobs.send("x", reply_to=results)
        (message,) = await jobs.receive(visibility_timeout=0)
        with pytest.raises(ReceiptHandleExpiredError):
            await message.reply("answer")
        assert await results.approximate_count() == 0


@pytest.mark.parametrize("address", ["nosuch://results", "memory://", "memory://nobody", "memory://x?colour=red"])
async def test_an_address_that_leads_nowhere_is_refused_and_the_message_stays(address: str) -> None:
    async with elsewhere() as jobs:
        await jobs.send("x", reply_to=address)
        (message,) = await jobs.receive()
        with pytest.raises(ReplyNotAvailableError):
            await message.reply("answer")
        assert not message.is_settled
        await message.acknowledge()


async def test_a_mailbox_that_was_not_entered_has_nobody_to_keep_the_connection() -> None:
    jobs = elsewhere()
    results = open_mailbox("memory://results")
    await jobs.send("x", reply_to=results)
    (message,) = await jobs.receive()
    with pytest.raises(ReplyNotAvailableError, match="async with"):
        await message.reply("answer")
    await message.acknowledge()


async def test_a_store_that_does_not_answer_holds_up_no_reply_to_another(virtual_clock: Any) -> None:
    class Silent(WrappedBackend):
        async def open(self, scope: Any) -> None:
            await anyio.sleep_forever()

        def local_name(self, address: str) -> str | None:
            return "silent" if address == "silent://results" else None

        def sibling(self, name: str) -> Silent:
            return Silent(self.inner.sibling(name))

    began = anyio.current_time()
    async with (
        elsewhere() as jobs,
        open_mailbox("memory://results") as results,
        anyio.create_task_group() as group,
    ):
        jobs.reply_stores = (wrap(InMemoryMailbox("store"), Silent),)

        async def stuck() -> None:
            with pytest.raises(MailboxConnectionError, match="'silent://results' has not taken the reply within 10 s"):
                await message.reply("answer")
            assert not message.is_settled
            assert anyio.current_time() == began + 10

        await jobs.send("x", reply_to="silent://results")
        (message,) = await jobs.receive()
        group.start_soon(stuck)
        await anyio.wait_all_tasks_blocked()
        await jobs.send("x", reply_to=results)
        (other,) = await jobs.receive()
        await other.reply("answer")
        assert anyio.current_time() == began
        assert [m.body for m in await results.receive()] == ["answer"]


MOST = 16
"""Mailboxes that are kept open for replies."""


class Made(WrappedBackend):
    is_open = False

    async def open(self, scope: Any) -> None:
        await self.inner.open(scope)
        self.is_open = True

    async def close(self) -> None:
        await self.inner.close()
        self.is_open = False


class Slow(Made):
    def __init__(self, inner: Any, go_on: anyio.Event) -> None:
        super().__init__(inner)
        self.go_on = go_on

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        await self.go_on.wait()
        return await self.inner.send(envelopes)


class Answers(WrappedBackend):
    """A store of replies that remembers which mailboxes were made on it. Into the one named ``slow`` they go in their time."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.made: list[Made] = []
        self.go_on = anyio.Event()

    def sibling(self, name: str) -> Made:
        inner = self.inner.sibling(name)
        self.made.append(Slow(inner, self.go_on) if name == "slow" else Made(inner))
        return self.made[-1]


@pytest.fixture
def answers(tmp_path: Path) -> tuple[Mailbox[Any, Any], Answers]:
    """A mailbox on the store of the replies, which that of the requests is to know, and what is around its backend."""
    backends: list[Answers] = []

    def remember(inner: Any) -> Answers:
        backends.append(Answers(inner))
        return backends[-1]

    return wrap(SQLiteMailbox(f"{tmp_path}/replies.db"), remember), backends[-1]


async def _answer(jobs: Any, url: str) -> None:
    await jobs.send("x", reply_to=url)
    (message,) = await jobs.receive()
    await message.reply(url)


async def test_only_so_many_mailboxes_are_kept_open_for_replies_those_used_last(answers: Any, tmp_path: Path) -> None:
    """Where each requester of a fleet has a mailbox of its own, a worker would gather connections without end."""
    store, backend = answers
    first, second, *others = names = [f"requester-{number}" for number in range(MOST + 1)]

    async def are_open(*names: str) -> None:
        with anyio.fail_after(60):
            while sorted(each.name for each in backend.made if each.is_open) != sorted(names):
                await anyio.sleep(0.01)

    async with elsewhere() as jobs:
        jobs.reply_stores = (store,)
        for name in (*names[:-1], first, names[-1]):
            await _answer(jobs, f"sqlite:///{tmp_path}/replies.db?name={name}")
        await are_open(first, *others)
        await _answer(jobs, f"sqlite:///{tmp_path}/replies.db?name={second}")  # opened anew
        await are_open(first, second, *others[1:])
        assert len(backend.made) == MOST + 2
    await are_open()


async def test_a_mailbox_that_a_reply_is_on_its_way_to_is_not_closed(answers: Any, tmp_path: Path) -> None:
    store, backend = answers
    slow = f"sqlite:///{tmp_path}/replies.db?name=slow"
    async with elsewhere() as jobs:
        jobs.reply_stores = (store,)
        async with anyio.create_task_group() as group:
            group.start_soon(_answer, jobs, slow)
            while not backend.made or not backend.made[0].is_open:
                await anyio.sleep(0.01)
            for number in range(MOST + 1):
                await _answer(jobs, f"sqlite:///{tmp_path}/replies.db?name=requester-{number}")
            backend.go_on.set()
        async with open_mailbox(slow) as results:
            assert [m.body for m in await results.receive()] == [slow]


async def test_what_is_in_memory_only_is_kept_however_many_there_are() -> None:
    async with elsewhere() as jobs:
        for number in range(MOST + 4):
            async with open_mailbox(f"memory://results-{number}"):
                await jobs.send(number, reply_to=f"memory://results-{number}")
                (message,) = await jobs.receive()
                await message.reply(number)
        for number in range(MOST + 4):
            async with open_mailbox(f"memory://results-{number}") as results:
                assert [m.body for m in await results.receive()] == [number]


async def test_addresses_of_queues_that_nobody_has_leave_nothing_open() -> None:
    async with elsewhere() as jobs:
        for number in range(5):
            with pytest.raises(ReplyNotAvailableError, match="is open"):
                await _answer(jobs, f"memory://nobody-{number}")
        with anyio.fail_after(10):
            while any(each.state is MailboxState.OPEN for each in living("nobody-")):
                await anyio.sleep(0.001)


def living(prefix: str) -> list[Mailbox[Any, Any]]:
    """All mailboxes of such a name that there are in this process."""
    return [each for each in gc.get_objects() if isinstance(each, Mailbox) and each.name.startswith(prefix)]


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
                await message.dead_letter("no")  # with news for a requester, which goes nowhere either
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not (tmp_path / "made.db").exists()


async def test_what_a_handler_returns_after_it_has_acknowledged_goes_to_no_strange_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(job: int, ctx: Context) -> int:
        await ctx.message.acknowledge()
        return job

    jobs = InMemoryMailbox[Any, Any]("jobs")
    async with MainLoop(jobs, handle) as loop:
        await jobs.send(1, reply_to=f"sqlite:///{tmp_path}/made.db")
        with anyio.fail_after(10):
            while not loop.outcomes:
                await anyio.sleep(0.001)
    assert "was not sent" in caplog.text
    assert "reply_stores" in caplog.text
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
