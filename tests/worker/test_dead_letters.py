"""DLQConsumer: dead letters as messages, each handled by one, none lost."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

import mainspring
from mainspring import DeadLetter, InMemoryMailbox, LoopGroup, MainLoop, Reject, ReplyError, Retry
from mainspring.errors import ConfigError, InvalidParameterError, MailboxConnectionError
from mainspring.mailbox.backend import Capabilities
from mainspring.mailbox.dead_letters import DeadLetterView
from mainspring.mailbox.memory.mailbox import MemoryBackend
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from mainspring.policies import DeadLetterPolicy, RetryPolicy
from mainspring.testing import run_virtual
from mainspring.worker.dead_letter_consumer import DLQConsumer, Verdict
from stores import KINDS, on
from support import FaultyMailbox

pytestmark = pytest.mark.anyio


HERE = on("memory", "sqlite")
"""What the loop does by itself, whatever the store."""
EVERYWHERE = on(*KINDS)


async def bury(mailbox, *bodies):
    """Let messages with these bodies die; their ids."""
    ids = await mailbox.send_many(bodies)
    for message in await mailbox.receive(max_messages=len(bodies)):
        await message.dead_letter(LookupError(f"no {message.body}"))
    return ids


async def until(condition, *, seconds=10):
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.001)


@EVERYWHERE
async def test_a_handled_dead_letter_is_purged(store):
    seen = []

    async def handle(letter: DeadLetter) -> None:
        seen.append(letter)

    async with store.box() as mailbox:
        (message_id,) = await bury(mailbox, "job")
        async with DLQConsumer(mailbox, handle) as loop:
            await until(lambda: loop.outcomes["acknowledged"] == 1)
            (letter,) = seen
            assert (letter.message_id, letter.body, letter.mailbox) == (message_id, "job", store.name)
            assert (letter.error, letter.error_type) == ("no job", "LookupError")
            assert [failure.error for failure in letter.history] == ["no job"]
            counts = await mailbox.counts()
            assert (counts.dead, counts.settled) == (0, 1)
            assert (await loop.mailbox.counts()).waiting == 0


@EVERYWHERE
async def test_a_dead_letter_that_dies_meanwhile_comes_at_once(store):
    async def fail(job: str) -> None:
        raise Reject("never")

    seen = []

    async def handle(letter: DeadLetter) -> None:
        seen.append(letter.body)

    async with (
        store.box() as mailbox,
        DLQConsumer(mailbox, handle, look_every=3_600),
        MainLoop(mailbox, fail),
    ):
        await anyio.wait_all_tasks_blocked()  # the first look is over
        await mailbox.send("job")
        await until(lambda: seen == ["job"])


@EVERYWHERE
async def test_a_replayed_one_goes_to_its_mailbox_again(store):
    async def again(letter: DeadLetter, ctx: mainspring.Context) -> Verdict:
        assert ctx.attempt == 1
        return Verdict.REPLAY

    async with store.box() as mailbox:
        ids = await bury(mailbox, "a", "b")
        async with DLQConsumer(mailbox, again, concurrency=2) as loop:
            await until(lambda: loop.outcomes["acknowledged"] == 2)
        messages = await mailbox.receive(max_messages=5)
        assert sorted(message.id for message in messages) == sorted(ids)
        assert [message.attempt for message in messages] == [1, 1]
        assert (await mailbox.counts()).dead == 0


@EVERYWHERE
async def test_a_kept_or_rejected_one_stays_and_does_not_come_again(store):
    seen = []

    def handle(letter: DeadLetter) -> Verdict:
        seen.append(letter.body)
        if letter.body == "b":
            raise Reject("not mine")
        return Verdict.KEEP

    async def consume(expected):
        """A consumer that begins anew, as after a restart: what died last comes after all that it should leave alone."""
        async with store.box() as mailbox, DLQConsumer(mailbox, handle, look_every=0.02) as loop:
            await until(lambda: len(seen) >= len(expected) and not loop.in_flight)
            assert set(loop.outcomes) <= {"kept", "dead_lettered"}  # the second only of what its handler rejected
            assert loop.outcomes["kept"]
        assert sorted(seen) == expected

    async with store.box() as mailbox:
        ids = await bury(mailbox, "a", "b")
        await consume(["a", "b"])
        ids += await bury(mailbox, "c")
        await consume(["a", "b", "c"])
        assert [letter.message_id for letter in await mailbox.dead_letters()] == ids
        # one that is replayed and dies again comes again
        await mailbox.replay_dead_letters([ids[0]])
        (message,) = await mailbox.receive()
        await message.dead_letter("again")
        await consume(["a", "a", "b", "c"])


@EVERYWHERE
async def test_two_consumers_do_not_handle_one_dead_letter_twice(store):
    seen = []

    async def handle(letter: DeadLetter) -> None:
        await anyio.sleep(0.001)
        seen.append(letter.body)

    async with store.box() as mailbox, store.box() as other:
        await bury(mailbox, *range(30))
        loops = [DLQConsumer(box, handle, concurrency=4, look_every=0.005) for box in (mailbox, other)]
        await LoopGroup(loops).run(install_signals=False, until_empty=True)
        assert sorted(seen) == list(range(30))
        assert (await mailbox.counts()).dead == 0


@EVERYWHERE
@pytest.mark.parametrize("verdict", [None, Verdict.REPLAY, Verdict.KEEP])
async def test_one_that_was_replayed_while_in_hand_and_died_again_comes_again(store, verdict):
    """What its handler says is said of the first death, not of the second."""
    seen = []
    began, looked, go_on = anyio.Event(), anyio.Event(), anyio.Event()

    async def handle(letter: DeadLetter) -> Verdict | None:
        if letter.body == "later":
            looked.set()
            return Verdict.KEEP
        seen.append(letter.error)
        if len(seen) > 1:
            return None
        began.set()
        await go_on.wait()
        return verdict

    async with store.box() as mailbox, store.box() as other:
        await bury(mailbox, "job")
        async with DLQConsumer(mailbox, handle, concurrency=2, look_every=0.02):
            await began.wait()
            assert await other.replay_dead_letters() == 1
            (message,) = await other.receive(wait_time_seconds=5)
            await message.dead_letter("once more")
            await bury(other, "later")
            with anyio.fail_after(60):
                await looked.wait()  # the second death has been found while the first one was in hand
            go_on.set()
            with anyio.fail_after(60):
                while (await other.counts()).dead > 1:
                    await anyio.sleep(0.01)
        assert seen == ["no job", "once more"]
        assert (await other.counts()).waiting == 0


@HERE
async def test_one_that_somebody_else_purges_meanwhile_is_no_trouble(store):
    seen = []
    began, go_on = anyio.Event(), anyio.Event()

    async def handle(letter: DeadLetter) -> Verdict:
        seen.append(letter.body)
        began.set()
        await go_on.wait()
        return Verdict.KEEP if letter.body == "c" else Verdict.REPLAY

    async with store.box() as mailbox:
        await bury(mailbox, "a", "b")
        async with DLQConsumer(mailbox, handle) as loop:
            await began.wait()
            assert await mailbox.purge_dead_letters() == 2
            await bury(mailbox, "c")
            go_on.set()
            await until(lambda: sum(loop.outcomes.values()) == 2)
            assert (await loop.mailbox.counts()).in_flight == 0
        assert seen == ["a", "c"]
        counts = await mailbox.counts()
        assert (counts.waiting, counts.dead) == (0, 1)


@HERE
async def test_an_answer_that_is_no_verdict_is_an_error_and_loses_nothing(store):
    async def handle(letter: DeadLetter) -> str:
        return "done, I think"

    async with store.box() as mailbox:
        await bury(mailbox, "a")
        loop = DLQConsumer(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=1))
        async with loop:
            await until(lambda: loop.outcomes["dead_lettered"] == 1)
            (parked,) = await loop.mailbox.dead_letters()
            assert "Verdict" in parked.error
        assert (await mailbox.counts()).dead == 1


@HERE
async def test_a_dead_letter_has_nobody_to_answer_and_is_kept(store):
    async def handle(letter: DeadLetter) -> None:
        raise ReplyError("not found")

    async with store.box() as mailbox:
        await bury(mailbox, "a")
        async with DLQConsumer(mailbox, handle) as loop:
            await until(lambda: loop.outcomes["dead_lettered"] == 1)
            (parked,) = await loop.mailbox.dead_letters()
            assert "raise Reject to keep it" in parked.error
        assert (await mailbox.counts()).dead == 1


async def test_it_opens_its_mailbox_and_closes_it(tmp_path):
    path = str(tmp_path / "mail.db")
    async with SQLiteMailbox(path) as mailbox:
        await bury(mailbox, "a")
    mailbox = SQLiteMailbox(path)
    loop = DLQConsumer(mailbox, lambda letter: None, name="undertaker")
    group = LoopGroup([loop])
    with anyio.fail_after(10):
        await group.run(install_signals=False, until_empty=True)
    assert mailbox.state == "closed"
    assert dict(loop.outcomes) == {"acknowledged": 1}
    assert repr(loop).startswith("<DLQConsumer 'undertaker'")


async def test_a_view_takes_no_messages():
    async with InMemoryMailbox() as mailbox, DeadLetterView(mailbox, look_every=1) as view:
        with pytest.raises(InvalidParameterError, match="takes no messages"):
            await view.send("job")


async def test_a_view_can_let_the_parked_come_and_forget_everything():
    async with InMemoryMailbox() as mailbox, DeadLetterView(mailbox, look_every=0.01) as view:
        await bury(mailbox, "a", "b")
        for _ in range(2):
            (message,) = await view.receive(wait_time_seconds=5)
            await message.dead_letter("parked")
        assert await view.receive(wait_time_seconds=0.05) == []
        assert (await view.counts()).dead == 2
        assert await view.replay_dead_letters() == 2
        assert len(await view.receive(max_messages=2, wait_time_seconds=5)) == 2
        assert await view.purge() == 2
        assert (await mailbox.counts()).dead == 0


async def test_a_view_tells_how_long_dead_letters_wait(virtual_clock):
    async with InMemoryMailbox() as mailbox, DeadLetterView(mailbox, look_every=1) as view:
        await mailbox.send("a")
        await anyio.sleep(100)
        assert (await view.counts()).queue_age == 0
        (message,) = await mailbox.receive()
        await message.dead_letter("no")
        assert (await view.counts()).queue_age is None  # the view has yet to look at it
        await anyio.sleep(30)
        counts = await view.counts()
        assert (counts.pending, counts.queue_age) == (1, pytest.approx(30, abs=1))
        assert len(await view.receive()) == 1
        assert (await view.counts()).queue_age == 0


def test_a_view_says_that_it_has_no_transactions():
    class Able(InMemoryMailbox):
        capabilities = replace(MemoryBackend.capabilities, transactions=True)

    assert DeadLetterView(Able(), look_every=1).capabilities.transactions is False


def test_what_it_needs_is_said():
    class Poor(InMemoryMailbox):
        capabilities = Capabilities(dedup=False)

    with pytest.raises(ConfigError, match="dedup"):
        DLQConsumer(Poor(), lambda letter: None)
    with pytest.raises(ConfigError, match="Mailbox"):
        DLQConsumer("jobs", lambda letter: None)
    with pytest.raises(ConfigError, match="look_every"):
        DLQConsumer(InMemoryMailbox(), lambda letter: None, look_every=0)


def test_the_two_names_are_one():
    assert mainspring.DeadLetterConsumer is mainspring.DLQConsumer


@HERE
async def test_one_that_dies_again_and_again_comes_each_time(store):
    deaths = 0

    async def fail(job: str) -> None:
        raise Reject("never")

    async def handle(letter: DeadLetter) -> Verdict | None:
        nonlocal deaths
        deaths += 1
        return Verdict.REPLAY if deaths < 5 else None

    async with store.box() as mailbox, MainLoop(mailbox, fail), DLQConsumer(mailbox, handle):
        await mailbox.send("job")
        await until(lambda: deaths == 5)


# ------------------------------------------------------------------------------------------------------- virtual time


def test_a_retry_comes_later_and_a_failure_by_the_policy():
    async def main():
        at = []

        async def handle(letter: DeadLetter) -> None:
            at.append(anyio.current_time())
            if len(at) == 1:
                raise Retry(600)
            if len(at) == 2:
                raise LookupError("not yet")

        async with InMemoryMailbox() as mailbox:
            await bury(mailbox, "a")
            began = anyio.current_time()
            retry = RetryPolicy(initial_delay=100, jitter="none")
            loop = DLQConsumer(mailbox, handle, retry=retry)
            await LoopGroup([loop]).run(install_signals=False, until_empty=True)
            assert at[1] - began == pytest.approx(600, abs=1)
            assert at[2] - at[1] == pytest.approx(250, abs=1)
            assert (await mailbox.counts()).dead == 0

    run_virtual(main)


def test_one_whose_attempts_run_out_is_kept():
    async def main():
        attempts = []

        async def handle(letter: DeadLetter, ctx) -> None:
            attempts.append(ctx.attempt)
            raise LookupError("never")

        async with InMemoryMailbox() as mailbox:
            await bury(mailbox, "a")
            loop = DLQConsumer(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=3))
            await LoopGroup([loop]).run(install_signals=False, until_empty=True)
            assert attempts == [1, 2, 3]
            assert (await mailbox.counts()).dead == 1

    run_virtual(main)


def test_what_died_of_its_age_is_found_by_looking():
    async def main():
        seen = []

        async def handle(letter: DeadLetter) -> None:
            seen.append((letter.error_type, anyio.current_time()))

        async with InMemoryMailbox() as mailbox:
            began = anyio.current_time()
            async with DLQConsumer(mailbox, handle, look_every=5):
                await mailbox.send("job", expires_in=12)
                await anyio.sleep(20)
            ((error_type, at),) = seen
            assert error_type == "MessageExpiredError"
            assert 12 <= at - began <= 17

    run_virtual(main)


def test_a_worker_that_dies_leaves_its_dead_letter_to_another():
    async def main():
        seen = []

        async def handle(letter: DeadLetter) -> None:
            seen.append(anyio.current_time())

        async with InMemoryMailbox() as mailbox, DeadLetterView(mailbox, look_every=5) as view:
            await bury(mailbox, "a")
            began = anyio.current_time()
            assert await view.receive(visibility_timeout=60, wait_time_seconds=5)  # and is never heard of again
            async with DLQConsumer(mailbox, handle):
                await anyio.sleep(100)
            assert [at - began for at in seen] == [pytest.approx(60, abs=0.1)]
            assert (await mailbox.counts()).dead == 0

    run_virtual(main)


def test_a_store_that_is_away_for_a_while_loses_no_dead_letter():
    async def main():
        seen, refused = [], []

        async def refuse(look_up):
            refused.append(anyio.current_time())
            raise MailboxConnectionError("the store is away")

        async def handle(letter: DeadLetter) -> None:
            seen.append(letter.body)

        mailbox = FaultyMailbox()
        async with mailbox:
            await bury(mailbox, "a", "b")
            mailbox.next("find_dead", *[refuse] * 3)
            loop = DLQConsumer(mailbox, handle, visibility_timeout=3_600)
            began = anyio.current_time()
            await LoopGroup([loop]).run(install_signals=False, until_empty=True)
            assert sorted(seen) == ["a", "b"]
            assert len(refused) == 3
            assert anyio.current_time() - began < 60, "what could not be looked up stayed leased"
            assert (await mailbox.counts()).dead == 0

    run_virtual(main)
