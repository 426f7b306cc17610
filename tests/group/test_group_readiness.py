"""Readiness, checks, and what does not count as a stall."""

from __future__ import annotations

import asyncio
import functools
import threading
from dataclasses import replace

import anyio
import pytest
from group_support import Foreign, box, one_loop_group, running, settled

from mainspring import ConfigError, Context, LoopGroup, MailboxConnectionError, MainLoop
from mainspring.events import CheckChanged, HandlerStalled, HandlerStuck, ReceiveFailed, ReceiveRecovered
from mainspring.worker.worker import ALLOWANCE
from support import fail, hang, work


async def quick(body):
    pass


async def take_long(body, ctx: Context):
    await anyio.sleep(body["seconds"])


async def asked(group):
    await group.refresh_checks()
    return group.status()


async def test_before_and_after_a_run_it_is_not_ready(virtual_clock):
    group, _ = one_loop_group(quick)
    assert (group.status().ready, group.status().live, group.status().started) == (False, True, False)
    async with running(group):
        assert (group.status().ready, group.status().live, group.status().started) == (True, True, True)
        await group.shutdown()
    assert group.status().reasons == ("not running",)


def changes_of(group):
    changes = []
    group.dispatcher.subscribe(CheckChanged, lambda e: changes.append((e.check, e.error, e.failed)))
    return changes


class Answers:
    """An async check that passes while ``error`` is None, and takes ``seconds``; ``asked`` is when it was called."""

    def __init__(self, error=None):
        self.error = error
        self.seconds = 0.0
        self.asked = []

    async def __call__(self):
        self.asked.append(anyio.current_time())
        await anyio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return True


async def test_a_check_is_asked_at_its_interval_and_its_third_failure_in_a_row_turns_readiness(virtual_clock):
    database, cache = Answers(), Answers()
    group, _ = one_loop_group(quick, checks={"database": database, "cache": cache})
    changes = changes_of(group)
    async with running(group):
        assert not group.status().ready  # it has not passed yet
        await anyio.sleep(1)
        assert group.status().ready
        database.error = OSError("no route")
        for instant in (10, 20):
            await anyio.sleep_until(instant + 1)
            status = group.status()
            assert (status.ready, status.reasons) == (True, ())
            assert status.checks == {"database": "OSError: no route", "cache": None}
        await anyio.sleep_until(31)
        assert group.status().reasons == ("check 'database': OSError: no route",)
        assert group.status().live
        database.error = None
        await anyio.sleep_until(41)
        assert group.status().ready
        assert database.asked == cache.asked == [0, 10, 20, 30, 40]
        await group.shutdown()
    assert changes == [
        ("database", None, False), ("cache", None, False), ("database", "OSError: no route", False),
        ("database", "OSError: no route", True), ("database", None, False),
    ]  # fmt: skip


async def test_a_failure_now_and_then_does_not_turn_readiness(virtual_clock):
    flaky = Answers()
    group, _ = one_loop_group(quick, checks={"flaky": flaky}, check_max_failures=2, check_interval=5)
    async with running(group):
        for number in range(20):
            flaky.error = OSError("blip") if number % 2 else None
            await anyio.sleep_until(5 * number + 1)
            assert group.status().ready
        assert len(flaky.asked) == 20
        await group.shutdown()


async def test_before_it_has_passed_for_the_first_time_each_failure_counts(virtual_clock):
    group, _ = one_loop_group(quick, checks={"database": Answers(OSError("starting"))})
    async with running(group):
        assert (await asked(group)).reasons == ("check 'database': OSError: starting",)
        await group.shutdown()


async def test_a_failed_check_is_asked_by_probes_at_most_once_a_second_and_one_that_passes_is_not(virtual_clock):
    database = Answers(OSError("down"))
    group, _ = one_loop_group(quick, checks={"database": database}, check_interval=60)
    async with running(group):
        for _ in range(8):
            await asked(group)
            await anyio.sleep(0.5)
        assert database.asked == [0, 1, 2, 3]
        database.error = None
        await asked(group)
        assert group.status().ready
        for _ in range(70):
            await anyio.sleep(0.5)
            await asked(group)
        assert database.asked == [0, 1, 2, 3, 4]
        await anyio.sleep(60)
        assert database.asked[5:] == [64]  # an interval after its last answer
        await group.shutdown()


