"""A group that is paused, resumed and asked how its loops are."""

from __future__ import annotations

import anyio
import pytest
from group_support import Foreign, box, one_loop_group, running, settled

from mainspring import (
    ConfigError,
    ControlRefusedError,
    LoopActor,
    LoopGroup,
    LoopNotRunningError,
    MainLoop,
    PauseRequest,
    RestartPolicy,
    ShutdownRequest,
    TicketTimeoutError,
)
from mainspring.events import GroupPaused, GroupResumed
from support import shielded


async def quick(body):
    pass


async def take_long(body):
    await anyio.sleep(body["seconds"])


async def test_a_paused_group_finishes_what_it_has_and_takes_nothing_new(virtual_clock):
    boxes = [box(str(n)) for n in range(3)]
    group = LoopGroup([MainLoop(b, take_long, name=f"loop{n}", body=dict) for n, b in enumerate(boxes)])
    said = []
    group.dispatcher.subscribe(GroupPaused, said.append)
    group.dispatcher.subscribe(GroupResumed, said.append)
    for b in boxes:
        await b.send_many([{"seconds": 10}, {"seconds": 10}])
    async with running(group):
        await anyio.sleep(1)
        await group.pause("the test")
        assert virtual_clock.now == 1
        status = group.status()
        assert (status.paused, status.ready, status.live) == (True, False, True)
        assert status.reasons == tuple(f"loop 'loop{n}': paused" for n in range(3))
        assert [(loop.paused, loop.ready, loop.in_flight) for loop in status.loops] == [(True, False, 1)] * 3
        await anyio.sleep(1000)
        assert [await settled(b) for b in boxes] == [1, 1, 1]
        await group.pause("twice")
        await group.resume("the test, too")
        assert (group.status().paused, group.status().ready) == (False, True)
        await group.resume("nothing to do")
        await anyio.sleep(11)
        assert [await settled(b) for b in boxes] == [2, 2, 2]
        await group.shutdown()
    assert [(type(event).__name__, event.reason) for event in said] == [
        ("GroupPaused", "the test"),
        ("GroupPaused", "twice"),
        ("GroupResumed", "the test, too"),
    ]


async def test_a_paused_loop_that_crashes_is_restarted_and_stays_paused(virtual_clock):
    class Broken(MainLoop):
        crash = anyio.Event()

        async def run(self, **keywords):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._break)
                await super().run(**keywords)
                tasks.cancel_scope.cancel()

        async def _break(self):
            await self.crash.wait()
            type(self).crash = anyio.Event()
            raise OSError("broken")

    mailbox = box()
    loop = Broken(mailbox, quick, name="loop", body=dict)
    group = LoopGroup([loop], restart=RestartPolicy(initial_delay=10, jitter="none"))
    async with running(group):
        await group.pause()
        Broken.crash.set()
        await anyio.sleep(5)
        assert group.status().loops[0].state == "restarting"
        assert (group.status().paused, group.status().loops[0].paused) == (True, True)
        [health] = await group.check_health()
        assert (health.answered, health.healthy) == (True, False)  # it answers also between two runs
        await anyio.sleep(10)
        assert group.status().loops[0].restarts == 1
        await mailbox.send({})
        await anyio.sleep(100)
        assert (await mailbox.counts()).pending == 1
        await group.resume()
        await anyio.sleep(1)
        assert await settled(mailbox) == 1
        await group.shutdown()


async def test_paused_between_two_runs_of_a_loop_it_begins_paused(virtual_clock):
    crashes = []

    class Once(MainLoop):
        async def run(self, **keywords):
            if not crashes:
                crashes.append(1)
                raise OSError("broken")
            await super().run(**keywords)

    mailbox = box()
    await mailbox.send({})
    group = LoopGroup([Once(mailbox, quick, body=dict)], restart=RestartPolicy(initial_delay=10, jitter="none"))
    async with running(group):
        await anyio.sleep(1)
        await group.pause()
        await anyio.sleep(100)
        assert (await mailbox.counts()).pending == 1
        await group.shutdown()


async def test_a_shutdown_ends_a_pause_and_the_next_run_is_not_paused(virtual_clock):
    group, mailbox = one_loop_group(take_long)
    await mailbox.send_many([{"seconds": 5}, {"seconds": 5}])
    async with running(group):
        await anyio.sleep(1)
        await group.pause()
        assert await group.shutdown() is True
        assert virtual_clock.now == 5
    assert await settled(mailbox) == 1
    await group.run(install_signals=False, until_empty=True)
    assert await settled(mailbox) == 2


