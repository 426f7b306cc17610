"""Limits across the fleet: permits of a task and of a key, rates, order, fair shares, and pauses."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from mainspring.errors import MailboxClosedError, ReceiptHandleExpiredError
from mainspring.mailbox.limiters import ALL_TASKS, Blocks, LimitChange, LimitState, TaskLimits
from mainspring.mailbox.message import CancelOutcome, MessagePlace, MessageQuery, RescheduleOutcome
from mainspring.policies import Rate
from mainspring.testing.mailbox_contract.harness import AnyMailbox, ContractError, Harness, check, equal, on_mailbox

if TYPE_CHECKING:
    from mainspring.mailbox.message import Message

LEASE = 600.0


async def _send(
    box: AnyMailbox, *bodies: Any, task: str = "t", key: str | None = None, weight: float = 1.0, **options: Any
) -> list[str]:
    """Send calls of a task, in one step."""
    envelopes = [box.prepare(body, **options) for body in bodies]
    for envelope in envelopes:
        envelope.task, envelope.key, envelope.weight = task, key, weight
    return await box.send_prepared(envelopes)


async def _limit(box: AnyMailbox, task: str = "t", **limits: Any) -> None:
    await box.backend.change_limits([LimitChange(task, TaskLimits(**limits))])


async def _claim(box: AnyMailbox, most: int = 100, lease: float = LEASE) -> list[Message[Any, Any]]:
    return await box.receive(max_messages=most, visibility_timeout=lease)


def _bodies(messages: list[Message[Any, Any]]) -> list[Any]:
    return [message.body for message in messages]


@on_mailbox("limits")
async def a_task_runs_no_more_than_its_concurrency(h: Harness, box: AnyMailbox) -> None:
    """At most ``concurrency`` messages of a task are in flight. The others stay pending, and come as some are settled."""
    await _limit(box, concurrency=2)
    await _send(box, *range(5))
    await _send(box, "other", task="u")
    first = await _claim(box)
    equal(sorted(map(str, _bodies(first))), ["0", "1", "other"], "claimed at first")
    await h.counts(box, pending=3, in_flight=3)
    await h.none(box, "the task is at its concurrency")
    await first[0].acknowledge()
    (third,) = await _claim(box)
    equal((third.body, third.delivery_count, third.attempt), (2, 1, 1), "the third, as it was never delivered")
    await first[1].dead_letter("given up")
    await third.nack(delay=60)
    equal(_bodies(await _claim(box)), [3, 4], "after a death and a nack")


@on_mailbox("limits")
async def a_waiting_claim_wakes_when_a_limit_allows(h: Harness, box: AnyMailbox) -> None:
    """A waiting receive gets a message as soon as a settlement or a wider limit allows it."""
    await _limit(box, concurrency=1)
    await _send(box, "a", "b", "c")
    (first,) = await _claim(box)
    async with h.waiting(box, 1) as received:
        await first.acknowledge()
    equal(_bodies([message for each in received for message in each]), ["b"], "claimed by the receive that waited")
    async with h.waiting(box, 1) as received:
        await box.backend.change_limits([LimitChange("t", concurrency=2)])
    equal(_bodies([message for each in received for message in each]), ["c"], "claimed as the limit was widened")


@on_mailbox("limits")
async def each_key_has_its_own_concurrency(h: Harness, box: AnyMailbox) -> None:
    """With a concurrency of keys, each key of the task runs that many. It does not limit a call without a key."""
    await _limit(box, key_concurrency=1)
    for key in ("a", "b"):
        await _send(box, f"{key}1", f"{key}2", key=key)
    await _send(box, "none1", "none2")
    messages = await _claim(box)
    equal(sorted(_bodies(messages)), ["a1", "b1", "none1", "none2"], "claimed at first")
    for message in messages:
        if message.body == "b1":
            await message.acknowledge()
    equal(_bodies(await _claim(box)), ["b2"], "after the first of b was done")
    await h.counts(box, pending=1, in_flight=4, settled=1)


@on_mailbox("limits")
async def a_key_and_its_task_both_limit(h: Harness, box: AnyMailbox) -> None:
    """With limits of a task and of its keys, both hold, and a waiting key does not hold up another key."""
    await _limit(box, concurrency=2, key_concurrency=1)
    await _send(box, "a1", "a2", "a3", key="a")
    await _send(box, "b1", key="b")
    await _send(box, "c1", key="c")
    first = {message.body: message for message in await _claim(box)}
    equal(set(first), {"a1", "b1"}, "one of each key, two of the task")
    await first["b1"].acknowledge()
    (third,) = await _claim(box)
    equal(third.body, "c1", "a2 must wait for a1, so c1 comes")
    await first["a1"].acknowledge()
    equal(_bodies(await _claim(box)), ["a2"], "after a1")


@on_mailbox("limits")
async def a_rate_spreads_the_claims(h: Harness, box: AnyMailbox) -> None:
    """With a rate, messages become claimable one by one, each an interval after the last; a wait ends at that instant."""
    interval = h.short
    await _limit(box, rate=Rate(1, interval))
    await _send(box, *range(3))
    with h.within(interval):
        equal(_bodies(await _claim(box)), [0], "at once")
        await h.none(box, "the rate is used up")
    with h.takes(interval, "the wait for the rate") if h.virtual else nullcontext():
        equal((await h.one(box, wait=h.wait, lease=LEASE)).body, 1, "after an interval")
    await h.pass_time(10 * interval)
    equal(_bodies(await _claim(box)), [2], "a single message after the wait")


@on_mailbox("limits")
async def a_burst_may_begin_at_once(h: Harness, box: AnyMailbox) -> None:
    """A rate with a burst lets ``burst`` messages begin at once, also after a long time without claims."""
    await _limit(box, rate=Rate(100, 100 * LEASE, burst=3))
    await _send(box, *range(10))
    await h.pass_time(h.short)
    equal(_bodies(await _claim(box)), [0, 1, 2], "claimed in spite of the time")
    await h.none(box, "the burst is used up")
    await h.counts(box, pending=7, in_flight=3)


@on_mailbox("limits")
async def a_key_has_its_own_rate(h: Harness, box: AnyMailbox) -> None:
    """A rate of keys holds for each key."""
    await _limit(box, key_rate=Rate(1, LEASE))
    for key in ("a", "b"):
        await _send(box, f"{key}1", f"{key}2", key=key)
    messages = await _claim(box)
    equal(sorted(_bodies(messages)), ["a1", "b1"], "one of each")
    for message in messages:
        await message.acknowledge()
    await h.none(box, "the rates are used up, also when all is done")


@on_mailbox("limits")
async def messages_of_a_key_come_in_order(h: Harness, box: AnyMailbox) -> None:
    """With a key's concurrency of 1, its messages come one at a time in the order of their sends, a released one first."""
    await _limit(box, key_concurrency=1)
    for number in range(4):
        await _send(box, number, key="k")
    (first,) = await _claim(box)
    await first.release()
    seen = []
    while messages := await _claim(box):
        (message,) = messages
        seen.append(message.body)
        await message.acknowledge()
    equal(seen, [0, 1, 2, 3], "the order")


