"""The file of a journal: compaction never detaches it, links lead to it, and forked children neither keep nor spoil it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import apsw
import pytest
from session_state import Added, State

from mainspring import JournalError, JournalLockedError, Session
from mainspring.state.session.journal_file import FileJournal
from mainspring.state.session.journal_sqlite import SQLiteJournal
from mainspring.state.session.records import entry_of_events

A, B, C, D = (entry_of_events(number, []) for number in range(4))

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["sqlite", "jsonl"])
def journal(request, tmp_path):
    return f"sqlite:///{tmp_path}/s.db" if request.param == "sqlite" else str(tmp_path / "s.jsonl")


async def total_of(journal):
    async with Session.open(State, journal=journal) as session:
        return session.state.total


# ---------------------------------------------------------------------------------------------------- compaction


@pytest.mark.parametrize("call", ["open", "fsync"])
async def test_a_directory_that_fails_at_a_compaction_loses_nothing(anyio_backend, tmp_path, monkeypatch, call):
    path, real = tmp_path / "s.jsonl", getattr(os, call)

    def fail(what, *args):
        if what == str(tmp_path) or (isinstance(what, int) and os.path.samefile(f"/proc/self/fd/{what}", tmp_path)):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(what, *args)

    told = 1
    async with Session.open(State, journal=path) as session:
        await session.dispatch(Added(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(JournalError, match="Too many open files"):
                await session.compact()
        if call == "fsync":  # the disk may bring the old file back
            with pytest.raises(JournalError, match="open the session anew"):
                await session.dispatch(Added(10))
        else:
            await session.dispatch(Added(10))
            told += 10
        with pytest.raises(JournalLockedError):
            await total_of(path)
    assert await total_of(path) == told
    assert os.listdir(tmp_path) == ["s.jsonl"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_compaction_that_fails_leaves_no_file_and_can_be_tried_again(tmp_path, monkeypatch, call):
    journal = FileJournal(tmp_path / "s.jsonl")
    journal.open()
    journal.append([A, B])
    Path(f"{journal.path}.new").write_bytes(b"of a killed process")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(JournalError, match="cannot be rewritten: No space left"):
            journal.rewrite([C])
    assert os.listdir(tmp_path) == ["s.jsonl"]
    journal.rewrite([C])
    journal.append([D])
    assert list(journal.entries()) == [C, D]
    journal.close()


async def test_a_link_remains_one_and_leads_to_the_journal(anyio_backend, tmp_path):
    (tmp_path / "data").mkdir()
    real, link = tmp_path / "data" / "s.jsonl", tmp_path / "s.jsonl"
    link.symlink_to(real)
    async with Session.open(State, journal=link) as session:
        await session.dispatch(Added(1))
        await session.compact()
        await session.dispatch(Added(10))
        with pytest.raises(JournalLockedError):
            await total_of(real)
    assert link.is_symlink()
    assert await total_of(real) == await total_of(link) == 11


@pytest.mark.parametrize("make", [FileJournal, SQLiteJournal])
async def test_one_journal_object_in_two_sessions(anyio_backend, tmp_path, make):
    journal = make(tmp_path / "s.jsonl")
    async with Session.open(State, journal=journal) as session:
        with pytest.raises(JournalLockedError, match="is open in another session"):
            await total_of(journal)
        await session.dispatch(Added(1))
    assert await total_of(journal) == 1


# --------------------------------------------------------------------------------------------------------- forks

FORKS = """
import anyio, gc, os, signal, sys, threading, time
from session_state import Added, State
from mainspring import Session
from mainspring.core import process

how, journal = sys.argv[1:]
signal.alarm(60)

async def total():
    async with Session.open(State, journal=journal) as session:
        return session.state.total

def attempt(use):
    try:
        print(use(), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)

