"""The in-memory mailbox as time passes: delays, leases, messages' lives, on virtual time; and who is woken when."""

from __future__ import annotations

import gc
from typing import Any

import anyio
import pytest

from mainspring.errors import MailboxClosedError, ReceiptHandleExpiredError
from mainspring.mailbox.memory.mailbox import InMemoryMailbox
from mainspring.mailbox.message import ClaimedMessage
from mainspring.testing import run_virtual

pytestmark = pytest.mark.parametrize("entered", [False, True], ids=["unentered", "entered"])


def virtual(entered: bool, test: Any, **options: Any) -> None:
    """Run ``test(mailbox)`` in virtual time on a new mailbox."""

    async def main() -> None:
        mailbox: InMemoryMailbox[Any, Any] = InMemoryMailbox("jobs", **options)
        with anyio.fail_after(1e6):
            if entered:
                async with mailbox:
                    await test(mailbox)
            else:
                await test(mailbox)

    run_virtual(main)


def test_a_delayed_message_comes_at_its_instant_and_wakes_who_waits(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        await mailbox.send("later", delay=100)
        assert await mailbox.receive() == []
        counts = await mailbox.counts()
        assert (counts.delayed, counts.pending) == (1, 0)
        (message,) = await mailbox.receive(wait_time_seconds=1_000)
        assert anyio.current_time() == 100
        assert message.body == "later"

    virtual(entered, test)


def test_a_delay_that_begins_while_somebody_waits_wakes_them_at_its_end(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        async def later() -> None:
            await anyio.sleep(10)
            await mailbox.send("b", delay=50)
            await anyio.sleep(10)
            await mailbox.send("a", delay=5)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later)
            seen = []
            for _ in range(2):
                (message,) = await mailbox.receive(wait_time_seconds=1_000)
                seen.append((message.body, anyio.current_time()))
        assert seen == [("a", 25), ("b", 60)]

    virtual(entered, test)


def test_a_lease_ends_exactly_at_its_instant_and_the_attempt_is_charged(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        await mailbox.send("job")
        (first,) = await mailbox.receive(visibility_timeout=30)
        await anyio.sleep(29)
        assert (await mailbox.counts()).in_flight == 1
        assert await mailbox.receive() == []
        (second,) = await mailbox.receive(wait_time_seconds=60)
        assert anyio.current_time() == 30
        assert (second.delivery_count, second.attempt) == (2, 2)
        with pytest.raises(ReceiptHandleExpiredError):
            await first.acknowledge()
        await second.acknowledge()

    virtual(entered, test)


def test_a_receipt_is_void_from_the_instant_of_expiry_whether_or_not_anything_ran_then(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        from mainspring.testing import VirtualClock

        await mailbox.send("job")
        (message,) = await mailbox.receive(visibility_timeout=30)
        VirtualClock().advance(30)  # as if the process had slept: no task has run since
        with pytest.raises(ReceiptHandleExpiredError):
            await message.acknowledge()
        with pytest.raises(ReceiptHandleExpiredError):
            await message.extend_visibility(60)
        assert (await mailbox.counts()).pending == 1

    virtual(entered, test)


def test_an_expired_message_goes_to_the_tail(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        await mailbox.send("first")
        await mailbox.receive(visibility_timeout=30)
        await mailbox.send("second")
        await anyio.sleep(31)
        assert [m.body for m in await mailbox.receive(max_messages=2)] == ["second", "first"]

    virtual(entered, test)


def test_an_extension_lengthens_a_lease_and_never_shortens_it(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        await mailbox.send("job")
        (message,) = await mailbox.receive(visibility_timeout=30)
        await anyio.sleep(20)
        await message.extend_visibility(5)  # would end sooner
        await anyio.sleep(9)
        await message.extend_visibility(100)
        assert await mailbox.receive(wait_time_seconds=90) == []
        (again,) = await mailbox.receive(wait_time_seconds=90)
        assert anyio.current_time() == 129
        assert again.delivery_count == 2

    virtual(entered, test)


def test_a_nacked_message_is_invisible_for_its_delay_and_then_at_the_tail(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        await mailbox.send("first")
        (message,) = await mailbox.receive()
        await message.nack(delay=40)
        await anyio.sleep(10)
        await mailbox.send("second")
        await anyio.sleep(30)
        assert [m.body for m in await mailbox.receive(max_messages=2)] == ["second", "first"]

    virtual(entered, test)


def test_a_message_nobody_works_on_dies_when_its_time_is_over(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        ids = [
            await mailbox.send("pending", expires_in=50),
            await mailbox.send("delayed", delay=80, expires_in=60),
            await mailbox.send("held", expires_in=70, priority=1),
        ]
        (held,) = await mailbox.receive(visibility_timeout=500)
        await anyio.sleep(100)
        assert [letter.message_id for letter in await mailbox.dead_letters()] == ids[:2]
        await held.extend_visibility(300)  # whoever works on it may finish
        await held.release()
        letters = await mailbox.dead_letters()
        assert [letter.message_id for letter in letters] == ids
        assert {letter.error_type for letter in letters} == {"MessageExpiredError"}
        assert [(letter.delivery_count, letter.attempt) for letter in letters] == [(0, 0), (0, 0), (1, 0)]
        assert letters[0].first_received_at is None
        assert (letters[1].dead_lettered_at - letters[1].enqueued_at).total_seconds() == 60
        assert await mailbox.replay_dead_letters() == 3
        await anyio.sleep(1_000)
        assert len(await mailbox.receive(max_messages=5)) == 3

    virtual(entered, test)


def test_a_receive_waits_its_time_and_no_longer(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        assert await mailbox.receive(wait_time_seconds=20) == []
        assert anyio.current_time() == 20

    virtual(entered, test)


def test_a_send_wakes_one_who_waits_at_once(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        got = []

        async def wait() -> None:
            got.extend(m.body for m in await mailbox.receive(wait_time_seconds=500))

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(wait)
            await anyio.sleep(5)
            for number in range(10):
                await mailbox.send(number)
        assert sorted(got) == list(range(10))
        assert anyio.current_time() == 5

    virtual(entered, test)


def test_a_close_wakes_all_who_wait_and_later_calls_are_refused(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        got = []

        async def wait() -> None:
            got.append(await mailbox.receive(wait_time_seconds=500))

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(wait)
            await anyio.sleep(5)
            for _ in range(3):
                tasks.start_soon(wait)  # these are on their way when it closes
            await anyio.lowlevel.checkpoint()
            await mailbox.close()
            for call in (mailbox.receive, mailbox.counts, lambda: mailbox.send(1), mailbox.purge):
                with pytest.raises(MailboxClosedError):
                    await call()
            await mailbox.close()
        assert [batch for batch in got if batch] == []
        assert anyio.current_time() == 5

    try:
        virtual(entered, test)
    except* MailboxClosedError:
        pass  # of those that had not begun when it closed


def test_who_is_woken_and_cancelled_passes_the_wake_on(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        got = []

        async def wait(scope: anyio.CancelScope) -> None:
            with scope:
                for message in await mailbox.receive(wait_time_seconds=500):
                    got.append(message.body)
                    await message.acknowledge()

        for number in range(20):
            scopes = [anyio.CancelScope() for _ in range(4)]
            async with anyio.create_task_group() as tasks:
                for scope in scopes:
                    tasks.start_soon(wait, scope)
                await anyio.sleep(1)
                await mailbox.send(number)
                for scope in scopes[:3]:
                    scope.cancel()
                await anyio.sleep(1)
                assert got == list(range(number + 1))
                scopes[3].cancel()

    virtual(entered, test)


def test_a_batch_put_at_once_wakes_as_many_as_it_can_serve(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        got = []

        async def wait() -> None:
            got.extend(m.body for m in await mailbox.receive(max_messages=2, wait_time_seconds=500))

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(wait)
            await anyio.sleep(1)
            await mailbox.send_many(range(8))
        assert sorted(got) == list(range(8))
        assert anyio.current_time() == 1

    virtual(entered, test)


def test_expired_leases_wake_who_waits_each_at_its_instant(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        await mailbox.send_many(["a", "b", "c"])
        await mailbox.receive(max_messages=1, visibility_timeout=10)
        await mailbox.receive(max_messages=1, visibility_timeout=30)
        await mailbox.receive(max_messages=1, visibility_timeout=20)
        seen = []

        async def wait() -> None:
            (message,) = await mailbox.receive(wait_time_seconds=500)
            seen.append((message.body, anyio.current_time()))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(wait)
        assert seen == [("a", 10), ("c", 20), ("b", 30)]

    virtual(entered, test)


def test_messages_that_die_unseen_leave_nothing_behind(entered: bool) -> None:
    def messages() -> int:
        gc.collect()
        return sum(isinstance(thing, ClaimedMessage) for thing in gc.get_objects())

    async def test(mailbox: Any) -> None:
        before = messages()  # other tests may have some in hand
        for _ in range(20):
            for priority in (0, 3):
                await mailbox.send_many(range(100), expires_in=5, priority=priority)
            await anyio.sleep(10)
            assert await mailbox.purge_dead_letters() == 200
        assert messages() - before < 500

    virtual(entered, test)


def test_an_idle_mailbox_does_nothing(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        import trio

        class Steps(trio.abc.Instrument):
            count = 0

            def before_task_step(self, task: Any) -> None:
                self.count += 1

        await mailbox.send("held")
        await mailbox.receive(visibility_timeout=40_000)
        steps = Steps()
        trio.lowlevel.add_instrument(steps)
        assert await mailbox.receive(wait_time_seconds=39_000) == []
        trio.lowlevel.remove_instrument(steps)
        assert steps.count < 20

    virtual(entered, test)


def test_the_age_of_the_queue_is_that_of_the_first_in_line(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        async def age() -> float:
            return (await mailbox.counts()).queue_age

        await mailbox.send("old")
        await anyio.sleep(100)
        cancelled = await mailbox.send("cancelled")
        await anyio.sleep(100)
        await mailbox.send("new")
        (old,) = await mailbox.receive()
        await old.nack()
        assert await age() == 100  # "old" is behind the others, whatever its age
        await mailbox.cancel(cancelled)
        assert await age() == 0
        (new,) = await mailbox.receive()
        assert await age() == 200
        await new.release()
        await anyio.sleep(5)
        assert await age() == 5
        assert [message.body for message in await mailbox.receive(max_messages=9)] == ["new", "old"]
        assert await age() == 0

    virtual(entered, test)


def test_the_age_of_the_queue_passes_over_what_has_expired_or_was_cancelled(entered: bool) -> None:
    async def test(mailbox: Any) -> None:
        await mailbox.send_many(range(10), expires_in=50, priority=3)
        for message_id in await mailbox.send_many(range(200), priority=2):
            await mailbox.cancel(message_id)
        await anyio.sleep(60)
        assert (await mailbox.counts()).queue_age == 0
        await mailbox.send("x", priority=3)
        await anyio.sleep(7)
        counts = await mailbox.counts()
        assert (counts.pending, counts.dead, counts.queue_age) == (1, 10, 7)
        assert [message.body for message in await mailbox.receive(max_messages=9)] == ["x"]

    virtual(entered, test)
