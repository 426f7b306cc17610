"""What the mailbox port itself promises, whatever the backend: limits, life cycle, one settlement a delivery."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring.core.process import async_library
from mainspring.core.state_machine import MailboxState
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    MailboxClosedError,
    MailboxConnectionError,
    MessageSettledError,
    ReceiptHandleExpiredError,
    ReplyNotAvailableError,
)
from mainspring.mailbox.backend import Capabilities, MailboxStatistics
from mainspring.mailbox.memory.mailbox import InMemoryMailbox
from mainspring.mailbox.message import Ack, ClaimedMessage, Dead, Envelope
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from wrapped_backend import WrappedBackend, wrap

if TYPE_CHECKING:
    from mainspring.runtime.scope import DaemonScope

pytestmark = pytest.mark.anyio


class Store(InMemoryMailbox[Any, Any]):
    """A memory mailbox that has to be opened, and that fails when it is told to."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__("store", **keywords)
        self.failure: Exception | None = None
        self.calls: list[str] = []
        wrap(self, partial(FailingBackend, mailbox=self))

    def fail(self, what: str) -> None:
        self.calls.append(what)
        if self.failure is not None:
            raise self.failure


class FailingBackend(WrappedBackend):
    works_unopened = False

    def __init__(self, inner: Any, mailbox: Store) -> None:
        super().__init__(inner)
        self.mailbox = mailbox

    async def open(self, scope: DaemonScope) -> None:
        self.mailbox.fail("open")
        await self.inner.open(scope)

    async def close(self) -> None:
        self.mailbox.fail("close")
        await self.inner.close()

    async def settle(self, delivery: ClaimedMessage, settlement: Any) -> None:
        self.mailbox.fail("settle")
        await self.inner.settle(delivery, settlement)


BAD_SECONDS = [-1, math.nan, "5", None, 366 * 86_400 + 1]


@pytest.mark.parametrize(
    "keywords",
    [
        *({"delay": value} for value in BAD_SECONDS),
        *({"expires_in": value} for value in BAD_SECONDS if value is not None),
        {"expires_in": 0},
        {"priority": 32_768},
        {"priority": -32_768},
        {"priority": 1.5},
        {"priority": True},
        {"dedup_key": ""},
        {"dedup_key": 5},
        {"headers": {"a": 1}},
        {"headers": {1: "a"}},
        {"headers": ["a"]},
    ],
)
async def test_a_send_outside_its_limits_is_refused_by_name(keywords: Any) -> None:
    mailbox: InMemoryMailbox[str, Any] = InMemoryMailbox()
    with pytest.raises(InvalidParameterError, match=next(iter(keywords))):
        await mailbox.send("x", **keywords)
    if "dedup_key" not in keywords:
        with pytest.raises(InvalidParameterError, match=next(iter(keywords))):
            await mailbox.send_many(["x"], **keywords)
    assert await mailbox.approximate_count() == 0


@pytest.mark.parametrize(
    "keywords",
    [
        *({"max_messages": value} for value in (0, 1_001, -1, 1.0, True, "1", None)),
        *({"visibility_timeout": value} for value in (-1, 43_201, math.nan, math.inf, "60", None)),
        *({"wait_time_seconds": value} for value in (-1, math.nan, "1", None)),
    ],
)
async def test_a_receive_outside_its_limits_is_refused_by_name(keywords: Any) -> None:
    mailbox: InMemoryMailbox[str, Any] = InMemoryMailbox()
    await mailbox.send("x")
    with pytest.raises(InvalidParameterError, match=next(iter(keywords))):
        await mailbox.receive(**keywords)
    assert (await mailbox.counts()).pending == 1


