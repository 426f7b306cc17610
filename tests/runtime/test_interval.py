"""The one interval loop."""

from __future__ import annotations

import math

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from mainspring.runtime.interval import Alarms, Periodic
from support import virtually

pytestmark = pytest.mark.anyio


class Steps:
    """Records each call as (instant, lateness), and asks for the next as told."""

    def __init__(self, *asks):
        self.asks = list(asks)
        self.calls = []

    async def __call__(self, overslept):
        now = anyio.current_time()
        self.calls.append((now, overslept))
        ask = self.asks.pop(0) if self.asks else math.inf
        return ask(now) if callable(ask) else ask


@virtually
async def test_calls_come_at_the_instants_asked_for_and_in_time(clock):
    steps = Steps(7.0, 100.0)
    async with anyio.create_task_group() as group:
        group.start_soon(Periodic(steps, first=5.0).run)
        await anyio.sleep(1000)
        group.cancel_scope.cancel()
    assert steps.calls == [(5.0, 0.0), (7.0, 0.0), (100.0, 0.0)]


@virtually
async def test_wake_by_brings_a_call_nearer_and_never_puts_it_off(clock):
    steps = Steps()
    periodic = Periodic(steps)
    async with anyio.create_task_group() as group:
        group.start_soon(periodic.run)
        await anyio.sleep(10)
        assert periodic.due == math.inf
        periodic.wake_by(50.0)
        periodic.wake_by(60.0)
        assert periodic.due == 50.0
        periodic.wake_by(20.0)
        await anyio.sleep(100)
        group.cancel_scope.cancel()
    assert steps.calls == [(20.0, 0.0)]


@virtually
async def test_a_wake_by_before_the_start_and_during_a_step_count(clock):
    calls = []

    async def step(_overslept):
        calls.append(anyio.current_time())
        if len(calls) == 1:
            periodic.wake_by(anyio.current_time() + 1)
            await anyio.sleep(0.5)
            return anyio.current_time() + 30
        return math.inf

    periodic = Periodic(step)
    periodic.wake_by(3.0)
    async with anyio.create_task_group() as group:
        group.start_soon(periodic.run)
        await anyio.sleep(100)
        group.cancel_scope.cancel()
    assert calls == [3.0, 4.0]


@virtually
async def test_an_instant_that_has_passed_means_now_and_is_not_late(clock):
    await anyio.sleep(100)
    steps = Steps(lambda now: now - 50)
    periodic = Periodic(steps, first=1.0)
    async with anyio.create_task_group() as group:
        group.start_soon(periodic.run)
        await anyio.sleep(10)
        periodic.wake_by(2.0)
        await anyio.sleep(10)
        group.cancel_scope.cancel()
    assert steps.calls == [(100.0, 0.0), (100.0, 0.0), (110.0, 0.0)]


@virtually
async def test_a_call_that_comes_late_is_told_by_how_much(clock):
    steps = Steps()
    async with anyio.create_task_group() as group:
        group.start_soon(Periodic(steps, first=5.0).run)
        await wait_all_tasks_blocked()
        clock.jump(300.0)  # as when the process was stopped meanwhile
        await anyio.sleep(10)
        group.cancel_scope.cancel()
    assert steps.calls == [(300.0, 295.0)]


async def test_it_sleeps_until_woken_on_every_loop():
    woken = anyio.Event()

    async def step(_overslept):
        woken.set()
        return math.inf

    periodic = Periodic(step)
    async with anyio.create_task_group() as group:
        group.start_soon(periodic.run)
        await wait_all_tasks_blocked()
        assert not woken.is_set()
        periodic.wake_by(anyio.current_time() + 0.01)
        with anyio.fail_after(10):
            await woken.wait()
        group.cancel_scope.cancel()


async def test_a_step_that_always_asks_for_now_still_lets_others_run_and_be_cancelled():
    calls = []

    async def step(_overslept):
        calls.append(None)
        return -math.inf

    with anyio.move_on_after(0.05) as scope:
        await Periodic(step, first=-math.inf).run()
    assert scope.cancelled_caught
    assert calls


async def test_cancelled_in_its_sleep_or_in_a_step_it_ends_and_can_run_again():
    entered, calls = anyio.Event(), []

    async def step(_overslept):
        calls.append(None)
        if len(calls) == 1:
            entered.set()
            await anyio.sleep_forever()
        return math.inf

    periodic = Periodic(step, first=-math.inf)
    async with anyio.create_task_group() as group:
        group.start_soon(periodic.run)
        await entered.wait()
        group.cancel_scope.cancel()
    assert periodic.due == math.inf
    async with anyio.create_task_group() as group:
        group.start_soon(periodic.run)
        await wait_all_tasks_blocked()
        periodic.wake_by(-math.inf)
        await wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert len(calls) == 2


async def test_what_a_step_raises_ends_the_run():
    async def step(_overslept):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await Periodic(step, first=-math.inf).run()


@virtually
async def test_alarms_ring_at_their_own_instants_on_one_timer(clock):
    alarms = Alarms()
    rung = []

    def ring(name, *asks):
        left = list(asks)

        def step(_overslept):
            rung.append((name, anyio.current_time()))
            return left.pop(0) if left else math.inf

        return alarms.alarm(step)

    one, two = ring("one", 8.0), ring("two")
    async with anyio.create_task_group() as group:
        group.start_soon(alarms.run)
        one.wake_by(5.0)
        two.wake_by(30.0)
        await anyio.sleep(1)
        two.wake_by(3.0)
        two.wake_by(4.0)  # which is later
        await anyio.sleep(100)
        two.wake_by(0.0)  # long past: now
        await anyio.sleep(1)
        group.cancel_scope.cancel()
    assert rung == [("two", 3.0), ("one", 5.0), ("one", 8.0), ("two", 101.0)]
    assert one.due == two.due == math.inf


@virtually
async def test_an_alarm_can_tell_by_how_much_it_rings_late(clock):
    alarms = Alarms()
    late = []

    def step(overslept):
        late.append(overslept)
        return math.inf

    alarm = alarms.alarm(step)
    for slept in (2.0, 7.5):
        alarm.wake_by(anyio.current_time() + 2.0)
        await anyio.sleep(slept)  # before anything runs it
        async with anyio.create_task_group() as group:
            group.start_soon(alarms.run)
            await anyio.sleep(1)
            group.cancel_scope.cancel()
    assert late == [0.0, 5.5]
