"""A message that comes alone is claimed for a process that waits and sent to it: who has it, and what goes back."""

from __future__ import annotations

import time

import anyio
import pytest

from mainspring.mailbox.message import Counts
from redis_support import CALLS, LISTENER, counts, place, soon, unpushed
from stopwatch import Stopwatch
from support import outcomes

pytestmark = pytest.mark.anyio


@pytest.fixture
def here(redis_url):
    with place(redis_url, fallback_interval=3_600) as made:  # only what is sent to it wakes a process
        yield made


async def test_it_has_all_that_a_claimed_one_has(here, waiting):
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        await sender.send("x", headers={"a": "b"}, reply_to="elsewhere", priority=3)
        (first,) = await sender.receive()
        await first.save_checkpoint(b"half")
        asked = anyio.current_time()  # the lease may seem as much older as the server's last answer took
        await waiting.start(mailbox)
        await first.nack()
        leased = anyio.current_time()  # as the server answered, at the latest; it may be heard of much later
        await waiting.until(1)
        (message,) = waiting.got[0][1]
        assert (message.id, message.body, message.reply_to) == (first.id, "x", "elsewhere")
        assert dict(message.headers) == {"a": "b"}
        assert (message.delivery_count, message.attempt, message.checkpoint) == (2, 2, b"half")
        assert message.history != first.history
        assert message.first_received_at == first.first_received_at
        assert asked - 0.001 <= message.leased_at <= leased + 0.001
        await message.acknowledge()
        assert await mailbox.counts() == Counts(settled=1)


async def test_its_lease_is_as_old_as_its_claim_however_late_it_is_heard_of(here, line, waiting):
    """Whoever trusted it from then on would hold it longer than the server does."""
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        await waiting.start(mailbox)
        line.news.hold()
        await sender.send("x")
        leased = anyio.current_time()
        await line.news.arrived()
        await anyio.sleep(0.05)
        line.news.let_go()
        await waiting.until(1)
        (message,) = waiting.messages
        assert message.leased_at <= leased + 0.001


async def test_it_is_leased_for_as_long_as_the_receive_wants(here, waiting):
    """Two that wait in one process want leases of different lengths."""
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        await waiting.start(mailbox, visibility=0.3)
        await waiting.start(mailbox, visibility=600)
        for body in ("one", "two"):
            await sender.send(body)
        await waiting.until(2)
        await anyio.sleep(0.35)
        assert await sender.counts() == Counts(pending=1, in_flight=1)
        ends = await outcomes(*[found[0].acknowledge for _, found in waiting.got])
        assert sorted(type(end).__name__ for end in ends) == ["NoneType", "ReceiptHandleExpiredError"]


async def test_every_receive_of_a_process_is_called(here, waiting):
    """Each message takes the process off the list, where the others still wait."""
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        for _ in range(4):
            await waiting.start(mailbox)
        for number in range(4):
            await sender.send(number)
            await waiting.until(number + 1)
        assert [found[0].body for _, found in waiting.got] == [0, 1, 2, 3]


async def test_a_receive_on_its_way_to_wait_is_called_too(here, line, waiting):
    """The message comes before it has heard that there is nothing: it goes back, and the receive looks again."""
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        line.answers.hold()
        waiting.begin(mailbox, visibility=600)
        await line.answers.arrived()
        heard = line.news.passed
        await sender.send("x")
        await soon(lambda: line.news.passed > heard)
        await anyio.sleep(0.02)  # by then it has come
        line.answers.let_go()
        await waiting.until(1)
        (message,) = waiting.messages
        assert (message.body, message.delivery_count, message.attempt) == ("x", 1, 1)


async def test_what_comes_for_a_receive_that_has_gone_is_another_processs(here, waiting):
    """It is on the list still: the server does not know yet that it has gone."""
    async with here.mailbox() as gone, here.mailbox() as other, here.mailbox() as sender:
        scope = anyio.CancelScope()
        await waiting.start(gone, scope=scope)
        waiters = here.waiters()
        scope.cancel()
        while here.call("ZCARD", here.key("waiters")):
            await anyio.sleep(0.001)
        here.call("ZADD", here.key("waiters"), 0, *waiters)
        await waiting.start(other)
        await sender.send("x")
        await waiting.until(1)
        mailbox, found = waiting.got[0]
        assert mailbox is other
        assert (found[0].delivery_count, found[0].attempt) == (1, 1)


async def test_a_receive_that_ends_takes_its_process_off_the_list(here, anyio_backend):
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        assert await mailbox.receive(wait_time_seconds=0.05) == []
        await soon(lambda: here.call("ZCARD", here.key("waiters")) == 0)
        await sender.send("x")
        assert await sender.counts() == Counts(pending=1)


