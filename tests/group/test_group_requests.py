"""Asking for an end: before the start, from inside a handler, by draining, when everything is done; and running again."""

from __future__ import annotations

import math
import os
import signal

import anyio
import pytest
from anyio import from_thread, to_thread
from group_support import box, one_loop_group, running, settled, states

from mainspring import (
    ConfigError,
    Context,
    InMemoryMailbox,
    LoopGroup,
    LoopThread,
    MailboxConnectionError,
    MainLoop,
    ShutdownCoordinator,
)
from support import fail, work


async def quick(body):
    pass


async def take_long(body):
    await anyio.sleep(body["seconds"])


# ---------------------------------------------------------------------------------------------------- before the start


async def test_a_shutdown_before_the_start_is_remembered_and_used_up_by_one_run(virtual_clock):
    group, mailbox = one_loop_group(quick)
    await mailbox.send({})
    assert await group.shutdown() is True
    report = await group.run(install_signals=False)
    assert (report.reason, report.exit_status, report.parts) == ("shutdown()", 0, ())
    assert await settled(mailbox) == 0
    assert virtual_clock.now == 0
    async with running(group):  # the next run works
        await anyio.wait_all_tasks_blocked()
        await group.shutdown()
    assert await settled(mailbox) == 1


@pytest.mark.parametrize("ask", ["shutdown", "drain"])
async def test_a_shutdown_in_the_tick_of_the_start_is_not_lost(virtual_clock, ask):
    for order in (0, 1):
        group, _ = one_loop_group(quick)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                calls = [lambda group=group: group.run(install_signals=False), getattr(group, ask)]
                tasks.start_soon(calls[order])
                tasks.start_soon(calls[1 - order])
        assert group.report.reason == f"{ask}()"
    assert virtual_clock.now == 0


async def test_a_shutdown_before_async_with_is_used_up_there(virtual_clock):
    group, mailbox = one_loop_group(quick)
    await mailbox.send({})
    await group.shutdown()
    async with group:
        assert not group.running
        assert group.status().reasons == ("not running",)
    async with group:
        await anyio.wait_all_tasks_blocked()
        assert await settled(mailbox) == 1


async def test_a_loops_own_shutdown_before_the_start_ends_its_part(virtual_clock):
    mailbox = box()
    loop = MainLoop(mailbox, quick, body=dict)
    await loop.shutdown()
    report = await LoopGroup([loop]).run(install_signals=False)
    assert (report.reason, report.exit_status) == ("all loops ended", 0)


# ------------------------------------------------------------------------------------------------- from inside a handler


@pytest.mark.parametrize("ask", ["shutdown", "drain"])
async def test_from_inside_a_handler_it_only_asks(virtual_clock, ask):
    answers = []

    async def handle(body):
        async with anyio.create_task_group() as tasks:  # also from its child tasks

            async def child():
                answers.append(await getattr(group, ask)())

            tasks.start_soon(child)
        answers.append(await getattr(group, ask)())
        await anyio.sleep(3)

    group, mailbox = one_loop_group(handle)
    await mailbox.send({})
    report = await group.run(install_signals=False)
    assert answers == [True, True]
    assert virtual_clock.now == 3  # and the handler finished
    assert report.exit_status == 0
    assert await settled(mailbox) == 1


async def test_from_inside_a_handlers_thread_it_only_asks(virtual_clock):
    answers = []

    def handle(body):
        answers.append(from_thread.run(group.shutdown))

    group, mailbox = one_loop_group(handle)
    await mailbox.send({})
    report = await group.run(install_signals=False)
    assert answers == [True]
    assert report.exit_status == 0
    assert await settled(mailbox) == 1


async def test_another_groups_handler_waits_for_the_end(virtual_clock):
    other, other_box = one_loop_group(take_long)
    answers = []

    async def handle(body):
        answers.append((await other.shutdown(), anyio.current_time()))
        group.request_shutdown()

    group, mailbox = one_loop_group(handle)
    await other_box.send({"seconds": 7})
    async with running(other), running(group):
        await anyio.wait_all_tasks_blocked()
        await mailbox.send({})
    assert answers == [(True, 7.0)]


# ------------------------------------------------------------------------------------------------------------- draining


