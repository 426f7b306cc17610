"""Limits of tasks: what may begin and run at once, the order of a key, shares, and how all that reaches the store."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import anyio
import pytest
from schedule_support import virtually
from task_support import group_of, until_done

from mainspring import (
    Backend,
    Capabilities,
    Context,
    DeadLetterPolicy,
    InMemoryMailbox,
    LoopGroup,
    Rate,
    Reject,
    RetryPolicy,
    Schedule,
    Tasks,
    chain,
    parallel,
)
from mainspring.errors import ConfigError, InvalidParameterError, MailboxConnectionError
from mainspring.mailbox.limiters import ALL_TASKS, Blocks, LimitChange, TaskLimits
from mainspring.mailbox.message import MessagePlace, MessageQuery
from mainspring.testing import override
from stores import KINDS, on
from wrapped_backend import WrappedBackend, wrap

pytestmark = pytest.mark.anyio

EVERYWHERE = on(*KINDS)
LIMITING = on("memory", "sqlite", "redis", "postgres")
_names = count()


class Runs:
    """What has begun, when, and how much ran at once."""

    def __init__(self):
        self.begun = []
        self.most = Counter()
        self._running = Counter()

    @asynccontextmanager
    async def noted(self, what, key):
        self.begun.append((what, anyio.current_time()))
        for of in ("all", key):
            self._running[of] += 1
            self.most[of] = max(self.most[of], self._running[of])
        try:
            yield
        finally:
            self._running.subtract(("all", key))

    @property
    def order(self):
        return [what for what, _ in self.begun]

    @property
    def times(self):
        return [round(when - self.begun[0][1], 3) for _, when in self.begun]


def limited(tasks, runs, **options):
    """Register the task ``work``: it notes its runs, and fails as often as its call says, or for good (-1)."""

    @tasks.task(**options)
    async def work(ctx: Context, what: str, key: str = "k", seconds: float = 1.0, fail: int = 0) -> None:
        async with runs.noted(what, key):
            await anyio.sleep(seconds)
        if fail < 0:
            raise Reject(what)
        if ctx.attempt <= fail:
            raise ValueError(what)

    return work


class Fleet:
    """Two workers on one queue, each with the task ``work`` of the same options."""

    def __init__(self, url=None, max_concurrency=None, **options):
        self.runs = Runs()
        retry = RetryPolicy(initial_delay=10, jitter="none")
        url = url or f"memory://fleet-{next(_names)}"
        self.programs = [Tasks(url, retry=retry, max_concurrency=max_concurrency) for _ in range(2)]
        self.work, _ = [limited(tasks, self.runs, **options) for tasks in self.programs]
        self.tasks = self.programs[0]
        self.mailbox = self.tasks.mailbox

    @asynccontextmanager
    async def running(self, concurrency=10):
        loops = [tasks.loop(name=f"w{n}", concurrency=concurrency) for n, tasks in enumerate(self.programs)]
        async with LoopGroup(loops, guardian=False):
            yield

    async def run(self, concurrency=10):
        """Run both until nothing is left to do."""
        async with self.running(concurrency):
            await until_done(self.mailbox, seconds=1_000, every=0.5)


async def until_declared(tasks):
    with anyio.fail_after(10):
        while tasks.declared_in is None:
            await anyio.sleep(0.005)


# ------------------------------------------------------------------------------------------------------------- every store


@LIMITING
async def test_a_task_runs_no_more_than_its_concurrency_in_all_workers(store):
    fleet = Fleet(store.url(), concurrency=2)
    async with fleet.running():
        await fleet.work.send_many([{"what": f"{n}", "seconds": 0.02} for n in range(10)])
        await until_done(fleet.mailbox)
    assert len(fleet.runs.begun) == 10
    assert fleet.runs.most["all"] == 2


@LIMITING
async def test_the_calls_of_a_key_run_in_the_order_of_their_sends(store):
    fleet = Fleet(store.url(), key="key", ordered=True)
    async with fleet.running():
        for n in range(5):
            for key in "ab":
                await fleet.work.send(f"{key}{n}", key, seconds=0.01)
        await until_done(fleet.mailbox)
    for key in "ab":
        assert [what for what in fleet.runs.order if what[0] == key] == [f"{key}{n}" for n in range(5)]
        assert fleet.runs.most[key] == 1


@LIMITING
async def test_calls_by_an_alias_count_in_the_limits_of_the_task(store):
    url, runs = store.url(), Runs()
    before, now = Tasks(url), Tasks(url)
    old = limited(before, runs, name="old", key="key")
    new = limited(now, runs, aliases=["old"], key="key", concurrency=1, ordered=True)
    async with before, now:
        for n in range(4):
            await (new if n == 2 else old).send(f"{n}", seconds=0.02)
        async with group_of(now):
            await until_done(now.mailbox)
    assert [what for what in runs.order if what != "2"] == ["0", "1", "3"]
    assert (len(runs.order), runs.most["all"]) == (4, 1)


@LIMITING
async def test_a_paused_task_is_paused_under_its_aliases(store):
    url, runs = store.url(), Runs()
    before, now = Tasks(url), Tasks(url)
    old = limited(before, runs, name="old")
    new = limited(now, runs, aliases=["old"])
    async with before, now:
        await now.pause(new)
        await old.send("a", fail=1, seconds=0)  # a claim that counts as an attempt would let it be done at once
        async with group_of(now):
            with anyio.fail_after(10):
                while [state.waiting for state in await now.limits()] != [1]:
                    await anyio.sleep(0.01)
            assert not runs.order
            await now.resume(new)
            with anyio.fail_after(10):
                while not runs.order:
                    await anyio.sleep(0.01)
            assert (await now.mailbox.counts()).delayed == 1


@virtually
async def test_a_call_by_an_alias_that_the_store_does_not_answer_for_is_tried_again():
    class Failing(WrappedBackend):
        failures = 1

        async def set_task(self, delivery, task):
            if self.failures:
                self.failures -= 1
                raise MailboxConnectionError("no route to the store")
            return await self.inner.set_task(delivery, task)

    mailbox, runs = InMemoryMailbox(), Runs()
    given_up = DeadLetterPolicy(max_attempts=1, retry_on=())
    retry = RetryPolicy(initial_delay=5)
    before, now = Tasks(mailbox.address), Tasks(wrap(mailbox, Failing), retry=retry, dead_letter=given_up)
    limited(now, runs, aliases=["old"], concurrency=1)
    async with before, now:
        await limited(before, Runs(), name="old").send("a")
        async with group_of(now):
            await until_done(now.mailbox, seconds=100, every=0.5)
    assert runs.order == ["a"]


@LIMITING
async def test_every_way_of_sending_names_the_task_the_key_and_the_weight(store):
    tasks = Tasks(store.url(), retry=RetryPolicy(initial_delay=0))

    @tasks.task(key="key", weight=2.0)
    async def work(key: str, n: int = 0) -> int:
        return n

    @tasks.task(key="key", unique="pending")
    async def once(key: str) -> None: ...

    @tasks.task(key="key", debounce=60)
    async def last(key: str) -> None: ...

    @tasks.task
    async def plain() -> None: ...

    async def keys(name):
        pages = [
            await tasks.mailbox.backend.list_messages(MessageQuery(place, 100, task=name))
            for place in (MessagePlace.PENDING, MessagePlace.DELAYED)
        ]
        return [found.key for page in pages for found in page.messages]

    async with tasks, anyio.create_task_group() as group:
        await work.send("sent")
        await work.send_many([("many",), {"key": "named"}])
        await work.options(key="given").send("sent")
        await work.options(delay=60, priority=3, headers={"a": "b"}).send("delayed")
        await chain(work.s("chained"), work.s(n=1, key="later")).send()
        await parallel([work.s("part"), work.options(key="chosen").s("part")]).send()
        await anyio.to_thread.run_sync(work.sync.send, "sync")
        await tasks.schedules.add(Schedule("daily", work, cron="0 0 * * *", args=("scheduled",)))
        await tasks.schedules.run_now("daily")
        group.start_soon(partial(work.request, "requested"))
        await once.send("once")
        await last.send("last")
        await plain.send()
        with anyio.fail_after(10):
            while len(found := await keys("work")) < 11:
                await anyio.sleep(0.01)
        assert sorted(found) == sorted(
            ["sent", "many", "named", "given", "delayed", "chained", "part", "chosen", "sync", "scheduled", "requested"]
        )
        assert await keys("once") == ["once"]
        assert await keys("last") == ["last"]
        assert await keys("plain") == [None]
        group.cancel_scope.cancel()


@virtually
async def test_a_schedule_keeps_the_key_and_the_weight_of_its_task():
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(key="what", weight=2)
    async def work(what: str) -> None: ...

    await tasks.schedules.add(Schedule("a", work.options(key="given", weight=5), every=60, args=("x",)))
    await tasks.schedules.run_now("a")
    page = await tasks.mailbox.backend.list_messages(MessageQuery(MessagePlace.PENDING, 10))
    assert [found.key for found in page.messages] == ["given"]
    (schedule,) = await tasks.schedules.list()
    assert schedule.task == "work"


@LIMITING
async def test_a_loop_declares_the_limits_of_its_tasks_and_takes_back_what_is_gone(store):
    limits = TaskLimits(3, Rate(100, 60.0), 1, Rate(5, 1.0, 5), Blocks.DEAD)
    before, after = Tasks(store.url(), max_concurrency=7), Tasks(store.url())
    options = {"rate": "100/m", "concurrency": 3, "key": "key", "key_rate": Rate(5, 1, 5), "ordered": "dead"}
    limited(before, Runs(), **options)
    limited(after, Runs())
    async with before:
        await before.mailbox.backend.change_limits([LimitChange("of another program", TaskLimits(1))])
        async with group_of(before):
            await until_declared(before)
        found = await before.mailbox.backend.limits()
        assert [(state.task, state.limits) for state in found] == [
            (ALL_TASKS, TaskLimits(7)),
            ("of another program", TaskLimits(1)),
            ("work", limits),
        ]
    async with after:
        async with group_of(after):
            await until_declared(after)
        assert [state.task for state in await after.mailbox.backend.limits()] == ["of another program"]


@EVERYWHERE
async def test_calls_without_limits_have_none_and_run(store):
    tasks, runs = Tasks(store.url()), Runs()
    work = limited(tasks, runs, key="key")
    async with group_of(tasks):
        await work.send("a", "b", seconds=0)
        await until_done(tasks.mailbox)
        assert await tasks.mailbox.limits() == []
    assert runs.order == ["a"]


# ---------------------------------------------------------------------------------------------------- limits, virtually


@virtually
async def test_a_rate_holds_for_all_workers_together():
    fleet = Fleet(rate="6/m")
    await fleet.work.send_many([(str(n),) for n in range(5)])
    await fleet.run()
    assert fleet.runs.times == [0, 10, 20, 30, 40]


@virtually
async def test_a_burst_begins_at_once():
    fleet = Fleet(rate=Rate(6, "1m", burst=3))
    await fleet.work.send_many([(str(n),) for n in range(5)])
    await fleet.run()
    assert fleet.runs.times == [0, 0, 0, 10, 20]


@virtually
async def test_a_rate_of_keys_holds_for_each_key():
    fleet = Fleet(key="key", key_rate="6/m")
    await fleet.work.send_many([(f"{key}{n}", key) for n in range(2) for key in "abc"])
    await fleet.run()
    assert fleet.runs.times == [0, 0, 0, 10, 10, 10]


@virtually
async def test_a_key_runs_no_more_than_its_concurrency():
    fleet = Fleet(key="key", key_concurrency=2)
    await fleet.work.send_many([(f"{key}{n}", key) for n in range(6) for key in "ab"])
    await fleet.run()
    assert (fleet.runs.most["a"], fleet.runs.most["b"], fleet.runs.most["all"]) == (2, 2, 4)


@virtually
async def test_the_mailbox_runs_no_more_than_its_concurrency():
    fleet = Fleet(max_concurrency=3)
    await fleet.work.send_many([(str(n),) for n in range(9)])
    await fleet.run()
    assert fleet.runs.most["all"] == 3


@pytest.mark.parametrize(("ordered", "begins"), [(True, 12), ("retry", 12), ("running", 1), ("dead", 12)])
@virtually
async def test_a_call_that_is_to_be_tried_again_holds_up_its_key_as_said(ordered, begins):
    fleet = Fleet(key="key", ordered=ordered)
    await fleet.work.send("a", fail=1)
    await fleet.work.send("b")
    await fleet.run()
    assert fleet.runs.times[fleet.runs.order.index("b")] == begins


@pytest.mark.parametrize(("ordered", "goes_on"), [(True, True), ("running", True), ("dead", False)])
@virtually
async def test_a_dead_letter_holds_up_its_key_as_said(ordered, goes_on):
    fleet = Fleet(key="key", ordered=ordered)
    async with fleet.running():
        await fleet.work.send("a", fail=-1)
        await fleet.work.send("b")
        await anyio.sleep(100)
        assert ("b" in fleet.runs.order) is goes_on
        (letter,) = await fleet.mailbox.dead_letters()
        await fleet.mailbox.purge_dead_letters([letter.message_id])
        await anyio.sleep(10)
    assert fleet.runs.order == ["a", "b"]


@virtually
async def test_a_key_with_much_to_do_does_not_hold_up_another():
    fleet = Fleet(key="key")
    await fleet.work.send_many([(f"a{n}", "a") for n in range(60)])
    async with fleet.running(concurrency=1):
        await anyio.sleep(10.5)
        await fleet.work.send("b0", "b")
        await fleet.work.send("b1", "b")
        await until_done(fleet.mailbox, seconds=1_000, every=0.5)
    before = fleet.runs.order[: fleet.runs.order.index("b1")]
    assert len(before) < 30


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param("seconds", id="parameter"),
        pytest.param(lambda what, key, seconds, fail: 3 if key == "a" else 1, id="function"),
    ],
)
@virtually
async def test_weights_divide_the_turns(weight):
    fleet = Fleet(key="key", weight=weight)
    await fleet.work.send_many(
        [(f"{key}{n}", key, seconds) for n in range(20) for key, seconds in (("a", 3), ("b", 1))]
    )
    await fleet.run(concurrency=1)
    assert 14 <= Counter(what[0] for what in fleet.runs.order[:20])["a"] <= 16


@virtually
async def test_the_weight_of_one_call_is_that_of_its_options():
    fleet = Fleet(key="key")
    for n in range(20):
        await fleet.work.options(weight=3).send(f"a{n}", "a")
        await fleet.work.send(f"b{n}", "b")
    await fleet.run(concurrency=1)
    assert 14 <= Counter(what[0] for what in fleet.runs.order[:20])["a"] <= 16


@virtually
async def test_the_limits_hold_for_calls_that_were_sent_before_they_were_declared():
    tasks, runs = Tasks("memory://declared-late"), Runs()
    work = limited(tasks, runs, concurrency=1)
    before = Tasks("memory://declared-late")
    await limited(before, runs).send_many([("a",), ("b",), ("c",)])
    assert await tasks.mailbox.backend.limits() == []
    await work.send("d")
    async with group_of(tasks):
        await until_done(tasks.mailbox, 100)
    assert runs.times == [0, 1, 2, 3]


@virtually
async def test_a_task_that_is_registered_after_a_send_is_limited_from_its_first_one_on():
    tasks, runs = Tasks(InMemoryMailbox()), Runs()
    async with tasks:
        await limited(tasks, runs, concurrency=1).send("a")

        @tasks.task(concurrency=2)
        async def later() -> None: ...

        await later.send()
        assert [state.task for state in await tasks.mailbox.backend.limits()] == ["later", "work"]


@virtually
async def test_limits_that_are_declared_already_are_not_written_again():
    class Counting(WrappedBackend):
        written = 0

        async def change_limits(self, changes):
            Counting.written += 1
            await self.inner.change_limits(changes)

    tasks = Tasks(wrap(InMemoryMailbox(), Counting))
    work = limited(tasks, Runs(), rate="100/m")
    for _ in range(3):
        async with tasks:
            await work.send("a")
            async with group_of(tasks):
                await until_declared(tasks)
    assert Counting.written == 1


@virtually
async def test_a_declaration_that_fails_is_made_again_before_the_first_claim():
    class Failing(WrappedBackend):
        failures = 3

        async def change_limits(self, changes):
            if self.failures:
                self.failures -= 1
                raise MailboxConnectionError("no route to the store")
            await self.inner.change_limits(changes)

    mailbox, runs = InMemoryMailbox(), Runs()
    sender, tasks = Tasks(mailbox.address), Tasks(wrap(mailbox, Failing))
    limited(tasks, runs, concurrency=1)
    await limited(sender, runs).send_many([("a",), ("b",)])
    async with group_of(tasks):
        await until_done(sender.mailbox, 100)
    assert runs.times == [0, 1]


@virtually
async def test_a_worker_that_is_told_to_stop_does_not_wait_for_its_declaration():
    class Hanging(WrappedBackend):
        async def limits(self):
            await anyio.sleep_forever()

    tasks = Tasks(wrap(InMemoryMailbox(), Hanging))
    limited(tasks, Runs(), concurrency=1)
    began = anyio.current_time()
    async with tasks, group_of(tasks):
        await anyio.sleep(1)
    assert anyio.current_time() - began == pytest.approx(1, abs=0.1)


@virtually
async def test_limits_hold_inside_of_override():
    tasks, runs = Tasks("sqlite:///nowhere/jobs.db?name=jobs"), Runs()
    work = limited(tasks, runs, key="key", ordered=True)
    with override(tasks):
        async with group_of(tasks):
            await work.send_many([("a",), ("b",)])
            await until_done(tasks.mailbox, 100)
    assert runs.times == [0, 1]


# -------------------------------------------------------------------------------------------------------- bad input


def _refusal(match, **options):
    return pytest.param(
        options, match, id=" ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        _refusal(
            "task work: rate: Rate: limit must be a whole number from 1 to 1,000,000,000, not 0; pause", rate="0/m"
        ),
        _refusal('task work: rate: a rate is a text as "100/m"', rate="many"),
        _refusal('task work: key_rate: a rate is a text as "100/m"', key_rate="5", key="key"),
        _refusal(
            "task work: concurrency must be a whole number from 1 to 1,000,000,000, or None, not 0", concurrency=0
        ),
        _refusal(
            "task work: key_concurrency must be a whole number from 1 to 1,000,000,000, or None", key_concurrency=-1
        ),
        _refusal("task work: concurrency must be a whole number from 1 to", concurrency=1_000_000_001),
        _refusal("task work: key_rate: a rate is a text", key_rate="1" * 30 + "/s", key="key"),
        _refusal("task work: rate: Rate: limit must be a whole number from 1 to", rate="1000000001/s"),
        _refusal("task work: ordered needs key=, the name of a parameter or a function", ordered=True),
        _refusal("task work: key_rate needs key=", key_rate="5/s"),
        _refusal("task work: key_rate: one rate holds for every key; a rate is", key_rate=lambda key: "5/s", key="key"),
        _refusal("task work: key_concurrency needs key=", key_concurrency=2),
        _refusal("task work: weight needs key=", weight=2),
        _refusal("task work: ordered must be True or False, 'running'", ordered="always", key="key"),
        _refusal("task work: ordered must be True or False, 'running'", ordered=1, key="key"),
        _refusal("task work: ordered runs one call of a key at once", ordered=True, key="key", key_concurrency=2),
        _refusal("task work: key must be the name of a parameter", key="nothing", ordered=True),
        _refusal("task work: weight must be a number from 0.01 to 100, the name", key="key", weight=0),
        _refusal("task work: weight must be a number from 0.01 to 100, the name", key="key", weight="nothing"),
    ],
)
def test_limits_that_cannot_be_are_refused_as_the_task_is_registered(options, match):
    with pytest.raises(ConfigError, match=match) as caught:
        limited(Tasks(InMemoryMailbox()), Runs(), **options)
    assert "\n" not in str(caught.value)


def test_a_most_of_the_mailbox_is_a_whole_number():
    with pytest.raises(ConfigError, match="Tasks: max_concurrency must be a whole number from 1 to 1,000,000,000"):
        Tasks(InMemoryMailbox(), max_concurrency=0)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"rate": "1/s"}, id="rate"),
        pytest.param({"concurrency": 1}, id="concurrency"),
        pytest.param({"key_rate": "1/s", "key": "key"}, id="key_rate"),
        pytest.param({"key_concurrency": 1, "key": "key"}, id="key_concurrency"),
        pytest.param({"ordered": True, "key": "key"}, id="ordered"),
        pytest.param({"weight": 2, "key": "key"}, id="weight"),
    ],
)
def test_a_mailbox_that_keeps_no_limits_is_named_with_those_that_do(options):
    tasks = Tasks("nats://localhost?name=jobs")
    (option, *_) = options
    with pytest.raises(ConfigError, match=rf"task work: {option} needs .*Capabilities.limits, as memory://, sqlite://"):
        limited(tasks, Runs(), **options)
    work = limited(tasks, Runs(), key="key")
    with pytest.raises(ConfigError, match=r"task work: weight needs a mailbox with Capabilities.limits"):
        work.options(weight=2)


@virtually
async def test_a_mailbox_without_pauses_and_a_concurrency_names_those_with_them():
    class Plain(WrappedBackend):
        capabilities = Capabilities()

        async def change_limits(self, changes):
            await Backend.change_limits(self, changes)

    mailbox = wrap(InMemoryMailbox("plain"), Plain)
    with pytest.raises(
        ConfigError, match=r"Tasks: max_concurrency needs a mailbox with Capabilities.concurrency, as .*nats://"
    ):
        Tasks(mailbox, max_concurrency=1)
    async with mailbox:
        with pytest.raises(
            ConfigError, match=r"^mailbox 'plain' cannot be paused \(Capabilities.pause\); memory://, .* can$"
        ):
            await mailbox.pause()
        with pytest.raises(
            ConfigError, match=r"'plain' cannot have a concurrency \(Capabilities.concurrency\); memory://, "
        ):
            await mailbox.set_concurrency(2)
        with pytest.raises(
            ConfigError, match=r"'plain' keeps no limits or pauses of single tasks \(Capabilities.limits\); "
        ):
            await mailbox.pause("work")


@virtually
async def test_a_key_or_a_weight_that_cannot_be_is_refused_as_it_is_sent():
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(key="key", weight="weight")
    async def work(key: str, weight: float = 1.0) -> None: ...

    @tasks.task
    async def unkeyed() -> None: ...

    with pytest.raises(InvalidParameterError, match="a key must be a text of 1 to 512 characters, not 1,000,000"):
        await work.send("x" * 1_000_000)
    with pytest.raises(InvalidParameterError, match="a key must be a text of 1 to 512 characters, not ''"):
        await work.send("")
    with pytest.raises(InvalidParameterError, match=r"task work: a weight must be a number from 0.01 to 100, not 0.0"):
        await work.send("a", 0.0)
    with pytest.raises(InvalidParameterError, match=r"weight must be a number from 0.01 to 100, not 101"):
        work.options(weight=101)
    with pytest.raises(ConfigError, match="task unkeyed: weight needs key="):
        unkeyed.options(weight=2)
    assert (await tasks.mailbox.counts()).pending == 0


def test_a_key_does_not_follow_from_the_result_before():
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(key="key")
    async def work(n: int, key: str) -> str:
        return key

    @tasks.task(key=lambda n: str(n))
    async def other(n: int) -> str:
        return str(n)

    for call in (work.s(1), other.s()):
        with pytest.raises(ConfigError, match="the key or the weight of a call in a chain cannot follow from a result"):
            chain(work.s(1, "a"), call)
    chain(work.s(1, "a"), work.s(key="b"), other.options(key="c").s())
