"""Request and response: replies that find their requester, and waits that end."""

from __future__ import annotations

import gc
import weakref
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

import anyio
import pytest

from mainspring import Context, MainLoop, Reject, Retry
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    MailboxClosedError,
    MailboxConnectionError,
    ReplyNotAvailableError,
    RequestCancelledError,
    RequestFailedError,
    RequestTimeoutError,
    SerializationError,
)
from mainspring.mailbox.backend import TRANSIENT
from mainspring.mailbox.memory.mailbox import InMemoryMailbox
from mainspring.mailbox.message import CancelOutcome
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from mainspring.policies import DeadLetterPolicy, RetryPolicy
from mainspring.testing import run_virtual
from wrapped_backend import WrappedBackend, wrap

pytestmark = pytest.mark.anyio


@dataclass
class Sum:
    total: int


async def add(job: list[int]) -> Sum:
    return Sum(sum(job))


@asynccontextmanager
async def opened(kind, path, **options):
    """Two mailbox objects on one queue, as two processes would have them: the requester's and the worker's."""
    if kind == "sqlite":
        async with SQLiteMailbox(path, **options) as one, SQLiteMailbox(path) as two:
            yield one, two
    else:
        async with InMemoryMailbox(serialize=kind == "memory, JSON", **options) as one:
            yield one, one


@pytest.fixture(params=["memory", "memory, JSON", "sqlite"])
def kind(request):
    return request.param


async def test_a_request_returns_what_the_handler_returns_in_its_type(kind, path):
    async with opened(kind, path, body=list[int], reply=Sum) as (mailbox, other), MainLoop(other, add):
        assert await mailbox.request([1, 2, 3], timeout=5) == Sum(6)
        assert (await mailbox.counts()).waiting == 0


async def test_each_of_many_requests_at_once_gets_its_own_reply(kind, path):
    async def double(job: int) -> int:
        await anyio.lowlevel.checkpoint()
        return 2 * job

    replies = {}

    async def ask(number):
        replies[number] = await mailbox.request(number, timeout=10)

    async with opened(kind, path, body=int) as (mailbox, other), MainLoop(other, double, concurrency=8):
        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(ask, number)
        assert replies == {number: 2 * number for number in range(50)}
        assert mailbox.forgotten_replies == 0


async def test_a_result_can_be_awaited_later_and_more_than_once(kind, path):
    async with opened(kind, path, body=list[int], reply=Sum) as (mailbox, other):
        pending = await mailbox.submit([4, 5])
        assert not pending.is_ready
        with pytest.raises(RequestTimeoutError, match=pending.id):
            await pending.result(timeout=0)
        assert (await mailbox.counts()).pending == 1, "asking for a result withdraws nothing"
        async with MainLoop(other, add):
            assert await pending.result(timeout=5) == Sum(9)
            assert await pending.result(timeout=0) == Sum(9)
            assert pending.is_ready
            assert "ready" in repr(pending)


async def test_a_dead_lettered_request_fails_its_requester_at_once_with_the_error(kind, path):
    async def refuse(job: int) -> int:
        raise Reject(f"{job} is too many")

    async with opened(kind, path, body=int) as (mailbox, other), MainLoop(other, refuse):
        with pytest.raises(RequestFailedError, match="Reject: 7 is too many") as caught:
            await mailbox.request(7, timeout=3_600)
        assert (caught.value.error, caught.value.error_type) == ("7 is too many", "Reject")
        assert not caught.value.retryable
        (letter,) = await mailbox.dead_letters()
        assert letter.body == 7


async def test_a_reply_that_does_not_fit_is_an_error_of_the_requester(path):
    async def talk(job: int):
        return "no number"

    async with opened("sqlite", path, body=int, reply=int) as (mailbox, other), MainLoop(other, talk):
        with pytest.raises(SerializationError, match=r"^the reply to request [0-9a-f]{24} cannot be read: .*fit int: "):
            await mailbox.request(1, timeout=5)


async def test_the_type_of_the_replies_may_become_known_late(path):
    async with opened("sqlite", path, body=list[int]) as (mailbox, other), MainLoop(other, add):
        assert await mailbox.request([1], timeout=5) == {"total": 1}
        mailbox.bind(reply=Sum)
        assert await mailbox.request([2], timeout=5) == Sum(2)


