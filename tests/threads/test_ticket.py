"""``Ticket``: one answer, one writer, one reader; whatever threads they are in, nothing hangs and nothing is answered twice."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import subprocess
import sys
import threading

import anyio
import anyio.to_thread
import pytest

from interrupts import Interruption, in_thread
from mainspring import (
    ConfigError,
    InvalidParameterError,
    Ticket,
    TicketAbandonedError,
    TicketAlreadyCompletedError,
    TicketTimeoutError,
    threads,
)
from mainspring.core.process import call_soon, event_loop
from stopwatch import Stopwatch

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]


@pytest.fixture
def eager_switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# -------------------------------------------------------------------------------------------------------------- answers


async def test_an_answer_is_waited_for(anyio_backend):
    ticket = Ticket("price")
    answers = []

    async def reader():
        answers.append(await ticket.wait())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader)
        await anyio.wait_all_tasks_blocked()
        assert not ticket.is_ready
        ticket.complete(7)
        assert ticket.is_ready
    assert answers == [7]
    assert await ticket.wait(timeout=0) == 7  # it stays


async def test_an_answer_from_a_thread(anyio_backend):
    ticket = Ticket()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, ticket.complete, "hello")
        with anyio.fail_after(30):
            assert await ticket.wait() == "hello"


def test_an_answer_to_a_thread():
    ticket = Ticket()
    writer = threading.Timer(0.01, ticket.complete, ("hello",))
    writer.start()
    assert ticket.wait_sync(30) == "hello"
    assert ticket.wait_sync(0) == "hello"
    writer.join()


async def test_an_error_is_raised_to_the_reader(anyio_backend):
    ticket = Ticket()
    ticket.fail(LookupError("no such row"))
    with pytest.raises(LookupError, match="no such row"):
        await ticket.wait()
    with pytest.raises(LookupError, match="no such row"):
        await anyio.to_thread.run_sync(ticket.wait_sync)


def answer_of(ticket):
    """The text of what it was completed with, or has failed with."""
    try:
        return str(ticket.wait_sync(0))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("first", ["complete", "fail"])
@pytest.mark.parametrize("second", ["complete", "fail"])
async def test_a_second_answer_is_refused(anyio_backend, first, second):
    ticket = Ticket("price")
    getattr(ticket, first)(ValueError("one"))
    with pytest.raises(
        TicketAlreadyCompletedError, match=rf"ticket 'price' cannot be {second}\w+: it was {first}\w+ befo"
    ):
        getattr(ticket, second)(ValueError("two"))
    assert answer_of(ticket) == "one"


@pytest.mark.parametrize("first", ["complete", "fail", "offer", "offer_error"])
@pytest.mark.parametrize("hold", [lambda ticket: ticket, Ticket.writer])
async def test_an_offer_is_the_answer_unless_there_is_one(anyio_backend, first, hold):
    ticket = Ticket("price")
    writer = hold(ticket)
    assert getattr(writer, first)(ValueError("one")) in (None, True)
    assert writer.offer(2) is False
    assert writer.offer_error(ValueError("two")) is False
    assert answer_of(ticket) == "one"
    with pytest.raises(InvalidParameterError, match="a ticket fails with an exception, not 3"):
        writer.offer_error(3)


# ------------------------------------------------------------------------------------------------------------- in time


async def test_a_wait_has_an_end(virtual_clock):
    ticket = Ticket("price")
    with pytest.raises(TicketTimeoutError, match=r"ticket 'price' was not completed within 2\.5 s"):
        await ticket.wait(timeout=2.5)
    assert virtual_clock.now == 2.5
    ticket.complete(1)  # late, and still good
    assert await ticket.wait() == 1


def test_a_blocking_wait_has_an_end():
    with pytest.raises(TicketTimeoutError, match=r"within 0\.01 s"):
        Ticket().wait_sync(0.01)


async def test_a_cancelled_reader_leaves_the_ticket_whole(anyio_backend):
    ticket = Ticket()
    with anyio.move_on_after(0):
        await ticket.wait()
    ticket.complete(3)
    assert await ticket.wait() == 3


@pytest.mark.parametrize("timeout", [-1, float("nan"), "2", True])
async def test_a_bad_timeout(anyio_backend, timeout):
    with pytest.raises(InvalidParameterError, match="timeout must be 0 or more seconds, or None, not"):
        await Ticket().wait(timeout)
    with pytest.raises(InvalidParameterError, match="timeout must be"):
        Ticket().wait_sync(timeout)


# -------------------------------------------------------------------------------------------------- one reader, one writer


async def test_a_second_reader_is_refused(anyio_backend):
    ticket = Ticket("price")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ticket.wait)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ConfigError, match="ticket 'price' already has a reader that waits for it"):
            await ticket.wait()
        with pytest.raises(ConfigError, match="already has a reader"):
            await anyio.to_thread.run_sync(ticket.wait_sync)
        ticket.complete(1)


async def test_a_second_writer_is_refused(anyio_backend):
    ticket = Ticket("price")
    with ticket.writer() as writer:
        with pytest.raises(ConfigError, match="ticket 'price' has a writer already"):
            ticket.writer()
        writer.complete(1)


async def test_a_blocking_wait_is_refused_on_the_event_loop(anyio_backend):
    ticket = Ticket()
    with pytest.raises(ConfigError, match="would block the event loop; use `await ticket"):
        ticket.wait_sync(1)
    ticket.complete(1)
    assert ticket.wait_sync() == 1  # nothing to wait for


@pytest.mark.parametrize("context", [contextvars.copy_context, contextvars.Context])
async def test_nor_may_a_bare_callback_of_the_event_loop_wait(anyio_backend, context):
    """There anyio does not know on what it runs; it blocks everything all the same."""
    refused, over = [], anyio.Event()

    def wait() -> None:
        try:
            Ticket().wait_sync(1)
        except ConfigError as error:
            refused.append(str(error))
        over.set()

    await anyio.to_thread.run_sync(context().run, call_soon, event_loop(), wait)
    await over.wait()
    assert len(refused) == 1


async def test_a_signal_handler_wakes_the_event_loop_that_it_interrupts(anyio_backend):
    ticket = Ticket()
    before = signal.signal(signal.SIGUSR1, lambda *_: ticket.complete("hello"))
    kill = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    kill.start()
    try:
        with Stopwatch() as watch, anyio.move_on_after(20):  # else nothing else would ever wake it
            assert await ticket.wait() == "hello"
    finally:
        signal.signal(signal.SIGUSR1, before)
        kill.join()
    assert watch.seconds < 3


def test_a_signal_handler_may_answer_wherever_it_interrupts_its_reader():
    def interrupted(line):
        ticket, first = Ticket(), []
        otherwise = threading.Timer(0.02, ticket.offer, ("nobody else",))
        otherwise.start()
        with Interruption((threads, threading), line, lambda: first.append(ticket.offer(line))) as between:
            answer = ticket.wait_sync(60)
        otherwise.cancel()
        # On a slow machine the other one may be first, and always is behind the wait.
        assert answer == (line if first == [True] else "nobody else")
        return between.happened

    def every_line():
        lines = 0
        while interrupted(lines):
            lines += 1
        assert lines > 20

    in_thread(every_line, 120)


@pytest.mark.parametrize("ending", ["complete", "fail", "abandon"])
def test_a_ticket_that_is_ready_has_its_answer(ending):
    """Looked at between any two lines of the writer's, as a reader in another thread may."""

    def outcome(ticket):
        try:
            return ticket.wait_sync(0)
        except Exception as error:
            return type(error)

    def looked_at(line):
        ticket, seen = Ticket(), []
        writer = ticket.writer()
        end = {"complete": lambda: writer.complete(7), "fail": lambda: writer.fail(KeyError("k"))}.get(
            ending, lambda: writer.__exit__(None, None, None)
        )

        def look():
            ready, told = ticket.is_ready, repr(ticket)
            seen.append((ready, outcome(ticket), "waiting" in told))

        with Interruption((threads,), line, look) as between:
            end()
        answer = outcome(ticket)
        assert answer == {"complete": 7, "fail": KeyError}.get(ending, TicketAbandonedError)
        assert seen in ([], [(False, TicketTimeoutError, True)], [(True, answer, False)])
        return between.happened

    def every_line():
        lines = 0
        while looked_at(lines):
            lines += 1
        assert lines > 8

    in_thread(every_line)