async def test_what_was_sent_over_a_connection_that_broke_goes_back(here, line, waiting):
    """Nobody here has heard of it; it need not wait for the end of its lease, and is not charged."""
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        await waiting.start(mailbox, visibility=600)
        line.news.hold()
        await sender.send("x")
        await line.news.arrived()
        line.cut(LISTENER)
        line.news.let_go()
        await waiting.until(1)
        (message,) = waiting.messages
        assert (message.delivery_count, message.attempt) == (1, 1)


async def push_and_hold(line, waiting, mailbox, sender) -> anyio.CancelScope:
    """Send "x" to a receive that waits, and hold it on its way. Return the scope of the receive."""
    scope = anyio.CancelScope()
    await waiting.start(mailbox, scope=scope)
    line.news.hold()
    await sender.send("x")
    await line.news.arrived()
    return scope


async def test_what_was_taken_back_and_comes_late_is_not_taken(here, line, waiting):
    """Its receive is gone and so is its lease, when it is heard of; a receive that waits by then does not get it."""
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        scope = await push_and_hold(line, waiting, mailbox, sender)
        scope.cancel()
        await counts(mailbox, Counts(pending=1))
        (held,) = await sender.receive()
        await waiting.start(mailbox)
        line.news.let_go()
        await anyio.sleep(0.05)
        assert waiting.messages == []
        await held.acknowledge()
        await sender.send("y")
        await soon(lambda: waiting.messages)
        assert waiting.messages[0].body == "y"
        assert await sender.counts() == Counts(in_flight=1, settled=1)


async def test_what_may_have_been_taken_back_is_not_taken(here, line, waiting):
    """Its lease is another process's, but the answer that says so is on its way still, as it is heard of."""
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        scope = await push_and_hold(line, waiting, mailbox, sender)
        line.answers.hold()
        scope.cancel()
        await line.answers.arrived()
        (held,) = await sender.receive()
        heard = line.news.passed
        waiting.begin(mailbox)
        line.news.let_go()
        await soon(lambda: line.news.passed > heard)
        await anyio.sleep(0.02)  # by then it has come
        line.answers.let_go()
        await soon(lambda: mailbox.statistics().waiting_receives or waiting.got)
        assert waiting.messages == []
        await sender.send("y")
        await waiting.until(1)
        await held.acknowledge()
        assert await sender.counts() == Counts(in_flight=1, settled=1)


async def test_a_large_one_is_asked_for(here, waiting):
    """A server cuts listeners off that it owes too much."""
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        await waiting.start(mailbox)
        (name,) = {waiter.decode().partition(".")[0] for waiter in here.waiters()}
        with here.subscribed(name) as heard:
            await sender.send(unpushed())
            await waiting.until(1)
        assert heard == [b"w1"]
        (message,) = waiting.got[0][1]
        assert (message.body, message.delivery_count) == (unpushed(), 1)


async def test_one_that_nobody_can_read_is_dead_and_the_receive_waits_on(here, waiting):
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        message_id = await sender.send("x", delay=0.2)
        value = here.call("HGET", here.key("messages"), message_id)
        here.call("HSET", here.key("messages"), message_id, value.split(b"|-")[0] + b"|?")
        await waiting.start(mailbox)
        await counts(sender, Counts(dead=1))
        await sender.send("y")
        await waiting.until(1)
        assert waiting.got[0][1][0].body == "y"


async def test_a_mailbox_that_closes_keeps_nothing(here, waiting):
    """What was sent to it just then is another process's."""
    async with here.mailbox() as other, here.mailbox() as sender:
        for _ in range(10):
            async with here.mailbox() as closing:
                await waiting.start(closing)
                waiting.group.start_soon(sender.send, "x")
                await anyio.lowlevel.checkpoint()
            found = waiting.got.pop()[1] or await other.receive(wait_time_seconds=5)
            assert (found[0].delivery_count, found[0].attempt) == (1, 1)
            waiting.got.clear()


async def test_where_nothing_is_due_any_more_a_call_is_whole(here, waiting):
    """A large message is leased and given back in one step while others wait: it had a due time, and has none."""
    async with here.mailbox() as one, here.mailbox() as two, here.mailbox() as sender:
        for mailbox in (one, two):
            await waiting.start(mailbox)
        await sender.send(unpushed())
        await waiting.until(1)
        assert await sender.counts() == Counts(in_flight=1)
        await waiting.got[0][1][0].nack(delay=600)
        found = await outcomes(lambda: sender.send("y", delay=600), sender.purge)
        assert not [error for error in found if isinstance(error, Exception)]


async def test_a_process_that_is_on_the_list_again_gives_back_what_it_has_not_heard(here, line, waiting):
    """By then its name is on the list, as if nothing had been sent to it."""
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        first, second = anyio.CancelScope(), anyio.CancelScope()
        await waiting.start(mailbox, scope=first)
        line.news.hold()
        await sender.send("x")
        await line.news.arrived()
        await waiting.start(mailbox, scope=second)
        assert len(here.waiters()) == 1
        first.cancel()
        second.cancel()
        await counts(mailbox, Counts(pending=1))
        line.news.let_go()
        (message,) = await mailbox.receive(wait_time_seconds=5)
        assert (message.delivery_count, message.attempt) == (1, 1)