async def test_drain_waits_beyond_the_timeout_and_takes_nothing_new(virtual_clock):
    group, mailbox = one_loop_group(take_long, shutdown_timeout=10, loop={"shutdown_timeout": 5})
    await mailbox.send({"seconds": 500})
    async with running(group):
        await anyio.wait_all_tasks_blocked()
        await mailbox.send({"seconds": 0})
        assert await group.drain() is True
    assert virtual_clock.now == 500
    assert group.report.exit_status == 0
    assert (await mailbox.counts()).pending == 1


async def test_a_shutdown_during_a_drain_puts_the_limits_on(virtual_clock):
    for own, end in ((None, 110), (5, 105)):
        group, mailbox = one_loop_group(take_long, shutdown_timeout=10, loop={"shutdown_timeout": own})
        await mailbox.send({"seconds": 500})
        began = virtual_clock.now
        async with running(group):
            await anyio.wait_all_tasks_blocked()
            group.request_drain("preStop")
            await anyio.sleep(100)
            assert group.status().state == "finish"
            assert await group.shutdown() is False
        assert virtual_clock.now - began == end
        assert group.report.reason == "preStop"
        assert group.report.exit_status == 70


async def test_asking_to_drain_during_a_shutdown_does_not_lift_its_limit(virtual_clock):
    group, mailbox = one_loop_group(take_long, shutdown_timeout=10)
    await mailbox.send({"seconds": 500})
    async with running(group):
        await anyio.wait_all_tasks_blocked()
        group.request_shutdown()
        group.request_drain()
        group.request_drain()
    assert virtual_clock.now == 10


@pytest.mark.parametrize("bad", [-1, math.nan])
async def test_a_timeout_below_zero_is_refused(virtual_clock, bad):
    group, _ = one_loop_group(quick)
    with pytest.raises(ConfigError, match="timeout must be 0 or more seconds"):
        await group.shutdown(timeout=bad)
    with anyio.move_on_after(5) as scope:  # and nothing was remembered
        await group.run(install_signals=False)
    assert scope.cancelled_caught


# ---------------------------------------------------------------------------------------------------------- until empty


async def test_until_empty_ends_when_all_is_done_delayed_messages_too(virtual_clock):
    group, mailbox = one_loop_group(take_long, loop={"concurrency": 2})
    await mailbox.send_many([{"seconds": 1}] * 10)
    await mailbox.send({"seconds": 1}, delay=600)
    seen = states(group)
    report = await group.run(install_signals=False, until_empty=True)
    assert await settled(mailbox) == 11
    assert 601 <= virtual_clock.now < 602
    assert (report.reason, report.exit_status) == ("all mailboxes are empty", 0)
    assert "drain delay" not in [state for state, *_ in seen]


async def test_until_empty_waits_for_loops_that_feed_each_other(virtual_clock):
    ping, pong = box("ping"), box("pong")

    async def pass_on(body, ctx: Context):
        await anyio.sleep(0.05)
        if body["left"]:
            await {"ping": pong, "pong": ping}[body["at"]].send(
                {"left": body["left"] - 1, "at": "pong" if body["at"] == "ping" else "ping"}
            )

    group = LoopGroup(
        [MainLoop(ping, pass_on, name="ping", body=dict), MainLoop(pong, pass_on, name="pong", body=dict)]
    )
    await ping.send({"left": 101, "at": "ping"})
    await group.run(install_signals=False, until_empty=True)
    assert await settled(ping) == await settled(pong) == 51


async def test_until_empty_is_not_deceived_by_what_another_process_moves_between_two_looks(virtual_clock):
    first, second = box("first"), box("second")

    async def slowly(counts):
        found = await counts()
        await anyio.sleep(1)
        return found

    first.always("counts", slowly)
    group = LoopGroup(
        [MainLoop(first, quick, name="first", body=dict), MainLoop(second, quick, name="second", body=dict)]
    )
    await second.send({})
    [elsewhere] = await second.receive(visibility_timeout=600)  # in the hands of another worker
    async with running(group, until_empty=True):
        await anyio.sleep(5.5)
        async with anyio.create_task_group() as tasks:  # while the first one is being counted, or just after that

            async def move():
                await first.send({}, delay=100)
                await elsewhere.acknowledge()

            tasks.start_soon(move)
        await anyio.sleep(50)
        assert group.running
    assert await settled(first) == 1


