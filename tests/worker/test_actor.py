"""A loop with a control channel: what it serves, while it works and while it waits, from tasks and threads, and to the end."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

import anyio
import pytest
from loop_support import quick

import mainspring
from interrupts import Interruption, in_thread
from mainspring import (
    ConfigError,
    ControlMessage,
    ControlRefusedError,
    DrainRequest,
    HealthCheckRequest,
    Heartbeat,
    InMemoryMailbox,
    InvalidParameterError,
    LoopActor,
    LoopGroup,
    LoopNotRunningError,
    LoopThread,
    MailboxConnectionError,
    MainLoop,
    PauseRequest,
    PingRequest,
    ResumeRequest,
    ShutdownRequest,
    TaskExitError,
    Ticket,
    TicketAbandonedError,
    TicketTimeoutError,
    check_health,
)
from support import FaultyMailbox, fail, hang, settled, shielded

pytestmark = pytest.mark.anyio


class Work:
    """A handler that waits to be let go, and who is inside of it."""

    def __init__(self, *, shielded: float = 0) -> None:
        self.begun: list[int] = []
        self.done: list[int] = []
        self.go = anyio.Event()
        self.shielded = shielded

    async def __call__(self, job: int) -> None:
        self.begun.append(job)
        try:
            await self.go.wait()
        finally:
            if self.shielded:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(self.shielded)
        self.done.append(job)


class Poller:
    """A loop of foreign make."""

    name = "poller"

    def __init__(self) -> None:
        self.heartbeat = Heartbeat()
        self.running = False
        self.stop = anyio.Event()

    async def run(self) -> None:
        self.stop = anyio.Event()
        self.running = True
        try:
            await self.stop.wait()
        finally:
            self.running = False

    async def shutdown(self, *, timeout: float = 30.0) -> bool:
        self.stop.set()
        return True


class PausablePoller(Poller):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")


@asynccontextmanager
async def acting(actor: LoopActor):
    """The actor, running."""
    with anyio.fail_after(1_000_000):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.run)
            while not actor.running:
                await anyio.lowlevel.checkpoint()
            yield actor
            if actor.running:
                await actor.shutdown(timeout=10)


def one(work=None, *, mailbox=None, **options):
    mailbox = InMemoryMailbox() if mailbox is None else mailbox
    return LoopActor(MainLoop(mailbox, work or Work(), body=int, name="worker", **options)), mailbox


# ------------------------------------------------------------------------------------------------------------- questions


async def test_a_busy_loop_and_a_waiting_one_answer():
    work = Work()
    actor, mailbox = one(work)
    async with acting(actor):
        waiting = await actor.ask(HealthCheckRequest(), timeout=5)
        assert (waiting.name, waiting.healthy, waiting.reason, waiting.in_flight) == ("worker", True, None, 0)
        await mailbox.send(1)
        while not work.begun:
            await anyio.lowlevel.checkpoint()
        busy = await actor.ask(HealthCheckRequest(), timeout=5)
        assert (busy.healthy, busy.in_flight, busy.answered, busy.stopping) == (True, 1, True, False)
        assert 0 <= await actor.ask(PingRequest(), timeout=5) < 5
        work.go.set()


async def test_health_says_what_is_wrong(virtual_clock):
    store = FaultyMailbox()
    store.always("claim", fail(MailboxConnectionError("away")))
    actor, _ = one(mailbox=store)
    async with acting(actor):
        await anyio.sleep(100)
        health = await actor.ask(HealthCheckRequest())
        assert (health.healthy, health.reason) == (False, "MailboxConnectionError: away")


async def test_health_gives_ages(virtual_clock):
    work = Work()
    actor, mailbox = one(work)
    async with acting(actor):
        await mailbox.send(1)
        await anyio.sleep(42)
        health = await actor.ask(HealthCheckRequest())
        assert (health.oldest_beat_age, health.heartbeat_age) == (42, 42)
        work.go.set()


async def test_a_ping_says_how_long_it_was_under_way(virtual_clock):
    actor, _ = one()
    async with acting(actor):
        ping = PingRequest()
        await anyio.sleep(3)
        assert await actor.ask(ping) == 3


async def test_threads_ask_too():
    actor, _ = one()
    healths, errors = [], []

    def ask() -> None:
        try:
            for _ in range(50):
                question = HealthCheckRequest()
                actor.tell(question)
                healths.append(question.ticket.wait_sync(timeout=30))
        except Exception as error:
            errors.append(error)

    async with acting(actor):
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join)
    assert errors == []
    assert len(healths) == 200
    assert all(health.healthy for health in healths)


async def test_what_a_task_of_its_event_loop_tells_is_served_when_tell_returns():
    actor, _ = one()
    async with acting(actor):
        question = PingRequest()
        actor.tell(question)
        assert question.ticket.is_ready
        actor.tell(PauseRequest())
        assert actor.loop.paused


async def test_messages_of_one_sender_are_served_in_their_order():
    actor, _ = one()
    async with acting(actor):
        paused = []
        for _ in range(10):
            actor.tell(PauseRequest())
            actor.tell(first := HealthCheckRequest())
            actor.tell(ResumeRequest())
            actor.tell(second := HealthCheckRequest())
            paused += [(await first.ticket.wait(60)).paused, (await second.ticket.wait(60)).paused]
        assert paused == [True, False] * 10


# ---------------------------------------------------------------------------------------------------------- pause, resume


async def test_pause_and_resume_while_every_handler_is_busy():
    work = Work()
    actor, mailbox = one(work)
    async with acting(actor):
        await mailbox.send(1)
        while not work.begun:
            await anyio.lowlevel.checkpoint()
        await actor.ask(PauseRequest(), timeout=5)
        health = await actor.ask(HealthCheckRequest(), timeout=5)
        assert (health.healthy, health.reason, health.paused, health.in_flight) == (False, "paused", True, 1)
        await mailbox.send(2)
        work.go.set()
        while not work.done:
            await anyio.lowlevel.checkpoint()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert work.begun == [1]
        await actor.ask(ResumeRequest(), timeout=5)
        await settled(mailbox)
    assert work.done == [1, 2]


async def test_a_pause_that_waits_for_its_store_holds_up_no_other_message(virtual_clock):
    async def nothing_for_long(claim):
        await anyio.sleep(20)
        return []

    store = FaultyMailbox()
    store.always("claim", shielded(nothing_for_long))
    actor, _ = one(mailbox=store)
    async with acting(actor):
        await anyio.sleep(1)
        pause = PauseRequest()
        actor.tell(pause)
        assert (await actor.ask(HealthCheckRequest())).paused
        assert virtual_clock.now == 1
        await pause.ticket.wait()
        assert virtual_clock.now == 20


async def test_a_pause_ends_with_the_actor():
    actor, _ = one()
    async with acting(actor):
        await actor.ask(PauseRequest(), timeout=5)
    assert not actor.loop.paused


async def test_a_foreign_loop_is_paused_by_its_own_methods_or_says_that_it_cannot():
    poller = PausablePoller()
    async with acting(LoopActor(poller)) as actor:
        await actor.ask(PauseRequest(), timeout=5)
        assert (await actor.ask(HealthCheckRequest(), timeout=5)).paused
        await actor.ask(ResumeRequest(), timeout=5)
    assert poller.told == ["pause", "resume"]
    async with acting(LoopActor(Poller())) as actor:
        with pytest.raises(ControlRefusedError, match=r"loop 'poller' cannot be paused: .*pause\(\) and resume\(\)"):
            await actor.ask(PauseRequest(), timeout=5)
        assert (await actor.ask(HealthCheckRequest(), timeout=5)).healthy


async def test_what_a_foreign_loop_raises_is_the_askers_and_ends_nothing():
    class Broken(PausablePoller):
        def pause(self) -> None:
            raise RuntimeError("no")

    async with acting(LoopActor(Broken())) as actor:
        with pytest.raises(RuntimeError, match="no"):
            await actor.ask(PauseRequest(), timeout=5)
        assert (await actor.ask(HealthCheckRequest(), timeout=5)).healthy


# --------------------------------------------------------------------------------------------------------------- the end


async def test_a_drain_lets_work_finish_however_long_it_takes(virtual_clock):
    work = Work()
    actor, mailbox = one(work)
    async with acting(actor):
        await mailbox.send_many([1, 2])
        await anyio.sleep(1)
        drain = DrainRequest()
        actor.tell(drain)
        await anyio.sleep(1_000)
        assert (await actor.ask(HealthCheckRequest())).reason == "stopping"
        assert not drain.ticket.is_ready
        work.go.set()
        assert await drain.ticket.wait(60) is True
    assert work.done == [1]
    assert (await mailbox.counts()).pending == 1


@pytest.mark.parametrize(("shielded", "ends"), [(0, 21), (3, 24), (9, 30)])
async def test_a_shutdown_cancels_when_its_time_is_over(virtual_clock, shielded, ends):
    actor, mailbox = one(Work(shielded=shielded))
    async with acting(actor):
        await mailbox.send(1)
        await anyio.sleep(1)
        assert await actor.ask(ShutdownRequest(timeout=20)) is False
        assert virtual_clock.now == ends
    assert (await mailbox.counts()).pending == 1


async def test_a_settlement_that_hangs_is_cut_off_after_the_grace(virtual_clock):
    store = FaultyMailbox()
    store.always("settle", hang)
    work = Work()
    work.go.set()
    actor, _ = one(work, mailbox=store)
    async with acting(actor):
        await store.send(1)
        await anyio.sleep(1)
        assert await actor.ask(ShutdownRequest(timeout=2, cancel_grace=1)) is False
        assert virtual_clock.now == 4


async def test_of_two_shutdowns_the_sooner_counts_and_both_are_answered(virtual_clock):
    actor, mailbox = one()
    async with acting(actor):
        await mailbox.send(1)
        await anyio.sleep(1)
        requests = DrainRequest(), ShutdownRequest(timeout=100), ShutdownRequest(timeout=7), ShutdownRequest(timeout=50)
        for request in requests:
            actor.tell(request)
        assert [await request.ticket.wait() for request in requests] == [False] * 4
        assert virtual_clock.now == 8


async def test_a_clean_shutdown_says_so_and_a_paused_loop_is_shut_down_at_once(virtual_clock):
    actor, _ = one()
    async with acting(actor):
        await actor.ask(PauseRequest())
        assert await actor.ask(ShutdownRequest()) is True
        assert virtual_clock.now == 0


async def test_an_actor_runs_again():
    work = Work()
    work.go.set()
    actor, mailbox = one(work)
    for job in range(3):
        async with acting(actor):
            await mailbox.send(job)
            await settled(mailbox)
            assert await actor.ask(ShutdownRequest(), timeout=5) is True
    assert work.done == [0, 1, 2]


async def test_a_handler_may_tell_its_own_loop_to_stop():
    mailbox = InMemoryMailbox()

    async def handle(job: int) -> None:
        actor.tell(ShutdownRequest())

    actor = LoopActor(MainLoop(mailbox, handle))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.run)
            await mailbox.send(1)
    assert (await mailbox.counts()).settled == 1


@pytest.mark.parametrize("grouped", [False, True])
async def test_a_shutdown_from_inside_a_handler_only_asks(grouped):
    mailbox, answers = InMemoryMailbox(), []

    async def handle(job: int) -> None:
        async with anyio.create_task_group() as tasks:  # also from its child tasks

            async def child() -> None:
                answers.append(await actor.shutdown())

            tasks.start_soon(child)
        answers.append(await actor.shutdown())
        await anyio.sleep(0.01)
        answers.append("finished")

    loop = MainLoop(mailbox, handle)
    group = LoopGroup([loop], guardian=False)
    actor = group.actors[0] if grouped else LoopActor(loop)
    await mailbox.send_many([1, 2])
    with anyio.fail_after(100):
        await (group.run(install_signals=False) if grouped else actor.run())
    assert answers == [True, True, "finished"]
    counts = await mailbox.counts()
    assert (counts.settled, counts.pending) == (1, 1)


async def test_a_handlers_shutdown_of_another_actor_waits_for_its_end(virtual_clock):
    other, other_box = one(work := Work())
    mailbox, answers = InMemoryMailbox(), []

    async def handle(job: int) -> None:
        answers.append((await other.shutdown(timeout=7), anyio.current_time()))

    actor = LoopActor(MainLoop(mailbox, handle))
    async with acting(other), acting(actor):
        await other_box.send(1)
        await anyio.sleep(1)
        await mailbox.send(1)
        await settled(mailbox)
    assert work.begun == [1]
    assert answers == [(False, 8)]


async def test_a_crash_comes_out_of_the_run_and_answers_who_waits():
    class Crashing(Poller):
        async def run(self) -> None:
            await self.stop.wait()
            raise ValueError("broken")

    poller = Crashing()
    actor = LoopActor(poller)
    drain = DrainRequest()
    with pytest.raises(ValueError, match="broken"), anyio.fail_after(10):  # noqa: PT012
        async with anyio.create_task_group() as tasks:

            async def tell() -> None:
                while not actor.running:
                    await anyio.lowlevel.checkpoint()
                actor.tell(drain)

            tasks.start_soon(tell)
            try:
                await actor.run()
            except ValueError as error:
                raised = error
        raise raised
    assert await drain.ticket.wait(0) is False


@pytest.mark.parametrize("ends_well", [True, False])
async def test_a_resume_that_raises_at_the_end_hides_nothing(caplog, ends_well):
    class Stuck(PausablePoller):
        def resume(self) -> None:
            raise RuntimeError("no way back")

        async def run(self) -> None:
            await super().run()
            if not ends_well:
                raise ValueError("broken")

    actor = LoopActor(Stuck())

    async def pause_and_stop() -> None:
        while not actor.running:
            await anyio.lowlevel.checkpoint()
        await actor.ask(PauseRequest(), timeout=5)
        actor.tell(ShutdownRequest())

    errors = []
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pause_and_stop)
            try:
                await actor.run()
            except Exception as error:
                errors.append(error)
    assert [repr(error) for error in errors] == ([] if ends_well else ["ValueError('broken')"])
    assert "loop 'poller' has ended paused, and its resume() raised" in caplog.text
    assert "no way back" in caplog.text


async def test_cancelled_it_answers_who_waits():
    actor, mailbox = one(Work(shielded=0.01))
    drain, pause = DrainRequest(), PauseRequest()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.run)
            while not actor.running:
                await anyio.lowlevel.checkpoint()
            actor.tell(drain)
            await mailbox.send(1)
            tasks.cancel_scope.cancel()
            actor.tell(pause)
    with pytest.raises((LoopNotRunningError, TicketAbandonedError)):
        await pause.ticket.wait(0)
    with suppress(LoopNotRunningError):  # it was cancelled before it came to the message
        assert await drain.ticket.wait(0) is False


# --------------------------------------------------------------------------------------------------------- never a hang


async def test_nobody_is_there_before_the_start_and_after_the_end():
    actor, _ = one()
    kinds = (HealthCheckRequest, PingRequest, PauseRequest, ResumeRequest, DrainRequest, ShutdownRequest)
    for kind in kinds:
        with pytest.raises(
            LoopNotRunningError, match=f"loop 'worker' is not running, so it cannot take .*{kind.__name__}"
        ):
            await actor.ask(kind())
    async with acting(actor):
        pass
    for kind in kinds:
        message = kind()
        actor.tell(message)
        assert message.ticket.is_ready
        with pytest.raises(LoopNotRunningError):
            await message.ticket.wait()


FORK = """
import anyio, os, sys, threading, time
from mainspring import ConfigError, Heartbeat, LoopActor, LoopThread, PingRequest, ShutdownRequest
class Poller:
    name, running, heartbeat = "poller", False, Heartbeat()
    async def run(self): await anyio.sleep_forever()
    async def shutdown(self, *, timeout=30): return True
