"""Journals: what a dispatch returned for is there again after a crash, what is damaged has a name, and one writer has it."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from zlib import crc32

import anyio
import apsw
import pytest
from session_state import FULL, Added, MemoryJournal, Mood, Said, State, folded, until_free

from mainspring import (
    ConfigError,
    JournalDamagedError,
    JournalError,
    JournalLockedError,
    ReducerError,
    SerializationError,
    Session,
    SessionClosedError,
    UnknownEventError,
    UnknownVersionError,
)
from mainspring.state.session import append, versioned
from mainspring.state.session.journal_file import FileJournal

pytestmark = pytest.mark.anyio

EVENTS = [Said("ada", "ü\n\x00'\""), Mood(1), Said("bob"), Added(3), Said("ada", "b"), Mood(2)]
KINDS = ["sqlite", "jsonl"]


@pytest.fixture(params=KINDS)
def journal(request, tmp_path):
    return f"sqlite:///{tmp_path}/s.db" if request.param == "sqlite" else tmp_path / "s.jsonl"


async def entries_of(journal, *events):
    async with Session.open(State, journal=journal) as session:
        for event in events:
            await session.dispatch(event)


# --------------------------------------------------------------------------------------------------- there again


async def test_the_state_is_rebuilt(anyio_backend, journal):
    for number in range(1, 4):
        async with Session.open(State, journal=journal) as session:
            assert session.state == folded(EVENTS * (number - 1))
            assert session.seq == 6 * (number - 1)
            for event in EVENTS:
                assert (await session.dispatch(event)).applied
            assert session.state == folded(EVENTS * number)


async def test_children_are_rebuilt_whenever_they_are_made(anyio_backend, journal):
    async with Session.open(State, journal=journal) as session:
        await session.child("kid", State).dispatch(Added(1))
        await session.dispatch(Added(5))
        await session.child("kid", State).child("inner", State).dispatch(Added(2))
    session = Session.open(State, journal=journal)
    early = session.child("kid", State)
    async with session:
        assert early.state.total == 1
        late = early.child("inner", State)
        assert late.state.total == 2
        assert session.state.total == 5
        await late.dispatch(Added(1))
        await session.compact()
        await late.dispatch(Added(1))
    async with Session.open(State, journal=journal) as session:
        assert session.child("kid", State).child("inner", State).state.total == 4
        assert session.seq == 5


@pytest.mark.parametrize("in_journal", [False, True])
@pytest.mark.parametrize("where", ["subscriber", "reducer"])
async def test_an_interrupt_in_a_subscriber_or_reducer_reaches_the_one_who_dispatches(anyio_backend, where, in_journal):
    def interrupt(*given):
        if given[-1].value == 1:
            raise KeyboardInterrupt
        return 0

    session = Session.open(State, journal=MemoryJournal()) if in_journal else Session(State)
    if where == "subscriber":
        session.dispatcher.subscribe(Mood, interrupt)
    else:
        session.register(Mood, "extra", interrupt, initial=0)
    async with session:
        with anyio.fail_after(30), pytest.raises(KeyboardInterrupt):
            await session.dispatch(Mood(1))
        with anyio.fail_after(30):
            assert (await session.dispatch(Mood(2))).applied
        assert session.state.mood == Mood(2) if where == "subscriber" else session["mood"] == Mood(2)


async def test_an_interrupted_event_that_waited_for_its_turn_does_not_end_the_journal(anyio_backend):
    def interrupt(total, event):
        raise KeyboardInterrupt

    session = Session.open(State, journal=MemoryJournal())
    session.register(Mood, "extra", interrupt, initial=0)
    async with session:
        outside = copy_context()
        async with session.transaction():
            await session.dispatch(Said("ada"))
            waiting = outside.run(session.dispatch_nowait, Mood(1))
        with anyio.fail_after(30), pytest.raises(KeyboardInterrupt):
            await waiting.wait()
        with anyio.fail_after(30):
            assert (await session.dispatch(Said("bob"))).applied


async def test_concurrent_dispatches_become_few_writes(anyio_backend):
    journal = MemoryJournal()
    async with Session.open(State, journal=journal) as session:
        async with anyio.create_task_group() as tasks:
            for number in range(1000):
                tasks.start_soon(session.dispatch, Added(number))
        assert session.state.count == 1000
    assert sum(journal.writes) == 1000
    assert len(journal.writes) < 50
    async with Session.open(State, journal=journal) as session:
        assert session.state.count == 1000
        assert session.state.total == sum(range(1000))


async def test_it_is_seen_and_told_once_it_is_durable(anyio_backend):
    journal, go_on, heard = MemoryJournal(), threading.Event(), []
    journal.before = lambda: go_on.wait(30)
    async with Session.open(State, journal=journal) as session:
        session.dispatcher.subscribe(Added, lambda event: heard.append((event, session.state.total)))
        first = session.dispatch_nowait(Added(1))
        second = session.dispatch_nowait(Added(2))
        await anyio.wait_all_tasks_blocked()
        assert not first.is_ready
        assert session.state.total == 0
        assert heard == []
        go_on.set()
        assert (await first.wait()).delivered == 1
        assert (await second.wait()).seq == 2
    assert heard == [(Added(1), 1), (Added(2), 3)]


async def test_nested_dispatches_are_journaled_too(anyio_backend, journal):
    async with Session.open(State, journal=journal) as session:
        session.dispatcher.subscribe(Added, lambda event: session.dispatch_nowait(Mood(event.number)))
        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(session.dispatch, Added(number))
    async with Session.open(State, journal=journal) as session:
        assert session.state.count == 200


async def test_leaving_writes_what_nobody_waits_for(anyio_backend, journal):
    with pytest.raises(KeyError):  # noqa: PT012
        async with Session.open(State, journal=journal) as session:
            tickets = [session.dispatch_nowait(Added(1)) for _ in range(100)]
            raise KeyError("mine")
    assert all(ticket.is_ready for ticket in tickets)
    with anyio.CancelScope() as scope:
        async with Session.open(State, journal=journal) as session:
            session.dispatch_nowait(Added(1))
            scope.cancel()
            await anyio.sleep_forever()
    async with Session.open(State, journal=journal) as session:
        assert session.state.total == 101


async def test_a_cancelled_dispatch_does_not_hold_the_others_up(anyio_backend):
    journal, go_on = MemoryJournal(), threading.Event()
    journal.before = lambda: go_on.wait(30)
    async with Session.open(State, journal=journal) as session:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.dispatch, Added(1))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        go_on.set()
        assert (await session.dispatch(Added(2))).seq == 2
        assert session.state.total == 3  # it was accepted already


async def test_in_virtual_time(virtual_clock, tmp_path):
    async with Session.open(State, journal=tmp_path / "s.jsonl") as session:
        await session.dispatch(Added(1))
        await anyio.sleep(3600)
        await session.dispatch(Added(2))
    assert virtual_clock.now == 3600
    async with Session.open(State, journal=tmp_path / "s.jsonl") as session:
        assert session.state.total == 3
    assert virtual_clock.now == 3600


async def test_a_disk_that_never_answers_does_not_hold_up_the_end(virtual_clock):
    journal, go_on = MemoryJournal(), threading.Event()
    journal.before = lambda: go_on.wait(60)

    async def pass_time():
        await anyio.wait_all_tasks_blocked()
        await virtual_clock.advance(10)

    try:
        async with anyio.create_task_group() as tasks, Session.open(State, journal=journal) as session:
            ticket = session.dispatch_nowait(Added(1))
            tasks.start_soon(pass_time)
        assert virtual_clock.now == 10
        with pytest.raises(JournalError, match="its journal has not answered within 10 s"):
            await ticket.wait()
        assert session.state.total == 0
    finally:
        go_on.set()


# ------------------------------------------------------------------------------------------------------ trouble


@pytest.mark.parametrize("answer", ["complete", "fail"])
async def test_a_holder_that_answers_its_own_ticket_harms_nobody(anyio_backend, answer):
    journal, session_error = MemoryJournal(), LookupError("mine")
    async with Session.open(State, journal=journal) as session:
        for errors in ([], [FULL]):
            journal.fail = errors.copy()
            mine, other = session.dispatch_nowait(Added(1)), session.dispatch_nowait(Added(1))
            getattr(mine, answer)(session_error)
            with anyio.fail_after(30):
                if errors:
                    with pytest.raises(JournalError, match="the disk is full"):
                        await other.wait()
                else:
                    assert (await other.wait()).seq == 2
        with anyio.fail_after(30):
            assert (await session.dispatch(Added(5))).seq == 3
    async with Session.open(State, journal=journal) as session:
        assert session.state.total == 7


async def test_a_ticket_answered_before_its_turn(anyio_backend):
    session, begun, go_on = Session(State), anyio.Event(), anyio.Event()

    async def hold():
        async with session.transaction():
            begun.set()
            await go_on.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold)
        await begun.wait()
        mine, other = session.dispatch_nowait(Added(1)), session.dispatch_nowait(Added(2))
        mine.complete(None)
        go_on.set()
        with anyio.fail_after(30):
            assert (await other.wait()).seq == 2
    assert session.state.total == 3


async def test_closing_answers_all_that_waits_though_some_have_answers(anyio_backend):
    begun = anyio.Event()

    async def hold():
        async with session.transaction():
            begun.set()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        async with Session.open(State, journal=MemoryJournal()) as session:
            tasks.start_soon(hold)
            await begun.wait()
            mine, other = session.dispatch_nowait(Added(1)), session.dispatch_nowait(Added(2))
            mine.complete(None)
        with anyio.fail_after(30), pytest.raises(SessionClosedError, match="closed before the event's turn came"):
            await other.wait()
        tasks.cancel_scope.cancel()


async def test_a_journal_that_hangs_fails_what_waits_for_it_and_is_used_no_more(anyio_backend):
    journal, hangs, go_on = MemoryJournal(), threading.Event(), threading.Event()
    journal.timeout = 0.1
    async with Session.open(State, journal=journal) as session:
        await session.dispatch(Added(1))
        journal.before = lambda: (hangs.set(), go_on.wait(60))
        tickets = [session.dispatch_nowait(Added(2)), session.dispatch_nowait(Added(2))]
        try:
            with anyio.fail_after(30):
                for ticket in tickets:
                    with pytest.raises(JournalError, match=r"not answered within 0\.1 s.*open the session anew"):
                        await ticket.wait()
                assert hangs.is_set()
                for use in (lambda: session.dispatch(Added(3)), session.compact):
                    with pytest.raises(JournalError, match="open the session anew"):
                        await use()
                assert (session.state.total, session.seq) == (1, 1)
        finally:
            go_on.set()
        with anyio.fail_after(60):
            while len(journal.writes) < 2:  # it lands, late
                await anyio.sleep(0.001)
        with pytest.raises(JournalError, match=r"not answered within 0\.1 s.*open the session anew"):
            await session.dispatch(Added(3))
    assert not journal.is_open
    async with Session.open(State, journal=journal) as session:
        assert session.state.total == 5


async def test_a_journal_that_still_hangs_at_the_end_is_not_closed_beside_its_write(anyio_backend):
    journal, go_on = MemoryJournal(), threading.Event()
    journal.timeout = 0.1
    journal.before = lambda: go_on.wait(60)
    try:
        async with Session.open(State, journal=journal) as session:
            with anyio.fail_after(30), pytest.raises(JournalError, match="not answered within"):
                await session.dispatch(Added(1))
        assert journal.is_open
        with pytest.raises(JournalLockedError, match="what its last opening had it do has not ended"):
            async with session:
                pass
    finally:
        go_on.set()
    assert await anyio.to_thread.run_sync(journal.closed.wait, 60)  # the write lets go of it when it ends
    await until_free(session)
    async with session:
        assert session.state.total == 1
    assert not journal.is_open


async def test_where_it_fails_all_that_waits_for_it_fails_and_the_session_goes_on(anyio_backend):
    journal, results = MemoryJournal(), []

    async def write(number):
        try:
            results.append((await session.dispatch(Added(number))).seq)
        except JournalError as error:
            results.append(str(error))

    async with Session.open(State, journal=journal) as session:
        await session.dispatch(Added(1))
        journal.fail = [FULL, OSError(errno.EIO, "the disk is gone")]
        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(write, number)
        assert results == ["the disk is full"] * 10
        assert session.state.total == 1
        assert session.seq == 1
        with pytest.raises(JournalError, match=r"the journal in memory: OSError: .*the disk is gone"):
            await session.dispatch(Added(1))
        assert (await session.dispatch(Added(5))).seq == 2
        assert session.state.total == 6
    async with Session.open(State, journal=journal) as session:
        assert session.state.total == 6


async def test_a_full_disk(anyio_backend, tmp_path, monkeypatch):
    """A line and a half are written, then there is no room: both are taken back, as both were said to have failed."""
    path, write, room = tmp_path / "s.jsonl", os.pwrite, [10**6]

    def pwrite(file, data, at):
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, bytes(data)[: room[0]], at)
        room[0] -= written
        return written

    monkeypatch.setattr(os, "pwrite", pwrite)
    async with Session.open(State, journal=path) as session:
        await session.dispatch(Added(1))
        line = path.stat().st_size
        room[0] = line + line // 2
        tickets = [session.dispatch_nowait(Added(2)), session.dispatch_nowait(Added(2))]
        for ticket in tickets:
            with pytest.raises(JournalError, match="cannot be written: No space left on device"):
                await ticket.wait()
        assert path.stat().st_size == line
        room[0] = 10**6
        await session.dispatch(Added(3))
    async with Session.open(State, journal=path) as session:
        assert session.state.total == 4


async def test_a_write_that_the_disk_does_not_confirm_is_the_end_of_this_opening(anyio_backend, tmp_path, monkeypatch):
    path = tmp_path / "s.jsonl"
    async with Session.open(State, journal=path) as session:
        await session.dispatch(Added(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fails_with(errno.EIO))
            with pytest.raises(JournalError, match="the disk did not confirm what was written"):
                await session.dispatch(Added(2))
        with pytest.raises(JournalError, match="open the session anew"):
            await session.dispatch(Added(3))
        assert session.state.total == 1
    async with Session.open(State, journal=path) as session:
        assert session.state.total in (1, 3)


def fails_with(number):
    def fail(*args):
        raise OSError(number, os.strerror(number))

    return fail


async def test_one_session_has_it(anyio_backend, journal):
    async with Session.open(State, journal=journal) as session:
        with pytest.raises(JournalLockedError, match="is open in another session"):
            async with Session.open(State, journal=journal):
                pass
        with pytest.raises(ConfigError, match="is open already; open it in one place"):
            async with session:
                pass
        await session.dispatch(Added(1))
    async with session:  # it can be opened again
        assert session.state.total == 1


@pytest.mark.slow
async def test_another_process_has_it(anyio_backend, journal):
    held = (
        "import anyio, sys\nfrom session_state import State\nfrom mainspring import Session\n"
        "async def main():\n    async with Session.open(State, journal=sys.argv[1]):\n        print('open', flush=True)\n"
        "        sys.stdin.read()\nanyio.run(main)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", held, str(journal)],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(JournalLockedError):
            async with Session.open(State, journal=journal):
                pass
        other.kill()
    async with Session.open(State, journal=journal) as session:
        await session.dispatch(Added(1))


FORKER = """
import anyio, os, sys
from session_state import Added, State
from mainspring import Session

