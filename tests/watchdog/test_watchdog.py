"""Stalls: who is cancelled, who is stuck, and when; decided purely, and done in virtual time."""

from __future__ import annotations

import math

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given
from hypothesis import strategies as st

import mainspring
from mainspring.errors import ConfigError, HandlerStalledError
from mainspring.events import Dispatcher, HandlerStalled, HandlerStuck
from mainspring.runtime.heartbeat import Heartbeat
from mainspring.watchdog.watchdog import ROUNDING, HeartbeatSubject, Limits, Pardons, Watchdog, judge
from support import virtually

pytestmark = pytest.mark.anyio

LIMITS = Limits(threshold=720.0, interval=60.0, cancel_grace=5.0)


class Job:
    """A message in flight. Cancelled, it ends after ``ends_in`` seconds, or never."""

    def __init__(self, message_id="m1", *, ends_in=0.0):
        self.name = "indexer"
        self.message_id = message_id
        self.heart = Heartbeat()
        self.ends_in = ends_in
        self.ends_at = math.inf
        self.errors = []

    @property
    def done(self):
        return anyio.current_time() >= self.ends_at

    def beat_age(self):
        return self.heart.elapsed()

    def where(self):
        return "app.py:7 in handle: await forever()"

    def stall(self, error):
        self.errors.append((anyio.current_time(), error))
        self.ends_at = anyio.current_time() + self.ends_in


class Watched:
    """A running watchdog over ``jobs``, its events and kills as (instant, what)."""

    def __init__(self, group, jobs, **limits):
        self.jobs = jobs
        self.events, self.kills = [], []
        dispatcher = Dispatcher()
        dispatcher.subscribe(object, lambda event: self.events.append((anyio.current_time(), event)))
        self.watchdog = Watchdog(
            lambda: iter(self.jobs),
            dispatcher=dispatcher,
            kill=lambda words: self.kills.append((anyio.current_time(), words)),
            **limits,
        )
        group.start_soon(self.watchdog.run)


ages = st.dictionaries(st.integers(0, 6), st.floats(0, 2000), max_size=7)
since = st.dictionaries(st.integers(0, 6), st.floats(0, 1000), max_size=7)


@given(ages, since)
def test_nobody_is_cancelled_early_or_twice_and_nobody_is_stuck_within_the_grace(ages, since):
    now = 1000.0
    verdict = judge(now, ages, since, LIMITS)
    for key, age in ages.items():
        if key in since:
            assert key not in verdict.cancel
            assert (key in verdict.stuck) == (now >= since[key] + LIMITS.cancel_grace)
        else:
            assert key not in verdict.stuck
            assert (key in verdict.cancel) == (age >= LIMITS.threshold - ROUNDING)
    assert set(verdict.cancel) | set(verdict.stuck) <= set(ages)


@given(ages, since)
def test_the_next_look_is_ahead_and_no_later_than_the_first_that_falls_due(ages, since):
    now = 1000.0
    verdict = judge(now, ages, since, LIMITS)
    assert now < verdict.next_look <= now + LIMITS.interval
    for key, age in ages.items():
        if key in verdict.stuck:
            continue
        if key in verdict.cancel or key in since:
            assert verdict.next_look <= since.get(key, now) + LIMITS.cancel_grace
        else:
            assert verdict.next_look <= now + LIMITS.threshold - age


@given(st.lists(st.tuples(st.floats(0, 3000), st.floats(0, 900)), min_size=1, max_size=12))
def test_looks_as_they_are_asked_for_find_every_stall_in_time(lives):
    """Each (start, how long it beats): from then on it is silent, and it ends only when the process does."""
    limits = Limits(threshold=50.0, interval=10.0, cancel_grace=2.0)
    now, stalled, stuck = 0.0, {}, {}
    for _ in range(100_000):
        if len(stuck) == len(lives):
            break
        present = {
            n: max(0.0, now - (start + busy))
            for n, (start, busy) in enumerate(lives)
            if start <= now and n not in stuck
        }
        verdict = judge(now, present, stalled, limits)
        for n in verdict.cancel:
            stalled[n] = now
        for n in verdict.stuck:
            stuck[n] = now
        now = verdict.next_look
    for n, (start, busy) in enumerate(lives):
        silent_for = stalled[n] - (start + busy)
        assert limits.threshold - 1e-3 <= silent_for <= limits.threshold + limits.interval + 1e-3
        assert stuck[n] - stalled[n] == pytest.approx(limits.cancel_grace, abs=1e-3)