@pytest.mark.parametrize("timeout", [None, 5.0])
async def test_a_check_that_hangs_has_failed_at_its_timeout_and_holds_up_no_other(virtual_clock, timeout):
    slow, other = Answers(), Answers()
    slow.seconds = 1000
    group, _ = one_loop_group(
        quick, checks={"slow": slow, "other": other}, **({"check_timeout": timeout} if timeout else {})
    )
    timeout = timeout or 0.8
    async with running(group):
        status = await asked(group)
        assert virtual_clock.now == pytest.approx(timeout)
        assert status.reasons == (f"check 'slow': no answer within {timeout:g} s",)
        slow.seconds = timeout * 0.9
        await anyio.sleep(1.01)
        assert (await asked(group)).ready
        assert other.asked[:2] in ([0], [0, 10])
        await group.shutdown()


async def test_no_check_is_asked_once_the_group_has_ended(virtual_clock):
    database = Answers()
    group, _ = one_loop_group(quick, checks={"database": database})
    async with running(group):
        await anyio.sleep(15)
        await group.shutdown()
    await anyio.sleep(100)
    assert database.asked == [0, 10]


async def test_a_check_that_is_cancelled_by_itself_has_failed_and_the_others_count(anyio_backend_name):
    if anyio_backend_name == "trio":
        return  # it has no cancellation but that of scopes

    async def broken():
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async def slow():
        await anyio.sleep(0.05)

    group, _ = one_loop_group(quick, checks={"broken": broken, "slow": slow})
    async with running(group):
        assert (await asked(group)).reasons == ("check 'broken': TaskExitError: it was cancelled by itself",)
        await group.shutdown()


@pytest.mark.filterwarnings("error")
async def test_a_check_that_gives_work_that_has_not_run_has_failed(virtual_clock):
    async def later():
        return False

    async def forgets_await():
        return later()

    def lazy():
        return (step for step in "ab")

    group, _ = one_loop_group(quick, checks={"forgets": forgets_await, "lazy": lazy, "plain": lambda: later()})
    async with running(group):
        status = await asked(group)
        assert [reason.partition(":")[0] for reason in sorted(status.reasons)] == [
            "check 'forgets'", "check 'lazy'", "check 'plain'",
        ]  # fmt: skip
        assert all("so its work has not run" in reason for reason in status.reasons if "plain" not in reason)
        await group.shutdown()


async def generates():
    yield True


@pytest.mark.parametrize("check", [generates, functools.partial(generates), type("Ping", (), {})])
def test_a_check_that_would_run_nothing_is_refused(check):
    with pytest.raises(ConfigError, match=r"check 'database', .* is a (generator|class), "):
        one_loop_group(quick, checks={"database": check})


async def test_a_check_that_swallows_its_cancellation_does_not_spin(virtual_clock):
    caught = 0

    async def stubborn():
        nonlocal caught
        while anyio.current_time() < 3 and caught < 1_000:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                caught += 1

    group, _ = one_loop_group(quick, checks={"stubborn": stubborn})
    async with running(group):
        await asked(group)
        await group.shutdown()
    assert 20 < caught < 40


async def test_many_probes_at_once_ask_a_check_once(virtual_clock):
    calls = []

    async def check():
        calls.append(1)
        await anyio.sleep(0.5)

    group, _ = one_loop_group(quick, checks={"database": check})
    async with running(group):
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(group.refresh_checks)
        assert len(calls) == 1
        await group.shutdown()


async def test_a_message_is_stale_at_half_the_threshold(virtual_clock):
    group, mailbox = one_loop_group(take_long, watchdog_threshold=100, watchdog_interval=10)
    await mailbox.send({"seconds": 80})
    async with running(group):
        await anyio.sleep(49)
        assert group.status().ready
        await anyio.sleep(2)
        status = group.status()
        assert (status.ready, status.live) == (False, True)
        assert status.reasons == ("loop 'take_long': no sign of life for 51 s (stalled at 100 s)",)
        assert status.loops[0].oldest_beat_age == pytest.approx(51)
        await anyio.sleep(30)
        assert group.status().ready
        await group.shutdown()


