"""The phases of a shutdown, in virtual time."""

from __future__ import annotations

import anyio
import pytest
from group_support import Foreign, box, one_loop_group, running, states

from mainspring import (
    Context,
    DrainRequest,
    InMemoryMailbox,
    LoopGroup,
    MailboxConnectionError,
    MainLoop,
    RestartPolicy,
    ShutdownRequest,
)
from mainspring.events import GroupStateChanged, GroupStopped, LoopStateChanged, ShutdownRequested
from support import FaultyMailbox, hang
from wrapped_backend import WrappedBackend, wrap


async def take_long(body, ctx: Context):
    await anyio.sleep(body["seconds"])


async def test_phases_come_in_order_each_with_its_duration(virtual_clock):
    group, mailbox = one_loop_group(take_long, drain_delay=4, shutdown_timeout=10, cancel_grace=5)

    async def clean_up_slowly(body):
        try:
            await anyio.sleep(100)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(2)

    group = LoopGroup(
        [MainLoop(mailbox, clean_up_slowly, body=dict)], drain_delay=4, shutdown_timeout=10, cancel_grace=5, name="g"
    )
    seen, stopped = states(group), []
    group.dispatcher.subscribe(GroupStopped, stopped.append)
    requested = []
    group.dispatcher.subscribe(ShutdownRequested, requested.append)
    await mailbox.send({})
    async with running(group):
        await anyio.sleep(1)
        assert await group.shutdown() is False
    assert seen == [
        ("starting", 0.0, 0.0),
        ("running", 0.0, 0.0),
        ("drain delay", 1.0, 1.0),
        ("stop intake", 4.0, 5.0),
        ("finish", 0.0, 5.0),
        ("cancel", 10.0, 15.0),
        ("stop daemons", 2.0, 17.0),
        ("stopped", 0.0, 17.0),
    ]
    report = group.report
    assert report.phases == {"drain delay": 4, "stop intake": 0, "finish": 10, "cancel": 2, "stop daemons": 0}
    assert report.duration == 16
    assert report.exit_status == 70
    assert [event.reason for event in requested] == ["shutdown()"]
    assert [(event.exit_status, event.report) for event in stopped] == [(70, str(report))]


async def test_a_phase_that_waits_says_for_how_many_messages_and_how_long(virtual_clock):
    group, mailbox = one_loop_group(take_long, shutdown_timeout=10, cancel_grace=5)
    begun = {}
    group.dispatcher.subscribe(GroupStateChanged, lambda e: begun.update({str(e.new): (e.in_flight, e.timeout)}))
    await mailbox.send({"seconds": 100})
    async with running(group):
        await anyio.sleep(1)
        await group.shutdown()
    assert begun["stop intake"] == (0, None)
    assert begun["finish"] == (1, 10)
    assert begun["cancel"] == (1, 5)
    assert begun["stopped"] == (0, None)


async def test_during_the_drain_delay_it_is_not_ready_and_works_on(virtual_clock):
    group, mailbox = one_loop_group(take_long, drain_delay=5)
    async with running(group):
        assert group.status().ready
        group.request_shutdown("deploy")
        await anyio.sleep(1)
        status = group.status()
        assert (status.state, status.ready, status.live) == ("drain delay", False, True)
        assert status.reasons == ("shutting down: deploy",)
        await mailbox.send({"seconds": 1})  # sent by a client whose load balancer has not noticed
        await anyio.sleep(3)
        assert (await mailbox.counts()).settled == 1
    assert virtual_clock.now == 5


async def test_stopping_the_intake_interrupts_a_long_poll_at_once(virtual_clock):
    group, mailbox = one_loop_group(take_long, loop={"wait_time_seconds": 10_000})
    async with running(group):
        await anyio.sleep(3)
        assert await group.shutdown() is True
        assert virtual_clock.now == 3
    assert group.report.exit_status == 0
    await mailbox.send({"seconds": 0})  # and claimed nothing that comes later
    assert (await mailbox.counts()).pending == 1


async def test_work_in_hand_finishes_until_the_timeout(virtual_clock):
    group, mailbox = one_loop_group(take_long, shutdown_timeout=10, loop={"concurrency": 3})
    for seconds in (5, 9.99, 10.01):
        await mailbox.send({"seconds": seconds})
    async with running(group):
        await anyio.sleep(0)
        await anyio.wait_all_tasks_blocked()
        assert await group.shutdown() is False
    counts = await mailbox.counts()
    assert (counts.settled, counts.pending) == (2, 1)
    assert virtual_clock.now == 10