async def test_the_reply_mailbox_goes_with_the_requester(path):
    async with SQLiteMailbox(path) as other:
        async with SQLiteMailbox(path) as mailbox:
            pending = await mailbox.submit("job")
            (message,) = await other.receive()
            assert message.reply_to.startswith(TRANSIENT)
        with pytest.raises(MailboxClosedError):
            await pending.result(timeout=5)
        await message.reply("too late")
        assert (await other.counts()).settled == 1
        names = await _names(path)
        assert names == ["default"], "a reply to a requester that is gone makes no mailbox"


async def _names(path):
    import apsw

    connection = apsw.Connection(path)
    try:
        return [name for (name,) in connection.execute("SELECT name FROM mailboxes WHERE id ORDER BY id")]
    finally:
        connection.close()


async def test_a_reply_that_comes_twice_or_unasked_is_dropped_and_counted(kind, path):
    async with opened(kind, path, body=int) as (mailbox, other):
        pending = await mailbox.submit(1)
        (message,) = await other.receive()
        for reply in ("first", "second"):
            async with other.sibling(message.reply_to) as box:
                await box.send(reply, headers={"request_id": message.id})
        await message.acknowledge()
        assert await pending.result(timeout=5) in ("first", "second")
        with anyio.fail_after(60):
            while mailbox.forgotten_replies < 1:
                await anyio.sleep(0.001)


async def test_who_lets_go_of_a_pending_reply_gives_it_up(kind, path):
    async with opened(kind, path, body=int) as (mailbox, other):
        await mailbox.submit(1)
        gc.collect()
        (message,) = await other.receive()
        await message.reply("nobody waits")
        with anyio.fail_after(60):
            while mailbox.forgotten_replies < 1:
                await anyio.sleep(0.001)


async def test_an_unopened_mailbox_says_what_to_do():
    with pytest.raises(ReplyNotAvailableError, match="async with"):
        await InMemoryMailbox().request("job", timeout=1)
    with pytest.raises(MailboxClosedError):
        await SQLiteMailbox("never.db").request("job", timeout=1)


async def test_under_a_loop_an_unopened_memory_mailbox_takes_requests():
    mailbox = InMemoryMailbox(body=list[int], reply=Sum)
    async with MainLoop(mailbox, add):
        assert await mailbox.request([1], timeout=5) == Sum(1)


@pytest.mark.parametrize("timeout", [-1, "soon", float("nan"), None])
async def test_the_timeout_is_a_number_of_seconds(timeout):
    async with InMemoryMailbox() as mailbox:
        with pytest.raises(InvalidParameterError, match="timeout"):
            await mailbox.request("job", timeout=timeout)
        assert (await mailbox.counts()).waiting == 0


async def test_a_request_that_does_not_fit_sends_nothing():
    async with InMemoryMailbox(body=int) as mailbox:
        with pytest.raises(SerializationError):
            await mailbox.request("no number", timeout=1)
        assert (await mailbox.counts()).waiting == 0


async def test_a_cancelled_requester_withdraws_its_request(kind, path):
    async with opened(kind, path, body=int) as (mailbox, _):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: mailbox.request(1, timeout=3_600))
            with anyio.fail_after(60):
                while (await mailbox.counts()).pending == 0:
                    await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(60):
            while (await mailbox.counts()).settled == 0:
                await anyio.sleep(0.001)
        assert (await mailbox.counts()).waiting == 0


async def test_a_request_that_another_cancels_fails_its_requester(kind, path):
    async with opened(kind, path, body=int) as (mailbox, other):
        pending = await mailbox.submit(1)
        assert await other.cancel(pending.id) is CancelOutcome.REMOVED
        with pytest.raises(RequestCancelledError):
            await pending.result(timeout=5)
        pending = await mailbox.submit(2)
        assert await pending.cancel() is CancelOutcome.REMOVED
        with pytest.raises(RequestCancelledError):
            await pending.result(timeout=0)
        assert await pending.cancel() is CancelOutcome.UNKNOWN