FORK = """
import os, sys, threading
from mainspring import ConfigError, Ticket
ticket, own, answered, held = Ticket("price"), Ticket("own"), Ticket(), Ticket("held")
writer = held.writer()
answered.complete(7)
with held._lock:  # a thread of the parent's is at it
    def fork():
        child = os.fork()
        if child == 0:
            for wait in (ticket.wait_sync, lambda: ticket.wait_sync(60), held.wait_sync):
                try:
                    print(wait(), "was not refused")
                except ConfigError as error:
                    assert f"was made in process {os.getppid()}, from which this one was forked" in str(error), error
            assert answered.wait_sync() == 7
            own.complete(5)
            assert own.wait_sync() == 5
            global writer
            del writer  # fails the child's copy
            assert held.is_ready
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    other = threading.Thread(target=fork)
    other.start()
    other.join()
print(ticket.is_ready, held.is_ready)
"""


def test_a_forked_child_does_not_wait_for_what_comes_in_its_parent():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("0\nFalse False\n", "")


async def test_an_error_must_be_one(anyio_backend):
    with pytest.raises(InvalidParameterError, match="fails with an exception, not 'no'"):
        Ticket().fail("no")


# -------------------------------------------------------------------------------------------------- a writer that has died


async def test_a_writer_that_forgets_to_answer(anyio_backend):
    ticket = Ticket("price")
    with ticket.writer() as writer:
        assert not writer.is_ready
    with pytest.raises(TicketAbandonedError, match="ticket 'price': its writer has ended without an answer"):
        await ticket.wait()