async def test_cancelled_work_goes_back_uncharged_and_at_once_to_another_worker(virtual_clock):
    mailbox = box()
    taken = []

    async def elsewhere(body, ctx: Context):
        taken.append((ctx.attempt, ctx.message.delivery_count, anyio.current_time()))

    first = LoopGroup([MainLoop(mailbox, take_long, body=dict)], shutdown_timeout=10)
    other = LoopGroup([MainLoop(mailbox, elsewhere, body=dict)])
    await mailbox.send({"seconds": 1000})
    async with running(first):
        await anyio.sleep(1)
        async with running(other):
            await first.shutdown()
            await anyio.wait_all_tasks_blocked()
            await other.shutdown()
    assert taken == [(1, 2, 11.0)]


async def test_handlers_get_the_cancel_grace_to_clean_up_and_not_more(virtual_clock):
    ended = []

    async def clean_up(body):
        try:
            await anyio.sleep(1000)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(body["seconds"])
            ended.append(anyio.current_time())

    group, mailbox = one_loop_group(clean_up, shutdown_timeout=1, cancel_grace=5)
    await mailbox.send({"seconds": 4.9})
    async with running(group):
        await anyio.sleep(1)
        await group.shutdown()
    assert ended == [6.9]
    assert group.report.parts[0].ending == "cancelled"
    assert "in clean_up: await anyio.sleep(1000)" in group.report.parts[0].where[0]

    group, mailbox = one_loop_group(clean_up, shutdown_timeout=1, cancel_grace=5)
    await mailbox.send({"seconds": 60})
    stopped = []
    group.dispatcher.subscribe(GroupStopped, stopped.append)
    began = virtual_clock.now
    async with running(group):
        await anyio.sleep(1)
        group.request_shutdown()
        await anyio.sleep(1 + 5 + 1)
        [event] = stopped  # it has said what is stuck, and waits: a process of its own would be left by force now
        assert "stuck after 6.50 s" in event.report
        assert "in clean_up: await anyio.sleep(body" in event.report
    assert virtual_clock.now == pytest.approx(began + 1 + 1 + 60)
    assert [event.report for event in stopped] == [event.report]


async def test_the_timeout_of_shutdown_replaces_that_of_the_group_and_is_only_made_shorter(virtual_clock):
    for first, second, end in ((2, None, 2), (50, None, 50), (50, 5, 1 + 5), (5, 50, 5)):
        group, mailbox = one_loop_group(take_long, shutdown_timeout=30)
        await mailbox.send({"seconds": 1000})
        began = virtual_clock.now
        async with running(group), anyio.create_task_group() as tasks:
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(lambda group=group, first=first: group.shutdown(timeout=first))
            if second is not None:
                await anyio.sleep(1)
                await group.shutdown(timeout=second)
        assert virtual_clock.now - began == end


async def test_one_timeout_for_all_loops_and_every_loop_told_at_once(virtual_clock):
    told = []

    async def handle(body, ctx: Context):
        await ctx.wait_shutting_down()
        told.append((body["n"], anyio.current_time()))
        await anyio.sleep(1000)

    boxes = [box(f"box{n}") for n in range(5)]
    for n, mailbox in enumerate(boxes):
        await mailbox.send({"n": n})
    loops = [
        MainLoop(mailbox, handle, name=f"loop{n}", body=dict, shutdown_priority=n) for n, mailbox in enumerate(boxes)
    ]
    group = LoopGroup(loops, shutdown_timeout=10, cancel_grace=5)
    async with running(group):
        await anyio.sleep(2)
        await group.shutdown()
    assert sorted(told) == [(n, 2.0) for n in range(5)]
    assert virtual_clock.now == 12
    assert [part.ending for part in group.report.parts] == ["cancelled"] * 5


async def test_a_loop_with_a_timeout_of_its_own_is_cancelled_when_that_is_over(virtual_clock):
    ended = {}

    async def handle(body):
        try:
            await anyio.sleep(1000)
        finally:
            ended[body["n"]] = anyio.current_time()

    boxes = [box(f"box{n}") for n in range(3)]
    for n, mailbox in enumerate(boxes):
        await mailbox.send({"n": n})
    timeouts = (3, None, 600)  # the group's caps what is longer
    loops = [
        MainLoop(mailbox, handle, name=f"loop{n}", body=dict, shutdown_timeout=timeouts[n])
        for n, mailbox in enumerate(boxes)
    ]
    group = LoopGroup(loops, shutdown_timeout=20)
    async with running(group):
        await anyio.sleep(1)
        await group.shutdown()
    assert ended == {0: 4.0, 1: 21.0, 2: 21.0}
    assert [round(part.seconds, 3) for part in group.report.parts] == [3, 20, 20]


