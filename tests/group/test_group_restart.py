"""Crashes: restarts with backoff, giving up, siblings that stop gracefully, and what an embedded group does."""

from __future__ import annotations

import os
import signal
import threading

import anyio
import pytest
from group_support import Foreign, box, one_loop_group, running, settled

from mainspring import LoopGroup, MailboxClosedError, MainLoop, RestartPolicy
from mainspring.events import LoopCrashed
from support import fail

POLICY = RestartPolicy(
    max_retries=3, initial_delay=1, max_delay=60, backoff_factor=2, reset_interval=100, jitter="none"
)


class Crashes(Foreign):
    """Crashes after as many seconds as ``lives`` says, one life after the other; the last one is a long one."""

    def __init__(self, *lives, **options):
        super().__init__(**options)
        self.lives = list(lives)
        self.began = []

    async def work(self):
        self.began.append(anyio.current_time())
        if not self.lives:
            await self.stop.wait()
            return
        with anyio.move_on_after(self.lives.pop(0)):
            while not self.stop.is_set():
                self.heartbeat.beat()
                await anyio.sleep(10)
            return
        raise LookupError(f"life {len(self.began)}")


async def quick(body):
    pass


async def take_long(body):
    await anyio.sleep(body["seconds"])


async def test_it_is_restarted_with_backoff_until_that_is_given_up(virtual_clock):
    loop = Crashes(0, 0, 0, 0, name="crashes")
    group = LoopGroup([loop], restart=POLICY)
    crashes = []
    group.dispatcher.subscribe(LoopCrashed, lambda event: crashes.append(event.restart_in))
    with pytest.raises(LookupError, match="life 4"):
        await group.run(install_signals=False)
    assert loop.began == [0, 1, 3, 7]
    assert crashes == [1, 2, 4, None]


async def test_a_life_that_was_long_enough_clears_the_count(virtual_clock):
    loop = Crashes(0, 0, 0, 101, 0, 0, name="crashes")
    group = LoopGroup([loop], restart=POLICY)
    async with running(group):
        await anyio.sleep(500)
        assert loop.began == [0, 1, 3, 7, 109, 111, 115]
        assert group.status().loops[0].restarts == 3
        await group.shutdown()
    assert group.report.exit_status == 0


async def test_while_it_waits_for_its_restart_it_is_not_ready_and_its_siblings_work(virtual_clock):
    mailbox = box()
    group = LoopGroup([Crashes(5, name="crashes"), MainLoop(mailbox, take_long, body=dict)], restart=POLICY)
    async with running(group):
        assert group.status().ready
        await anyio.sleep(5.5)
        status = group.status()
        assert (status.ready, status.live, status.reasons) == (False, True, ("loop 'crashes': restarting",))
        await mailbox.send({"seconds": 0})
        await anyio.sleep(1)
        assert await settled(mailbox) == 1
        assert group.status().ready
        await group.shutdown()


async def test_a_shutdown_while_it_waits_for_its_restart_ends_that_at_once_and_is_no_crash(virtual_clock):
    group = LoopGroup([Crashes(0, name="crashes")], restart=RestartPolicy(initial_delay=60, jitter="none"))
    async with running(group):
        await anyio.sleep(5)
        assert await group.shutdown() is True
    assert virtual_clock.now == 5
    assert group.report.exit_status == 0


@pytest.mark.parametrize("ask", ["request_shutdown", "shutdown"])
async def test_so_does_a_shutdown_of_that_loop_alone_and_the_next_run_is_not_used_up_by_it(ask, virtual_clock):
    mailbox = box()
    loop = MainLoop(mailbox, quick, body=dict)
    group = LoopGroup([loop], restart=RestartPolicy(initial_delay=60, jitter="none"))
    mailbox.next("claim", fail(RuntimeError("a bug in the driver")))
    async with running(group):
        await anyio.sleep(5)
        if ask == "shutdown":
            await loop.shutdown()
        else:
            loop.request_shutdown()
    assert virtual_clock.now == 5
    assert (group.report.reason, group.report.exit_status) == ("all loops ended", 0)
    await mailbox.send({})
    await group.run(install_signals=False, until_empty=True)
    assert loop.outcomes == {"acknowledged": 1}


async def test_a_main_loop_that_crashes_is_restarted_too(virtual_clock):
    mailbox = box()
    group = LoopGroup([MainLoop(mailbox, take_long, body=dict, name="jobs")], restart=POLICY)
    mailbox.next("claim", fail(RuntimeError("a bug in the driver")))
    await mailbox.send({"seconds": 0})
    report = await group.run(install_signals=False, until_empty=True)
    assert report.exit_status == 0
    assert await settled(mailbox) == 1


async def test_a_crash_stops_the_siblings_gracefully_and_surfaces_as_it_is(virtual_clock):
    mailbox = box()
    crashes = Crashes(5, name="crashes")
    group = LoopGroup([crashes, MainLoop(mailbox, take_long, body=dict, name="jobs")], drain_delay=60)
    await mailbox.send({"seconds": 25})
    with pytest.raises(LookupError, match="life 1"):
        await group.run(install_signals=False)
    assert virtual_clock.now == 25  # its work in hand was finished, and no load balancer waited for
    assert await settled(mailbox) == 1
    report = group.report
    assert report.reason == "loop 'crashes' crashed"
    assert {part.name: str(part.ending) for part in report.parts} == {"crashes": "crashed", "jobs": "finished"}
    assert report.exit_status == 1
    assert group.status().reasons == ("not running: it crashed with LookupError: life 1",)
    assert not group.status().live