async def test_the_limits_themselves_are_allowed() -> None:
    mailbox: InMemoryMailbox[str, Any] = InMemoryMailbox()
    await mailbox.send("x", delay=366 * 86_400, priority=-32_767, headers={}, expires_in=366 * 86_400, dedup_key="k")
    await mailbox.send("y", priority=32_767)
    (message,) = await mailbox.receive(max_messages=1_000, visibility_timeout=43_200, wait_time_seconds=math.inf)
    await message.extend_visibility(43_200)
    await message.nack(delay=366 * 86_400)
    assert (await mailbox.counts()).delayed == 2


async def test_nack_extension_and_pages_have_limits_and_leave_the_message_unsettled() -> None:
    mailbox: InMemoryMailbox[str, Any] = InMemoryMailbox()
    await mailbox.send("x")
    (message,) = await mailbox.receive()
    for delay in BAD_SECONDS:
        with pytest.raises(InvalidParameterError, match="delay"):
            await message.nack(delay=delay)  # type: ignore[arg-type]
    for timeout in (-1, 43_201, math.nan, "x"):
        with pytest.raises(InvalidParameterError, match="timeout"):
            await message.extend_visibility(timeout)  # type: ignore[arg-type]
    for limit in (0, 1.5, True):
        with pytest.raises(InvalidParameterError, match="limit"):
            await mailbox.dead_letters(limit=limit)  # type: ignore[arg-type]
    assert not message.is_settled
    await message.acknowledge()


@pytest.mark.parametrize("end", ["acknowledge", "nack", "release", "dead_letter", "reply"])
async def test_one_delivery_ends_once(end: str) -> None:
    mailbox: InMemoryMailbox[str, str] = InMemoryMailbox()
    inbox: InMemoryMailbox[str, Any] = InMemoryMailbox()
    await mailbox.send("x", reply_to=inbox)
    (message,) = await mailbox.receive()

    async def call(name: str) -> None:
        await getattr(message, name)(*({"dead_letter": ["no"], "reply": ["answer"]}.get(name, [])))

    await call(end)
    assert message.is_settled
    for again in ("acknowledge", "nack", "release", "dead_letter", "reply"):
        if (end, again) == ("reply", "acknowledge"):
            await call(again)
            continue
        with pytest.raises(MessageSettledError):
            await call(again)
    for later in (message.extend_visibility(5), message.save_checkpoint(b"1")):
        with pytest.raises(MessageSettledError):
            await later
    assert await inbox.approximate_count() == (end == "reply")


async def test_a_settlement_that_failed_may_be_tried_again() -> None:
    async with Store() as mailbox:
        await mailbox.send("x")
        (message,) = await mailbox.receive()
        mailbox.failure = MailboxConnectionError("gone")
        with pytest.raises(MailboxConnectionError):
            await message.acknowledge()
        assert not message.is_settled
        mailbox.failure = None
        await message.acknowledge()


async def test_a_reply_nobody_asked_for_is_refused() -> None:
    mailbox: InMemoryMailbox[str, str] = InMemoryMailbox()
    await mailbox.send("x")
    (message,) = await mailbox.receive()
    with pytest.raises(ReplyNotAvailableError, match="no reply_to"):
        await message.reply("answer")
    await message.acknowledge()


async def test_a_mailbox_is_used_between_open_and_close() -> None:
    mailbox = Store()
    calls = [
        lambda: mailbox.send("x"),
        lambda: mailbox.send_many(["x"]),
        mailbox.receive,
        mailbox.counts,
        mailbox.approximate_count,
        mailbox.purge,
        mailbox.dead_letters,
        mailbox.replay_dead_letters,
        mailbox.purge_dead_letters,
    ]

    async def all_refuse(state: str) -> None:
        for call in calls:
            with pytest.raises(MailboxClosedError, match=f"is {state}"):
                await call()

    await all_refuse("unopened")
    async with mailbox:
        assert mailbox.state is MailboxState.OPEN
        await mailbox.send("x")
        (message,) = await mailbox.receive()
    await all_refuse("closed")
    with pytest.raises(MailboxClosedError):
        await message.acknowledge()
    async with mailbox:
        await message.acknowledge()
    assert mailbox.calls == ["open", "close", "open", "settle", "close"]