async def test_until_empty_is_not_deceived_by_what_its_own_loops_move_between_two_looks(virtual_clock):
    """A message goes to and fro, always to the mailbox that was looked at last."""

    class Slow(InMemoryMailbox):
        async def approximate_count(self):
            count = await super().approximate_count()
            await anyio.sleep(1.2)
            return count

    hops = []

    def passing(to):
        async def handle(job: int) -> None:
            hops.append(job)
            if job < 30:
                await to.send(job + 1, delay=1)

        return handle

    one, other = Slow("one"), Slow("other")
    await one.send(0, delay=1)
    group = LoopGroup([MainLoop(one, passing(other)), MainLoop(other, passing(one))])
    await group.run(install_signals=False, until_empty=True)
    assert hops == list(range(31))


async def test_until_empty_looks_often_enough_at_what_others_hold(virtual_clock):
    mailbox = InMemoryMailbox()
    await mailbox.send(1)
    [held] = await mailbox.receive(visibility_timeout=7_200)

    async def handle(job: int) -> None: ...

    async with running(LoopGroup([MainLoop(mailbox, handle)]), until_empty=True):
        await anyio.sleep(3_600)
        await held.acknowledge()
    assert 3_600 <= virtual_clock.now <= 3_610


async def test_until_empty_with_nothing_to_do_ends_at_once(virtual_clock):
    group, _ = one_loop_group(quick, drain_delay=60)
    await group.run(install_signals=False, until_empty=True)
    assert virtual_clock.now < 1


async def test_until_empty_outlives_a_store_that_cannot_be_reached(virtual_clock):
    group, mailbox = one_loop_group(quick)
    mailbox.always("counts", fail(MailboxConnectionError("no route to the store")))
    await mailbox.send({})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: group.run(install_signals=False, until_empty=True))
        await anyio.sleep(30)
        assert group.running  # not empty, as far as anybody knows
        mailbox.always("counts", work)
    assert group.report.reason == "all mailboxes are empty"


# ------------------------------------------------------------------------------------------------------------ run again


async def test_it_ends_when_all_loops_have_and_can_be_run_again(virtual_clock):
    group, mailbox = one_loop_group(quick)
    for round_number in range(1, 4):
        await mailbox.send({})
        report = await group.run(install_signals=False, until_empty=True)
        assert await settled(mailbox) == round_number
        assert group.report is report
        assert not group.running


async def test_two_runs_at_once_are_refused(virtual_clock):
    group, _ = one_loop_group(quick)
    async with running(group):
        with pytest.raises(ConfigError, match="already running"):
            await group.run(install_signals=False)
        with pytest.raises(ConfigError, match="already running"):
            async with group:
                pass
        assert group.running  # the first one is none the worse
        group.request_shutdown()
    async with group:
        with pytest.raises(ConfigError, match="already running"):
            async with group:
                pass
        assert group.running
    assert not group.running


MODULE_BOX = InMemoryMailbox("module level", body=dict)
HANDLED = []


async def note(body: dict) -> None:
    HANDLED.append(body["n"])


MODULE_GROUP = LoopGroup([MainLoop(MODULE_BOX, note)])


def test_a_group_at_module_level_runs_on_one_event_loop_after_the_other():
    HANDLED.clear()
    backends = [("asyncio", {}), ("trio", {}), ("asyncio", {"use_uvloop": True}), ("asyncio", {})]
    for number, (backend, options) in enumerate(backends):

        async def main(number=number):
            await MODULE_BOX.send({"n": number})
            return await MODULE_GROUP.run(until_empty=True)

        report = anyio.run(main, backend=backend, backend_options=options)
        assert report.exit_status == 0
    assert HANDLED == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------------- several groups


@pytest.mark.anyio
async def test_two_groups_in_one_process_share_the_signals_and_not_the_shutdown():
    """Each with signals of its own installed: the second to start does not take them from the first."""
    one, one_box = one_loop_group(quick, guardian=False)
    two, two_box = one_loop_group(quick, guardian=False)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.run)
            tasks.start_soon(two.run)
            for mailbox in (one_box, two_box):
                await mailbox.send({})
            while await settled(one_box) + await settled(two_box) < 2:
                await anyio.sleep(0.01)
            assert await one.shutdown() is True
            assert two.running
            os.kill(os.getpid(), signal.SIGTERM)  # still received, by the one that is left
    assert two.report.reason == "SIGTERM"


# ------------------------------------------------------------------------------------------------ an installed coordinator


def run_on(anyio_backend, fn):
    backend, options = anyio_backend
    return anyio.run(fn, backend=backend, backend_options=options)