async def test_a_crash_during_the_shutdown_surfaces_too_and_is_not_restarted(virtual_clock):
    class Fails(Foreign):
        async def work(self):
            await self.stop.wait()
            raise LookupError("at the end")

    group = LoopGroup([Fails(name="fails")], restart=POLICY)
    with pytest.raises(LookupError, match="at the end"):
        async with running(group):
            await group.shutdown()
    assert virtual_clock.now == 0


async def test_a_mailbox_closed_under_its_loop_is_a_crash(virtual_clock):
    mailbox = box()
    group = LoopGroup([MainLoop(mailbox, take_long, body=dict)])
    with pytest.raises(MailboxClosedError):
        async with running(group):
            await mailbox.close()


# ------------------------------------------------------------------------------------------------------------- embedded


@pytest.fixture
def sigterms():
    """SIGTERM is handled here, as by a web server; what arrived."""
    arrived = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: arrived.append(signum))
    yield arrived
    signal.signal(signal.SIGTERM, before)


async def in_a_block(group, log):
    async with group:
        try:
            await anyio.sleep(100)
        finally:
            log.append(anyio.current_time())
            log.append(group.status().ready)


async def test_embedded_a_crash_sends_sigterm_and_ends_the_block_with_the_error(virtual_clock, sigterms):
    log = []
    with pytest.raises(LookupError, match="life 1"):
        await in_a_block(LoopGroup([Crashes(5)]), log)
    assert log == [5, False]
    assert sigterms == [signal.SIGTERM]


async def test_embedded_to_report_it_turns_not_ready_and_raises_at_the_end_of_the_block(virtual_clock, sigterms):
    log = []
    with pytest.raises(LookupError, match="life 1"):
        await in_a_block(LoopGroup([Crashes(5)], on_crash="report"), log)
    assert log == [100, False]
    assert sigterms == []


async def test_where_nobody_handles_sigterm_the_error_alone_ends_the_block(virtual_clock):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(LookupError, match="life 1"):
        await in_a_block(LoopGroup([Crashes(5)]), [])


async def test_the_blocks_own_error_comes_first_and_the_loops_get_their_phases(virtual_clock):
    group, mailbox = one_loop_group(take_long, shutdown_timeout=30)
    await mailbox.send({"seconds": 20})
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with group:
            await anyio.wait_all_tasks_blocked()
            1 / 0  # noqa: B018
    assert virtual_clock.now == 20
    assert group.report.exit_status == 0


async def test_a_cancelled_block_gives_its_messages_back_at_once_and_uncharged(virtual_clock):
    group, mailbox = one_loop_group(take_long, shutdown_timeout=10)
    await mailbox.send({"seconds": 500})
    with anyio.move_on_after(1):
        async with group:
            await anyio.sleep_forever()
    assert virtual_clock.now == 1
    [message] = await mailbox.receive()
    assert message.attempt == 1


async def test_a_cancelled_run_gives_its_messages_back_at_once_and_uncharged(virtual_clock):
    group, mailbox = one_loop_group(take_long)
    await mailbox.send({"seconds": 500})
    with anyio.move_on_after(1):
        await group.run(install_signals=False)
    assert virtual_clock.now == 1
    assert not group.running
    [message] = await mailbox.receive()
    assert message.attempt == 1


@pytest.mark.anyio
async def test_a_block_ends_cleanly_and_leaves_no_thread():
    before = set(threading.enumerate())
    async with one_loop_group(take_long)[0] as group:
        assert group.status().ready
    assert group.report.reason == "end of the block"
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert [name for name in left if not name.startswith(("Trio thread", "AnyIO worker"))] == []  # which may idle on
    assert os.getpid() == group.status().pid


@pytest.mark.parametrize("ends_by", ["crash", "shutdown during the pause before a restart", "own shutdown"])
async def test_a_loop_that_had_ended_when_its_group_stopped_works_in_the_next_run(virtual_clock, ends_by):
    mailbox = box()
    if ends_by != "own shutdown":
        mailbox.next("claim", fail(LookupError("a driver's bug")))
    loop = MainLoop(mailbox, quick, body=dict)
    group = LoopGroup([loop], restart=POLICY if "pause" in ends_by else None)
    if ends_by == "crash":
        with pytest.raises(LookupError, match="a driver's bug"):
            await group.run(install_signals=False)
    else:
        async with running(group):
            await anyio.sleep(0.5)
            await (group if "pause" in ends_by else loop).shutdown()
    await mailbox.send({})
    await group.run(install_signals=False, until_empty=True)
    assert await settled(mailbox) == 1


async def test_the_report_of_a_loop_that_ended_at_clock_0_says_so(virtual_clock):
    long = box("long")
    await long.send({"seconds": 20})
    loops = [MainLoop(long, take_long, body=dict, name="long"), MainLoop(box(), quick, body=dict, name="idle")]
    group = LoopGroup(loops)
    async with running(group):
        await anyio.wait_all_tasks_blocked()
        await group.shutdown()
    assert {part.name: part.seconds for part in group.report.parts} == {"long": 20, "idle": 0}