async def test_a_process_on_the_list_again_whose_connection_breaks_gives_back_too(here, line, waiting):
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        await waiting.start(mailbox)
        line.news.hold()
        await sender.send("x")
        await line.news.arrived()
        await waiting.start(mailbox)
        line.cut(LISTENER)
        line.news.let_go()
        await waiting.until(1)
        (message,) = waiting.messages
        assert (message.body, message.delivery_count, message.attempt) == ("x", 1, 1)
        assert await sender.counts() == Counts(in_flight=1)


async def test_a_process_whose_receives_all_had_something_is_on_no_list(here, waiting):
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        for _ in range(5):
            await waiting.start(mailbox)
        await sender.send_many(range(25))
        await waiting.until(5)
        assert await mailbox.counts() is not None
        assert here.call("ZCARD", here.key("waiters")) == 0


async def test_what_has_expired_is_not_handed_over(here, line, waiting):
    """It was in somebody's hands when its time came, and is given back."""
    async with line.mailbox() as mailbox, here.mailbox() as sender:
        await sender.send("x", expires_in=0.2)
        (held,) = await sender.receive()
        await waiting.start(mailbox)
        line.calls.hold()  # it would see to that by itself
        await anyio.sleep(0.25)
        await held.release()
        await counts(sender, Counts(dead=1))
        line.calls.let_go()
        assert waiting.messages == []


@pytest.mark.slow
async def test_an_answer_that_is_owed_is_not_that_to_a_ping(line, anyio_backend):
    """A connection that has idled is tried before a call, but not while the answer to one is awaited."""
    pings: list = []
    line.on_command = lambda passage, command: pings.append(passage.name) if command == [b"PING"] else None
    async with line.mailbox(silence=0.5) as mailbox:
        await mailbox.send("x")
        async with anyio.create_task_group() as group:
            line.answers.hold()
            group.start_soon(mailbox.receive)
            await line.answers.arrived()
            pings.clear()
            await anyio.sleep(0.55)
            group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.02)  # in which it would be tried
            assert CALLS not in pings
            line.answers.let_go()
            (message,) = await mailbox.receive()
            assert (message.body, message.delivery_count) == ("x", 1)
            assert await mailbox.counts() == Counts(in_flight=1)


@pytest.mark.slow
async def test_a_call_that_is_given_up_before_it_is_gone_on_with_ends_at_once(line, anyio_backend):
    """Its caller is cancelled in the very turn of the event loop in which its answer has taken too long."""
    async with line.mailbox(timeout=0.5) as mailbox:
        for _ in range(3):
            line.answers.hold()
            async with anyio.create_task_group() as group:
                group.start_soon(outcomes, mailbox.counts)
                await line.answers.arrived()
                time.sleep(0.51)  # so that both are due at once
                line.answers.let_go()
                group.cancel_scope.cancel()
            with Stopwatch() as watch:
                await mailbox.send("y")
            assert watch.seconds < 2
        assert await mailbox.counts() == Counts(pending=3)


async def test_a_new_one_is_not_handed_over_before_those_that_wait(here, waiting):
    """Some may be pending for which the process on the list was just called, or that nobody could be called for."""
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        await waiting.start(mailbox)
        (who,) = here.waiters()
        here.call("DEL", here.key("waiters"))  # so that nobody is called for the first
        await sender.send("first")
        here.call("ZADD", here.key("waiters"), 1, who)
        await sender.send("second")
        await waiting.until(1)
        assert [message.body for message in waiting.got[0][1]] == ["first"]


async def test_a_new_one_is_handed_over_with_its_key_and_its_expiry(here, waiting):
    async with here.mailbox() as mailbox, here.mailbox() as sender:
        await waiting.start(mailbox)
        sent = await sender.send("x", dedup_key="once", expires_in=3_600, priority=-2)
        await waiting.until(1)
        assert await sender.send("y", dedup_key="once") == sent
        ((message,),) = [found for _, found in waiting.got]
        assert await mailbox.counts() == Counts(in_flight=1)
        await message.acknowledge()
        assert await sender.send("y", dedup_key="once") != sent
        assert here.call("ZCARD", here.key("expiry")) == 0


async def test_a_reply_is_handed_over(here, waiting):
    async with here.mailbox() as mailbox, here.mailbox("replies") as replies:
        await mailbox.send("x", reply_to=replies)
        (message,) = await mailbox.receive()
        await waiting.start(replies)
        await message.reply("done")
        await waiting.until(1)
        assert [reply.body for reply in waiting.got[0][1]] == ["done"]
        assert await replies.counts() == Counts(in_flight=1)