def cascade(seconds, *, timeout=30.0, critical_timeout=None):
    """A background loop (priority 0) and a critical one (10), each with ``seconds`` of work at a shutdown."""
    log = []

    async def handle(body, ctx: Context):
        log.append(("began", body["loop"], anyio.current_time()))
        try:
            await ctx.wait_shutting_down()
            await anyio.sleep(seconds[body["loop"]])
        except anyio.get_cancelled_exc_class():
            log.append(("cancelled", body["loop"], anyio.current_time()))
            raise
        log.append(("done", body["loop"], anyio.current_time()))

    boxes = {name: box(name) for name in ("background", "critical")}
    group = LoopGroup(
        [
            MainLoop(boxes["critical"], handle, name="critical", body=dict, concurrency=10, shutdown_priority=10,
                     shutdown_timeout=critical_timeout),
            MainLoop(boxes["background"], handle, name="background", body=dict, concurrency=10),
        ],
        shutdown_timeout=timeout,
    )  # fmt: skip
    return group, boxes, log


async def test_the_time_of_a_loop_that_was_told_to_stop_alone_is_not_that_of_its_turn(virtual_clock):
    group, boxes, log = cascade({"background": 20, "critical": 100}, critical_timeout=3)
    for name, mailbox in boxes.items():
        await mailbox.send({"loop": name})
    async with running(group):
        await anyio.sleep(1)
        group.actors[0].tell(DrainRequest())
        await anyio.sleep(1)
        await group.shutdown()
    assert ("cancelled", "critical", 5.0) in log
    assert ("cancelled", "background", 22.0) not in log
    assert [(part.name, part.ending, part.seconds) for part in group.report.parts] == [
        ("critical", "cancelled", 4),
        ("background", "finished", 20),
    ]


async def test_the_report_of_a_run_is_not_that_of_the_run_before(virtual_clock):
    group, mailbox = one_loop_group(take_long, shutdown_timeout=5)
    await mailbox.send({"seconds": 20})
    async with running(group):
        await anyio.sleep(1)
        await group.shutdown()
    assert [(part.ending, part.seconds) for part in group.report.parts] == [("cancelled", 5)]
    async with running(group, until_empty=True):  # its message has come back
        await anyio.sleep(1)
    assert [(part.ending, part.seconds) for part in group.report.parts] == [("finished", 0)]
    assert group.report.clean


@pytest.mark.parametrize("how", ["loop", "actor"])
async def test_work_that_the_shutdown_of_one_loop_cancels_is_in_the_report(how, virtual_clock):
    group, mailbox = one_loop_group(take_long)
    await mailbox.send({"seconds": 100})
    async with running(group):
        await anyio.sleep(1)
        told = group.loops[0] if how == "loop" else group.actors[0]
        assert await told.shutdown(timeout=7) is False
        assert virtual_clock.now == 8
    [part] = group.report.parts
    assert (part.ending, part.seconds) == ("cancelled", 7)
    assert "take_long" in part.where[0]
    assert group.report.exit_status == 70
    assert (await mailbox.counts()).pending == 1


async def test_critical_loops_take_work_until_those_below_have_ended(virtual_clock):
    group, boxes, log = cascade({"background": 5, "critical": 1})
    await boxes["background"].send({"loop": "background"})
    async with running(group), anyio.create_task_group() as tasks:
        await anyio.sleep(1)
        tasks.start_soon(group.shutdown)
        await anyio.sleep(4)
        for mailbox, name in ((boxes["critical"], "critical"), (boxes["background"], "background")):
            await mailbox.send({"loop": name})
        await anyio.wait_all_tasks_blocked()
        assert ("began", "critical", 5.0) in log  # its intake goes on
    assert ("done", "background", 6.0) in log
    assert ("done", "critical", 6.0) in log
    assert (await boxes["background"].counts()).pending == 1
    assert virtual_clock.now == 6
    assert group.report.clean


