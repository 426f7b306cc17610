"""Loops of foreign make: what a Runnable is given, told and held to."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from group_support import Foreign, box, running

from mainspring import ConfigError, HandlerStalledError, Heartbeat, LoopGroup, MainLoop, RestartPolicy, Runnable
from mainspring.errors import InvalidParameterError, TaskExitError
from mainspring.events import HandlerStuck


async def quick(body):
    pass


async def test_it_is_passed_the_keywords_that_it_accepts(virtual_clock):
    class Greedy(Foreign):
        async def run(self, **keywords):
            self.keywords = keywords

    class Plain(Foreign):
        async def run(self):
            pass

    some, greedy, plain = Foreign(name="some"), Greedy(name="greedy"), Plain(name="plain")
    assert isinstance(some, Runnable)
    async with running(LoopGroup([some, greedy, plain]), visibility_timeout=5, wait_time_seconds=7):
        await anyio.wait_all_tasks_blocked()
        some.stop.set()
    assert some.keywords == 7
    assert greedy.keywords == {"visibility_timeout": 5, "wait_time_seconds": 7}


async def test_its_shutdown_is_called_with_the_others(virtual_clock):
    loops = [Foreign(name=str(n)) for n in range(3)]
    group = LoopGroup(loops)
    async with running(group):
        await anyio.sleep(4)
        assert await group.shutdown() is True
    assert [loop.told for loop in loops] == [4.0] * 3
    assert [part.name for part in group.report.parts] == ["0", "1", "2"]


async def test_one_that_does_not_heed_is_cancelled_at_its_line(virtual_clock):
    class Deaf(Foreign):
        async def work(self):
            await anyio.sleep(10_000)

    group = LoopGroup([Deaf(name="deaf")], shutdown_timeout=8, watchdog_threshold=None)
    async with running(group):
        await anyio.sleep(1)
        assert await group.shutdown() is False
    assert virtual_clock.now == 9
    [part] = group.report.parts
    assert (part.ending, part.seconds) == ("cancelled", 8)
    assert "in work: await anyio.sleep(10_000)" in part.where[0]


async def test_its_own_timeout_and_priority_count(virtual_clock):
    class Deaf(Foreign):
        async def work(self):
            await self.stop.wait()
            try:
                await anyio.sleep(10_000)
            finally:
                self.cancelled = anyio.current_time()

    low, high = Deaf(name="low", shutdown_timeout=2), Foreign(name="high", shutdown_priority=1)
    group = LoopGroup([high, low], shutdown_timeout=20)
    async with running(group):
        await group.shutdown()
    assert low.cancelled == 2
    assert high.told == 2


async def test_one_without_signs_of_life_is_stalled_and_restarted_and_nothing_is_killed(virtual_clock):
    class Hangs(Foreign):
        runs = 0

        async def work(self):
            self.runs += 1
            if self.runs < 3:
                await anyio.sleep_forever()
            while not self.stop.is_set():
                self.heartbeat.beat()
                await anyio.sleep(10)

    loop = Hangs(name="hangs")
    group = LoopGroup(
        [loop],
        watchdog_threshold=100,
        watchdog_interval=1,
        cancel_grace=5,
        restart=RestartPolicy(initial_delay=0.5, jitter="none"),
    )
    stuck = []
    group.dispatcher.subscribe(HandlerStuck, stuck.append)
    async with running(group):
        await anyio.sleep(199)
        assert loop.runs == 2  # restarted, with the whole threshold again
        await anyio.sleep(300)
        assert loop.runs == 3
        await group.shutdown()
    assert stuck == []
    assert group.report.exit_status == 0


async def test_a_stall_without_a_restart_policy_surfaces(virtual_clock):
    class Hangs(Foreign):
        async def work(self):
            await anyio.sleep_forever()

    with pytest.raises(HandlerStalledError, match=r"loop 'hangs' gave no sign of life .*sleep_forever"):
        await LoopGroup([Hangs(name="hangs")], watchdog_threshold=100).run(install_signals=False)


async def test_what_it_raises_comes_out_as_it_is(virtual_clock):
    error = LookupError("mine")

    class Raises(Foreign):
        async def work(self):
            async with anyio.create_task_group():  # wrapped in a group, here and in others
                raise error

    with pytest.raises(LookupError) as caught:
        await LoopGroup([Raises(), MainLoop(box(), quick, body=dict)]).run(install_signals=False)
    assert caught.value is error


async def test_an_error_of_its_shutdown_comes_out_as_it_is(virtual_clock):
    class Raises(Foreign):
        async def shutdown(self, *, timeout=30.0):
            raise LookupError("in shutdown")

    group = LoopGroup([Raises(name="raises")])
    with pytest.raises(LookupError, match="in shutdown"):  # noqa: PT012
        async with running(group):
            group.request_shutdown()
            await anyio.wait_all_tasks_blocked()
    assert group.report.parts[0].ending == "crashed"


@pytest.mark.anyio
async def test_a_system_exit_is_a_crash_that_says_what_to_do():
    class Exits(Foreign):
        async def work(self):
            raise SystemExit(3)

    with pytest.raises(TaskExitError, match=r"loop 'exits' raised SystemExit\(3\); to end the program, call shutdown"):
        await LoopGroup([Exits(name="exits")]).run(install_signals=False)


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["work", "shutdown"])
async def test_a_cancellation_of_its_own_is_a_crash(where, anyio_backend_name):
    """A task group would take it for one of its own, and the run for ended."""
    if anyio_backend_name == "trio":
        return  # it has no cancellation but that of scopes

    class Cancelled(Foreign):
        async def work(self):
            await (cancelled_future() if where == "work" else self.stop.wait())

        async def shutdown(self, *, timeout=30.0):
            await (cancelled_future() if where == "shutdown" else super().shutdown())

    group = LoopGroup([Cancelled(name="cancelled")])
    with pytest.raises(TaskExitError, match=r"of loop 'cancelled' was cancelled by itself"):
        async with running(group):
            group.request_shutdown()
    assert group.report.parts[0].ending == "crashed"


@pytest.mark.anyio
async def test_work_that_it_returns_unbegun_is_a_crash():
    class Returns(Foreign):
        async def run(self):
            return (step for step in "123")

    with pytest.raises(InvalidParameterError, match=r"run\(\) of loop 'returns' returned a generator"):
        await LoopGroup([Returns(name="returns")]).run(install_signals=False)


@pytest.mark.anyio
async def test_a_pause_that_returns_unbegun_work_is_refused():
    async def nothing():
        pass

    loop = Foreign(name="odd", pause=lambda: nothing(), resume=lambda: None)
    group = LoopGroup([loop])
    async with running(group):
        with pytest.raises(InvalidParameterError, match=r"pause\(\) of loop 'odd' returned a coroutine"):
            await group.pause()
        assert not group.actors[0].health().paused
        group.request_shutdown()


def cancelled_future():
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    return future


@pytest.mark.parametrize("missing", ["run", "shutdown", "running", "heartbeat"])
def test_what_is_no_loop_is_refused(missing):
    members = {"run": print, "shutdown": print, "running": False, "heartbeat": Heartbeat()}
    del members[missing]
    with pytest.raises(ConfigError, match=r"is no loop; it needs run\(\), shutdown\(\), running and heartbeat"):
        LoopGroup([type("Partial", (), members)()])


async def test_one_that_was_told_to_stop_is_no_stall(virtual_clock):
    class Lingers(Foreign):
        async def work(self):
            await self.stop.wait()
            await anyio.sleep(250)  # in silence, and in the time that a drain gives it

    group = LoopGroup([Lingers(name="lingers")], watchdog_threshold=100, watchdog_interval=1)
    async with running(group):
        await anyio.sleep(50)
        assert await group.drain()
    assert virtual_clock.now == 300
    assert group.report.exit_status == 0
