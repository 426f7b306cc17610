"""Every wait for a journal has an end: opening, reading, writing, rewriting; and what was given up lets go at its own end."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager

import anyio
import pytest
from session_state import FULL, Added, MemoryJournal, State, until_free

from mainspring import JournalError, JournalLockedError, Session, SessionClosedError
from mainspring.state.session.journal_file import FileJournal

pytestmark = pytest.mark.anyio


class Held(MemoryJournal):
    """Hangs in the method that ``hold`` names, until told to go on."""

    def __init__(self, hold, timeout=MemoryJournal.timeout):
        super().__init__()
        self.hold = hold
        self.timeout_while_it_hangs = timeout
        self.go_on, self.hangs = threading.Event(), threading.Event()

    def _hang(self, method):
        if self.hold == method:
            self.hangs.set()
            self.go_on.wait(60)

    def open(self):
        self._hang("open")
        super().open()

    def entries(self):
        self._hang("entries")
        yield from super().entries()

    def append(self, entries):
        self._hang("append")
        super().append(entries)

    def rewrite(self, entries):
        self._hang("rewrite")
        super().rewrite(entries)


@contextmanager
def going_on(journal):
    """Have what hangs end, at last. Only meanwhile is the journal's timeout short, as other calls must not exceed it."""
    journal.timeout = journal.timeout_while_it_hangs
    try:
        with anyio.fail_after(30):
            yield
    finally:
        journal.timeout = MemoryJournal.timeout
        journal.go_on.set()


async def until(condition):
    with anyio.fail_after(60):
        while not condition():
            await anyio.sleep(0.001)


# ------------------------------------------------------------------------------------------------------ opening


@pytest.mark.parametrize("method", ["open", "entries"])
async def test_an_opening_that_hangs_is_given_up_and_let_go_of(anyio_backend, method):
    journal = Held(method, timeout=0.3)
    session = Session.open(State, journal=journal)
    with going_on(journal):
        with pytest.raises(JournalError, match=r"not answered within 0\.3 s; try again later"):
            await session.__aenter__()
        with pytest.raises(JournalLockedError, match="what its last opening had it do has not ended"):
            await session.__aenter__()
    await until(journal.closed.is_set)
    assert not journal.is_open
    journal.hold = ""
    await until_free(session)
    async with session:
        await session.dispatch(Added(1))
    assert not journal.is_open


@pytest.mark.parametrize("method", ["open", "entries"])
async def test_an_opening_can_be_cancelled(anyio_backend, method):
    journal = Held(method)
    session = Session.open(State, journal=journal)
    with going_on(journal):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.__aenter__)
            await until(journal.hangs.is_set)
            tasks.cancel_scope.cancel()
    await until(journal.closed.is_set)
    assert not journal.is_open


async def test_an_opening_that_fails_late_is_not_closed(anyio_backend):
    journal = Held("open", timeout=0.3)
    journal.is_open = True  # so that it raises
    session = Session.open(State, journal=journal)
    with going_on(journal), pytest.raises(JournalError, match="not answered"):
        await session.__aenter__()
    with pytest.raises(JournalError, match="AssertionError"):
        await until_free(session)
    assert not journal.closed.is_set()


# ------------------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("closes", ["well", "badly"])
async def test_a_write_that_was_given_up_lets_go_of_the_file_when_it_ends(anyio_backend, tmp_path, monkeypatch, closes):
    path, go_on, sync, close = tmp_path / "s.jsonl", threading.Event(), os.fdatasync, os.close
    journal, closed = FileJournal(path), threading.Event()
    journal.timeout = 0.3
    monkeypatch.setattr(os, "fdatasync", lambda file: (go_on.wait(60), sync(file)))
    try:
        with anyio.fail_after(30):
            async with Session.open(State, journal=journal) as session:
                with pytest.raises(JournalError, match="it may still write; open the session anew"):
                    await session.dispatch(Added(1))
            with pytest.raises(JournalLockedError):
                await Session.open(State, journal=path).__aenter__()

            def close_there(file):
                close(file)
                if threading.current_thread() is not threading.main_thread():
                    closed.set()
                    if closes == "badly":
                        raise OSError("no")

            monkeypatch.setattr(os, "close", close_there)
    finally:
        go_on.set()
    await until(closed.is_set)
    monkeypatch.undo()
    await until_free(session)
    async with Session.open(State, journal=path) as other:
        assert other.state.total == 1