def in_child(session):
    if how == "dropped":
        session._writer.journal._connection = None
        gc.collect()
    elif how == "closed":
        session._writer.journal.close()
    elif how == "torn down":  # as the interpreter does at its end
        session._writer.journal._connection = None
        vars(process._registry).clear()
        gc.collect()
    elif how == "left":
        left = session.__aexit__(None, None, None)
        try:
            left.send(None)
        except StopIteration:
            print("left", flush=True)
    elif how == "opens":
        # the parent's journal object and another one, while the parent has it and once it has closed it
        thread = threading.Thread(target=opens, args=(session,))
        thread.start()
        thread.join()
    elif how == "writes":
        thread = threading.Thread(target=attempt, args=(lambda: anyio.run(session._writer.calls.append, [b"x"]),))
        thread.start()
        thread.join()
    else:
        time.sleep(60)
    os._exit(0)

def opens(session):
    attempt(session._writer.journal.open)
    attempt(lambda: anyio.run(total))
    os.write(answer[1], b"x")
    os.read(question[0], 1)
    attempt(lambda: anyio.run(total))

question, answer = os.pipe(), os.pipe()

async def main():
    session = Session.open(State, journal=journal)
    await session.__aenter__()
    await session.dispatch(Added(1))
    child = os.fork()
    if not child:
        in_child(session)
    if how not in ("sleeps", "opens"):
        os.waitpid(child, 0)
    elif how == "opens":
        os.read(answer[0], 1)
    await session.dispatch(Added(2))
    if how in ("sleeps", "opens"):
        await session.__aexit__(None, None, None)
        if how == "opens":
            os.write(question[1], b"x")
            os.waitpid(child, 0)
        print("parent", await total(), flush=True)
        if how == "sleeps":
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    else:
        print("parent", session.state.total, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


def forks(how, journal):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS, how, journal],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    ).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.loops("asyncio")
@pytest.mark.parametrize("how", ["dropped", "closed", "torn down", "left"])
async def test_a_forked_child_lets_go_of_nothing_that_is_its_parents(anyio_backend, journal, how):
    said = forks(how, journal)
    assert said == ["left", "parent 3"] if how == "left" else ["parent 3"]
    assert await total_of(journal) == 3  # what the killed parent was told is there


@pytest.mark.slow
@pytest.mark.loops("asyncio")
async def test_a_forked_child_writes_nothing_that_its_parent_had_to_write(anyio_backend, journal):
    said = forks("writes", journal)
    assert "JournalError" in said[0]
    assert "is the one of the process that this one was forked from" in said[0]
    assert await total_of(journal) == 3


@pytest.mark.slow
@pytest.mark.loops("asyncio")
async def test_a_forked_child_does_not_keep_the_lock(anyio_backend, journal):
    assert "parent 3" in forks("sleeps", journal)


@pytest.mark.slow
@pytest.mark.loops("asyncio")
async def test_what_a_forked_child_is_told_that_opens_it(anyio_backend, tmp_path):
    *said, parent = (line for line in forks("opens", str(tmp_path / "s.jsonl")) if line != "None")
    assert [line.partition(" ")[0] for line in said] == ["JournalLockedError", "JournalLockedError", "3"]
    assert parent == "parent 3"
    *said, parent = (line for line in forks("opens", f"sqlite:///{tmp_path}/s.db") if line != "None")
    assert [line.partition(" ")[0] for line in said] == ["ConfigError"] * 3
    assert all("open it in a process that was started by subprocess or the spawn method" in line for line in said)
    assert parent == "parent 3"


async def test_a_closed_sqlite_journal_is_one_file(anyio_backend, tmp_path):
    async with Session.open(State, journal=f"sqlite:///{tmp_path}/s.db") as session:
        await session.dispatch(Added(1))
    assert os.listdir(tmp_path) == ["s.db"]
    with apsw.Connection(f"{tmp_path}/s.db") as connection:
        assert connection.execute("SELECT count(*) FROM entries").fetchall() == [(1,)]
    connection.close()