async def main():
    async with Session.open(State, journal=sys.argv[1]) as session:
        await session.dispatch(Added(1))
        child = os.fork()
        if not child:
            try:
                session.dispatch_nowait(Added(2))
            except Exception as error:
                print(type(error).__name__, error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        await session.dispatch(Added(4))

anyio.run(main)
"""


@pytest.mark.loops("asyncio")
@pytest.mark.slow
async def test_a_forked_child_is_refused(anyio_backend, journal):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKER, str(journal)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "ConfigError session 'session' was opened before this process was forked" in done.stdout
    async with Session.open(State, journal=journal) as session:
        assert session.state.total == 5


WRITER = """
import anyio, sys
from session_state import Added, State
from mainspring import Session

async def main():
    async with Session.open(State, journal=sys.argv[1]) as session:
        async def write(number):
            await session.dispatch(Added(number))
            sys.stdout.write(f"{number}\\n")
            sys.stdout.flush()
        while True:
            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(write, session.state.count + number + 1)

anyio.run(main)
"""


@pytest.mark.slow
@pytest.mark.loops("asyncio")
async def test_killed_in_the_midst_of_writing_nothing_it_returned_for_is_lost(anyio_backend, journal):
    told = []
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(journal)], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
        ) as process:
            for number, line in enumerate(process.stdout):
                told.append(int(line))
                if number == 47:
                    process.send_signal(signal.SIGKILL)
        async with Session.open(State, journal=journal) as session:
            state = session.state
            assert state.count >= len(told)
            assert state.total >= sum(told)


# ------------------------------------------------------------------------------------------------------- damage


async def test_a_torn_last_line_is_cut_off_and_that_is_logged(anyio_backend, tmp_path, caplog):
    path = tmp_path / "s.jsonl"
    await entries_of(path, *EVENTS)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"seq":7,"events":[{"type":"Sa')
    async with Session.open(State, journal=path) as session:
        assert session.state == folded(EVENTS)
        assert path.read_bytes() == whole
        await session.dispatch(Added(1))
    assert f"s.jsonl: cut off an entry that was not written to its end (30 bytes at {len(whole)})" in caplog.text


@pytest.mark.parametrize("end", [b"", b"x", b" ", b"\xff"])
async def test_a_last_line_that_lacks_only_its_end_is_kept_and_that_is_logged(anyio_backend, tmp_path, caplog, end):
    path = tmp_path / "s.jsonl"
    await entries_of(path, *EVENTS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + end)
    async with Session.open(State, journal=path) as session:
        assert session.state == folded(EVENTS)
        assert path.read_bytes() == whole
    assert "s.jsonl: its last line had no end, but a whole entry, which is kept" in caplog.text


async def test_a_torn_line_longer_than_what_is_looked_at_once(anyio_backend, tmp_path):
    path = tmp_path / "s.jsonl"
    await entries_of(path, *EVENTS)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" * 200_000)
    await entries_of(path)
    assert path.read_bytes() == whole
    path.write_bytes(b'{"seq":1,"events":[' + b"x" * 200_000)
    await entries_of(path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "content",
    ['{"prompt":"a"}\n{"prompt":"b"}\n{"prompt":"the last"}', '{"one":"line"}', '{"seq":"ACGT"}', "\n", "x" * 200_000],
)
async def test_a_file_of_another_program_is_left_as_it_is(anyio_backend, tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(
        ConfigError, match=r"data.jsonl is the file of another program; name another file for the journal"
    ):
        await entries_of(path)
    assert path.read_text() == content


@pytest.mark.parametrize("snapshot", [False, True])
async def test_a_first_line_of_any_length_is_cut_off(anyio_backend, tmp_path, snapshot):
    path = tmp_path / "s.jsonl"
    await entries_of(path, Added(1))
    if snapshot:
        async with Session.open(State, journal=path) as session:
            await session.compact()
    whole = path.read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        journal = FileJournal(path)
        journal.open()
        journal.close()
        assert path.read_bytes() == (whole if length == len(whole) - 1 else b"")


async def test_a_damaged_line_has_a_name(anyio_backend, tmp_path):
    path = tmp_path / "s.jsonl"
    await entries_of(path, *EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    cases = {
        "entry 3 is not what": [*lines[:2], lines[2].replace(b"bob", b"bod"), *lines[3:]],
        "entry 6 is not what": [*lines[:5], b"garbage\n"],
        "entry 1 is not what": [b"\n", *lines],
        "entry 3 begins with event 4 where event 3 belongs": [*lines[:2], *lines[3:]],
        "entry 4 begins with event 3 where event 4 belongs": [*lines[:3], *lines[2:]],
        "entry 1 begins with event 2": lines[1:],
    }
    for complaint, damaged in cases.items():
        path.write_bytes(b"".join(damaged))
        with pytest.raises(JournalDamagedError, match=complaint):
            await entries_of(path)
        assert path.read_bytes() == b"".join(damaged)  # left as it is, for whoever repairs it
    path.write_bytes(b"".join(lines))
    await entries_of(path)


async def test_a_damaged_row_has_a_name(anyio_backend, tmp_path):
    path = tmp_path / "s.db"
    url = f"sqlite:///{path}"
    await entries_of(url, *EVENTS)
    with apsw.Connection(str(path)) as connection:
        connection.execute("DELETE FROM entries WHERE place = 3")
    connection.close()
    with pytest.raises(JournalDamagedError, match="entry 3 begins with event 4 where event 3 belongs"):
        await entries_of(url)
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 8192)
    with pytest.raises((JournalDamagedError, JournalError), match=r"is damaged|cannot be used"):
        await entries_of(url)


def changed_in_a_line(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[3][:-30] + b"?" + lines[3][-29:], *lines[4:]]))


def without_a_line(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], *lines[4:]]))


def with_one_line_of_two(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[3][:-1] + b"x", *lines[4:]]))


def changed_in_a_row(path):
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("UPDATE entries SET entry = CAST(replace(entry, 'seq', 'sec') AS BLOB) WHERE place = 4")


def without_a_row(path):
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("DELETE FROM entries WHERE place = 4")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("s.jsonl", changed_in_a_line), ("s.jsonl", without_a_line), ("s.jsonl", with_one_line_of_two),
        ("s.db", changed_in_a_row), ("s.db", without_a_row),
    ],
)  # fmt: skip
async def test_a_damaged_journal_is_opened_up_to_the_damage(anyio_backend, tmp_path, caplog, name, damage):
    path = tmp_path / name
    url = f"sqlite:///{path}" if name == "s.db" else path
    await entries_of(url, *EVENTS)
    damage(path)
    with pytest.raises(JournalDamagedError, match=r"entry 4 .*; restore .* Session.open\(…, up_to_damage=True\)"):
        await entries_of(url)
    async with Session.open(State, journal=url, up_to_damage=True) as session:
        assert (session.state, session.seq) == (folded(EVENTS[:3]), 3)
        await session.dispatch(Added(1))
    assert f"opened up to event 3, as its journal is damaged (the journal {path}: entry 4 " in caplog.text
    assert f"all that it held is in {path}.damaged-1" in caplog.text
    async with Session.open(State, journal=url) as session:
        assert (session.state, session.seq) == (folded([*EVENTS[:3], Added(1)]), 4)
    aside = tmp_path / f"{name}.damaged-1"
    with pytest.raises(JournalDamagedError, match="entry 4 "):  # what there was is all there, for a repair
        await entries_of(f"sqlite:///{aside}" if name == "s.db" else FileJournal(aside))


async def test_a_database_with_a_spoilt_page_is_opened_up_to_it(anyio_backend, tmp_path):
    path = tmp_path / "s.db"
    url = f"sqlite:///{path}"
    events = [Said("ann", f"{number} {'x' * 1_000}") for number in range(40)]
    await entries_of(url, *events)
    content = path.read_bytes()
    page = content.find(b'"text":"30 ') // 4096 * 4096
    path.write_bytes(content[:page] + b"\xff" * 4096 + content[page + 4096 :])
    with pytest.raises(JournalDamagedError):
        await entries_of(url)
    async with Session.open(State, journal=url, up_to_damage=True) as session:
        kept = session.seq
        assert 20 < kept <= 30
        assert session.state == folded(events[:kept])
        await session.dispatch(Added(1))
    async with Session.open(State, journal=url) as session:
        assert session.state == folded([*events[:kept], Added(1)])


async def test_a_journal_of_ones_own_is_cut_too(anyio_backend):
    journal = MemoryJournal()
    await entries_of(journal, *EVENTS)
    journal.kept[4] = b"garbage"
    async with Session.open(State, journal=journal, up_to_damage=True) as session:
        assert session.state == folded(EVENTS[:4])
    assert len(journal.kept) == 4


async def test_a_whole_journal_is_opened_as_ever_where_damage_is_allowed(anyio_backend, tmp_path):
    path = tmp_path / "s.jsonl"
    await entries_of(path, *EVENTS)
    whole = path.read_bytes()
    async with Session.open(State, journal=path, up_to_damage=True) as session:
        assert session.state == folded(EVENTS)
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


def sealed(text):
    raw = text.encode()[:-1]
    return b'%s,"crc":"%08x"}' % (raw, crc32(raw))


@pytest.mark.parametrize("text", ['{"a":1}', "[1}", '{"seq":1,"events":[3]}', '{"seq":1,"events":[{"type":"Added"}]}'])
async def test_a_whole_entry_of_something_else(anyio_backend, text):
    with pytest.raises(JournalDamagedError, match="entry 1 is whole, but no entry of a session's journal"):
        await entries_of(MemoryJournal([sealed(text)]))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("chat.db", "is no journal: write 'sqlite:///session.db' or 'session.jsonl'"),
        ("redis://localhost/0", "is no journal"),
        ("sqlite:///", "a SQLite journal is sqlite:///relative.db"),
        ("sqlite://host/a.db", "a SQLite journal is"),
        ("sqlite:///a.db?name=x", "a SQLite journal is"),
        ("a\0b.jsonl", "a path has no NUL character"),
        ("sqlite:///a%00b.db", "a path has no NUL character"),
        (3, "is no journal"),
        (None, "is no journal"),
    ],
)
def test_what_is_no_journal(given, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Session.open(State, journal=given)


async def test_files_of_others(anyio_backend, tmp_path):
    with apsw.Connection(str(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE t (a)")
    connection.close()
    with pytest.raises(ConfigError, match="is the database of another program"):
        await entries_of(f"sqlite:///{tmp_path}/other.db")
    (tmp_path / "text.db").write_text("no database at all, but long enough" * 100)
    with pytest.raises(ConfigError, match="is no SQLite database"):
        await entries_of(f"sqlite:///{tmp_path}/text.db")
    for journal in (tmp_path / "no" / "s.jsonl", f"sqlite:///{tmp_path}/no/s.db"):
        with pytest.raises(ConfigError, match="has no directory: make"):
            await entries_of(journal)
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(JournalError, match="cannot be opened: Is a directory"):
        await entries_of(tmp_path / "d.jsonl")


async def test_registration_comes_before_the_journal_is_read(anyio_backend):
    journal = MemoryJournal()
    session = Session.open(journal=journal)
    session.register(Said, "log", append)
    async with session:
        await session.dispatch(Said("ada"))
        with pytest.raises(ConfigError, match="has read its journal: register before"):
            session.register(Mood, "log", append)
    async with session:
        assert session["log"] == (Said("ada"),)


async def test_it_is_not_looked_at_before_its_journal_is_read(anyio_backend, monkeypatch):
    journal = MemoryJournal()
    await entries_of(journal, Added(1), Added(2))
    session = Session.open(State, journal=journal, name="chat")
    child = session.child("kid", State)

    def looks():
        return (
            lambda: session.state,
            lambda: session["total"],
            lambda: session.seq,
            session.snapshot,
            lambda: child.state,
        )

    for look in looks():
        with pytest.raises(SessionClosedError, match="has a journal that is not read yet; look at its state inside"):
            look()
    assert repr(session) == "<Session 'chat' with said, mood, latest, total, count not read yet>"
    async with session:
        assert session.state.total == 3
        assert "after event 2" in repr(session)
    assert session.state.total == 3  # as it was at the end
    assert session.seq == 2

    looked, whole = [], journal.entries

    def broken():
        yield from whole()
        raise OSError("the disk is gone")

    journal.entries = broken
    with pytest.raises(JournalError, match="the disk is gone"):
        async with session:
            looked.append(session.state)
    for look in looks():
        with pytest.raises(SessionClosedError, match="not read yet"):
            look()


async def test_slices_are_not_registered_while_the_journal_is_read(anyio_backend, monkeypatch):
    journal = MemoryJournal()
    session = Session.open(journal=journal)

    def late(total, event):
        session.register(Said, "late", append)
        return total

    session.register(Added, "total", lambda total, event: total + event.number, initial=0, type=int)
    async with session:
        await session.dispatch(Added(1))
    session = Session.open(journal=journal)
    session.register(Added, "total", late, initial=0, type=int)
    with pytest.raises(ReducerError, match="register slices before events are dispatched"):
        async with session:
            pass
    session = Session.open(journal=journal)
    session.register(Added, "total", lambda total, event: total + session["total"] + event.number, initial=0, type=int)
    async with session:  # a reducer should not look at the session; where it does, it is at its place in the past
        assert session["total"] == 1


async def test_what_nobody_asks_the_tickets_for_is_logged(anyio_backend, caplog):
    journal = MemoryJournal()
    async with Session.open(State, journal=journal) as session:
        journal.fail = [FULL]
        for number in range(3):
            session.dispatch_nowait(Added(number))
    assert not journal.kept
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == "session 'session': 3 event(s) not applied: JournalError: the disk is full"
    caplog.clear()
    async with Session.open(State, journal=journal) as session:
        session.dispatch_nowait(Added("three"))
        with pytest.raises(SerializationError):
            await session.dispatch_nowait(Added("three")).wait()
    gc.collect()  # the error's traceback refers to the ticket
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(
        "the dispatch of Added to session 'session' failed, and its ticket was not read: Serialization"
    )


# ------------------------------------------------------------------------------------------------------ versions


def events(*stored):
    return [
        sealed(json.dumps({"seq": seq, "events": [{"type": name, "v": version, "data": data}]}))
        for seq, (name, version, data) in enumerate(stored, 1)
    ]


@versioned(3, name="Note", upcast={1: lambda data: {"text": data["body"]}, 2: lambda data: {**data, "language": "en"}})
@dataclass(frozen=True)
class NoteTaken:
    text: str
    language: str


@dataclass(frozen=True)
class Notes:
    notes: Annotated[tuple[NoteTaken, ...], append] = ()


async def test_old_events_are_brought_up_to_date(anyio_backend):
    journal = MemoryJournal(events(("Note", 1, {"body": "a"}), ("Note", 2, {"text": "b"})))
    async with Session.open(Notes, journal=journal) as session:
        await session.dispatch(NoteTaken("c", "de"))
        assert session.state.notes == (NoteTaken("a", "en"), NoteTaken("b", "en"), NoteTaken("c", "de"))
    assert b'"type":"Note","v":3' in journal.kept[-1]


@pytest.mark.parametrize(
    ("stored", "error", "complaint"),
    [
        (("Note", 4, {}), UnknownVersionError, "'Note' is stored in version 4, and this code knows it up to version 3"),
        (("Note", 0, {}), UnknownVersionError, "stored in version 0"),
        (("Other", 1, {}), UnknownEventError, "holds an event 'Other', which is not registered"),
        (
            ("Note", 1, {"text": "no body"}),
            SerializationError,
            "the upcaster of 'Note' from version 1 failed: KeyError",
        ),
        (("Note", 3, {"text": 3, "language": "x"}), SerializationError, "event 'Note': the stored body does not fit"),
    ],
)
async def test_what_the_code_does_not_know_is_refused_by_name(anyio_backend, stored, error, complaint):
    journal = MemoryJournal(events(stored))
    with pytest.raises(error, match=complaint):
        async with Session.open(Notes, journal=journal):
            pass
    assert not journal.is_open  # it was let go of


async def test_a_reducer_that_fails_on_the_past_says_where(anyio_backend):
    with pytest.raises(ReducerError, match=r"entry 2 cannot be applied any more: .*the reducer add"):
        await entries_of(MemoryJournal(events(("Added", 1, {"number": 1}), ("Added", 1, {"number": -1}))))


@dataclass(frozen=True)
class Sub(Added):
    pass


@dataclass(frozen=True)
class Opaque:
    thing: object


async def test_events_that_could_not_be_read_again_are_refused(anyio_backend):
    journal = MemoryJournal()
    session = Session.open(State, journal=journal)
    session.register(Opaque, "things", append)
    async with session:
        with pytest.raises(UnknownEventError, match="Sub is not registered itself, only a class above it"):
            await session.dispatch(Sub(1))
        with pytest.raises(SerializationError, match="event Added: a body of type Added cannot be written as JSON"):
            await session.dispatch(Added("1"))
        with pytest.raises(SerializationError, match="cannot be written as JSON"):
            await session.dispatch(Opaque(object()))
        with pytest.raises(SerializationError):  # noqa: PT012
            async with session.transaction():
                await session.dispatch(Added(1))
                await session.dispatch(Opaque(object()))
        assert session.state == State()
        assert session["things"] == ()
        assert journal.kept == []
        assert (await session.dispatch(Added(1))).seq == 1


async def test_a_reducers_error_is_not_journaled(anyio_backend):
    journal = MemoryJournal()
    async with Session.open(State, journal=journal) as session:
        assert not (await session.dispatch(Added(-1))).applied
    assert journal.kept == []


async def test_two_types_of_one_stored_name(anyio_backend):
    session = Session.open(State, journal=MemoryJournal())
    session.register(versioned(1, name="Added")(dataclass(frozen=True)(type("Other", (), {}))), "x", append)
    with pytest.raises(ConfigError, match="two event types are stored as 'Added'"):
        async with session:
            pass


# ----------------------------------------------------------------------------------------------------- compaction


async def test_a_compacted_journal_is_short_and_the_same(anyio_backend, journal):
    async with Session.open(State, journal=journal) as session:
        for number in range(300):
            await session.dispatch(Added(number))
        await session.compact()
        with pytest.raises(JournalLockedError):
            await entries_of(journal)
        await session.dispatch(Mood(3))
        state = session.state
    async with Session.open(State, journal=journal) as session:
        assert session.state == state
        assert session.seq == 301
    assert count_entries(journal) == 2


def count_entries(journal):
    """How many there are in a file."""
    if isinstance(journal, Path):
        return len(journal.read_bytes().splitlines())
    with closing(apsw.Connection(journal.removeprefix("sqlite:///"))) as connection:
        return connection.execute("SELECT count(*) FROM entries").fetchall()[0][0]


async def test_a_failed_compaction_leaves_it_as_it_was(anyio_backend, tmp_path, monkeypatch):
    path = tmp_path / "s.jsonl"
    async with Session.open(State, journal=path) as session:
        await session.dispatch(Added(1))
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fails_with(errno.EACCES))
            with pytest.raises(JournalError, match="cannot be rewritten"):
                await session.compact()
        assert path.read_bytes() == before
        await session.dispatch(Added(2))
    async with Session.open(State, journal=path) as session:
        assert session.state.total == 3


def test_a_file_that_is_rewritten_while_another_opens_it(tmp_path):
    one, other = FileJournal(tmp_path / "s.jsonl"), FileJournal(tmp_path / "s.jsonl")
    one.open()
    one.append([sealed('{"seq":0}'), sealed('{"seq":1}')])
    one.rewrite([sealed('{"seq":2}')])
    with pytest.raises(JournalLockedError):
        other.open()
    one.append([sealed('{"seq":3}')])
    one.close()
    other.open()
    assert list(other.entries()) == [sealed('{"seq":2}'), sealed('{"seq":3}')]
    other.close()