@on_mailbox("limits")
async def a_retry_blocks_its_key_where_it_is_to(h: Harness, box: AnyMailbox) -> None:
    """With ``Blocks.RETRY`` a message that waits for its next attempt holds up its key; with ``RUNNING`` it does not."""
    for task, blocks in (("strict", Blocks.RETRY), ("loose", Blocks.RUNNING)):
        await _limit(box, task, key_concurrency=1, blocks=blocks)
        await _send(box, 0, 1, task=task, key="k")
        (first,) = await _claim(box)
        async with h.ending(h.short):
            await first.nack(delay=h.short)
            meanwhile = await _claim(box)
            equal(_bodies(meanwhile), [] if blocks is Blocks.RETRY else [1], f"meanwhile, {task}")
            for message in meanwhile:
                await message.acknowledge()
        again = await h.one(box, lease=LEASE, wait=h.patience)
        equal((again.body, again.attempt), (0, 2), f"the next attempt, {task}")
        await again.acknowledge()
        for message in await _claim(box):
            await message.acknowledge()
    await h.counts(box, settled=4)


@on_mailbox("limits")
async def an_expired_lease_keeps_the_order_of_its_key(h: Harness, box: AnyMailbox) -> None:
    """With ``Blocks.RETRY`` a message whose worker died is delivered again before later ones of its key."""
    await _limit(box, key_concurrency=1, blocks=Blocks.RETRY)
    await _send(box, 0, 1, key="k")
    async with h.ending(h.short):
        await h.one(box, lease=h.short)
    again = await h.one(box, lease=LEASE, wait=h.patience)
    equal((again.body, again.delivery_count), (0, 2), "the message whose lease ended")
    await again.acknowledge()
    equal(_bodies(await _claim(box)), [1], "then the next")


