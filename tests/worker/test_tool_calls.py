"""Effects outside that a handler marks: what the next delivery knows of those that had begun."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import anyio
import pytest
from anyio import from_thread

from mainspring import (
    Capabilities,
    ConfigError,
    Context,
    DeadLetterPolicy,
    InMemoryMailbox,
    InvalidParameterError,
    LoopGroup,
    MailboxConnectionError,
    MainLoop,
    Retry,
    RetryPolicy,
    SerializationError,
    ToolCall,
    open_mailbox,
)
from mainspring.core import clock
from mainspring.testing import Faults, Simulation
from support import FaultyMailbox, background, fail, hang, lose_answer, settled, slow, work

pytestmark = pytest.mark.anyio

AGAIN = RetryPolicy(initial_delay=0)


class Broken(Exception):
    """What a handler fails with."""


async def deliver(mailbox, handle, *, send=True):
    """Send one message, and let ``handle`` have it until it is done."""
    async with background(MainLoop(mailbox, handle, retry=AGAIN)):
        if send:
            await mailbox.send(1)
        await settled(mailbox, within=60)


async def break_off(ctx, name, **options):
    """A call whose block an error leaves; what was written down of it."""
    try:
        async with ctx.tool_call(name, **options) as block:
            raise Broken
    except Broken:
        return block.call


# ------------------------------------------------------------------------------------------------- what is found again


async def test_a_call_that_ended_leaves_nothing_behind():
    seen, stored = [], []

    async def handle(job: int, ctx: Context) -> None:
        seen.append((ctx.unfinished_calls, ctx.restored))
        async with ctx.tool_call("charge", key="order-1", info={"cents": 5}):
            stored.append(ctx.message.checkpoint)
        stored.append(ctx.message.checkpoint)
        if len(seen) == 1:
            raise Broken

    await deliver(InMemoryMailbox(), handle)
    assert seen == [((), None)] * 2
    assert b'"order-1"' in stored[0]
    assert stored[1] == b"null"


@pytest.mark.parametrize("leave", [Broken(), Retry(delay=0), Retry(delay=0, charge=False)], ids=repr)
async def test_a_block_left_by_an_exception_is_not_known_to_have_ended(leave):
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append(ctx.unfinished_calls)
        if len(seen) == 1:
            await ctx.checkpoint({"step": 1})
            async with ctx.tool_call("charge", key="order-1", info={"cents": 5}):
                raise leave
        assert ctx.restored == {"step": 1}

    before = clock.utc_now()
    await deliver(InMemoryMailbox(), handle)
    ((), (call,)) = seen
    assert (call.name, call.key, call.info, call.attempt) == ("charge", "order-1", {"cents": 5}, 1)
    assert call.begun_at.tzinfo is UTC
    assert before - timedelta(seconds=1) <= call.begun_at <= clock.utc_now() + timedelta(seconds=1)
    with pytest.raises(AttributeError):
        call.name = "other"


async def test_a_worker_that_dies_inside_of_a_call_leaves_it_to_the_next(virtual_clock):
    """The lease runs out, and nobody had a chance to write anything more."""
    mailbox = FaultyMailbox()
    seen = []
    writes = ("settle", "extend", "save_checkpoint")

    async def dies(job: int, ctx: Context) -> None:
        await anyio.sleep(3)
        async with ctx.tool_call("ship", info=[1, 2]):
            for call in writes:
                mailbox.always(call, hang)  # the process is gone
            await anyio.sleep_forever()

    async def lives(job: int, ctx: Context) -> None:
        seen.append((ctx.attempt, ctx.unfinished_calls))

    await mailbox.send(1)
    with anyio.CancelScope() as process:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(MainLoop(mailbox, dies, visibility_timeout=30).run)
            await anyio.sleep(10)
            process.cancel()
    for call in writes:
        mailbox.always(call, work)
    await deliver(mailbox, lives, send=False)
    began = clock.VIRTUAL_EPOCH + timedelta(seconds=3)
    assert seen == [(2, (ToolCall("ship", None, [1, 2], began, 1, 1),))]


async def test_a_handler_that_is_cancelled_leaves_its_call_unfinished(virtual_clock):
    mailbox = InMemoryMailbox()
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append([call.name for call in ctx.unfinished_calls])
        if len(seen) == 1:
            async with ctx.tool_call("charge"):
                await anyio.sleep_forever()

    await mailbox.send(1)
    loop = MainLoop(mailbox, handle)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await anyio.sleep(5)
        assert not await loop.shutdown(timeout=0)
    await deliver(mailbox, handle, send=False)
    assert seen == [[], ["charge"]]


async def test_several_calls_at_once_end_one_by_one():
    seen = []
    mailbox = FaultyMailbox()
    mailbox.always("save_checkpoint", slow(0.001))  # so that one is written while others come

    async def handle(job: int, ctx: Context) -> None:
        seen.append(sorted(call.info for call in ctx.unfinished_calls))
        if len(seen) > 1:
            return
        inside = ended = 0

        async def call(number: int) -> None:
            nonlocal inside, ended
            async with ctx.tool_call("fetch", info=number):
                inside += 1
                while inside < 8:
                    await anyio.lowlevel.checkpoint()
                if number % 2:
                    await anyio.sleep_forever()
            ended += 1

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(call, number)
            while ended < 4:
                await anyio.sleep(0.001)
            await ctx.checkpoint("halfway")
            tasks.cancel_scope.cancel()
        raise Broken

    with anyio.fail_after(30):
        await deliver(mailbox, handle)
    assert seen == [[], [1, 3, 5, 7]]


# ------------------------------------------------------------------------------------------------------ settling them


async def test_a_settled_call_is_not_found_again():
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append([call.key for call in ctx.unfinished_calls])
        if len(seen) == 1:
            for key in ("a", "b"):
                await break_off(ctx, "charge", key=key)
            raise Broken
        if len(seen) == 2:
            first, _ = ctx.unfinished_calls
            await ctx.resolve_call(first)
            await ctx.resolve_call(first)
            assert [call.key for call in ctx.unfinished_calls] == ["b"]
            raise Broken

    await deliver(InMemoryMailbox(), handle)
    assert seen == [[], ["a", "b"], ["b"]]


async def test_a_handler_that_knows_better_settles_its_own_call_although_an_exception_leaves_the_block():
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append(ctx.unfinished_calls)
        if len(seen) == 1:
            async with ctx.tool_call("charge") as call:
                await ctx.resolve_call(call)  # the other side has refused it
                raise Broken
        if len(seen) == 2:
            try:
                async with ctx.tool_call("charge") as call:
                    raise Broken
            finally:
                await ctx.resolve_call(call)

    await deliver(InMemoryMailbox(), handle)
    assert seen == [(), (), ()]


async def test_a_call_of_the_same_name_and_key_takes_it_up_again(virtual_clock):
    mailbox = InMemoryMailbox()
    seen, begun = [], []

    async def handle(job: int, ctx: Context) -> None:
        seen.append([(call.key, call.attempt) for call in ctx.unfinished_calls])
        await anyio.sleep(10)
        for key in ("order", None):
            if ctx.attempt <= 2:
                call = await break_off(ctx, "charge", key=key, info=ctx.attempt)
                begun.append((call.begun_at - clock.VIRTUAL_EPOCH).total_seconds())
        if ctx.attempt <= 2:
            raise Broken
        assert [call.info for call in ctx.unfinished_calls] == [2, 1, 2]
        async with ctx.tool_call("charge", key="order"):
            assert [call.key for call in ctx.unfinished_calls] == [None, None]  # it is this handler's own now
        assert [call.key for call in ctx.unfinished_calls] == [None, None]
        if ctx.attempt == 3:
            raise Broken

    await mailbox.send(1)
    async with background(MainLoop(mailbox, handle, retry=AGAIN)):
        await anyio.sleep(100)
    assert seen[:3] == [[], [("order", 1), (None, 1)], [("order", 1), (None, 1), (None, 2)]]
    assert seen[3] == [(None, 1), (None, 2)]
    assert begun == [10, 10, 10, 20]


async def test_a_call_that_broke_off_can_be_taken_up_again_in_the_same_attempt():
    mailbox = InMemoryMailbox()
    begun = []

    async def handle(job: int, ctx: Context) -> None:
        begun.append(await break_off(ctx, "charge", key="order"))
        async with ctx.tool_call("charge", key="order") as block:
            begun.append(block.call)
        assert ctx.unfinished_calls == ()

    loop = MainLoop(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=1))
    await mailbox.send(1)
    async with background(loop):
        await settled(mailbox)
    assert loop.outcomes == {"acknowledged": 1}
    assert len({(call.number, call.begun_at) for call in begun}) == 1


async def test_one_call_cannot_be_under_way_twice():
    said = []

    async def handle(job: int, ctx: Context) -> None:
        async with ctx.tool_call("charge", key="order"):
            try:
                async with ctx.tool_call("charge", key="order"):
                    pass
            except InvalidParameterError as error:
                said.append(str(error))
        async with ctx.tool_call("charge", key="order"):
            pass

    await deliver(InMemoryMailbox(), handle)
    assert said == [
        "tool_call: 'charge' with key 'order' is under way in this handler already; await it, or give this one another key"
    ]


async def test_calls_that_nobody_settles_do_not_pile_up_for_ever():
    said = []

    async def handle(job: int, ctx: Context) -> None:
        for _ in range(101):
            try:
                async with ctx.tool_call("charge"):
                    raise Broken
            except Broken:
                pass
            except InvalidParameterError as error:
                said.append(str(error))

    await deliver(InMemoryMailbox(), handle)
    [text] = said
    assert "100 calls of message" in text
    assert "settle the ones of no further interest with ctx.resolve_call()" in text


# -------------------------------------------------------------------------------------------- beside the checkpoint


@pytest.mark.parametrize(
    "state", [{"done": 3}, [1, None, "x"], 5, "text", None, {"$mainspring": 1, "calls": [], "state": 2}]
)
async def test_calls_and_checkpoint_do_not_disturb_each_other(state):
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append((ctx.restored, len(ctx.unfinished_calls)))
        if ctx.attempt == 1:
            await ctx.checkpoint(state)
        elif ctx.attempt == 2:
            await break_off(ctx, "charge")
        elif ctx.attempt == 3:
            async with ctx.tool_call("charge"):
                await ctx.checkpoint(state)
                assert ctx.restored == state
                raise Broken
        else:
            return
        assert ctx.restored == state
        raise Broken

    await deliver(InMemoryMailbox(), handle)
    assert seen == [(None, 0), (state, 0), (state, 1), (state, 2)]


@pytest.mark.parametrize(
    ("raw", "state"),
    [
        (b'{"done":3}', {"done": 3}),
        (b"null", None),
        (b' {"$mainspring": 1}', {"$mainspring": 1}),
        (b'{"$mainspring":"mine"}', {"$mainspring": "mine"}),
        (b'{"$mainspring":1,"state":2}', {"$mainspring": 1, "state": 2}),
    ],
)
async def test_checkpoints_of_before_are_read_as_they_are(raw, state):
    mailbox = InMemoryMailbox()
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append((ctx.restored, ctx.unfinished_calls))

    await mailbox.send(1)
    [message] = await mailbox.receive()
    await message.save_checkpoint(raw)
    await message.release()
    await deliver(mailbox, handle, send=False)
    assert seen == [(state, ())]


async def test_one_of_a_newer_version_is_left_to_a_worker_that_knows_it():
    mailbox = InMemoryMailbox()
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        try:
            seen.append(ctx.restored)
        except SerializationError as error:
            seen.append(str(error))

    await mailbox.send(1)
    [message] = await mailbox.receive()
    await message.save_checkpoint(b'{"$mainspring":2,"calls":[],"state":1}')
    await message.release()
    await deliver(mailbox, handle, send=False)
    assert seen == ["the message's checkpoint was written by a newer version of Mainspring; upgrade this worker"]


async def test_a_state_can_be_kept_by_the_write_that_ends_the_call():
    mailbox = FaultyMailbox()
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append((ctx.restored, ctx.unfinished_calls))
        if len(seen) == 1:
            async with ctx.tool_call("charge") as call:
                call.keep({"receipt": 7})
                assert ctx.restored is None
            assert ctx.restored == {"receipt": 7}
            raise Broken

    await deliver(mailbox, handle)
    assert seen == [(None, ()), ({"receipt": 7}, ())]
    assert len(mailbox.times("save_checkpoint")) == 2


# ---------------------------------------------------------------------------------------------- stores that misbehave


async def test_a_call_whose_beginning_cannot_be_written_is_not_made():
    mailbox = FaultyMailbox()
    mailbox.next("save_checkpoint", fail(MailboxConnectionError("away")))
    made = []

    async def handle(job: int, ctx: Context) -> None:
        async with ctx.tool_call("charge", key="order"):
            made.append(ctx.attempt)

    await deliver(mailbox, handle)
    assert made == [2]


@pytest.mark.parametrize("action", [fail, lose_answer])
async def test_a_call_whose_end_cannot_be_written_is_a_failed_attempt(action):
    mailbox = FaultyMailbox()
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append(len(ctx.unfinished_calls))
        if ctx.attempt == 1:
            async with ctx.tool_call("charge"):
                mailbox.next("save_checkpoint", action(MailboxConnectionError("away")))

    await deliver(mailbox, handle)
    assert seen == [0, 1 if action is fail else 0]


async def test_an_end_is_written_although_the_handler_is_being_cancelled(virtual_clock):
    mailbox = FaultyMailbox()
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append(len(ctx.unfinished_calls))
        if len(seen) == 1:
            async with ctx.tool_call("charge"):
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(10)  # the effect takes place while the shutdown comes
            await anyio.sleep_forever()

    await mailbox.send(1)
    loop = MainLoop(mailbox, handle)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        await anyio.sleep(8)
        await loop.shutdown(timeout=0)
    await deliver(mailbox, handle, send=False)
    assert seen == [0, 0]


async def test_a_store_that_does_not_answer_holds_up_the_end_for_its_time_and_no_longer(virtual_clock):
    mailbox = FaultyMailbox()
    took = []

    async def handle(job: int, ctx: Context) -> None:
        if ctx.attempt > 1:
            took.append(len(ctx.unfinished_calls))
            return
        began = virtual_clock.now
        try:
            async with ctx.tool_call("charge"):
                mailbox.next("save_checkpoint", hang)
        except MailboxConnectionError as error:
            took.append((virtual_clock.now - began, str(error)))
            raise

    await mailbox.send(1)
    async with background(MainLoop(mailbox, handle, retry=AGAIN)):
        await anyio.sleep(100)
    assert took == [(5, "the end of tool call 'charge' could not be written within 5 s"), 1]


async def test_a_mailbox_without_checkpoints_says_so():
    class Forgetful(InMemoryMailbox):
        capabilities = Capabilities(checkpoints=False)

    said = []

    async def handle(job: int, ctx: Context) -> None:
        try:
            ctx.tool_call("charge")
        except ConfigError as error:
            said.append(str(error))

    await deliver(Forgetful(), handle)
    assert said == ["ctx.tool_call: this mailbox keeps no checkpoints (Capabilities.checkpoints); use one that does"]


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("", {}, InvalidParameterError, "name must be text"),
        (3, {}, InvalidParameterError, "name must be text"),
        ("x", {"key": 3}, InvalidParameterError, "key must be text, or None"),
        ("x", {"key": ""}, InvalidParameterError, "key must be text, or None"),
        (
            "x",
            {"info": object()},
            SerializationError,
            "the info of a tool call of type object cannot be written as JSON",
        ),
    ],
)
async def test_bad_values_are_refused_where_they_are_given(name, options, error, words):
    said = []

    async def handle(job: int, ctx: Context) -> None:
        try:
            ctx.tool_call(name, **options)
        except error as raised:
            said.append(str(raised))

    await deliver(InMemoryMailbox(), handle)
    assert words in said[0]


async def test_a_block_is_entered_once_and_a_call_is_settled_not_a_name():
    async def handle(job: int, ctx: Context) -> None:
        block = ctx.tool_call("charge")
        with pytest.raises(ConfigError, match="begins with its block"):
            _ = block.call
        async with block:
            with pytest.raises(SerializationError, match="cannot be written as JSON"):
                block.keep(object())
        with pytest.raises(ConfigError, match="made once"):
            await block.__aenter__()
        with pytest.raises(ConfigError, match="write `async with` here"):
            ctx.tool_call("charge").__enter__()
        with pytest.raises(InvalidParameterError, match="resolve_call takes a call of"):
            await ctx.resolve_call("charge")
        ended.append(ctx.attempt)

    ended = []
    await deliver(InMemoryMailbox(), handle)
    assert ended == [1]


async def test_a_call_beats(virtual_clock):
    async def handle(job: int, ctx: Context) -> None:
        await anyio.sleep(10)
        async with ctx.tool_call("charge"):
            await anyio.sleep(10)
        await anyio.sleep(5)

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, handle)
    ages = []
    async with background(loop):
        await mailbox.send(1)
        for _ in range(2):
            await anyio.sleep(11)
            ages.append(loop.runs[0].beat_age())
    assert ages == [1, 2]


async def test_a_plain_handler_marks_its_calls_from_its_thread():
    seen = []

    def handle(job: int, ctx: Context) -> None:
        seen.append((ctx.restored, [call.name for call in ctx.unfinished_calls]))
        if len(seen) == 1:
            with ctx.tool_call("first", key="k") as call:
                call.keep("kept")
            with ctx.tool_call("second"):
                raise Broken
        for unfinished in ctx.unfinished_calls:
            from_thread.run(ctx.resolve_call, unfinished)
        if len(seen) == 2:
            raise Broken

    await deliver(InMemoryMailbox(), handle)
    assert seen == [(None, []), ("kept", ["second"]), ("kept", [])]


# ------------------------------------------------------------------------------------------------------ every backend


async def begun_and_found(url: str) -> None:
    """A call that one mailbox object has begun is found by another one on the same store."""
    seen = []

    async def handle(job: int, ctx: Context) -> None:
        seen.append((ctx.restored, ctx.unfinished_calls))
        if len(seen) == 1:
            await ctx.checkpoint({"step": "ü"})
            async with ctx.tool_call("charge", key="order-1", info={"cents": [5, "€", 1.5]}):
                raise Broken
        for call in ctx.unfinished_calls:
            await ctx.resolve_call(call)
        if len(seen) == 2:
            raise Broken

    async with open_mailbox(url, body=int) as mailbox:
        await mailbox.purge()
        await mailbox.send(1)
        async with background(MainLoop(mailbox, handle, retry=AGAIN), max_iterations=1):
            while len(seen) < 1 or (await mailbox.counts()).in_flight:
                await anyio.sleep(0.01)
    async with open_mailbox(url, body=int) as mailbox:
        async with background(MainLoop(mailbox, handle, retry=AGAIN)):
            await settled(mailbox, within=30)
        await mailbox.purge()
    [(_, before), (second, (call,)), (third, after)] = seen
    assert (before, after) == ((), ())
    assert second == third == {"step": "ü"}
    assert (call.name, call.key, call.info, call.attempt) == ("charge", "order-1", {"cents": [5, "€", 1.5]}, 1)
    assert isinstance(call.begun_at, datetime)


async def test_in_a_file(tmp_path):
    await begun_and_found(f"sqlite:///{tmp_path}/calls.db?name=calls")


async def test_on_redis(redis_url):
    await begun_and_found(f"{redis_url}?name=tool-calls-{uuid4().hex}")


@pytest.mark.loops("uvloop")
async def test_on_postgres(anyio_backend, postgres_url):
    await begun_and_found(f"{postgres_url}?name=tool-calls-{uuid4().hex}")


@pytest.mark.loops("uvloop")
async def test_on_nats(anyio_backend, nats_url):
    await begun_and_found(f"{nats_url}?name=tool-calls-{uuid4().hex}")


# ---------------------------------------------------------------------------------------------------------- simulation


class Bank:
    """The other side. It knows no idempotency keys, but can be asked."""

    def __init__(self) -> None:
        self.charges: dict[int, int] = {}
        self.asked = 0

    async def charge(self, order: int) -> None:
        await anyio.sleep(2)
        self.charges[order] = self.charges.get(order, 0) + 1
        await anyio.sleep(2)

    def knows(self, order: int) -> bool:
        self.asked += 1
        return order in self.charges


def simulate(seed: int, *, careful: bool) -> Bank:
    """Hours of killed workers; whether ``careful`` says whether the handler asks before it repeats."""
    bank = Bank()

    async def handle(order: int, ctx: Context) -> None:
        if careful:
            for call in ctx.unfinished_calls:
                if bank.knows(order):
                    await ctx.checkpoint("charged")
                await ctx.resolve_call(call)
        if ctx.restored != "charged":
            async with ctx.tool_call("charge", key=str(order)) as call:
                await bank.charge(order)
                call.keep("charged")
        await anyio.sleep(2)

    def build(mailbox):
        return LoopGroup([MainLoop(mailbox, handle, concurrency=2, visibility_timeout=20)])

    faults = Faults.just(crash=60, signal=20)
    report = Simulation(seed=seed, duration=1800, workers=3, faults=faults, per_minute=6, body=int).run(build)
    report.check()
    assert report.counts["crashes"] > 10
    return bank


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["none"])
@pytest.mark.parametrize("seed", range(3))
def test_in_hours_of_killed_workers_nothing_is_charged_twice(anyio_backend, seed):
    bank = simulate(seed, careful=True)
    assert bank.asked > 0
    assert set(bank.charges.values()) == {1}


@pytest.mark.slow
def test_without_asking_something_is_charged_twice():
    """So that the test above shows something."""
    assert max(simulate(0, careful=False).charges.values()) > 1
