"""What a session holds comes back as it was, class by class, from journals and snapshots; or it is refused in time."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from session_state import MemoryJournal

from mainspring import ConfigError, SerializationError, Session, UnknownEventError, UnknownVersionError
from mainspring.state.session import append, on, replace_latest, upsert_by, versioned

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Opened:
    door: str


@dataclass(frozen=True)
class Closed:
    door: str


@dataclass(frozen=True)
class Base:
    a: int


@dataclass(frozen=True)
class Sub(Base):
    b: int = 0


@dataclass(frozen=True)
class Doors:
    log: Annotated[tuple[Opened | Closed, ...], append] = ()
    now: Annotated[tuple[Opened | Closed, ...], upsert_by("door")] = ()
    latest: Annotated[Opened | Closed | None, replace_latest] = None
    under: Annotated[tuple[Base, ...], on(Base, append), on(Sub, lambda under, event: under)] = ()


DOORS = [Opened("a"), Closed("a"), Opened("b"), Closed("b"), Base(1), Sub(1, 2)]


@pytest.mark.parametrize("way", ["replay", "compact", "restore"])
async def test_events_of_like_fields_remain_what_they_are(anyio_backend, way):
    journal = MemoryJournal()
    async with Session.open(Doors, journal=journal) as session:
        for event in DOORS:
            await session.dispatch(event)
        before = session.state
        if way == "compact":
            await session.compact()
        elif way == "restore":
            await session.restore(session.snapshot().to_json())
            assert session.state == before
    async with Session.open(Doors, journal=journal) as session:
        assert session.state == before
        assert session.state.latest == Closed("b")
        assert type(session.state.under[1]) is Sub


async def test_what_is_registered_too(anyio_backend):
    session = Session()
    session.register(Opened, "log", append)
    assert session.snapshot().slices == {"log": []}
    session.register(Closed, "log", append)
    await session.dispatch(Opened("a"))
    await session.dispatch(Closed("a"))
    await session.restore(session.snapshot())
    assert session["log"] == (Opened("a"), Closed("a"))


async def test_a_class_that_is_not_registered_itself_is_not_taken_for_the_one_above_it(anyio_backend):
    session = Session()
    session.register(Base, "log", append)
    await session.dispatch(Sub(1, 2))
    with pytest.raises(SerializationError, match=r"slice 'log': .* it is a Sub and would come back as a Base"):
        session.snapshot()


@dataclass(frozen=True)
class Cat:
    name: str


@dataclass(frozen=True)
class Dog:
    name: str


@dataclass(frozen=True)
class Tabby(Cat):
    stripes: int = 3


@dataclass(frozen=True)
class Adopted:
    pet: Cat | Dog


@dataclass(frozen=True)
class Told:
    what: Any


@dataclass(frozen=True)
class Pet:
    toys: Any


@dataclass(frozen=True)
class Home:
    pets: Annotated[tuple[Adopted, ...], append] = ()
    told: Annotated[tuple[Told, ...], append] = ()
    first: Annotated[Cat | Dog | None, on(Adopted, lambda first, event: first or event.pet)] = None


@pytest.mark.parametrize("event", [Adopted(Dog("a")), Adopted(Tabby("a", 9)), Told((1, 2)), Told(Cat("a"))])
async def test_what_could_not_be_read_back_as_it_is_is_refused_at_its_dispatch(anyio_backend, event):
    journal = MemoryJournal()
    async with Session.open(Home, journal=journal) as session:
        with pytest.raises(
            SerializationError,
            match=r"event \w+: .* as it is: (pet|what) is a \w+ and would come back as a \w+; annotate",
        ):
            await session.dispatch(event)
        await session.dispatch(Adopted(Cat("b")))
        await session.dispatch(Told([1, "x", {"y": None}]))
        before = session.state
    async with Session.open(Home, journal=journal) as session:
        assert session.state == before


@pytest.mark.parametrize("slice_", ["pets", "first"])
async def test_a_snapshot_that_would_be_another_state_is_refused(anyio_backend, slice_):
    session = Session()
    if slice_ == "pets":
        session.register(Adopted, "pets", append)
    else:
        session.register(Adopted, "first", lambda first, event: event.pet, initial=None, type=Cat | Dog | None)
    await session.dispatch(Adopted(Dog("a")))
    with pytest.raises(
        SerializationError, match=f"session 'session': slice '{slice_}': .* is a Dog and would come back as a Cat"
    ):
        session.snapshot()


# ---------------------------------------------------------------------------------------------------------------- versions


def said(version):
    if version == 1:
        return dataclass(frozen=True)(type("Said", (), {"__annotations__": {"text": str}}))
    kind = type("Said", (), {"__annotations__": {"text": str, "language": str}})
    return versioned(2, upcast={1: lambda data: {**data, "language": "en"}})(dataclass(frozen=True)(kind))


@pytest.mark.parametrize("reducer", [append, replace_latest, upsert_by("text")])
@pytest.mark.parametrize("way", ["compact", "restore"])
async def test_an_event_in_a_snapshot_is_brought_up_to_date(anyio_backend, way, reducer):
    journal, (old, new) = MemoryJournal(), (said(1), said(2))

    def opened(kind):
        session = Session.open(journal=journal)
        session.register(kind, "said", reducer)
        return session

    async with opened(old) as session:
        await session.dispatch(old("hello"))
        snapshot = session.snapshot().to_json()
        await (session.compact() if way == "compact" else session.restore(snapshot))
    async with opened(new) as session:
        expected = new("hello", "en") if reducer is replace_latest else (new("hello", "en"),)
        assert session["said"] == expected
        await session.restore(snapshot)
        assert session["said"] == expected
        snapshot = session.snapshot().to_json()
        await session.compact()
    with pytest.raises(
        UnknownVersionError, match="'Said' is stored in version 2, and this code knows it up to version 1"
    ):
        async with opened(old):
            pass


async def test_an_event_in_a_snapshot_that_nobody_knows_any_more(anyio_backend):
    session = Session()
    session.register(Opened, "log", append)
    session.register(Closed, "log", append)
    await session.dispatch(Closed("a"))
    new = Session()
    new.register(Opened, "log", append)
    with pytest.raises(UnknownEventError, match="slice 'log' holds an event 'Closed', which is not registered"):
        await new.restore(session.snapshot())


async def test_a_slice_that_the_upcaster_of_the_state_has_written_needs_no_versions(anyio_backend):
    @versioned(2, upcast={1: lambda data: {"log": [{"door": name} for name in data["doors"]]}})
    @dataclass(frozen=True)
    class Mine:
        log: Annotated[tuple[Opened, ...], append] = ()

    session = Session(Mine)
    await session.restore({"format": 1, "seq": 1, "version": 1, "slices": {"doors": ["a", "b"]}})
    assert session.state.log == (Opened("a"), Opened("b"))


async def test_two_types_of_one_stored_name_in_a_slice(anyio_backend):
    session = Session()
    session.register(Opened, "log", append)
    session.register(versioned(1, name="Opened")(dataclass(frozen=True)(type("Other", (), {}))), "log", append)
    with pytest.raises(ConfigError, match="two event types are stored as 'Opened'"):
        session.snapshot()


def nested(depth):
    data = 1
    for _ in range(depth):
        data = [data]
    return data


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize(
    ("what", "said"),
    [(nested(190), "nested more than 190 deep"), (10**4_300, "4,300 digits"), ({"n": [-(10**5_000)]}, "4,300 digits")],
    ids=["deep", "long", "long within"],
)
async def test_an_event_that_could_not_be_read_is_refused_and_those_around_it_are_there(
    anyio_backend, what, said, in_transaction
):
    journal = MemoryJournal()
    async with Session.open(Home, journal=journal) as session:
        await session.dispatch(Told(nested(189)))
        with pytest.raises(SerializationError, match=said):
            async with session.transaction() if in_transaction else nullcontext():
                await session.dispatch(Told(what))
        await session.dispatch(Told(10**4_299))
    async with Session.open(Home, journal=journal) as session:
        assert session.state.told == (Told(nested(189)), Told(10**4_299))
        await session.compact()
    async with Session.open(Home, journal=journal) as session:
        assert session.state.told == (Told(nested(189)), Told(10**4_299))


async def test_a_snapshot_that_could_not_be_read_is_refused_and_the_journal_remains(anyio_backend):
    journal = MemoryJournal()

    def opened():
        session = Session.open(journal=journal)
        session.register(Told, "deep", lambda deep, event: Pet(nested(198)), initial=None, type=Pet | None)
        return session

    async with opened() as session:
        await session.dispatch(Told(1))
        with pytest.raises(SerializationError, match="snapshot cannot be written"):
            await session.compact()
    async with opened() as session:
        assert session.seq == 1


@dataclass(frozen=True)
class Shifting:
    n: int

    def __post_init__(self):
        object.__setattr__(self, "n", self.n + 1)


async def test_an_event_that_computes_its_fields_anew(anyio_backend):
    session = Session.open(journal=MemoryJournal())
    session.register(Shifting, "log", append)
    async with session:
        with pytest.raises(SerializationError, match=r"event Shifting: .* n is 2 and would come back as 3"):
            await session.dispatch(Shifting(1))