@on_mailbox("limits")
async def a_dead_letter_blocks_its_key_where_it_is_to(h: Harness, box: AnyMailbox) -> None:
    """With ``Blocks.DEAD`` a dead letter holds up its key until it was replayed and done, or is purged."""
    await _limit(box, key_concurrency=1, blocks=Blocks.DEAD)
    await _send(box, 0, 1, 2, key="k")
    (first,) = await _claim(box)
    await first.dead_letter("broken")
    await h.none(box, "the dead letter blocks its key")
    await h.counts(box, pending=2, dead=1)
    equal(await box.replay_dead_letters([first.id]), 1, "replayed")
    (again,) = await _claim(box)
    equal(again.body, 0, "the replayed one")
    await again.acknowledge()
    (second,) = await _claim(box)
    equal(second.body, 1, "then the next")
    await second.dead_letter("broken, too")
    await h.none(box, "the second dead letter blocks its key")
    equal(await box.purge_dead_letters([second.id]), 1, "purged")
    equal(_bodies(await _claim(box)), [2], "after the purge")


@on_mailbox("limits")
async def keys_take_turns(h: Harness, box: AnyMailbox) -> None:
    """A key with many messages does not hold up another: the message of a new key is among the next."""
    await _send(box, *(f"a{n}" for n in range(50)), key="a")
    begun = await _claim(box, 5)
    equal(_bodies(begun), [f"a{n}" for n in range(5)], "while there is one key")
    await _send(box, *(f"b{n}" for n in range(5)), key="b")
    await _send(box, "c0", key="c")
    following = _bodies(await _claim(box, 12))
    check("c0" in following[:4], f"the only message of c is not among the next: {following}")
    check({f"b{n}" for n in range(5)} <= set(following), f"b has not its share of the next twelve: {following}")
    of_a = [int(body[1:]) for body in following if body[0] == "a"]
    equal(of_a, sorted(of_a), "the order of a")


@on_mailbox("limits")
async def keys_take_turns_at_the_limiter_of_their_task(h: Harness, box: AnyMailbox) -> None:
    """A new key is among the next, also while the messages of another key wait for a permit of the task."""
    await _limit(box, concurrency=1)
    await _send(box, *(f"a{n}" for n in range(50)), key="a")
    (message,) = await _claim(box)
    await _send(box, "b0", "b1", key="b")
    seen = []
    for _ in range(6):
        await message.acknowledge()
        (message,) = await _claim(box)
        seen.append(message.body)
    check("b0" in seen[:2], f"the first of b is not among the next two: {seen}")
    check("b1" in seen[:4], f"the second of b is not among the next four: {seen}")
    of_a = [body for body in seen if body[0] == "a"]
    equal(of_a, [f"a{n}" for n in range(1, len(of_a) + 1)], "the order of a")


@on_mailbox("limits")
async def weights_divide_the_turns(h: Harness, box: AnyMailbox) -> None:
    """A key of weight 3 has three messages claimed for one of a key of weight 1."""
    await _send(box, *(f"a{n}" for n in range(60)), key="a", weight=3.0)
    await _send(box, *(f"b{n}" for n in range(60)), key="b")
    shares = Counter(body[0] for body in _bodies(await _claim(box, 40)))
    check(28 <= shares["a"] <= 32, f"of forty, a has {shares['a']} and b {shares['b']}")


@on_mailbox("limits")
async def messages_without_a_task_keep_their_order(h: Harness, box: AnyMailbox) -> None:
    """Limits of tasks change nothing for other messages: they come in the order of their sends."""
    await _limit(box, concurrency=1)
    await _send(box, "t1", "t2")
    await box.send_many(list(range(5)))
    bodies = _bodies(await _claim(box))
    equal([body for body in bodies if body != "t1"], list(range(5)), "messages without a task")
    check("t2" not in bodies, "the limit of the task")


