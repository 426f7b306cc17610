"""``Session``: one writer, typed slices, reducers that cannot spoil anything, subscribers, and nothing lost among tasks."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
from session_state import Added, Bounded, Broken, MemoryJournal, Mood, Said, State, add, folded

from mainspring import ConfigError, Dispatcher, InvalidParameterError, ReducerError, Session, SessionError
from mainspring.events import DispatchResult
from mainspring.state.session import append, on, replace_latest, upsert_by
from mainspring.state.session.writer import Ignored

pytestmark = pytest.mark.anyio


# ------------------------------------------------------------------------------------------------------------ dispatches


async def test_each_slice_is_reduced_from_its_events(anyio_backend):
    session = Session(State)
    events = [Said("ada", "a"), Mood(1), Said("bob"), Added(3), Said("ada", "b"), Mood(2)]
    results = [await session.dispatch(event) for event in events]
    assert session.state == folded(events)
    assert results[0] == DispatchResult(0, (), ("said", "latest"), 1)
    assert [result.seq for result in results] == [1, 2, 3, 4, 5, 6]
    assert session.seq == 6
    assert all(result.applied for result in results)
    assert session["total"] == 3
    with pytest.raises(InvalidParameterError, match="has no slice 'totals'; there are said, mood"):
        session["totals"]


async def test_a_thousand_tasks_lose_no_update(anyio_backend):
    session, results = Session(State), []

    async def write(number):
        results.append(await session.dispatch(Added(number)))

    async with anyio.create_task_group() as tasks:
        for number in range(1000):
            tasks.start_soon(write, number)
    assert session.state.count == 1000
    assert session.state.total == sum(range(1000))
    assert sorted(result.seq for result in results) == list(range(1, 1001))


async def test_one_that_only_dispatches_lets_others_run(anyio_backend):
    session, turns = Session(State), []

    async def write():
        for number in range(50):
            await session.dispatch(Added(number))
            turns.append(1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert len(turns) < 50


async def test_cancelled_before_its_turn_it_is_not_applied(anyio_backend):
    session = Session(State)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await session.dispatch(Added(1))
    assert session.seq == 0


def test_without_an_event_loop(caplog):
    session = Session(State)
    ticket = session.dispatch_nowait(Added(2))
    assert ticket.wait_sync().changed == ("total", "count")
    assert session.state == State(total=2, count=1)


async def test_another_thread_is_refused_and_told_the_way_in(anyio_backend):
    session = Session(State)
    await session.dispatch(Added(1))
    with pytest.raises(ConfigError, match=r"is written in one thread.*from_thread\.run\(session\.dispatch, event\)"):
        await anyio.to_thread.run_sync(session.dispatch_nowait, Added(1))
    for _ in range(3):
        await anyio.to_thread.run_sync(partial(anyio.from_thread.run, session.dispatch, Added(1)))
    assert session.state.total == 4


async def test_another_thread_reads_what_was_at_one_moment(anyio_backend):
    session, seen, done = Session(State), [], threading.Event()

    def read():
        while not done.is_set():
            state = session.state
            seen.append(state.total - state.count)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, read)
        while not seen:  # a thread may begin later than all of the rest takes
            await anyio.sleep(0.001)
        for _ in range(3000):
            await session.dispatch(Added(1))
        done.set()
    assert set(seen) == {0}  # two slices of one event: never one without the other


# --------------------------------------------------------------------------------------------------------------- reducers


@pytest.mark.parametrize("error", [Broken("mine"), SystemExit(3)])
async def test_a_reducer_that_raises_is_in_the_result_and_changes_nothing(anyio_backend, caplog, error):
    session, heard = Session(), []

    def explode(total: int, event: Added) -> int:
        raise error

    session.register(Added, "log", append)
    session.register(Added, "total", explode, initial=0)
    session.dispatcher.subscribe(Added, heard.append)
    with caplog.at_level(logging.ERROR, "mainspring"):
        result = await session.dispatch(Added(1))
    (told,) = result.errors
    assert isinstance(told, ReducerError)
    assert told.__cause__ is error
    assert "the reducer explode of slice 'total' failed on Added" in str(told)
    assert not result.applied
    assert result.changed == ()
    assert heard == []
    assert session["log"] == ()
    assert session.seq == 0
    assert "a reducer of Added raised" in caplog.text


class Basket(list):
    pass


CHANGEABLE = [[1], {}, set(), bytearray(), Counter(), OrderedDict(), defaultdict(int), deque(), Basket(), array("i")]


@pytest.mark.parametrize("value", CHANGEABLE)
async def test_a_slice_that_could_be_changed_is_refused(anyio_backend, value):
    session = Session()
    session.register(Added, "items", lambda items, event: value, initial=())
    (error,) = (await session.dispatch(Added(1))).errors
    assert f"slice 'items' cannot be a {type(value).__name__}" in str(error)
    with pytest.raises(ReducerError, match="use a tuple, a frozenset or a frozen dataclass"):
        session.register(Added, "others", append, initial=value)
    assert (await session.dispatch(Added(1))).errors  # and the next time


async def later(total: int, event: Added) -> int:
    return total


async def later_many(total: int, event: Added):
    yield total


class Later:
    async def __call__(self, total: int, event: Added) -> int:
        return total


def drip(total: int, event: Added):
    yield total


@pytest.mark.parametrize("reducer", [later, later_many, Later(), drip, partial(later)])
def test_an_async_reducer_is_refused_by_name(reducer):
    name = "Later" if isinstance(reducer, Later) else getattr(reducer, "__name__", "later")
    with pytest.raises(ConfigError, match=f"the reducer {name} is async or a generator"):
        Session().register(Added, "total", reducer, initial=0)
    with pytest.raises(ConfigError, match=f"the reducer {name} is async"):
        on(Added, reducer)


async def test_one_that_hides_that_it_is_async_is_found_when_it_runs(anyio_backend):
    session = Session()
    session.register(Added, "total", lambda total, event: later(total, event), initial=0)
    (error,) = (await session.dispatch(Added(1))).errors
    assert "slice 'total' cannot be a coroutine" in str(error)


async def test_a_reducer_must_not_dispatch(anyio_backend):
    session = Session()

    def greedy(total: int, event: Added) -> int:
        session.dispatch_nowait(Added(1))
        return total + 1

    session.register(Added, "total", greedy, initial=0)
    (error,) = (await session.dispatch(Added(1))).errors
    assert isinstance(error.__cause__, SessionError)
    assert "a reducer only computes the next slice" in str(error)
    assert session["total"] == 0
    session.register(Mood, "mood", replace_latest)
    assert (await session.dispatch(Mood(1))).applied  # the session goes on


@pytest.mark.parametrize(
    ("reducer", "complaint"),
    [
        (lambda total: total, "cannot be called as"),
        (lambda a, b, c: a, "cannot be called as"),
        ("append", "must be append, replace_latest"),
        (None, "must be append, replace_latest"),
    ],
)
def test_what_is_no_reducer(reducer, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Session().register(Added, "total", reducer, initial=0)


@pytest.mark.parametrize("key", [3, None, "a b", ""])
def test_a_bad_key(key):
    with pytest.raises(ConfigError, match="upsert_by takes the name of an attribute, or a function"):
        upsert_by(key)

    async def key(event: object) -> int:
        return 1

    with pytest.raises(ConfigError, match="upsert_by: the key must be a plain function"):
        upsert_by(key)


async def test_a_key_can_be_computed(anyio_backend):
    session = Session()
    session.register(Said, "latest", upsert_by(lambda said: said.who.lower()))
    for said in (Said("Ada"), Said("Bob"), Said("ada", "again")):
        await session.dispatch(said)
    assert session["latest"] == (Said("ada", "again"), Said("Bob"))


# ------------------------------------------------------------------------------------------------------------ registration


async def test_slices_by_call(anyio_backend):
    session = Session()
    session.register(Said, "log", append)
    session.register(Mood, "log", append)
    session.register(Mood, "mood", replace_latest)
    session.register(Added, "total", add, initial=10)
    events = [Said("ada"), Mood(4), Added(5)]
    for event in events:
        await session.dispatch(event)
    assert dict(session.state) == {"log": (Said("ada"), Mood(4)), "mood": Mood(4), "total": 15}
    with pytest.raises(TypeError):
        session.state["log"] = ()


async def test_a_slice_beside_those_of_the_state_class(anyio_backend):
    session = Session(State)
    await session.dispatch(Mood(1))
    session.register(Mood, "moods", append)
    session.register(Said, "count", lambda count, event: count + 100)
    await session.dispatch(Mood(2))
    await session.dispatch(Said("ada"))
    assert session["moods"] == (Mood(2),)
    assert session.state.count == 102


async def test_initial_values_of_an_instance(anyio_backend):
    session = Session(State(total=5))
    await session.dispatch(Added(1))
    assert session.state.total == 6


@dataclass(frozen=True)
class Whispered(Said):
    loud: bool = False


class Pair(NamedTuple):
    left: int


async def test_a_type_covers_its_subclasses_as_with_subscribers(anyio_backend):
    session = Session()
    session.register(Said, "said", append)
    session.register(Pair, "pairs", append)
    await session.dispatch(Whispered("ada"))
    await session.dispatch(Pair(1))
    assert session["said"] == (Whispered("ada"),)
    assert session["pairs"] == (Pair(1),)


@dataclass
class Changeable:
    number: int


@dataclass(frozen=True)
class Unclear:
    total: Annotated[int, lambda total, event: total] = 0


@dataclass(frozen=True)
class Unresolved:
    total: Annotated[Nowhere, append] = ()  # noqa: F821


@dataclass(frozen=True)
class NoDefault:
    total: int


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Session().register(Changeable, "x", append), "Changeable cannot be an event: make it a @dataclass"),
        (lambda: Session().register(3, "x", append), "an event type must be a class"),
        (lambda: Session().register(Added, "x", add), "the slice 'x' is new: register"),
        (lambda: Session(State).register(Added, "total", add, initial=1), "has an initial value already"),
        (lambda: Session(Changeable(1)), "cannot be a session's state: make it a @dataclass"),
        (lambda: Session(int), "cannot be a session's state"),
        (lambda: Session(Unclear), r"does not say for which events it is; write on\(EventType"),
        (lambda: Session(Unresolved), "define what its annotations name at module level"),
        (lambda: Session(NoDefault), "needs a default for each field, or give an instance"),
    ],
)
def test_what_cannot_be_registered(make, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make()


@pytest.mark.parametrize("name", ["", "a b", 3, "a/b"])
def test_a_slice_has_a_name(name):
    with pytest.raises(InvalidParameterError, match="a slice is called by a name like 'messages'"):
        Session().register(Added, name, append)


def test_a_state_is_a_value():
    session = Session(State)
    assert session.state is session.state
    with pytest.raises(dataclasses.FrozenInstanceError):
        session.state.total = 3
    assert repr(session) == "<Session 'session' with said, mood, latest, total, count after event 0>"


# ------------------------------------------------------------------------------------------------------------ subscribers


async def test_subscribers_are_told_after_the_change_and_their_errors_do_no_harm(anyio_backend, caplog):
    session, heard = Session(State), []

    def broken(event):
        raise Broken("mine")

    session.dispatcher.subscribe(Added, lambda event: heard.append(("first", session.state.total)))
    session.dispatcher.subscribe(Added, broken)
    session.dispatcher.subscribe(object, lambda event: heard.append(("last", session.state.total)))
    result = await session.dispatch(Added(7))
    assert heard == [("first", 7), ("last", 7)]
    assert result.delivered == 2
    assert result.applied
    assert [type(error) for error in result.errors] == [Broken]


async def test_an_event_without_a_reducer_is_only_told(anyio_backend):
    session, heard = Session(State), []
    session.dispatcher.subscribe(Pair, heard.append)
    before = session.state
    assert await session.dispatch(Pair(1)) == DispatchResult(1, (), (), None)
    assert heard == [Pair(1)]
    assert session.state is before


@dataclass(frozen=True)
class Misnamed:
    number: int = 0


@pytest.mark.parametrize("journaled", [False, True])
async def test_an_event_that_nobody_takes_is_said_so(anyio_backend, caplog, journaled):
    journal = MemoryJournal()
    session = Session.open(State, journal=journal) if journaled else Session(State)
    async with session:
        assert not (await session.dispatch(Added(1))).ignored
        for _ in range(2):
            assert await session.dispatch(Misnamed()) == Ignored()
        async with session.transaction():
            assert (await session.dispatch(Misnamed())).ignored
        assert not (await session.restore(session.snapshot())).ignored
        (line,) = (record.getMessage() for record in caplog.records)
        assert line == (
            "session 'session': nothing takes events of type Misnamed: no reducer is for them, and no subscriber hears them"
        )
        session.dispatcher.subscribe(Misnamed, lambda event: None)
        assert await session.dispatch(Misnamed()) == DispatchResult(1)
        async with session.transaction():
            assert not (await session.dispatch(Misnamed())).ignored
        assert session.state.total == 1


@pytest.mark.parametrize("journaled", [False, True])
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("hello", "'hello' is no event: nothing takes a str; dispatch a @dataclass"),
        (Added, "Added'> is no event: nothing takes a type; dispatch an instance of it"),
        ({"number": 1}, "is no event: nothing takes a dict"),
    ],
)
async def test_what_is_no_event_is_refused(anyio_backend, journaled, mistake, message):
    session = Session.open(State, journal=MemoryJournal()) if journaled else Session(State)
    async with session:
        with pytest.raises(InvalidParameterError, match=message):
            await session.dispatch(mistake)
        with pytest.raises(InvalidParameterError, match=message):
            await session.dispatch_nowait(mistake).wait()
        async with session.transaction():
            with pytest.raises(InvalidParameterError, match=message):
                await session.dispatch(mistake)
        heard = []
        session.dispatcher.subscribe(object, heard.append)
        assert (await session.dispatch(mistake)).delivered == 1  # a subscriber may hear of anything
        assert heard == [mistake]


async def test_what_a_subscriber_dispatches_comes_after_what_it_was_told_of(anyio_backend):
    session, heard, tickets = Session(State), [], []

    def first(event):
        if event.number < 20:
            tickets.append(session.dispatch_nowait(Added(event.number * 2)))
            tickets.append(session.dispatch_nowait(Added(event.number * 10)))
            assert not tickets[-1].is_ready

    session.dispatcher.subscribe(Added, first)
    session.dispatcher.subscribe(Added, lambda event: heard.append(event.number))
    result = await session.dispatch(Added(5))
    assert result.seq == 1
    assert heard == [5, 10, 50, 20, 100]
    assert [(await ticket.wait()).seq for ticket in tickets] == [2, 3, 4, 5]
    assert session.state.total == 185


@pytest.mark.parametrize("journaled", [False, True])
async def test_a_state_class_that_refuses_its_slices_is_as_a_reducer_that_raises(anyio_backend, journaled):
    session = Session.open(Bounded, journal=MemoryJournal()) if journaled else Session(Bounded)
    async with session:
        assert (await session.dispatch(Added(3))).applied
        result = await session.dispatch(Added(1))
        assert not result.applied
        with pytest.raises(ReducerError, match=r"session 'session': Bounded refuses its slices: ValueError: at most 3"):
            raise result.errors[0]
        async with session.transaction():
            assert not (await session.dispatch(Added(1))).applied
        assert session.state == Bounded(3)
        assert session.seq == 1


@pytest.mark.parametrize("where", ["memory", "journal", "transaction", "transaction of a journal"])
async def test_the_ticket_has_the_error_of_a_bad_event(anyio_backend, where):
    journaled = "journal" in where
    session = Session.open(State, journal=MemoryJournal()) if journaled else Session(State)
    async with session:
        if "transaction" in where:
            async with session.transaction():
                ticket = session.dispatch_nowait("no event")
        else:
            ticket = session.dispatch_nowait("no event")
        with anyio.fail_after(30), pytest.raises(InvalidParameterError, match="is no event"):
            await ticket.wait()


@pytest.mark.parametrize("journaled", [False, True])
@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
async def test_a_subscriber_that_raises_no_exception_holds_nothing_up(anyio_backend, journaled, error):
    session = Session.open(State, journal=MemoryJournal()) if journaled else Session(State)
    tickets, heard = [], []

    def follow(event):
        if event.value == 1:
            tickets.append(session.dispatch_nowait(Mood(2)))

    def broken(event):
        if event.value == 1:
            raise error

    for subscriber in (follow, broken, heard.append):
        session.dispatcher.subscribe(Mood, subscriber)
    async with session:
        with anyio.fail_after(30):
            if error is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    await session.dispatch(Mood(1))
            else:
                result = await session.dispatch(Mood(1))
                assert result.applied
                assert isinstance(result.errors[0], error)
            assert (await tickets[0].wait()).applied
        assert heard == [Mood(1), Mood(2)]
        assert session.state.mood == Mood(2)


async def test_nested_dispatches_of_many_tasks_are_all_there(anyio_backend):
    session = Session(State)
    session.dispatcher.subscribe(Added, lambda event: session.dispatch_nowait(Mood(event.number)))
    async with anyio.create_task_group() as tasks:
        for number in range(1000):
            tasks.start_soon(session.dispatch, Added(number))
    assert session.state.count == 2000
    assert session.seq == 2000


async def test_a_dispatcher_of_somebody_else(anyio_backend):
    heard, bus = [], Dispatcher()
    bus.subscribe(Added, heard.append)
    session = Session(State, dispatcher=bus)
    await session.dispatch(Added(1))
    assert heard == [Added(1)]


# --------------------------------------------------------------------------------------------------------------- children


async def test_a_child_has_slices_of_its_own_on_the_writer_of_its_parent(anyio_backend):
    parent, heard = Session(State), []
    child = parent.child("planner", State)
    grandchild = child.child("search", State)
    parent.dispatcher.subscribe(Added, lambda event: heard.append(("parent", event.number)))
    child.dispatcher.subscribe(Added, lambda event: heard.append(("child", event.number)))
    await parent.dispatch(Added(1))
    await child.dispatch(Added(2))
    result = await grandchild.dispatch(Added(3))
    assert [session.state.total for session in (parent, child, grandchild)] == [1, 2, 3]
    assert result.seq == 3 == parent.seq == child.seq
    assert heard == [("parent", 1), ("child", 2), ("parent", 2), ("child", 3), ("parent", 3)]
    assert parent.children == {"planner": child}
    assert child.children == {"search": grandchild}
    assert grandchild.name == "session/planner/search"
    assert parent.child("planner", State) is child
    with pytest.raises(ConfigError, match="has a child 'planner' already, with another state class"):
        parent.child("planner")
    for name in ("", "a/b", None):
        with pytest.raises(InvalidParameterError, match="child: a name of at least one character without '/'"):
            parent.child(name)
    with pytest.raises(ConfigError, match="is a child: its parent opens it"):
        async with child:
            pass


@pytest.mark.parametrize("journaled", [False, True])
async def test_a_reducer_registers_nothing(anyio_backend, journaled):
    journal = MemoryJournal()

    def late(total, event):
        session.register(Said, "late", append)
        return total + event.number

    session = Session.open(journal=journal) if journaled else Session()
    session.register(Added, "total", late, initial=0, type=int)
    async with session:
        result = await session.dispatch(Added(1))
        assert isinstance(result.errors[0].__cause__, SessionError)
        assert "register slices before events are dispatched" in str(result.errors[0])
        assert set(session.state) == {"total"}
        assert session["total"] == 0