def test_a_handler_that_cancels_its_own_request_tells_the_requester():
    class Slow(WrappedBackend):
        async def cancel(self, message_id):
            found = await self.inner.cancel(message_id)  # its handler hears of it from here on
            await anyio.sleep(1)
            return found

    async def main():
        async def handle(job: str, ctx: Context) -> None:
            await mailbox.cancel(ctx.message.id)
            await anyio.sleep(60)

        async with wrap(InMemoryMailbox(body=str), Slow) as mailbox, MainLoop(mailbox, handle) as loop:
            with pytest.raises(RequestCancelledError):
                await mailbox.request("job", timeout=30)
            await anyio.sleep(2)
            assert dict(loop.outcomes) == {"cancelled": 1}

    run_virtual(main)


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_cancellation_of_a_message_ends_though_the_store_does_not_answer(cancelled):
    class Hanging(WrappedBackend):
        async def cancel(self, message_id):
            await anyio.sleep_forever()

    async def main():
        async with wrap(InMemoryMailbox(), Hanging) as mailbox:
            with anyio.CancelScope() as scope:
                if cancelled:
                    scope.cancel()
                with pytest.raises(MailboxConnectionError, match="may have taken place"):
                    await mailbox.cancel("job")
            assert anyio.current_time() == 10

    run_virtual(main)


@pytest.mark.parametrize("message_id", [None, 3, b"x"])
async def test_what_is_no_id_cannot_be_cancelled(kind, path, message_id):
    async with opened(kind, path) as (mailbox, _):
        with pytest.raises(InvalidParameterError, match="cancel: message_id must be a string"):
            await mailbox.cancel(message_id)


def with_replies(wrapper):
    """A mailbox for additions, the one for whose replies has a wrapped backend."""

    class Requests(WrappedBackend):
        def sibling(self, name):
            assert name.startswith(TRANSIENT)
            return wrapper(self.inner.sibling(name))

    return wrap(InMemoryMailbox(body=list[int], reply=Sum), Requests)


@pytest.mark.slow
async def test_a_lost_connection_to_the_replies_is_waited_out():
    failures = 3

    class Flaky(WrappedBackend):
        async def claim(self, *args):
            nonlocal failures
            if failures:
                failures -= 1
                raise MailboxConnectionError("the store is away")
            return await self.inner.claim(*args)

    mailbox = with_replies(Flaky)
    async with mailbox, MainLoop(mailbox, add):
        assert await mailbox.request([1], timeout=30) == Sum(1)
    assert not failures


def test_where_no_replies_can_be_received_the_requesters_hear_of_it_and_the_next_request_begins_anew():
    class Refused(WrappedBackend):
        tries = 0

        async def claim(self, *args):
            if not Refused.tries:
                Refused.tries += 1
                await anyio.sleep(1)
                raise ConfigError("this user may not read that")
            return await self.inner.claim(*args)

    async def main():
        mailbox = with_replies(Refused)
        async with mailbox:
            began = anyio.current_time()
            with pytest.raises(ConfigError):
                await mailbox.request([1], timeout=3_600)
            assert anyio.current_time() == began + 1
            await mailbox.purge()
            async with MainLoop(mailbox, add):
                assert await mailbox.request([1], timeout=30) == Sum(1)

    run_virtual(main)


def test_a_timeout_while_the_reply_mailbox_opens_ends_that_request_only():
    class Slow(WrappedBackend):
        async def open(self, *args, **options):
            await self.inner.open(*args, **options)
            with anyio.CancelScope(shield=True):
                await anyio.sleep(1)

    async def main():
        mailbox = with_replies(Slow)
        async with mailbox, MainLoop(mailbox, add):
            replies = []

            async def request():
                replies.append(await mailbox.request([1], timeout=30))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(request)
                with pytest.raises(RequestTimeoutError, match=r"within 0\.5 s"):
                    await mailbox.request([2], timeout=0.5)
            assert replies == [Sum(1)]

    async def other_order():
        mailbox = with_replies(Slow)
        async with mailbox, MainLoop(mailbox, add), anyio.create_task_group() as tasks:
            replies = []

            async def impatient():
                with pytest.raises(RequestTimeoutError, match=r"within 0\.5 s"):
                    await mailbox.request([2], timeout=0.5)

            async def request():
                replies.append(await mailbox.request([1], timeout=30))

            tasks.start_soon(impatient)
            await anyio.sleep(0.1)
            tasks.start_soon(request)
            await anyio.sleep(20)
            assert replies == [Sum(1)]

    run_virtual(main)
    run_virtual(other_order)