@on_mailbox("limits")
async def a_paused_task_waits(h: Harness, box: AnyMailbox) -> None:
    """No message of a paused task is claimed, also if it was sent before. A resumed task goes on in its order."""
    await _send(box, *range(3))
    (first,) = await _claim(box, 1)
    await _send(box, "other", task="u")
    await box.backend.change_limits([LimitChange("t", paused=True)])
    await _send(box, 3)
    equal(_bodies(await _claim(box)), ["other"], "while it is paused")
    await h.counts(box, pending=3, in_flight=2)
    await first.acknowledge()
    async with h.waiting(box, 1) as received:
        await box.backend.change_limits([LimitChange("t", paused=False)])
    rest = [message for each in received for message in each]
    equal(_bodies([*rest, *await _claim(box)]), [1, 2, 3], "when it was resumed")


@on_mailbox("pause")
async def a_paused_mailbox_waits(h: Harness, box: AnyMailbox) -> None:
    """No message of a paused mailbox is claimed until it is resumed. Sends and settlements go on."""
    await box.send_many(["a", "b"])
    (first,) = await _claim(box, 1)
    await box.pause()
    await _send(box, "c")
    await h.none(box, "the mailbox is paused")
    await first.acknowledge()
    await h.counts(box, pending=2, settled=1)
    async with h.waiting(box, 1) as received:
        await box.resume()
    rest = [message for each in received for message in each]
    equal(sorted(_bodies([*rest, *await _claim(box)])), ["b", "c"], "when it was resumed")


@on_mailbox("pause", "cross_process")
async def a_pause_holds_for_every_mailbox_object(h: Harness, box: AnyMailbox) -> None:
    """A pause stops receives that wait in other mailbox objects. A message that comes during it is claimed as it ends."""
    async with h.open() as other:
        async with h.waiting(other, 2) as received:
            await box.pause()
            await h.rest()
            await box.send("a")
            await h.rest()
            equal(received, [], "received during the pause")
            await h.counts(box, pending=1)
            await box.send("b")
            await box.resume()
        equal(sorted(_bodies([message for each in received for message in each])), ["a", "b"], "when it was resumed")


@on_mailbox("pause", "durable")
async def a_pause_outlives_the_mailbox_object(h: Harness, box: AnyMailbox) -> None:
    """A mailbox that is opened during a pause is paused."""
    async with h.open("kept") as before:
        await before.send("a")
        await before.pause()
    async with h.open("kept") as after:
        await h.none(after, "the mailbox is paused")
        await after.resume()
        equal((await h.one(after)).body, "a", "when it was resumed")


@on_mailbox("concurrency")
async def a_mailbox_has_a_concurrency(h: Harness, box: AnyMailbox) -> None:
    """The concurrency of the whole mailbox limits the messages in flight of all tasks. A receive goes on as there is room."""
    await box.backend.change_limits([LimitChange(ALL_TASKS, TaskLimits(concurrency=2))])
    await box.send("a")
    await _send(box, "b", "c")
    first = await _claim(box)
    equal(sorted(_bodies(first)), ["a", "b"], "the concurrency of the mailbox")
    await h.none(box, "the mailbox is at its concurrency")
    async with h.waiting(box, 1) as received:
        await first[0].acknowledge()
    equal(_bodies([message for each in received for message in each]), ["c"], "as there was room")


@on_mailbox("concurrency")
async def a_concurrency_of_the_mailbox_is_changed(h: Harness, box: AnyMailbox) -> None:
    """A narrower one lets messages in flight go on, a wider one wakes receives, and None is what the code declares."""
    await box.send_many(list(range(8)))
    first = await _claim(box, 3)
    await box.set_concurrency(2)
    await first.pop().nack(delay=1_000)
    await h.none(box, "two are in flight, and two may be")
    async with h.waiting(box, 1) as received:
        await box.set_concurrency(3)
    first += [message for each in received for message in each]
    equal(len(first), 3, "in flight, as the limit was widened")
    await box.backend.change_limits([LimitChange(ALL_TASKS, TaskLimits(concurrency=4))])
    await h.none(box, "three may be in flight, though the code says four")
    await box.set_concurrency(None)
    equal(len(await _claim(box)), 1, "claimed within what the code says")
    await box.backend.change_limits([LimitChange(ALL_TASKS, TaskLimits())])
    equal(len(await _claim(box)), 3, "claimed without a limit")