async def test_an_event_loop_of_another_thread_is_refused_by_name() -> None:
    """There it would wait for wake-ups that are meant for the loop it is open in: it would stand still, and seem well."""
    async with Store() as mailbox:
        await mailbox.send("x")
        (message,) = await mailbox.receive()
        calls = [
            lambda: mailbox.send("x"),
            lambda: mailbox.send_many(["x"]),
            mailbox.receive,
            mailbox.counts,
            message.acknowledge,
            lambda: message.extend_visibility(9),
            mailbox.dead_letters,
        ]
        for call in calls:
            with pytest.raises(ConfigError, match=r"another (thread; open a mailbox of your own here|event loop)"):
                await anyio.to_thread.run_sync(anyio.run, call)
        await message.acknowledge()


async def test_code_after_a_close_inside_the_block_still_runs() -> None:
    ran = False
    async with Store() as mailbox:
        await mailbox.close()
        await anyio.lowlevel.checkpoint()
        ran = True
    assert ran
    assert mailbox.calls == ["open", "close"]


async def test_an_open_that_fails_leaves_it_unopened() -> None:
    mailbox = Store()
    mailbox.failure = MailboxConnectionError("no server")
    with pytest.raises(MailboxConnectionError, match="no server"):
        await mailbox.__aenter__()
    assert mailbox.state is MailboxState.UNOPENED
    mailbox.failure = None
    async with mailbox:
        await mailbox.send("x")


async def test_a_close_that_fails_is_heard_of_and_leaves_no_task_behind() -> None:
    mailbox = Store()
    with pytest.raises(MailboxConnectionError, match="flush"):
        async with mailbox:
            mailbox.failure = MailboxConnectionError("flush")
    assert mailbox.state is MailboxState.CLOSED


async def test_an_error_in_the_block_comes_out_by_itself() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with Store():
            raise KeyError("mine")


async def test_a_cancelled_block_still_closes() -> None:
    with anyio.move_on_after(0.01):
        async with Store() as mailbox:
            await anyio.sleep_forever()
    assert mailbox.state is MailboxState.CLOSED
    assert mailbox.calls == ["open", "close"]


async def test_undecodable_bytes_break_no_receive_though_they_cannot_be_buried_now() -> None:
    async with Store(serialize=True, body=str) as mailbox:
        await mailbox.backend.send([Envelope("bad", b"\xff")])
        await mailbox.send("good")
        mailbox.failure = MailboxConnectionError("gone")
        assert [m.body for m in await mailbox.receive(max_messages=2)] == ["good"]
        counts = await mailbox.counts()
        assert (counts.in_flight, counts.dead) == (2, 0)  # leased: it comes again
        mailbox.failure = None


async def test_types_that_differ_are_a_config_error_and_equal_ones_are_not() -> None:
    mailbox: InMemoryMailbox[int, Any] = InMemoryMailbox(body=int)
    mailbox.bind(body=int, reply=str)
    assert mailbox.is_bound
    with pytest.raises(ConfigError, match="holds body type int, but its handler takes str"):
        mailbox.bind(body=str)
    with pytest.raises(ConfigError, match="holds reply type str"):
        mailbox.bind(reply=int)


async def test_ids_are_new_and_sort_in_order_of_sending() -> None:
    mailbox: InMemoryMailbox[int, Any] = InMemoryMailbox()
    ids = [await mailbox.send(n) for n in range(20)]
    assert ids == sorted(set(ids))
    assert await InMemoryMailbox().send(1) not in ids


async def test_a_backend_that_cannot_run_here_says_so_when_it_is_opened() -> None:
    class Elsewhere(Store):
        capabilities = Capabilities(async_backends=frozenset({"asyncio", "trio"} - {async_library()}))

    with pytest.raises(ConfigError, match=f"not on {async_library()}"):
        await Elsewhere().__aenter__()
    with pytest.raises(ConfigError, match=f"not on {async_library()}"):
        await Elsewhere().exists()


