"""The forms of a foreign loop's members: plain or async, with and without a timeout, with and without a heartbeat."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time

import anyio
import pytest
from group_support import Foreign, running

from mainspring import ConfigError, HandlerStalledError, Heartbeat, LoopActor, LoopGroup, LoopThread
from mainspring.errors import TaskExitError

REQUEST = contextvars.ContextVar("request", default="none")


class Plain:
    """A loop that knows nothing of event loops."""

    def __init__(self, **options):
        self.heartbeat = Heartbeat()
        self.running = False
        self.stop = threading.Event()
        self.seen = []
        vars(self).update(options)

    def run(self):
        self.seen.append((threading.current_thread().name, REQUEST.get()))
        self.running = True
        try:
            while not self.stop.wait(0.001):
                self.heartbeat.beat()
        finally:
            self.running = False

    def shutdown(self):
        self.stop.set()


def group_of(*loops, **options):
    return LoopGroup(loops, guardian=False, **options)


# ----------------------------------------------------------------------------------------------------------- a plain run


@pytest.mark.anyio
async def test_a_plain_run_leaves_the_event_loop_free_and_ends_by_its_plain_shutdown():
    REQUEST.set("of the group")
    loop = Plain(name="plain")
    group = group_of(loop)
    with anyio.fail_after(20):
        async with running(group):
            while not loop.running:
                await anyio.sleep(0.001)
            assert group.loops[0].running
            assert await group.shutdown() is True
    assert loop.seen == [("plain", "of the group")]
    assert [part.ending for part in group.report.parts] == ["finished"]


def test_an_event_loop_may_be_run_in_it(anyio_backend):
    class Nested(Plain):
        def run(self):
            self.seen.append(anyio.run(anyio.sleep, 0))

    loop = Nested()
    backend, options = anyio_backend

    async def main():
        return await group_of(loop).run(install_signals=False)

    assert anyio.run(main, backend=backend, backend_options=options).clean
    assert loop.seen == [None]


@pytest.mark.anyio
@pytest.mark.parametrize("error", [LookupError("mine"), SystemExit(3), asyncio.CancelledError("mine")])
async def test_what_it_raises_is_a_crash(error):
    class Raises(Plain):
        def run(self):
            raise error

    with pytest.raises((LookupError, TaskExitError)) as caught:
        await group_of(Raises(name="raises")).run(install_signals=False)
    assert (caught.value is error) is isinstance(error, LookupError)


async def test_in_virtual_time_it_is_waited_for_and_not_overtaken_by_the_clock(virtual_clock):
    class Slow(Plain):
        def shutdown(self, timeout):
            self.seen.append(timeout)
            threading.Timer(0.05, self.stop.set).start()

    loop = Slow()
    group = group_of(loop, watchdog_threshold=None)
    async with running(group):
        await anyio.sleep(100)
        assert await group.shutdown() is True
    assert loop.seen[1:] == [30]
    assert virtual_clock.now == 100


@pytest.mark.anyio
async def test_one_that_does_not_end_is_left_behind_and_told_with_its_line():
    end = threading.Event()

    class Deaf(Plain):
        def run(self):
            end.wait(30)

    group = group_of(Deaf(name="deaf"), shutdown_timeout=0.02, cancel_grace=0.02)
    with anyio.fail_after(20):
        async with running(group):
            assert await group.shutdown() is False
        [part] = group.report.parts
        assert (part.ending, group.report.exit_status) == ("stuck", 70)
        assert "in run: end.wait(30)" in part.where[0]
        with pytest.raises(ConfigError, match="its earlier run was left behind and is still at"):
            await group.run(install_signals=False)
        end.set()
        while group.loops[0].left_behind:
            await anyio.sleep(0.001)


@pytest.mark.anyio
async def test_a_run_that_is_cancelled_from_outside_leaves_it_behind_in_the_end(caplog, monkeypatch):
    monkeypatch.setattr("mainspring.worker.adapter.LEAVE_AFTER", 0.02)
    end = threading.Event()

    class Deaf(Plain):
        def run(self):
            end.wait(30)

    with anyio.move_on_after(0.02):
        await group_of(Deaf(name="deaf")).run(install_signals=False)
    end.set()
    assert "the thread of loop 'deaf' did not end, and is left behind at" in caplog.text


# ------------------------------------------------------------------------------------------------------ shutdown's forms


async def test_it_is_passed_the_seconds_that_are_left_where_it_takes_them(virtual_clock):
    class Told(Foreign):
        async def shutdown(self, timeout=None):
            self.told = timeout
            self.stop.set()

    class Any(Foreign):
        async def shutdown(self, **keywords):
            self.told = keywords
            self.stop.set()

    class Nothing(Foreign):
        def shutdown(self):
            self.told = "nothing"
            self.stop.set()

    first, own = Told(name="first"), Told(name="own", shutdown_timeout=2)
    others = Any(name="any"), Nothing(name="nothing")
    late = Told(name="late", shutdown_priority=1)
    group = group_of(first, own, *others, late, shutdown_timeout=20, watchdog_threshold=None)
    async with running(group):
        await anyio.wait_all_tasks_blocked()
        assert await group.shutdown() is True
    assert (first.told, own.told, late.told) == (20, 2, 20)
    assert [other.told for other in others] == [{"timeout": 20}, "nothing"]
    async with running(group):
        await anyio.wait_all_tasks_blocked()
        assert await group.shutdown(timeout=7) is True
    assert first.told == 7
    async with running(group):
        await anyio.wait_all_tasks_blocked()
        assert await group.drain() is True
    assert 1e7 < first.told < math.inf


async def test_an_actor_by_itself_passes_its_own_timeout(virtual_clock):
    class Told(Foreign):
        def shutdown(self, *, timeout):
            self.told = timeout
            self.stop.set()
            return False

    loop = Told()
    actor = LoopActor(loop)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await anyio.wait_all_tasks_blocked()
        assert await actor.shutdown(timeout=3) is True
    assert loop.told == 3
    assert await actor.shutdown(timeout=4) is False  # not running: the loop's own answer


@pytest.mark.anyio
async def test_a_plain_shutdown_beside_an_async_run_is_called_on_the_event_loop():
    class Mixed(Foreign):
        def shutdown(self):
            self.told = threading.current_thread()
            self.stop.set()

    loop = Mixed()
    group = group_of(loop)
    with anyio.fail_after(20):
        async with running(group):
            await anyio.wait_all_tasks_blocked()
            assert await group.shutdown() is True
    assert loop.told is threading.current_thread()


@pytest.mark.anyio
async def test_a_plain_function_around_an_async_one_is_awaited():
    class Wrapped(Foreign):
        def run(self):
            return super().run()

        def shutdown(self, timeout):
            return super().shutdown(timeout=timeout)

    group = group_of(Wrapped())
    with anyio.fail_after(20):
        async with running(group):
            while not group.loops[0].running:
                await anyio.sleep(0.001)
            assert await group.shutdown() is True


# ------------------------------------------------------------------------------------------------- heartbeat and running


async def test_one_without_a_heartbeat_is_not_judged(virtual_clock):
    group = group_of(Foreign(heartbeat=None), watchdog_threshold=10, watchdog_interval=1)
    async with running(group):
        await anyio.sleep(1000)
        assert group.status().ready
        assert await group.shutdown() is True


async def test_running_and_heartbeat_may_be_plain_methods(virtual_clock):
    class Methods(Foreign):
        beats = Heartbeat()

        def __init__(self):
            super().__init__()
            del self.running, self.heartbeat

        def running(self):
            return True

        def heartbeat(self):
            return self.beats

        async def run(self):
            await anyio.sleep_forever()

    group = group_of(Methods(), watchdog_threshold=100)
    assert group.loops[0].running
    with pytest.raises(HandlerStalledError):
        await group.run(install_signals=False)


# --------------------------------------------------------------------------------------------------------- refused forms


async def test_its_figures_may_be_plain_methods(virtual_clock):
    class Told(Foreign):
        def in_flight(self):
            return 3

        def trouble(self):
            return "the queue is away"

    loop = Told(name=None)
    loop.name = lambda: "told"
    group = group_of(loop)
    async with running(group):
        status = group.status()
        assert [(found.name, found.in_flight, found.ready) for found in status.loops] == [("told", 3, False)]
        assert "the queue is away" in (status.loops[0].reason or "")
        loop.running = threading.Lock().locked
        assert not group.loops[0].running
        group.request_shutdown()


def generator(self):
    yield


async def async_generator(self):
    yield


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"run": True}, "run must be a method"),
        ({"run": generator}, "run\\(\\) is a generator"),
        ({"run": async_generator}, "run\\(\\) is a generator"),
        ({"run": lambda self, jobs: None}, "run\\(\\) needs 'jobs': give it a default"),
        ({"run": lambda self, wait_time_seconds: None}, "run\\(\\) needs 'wait_time_seconds'"),
        ({"shutdown": None}, "is no loop; it needs run\\(\\), shutdown\\(\\)"),
        ({"shutdown": lambda self, seconds: None}, "shutdown\\(\\) needs 'seconds'"),
        ({"shutdown": lambda self, timeout, /: None}, "shutdown\\(\\) needs 'timeout'"),
        ({"heartbeat": 3.5}, "heartbeat must be a Heartbeat, or None"),
        ({"shutdown_timeout": "30"}, "shutdown_timeout must be 0 or more seconds"),
        ({"shutdown_priority": 1.5}, "shutdown_priority must be a whole number"),
    ],
)
def test_bad_forms_are_refused_when_the_group_is_made(members, why):
    with pytest.raises(ConfigError, match=why):
        LoopGroup([type("Bad", (Foreign,), members)()] if "heartbeat" not in members else [Foreign(**members)])


def test_a_class_in_place_of_a_loop_is_refused():
    class Loop(Foreign):
        running = False
        heartbeat = None

    with pytest.raises(ConfigError, match="is a class; give an instance of it"):
        LoopGroup([Loop])


def test_a_group_of_plain_loops_runs_in_a_loop_thread(anyio_backend):
    backend, options = anyio_backend
    loop = Plain()
    group = group_of(loop)
    with LoopThread(backend=backend, backend_options=options) as thread:
        report = group.start_in(thread)
        while not loop.running:
            time.sleep(0.001)
        group.request_shutdown()
        assert report.wait_sync(20).clean