@on_mailbox("concurrency")
async def a_lease_that_ends_makes_room(h: Harness, box: AnyMailbox) -> None:
    """A message whose worker died is delivered again, or makes room for another, within the concurrency."""
    await box.set_concurrency(1)
    await box.send_many(["a", "b"])
    async with h.ending(h.short):
        equal((await h.one(box, lease=h.short)).body, "a", "the first")
    seen = []
    for _ in range(2):
        message = await h.one(box, wait=h.patience or h.wait)
        seen.append((message.body, message.attempt))
        await h.none(box, "one may be in flight")
        await message.acknowledge()
    equal(sorted(seen), [("a", 2), ("b", 1)], "one after the other")


@on_mailbox("concurrency")
async def a_receive_does_not_wait_for_room_for_more(h: Harness, box: AnyMailbox) -> None:
    """A receive of several messages returns what the concurrency allows, and does not wait until it allows more."""
    await box.set_concurrency(2)
    async with h.waiting(box, 1) as received:
        await box.send("a")
    equal(_bodies(received[0]), ["a"], "received by a receive that waited")
    await box.send_many(["b", "c"])
    with h.at_once("a receive of more than may be in flight"):
        found = await box.receive(max_messages=10, wait_time_seconds=h.wait, visibility_timeout=LEASE)
    equal(_bodies(found), ["b"], "received as there was room for one")


@on_mailbox("pause", "concurrency")
async def limits_of_the_mailbox_are_listed(h: Harness, box: AnyMailbox) -> None:
    """``limits()`` returns whether the mailbox is paused, its declared and changed concurrency, and the messages in flight."""
    equal(await box.limits(), [], "of a new mailbox")
    await box.backend.change_limits([LimitChange(ALL_TASKS, TaskLimits(concurrency=5))])
    await box.send_many(["a", "b"])
    await h.one(box)
    async with h.open() if h.can("cross_process") else nullcontext(box) as other:
        await other.set_concurrency(3)
        await other.pause()
    expected = LimitState(ALL_TASKS, TaskLimits(concurrency=5), paused=True, concurrency=3, running=1)
    equal(await box.limits(), [expected], "limits")
    await box.resume()
    await box.set_concurrency(None)
    await box.backend.change_limits([LimitChange(ALL_TASKS, TaskLimits())])
    equal(await box.limits(), [], "when all was taken back")


@on_mailbox("limits")
async def a_narrower_limit_holds_for_what_waits(h: Harness, box: AnyMailbox) -> None:
    """A limit that is declared or narrowed later holds for messages sent before. A limit that is taken back does not."""
    await _send(box, *range(6))
    await _limit(box, concurrency=3)
    first = await _claim(box)
    equal(_bodies(first), [0, 1, 2], "within a limit newer than they are")
    await box.backend.change_limits([LimitChange("t", concurrency=1)])
    await first[0].acknowledge()
    await h.none(box, "two are in flight, and one may be")
    for message in first[1:]:
        await message.acknowledge()
    (fourth,) = await _claim(box)
    equal(fourth.body, 3, "as it is the only one")
    await box.backend.change_limits([LimitChange("t", concurrency=0)])
    equal(_bodies(await _claim(box)), [4, 5], "within what was declared")


@on_mailbox("limits")
async def a_narrower_limit_of_keys_holds_for_what_waits(h: Harness, box: AnyMailbox) -> None:
    """A limit of keys holds for messages that are ready already, and the first of a key comes first."""
    await _limit(box, key_concurrency=3)
    await _send(box, *range(3), key="k")
    await _limit(box, key_concurrency=1)
    for number in range(3):
        (message,) = await _claim(box)
        equal(message.body, number, "the first of its key")
        await message.acknowledge()
    await h.counts(box, settled=3)


@on_mailbox("limits")
async def permits_are_got_in_one_order(h: Harness, box: AnyMailbox) -> None:
    """Messages of one key never wait for each other for ever when limits change while they wait."""
    await _limit(box, key_concurrency=1)
    await _send(box, *range(3), key="k")
    await _limit(box)
    async with h.ending(h.short):
        await _claim(box, 1, h.short)
        await box.backend.change_limits([LimitChange("t", paused=True)])
    await h.due_counts(box, pending=3)
    await box.backend.change_limits([LimitChange("t", TaskLimits(rate=Rate(1_000), key_concurrency=1))])
    await _send(box, 3, key="k")
    await box.backend.change_limits([LimitChange("t", paused=False)])
    seen = []
    for _ in range(4):
        message = await h.one(box, lease=LEASE, wait=h.wait)
        seen.append(message.body)
        await message.acknowledge()
    equal(sorted(seen), [0, 1, 2, 3], "all of them")


