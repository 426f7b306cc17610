"""Transactions: all or nothing, whatever leaves the block, and one at a time with the other writers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from contextvars import copy_context
from functools import partial

import anyio
import anyio.to_thread
import pytest
from session_state import FULL, Added, MemoryJournal, Mood, State

from mainspring import ConfigError, JournalError, ReducerError, Session, SessionClosedError
from mainspring.state.session import append

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", "journal"])
def journal(request):
    """That of the session, or None where it has none."""
    return MemoryJournal() if request.param == "journal" else None


@pytest.fixture
async def session(journal, anyio_backend):
    if journal is None:
        yield Session(State)
    else:
        async with Session.open(State, journal=journal) as session:
            yield session


def kept(journal):
    return None if journal is None else len(journal.kept)


async def test_all_of_it_is_seen_and_told_at_its_end(session, journal):
    heard, child = [], session.child("kid", State)
    session.dispatcher.subscribe(object, lambda event: heard.append((event, session.state.total, child.state.total)))
    async with session.transaction():
        result = await session.dispatch(Added(1))
        assert result.applied
        assert result.seq == 1
        assert result.delivered == 0
        await child.dispatch(Added(10))
        assert session.dispatch_nowait(Mood(2)).is_ready
        assert (session.state.total, child.state.total, session["mood"]) == (1, 10, Mood(2))
        assert session.snapshot().slices["total"] == 1
        assert heard == []
    assert heard == [(Added(1), 1, 10), (Added(10), 1, 10), (Mood(2), 1, 10)]
    assert kept(journal) in (None, 1)


@pytest.mark.parametrize("leaves", ["well", "badly"])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("used", [True, False])
async def test_a_slice_that_is_registered_meanwhile_is_there_afterwards(anyio_backend, leaves, where, used):
    session, outside = Session(State), copy_context()
    with contextlib.suppress(Stop):
        async with session.transaction():
            await session.dispatch(Added(1))
            here = copy_context() if where == "inside" else outside
            here.run(session.register, Mood, "moods", append)
            assert session["moods"] == ()
            if used:
                await session.dispatch(Mood(3))
            if leaves == "badly":
                raise Stop
    moods = (Mood(3),) if used and leaves == "well" else ()
    assert session["moods"] == moods
    assert session.state.total == (1 if leaves == "well" else 0)
    await session.dispatch(Mood(4))
    assert session["moods"] == (*moods, Mood(4))


class Stop(Exception):
    pass


@pytest.mark.parametrize("how", ["error", "cancel", "exit"])
async def test_nothing_of_it_remains_whatever_leaves_the_block(session, journal, how):
    heard, child = [], session.child("kid", State)
    await session.dispatch(Added(1))
    before, entries = (session.state, child.state, session.seq), kept(journal)
    session.dispatcher.subscribe(object, heard.append)
    with anyio.CancelScope() as scope:
        try:
            async with session.transaction():
                await session.dispatch(Added(5))
                await child.dispatch(Added(6))
                if how == "error":
                    raise KeyError("mine")
                if how == "exit":
                    raise KeyboardInterrupt
                scope.cancel()
                await anyio.sleep_forever()
        except (KeyError, KeyboardInterrupt):
            pass
    assert (session.state, child.state, session.seq) == before
    assert heard == []
    assert kept(journal) == entries
    assert (await session.dispatch(Added(2))).seq == 2
    assert session.state.total == 3


async def test_others_see_nothing_of_it_and_wait_for_its_end_in_their_order(session):
    order = []

    async def write(number):
        order.append((number, (await session.dispatch(Added(number))).seq))

    async with anyio.create_task_group() as tasks:
        seen = anyio.Event()

        async def other():
            assert session.state.total == 0
            tasks.start_soon(write, 100)
            await anyio.wait_all_tasks_blocked()
            seen.set()

        tasks.start_soon(other)
        async with session.transaction():
            await session.dispatch(Added(1))
            await seen.wait()
            await session.dispatch(Added(2))
        assert session.state.total >= 3
    assert order == [(100, 3)]
    assert session.state.total == 103


async def test_they_are_one_after_the_other(session):
    running, most = 0, 0

    async def transact(number):
        nonlocal running, most
        async with session.transaction():
            running += 1
            most = max(most, running)
            before = session.state.total
            await anyio.lowlevel.checkpoint()
            await session.dispatch(Added(number))
            await anyio.lowlevel.checkpoint()
            assert session.state.total == before + number
            running -= 1

    async with anyio.create_task_group() as tasks:
        for number in range(30):
            tasks.start_soon(transact, number)
            tasks.start_soon(session.dispatch, Added(1))
    assert most == 1
    assert session.state.total == sum(range(30)) + 30


async def test_tasks_started_inside_are_inside_until_it_ends(session):
    async with anyio.create_task_group() as outer:
        async with session.transaction():
            async with anyio.create_task_group() as tasks:
                for number in range(10):
                    tasks.start_soon(session.dispatch, Added(number))
            assert session.state.total == 45
            outer.start_soon(late, session)
        assert session.state.total == 45
    assert session.state.total == 46


async def late(session):
    await anyio.sleep(0.01)
    await session.dispatch(Added(1))


async def test_a_failed_reducer_does_not_end_it(session):
    async with session.transaction():
        await session.dispatch(Added(1))
        (error,) = (await session.dispatch(Added(-1))).errors
        assert isinstance(error, ReducerError)
        await session.dispatch(Added(2))
    assert session.state.total == 3


async def test_one_in_another_is_refused(session):
    async with session.transaction():
        with pytest.raises(ConfigError, match="this code runs in a transaction already"):
            async with session.child("kid", State).transaction():
                pass
        await session.dispatch(Added(1))
    assert session.state.total == 1
    transaction = session.transaction()
    async with transaction:
        pass
    with pytest.raises(ConfigError, match="a transaction is entered once"):
        async with transaction:
            pass


class Picky(Mood):
    def __eq__(self, other):
        raise ValueError("the truth of it is ambiguous")  # as that of an array is

    __hash__ = None


async def test_events_need_not_be_comparable(anyio_backend):
    session = Session(State)

    async def transact():
        async with session.transaction():
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(transact)
        await anyio.wait_all_tasks_blocked()
        async with anyio.create_task_group() as given_up:
            for number in range(3):
                given_up.start_soon(session.dispatch, Picky(number))
            await anyio.wait_all_tasks_blocked()
            given_up.cancel_scope.cancel()
        tasks.cancel_scope.cancel()
    assert session.seq == 0


async def test_a_cancelled_waiter_is_passed_by(session):
    entered, leave = anyio.Event(), anyio.Event()

    async def holder():
        async with session.transaction():
            entered.set()
            await leave.wait()

    async def transact():
        async with session.transaction():
            await session.dispatch(Added(100))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(holder)
        await entered.wait()
        async with anyio.create_task_group() as given_up:
            given_up.start_soon(transact)
            given_up.start_soon(session.dispatch, Added(1000))
            await anyio.wait_all_tasks_blocked()
            given_up.cancel_scope.cancel()
        ticket = session.dispatch_nowait(Added(3))
        assert not ticket.is_ready
        leave.set()
        with anyio.fail_after(30):
            assert (await ticket.wait()).seq == 1
    assert session.state.total == 3


async def test_one_that_is_cancelled_just_as_its_turn_comes_is_passed_by(session):
    scope, go = anyio.CancelScope(), anyio.Event()

    async def transact():
        with scope:
            await go.wait()
            async with session.transaction():
                await session.dispatch(Added(100))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(transact)
        await anyio.wait_all_tasks_blocked()
        async with session.transaction():
            go.set()
            await anyio.wait_all_tasks_blocked()
            await session.dispatch(Added(1))
            scope.cancel()
    with anyio.fail_after(30):
        await session.dispatch(Added(2))
        async with session.transaction():
            await session.dispatch(Added(3))
    assert session.state.total == 6


# ------------------------------------------------------------------------------------------------------- with a journal


async def test_it_is_one_entry_or_none(anyio_backend):
    journal = MemoryJournal()
    async with Session.open(State, journal=journal) as session:
        async with session.transaction():
            for number in range(5):
                await session.dispatch(Added(number))
        async with session.transaction():
            pass
    assert len(journal.kept) == 1
    assert journal.kept[0].count(b'"Added"') == 5
    async with Session.open(State, journal=journal) as session:
        assert session.state.total == 10
        assert session.seq == 5


async def test_it_begins_when_all_before_it_is_durable(anyio_backend):
    journal = MemoryJournal()
    async with Session.open(State, journal=journal) as session:
        journal.fail = [FULL]
        ticket = session.dispatch_nowait(Added(1))
        async with session.transaction():
            assert session.state.total == 0
            await session.dispatch(Added(2))
        with pytest.raises(JournalError, match="the disk is full"):
            await ticket.wait()
        assert session.state.total == 2
        assert session.seq == 1


async def test_an_event_does_not_overtake_a_transaction_that_waits_for_the_journal(anyio_backend):
    journal, write = MemoryJournal(), threading.Event()
    journal.before = lambda: write.wait(30)
    async with Session.open(State, journal=journal) as session:
        heard: list[int] = []
        session.dispatcher.subscribe(Added, lambda event: heard.append(event.number))

        async def transact():
            async with session.transaction():
                await session.dispatch(Added(2))
                await session.dispatch(Added(3))

        async with anyio.create_task_group() as tasks:
            session.dispatch_nowait(Added(1))
            tasks.start_soon(transact)
            await anyio.wait_all_tasks_blocked()
            for number in (4, 5):
                tasks.start_soon(session.dispatch, Added(number))
                await anyio.wait_all_tasks_blocked()
            write.set()
        assert heard == [1, 2, 3, 4, 5]


async def test_where_the_journal_fails_nothing_of_it_remains(anyio_backend):
    journal = MemoryJournal()
    async with Session.open(State, journal=journal) as session:
        journal.fail = [FULL]
        with pytest.raises(JournalError, match="the disk is full"):
            async with session.transaction():
                await session.dispatch(Added(1))
        assert session.state == State()
        assert session.seq == 0
        assert journal.kept == []
        assert (await session.dispatch(Added(2))).seq == 1


async def test_a_cancellation_while_it_is_written_does_not_tear_it(anyio_backend):
    journal = MemoryJournal()
    writing, go_on = anyio.Event(), threading.Event()
    async with Session.open(State, journal=journal) as session:
        set_here = partial(anyio.from_thread.run_sync, writing.set, token=anyio.lowlevel.current_token())
        journal.before = lambda: (set_here(), go_on.wait(30))
        async with anyio.create_task_group() as tasks:

            async def transact():
                async with session.transaction():
                    await session.dispatch(Added(1))
                    await session.dispatch(Added(2))

            tasks.start_soon(transact)
            await writing.wait()
            tasks.cancel_scope.cancel()
            go_on.set()
        assert session.state.total == 3
        assert len(journal.kept) == 1


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.loops("asyncio")
async def test_a_cancellation_of_asyncios_own_comes_when_the_outcome_is_there(anyio_backend, fails):
    journal = MemoryJournal()
    writing, go_on = asyncio.Event(), threading.Event()
    async with Session.open(State, journal=journal) as session:
        loop = asyncio.get_running_loop()
        journal.before = lambda: (loop.call_soon_threadsafe(writing.set), go_on.wait(30))
        journal.fail = [FULL] if fails else []

        async def transact():
            async with session.transaction():
                await session.dispatch(Added(1))

        task = asyncio.create_task(transact())
        await writing.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not task.done()
        assert session.state.total == 0
        go_on.set()
        with anyio.fail_after(30), pytest.raises(asyncio.CancelledError):
            await task
        assert session.state.total == (0 if fails else 1)
        assert len(journal.kept) == (0 if fails else 1)
        assert (await session.dispatch(Added(1))).applied


async def test_closing_the_session_refuses_those_that_wait_and_what_is_not_finished(anyio_backend):
    refused, leave = [], anyio.Event()

    async def transact(session):
        with pytest.raises(SessionClosedError, match="closed before the event's turn came"):
            async with session.transaction():
                await anyio.sleep_forever()
        refused.append("waiting")

    async def hold(session):
        with pytest.raises(SessionClosedError, match="was closed before its transaction ended"):  # noqa: PT012
            async with session.transaction():
                await session.dispatch(Added(1))
                await leave.wait()
        refused.append("holding")

    journal = MemoryJournal()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            async with Session.open(State, journal=journal) as session:
                tasks.start_soon(hold, session)
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(transact, session)
                await anyio.wait_all_tasks_blocked()
                ticket = session.dispatch_nowait(Added(1))
            with pytest.raises(SessionClosedError):
                await ticket.wait()
            with pytest.raises(SessionClosedError, match="is not open; use it inside `async with`"):
                await session.dispatch(Added(1))
            leave.set()
    assert refused == ["waiting", "holding"]
    assert journal.kept == []
    assert session.state == State()