async def test_a_store_that_cannot_tell_has_every_mailbox() -> None:
    mailbox = Store()
    assert await mailbox.exists()
    async with mailbox:
        assert await mailbox.exists()
    assert await InMemoryMailbox("jobs").exists()


async def test_a_name_given_as_a_string_means_one_dead_letter() -> None:
    mailbox: InMemoryMailbox[int, Any] = InMemoryMailbox()
    first, second = await mailbox.send_many([1, 2])
    for message in await mailbox.receive(max_messages=2):
        await message.dead_letter("no")
    assert await mailbox.purge_dead_letters(first) == 1
    assert await mailbox.replay_dead_letters(second) == 1


def test_what_is_kept_of_an_error_has_an_end() -> None:
    """A store's row holds only so much, and an error may quote the whole of what it was given."""

    def fail() -> None:
        raise ValueError(f"the body {'x' * 1_000_000} is none")

    try:
        fail()
    except ValueError as error:
        dead = Dead.of(error)
    assert dead.error.startswith("the body x")
    assert dead.error.endswith("x… (1,000,017 characters)")
    assert dead.traceback.startswith("Traceback (most recent call last):\n")
    assert ", in fail\n" in dead.traceback
    assert dead.traceback.endswith("x is none\n")
    assert len(dead.traceback) < 51_000
    assert Dead.of("x" * 3_000).error == f"{'x' * 2_000}… (3,000 characters)"


# --------------------------------------------------------------------------------------------------------- statistics


async def test_the_statistics_tell_which_receives_wait() -> None:
    mailbox = InMemoryMailbox[Any, Any]("jobs")
    received = []

    async def receive() -> None:
        received.extend(await mailbox.receive(wait_time_seconds=60))

    async with anyio.create_task_group() as tasks, mailbox:
        assert mailbox.statistics() == MailboxStatistics(connected=True)
        for waiting in (1, 2):
            tasks.start_soon(receive)
            await anyio.wait_all_tasks_blocked()
            assert mailbox.statistics() == MailboxStatistics(waiting_receives=waiting, connected=True)
        assert repr(mailbox) == "<InMemoryMailbox 'jobs' open, 2 waiting>"
        await mailbox.send("x")
        await anyio.wait_all_tasks_blocked()
        assert (len(received), mailbox.statistics().waiting_receives) == (1, 1)
        tasks.cancel_scope.cancel()
    assert mailbox.statistics() == MailboxStatistics()


async def test_a_mailbox_that_is_not_open_does_nothing(path: str) -> None:
    mailbox = SQLiteMailbox[Any, Any](path)
    assert mailbox.statistics() == MailboxStatistics()
    async with mailbox:
        await mailbox.send("x")
        now = mailbox.statistics()
        assert now.connected
        assert now.batches > 0
    assert mailbox.statistics() == MailboxStatistics()


async def test_what_it_is_doing_shows_in_its_repr() -> None:
    class Busy(WrappedBackend):
        def statistics(self) -> MailboxStatistics:
            return MailboxStatistics(waiting_receives=1, queued=2, in_flight=3, batches=4)

    mailbox = wrap(InMemoryMailbox[Any, Any]("jobs"), Busy)
    assert repr(mailbox) == "<InMemoryMailbox 'jobs' unopened>"
    async with mailbox:
        assert repr(mailbox) == "<InMemoryMailbox 'jobs' open, not connected, 1 waiting, 2 queued, 3 in flight>"
    assert repr(mailbox) == "<InMemoryMailbox 'jobs' closed>"


def test_how_things_look_to_people() -> None:
    assert Dead.of("reason") == Dead("reason", "Reject")
    assert Dead.of(ReceiptHandleExpiredError()).error == "ReceiptHandleExpiredError"
    assert Ack().reply is None