@on_mailbox("limits", "cancel", "reschedule", "lookup")
async def a_retry_that_is_moved_keeps_its_key(h: Harness, box: AnyMailbox) -> None:
    """A message that waits for its next attempt blocks its key, also after a reschedule, until it is cancelled."""
    await _limit(box, key_concurrency=1, blocks=Blocks.RETRY)
    await _send(box, 0, 1, key="k")
    (first,) = await _claim(box)
    await first.nack(delay=1_000)
    await box.backend.reschedule(first.id, 2_000)
    await h.none(box, "the retry blocks its key")
    await box.backend.reschedule(first.id, 0)
    (again,) = await _claim(box)
    equal(again.body, 0, "the message that was moved to now")
    await again.nack(delay=1_000)
    await box.cancel(first.id)
    equal(_bodies(await _claim(box)), [1], "after the cancellation")


@on_mailbox("limits", "reschedule", "lookup")
async def a_due_retry_that_is_moved_keeps_its_key(h: Harness, box: AnyMailbox) -> None:
    """A message that is due for its next attempt still blocks its key once it is put off. A new message does not."""
    await _limit(box, concurrency=1, key_concurrency=1, blocks=Blocks.RETRY)
    (moved, _) = await _send(box, 0, 1, key="k")
    (first,) = await _claim(box)
    await first.nack()
    await box.backend.reschedule(moved, 1_000)
    await h.none(box, "the retry blocks its key")
    await box.backend.reschedule(moved, 0)
    (again,) = await _claim(box)
    equal(again.body, 0, "the retry, as it was moved to now")
    await _send(box, "other", key="l")
    await again.nack()
    await box.backend.reschedule(moved, 1_000)  # where it waits for the permit of its task, maybe
    (other,) = await _claim(box)
    equal(other.body, "other", "of another key")
    await other.acknowledge()
    await h.none(box, "the retry still blocks its key")
    await box.backend.reschedule(moved, 0)
    for body in (0, 1):
        (message,) = await _claim(box)
        equal(message.body, body, "in order, after all")
        await message.acknowledge()
    (new, _) = await _send(box, 2, 3, key="k")
    await box.backend.reschedule(new, 1_000)
    equal(_bodies(await _claim(box)), [3], "as the message before was never begun")


@on_mailbox("limits", "expiry")
async def an_expired_retry_blocks_its_key_where_a_dead_letter_is_to(h: Harness, box: AnyMailbox) -> None:
    """With ``Blocks.DEAD`` a message that was delivered, and expires before its next attempt, blocks its key as a dead letter.

    A message that was never delivered does not, and with another ``Blocks`` none does.
    """
    for blocks, expected in ((Blocks.DEAD, ["after new"]), (Blocks.RETRY, ["after due", "after late", "after new"])):
        task = blocks.value
        await _limit(box, task, key_concurrency=1, key_rate=Rate(1_000, burst=1), blocks=blocks)
        ids = []
        async with h.ending(h.short):
            for key in ("due", "late"):
                ids += await _send(box, key, task=task, key=key, expires_in=h.short)
                await _send(box, f"after {key}", task=task, key=key)
            for message in await _claim(box):
                await message.nack(delay=1_000 if message.body == "late" else 0)
            await _send(box, "new", task=task, key="new", expires_in=h.short)
            await _send(box, "after new", task=task, key="new")
        messages = await _claim(box)
        equal(sorted(_bodies(messages)), expected, f"as the first of each key has expired, {task}")
        equal(len(await box.dead_letters()), 3, f"dead letters, {task}")
        equal(await box.purge_dead_letters(ids), 2, "purged")
        messages += await _claim(box)
        equal(sorted(_bodies(messages)), ["after due", "after late", "after new"], f"after the purge, {task}")
        for message in messages:
            await message.acknowledge()
        await box.purge_dead_letters()