def test_only_the_time_since_ones_own_beat_is_pardoned():
    pardons = Pardons(noise=0.5)
    pardons.add(1000.0, 300.0)
    pardons.add(1001.0, 0.4)
    assert pardons.since(500.0) == 300.0
    assert pardons.since(900.0) == 100.0
    assert pardons.since(1000.0) == 0.0
    pardons.forget_before(1000.0)
    assert pardons.since(500.0) == 0.0


@virtually
async def test_a_stuck_await_is_cancelled_at_the_threshold_with_its_line(clock):
    async with anyio.create_task_group() as group:
        job = Job()
        watched = Watched(group, [job])
        await anyio.sleep(5000)
        group.cancel_scope.cancel()
    ((when, error),) = job.errors
    assert when == pytest.approx(720)
    assert isinstance(error, HandlerStalledError)
    assert error.where == job.where()
    assert str(error) == (
        "message m1 of 'indexer' gave no sign of life for 720 s (watchdog threshold 720 s) and was cancelled at "
        "app.py:7 in handle: await forever()"
    )
    ((_, event),) = watched.events
    assert event == HandlerStalled("indexer", "m1", pytest.approx(720), job.where())
    assert not watched.kills


@virtually
async def test_what_beats_is_left_alone(clock):
    async with anyio.create_task_group() as group:
        job = Job()
        watched = Watched(group, [job])
        for _ in range(20):
            await anyio.sleep(700)
            job.heart.beat()
        group.cancel_scope.cancel()
    assert not job.errors
    assert not watched.events


@virtually
async def test_one_that_does_not_end_is_reported_and_killed_precisely_after_the_grace(clock):
    async with anyio.create_task_group() as group:
        slow, stuck = Job("slow", ends_in=4.9), Job("stuck", ends_in=math.inf)
        watched = Watched(group, [slow, stuck])
        await anyio.sleep(724)
        stuck.heart.beat()  # too late: it was told to end
        await anyio.sleep(5000)
        group.cancel_scope.cancel()
    ((when, words),) = watched.kills
    assert when == pytest.approx(725)
    assert words.startswith("mainspring: message stuck of 'indexer' was cancelled")
    assert "app.py:7 in handle: await forever()" in words
    assert [type(event) for _, event in watched.events] == [HandlerStalled, HandlerStalled, HandlerStuck]
    assert watched.events[-1][1].message_id == "stuck"


@virtually
async def test_a_loop_of_foreign_make_is_named_as_a_loop(clock):
    async with anyio.create_task_group() as group:
        job = Job(None, ends_in=math.inf)
        watched = Watched(group, [job], threshold=10, interval=3, cancel_grace=0)
        await anyio.sleep(20)
        group.cancel_scope.cancel()
    assert str(job.errors[0][1]).startswith("loop 'indexer' gave no sign of life for 10 s")
    assert watched.events[0][1].message_id == ""
    assert watched.kills[0][1].startswith("mainspring: loop 'indexer' was cancelled")


@virtually
async def test_what_begins_between_two_looks_stalls_within_threshold_and_interval(clock):
    async with anyio.create_task_group() as group:
        watched = Watched(group, [], threshold=50, interval=60)
        await anyio.sleep(1)
        job = Job()
        watched.jobs.append(job)
        await anyio.sleep(1000)
        group.cancel_scope.cancel()
    assert 51 <= job.errors[0][0] <= 1 + 50 + 60


@virtually
async def test_what_is_listed_no_more_or_done_is_forgotten_even_while_stalled(clock):
    async with anyio.create_task_group() as group:
        job = Job(ends_in=math.inf)
        watched = Watched(group, [job], threshold=10, interval=3)
        await anyio.sleep(12)
        assert len(job.errors) == 1
        watched.jobs.clear()
        await anyio.sleep(100)
        group.cancel_scope.cancel()
    assert not watched.kills


