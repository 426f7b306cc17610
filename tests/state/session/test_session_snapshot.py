"""Snapshots: plain JSON data there, the same state back; versions; children; and what is no snapshot."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

import anyio
import anyio.from_thread
import pytest
from session_state import FULL, Added, Bounded, MemoryJournal, Mood, Said, State, add

from mainspring import (
    ConfigError,
    InvalidParameterError,
    JournalError,
    SerializationError,
    Session,
    SessionError,
    Snapshot,
    UnknownVersionError,
)
from mainspring.state.session import append, on, replace_latest, versioned

pytestmark = pytest.mark.anyio

EVENTS = [Said("ada", "a"), Mood(1), Added(3), Said("ada", "b"), Said("bob")]


@pytest.fixture(params=["memory", "journal"])
async def session(request, anyio_backend):
    if request.param == "memory":
        yield Session(State)
    else:
        async with Session.open(State, journal=MemoryJournal()) as session:
            yield session


@pytest.mark.parametrize("form", ["object", "bytes", "text", "mapping"])
async def test_the_state_comes_back(session, form):
    for event in EVENTS:
        await session.dispatch(event)
    snapshot, state = session.snapshot(), session.state
    assert (snapshot.seq, snapshot.version, snapshot.format) == (5, 1, 1)
    raw = snapshot.to_json()
    given = {"object": snapshot, "bytes": raw, "text": raw.decode(), "mapping": json.loads(raw)}[form]
    heard = []
    session.dispatcher.subscribe(object, heard.append)
    await session.dispatch(Added(1))
    result = await session.restore(given)
    assert session.state == state
    assert type(session.state.said) is tuple
    assert result.seq == session.seq == 7
    assert result.changed == ("said", "mood", "latest", "total", "count")
    assert heard == [Added(1)]
    assert Snapshot.of(raw) == snapshot


async def test_it_is_as_durable_as_an_event(anyio_backend):
    journal = MemoryJournal()
    async with Session.open(State, journal=journal) as session:
        await session.dispatch(Added(1))
        snapshot = session.snapshot()
        await session.dispatch(Added(2))
        await session.restore(snapshot)
        await session.dispatch(Added(4))
    async with Session.open(State, journal=journal) as session:
        assert session.state == State(total=5, count=2)
        assert session.seq == 4


async def test_children_are_part_of_it(session):
    child = session.child("kid", State)
    inner = child.child("inner", State)
    await inner.dispatch(Added(1))
    await child.dispatch(Added(2))
    whole, part = session.snapshot(), child.snapshot()
    for one in (session, child, inner):
        await one.dispatch(Added(10))
    later = session.child("later", State)
    await later.dispatch(Added(7))
    await child.restore(part)
    assert [s.state.total for s in (session, child, inner, later)] == [10, 2, 1, 7]
    await session.restore(whole)
    assert [s.state.total for s in (session, child, inner, later)] == [0, 2, 1, 0]


async def test_a_child_that_is_made_later_finds_its_part(session):
    other = Session(State)
    await other.child("kid", State).child("inner", State).dispatch(Added(3))
    await session.restore(other.snapshot())
    again = session.snapshot()
    assert again.children["kid"].children["inner"].slices["total"] == 3
    kid = session.child("kid", State)
    assert session.snapshot().children["kid"].children["inner"].slices["total"] == 3
    assert kid.child("inner", State).state.total == 3
    await session.restore(Session(State).snapshot())
    assert session.children["kid"].children["inner"].state.total == 0


async def test_a_child_that_is_made_while_a_restore_waits_for_its_turn(session):
    await session.child("kid", State).dispatch(Added(1))
    raw = session.snapshot().to_json()
    other = Session(State)
    await other.restore(raw)  # which has no child yet
    asked = anyio.Event()

    async def restore():
        await asked.wait()
        await other.restore(raw)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(restore)
        await anyio.wait_all_tasks_blocked()
        async with other.transaction():
            asked.set()
            await anyio.wait_all_tasks_blocked()
            kid = other.child("kid", State)
    await kid.dispatch(Added(4))
    assert other.snapshot().children["kid"].slices["total"] == kid.state.total == 5


async def snapshot_of_kids():
    session = Session(State)
    await session.dispatch(Added(100))
    for name in ("kid", "other"):
        await session.child(name, State).dispatch(Added(1))
    return session.snapshot()


@pytest.mark.parametrize("errors", [[], [FULL]])
async def test_a_child_that_is_made_while_a_restore_is_written(anyio_backend, errors):
    """It is of the restored state where that becomes durable, and of the one before where it does not."""
    journal, writing, go_on = MemoryJournal(), threading.Event(), threading.Event()
    async with Session.open(State, journal=journal) as session:
        await session.child("kid", State).dispatch(Added(30))
    async with Session.open(State, journal=journal) as session:
        journal.before = lambda: (writing.set(), go_on.wait(30))
        journal.fail = errors.copy()
        outcome = []

        async def restore(snapshot):
            try:
                outcome.append((await session.restore(snapshot)).seq)
            except JournalError as error:
                outcome.append(str(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(restore, await snapshot_of_kids())
            while not writing.is_set():
                await anyio.sleep(0.001)
            kid, new = session.child("kid", State), session.child("new", State)
            tickets = [kid.dispatch_nowait(Added(4)), new.dispatch_nowait(Added(5))]
            assert (session.state.total, kid.state.total, new.state.total) == (0, 30, 0)
            go_on.set()
        for ticket in tickets:
            if errors:
                with pytest.raises(JournalError, match="the disk is full"):
                    await ticket.wait()
            else:
                await ticket.wait()
        assert outcome == ["the disk is full" if errors else 2]
        await kid.dispatch(Added(1000))
        totals = [each.state.total for each in (session, kid, new, session.child("other", State))]
        assert totals == ([0, 1030, 0, 0] if errors else [100, 1005, 5, 1])
    async with Session.open(State, journal=journal) as session:
        names = ("kid", "new", "other")
        assert [session.state.total, *(session.child(name, State).state.total for name in names)] == totals


async def test_a_child_that_is_made_while_the_journal_is_read(anyio_backend):
    """It is read a thousand entries at a time."""
    journal = MemoryJournal()
    async with Session.open(State, journal=journal) as session:
        kid = session.child("kid", State)
        for ticket in [kid.dispatch_nowait(Added(1)) for _ in range(3_500)]:
            await ticket.wait()
    assert len(journal.kept) == 3_500
    session = Session.open(State, journal=journal)
    given, token = journal.entries, anyio.lowlevel.current_token()

    def entries():
        for number, entry in enumerate(given()):
            if number == 1_500:
                anyio.from_thread.run_sync(session.child, "kid", State, token=token)
            yield entry

    journal.entries = entries
    async with session:
        assert session.child("kid", State).state.total == 3_500


async def test_a_child_that_is_made_when_the_session_is_closed(anyio_backend):
    journal = MemoryJournal()
    async with Session.open(State, journal=journal) as session:
        await session.child("kid", State).dispatch(Added(3))
    async with Session.open(State, journal=journal) as session:
        pass
    assert session.child("kid", State).state.total == 3


@pytest.mark.parametrize("how", ["compact", "snapshot", "restore"])
async def test_a_grandchild_is_not_forgotten_though_its_parent_has_nothing(anyio_backend, how):
    journal = MemoryJournal()
    async with Session.open(State, journal=journal) as session:
        await session.child("a", State).child("b", State).dispatch(Added(9))
    async with Session.open(State, journal=journal) as session:
        with pytest.raises(  # noqa: PT012
            SessionError, match=r"events of the child 'a/b', .*: call child\('a', …\)\.child\('b', …\)"
        ):
            if how == "compact":
                await session.compact()
            elif how == "snapshot":
                session.snapshot()
            else:
                sibling = session.child("c", State)
                await sibling.restore(sibling.snapshot())
    async with Session.open(State, journal=journal) as session:
        session.child("a", State)
        with pytest.raises(SessionError, match="events of the child 'a/b'"):
            await session.compact()
        assert session.child("a", State).child("b", State).state.total == 9
        await session.compact()
    async with Session.open(State, journal=journal) as session:
        assert session.snapshot().children["a"].children["b"].slices["total"] == 9
        await session.compact()
        assert session.child("a", State).child("b", State).state.total == 9


async def test_its_number_is_that_of_what_is_in_it(session):
    inside, leave, child = anyio.Event(), anyio.Event(), session.child("kid", State)

    async def transact():
        async with session.transaction():
            await session.dispatch(Added(1))
            assert (session.seq, session.snapshot().seq, child.seq) == (2, 2, 2)
            inside.set()
            await leave.wait()

    await session.dispatch(Added(1))
    heard = []
    session.dispatcher.subscribe(Added, lambda event: heard.append(session.seq))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(transact)
        await inside.wait()
        assert (session.state.total, session.seq, session.snapshot().seq, child.seq) == (1, 1, 1, 1)
        leave.set()
    assert (session.seq, session.snapshot().seq) == (2, 2)
    assert heard == [2]


async def test_its_number_is_not_that_of_what_waits_for_the_journal(anyio_backend):
    journal, go_on = MemoryJournal(), threading.Event()
    async with Session.open(State, journal=journal) as session:
        await session.dispatch(Added(1))
        journal.before = lambda: go_on.wait(30)
        ticket = session.dispatch_nowait(Added(1))
        await anyio.wait_all_tasks_blocked()
        assert (session.state.total, session.seq, session.snapshot().seq) == (1, 1, 1)
        go_on.set()
        await ticket.wait()
        assert (session.seq, session.snapshot().seq) == (2, 2)


# ---------------------------------------------------------------------------------------------------------------- versions


@versioned(3, upcast={1: lambda data: {**data, "total": data["sum"]}, 2: lambda data: {"total": data["total"] * 100}})
@dataclass(frozen=True)
class Third:
    total: Annotated[int, add] = 0


async def test_an_old_one_is_brought_up_to_date(session):
    new = Session(Third)
    await new.restore({"format": 1, "seq": 3, "version": 1, "slices": {"sum": 4}})
    assert new.state.total == 400
    await new.restore(Snapshot(3, 2, {"total": 5}))
    assert new.state.total == 500
    assert new.snapshot().version == 3


@pytest.mark.parametrize(
    ("version", "complaint"),
    [(4, "is stored in version 4, and this code knows it up to version 3"), (2, "nothing leads from version 2 to 3")],
)
async def test_an_unknown_version_is_refused_by_name(anyio_backend, version, complaint):
    @versioned(3)
    @dataclass(frozen=True)
    class Mine:
        total: int = 0

    session = Session(Mine)
    with pytest.raises(UnknownVersionError, match=complaint):
        await session.restore(Snapshot(1, version, {"total": 1}))
    assert session.seq == 0


async def test_an_unknown_format_is_refused(session):
    with pytest.raises(UnknownVersionError, match="the snapshot is of format 2, and this release knows 1"):
        await session.restore({"format": 2, "anything": 1})


@pytest.mark.parametrize("given", ['{"version": 99}', {"version": 4, "format": 1}])
async def test_a_newer_version_is_named_though_nothing_else_can_be_read(anyio_backend, given):
    session = Session(Third)
    with pytest.raises(UnknownVersionError, match=r"restore: the snapshot is of version .*knows it up to version 3"):
        await session.restore(given)
    with pytest.raises(InvalidParameterError, match="this is no snapshot"):
        await session.restore({"version": 3})


async def test_an_upcaster_that_fails(anyio_backend):
    session = Session(Third)
    with pytest.raises(SerializationError, match="the upcaster of 'Third' from version 1 failed: KeyError"):
        await session.restore(Snapshot(1, 1, {}))


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_a_bad_version_number(number):
    with pytest.raises(ConfigError, match="versioned: the version must be a whole number from 1"):
        versioned(number)


def test_an_async_upcaster_is_refused():
    async def up(data):
        return data

    with pytest.raises(ConfigError, match=r"versioned\(2\): the upcaster from version 1 is async"):
        versioned(2, upcast={1: up})


@pytest.mark.parametrize("upcast", [{2: str}, {0: str}, {1: "x"}])
def test_a_bad_upcaster(upcast):
    with pytest.raises(ConfigError, match="is no older version with a function to the next one"):
        versioned(2, upcast=upcast)


# ------------------------------------------------------------------------------------------------------------ what is none


@pytest.mark.parametrize(
    "given", [b"no json", "[1]", {}, {"format": 1}, 3, None, {"format": 1, "seq": -1, "version": 1, "slices": {}}]
)
async def test_what_is_no_snapshot(session, given):
    with pytest.raises((InvalidParameterError, UnknownVersionError), match="restore:"):
        await session.restore(given)
    assert session.seq == 0


@pytest.mark.parametrize("name", ["", "a/b", 5])
async def test_children_of_names_that_none_can_have(session, name):
    inner = {"format": 1, "seq": 0, "version": 1, "slices": {}}
    with pytest.raises(InvalidParameterError, match="restore: this is no snapshot: no child can be called"):
        await session.restore({**inner, "children": {"kid": {**inner, "children": {name: inner}}}})
    assert session.seq == 0


async def returns_later(data):
    return data


@pytest.mark.parametrize(
    ("upcast", "complaint"),
    [
        (lambda data: returns_later(data), "it returned a coroutine, so its work has not run"),
        (lambda data: {"total": object()}, "Unable to serialize unknown type"),
        (lambda data: sys.exit(3), "SystemExit: 3"),
    ],
)
async def test_what_an_upcaster_cannot_return(anyio_backend, upcast, complaint):
    @versioned(2, upcast={1: upcast})
    @dataclass(frozen=True)
    class Mine:
        total: int = 0

    with pytest.raises(SerializationError, match=f"the upcaster of 'Mine' from version 1 failed: .*{complaint}"):
        await Session(Mine).restore(Snapshot(1, 1, {"total": 1}))


async def test_one_that_the_state_class_refuses(anyio_backend):
    session = Session(Bounded)
    with pytest.raises(SerializationError, match=r"Bounded refuses its slices: ValueError: at most 3"):
        await session.restore(Snapshot(1, 1, {"total": 4}))
    assert session.state == Bounded()


async def test_one_that_does_not_fit(session):
    with pytest.raises(SerializationError, match="has no slice 'sum', which the snapshot holds"):
        await session.restore(Snapshot(1, 1, {"sum": 1}))
    with pytest.raises(SerializationError, match="slice 'total': the stored body does not fit int"):
        await session.restore(Snapshot(1, 1, {"total": "many"}))
    await session.restore(Snapshot(1, 1, {"total": 2}))  # what it does not know is as at first
    assert session.state == State(total=2)


async def test_a_slice_whose_type_nobody_says(anyio_backend):
    session = Session()
    session.register(Added, "total", lambda total, event: total, initial=0)
    with pytest.raises(ConfigError, match=r"nothing says of what type slice 'total' is: register\(…, type=…\)"):
        session.snapshot()


async def test_types_of_registered_slices(anyio_backend):
    session = Session()
    session.register(Said, "log", append)
    session.register(Mood, "log", append)
    session.register(Mood, "mood", replace_latest)
    session.register(Added, "total", add, initial=0)
    session.register(Added, "money", lambda money, event: money + Decimal("0.1"), initial=Decimal(0), type=Decimal)
    for event in EVENTS:
        await session.dispatch(event)
    state = dict(session.state)
    await session.restore(session.snapshot().to_json())
    assert dict(session.state) == state


async def test_a_handler_goes_on_where_it_was(virtual_clock):
    from mainspring import Context, InMemoryMailbox, LoopGroup, MainLoop

    seen = []

    async def handle(job: str, ctx: Context) -> None:
        session = Session(State)
        if ctx.restored is not None:
            await session.restore(ctx.restored)
        await session.dispatch(Added(1))
        await ctx.checkpoint(session.snapshot())
        seen.append(session.state.total)
        if session.state.total < 3:
            raise ConnectionError

    async with InMemoryMailbox("jobs", body=str) as jobs:
        await jobs.send("x")
        await LoopGroup([MainLoop(jobs, handle)]).run(install_signals=False, until_empty=True)
    assert seen == [1, 2, 3]


@dataclass(frozen=True)
class Odd:
    value: Annotated[Any, on(Added, lambda value, event: object())] = None


async def test_what_is_no_json(anyio_backend):
    session = Session(Odd)
    await session.dispatch(Added(1))
    with pytest.raises(SerializationError, match="cannot be written as JSON"):
        session.snapshot()


async def test_compaction_needs_the_journal_and_all_children(anyio_backend):
    with pytest.raises(ConfigError, match="has no journal to compact"):
        await Session(State).compact()
    with pytest.raises(ConfigError, match="is a child: compact"):
        await Session(State).child("kid").compact()
    journal = MemoryJournal()
    async with Session.open(State, journal=journal) as session:
        await session.child("kid", State).dispatch(Added(2))
    async with Session.open(State, journal=journal) as session:
        with pytest.raises(SessionError, match="has events of the child 'kid', which is not made yet"):
            await session.compact()
        assert len(journal.kept) == 1
        session.child("kid", State)
        await session.compact()
        async with session.transaction():
            with anyio.fail_after(30), pytest.raises(ConfigError, match="in a transaction already"):
                await session.compact()
    async with Session.open(State, journal=journal) as session:
        assert session.child("kid", State).state.total == 2
        assert session.seq == 1