@on_mailbox("limits")
async def a_purge_leaves_what_is_spent_of_a_rate(h: Harness, box: AnyMailbox) -> None:
    """A purge ends all permits, and lets no more be claimed in a time than the rates of the task and its keys allow."""
    slow = Rate(1, 1_000)
    for task, limits in (("t", {"rate": slow}), ("u", {"key_rate": slow}), ("v", {"concurrency": 1})):
        await _limit(box, task, **limits)
        await _send(box, f"{task} 0", f"{task} 1", task=task, key="k")
    equal(sorted(_bodies(await _claim(box))), ["t 0", "u 0", "v 0"], "one of each task")
    equal(await box.purge(), 6, "purged")
    for task in ("t", "u", "v"):
        await _send(box, f"{task} 2", task=task, key="k")
    await _send(box, "other", task="u", key="l")
    equal(sorted(_bodies(await _claim(box))), ["other", "v 2"], "after the purge, what no rate holds back")


@on_mailbox("limits", "cancel", "reschedule", "lookup")
async def a_message_that_waits_at_a_limit_is_like_any_other(h: Harness, box: AnyMailbox) -> None:
    """A message that waits at a limiter is pending. It can be cancelled, moved, purged, and expire. Its permit is free."""
    await _limit(box, concurrency=1, key_concurrency=1)
    ids = await _send(box, *range(5), key="k")
    (old,) = await _send(box, "old", key="k", expires_in=h.short)
    (found,) = await box.backend.find([ids[1]])
    equal((found.place, found.message.body is not None, found.key), (MessagePlace.PENDING, True, "k"), "as it is found")
    equal(await box.cancel(ids[1]), CancelOutcome.REMOVED, "a cancellation of a waiting message")
    equal(
        await box.backend.reschedule(ids[2], 1_000), RescheduleOutcome.RESCHEDULED, "a reschedule of a waiting message"
    )
    equal(await box.cancel(ids[0]), CancelOutcome.REMOVED, "a cancellation of a ready message")
    (third,) = await _claim(box)
    equal(third.body, 3, "the next, as the first were cancelled and moved")
    equal(await box.cancel(third.id), CancelOutcome.CANCELLED, "a cancellation of a message in flight")
    (fourth,) = await _claim(box)
    equal(fourth.body, 4, "the next")
    await h.pass_time(h.short)
    await h.due_counts(box, delayed=1, in_flight=1, dead=1, settled=3)
    equal([letter.message_id for letter in await box.dead_letters()], [old], "dead of its age")
    await _send(box, "x", "y", key="k")
    equal(await box.purge(), 4, "purged")
    await _send(box, "z", key="k")
    equal(_bodies(await _claim(box)), ["z"], "after the purge")


@on_mailbox("limits")
async def limits_are_listed(h: Harness, box: AnyMailbox) -> None:
    """``limits()`` returns the declared, paused and changed limits, the permits that are out and the waiting messages."""
    equal(await box.backend.limits(), [], "of a new mailbox")
    limits = TaskLimits(2, Rate(5, 60, 2), 1, Rate(1, 10), Blocks.RETRY)
    await box.backend.change_limits([LimitChange("t", limits), LimitChange("u", paused=True)])
    await _send(box, 0, 1, 2, key="k")
    await _send(box, 3, task="u")
    await _claim(box)
    expected = [LimitState("t", limits, running=1, waiting=2), LimitState("u", TaskLimits(), paused=True, waiting=1)]
    equal(await box.backend.limits(), expected, "limits")
    async with h.open() if h.can("cross_process") else nullcontext(box) as other:
        await other.backend.change_limits([LimitChange("t", concurrency=7), LimitChange("u", paused=False)])
    (state,) = await box.backend.limits()
    equal((state.task, state.limits, state.concurrency, state.most), ("t", limits, 7, 7), "after a change elsewhere")
    await box.backend.change_limits([LimitChange("t", TaskLimits(), concurrency=0)])
    equal(await box.backend.limits(), [], "when all was taken back")


