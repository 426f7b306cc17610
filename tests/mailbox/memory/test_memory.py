"""The in-memory mailbox on the three event loops: what needs no clock."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from mainspring.errors import (
    ConfigError,
    MailboxFullError,
    ReceiptHandleExpiredError,
    ReplyNotAvailableError,
    SerializationError,
)
from mainspring.mailbox.memory.mailbox import YIELD_EVERY, InMemoryMailbox
from mainspring.mailbox.message import Envelope
from mainspring.mailbox.open import open_mailbox

pytestmark = pytest.mark.anyio


@dataclass
class Job:
    number: int


@pytest.fixture(params=[False, True], ids=["objects", "json"])
def serialize(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[False, True], ids=["unentered", "entered"])
async def mailbox(request: pytest.FixtureRequest, serialize: bool) -> Any:
    made: InMemoryMailbox[Job, str] = InMemoryMailbox("jobs", serialize=serialize, body=Job, reply=str)
    if request.param:
        async with made:
            yield made
    else:
        yield made


async def one(mailbox: InMemoryMailbox[Any, Any], **keywords: Any) -> Any:
    (message,) = await mailbox.receive(**keywords)
    return message


async def test_a_message_comes_back_as_it_was_sent_and_leaves_when_acknowledged(mailbox, serialize) -> None:
    job = Job(7)
    sent = await mailbox.send(job, headers={"trace": "1"})
    message = await one(mailbox)
    assert message.id == sent
    assert message.body == job
    assert (message.body is job) is not serialize
    assert message.headers == {"trace": "1"}
    assert (message.delivery_count, message.attempt) == (1, 1)
    assert await mailbox.approximate_count() == 1
    await message.acknowledge()
    counts = await mailbox.counts()
    assert (counts.waiting, counts.settled) == (0, 1)


async def test_it_hands_out_what_there_is_in_order_and_never_waits_to_fill_a_batch(mailbox) -> None:
    ids = await mailbox.send_many([Job(n) for n in range(5)])
    first = await mailbox.receive(max_messages=3)
    second = await mailbox.receive(max_messages=10, wait_time_seconds=60)
    assert [m.id for m in first + second] == ids
    assert await mailbox.receive() == []


async def test_higher_priorities_come_first_and_equal_ones_in_order(mailbox) -> None:
    for number, priority in enumerate([0, 5, -5, 5, 0]):
        await mailbox.send(Job(number), priority=priority)
    assert [m.body.number for m in await mailbox.receive(max_messages=10)] == [1, 3, 0, 4, 2]


async def test_released_messages_come_first_in_their_old_order_and_uncharged(mailbox) -> None:
    await mailbox.send_many([Job(n) for n in range(5)])
    batch = await mailbox.receive(max_messages=3)
    for message in (batch[1], batch[2], batch[0]):
        await message.release()
    again = await mailbox.receive(max_messages=5)
    assert [m.body.number for m in again] == [0, 1, 2, 3, 4]
    assert [(m.delivery_count, m.attempt) for m in again] == [(2, 1)] * 3 + [(1, 1)] * 2


async def test_a_nack_goes_to_the_tail_and_is_charged_unless_it_says_otherwise(mailbox) -> None:
    await mailbox.send_many([Job(n) for n in range(3)])
    first, second, third = await mailbox.receive(max_messages=3)
    await second.nack()
    await first.nack(charge=False)
    again = await mailbox.receive(max_messages=3)
    assert [(m.body.number, m.delivery_count, m.attempt) for m in again] == [(1, 2, 2), (0, 2, 1)]
    assert again[0].first_received_at == second.first_received_at
    await third.acknowledge()


async def test_the_receipt_of_an_earlier_delivery_opens_nothing(mailbox) -> None:
    await mailbox.send(Job(1))
    (stale,) = await mailbox.receive(visibility_timeout=0)
    held = await one(mailbox)
    assert held.receipt_handle != stale.receipt_handle
    for call in (stale.acknowledge, stale.nack, stale.release, lambda: stale.dead_letter("no")):
        with pytest.raises(ReceiptHandleExpiredError):
            await call()
    with pytest.raises(ReceiptHandleExpiredError):
        await stale.extend_visibility(60)
    with pytest.raises(ReceiptHandleExpiredError):
        await stale.save_checkpoint(b"1")
    assert not stale.is_settled
    await held.acknowledge()


async def test_a_dedup_key_gives_the_unfinished_message_until_that_is_done(mailbox) -> None:
    first = await mailbox.send(Job(1), dedup_key="k")
    assert await mailbox.send(Job(2), dedup_key="k") == first
    message = await one(mailbox)
    assert await mailbox.send(Job(3), dedup_key="k") == first
    await message.nack(delay=5)
    assert await mailbox.send(Job(4), dedup_key="k") == first
    await mailbox.purge()
    assert await mailbox.send(Job(5), dedup_key="k") != first
    await (await one(mailbox)).dead_letter("no use")
    assert await mailbox.send(Job(6), dedup_key="k")
    assert (await one(mailbox)).body == Job(6)


async def test_a_checkpoint_travels_to_the_next_delivery(mailbox) -> None:
    await mailbox.send(Job(1))
    message = await one(mailbox)
    assert message.checkpoint is None
    await message.save_checkpoint(b'{"at":1}')
    await message.nack()
    assert (await one(mailbox)).checkpoint == b'{"at":1}'


async def test_dead_letters_keep_everything_come_in_pages_and_can_be_replayed_or_discarded(mailbox, serialize) -> None:
    ids = await mailbox.send_many([Job(n) for n in range(5)], headers={"a": "b"})
    for message in await mailbox.receive(max_messages=5):
        try:
            raise RuntimeError(f"boom {message.body.number}")
        except RuntimeError as error:
            await message.dead_letter(error)
    page = await mailbox.dead_letters(limit=2)
    rest = await mailbox.dead_letters(limit=10, after=page[-1].message_id)
    assert [letter.message_id for letter in page + rest] == ids
    letter = page[1]
    assert (letter.body, letter.error, letter.error_type) == (Job(1), "boom 1", "RuntimeError")
    assert letter.raw == (b'{"number":1}' if serialize else Job(1))
    assert "raise RuntimeError" in letter.traceback
    assert (letter.delivery_count, letter.attempt, letter.headers) == (1, 1, {"a": "b"})
    assert letter.request_id == ids[1]
    assert await mailbox.replay_dead_letters([ids[3], "unknown"]) == 1
    again = await one(mailbox)
    assert (again.id, again.delivery_count, again.attempt) == (ids[3], 1, 1)
    assert await mailbox.purge_dead_letters(ids[:1]) == 1
    assert await mailbox.replay_dead_letters() == 3
    counts = await mailbox.counts()
    assert (counts.pending, counts.in_flight, counts.settled, counts.dead) == (3, 1, 1, 0)


async def test_a_purge_drops_all_but_the_dead_and_its_holders_are_told(mailbox) -> None:
    await mailbox.send_many([Job(n) for n in range(4)])
    await mailbox.send(Job(9), delay=100)
    held, dead = await mailbox.receive(max_messages=2)
    await dead.dead_letter("no")
    assert await mailbox.purge() == 4
    with pytest.raises(ReceiptHandleExpiredError):
        await held.acknowledge()
    counts = await mailbox.counts()
    assert (counts.waiting, counts.settled, counts.dead) == (0, 4, 1)


async def test_a_full_mailbox_refuses_all_of_a_batch_and_takes_more_once_some_are_settled() -> None:
    mailbox: InMemoryMailbox[int, Any] = InMemoryMailbox(capacity=3, body=int)
    await mailbox.send(0)
    with pytest.raises(MailboxFullError, match="1 of at most 3"):
        await mailbox.send_many([1, 2, 3])
    await mailbox.send_many([1, 2])
    message = await one(mailbox)
    with pytest.raises(MailboxFullError):
        await mailbox.send(3)
    await message.acknowledge()
    await mailbox.send(3)
    assert [m.body for m in await mailbox.receive(max_messages=9)] == [1, 2, 3]


async def test_a_wrong_body_is_refused_by_type_and_field(serialize) -> None:
    mailbox: InMemoryMailbox[Any, Any] = InMemoryMailbox(serialize=serialize, body=dict[str, int])
    with pytest.raises(SerializationError, match=r"dict\[str, int\].*: a: "):
        await mailbox.send({"a": "x"})
    assert await mailbox.approximate_count() == 0


async def test_an_object_sent_before_the_type_was_known_is_checked_when_it_is_received() -> None:
    mailbox: InMemoryMailbox[Any, Any] = InMemoryMailbox()
    await mailbox.send({"number": "no"})
    await mailbox.send(Job(2))
    mailbox.bind(body=Job)
    bad, good = await mailbox.receive(max_messages=2)
    with pytest.raises(SerializationError, match="Job"):
        _ = bad.body
    assert good.body == Job(2)
    await bad.nack()


async def test_bytes_that_are_no_json_die_with_their_raw_form_and_their_neighbours_live() -> None:
    mailbox: InMemoryMailbox[Any, Any] = InMemoryMailbox(serialize=True, body=Job)
    await mailbox.send(Job(1))
    await mailbox.backend.send(
        [Envelope("bad", b"\xff{"), Envelope("deep", b"[" * 100_000), Envelope("shape", b'{"other":1}')]
    )
    await mailbox.send(Job(2))
    messages = await mailbox.receive(max_messages=10)
    assert [m.id for m in messages][1] == "shape"
    assert [m.body for m in (messages[0], messages[2])] == [Job(1), Job(2)]
    with pytest.raises(SerializationError, match="number"):
        _ = messages[1].body
    dead = {letter.message_id: letter for letter in await mailbox.dead_letters()}
    assert dead["bad"].raw == b"\xff{"
    assert dead["bad"].body is None
    assert dead.keys() == {"bad", "deep"}


async def test_a_receive_of_nothing_but_undecodable_messages_goes_on_to_the_first_good_one() -> None:
    mailbox: InMemoryMailbox[Any, Any] = InMemoryMailbox(serialize=True, body=Job)
    await mailbox.backend.send([Envelope(f"bad{n}", b"\xff") for n in range(3)])
    await mailbox.send(Job(2))
    assert (await one(mailbox)).body == Job(2)
    assert (await mailbox.counts()).dead == 3


async def test_an_undecodable_message_that_cannot_be_buried_does_not_hold_the_receiver() -> None:
    mailbox: InMemoryMailbox[Any, Any] = InMemoryMailbox(serialize=True, body=Job)
    await mailbox.backend.send([Envelope("bad", b"\xff")])
    assert await mailbox.receive(visibility_timeout=0) == []  # the lease was over before it could be dead-lettered
    assert await mailbox.receive() == []
    assert (await mailbox.counts()).dead == 1


async def test_reply_and_acknowledgement_are_one_step(mailbox, serialize) -> None:
    inbox: InMemoryMailbox[str, Any] = InMemoryMailbox("inbox", body=str, serialize=not serialize)
    request = await mailbox.send(Job(1), reply_to=inbox)
    message = await one(mailbox)
    assert message.reply_to == inbox.address
    await message.reply("done")
    await message.acknowledge()  # already done, and says nothing
    answer = await one(inbox)
    assert (answer.body, answer.headers) == ("done", {"request_id": request})
    assert (await mailbox.counts()).settled == 1


async def test_no_reply_leaves_once_the_lease_is_lost(mailbox) -> None:
    inbox: InMemoryMailbox[str, Any] = InMemoryMailbox("inbox", body=str)
    await mailbox.send(Job(1), reply_to=inbox)
    (message,) = await mailbox.receive(visibility_timeout=0)
    with pytest.raises(ReceiptHandleExpiredError):
        await message.reply("late")
    assert await inbox.approximate_count() == 0


async def test_a_reply_that_does_not_fit_leaves_the_message_unsettled(mailbox) -> None:
    inbox: InMemoryMailbox[str, Any] = InMemoryMailbox("inbox", body=str, capacity=1)
    await inbox.send("full")
    await mailbox.send(Job(1), reply_to=inbox)
    message = await one(mailbox)
    with pytest.raises(MailboxFullError):
        await message.reply("done")
    with pytest.raises(SerializationError, match="str"):
        await message.reply(5)
    assert not message.is_settled
    await (await one(inbox)).acknowledge()
    await message.reply("done")
    assert (await one(inbox)).body == "done"


async def test_a_reply_to_a_bare_name_reaches_the_memory_mailbox_of_that_name(mailbox) -> None:
    results = open_mailbox("memory://results", body=str)
    await mailbox.send(Job(1), reply_to="results")
    await mailbox.send(Job(2), reply_to="memory://results")
    for message in await mailbox.receive(max_messages=2):
        await message.reply(f"done {message.body.number}")
    assert [m.body for m in await results.receive(max_messages=2)] == ["done 1", "done 2"]


async def test_a_reply_to_nobody_is_refused_and_the_message_stays(mailbox) -> None:
    inbox: InMemoryMailbox[str, Any] = InMemoryMailbox("inbox", body=str)
    await mailbox.send(Job(1), reply_to=inbox)
    await mailbox.send(Job(2), reply_to="nobody")
    await mailbox.send(Job(3))
    del inbox
    gc.collect()
    for message in await mailbox.receive(max_messages=3):
        with pytest.raises(ReplyNotAvailableError):
            await message.reply("done")
        assert not message.is_settled


async def test_a_sender_that_never_waits_lets_others_have_a_turn(mailbox) -> None:
    noticed = []

    async def other() -> None:
        noticed.append(True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        sends = 0
        while not noticed:
            await mailbox.send(Job(sends))
            sends += 1
            assert sends <= 3 * YIELD_EVERY  # trio may run the two in either order, but not again and again


async def test_a_cancelled_send_has_sent_nothing_and_a_cancelled_receive_claimed_nothing(mailbox) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await mailbox.send(Job(1))
    assert scope.cancelled_caught
    await mailbox.send(Job(2))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await mailbox.receive()
    assert scope.cancelled_caught
    counts = await mailbox.counts()
    assert (counts.pending, counts.in_flight) == (1, 0)


@pytest.mark.slow
async def test_memory_stays_flat_over_many_messages_though_their_leases_are_long() -> None:
    mailbox: InMemoryMailbox[bytes, Any] = InMemoryMailbox(body=bytes)

    async def run(count: int) -> None:
        for _ in range(count):
            await mailbox.send(b"x" * 1_000, expires_in=10_000)
            await mailbox.send(b"x" * 1_000)
            for message in await mailbox.receive(max_messages=2, visibility_timeout=40_000):
                await message.acknowledge()

    await run(1_500)  # past the size from which the heap is swept
    gc.collect()
    tracemalloc.start()
    try:
        await run(3_000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown < 600_000  # 6 MB of bodies went through; the dead items that wait to be swept are small


@pytest.mark.parametrize(
    "keywords",
    [{"capacity": 0}, {"capacity": True}, {"capacity": 1.5}, {"serialize": "perhaps"}, {"name": ""}, {"name": 5}],
)
async def test_wrong_constructor_values_are_config_errors(keywords) -> None:
    with pytest.raises(ConfigError):
        InMemoryMailbox(**keywords)


async def test_a_store_without_transactions_names_one_that_has_them() -> None:
    async with InMemoryMailbox("jobs", body=str) as box:
        with pytest.raises(
            ConfigError, match=r"has no transactions \(Capabilities.transactions\); a postgresql:// mailbox has$"
        ):
            await box.send("x", connection=object())
        await box.send("x")
        [message] = await box.receive()
        with pytest.raises(
            ConfigError, match=r"has no transactions \(Capabilities.transactions\); a postgresql:// mailbox has$"
        ):
            async with box.transaction(message):
                pass
