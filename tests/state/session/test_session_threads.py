"""Events that other threads dispatch: in their order, none lost, each ticket answered."""

from __future__ import annotations

import os
import threading
import time

import anyio
import pytest
from anyio import to_thread
from session_state import FULL, Added, MemoryJournal, Mood, Said, State

from mainspring import ConfigError, JournalError, SerializationError, Session, SessionClosedError, SessionFullError
from mainspring.state.session.writer import MOST_WAITING

pytestmark = pytest.mark.anyio


MOOD = Mood(1)


def made(kept):
    return Session.open(State, journal=MemoryJournal()) if kept else Session(State)


@pytest.fixture(params=[False, True], ids=["in memory", "with a journal"])
def session(request):
    return made(request.param)


async def in_thread(fn, *args):
    return await to_thread.run_sync(fn, *args)


async def test_threads_lose_no_event_and_keep_their_order(anyio_backend, session):
    def say(who):
        for number in range(50):
            session.dispatch_nowait(Said(who, str(number)))

    async with session, anyio.create_task_group() as tasks:
        for who in "abcd":
            tasks.start_soon(in_thread, say, who)
    assert len(session.state.said) == 200
    for who in "abcd":
        assert [said.text for said in session.state.said if said.who == who] == [str(number) for number in range(50)]


async def test_a_thread_waits_for_the_result(anyio_backend, session):
    told = []
    session.dispatcher.subscribe(Mood, lambda mood: told.append(threading.get_ident()))

    def work():
        result = session.dispatch_nowait(Mood(2)).wait_sync(timeout=10)
        refused = session.dispatch_nowait(Added(-1)).wait_sync(timeout=10)
        return result.changed, result.seq, len(refused.errors)

    async with session:
        assert await in_thread(work) == (("mood", "count"), 1, 1)
    assert told == [threading.get_ident()]


async def test_a_child_takes_them_too(anyio_backend, session):
    child = session.child("one", State)
    async with session:
        await in_thread(lambda: child.dispatch_nowait(Added(3)).wait_sync(timeout=10))
        assert child.state.total == 3


async def test_within_a_transaction_they_are_part_of_it(anyio_backend, session):
    async with session:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - what leaves the block is what is looked at
            async with session.transaction():
                await in_thread(lambda: session.dispatch_nowait(Added(3)).wait_sync(timeout=10))
                assert session.state.total == 3
                raise ZeroDivisionError
        assert session.state.total == 0


async def test_a_transaction_of_others_goes_first(anyio_backend, session):
    async with session:
        async with session.transaction():
            await session.dispatch(Added(1))
            thread = threading.Thread(target=session.dispatch_nowait, args=(Added(2),))
            thread.start()
            while thread.is_alive():
                await anyio.sleep(0.001)
            await anyio.sleep(0)
            assert session.state.total == 1
        await session.dispatch(Added(4))
        assert session.state.total == 7


async def test_what_is_not_entered_refuses_and_says_so(anyio_backend, session):
    async with session:
        await session.dispatch(Added(1))
    with pytest.raises(SessionClosedError, match="session 'session' is not open: other threads dispatch to it inside"):
        await in_thread(session.dispatch_nowait, Added(2))


async def test_what_meets_the_end_is_applied_or_refused(anyio_backend):
    for kept in (False, True) * 5:
        session, tickets, refused = made(kept), [], []
        entered = threading.Event()

        def flood(session=session, tickets=tickets, refused=refused, entered=entered):
            entered.wait(10)
            while not refused:
                try:
                    tickets.append(session.dispatch_nowait(Added(1)))
                    time.sleep(0)  # so that the event loop keeps up
                except SessionClosedError as error:
                    refused.append(error)

        thread = threading.Thread(target=flood)
        thread.start()
        async with session:
            entered.set()
            while len(tickets) < 20:
                await anyio.sleep(0)
        await in_thread(thread.join)
        assert all(ticket.is_ready for ticket in tickets)
        assert session.state.total == len(tickets)


async def test_an_error_is_the_tickets(anyio_backend):
    journal = MemoryJournal()
    journal.fail.append(FULL)
    session = Session.open(State, journal=journal)

    def work():
        with pytest.raises(JournalError, match="the disk is full"):
            session.dispatch_nowait(Added(1)).wait_sync(timeout=10)
        with pytest.raises(SerializationError, match="event Added"):
            session.dispatch_nowait(Added("x")).wait_sync(timeout=10)

    async with session:
        await in_thread(work)
        assert session.state.total == 0


@pytest.mark.slow
@pytest.mark.loops("asyncio")
async def test_too_many_that_wait_are_refused(anyio_backend):
    session, begun, over = Session(State), anyio.Event(), anyio.Event()

    async def hold() -> None:
        async with session.transaction():
            begun.set()
            await over.wait()

    async with session, anyio.create_task_group() as tasks:
        tasks.start_soon(hold)
        await begun.wait()
        for _ in range(MOST_WAITING - 1):
            session.dispatch_nowait(MOOD)
        await in_thread(session.dispatch_nowait, MOOD)
        with pytest.raises(SessionFullError, match="100,000 events wait to be applied"):
            await in_thread(session.dispatch_nowait, MOOD)
        with pytest.raises(SessionFullError, match="100,000 events wait to be applied"):
            session.dispatch_nowait(MOOD)
        over.set()
    assert session.seq == MOST_WAITING


async def enter(session):
    await session.__aenter__()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_that_has_gone_is_told(backend):
    session = Session(State)
    anyio.run(enter, session, backend=backend)
    errors = []

    def work():
        try:
            session.dispatch_nowait(Added(1))
        except SessionClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert len(errors) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
async def test_a_thread_of_a_forked_child_is_refused(anyio_backend, session):
    async with session:
        child = os.fork()
        if child == 0:
            status = []

            def work():
                try:
                    session.dispatch_nowait(Added(1))
                except ConfigError:
                    status.append(0)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join(10)
            os._exit(status[0] if status else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