async def test_a_lost_store_is_not_ready_but_live_and_no_stall(virtual_clock):
    mailbox = box()
    group = LoopGroup(
        [MainLoop(mailbox, quick, name="loop", body=dict, wait_time_seconds=5)],
        watchdog_threshold=30,
        watchdog_interval=1,
    )
    stalls = []
    group.dispatcher.subscribe(HandlerStalled, stalls.append)
    async with running(group):
        mailbox.always("claim", fail(MailboxConnectionError("the store is gone")))
        await anyio.sleep(200)  # far beyond the threshold
        status = group.status()
        assert (status.ready, status.live) == (False, True)
        assert status.reasons == ("loop 'loop': MailboxConnectionError: the store is gone",)
        assert status.loops[0].state == "degraded"
        mailbox.always("claim", work)
        await mailbox.send({})
        await anyio.sleep(31)
        assert group.status().ready
        assert (await mailbox.counts()).settled == 1
        await group.shutdown()
    assert stalls == []
    assert group.report.exit_status == 0


def hanging_group(**options):
    mailbox = box()
    loop = MainLoop(mailbox, quick, name="loop", body=dict, wait_time_seconds=20)
    group = LoopGroup([loop], watchdog_threshold=100, watchdog_interval=1, **options)
    told = []
    for kind in (HandlerStalled, HandlerStuck, ReceiveFailed, ReceiveRecovered):
        group.dispatcher.subscribe(kind, lambda event: told.append((type(event), round(anyio.current_time()))))
    return group, mailbox, told


@pytest.mark.parametrize("bound", [None, 3])
async def test_a_receive_that_never_returns_is_not_ready_then_cancelled_and_tried_again(bound, virtual_clock):
    group, mailbox, told = hanging_group(max_concurrency=bound)
    mailbox.always("claim", hang)
    wait = 20 if bound is None else 0  # within a bound, it first asks without waiting
    async with running(group):
        due = wait + ALLOWANCE
        await anyio.sleep(due + 49)
        assert group.status().ready
        await anyio.sleep(2)
        why = "its mailbox has not answered a receive, overdue by 51 s (cancelled at 100 s)"
        assert group.status().reasons == (f"loop 'loop': {why}",)
        await anyio.sleep(50)
        assert told == [(HandlerStalled, due + 100), (ReceiveFailed, due + 100)]
        assert group.status().loops[0].state == "degraded"
        await anyio.sleep(100 + ALLOWANCE)
        assert len(told) == 4  # it backed off, tried again, and hung again
        mailbox.always("claim", work)
        await mailbox.send({})
        await anyio.sleep(100 + ALLOWANCE)
        assert told[-1][0] is ReceiveRecovered
        assert group.status().ready
        assert await settled(mailbox) == 1
        await group.shutdown()
    assert group.report.exit_status == 0


async def test_a_receive_that_does_not_end_although_cancelled_ends_the_process(virtual_clock):
    group, mailbox, told = hanging_group(cancel_grace=3)
    words = []
    stands = anyio.CancelScope(shield=True)

    async def stubborn(claim):
        with stands:
            await anyio.sleep_forever()

    group.settings = replace(group.settings, kill=words.append)
    mailbox.next("claim", stubborn)
    async with running(group):
        await anyio.sleep(20 + ALLOWANCE + 100 + 4)
        assert [kind for kind, _ in told] == [HandlerStalled, HandlerStuck]
        assert told[1][1] - told[0][1] == 3
        assert len(words) == 1
        assert "loop 'loop' was cancelled" in words[0]
        assert "a receive that mailbox 'jobs' has not answered: " in words[0]
        assert "in stubborn: await anyio.sleep_forever()" in words[0]
        stands.cancel()
        await group.shutdown()


async def test_a_count_that_is_not_answered_is_asked_again_before_a_group_ends_as_empty(virtual_clock):
    mailbox = box()
    mailbox.next("counts", hang)
    group = LoopGroup([MainLoop(mailbox, quick, body=dict)])
    with anyio.fail_after(60):
        report = await group.run(install_signals=False, until_empty=True)
    assert report.exit_status == 0