async def test_critical_loops_wait_for_their_share_of_the_time_only(virtual_clock):
    group, boxes, log = cascade({"background": 1000, "critical": 10}, timeout=30)
    await boxes["background"].send({"loop": "background"})
    async with running(group), anyio.create_task_group() as tasks:
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(group.shutdown)
        await anyio.sleep(14.9)
        await boxes["critical"].send({"loop": "critical"})
        await anyio.sleep(0.2)  # half of the 30 s is over: the critical one's intake has ended, too
        await boxes["critical"].send({"loop": "critical"})
    assert [entry for entry in log if entry[1] == "critical"] == [
        ("began", "critical", 14.9),
        ("done", "critical", 24.9),
    ]
    assert ("cancelled", "background", 30.0) in log
    assert (await boxes["critical"].counts()).pending == 1


async def test_critical_loops_are_cancelled_after_those_below_have_ended(virtual_clock):
    group, boxes, log = cascade({"background": 1000, "critical": 1000}, timeout=30)
    for name, mailbox in boxes.items():
        await mailbox.send({"loop": name})
    async with running(group):
        await anyio.wait_all_tasks_blocked()
        await group.shutdown()
    assert log[-2:] == [("cancelled", "background", 30.0), ("cancelled", "critical", 30.0)]


async def test_a_stuck_loop_costs_the_critical_ones_a_fifth_of_their_grace_at_most(virtual_clock):
    ended = {}

    async def handle(body):
        try:
            await anyio.sleep(1000)
        finally:
            ended[body["loop"], "cancelled"] = anyio.current_time()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(body["clean_up"])
            ended[body["loop"], "ended"] = anyio.current_time()

    low, high = box("low"), box("high")
    await low.send({"loop": "low", "clean_up": 100})
    await high.send({"loop": "high", "clean_up": 3.9})
    group = LoopGroup(
        [
            MainLoop(low, handle, name="low", body=dict),
            MainLoop(high, handle, name="high", body=dict, shutdown_priority=1),
        ],
        shutdown_timeout=10,
        cancel_grace=5,
    )
    async with running(group):
        await anyio.wait_all_tasks_blocked()
        await group.shutdown()
    assert ended["low", "cancelled"] == 10
    assert ended["high", "cancelled"] == 11
    assert ended["high", "ended"] == 14.9
    endings = {part.name: part.ending for part in group.report.parts}
    assert endings["high"] == "cancelled"


async def test_the_own_time_of_a_loop_begins_when_its_own_intake_stops(virtual_clock):
    group, boxes, log = cascade({"background": 20, "critical": 28}, timeout=100, critical_timeout=10)
    for name, mailbox in boxes.items():
        await mailbox.send({"loop": name})
    async with running(group):
        await anyio.sleep(1)
        await group.shutdown()
    assert ("done", "background", 21.0) in log
    assert ("done", "critical", 29.0) in log
    assert group.report.clean


async def test_an_acknowledgement_that_hangs_is_given_up_after_the_grace(virtual_clock):
    group, mailbox = one_loop_group(take_long, shutdown_timeout=10, cancel_grace=5)
    mailbox.always("settle", hang)
    await mailbox.send({"seconds": 0})
    async with running(group):
        await anyio.sleep(1)
        assert await group.shutdown() is False
    assert virtual_clock.now == 16
    [part] = group.report.parts
    assert part.ending == "cancelled"
    assert part.where[0].startswith("the settlement of message ")


async def test_all_claimed_messages_are_handed_back_not_only_the_next_one(virtual_clock):
    group, mailbox = one_loop_group(take_long, shutdown_timeout=0, loop={"concurrency": 50})
    async with running(group):
        await anyio.wait_all_tasks_blocked()
        await mailbox.send_many([{"seconds": 1000}] * 50)
        await group.shutdown()  # in the tick in which they are claimed
    assert virtual_clock.now == 0
    messages = await mailbox.receive(max_messages=100)
    assert len(messages) == 50
    assert {message.attempt for message in messages} == {1}


async def test_a_mailbox_that_does_not_close_stands_in_the_report(virtual_clock):
    class DoesNotClose(WrappedBackend):
        works_unopened = False

        async def close(self):
            await anyio.sleep_forever()

    mailbox = wrap(InMemoryMailbox("jobs", body=dict), DoesNotClose)
    group = LoopGroup([MainLoop(mailbox, take_long, body=dict)], cancel_grace=2)
    async with running(group):
        await anyio.sleep(1)
        assert not await group.shutdown()
    assert virtual_clock.now == 11  # the close was given up after its 10 s
    loop, stuck = group.report.parts
    assert (str(loop.ending), stuck.name, str(stuck.ending)) == ("finished", "mailbox jobs", "stuck")
    assert "await anyio.sleep_forever()" in stuck.where[0]
    assert group.report.exit_status == 70