def test_a_group_enters_the_installed_coordinator_and_calls_what_was_registered_before(anyio_backend):
    called = []

    async def close():
        await anyio.sleep(0)
        called.append("async")

    async def run():
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(group.run)
                await mailbox.send({})
                while not await settled(mailbox):
                    await anyio.sleep(0.001)
                assert ShutdownCoordinator.get() is installed
                os.kill(os.getpid(), signal.SIGTERM)

    group, mailbox = one_loop_group(quick, guardian=False)
    installed = ShutdownCoordinator.install((signal.SIGUSR1,))  # the group receives its own besides
    installed.register(lambda: called.append("plain"))
    installed.register(close)
    run_on(anyio_backend, run)
    assert called == ["plain", "async"]
    assert group.report.reason == "SIGTERM"
    assert ShutdownCoordinator.get() is None


@pytest.mark.anyio
async def test_one_that_was_not_triggered_stays_installed_for_the_next_run():
    group, mailbox = one_loop_group(quick, guardian=False)
    installed = ShutdownCoordinator.install()
    await group.run(until_empty=True)
    assert ShutdownCoordinator.get() is installed
    installed.trigger("before the run")
    await mailbox.send({})
    report = await group.run(until_empty=True)
    assert (report.reason, await settled(mailbox)) == ("before the run", 0)
    assert ShutdownCoordinator.get() is None


@pytest.mark.anyio
async def test_a_trigger_ends_a_group_in_its_block_and_a_second_signal_skips_to_the_cancelling():
    group, mailbox = one_loop_group(take_long, guardian=False)
    await mailbox.send({"seconds": 1000})
    with anyio.fail_after(20):
        async with ShutdownCoordinator.install() as around, anyio.create_task_group() as tasks:
            tasks.start_soon(group.run)
            while not (await mailbox.counts()).in_flight:
                await anyio.sleep(0.001)
            await to_thread.run_sync(around.trigger, "mine")
            while group.status().state != "finish":
                await anyio.sleep(0.001)
            for _ in range(2):  # the first puts the usual limit on it
                os.kill(os.getpid(), signal.SIGINT)
                await anyio.sleep(0.01)
    assert (group.report.reason, group.report.forced_by) == ("mine", signal.SIGINT)


def test_a_plain_block_around_a_group_hears_of_its_signal_and_ends_it(anyio_backend):
    async def run():
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(group.run)
                while not group.loops[0].running:
                    await anyio.sleep(0.001)
                os.kill(os.getpid(), signal.SIGTERM)

    group, _ = one_loop_group(quick, guardian=False)
    with ShutdownCoordinator.install() as around:
        run_on(anyio_backend, run)
        assert around.triggered
    assert group.report.reason == "SIGTERM"


def test_a_plain_block_ends_a_group_beside_it(anyio_backend):
    backend, options = anyio_backend
    group, _ = one_loop_group(quick, guardian=False)
    with LoopThread(backend=backend, backend_options=options) as thread, ShutdownCoordinator.install() as shutdown:
        shutdown.register(group.request_shutdown)
        report = group.start_in(thread)
        os.kill(os.getpid(), signal.SIGTERM)
        assert shutdown.triggered
        assert report.wait_sync(20).clean


async def test_groups_that_share_an_unopened_mailbox_do_not_close_it_on_each_other(virtual_clock):
    mailbox = box()
    one = LoopGroup([MainLoop(mailbox, quick, body=dict)])
    two = LoopGroup([MainLoop(mailbox, quick, body=dict)])
    async with running(two):
        async with running(one):
            await anyio.wait_all_tasks_blocked()
            await one.shutdown()
        await mailbox.send({})
        await anyio.wait_all_tasks_blocked()
        assert await settled(mailbox) == 1
        await two.shutdown()
    assert two.report.exit_status == 0


# ---------------------------------------------------------------------------------------------------------- the thread


def test_off_the_main_thread_signals_are_refused_and_the_rest_works():
    async def main():
        group, mailbox = one_loop_group(quick)

        def in_thread():
            with pytest.raises(ConfigError, match=r"only the main thread can.*install_signals=False"):
                anyio.run(group.run)

            async def run():
                await mailbox.send({})
                return await group.run(install_signals=False, until_empty=True)

            return anyio.run(run)

        report = await to_thread.run_sync(in_thread)
        assert report.exit_status == 0

    anyio.run(main)
