"""Hooks of a moment: in order, each with its timeout; whether a failure aborts is each one's own."""

from __future__ import annotations

import anyio
import pytest

from mainspring.services.hooks import run_hooks
from mainspring.services.spec import Hook, HookMoment, HookSettings
from services_support import Play, PlayingSpawner

pytestmark = pytest.mark.anyio

STOPS = (HookMoment.PRE_STOP, HookMoment.POST_STOP)


async def run(*hooks, moment=HookMoment.PRE_START, settings=None, **plays):
    spawner = PlayingSpawner(plays)
    failures = []
    goes_on = await run_hooks(
        moment,
        hooks,
        settings=settings or HookSettings(),
        run=spawner.run,
        failed=lambda error, aborts: failures.append((error, aborts)),
    )
    return goes_on, failures, spawner


async def fails():
    raise OSError("no space left")


async def test_they_run_one_after_the_other(virtual_clock):
    order = []

    async def first():
        await anyio.sleep(2)
        order.append(("first", virtual_clock.now))

    async def last():
        order.append(("last", virtual_clock.now))

    goes_on, failures, spawner = await run(Hook(first), Hook(("migrate",)), Hook(last), migrate=Play(seconds=3))
    assert (goes_on, failures) == (True, [])
    assert order == [("first", 2), ("last", 5)]
    assert len(spawner.processes) == 1


async def test_switched_off_none_runs():
    assert (await run(Hook(fails, abort=True), settings=HookSettings(enabled=False)))[:2] == (True, [])


async def test_a_failure_is_told_and_the_others_run(virtual_clock):
    goes_on, failures, spawner = await run(
        Hook(fails), Hook(("exits",)), Hook(("missing",)), Hook(("last",)),
        exits=Play(("no table",), returncode=3), missing=Play(refused="no such program: missing"), last=Play(),
    )  # fmt: skip
    assert goes_on
    assert failures == [
        ("OSError: no space left", False), ("exit status 3: no table", False), ("no such program: missing", False)
    ]  # fmt: skip
    assert len(spawner.processes) == 2


@pytest.mark.parametrize("moment", [moment for moment in HookMoment if moment not in STOPS])
async def test_one_that_aborts_leaves_out_the_others(virtual_clock, moment):
    goes_on, failures, spawner = await run(Hook(fails, abort=True), Hook(("last",)), moment=moment, last=Play())
    assert (goes_on, failures, spawner.processes) == (False, [("OSError: no space left", True)], [])


@pytest.mark.parametrize("moment", STOPS)
async def test_a_stop_is_not_aborted(virtual_clock, moment):
    goes_on, failures, spawner = await run(Hook(fails, abort=True), Hook(("last",)), moment=moment, last=Play())
    assert (goes_on, failures, len(spawner.processes)) == (True, [("OSError: no space left", False)], 1)


@pytest.mark.parametrize(("own", "seconds"), [(None, 10), (2.5, 2.5), (60, 60)])
async def test_one_that_never_returns_has_failed_after_its_timeout(virtual_clock, own, seconds):
    goes_on, failures, spawner = await run(
        Hook(anyio.sleep_forever, timeout=own), Hook(("hangs",), timeout=own), hangs=Play(seconds=10_000)
    )
    assert virtual_clock.now == 2 * seconds
    assert goes_on
    assert failures == [(f"it did not end within {seconds:g} s", False)] * 2
    assert spawner.processes[0].gone


async def test_the_timeout_of_the_settings_is_that_of_those_without_one(virtual_clock):
    await run(Hook(anyio.sleep_forever), settings=HookSettings(timeout=3))
    assert virtual_clock.now == 3


async def test_work_that_has_not_run_is_a_failure():
    async def inner():
        pass

    async def forgets_await():
        return inner()

    goes_on, [(error, _)], _ = await run(Hook(forgets_await, abort=True))
    assert not goes_on
    assert "so its work has not run" in error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_what_a_hook_raises_ends_nothing_else(error):
    async def leaves():
        raise error

    goes_on, [(said, _)], _ = await run(Hook(leaves))
    assert goes_on
    assert type(error).__name__ in said


async def test_a_cancellation_ends_them_and_leaves_nothing(virtual_clock):
    spawner = PlayingSpawner({"long": Play(seconds=100, hard_to_kill=1)})
    with anyio.move_on_after(5) as scope:
        await run_hooks(
            HookMoment.PRE_START, [Hook(("long",)), Hook(fails)], settings=HookSettings(timeout=50), run=spawner.run,
            failed=lambda *_: pytest.fail("it has not failed"),
        )  # fmt: skip
    assert scope.cancelled_caught
    assert virtual_clock.now == 6
    assert spawner.processes[0].gone