async def test_a_writer_that_raises(anyio_backend):
    ticket = Ticket()
    with pytest.raises(ZeroDivisionError), ticket.writer():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        await ticket.wait()


async def test_a_writer_that_is_cancelled(anyio_backend):
    """The cancellation is the writer's alone: the reader gets an error that it can handle."""
    ticket = Ticket()

    async def writing():
        with ticket.writer():
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writing)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    with pytest.raises(TicketAbandonedError, match=r"without an answer \(Cancelled"):
        await ticket.wait()


async def test_a_writer_that_is_dropped(anyio_backend):
    """In a cycle of garbage, while its reader waits."""
    ticket = Ticket()

    class Holder:
        def __init__(self):
            self.writer = ticket.writer()
            self.me = self

    async def drop():
        await anyio.wait_all_tasks_blocked()
        Holder()
        gc.collect()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drop)
        with pytest.raises(TicketAbandonedError), anyio.fail_after(30):
            await ticket.wait()


async def test_a_writer_that_has_answered_may_go(anyio_backend):
    ticket = Ticket()
    with ticket.writer() as writer:
        writer.complete(5)
    del writer
    assert await ticket.wait() == 5


def test_a_writer_that_is_dropped_while_its_reader_comes():
    """As by the collector, which runs in the midst of the reader's own registration: the lock is the reader's then."""

    def dropped(line):
        ticket = Ticket()
        writer = [ticket.writer()]
        threading.Timer(0.02, writer.clear).start()  # for a reader that is not interrupted
        with Interruption((threads,), line, writer.clear) as between, pytest.raises(TicketAbandonedError):
            ticket.wait_sync(30)
        return between.happened

    def every_line():
        lines = 0
        while dropped(lines):
            lines += 1
        assert lines > 8

    in_thread(every_line)


# ----------------------------------------------------------------------------------------------------------------- races


@pytest.mark.slow
def test_of_many_writers_one_is_first(eager_switching):
    for _ in range(10_000 // 8):
        ticket = Ticket()
        gate = threading.Barrier(3)
        won = []

        def write(name, ticket=ticket, gate=gate, won=won):
            gate.wait()
            try:
                ticket.complete(name)
            except TicketAlreadyCompletedError:
                return
            won.append(name)

        writers = [threading.Thread(target=write, args=(name,)) for name in ("a", "b")]
        for writer in writers:
            writer.start()
        gate.wait()
        answer = ticket.wait_sync(30)
        for writer in writers:
            writer.join()
        assert won == [answer]


@pytest.mark.slow
async def test_no_answer_is_missed_between_threads(anyio_backend, eager_switching):
    """A thread answers just when the reader begins to wait, ten thousand times."""
    tickets = [Ticket() for _ in range(10_000)]
    turn = threading.Semaphore(0)

    def write():
        for number, ticket in enumerate(tickets):
            turn.acquire()
            ticket.complete(number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, write)
        with anyio.fail_after(100):
            for number, ticket in enumerate(tickets):
                turn.release()
                assert await ticket.wait() == number