@pytest.mark.parametrize("rest", ["idle", "paused", "full", "stopping"])
async def test_a_loop_that_owes_no_receive_is_no_stall(rest, virtual_clock):
    group, _, told = hanging_group()
    beats = anyio.Event()

    async def work(body, ctx: Context):
        while not beats.is_set():
            ctx.beat()
            await anyio.sleep(1)

    busy = MainLoop(box("busy"), work, name="busy", body=dict)
    group = LoopGroup([*group.loops, busy], watchdog_threshold=100, watchdog_interval=1, shutdown_timeout=2_000)
    group.dispatcher.subscribe(HandlerStalled, told.append)
    async with running(group):
        if rest == "paused":
            await group.pause()
        elif rest != "idle":
            await busy.mailbox.send({})
            await anyio.sleep(1)
        if rest == "stopping":
            group.request_shutdown()
        await anyio.sleep(1_000)
        assert group.status().ready == (rest in {"idle", "full"})
        beats.set()
        await group.shutdown()
    assert told == []
    assert group.report.exit_status == 0


@pytest.mark.slow
async def test_an_idle_loop_and_a_finished_one_are_no_stall(virtual_clock):
    idle, done = box("idle"), Foreign(name="done")

    async def end_at_once():
        pass

    done.work = end_at_once
    group = LoopGroup(
        [MainLoop(idle, quick, body=dict, wait_time_seconds=10_000), done], watchdog_threshold=30, watchdog_interval=1
    )
    stalls = []
    group.dispatcher.subscribe(HandlerStalled, stalls.append)
    async with running(group):
        await anyio.sleep(5_000)
        assert [loop.state for loop in group.status().loops] == ["running", "stopped"]
        await group.shutdown()
    assert stalls == []
    assert group.report.exit_status == 0


async def test_a_stalled_message_is_charged_and_the_loop_goes_on(virtual_clock):
    attempts = []

    async def hang_once(body, ctx: Context):
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            await anyio.sleep_forever()

    group, mailbox = one_loop_group(hang_once, watchdog_threshold=100, watchdog_interval=10)
    stalls = []
    group.dispatcher.subscribe(HandlerStalled, stalls.append)
    await mailbox.send({})
    report = await group.run(install_signals=False, until_empty=True)
    assert attempts == [1, 2]
    assert "in hang_once: await anyio.sleep_forever()" in stalls[0].where
    assert report.exit_status == 0


async def test_a_degraded_restarting_or_ended_loop_says_so(virtual_clock):
    foreign = Foreign(name="foreign", trouble="no partitions assigned")
    group = LoopGroup([foreign, MainLoop(box(), quick, body=dict)])
    async with running(group):
        foreign.stop.set()
        await anyio.wait_all_tasks_blocked()
        assert group.status().reasons == ("loop 'foreign': no partitions assigned",)
        foreign.trouble = None
        assert group.status().reasons == ("loop 'foreign': stopped",)
        await group.shutdown()


async def test_a_plain_check_runs_in_a_thread_and_one_that_hangs_is_not_started_again(virtual_clock):
    calls, threads = [], set()
    hanging, answer = threading.Event(), threading.Event()

    def ask():
        threads.add(threading.get_ident())
        calls.append(1)
        if len(calls) == 2:
            hanging.set()
            answer.wait(60)

    group, _ = one_loop_group(quick, checks={"database": ask}, check_max_failures=1)
    async with running(group):
        assert (await asked(group)).ready
        assert threading.get_ident() not in threads
        virtual_clock.advance(10)
        await anyio.to_thread.run_sync(hanging.wait, 60)
        virtual_clock.advance(0.8)  # the clock stands still for a thread
        for _ in range(3):
            await anyio.sleep(10)
            assert (await asked(group)).reasons == ("check 'database': no answer within 0.8 s",)
        assert len(calls) == 2
        answer.set()
        while not (await asked(group)).ready:
            await anyio.sleep(10)
        assert len(calls) == 3
        await group.shutdown()


async def test_the_status_says_how_far_the_messages_in_flight_are(virtual_clock):
    async def handle(body: dict, ctx: Context) -> None:
        if body["pages"]:
            await ctx.progress(3, body["pages"])
        await anyio.sleep(60)

    group, mailbox = one_loop_group(handle, loop={"concurrency": 2})
    told, _ = await mailbox.send_many([{"pages": 7}, {"pages": 0}])
    async with running(group):
        await anyio.sleep(1)
        assert group.status().loops[0].progress == {told: (3, 7)}
        await anyio.sleep(60)
        assert group.status().loops[0].progress == {}
        await group.shutdown()