def moves(group, name):
    """The states that a loop goes through, as ``(state, seconds of the one before)``; filled as it goes."""
    seen = []
    group.dispatcher.subscribe(
        LoopStateChanged, lambda e: e.loop == name and seen.append((str(e.new), round(e.seconds, 6)))
    )
    return seen


TOLD = {
    "group": lambda group, loop: group.request_shutdown(),
    "drain": lambda group, loop: group.request_drain(),
    "loop": lambda group, loop: loop.request_shutdown(),
    "control": lambda group, loop: group.actors[0].tell(DrainRequest()),
    "control with a timeout": lambda group, loop: group.actors[0].tell(ShutdownRequest(timeout=60)),
}


@pytest.mark.parametrize("told", TOLD)
async def test_a_loop_is_stopping_from_when_it_is_told_to_the_end_of_its_drain(told, virtual_clock):
    group, mailbox = one_loop_group(take_long, loop={"name": "loop"})
    other = box("other")
    group = LoopGroup([*group.loops, MainLoop(other, take_long, name="other", body=dict)], restart=RestartPolicy())
    seen = moves(group, "loop")
    await mailbox.send({"seconds": 21})
    async with running(group):
        await anyio.sleep(1)
        TOLD[told](group, group.loops[0])
        await anyio.sleep(10)
        loop = group.status().loops[0]
        assert (loop.state, loop.ready, loop.in_flight) == ("stopping", False, 1)
        assert (loop.state_seconds, loop.uptime) == (10, 11)
        assert (await group.check_health())[0].reason == "stopping"
        await anyio.sleep(11)
        assert not group.running or group.status().loops[0].uptime == 0
        await group.shutdown()
    assert seen == [("starting", 0), ("running", 0), ("stopping", 1), ("stopped", 20)]
    assert group.report.parts[0].seconds == 20


async def test_a_loop_of_foreign_make_and_one_whose_store_is_away_are_stopping_too(virtual_clock):
    class Lingers(Foreign):
        async def work(self):
            await self.stop.wait()
            await anyio.sleep(7)

    async def slow_to_end(body):
        pass

    async def fail(_):
        raise MailboxConnectionError("away")

    mailbox = FaultyMailbox("away", body=dict)
    mailbox.always("claim", fail)
    group = LoopGroup([Lingers(name="foreign"), MainLoop(mailbox, slow_to_end, name="away")])
    foreign, away = moves(group, "foreign"), moves(group, "away")
    async with running(group):
        await anyio.sleep(3)
        group.request_shutdown()
        await anyio.sleep(1)
        assert [loop.state for loop in group.status().loops] == ["stopping", "stopped"]
    assert foreign == [("starting", 0), ("running", 0), ("stopping", 3), ("stopped", 7)]
    assert [state for state, _ in away] == ["starting", "running", "degraded", "stopping", "stopped"]


async def test_a_loop_that_was_told_to_stop_is_not_restarted_when_its_drain_crashes(virtual_clock):
    class Breaks(Foreign):
        async def work(self):
            await self.stop.wait()
            await anyio.sleep(1)
            raise ValueError("broken")

    group = LoopGroup([Breaks(name="breaks"), MainLoop(box(), take_long)], restart=RestartPolicy())
    seen = moves(group, "breaks")

    async def crash():
        async with running(group):
            group.actors[0].tell(DrainRequest())
            await anyio.sleep(5)

    with pytest.raises(ValueError, match="broken"):
        await crash()
    assert [state for state, _ in seen] == ["starting", "running", "stopping", "stopped"]


async def test_the_uptime_of_a_loop_begins_anew_with_a_restart(virtual_clock):
    class Crashes(Foreign):
        runs = 0

        async def work(self):
            self.runs += 1
            if self.runs == 1:
                await anyio.sleep(10)
                raise ValueError("broken")
            await self.stop.wait()

    group = LoopGroup([Crashes(name="crashes")], restart=RestartPolicy(initial_delay=4, jitter="none"))
    async with running(group):
        await anyio.sleep(9)
        assert group.status().loops[0].uptime == 9
        await anyio.sleep(3)
        assert (group.status().loops[0].uptime, group.status().loops[0].state_seconds) == (0, 2)
        await anyio.sleep(3)
        assert (group.status().loops[0].uptime, group.status().loops[0].state_seconds) == (1, 1)
        await group.shutdown()
