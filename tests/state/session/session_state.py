"""What the tests of sessions share: events, a state class, and a journal in memory that misbehaves on demand."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Annotated

import anyio

from mainspring.errors import JournalError, JournalLockedError
from mainspring.state.session import append, on, replace_latest, upsert_by
from mainspring.state.session.journal import Journal


@dataclass(frozen=True)
class Said:
    who: str
    text: str = ""


@dataclass(frozen=True)
class Mood:
    value: int


@dataclass(frozen=True)
class Added:
    number: int


class Broken(Exception):
    pass


def add(total: int, event: Added) -> int:
    if event.number < 0:
        raise Broken(event.number)
    return total + event.number


@dataclass(frozen=True)
class State:
    said: Annotated[tuple[Said, ...], append] = ()
    mood: Annotated[Mood | None, replace_latest] = None
    latest: Annotated[tuple[Said, ...], upsert_by("who")] = ()
    total: Annotated[int, add] = 0
    count: Annotated[int, on(Added, lambda count, event: count + 1), on(Mood, lambda count, event: count + 1)] = 0


@dataclass(frozen=True)
class Bounded:
    total: Annotated[int, add] = 0

    def __post_init__(self):
        if self.total > 3:
            raise ValueError("at most 3")


def folded(events, state=None):
    """What the events come to, computed without a session."""
    state = state or State()
    said, mood, latest, total, count = state.said, state.mood, dict.fromkeys(()), state.total, state.count
    latest = {event.who: event for event in state.latest}
    for event in events:
        if isinstance(event, Said):
            said = (*said, event)
            latest[event.who] = event
        elif isinstance(event, Mood):
            mood, count = event, count + 1
        elif event.number >= 0:
            total, count = total + event.number, count + 1
    return State(said, mood, tuple(latest.values()), total, count)


class MemoryJournal(Journal):
    """Keeps entries in a list; ``writes`` has the size of each write, ``fail`` the errors of the next ones."""

    name = "the journal in memory"

    def __init__(self, entries=()):
        self.kept = list(entries)
        self.writes = []
        self.fail = []
        self.before = lambda: None
        self.is_open = False
        self.closed = threading.Event()

    def open(self):
        assert not self.is_open
        self.is_open = True
        self.closed.clear()

    def entries(self):
        yield from self.kept

    def append(self, entries):
        assert self.is_open
        self.before()
        if self.fail and (error := self.fail.pop(0)) is not None:
            raise error
        self.writes.append(len(entries))
        self.kept += entries

    def rewrite(self, entries):
        if self.fail and (error := self.fail.pop(0)) is not None:
            raise error
        self.kept[:] = entries

    def close(self):
        self.is_open = False
        self.closed.set()


async def until_free(session):
    """Open the session, and close it, as soon as what it gave up before has let go of its journal."""
    with anyio.fail_after(60):
        while True:
            try:
                async with session:
                    return
            except JournalLockedError:
                await anyio.sleep(0.001)


FULL = JournalError("the disk is full")