async def test_a_drain_of_a_paused_group_finishes_and_ends(virtual_clock):
    group, mailbox = one_loop_group(take_long)
    await mailbox.send({"seconds": 500})
    async with running(group):
        await anyio.sleep(1)
        await group.pause()
        assert await group.drain() is True
        assert virtual_clock.now == 500


async def test_a_group_that_does_not_run_cannot_be_paused(virtual_clock):
    group, _ = one_loop_group(quick, name="shop")
    with pytest.raises(LoopNotRunningError, match="group 'shop' cannot pause: it is not running"):
        await group.pause()
    group, mailbox = one_loop_group(take_long, name="shop")
    await mailbox.send({"seconds": 20})
    async with running(group):
        await anyio.sleep(1)
        group.request_shutdown()
        with pytest.raises(LoopNotRunningError, match="group 'shop' cannot resume: it is shutting down"):
            await group.resume()
    assert [health.answered for health in await group.check_health(timeout=1)] == [False]


async def test_one_loop_that_cannot_pause_keeps_the_others_from_being_paused(virtual_clock):
    group = LoopGroup([MainLoop(box(), quick, name="loop", body=dict), Foreign(name="poller")], name="shop")
    async with running(group):
        with pytest.raises(ControlRefusedError, match="group 'shop' cannot be paused: 'poller' has no plain methods"):
            await group.pause()
        assert group.status().ready
        await group.actors[0].ask(PauseRequest())  # one by itself can
        assert group.status().reasons == ("loop 'loop': paused",)
        assert not group.status().paused
        await group.shutdown()


async def test_a_pause_that_takes_too_long_says_so_and_holds(virtual_clock):
    async def nothing_for_long(claim):
        await anyio.sleep(60)
        return []

    mailbox = box()
    mailbox.always("claim", shielded(nothing_for_long))
    group = LoopGroup([MainLoop(mailbox, quick, body=dict)], shutdown_timeout=100)
    async with running(group):
        await anyio.sleep(1)
        with pytest.raises(TicketTimeoutError):
            await group.pause(timeout=5)
        assert virtual_clock.now == 6
        assert group.status().paused
        await group.shutdown()


async def test_one_loop_of_several_is_shut_down_and_the_others_go_on(virtual_clock):
    boxes = [box("a"), box("b")]
    group = LoopGroup([MainLoop(b, quick, name=b.name, body=dict) for b in boxes], restart=RestartPolicy())
    async with running(group):
        assert await group.actors[0].ask(ShutdownRequest()) is True
        await anyio.wait_all_tasks_blocked()
        assert [loop.state for loop in group.status().loops] == ["stopped", "running"]
        await boxes[1].send({})
        await group.pause()  # of those that run
        assert group.status().paused
        await group.shutdown()
    assert group.report.clean


async def test_an_actor_may_be_given_for_a_loop_and_one_that_runs_elsewhere_may_not(virtual_clock):
    loop = MainLoop(box(), quick, name="mine", body=dict)
    actor = LoopActor(loop)
    group = LoopGroup([actor, MainLoop(box(), quick, name="mine", body=dict)])
    assert group.actors[0] is actor
    assert [actor.name for actor in group.actors] == ["mine", "mine-2"]
    with pytest.raises(ConfigError, match="twice"):
        LoopGroup([actor, loop])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.run)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ConfigError, match="already running"):
            await group.run(install_signals=False)
        await actor.shutdown()
    async with running(group):
        assert [health.name for health in await group.check_health()] == ["mine", "mine-2"]
        await group.shutdown()


async def test_a_loop_that_runs_in_another_group_is_refused_and_stays_that_groups(virtual_clock):
    jobs = box()
    loop = MainLoop(jobs, take_long, name="one", body=dict)
    group = LoopGroup([loop], restart=RestartPolicy())
    await jobs.send({"seconds": 10})
    async with running(group):
        await anyio.sleep(1)
        began = virtual_clock.now
        with pytest.raises(ConfigError, match="loop 'one' is already running"):
            await LoopGroup([loop], restart=RestartPolicy()).run(install_signals=False)
        assert virtual_clock.now == began
        loop.request_shutdown()
        assert group.status().loops[0].state == "stopping"
    assert loop.outcomes == {"acknowledged": 1}