async def test_a_failed_request_is_freed_with_its_error_at_once():
    class Local:
        pass

    async def fail(job: str) -> None:
        raise Reject(job)

    async def ask(mailbox):
        local = Local()
        with pytest.raises(RequestFailedError):
            await mailbox.request("job", timeout=30)
        return weakref.ref(local)

    async with InMemoryMailbox() as mailbox, MainLoop(mailbox, fail):
        await ask(mailbox)
        gc.collect()
        gc.disable()
        try:
            assert (await ask(mailbox))() is None
        finally:
            gc.enable()


# ------------------------------------------------------------------------------------------------------- virtual time


def test_the_deadline_ends_the_wait_and_withdraws_the_request():
    async def main():
        async with InMemoryMailbox() as mailbox:
            began = anyio.current_time()
            with pytest.raises(RequestTimeoutError, match="within 30 s") as caught:
                await mailbox.request("job", timeout=30)
            assert anyio.current_time() == began + 30
            assert caught.value.retryable
            assert isinstance(caught.value, TimeoutError)
            await anyio.sleep(0.001)
            counts = await mailbox.counts()
            assert (counts.waiting, counts.settled) == (0, 1)

    run_virtual(main)


def test_the_deadline_ends_the_wait_though_the_store_does_not_answer():
    class Hanging(WrappedBackend):
        async def send(self, envelopes):
            await anyio.sleep_forever()

        async def cancel(self, message_id):
            await anyio.sleep_forever()

    async def main():
        async with wrap(InMemoryMailbox(), Hanging) as mailbox:
            began = anyio.current_time()
            with pytest.raises(RequestTimeoutError):
                await mailbox.request("job", timeout=30)
            assert anyio.current_time() == began + 30

    run_virtual(main)


def test_a_retried_request_is_answered_by_the_attempt_that_succeeds():
    async def main():
        attempts = 0

        async def third_time(job: str) -> str:
            nonlocal attempts
            attempts += 1
            if attempts < 3:
                raise Retry(60)
            return f"{job} done"

        async with InMemoryMailbox() as mailbox, MainLoop(mailbox, third_time):
            assert await mailbox.request("job", timeout=3_600) == "job done"

    run_virtual(main)


def test_a_request_whose_attempts_run_out_fails_with_the_last_error():
    async def main():
        async def broken(job: str) -> str:
            raise LookupError("no such row")

        loop_options = {"dead_letter": DeadLetterPolicy(max_attempts=3), "retry": RetryPolicy(jitter="none")}
        async with InMemoryMailbox() as mailbox, MainLoop(mailbox, broken, **loop_options):
            with pytest.raises(RequestFailedError, match="LookupError: no such row"):
                await mailbox.request("job", timeout=3_600)

    run_virtual(main)


def test_a_request_that_grew_too_old_fails_its_requester_soon_after():
    async def main():
        async with InMemoryMailbox() as mailbox:
            began = anyio.current_time()
            with pytest.raises(RequestFailedError, match="MessageExpiredError"):
                await mailbox.request("job", timeout=3_600, expires_in=60)
            assert 60 <= anyio.current_time() - began <= 61

    run_virtual(main)


def test_how_a_request_is_that_was_begun_in_time_is_asked_less_and_less_often():
    looks = []

    class Watched(WrappedBackend):
        async def find_dead_letters(self, message_ids):
            looks.append(anyio.current_time())
            return await self.inner.find_dead_letters(message_ids)

    async def main():
        async def slow(job: int) -> int:
            await anyio.sleep(3_000)
            return job

        async with wrap(InMemoryMailbox(), Watched) as mailbox, MainLoop(mailbox, slow):
            assert await mailbox.request(7, timeout=3_600, expires_in=60) == 7

    run_virtual(main)
    assert 90 <= len(looks) <= 120
    assert looks[0] == pytest.approx(60)
    assert all(later - sooner <= 30.1 for sooner, later in pairwise(looks))