@virtually
async def test_nothing_to_watch_is_one_look_an_interval(clock):
    looks = []

    def nobody():
        looks.append(anyio.current_time())
        return ()

    with anyio.move_on_after(601):
        await Watchdog(nobody).run()
    assert looks == [60.0 * n for n in range(1, 11)]


@virtually
async def test_time_in_which_the_process_stood_still_is_held_against_nobody(clock):
    async with anyio.create_task_group() as group:
        job = Job()
        watched = Watched(group, [job])
        await anyio.sleep(300)
        await wait_all_tasks_blocked()
        clock.jump(5000)  # stopped, or suspended
        await anyio.sleep(419)
        assert not job.errors  # of 5,719 s it could use 719
        await anyio.sleep(61)
        assert len(job.errors) == 1  # but what stands still on its own is found all the same
        group.cancel_scope.cancel()
    assert not watched.kills


@virtually
async def test_a_look_that_comes_late_judges_nobody_who_was_near_the_threshold(clock):
    async with anyio.create_task_group() as group:
        job = Job()
        watched = Watched(group, [job])
        await anyio.sleep(719)
        await wait_all_tasks_blocked()
        clock.jump(200)
        await anyio.sleep(0.5)
        assert not job.errors
        job.heart.beat()  # it comes to it, now that the process runs again
        await anyio.sleep(700)
        group.cancel_scope.cancel()
    assert not watched.events


@virtually
async def test_the_grace_does_not_run_while_the_process_stands_still(clock):
    async with anyio.create_task_group() as group:
        job = Job(ends_in=math.inf)
        watched = Watched(group, [job], threshold=10, interval=3, cancel_grace=5)
        await anyio.sleep(11)
        assert len(job.errors) == 1
        await wait_all_tasks_blocked()
        clock.jump(1000)
        await anyio.sleep(0.5)
        assert not watched.kills
        job.ends_at = anyio.current_time()  # it ends a moment after the process runs again
        await anyio.sleep(100)
        group.cancel_scope.cancel()
    assert not watched.kills


async def test_alone_with_a_heartbeat_on_every_loop():
    """A helper of one's own: its task is cancelled when its heart stops."""
    told = []
    scope = anyio.CancelScope()

    def cancel(error):
        told.append(error)
        scope.cancel()

    subject = HeartbeatSubject(
        "poller", Heartbeat(), cancel, where=lambda: "poller.py:1", finished=lambda: scope.cancelled_caught
    )
    async with anyio.create_task_group() as group:
        watchdog = mainspring.Watchdog(
            lambda: [subject], threshold=0.05, interval=0.01, cancel_grace=30, kill=lambda words: pytest.fail(words)
        )
        group.start_soon(watchdog.run)
        with anyio.fail_after(20), scope:
            await anyio.sleep_forever()
        await anyio.sleep(0.05)  # it is done: a few more looks change nothing
        group.cancel_scope.cancel()
    assert [error.where for error in told] == ["poller.py:1"]


async def asynchronous(*given):
    pass


def generator(*given):
    yield


@pytest.mark.parametrize("wrong", [asynchronous, generator, "cancel"])
@pytest.mark.parametrize("name", ["cancel", "where", "finished"])
def test_functions_of_which_a_call_runs_nothing_are_refused(name, wrong):
    given = {"cancel": print, name: wrong}
    with pytest.raises(ConfigError, match=f"HeartbeatSubject: {name} must be a plain function"):
        HeartbeatSubject("poller", Heartbeat(), **given)


def test_a_cancel_that_returns_work_which_nothing_runs_is_logged(caplog):
    subject = HeartbeatSubject("poller", Heartbeat(), lambda error: asynchronous(error))
    subject.stall(HandlerStalledError("no sign of life"))
    assert "cancel= of poller returned a coroutine, which nothing runs" in caplog.text


def test_an_async_kill_is_refused():
    with pytest.raises(ConfigError, match="watchdog: kill must be a plain function"):
        Watchdog(list, kill=asynchronous)


@pytest.mark.parametrize(
    "wrong",
    [{"threshold": 0}, {"threshold": math.nan}, {"threshold": math.inf}, {"interval": -1}, {"cancel_grace": math.nan}],
)
def test_limits_that_cannot_work_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        Watchdog(list, **wrong)