actor, own = LoopActor(Poller()), LoopActor(Poller())
with LoopThread(stop_timeout=0) as thread:
    thread.submit(actor.run)
    while not actor.running:
        time.sleep(0.001)
    held, forked = threading.Event(), threading.Event()
    def hold():  # for ever, in the child
        with actor._lock, own._lock:
            held.set()
            forked.wait(60)
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        assert not actor.running
        for message in (PingRequest(), ShutdownRequest()):
            try:
                print(actor.tell(message), "was not refused")
            except ConfigError as error:
                assert f"runs in process {os.getppid()}, from which this one was forked" in str(error), error
        with LoopThread(stop_timeout=0) as thread:  # one that did not run works here
            thread.submit(own.run)
            while not own.running:
                time.sleep(0.001)
            ping = PingRequest()
            own.tell(ping)
            assert ping.ticket.wait_sync(60) >= 0
            own.tell(ShutdownRequest())
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    forked.set()
    holder.join()
    ping = PingRequest()
    actor.tell(ping)
    assert ping.ticket.wait_sync(60) >= 0
"""


@pytest.mark.slow
def test_a_forked_child_is_told_that_the_actor_runs_in_its_parent():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


async def test_threads_that_tell_an_actor_as_it_ends_all_get_an_answer():
    actor, _ = one()
    go, tickets = threading.Event(), []

    def tell() -> None:
        go.wait(30)
        for _ in range(300):
            message = HealthCheckRequest()
            actor.tell(message)
            tickets.append(message.ticket)

    threads = [threading.Thread(target=tell) for _ in range(3)]
    for thread in threads:
        thread.start()
    async with acting(actor):
        go.set()
        while not tickets:
            await anyio.sleep(0.001)
        await actor.ask(ShutdownRequest(), timeout=30)
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join)
    assert len(tickets) == 900
    assert all(ticket.is_ready for ticket in tickets)


async def test_a_message_that_comes_in_the_last_moment_is_refused(anyio_backend):
    message, actor = PingRequest(), LoopActor(MainLoop(InMemoryMailbox(), quick))
    async with actor.serving():
        await anyio.wait_all_tasks_blocked()
        thread = threading.Thread(target=actor.tell, args=(message,))
        thread.start()
        thread.join()  # it is in the inbox, and the event loop has no turn before the end
    with pytest.raises(LoopNotRunningError):
        await message.ticket.wait(5)
    async with actor.serving():
        await actor.ask(PingRequest(), 5)


def test_a_signal_handler_may_tell_an_actor_of_another_thread(anyio_backend):
    """Also one that comes in between while the main thread tells it something, wherever it is with that."""
    backend, options = anyio_backend
    actor = LoopActor(Poller())

    def interrupted(line: int) -> bool:
        early, late = PingRequest(), PingRequest()
        with Interruption((mainspring,), line, lambda: actor.tell(late)) as between:
            actor.tell(early)
        assert early.ticket.wait_sync(30) >= 0
        if between.happened:
            assert late.ticket.wait_sync(30) >= 0
        return between.happened

    def every_line() -> None:
        lines = 0
        while interrupted(lines):
            lines += 1
        assert lines > 10

    thread = LoopThread(backend=backend, backend_options=options)
    thread.start()
    try:
        ticket = thread.submit(actor.run)
        while not actor.running:
            time.sleep(0.001)
        in_thread(every_line)
        actor.tell(ShutdownRequest())
        ticket.wait_sync(30)
    finally:
        thread.stop(timeout=0)


@dataclass(frozen=True)
class Frobnicate(ControlMessage[int]):
    ticket: Ticket[int] = field(default_factory=Ticket)


async def test_an_unknown_message_is_refused_by_its_name():
    actor, _ = one()
    async with acting(actor):
        with pytest.raises(ControlRefusedError, match="loop 'worker' knows no Frobnicate: it knows health check"):
            await actor.ask(Frobnicate(), timeout=5)
        with pytest.raises(
            InvalidParameterError, match=r"takes control messages such as PauseRequest\(\), not 'pause'"
        ):
            actor.tell("pause")
        with pytest.raises(InvalidParameterError, match="takes control messages"):
            actor.tell(PauseRequest)


async def test_a_message_is_told_once():
    actor, _ = one()
    async with acting(actor):
        message = PingRequest()
        await actor.ask(message, timeout=5)
        with pytest.raises(ConfigError, match="has a writer already"):
            actor.tell(message)


@pytest.mark.parametrize("values", [{"timeout": -1}, {"timeout": "soon"}, {"cancel_grace": float("nan")}])
async def test_bad_times_are_refused_where_they_are_given(values):
    [name] = values
    with pytest.raises(InvalidParameterError, match=f"ShutdownRequest: {name} must be 0 or more seconds"):
        ShutdownRequest(**values)


async def test_what_is_no_loop_is_no_actor():
    with pytest.raises(ConfigError, match=r"is no loop; it needs run\(\)"):
        LoopActor(object())
    actor, _ = one()
    with pytest.raises(ConfigError, match="is an actor already"):
        LoopActor(actor)
    async with acting(actor):
        with pytest.raises(ConfigError, match="already running"):
            await actor.run()
        assert (await actor.ask(HealthCheckRequest(), timeout=5)).healthy


# ------------------------------------------------------------------------------------------------------- all of them


async def test_all_are_asked_at_once_with_one_deadline(virtual_clock):
    actors = [one()[0] for _ in range(5)]

    class Deaf(LoopActor):
        def _serve_inbox(self) -> None:
            pass

    deaf = [Deaf(Poller()) for _ in range(3)]
    ended, _ = one()
    async with anyio.create_task_group() as tasks:
        for actor in (*actors, *deaf):
            tasks.start_soon(actor.run)
        await anyio.sleep(1)
        healths = await check_health([deaf[0], *actors, ended, *deaf[1:]], timeout=2)
        assert virtual_clock.now == 3
        tasks.cancel_scope.cancel()
    assert [health.healthy for health in healths] == [False, *[True] * 5, False, False, False]
    assert [health.answered for health in healths] == [False, *[True] * 5, False, False, False]
    for unanswered in (healths[0], *healths[-2:]):
        assert unanswered.reason == "TicketTimeoutError: loop 'poller' has not answered within 2 s"
    assert "loop 'worker' is not running" in healths[6].reason
    assert (healths[0].name, healths[0].heartbeat_age) == ("poller", 3)


@pytest.mark.parametrize("timeout", [-1, math.nan, "5", True])
async def test_a_health_check_needs_seconds(anyio_backend, timeout):
    with pytest.raises(InvalidParameterError, match="timeout must be 0 or more seconds"):
        await check_health([], timeout=timeout)


async def test_a_health_check_needs_actors(anyio_backend):
    with pytest.raises(InvalidParameterError, match="actors are LoopActor objects"):
        await check_health([one()[0], "worker"])


async def test_a_loop_whose_thread_is_blocked_does_not_answer_in_time():
    blocked, go = threading.Event(), threading.Event()
    mailbox = InMemoryMailbox("blocked")

    async def handle(job: int) -> None:
        blocked.set()
        go.wait(60)

    actor = LoopActor(MainLoop(mailbox, handle))

    async def main() -> None:
        await mailbox.send(1)
        await actor.run()

    thread = threading.Thread(target=anyio.run, args=[main])
    thread.start()
    try:
        assert await anyio.to_thread.run_sync(blocked.wait, 30)
        [health] = await check_health([actor], timeout=0.1)
        assert (health.healthy, health.answered) == (False, False)
        question = PingRequest()
        with pytest.raises(TicketTimeoutError):
            await actor.ask(question, timeout=0.1)
        go.set()
        assert await question.ticket.wait(30) >= 0.1  # late, and not lost
        assert await actor.ask(ShutdownRequest(), timeout=30) is True
    finally:
        go.set()
        await anyio.to_thread.run_sync(thread.join, 30)


async def test_whoever_answers_a_ticket_himself_harms_nobody(anyio_backend):
    """Neither where the message is refused, nor where the actor serves it."""

    async def handle(job: int) -> None:
        pass

    async with InMemoryMailbox() as mailbox:
        actor = LoopActor(MainLoop(mailbox, handle))
        early = PingRequest()
        early.ticket.complete(0.0)
        actor.tell(early)  # not running: there is no error to be told any more
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(actor.run)
            while not actor.running:
                await anyio.sleep(0.001)
            for message in (PingRequest(), PauseRequest(), DrainRequest()):
                message.ticket.fail(LookupError("mine"))
                actor.tell(message)
            assert await actor.shutdown(timeout=5)


# ------------------------------------------------------------------------------------------------ messages of one's own


@dataclass(frozen=True)
class SetRate(ControlMessage[float]):
    per_second: float = 0.0


TENANT: ContextVar[str] = ContextVar("tenant", default="none")


def told(on_message) -> LoopActor:
    mailbox = InMemoryMailbox("jobs", body=int)
    return LoopActor(MainLoop(mailbox, Work(), name="worker"), on_message=on_message)


async def test_what_on_message_returns_is_the_answer():
    def plain(message: SetRate):
        return 2 * message.per_second

    async def waits(message: SetRate):
        await anyio.sleep(0.001)
        return 2 * message.per_second

    class Answers:
        async def __call__(self, message: SetRate):
            message.ticket.complete(2 * message.per_second)

    for on_message in (plain, waits, lambda message: waits(message), partial(waits), Answers()):
        actor = told(on_message)
        async with actor.loop.mailbox, acting(actor):
            assert await actor.ask(SetRate(per_second=2), timeout=5) == 4
            assert (await actor.ask(HealthCheckRequest(), timeout=5)).healthy
            actor.tell(DrainRequest())


async def test_messages_that_the_actor_knows_do_not_come_to_on_message():
    came = []
    actor = told(came.append)
    async with actor.loop.mailbox, acting(actor):
        await actor.ask(PauseRequest(), timeout=5)
        await actor.ask(ResumeRequest(), timeout=5)
        await actor.ask(PingRequest(), timeout=5)
        await actor.ask(message := SetRate(), timeout=5)
        await actor.ask(DrainRequest(), timeout=5)
    assert came == [message]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (ValueError("too fast"), ValueError),
        (SystemExit(3), TaskExitError),
        (asyncio.CancelledError(), TaskExitError),
    ],
)
async def test_an_error_of_on_message_is_the_askers_and_ends_nothing(is_async, error, arrives):
    def plain(message):
        raise error

    async def waits(message):
        await anyio.lowlevel.checkpoint()
        raise error

    actor = told(waits if is_async else plain)
    async with actor.loop.mailbox, acting(actor):
        for _ in range(2):
            with pytest.raises(arrives):
                await actor.ask(SetRate(), timeout=5)
        assert await actor.ask(DrainRequest(), timeout=5)


@pytest.mark.filterwarnings("error")
async def test_an_answer_that_has_not_run_is_an_error():
    async def later(message):
        return 1

    async def forgets_await(message):
        return later(message)

    for on_message in (forgets_await, lambda message: (step for step in "ab")):
        actor = told(on_message)
        async with actor.loop.mailbox, acting(actor):
            with pytest.raises(InvalidParameterError, match=r"on_message .* returned a .*, so its work has not run"):
                await actor.ask(SetRate(), timeout=5)
            actor.tell(DrainRequest())


async def test_an_on_message_that_waits_holds_up_no_other_message_and_ends_with_the_actor(virtual_clock):
    async def never(message):
        await anyio.sleep_forever()

    actor = told(never)
    async with actor.loop.mailbox, acting(actor):
        actor.tell(waiting := SetRate())
        assert await actor.ask(PingRequest(), timeout=1) == 0
        assert await actor.ask(DrainRequest(), timeout=1)
        with pytest.raises(LoopNotRunningError, match="loop 'worker' is not running"):
            await waiting.ticket.wait(timeout=10)


async def test_each_control_message_has_a_context_of_its_own():
    seen = []

    async def finds(message) -> None:
        seen.append(TENANT.get())
        TENANT.set("of another")
        await anyio.lowlevel.checkpoint()
        seen.append(TENANT.get())

    def finds_plainly(message) -> None:
        seen.append(TENANT.get())
        TENANT.set("of another")

    class Foreign(PausablePoller):
        def pause(self) -> None:
            finds_plainly(None)

    for actor, message in (
        (told(finds), SetRate),
        (told(finds_plainly), SetRate),
        (LoopActor(Foreign()), PauseRequest),
    ):
        seen.clear()
        token = TENANT.set("of the loop")
        async with getattr(actor.loop, "mailbox", None) or nullcontext(), acting(actor):
            TENANT.set("of the asker")
            for _ in range(3):
                await actor.ask(message(), timeout=5)
            assert TENANT.get() == "of the asker"
            actor.tell(DrainRequest())
        TENANT.reset(token)
        assert seen[0] == "of the loop"
        assert seen == ["of the loop"] * 3 or seen == ["of the loop", "of another"] * 3


async def generates(message):
    yield message


@pytest.mark.parametrize(
    ("on_message", "says"),
    [
        (5, "on_message must be a function of .message., not 5"),
        (generates, "on_message generates is a generator, which would never run"),
        (Work, "on_message Work is a class"),
    ],
)
async def test_what_cannot_be_on_message_is_refused(on_message, says):
    with pytest.raises(ConfigError, match=says):
        told(on_message)


async def test_a_group_passes_messages_of_ones_own_on():
    actor = told(lambda message: 2 * message.per_second)
    async with LoopGroup([actor]) as group:
        assert await group.actors[0].ask(SetRate(per_second=3), timeout=5) == 6


async def test_a_loop_that_is_told_to_stop_by_itself_stops_its_actor(virtual_clock):
    """By its own calls, past the actor: that is then stopping as after a DrainRequest."""

    async def handle(_: str):
        actor.loop.request_shutdown()
        assert actor.stopped.is_set()
        health.append((await actor.ask(HealthCheckRequest())).reason)

    health = []
    async with InMemoryMailbox() as mailbox:
        actor = LoopActor(MainLoop(mailbox, handle))
        await mailbox.send("x")
        await actor.run()
    assert health == ["stopping"]