@on_mailbox("limits")
async def a_message_in_flight_gets_another_task(h: Harness, box: AnyMailbox) -> None:
    """A message that is given another task is released, and waits, in its place, at the limiters of that."""
    await _limit(box, concurrency=1, key_concurrency=1)
    await _limit(box, "old", concurrency=2)
    await _send(box, "o1", "o2", "o3", task="old", key="a")
    await _send(box, "t1", key="a")
    first = {message.body: message for message in await _claim(box)}
    equal(set(first), {"o1", "o2", "t1"}, "claimed by the limits of each")
    for body in ("o1", "o2"):
        delivery = first[body].delivery
        check(await box.backend.set_task(delivery, "t"), f"{body} got another task")
    check(not await box.backend.set_task(first["t1"].delivery, "t"), "t1 had the task already")
    (third,) = await _claim(box)
    equal(third.body, "o3", "the others wait for t1, and have left the old limiter")
    check(not await box.backend.set_task(third.delivery, "without limits"), "a task without limits is none to wait for")
    await third.acknowledge()
    await first["t1"].acknowledge()
    for body in ("o1", "o2"):
        (message,) = await _claim(box)
        equal((message.body, message.attempt), (body, 1), "one at a time, in order, and uncharged")
        if box.capabilities.listing:
            page = await box.backend.list_messages(MessageQuery(MessagePlace.IN_FLIGHT, 10, task="t", key="a"))
            equal([each.message.message_id for each in page.messages], [message.id], "listed under its task")
            page = await box.backend.list_messages(MessageQuery(MessagePlace.IN_FLIGHT, 10, task="old"))
            equal(page.messages, [], "listed under its former task")
        await message.acknowledge()
    try:
        await box.backend.set_task(message.delivery, "old")
        raise ContractError("a settled message got another task")
    except ReceiptHandleExpiredError:
        pass
    await h.counts(box, settled=4)
    equal(
        [(state.running, state.waiting) for state in await box.backend.limits()], [(0, 0), (0, 0)], "no permit is left"
    )


@on_mailbox("limits")
async def messages_that_get_another_task_keep_the_order_of_their_key(h: Harness, box: AnyMailbox) -> None:
    """Later messages of a key wait behind messages that got another task before, also after a return to the front."""
    for task in ("t", "old"):
        await _limit(box, task, key_concurrency=1, blocks=Blocks.RETRY)
    await box.send("first in line")
    (in_front,) = await _claim(box)
    await _send(box, "1", "2", "3", task="old", key="a")
    running = None
    for body in ("1", "2", "3"):
        claimed = {message.body: message for message in await _claim(box)}
        check(await box.backend.set_task(claimed.pop(body).delivery, "t"), f"{body} got another task")
        running = claimed.get("1", running)
    await in_front.release()
    await _send(box, "4", task="old", key="a")
    claimed = {message.body: message for message in await _claim(box)}
    check(await box.backend.set_task(claimed["4"].delivery, "t"), "4 got another task")
    await claimed["first in line"].release()
    await _send(box, "5", key="a")
    equal(_bodies(await _claim(box)), ["first in line"], "what waits for no key")
    assert running is not None
    await running.acknowledge()
    for body in ("2", "3", "4", "5"):
        (message,) = await _claim(box)
        equal(message.body, body, "in the order of the sends")
        await message.acknowledge()


@on_mailbox("limits", "priority")
async def priorities_hold_within_limits(h: Harness, box: AnyMailbox) -> None:
    """A waiting message of a higher priority passes a limiter first."""
    await _limit(box, concurrency=1)
    await _send(box, "first")
    messages = await _claim(box)
    await _send(box, "low", priority=-1)
    await _send(box, "high", priority=5)
    await _send(box, "usual")
    seen = []
    while messages:
        (message,) = messages
        seen.append(message.body)
        await message.acknowledge()
        messages = await _claim(box)
    equal(seen, ["first", "high", "usual", "low"], "the order")


@on_mailbox("limits", "durable")
async def permits_outlive_the_mailbox_object(h: Harness, box: AnyMailbox) -> None:
    """Limits, permits and waiting messages are kept while no process has the mailbox open."""
    async with h.open("kept") as before:
        await _limit(before, concurrency=1)
        await _send(before, "a", "b")
        (first,) = await _claim(before)
    async with h.open("kept") as after:
        await h.none(after, "the permit is out")
        try:
            await first.acknowledge()
        except MailboxClosedError:
            check((await after.cancel(first.id)) is CancelOutcome.CANCELLED, "it is in flight")
        equal(_bodies(await _claim(after)), ["b"], "as the permit was free")