async def test_a_thread_that_cannot_be_started_fails_the_opening_only(anyio_backend, tmp_path, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    session = Session.open(State, journal=tmp_path / "s.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(JournalError, match="can't start new thread"):
            await session.__aenter__()
    async with session:
        monkeypatch.setattr(threading.Thread, "start", fail)
        await session.dispatch(Added(1))
    monkeypatch.undo()
    async with session:  # neither writing nor closing needed another one
        assert session.state.total == 1


async def test_a_transaction_is_waited_for_as_long_as_it_may_be_written(virtual_clock):
    journal = Held("append")

    async def pass_time():
        await anyio.to_thread.run_sync(journal.hangs.wait)
        await virtual_clock.advance(29)
        journal.go_on.set()

    async with Session.open(State, journal=journal) as session, anyio.create_task_group() as tasks:
        tasks.start_soon(pass_time)
        async with session.transaction():
            await session.dispatch(Added(1))
        assert virtual_clock.now == 29
        assert session.state.total == 1
        assert len(journal.kept) == 1


async def test_a_transaction_whose_write_is_given_up_is_not_applied(anyio_backend):
    journal = Held("append", timeout=0.3)
    async with Session.open(State, journal=journal) as session:
        with going_on(journal), pytest.raises(JournalError, match="it may still write; open the session anew"):
            async with session.transaction():
                await session.dispatch(Added(1))
        await until(lambda: journal.kept)
        with pytest.raises(JournalError, match="open the session anew"):
            await session.dispatch(Added(2))
        assert session.state.total == 0
    async with Session.open(State, journal=journal) as session:
        assert session.state.total == 1


# ---------------------------------------------------------------------------------------------------- compaction


async def test_a_compaction_that_hangs_is_given_up(anyio_backend):
    journal = Held("rewrite", timeout=0.3)
    async with Session.open(State, journal=journal) as session:
        await session.dispatch(Added(1))
        with going_on(journal):
            with pytest.raises(JournalError, match=r"not answered within 0\.3 s; it may still write"):
                await session.compact()
            for use in (lambda: session.dispatch(Added(3)), session.compact):
                with pytest.raises(JournalError, match="open the session anew"):
                    await use()
    await until(lambda: not journal.is_open)
    async with Session.open(State, journal=journal) as session:
        assert session.state.total == 1


async def test_a_compaction_can_be_cancelled_and_goes_on(anyio_backend):
    journal = Held("rewrite")
    async with Session.open(State, journal=journal) as session:
        await session.dispatch(Added(1))
        await session.dispatch(Added(2))
        with going_on(journal):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.compact)
                await until(journal.hangs.is_set)
                ticket = session.dispatch_nowait(Added(4))
                tasks.cancel_scope.cancel()
            assert not ticket.is_ready
        with anyio.fail_after(30):
            assert (await ticket.wait()).seq == 3
        assert len(journal.kept) == 2
    async with Session.open(State, journal=journal) as session:
        assert session.state.total == 7


async def test_the_end_does_not_wait_for_a_compaction_that_hangs(virtual_clock):
    journal = Held("rewrite")

    async def pass_time():
        await anyio.wait_all_tasks_blocked()
        await virtual_clock.advance(10)

    with going_on(journal):
        async with anyio.create_task_group() as tasks, Session.open(State, journal=journal) as session:
            await session.dispatch(Added(1))
            tasks.start_soon(expect_closed, session.compact)
            await anyio.to_thread.run_sync(journal.hangs.wait)
            tasks.start_soon(pass_time)
        assert virtual_clock.now == 10
    assert await anyio.to_thread.run_sync(journal.closed.wait, 60)


async def expect_closed(use):
    with pytest.raises(JournalError, match="what it still writes is seen when the session is opened anew"):
        await use()


async def test_a_compaction_that_fails_leaves_what_comes_after_it_alone(anyio_backend):
    journal = Held("rewrite")
    async with Session.open(State, journal=journal) as session:
        await session.dispatch(Added(1))
        journal.fail = [FULL]
        with going_on(journal):
            async with anyio.create_task_group() as tasks:

                async def compact():
                    with pytest.raises(JournalError, match="the disk is full"):
                        await session.compact()

                tasks.start_soon(compact)
                await until(journal.hangs.is_set)
                tickets = [session.dispatch_nowait(Added(2)), session.dispatch_nowait(Added(4))]
                journal.go_on.set()
            assert [(await ticket.wait()).seq for ticket in tickets] == [2, 3]
    async with Session.open(State, journal=journal) as session:
        assert session.state.total == 7
    with pytest.raises(SessionClosedError):
        await session.compact()
