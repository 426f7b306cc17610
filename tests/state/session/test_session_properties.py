"""Whatever happens to a session, its state is what a plain fold of its events says, and so is what a journal brings back."""

from __future__ import annotations

import contextlib
from functools import partial

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_state import FULL, Added, MemoryJournal, Mood, Said, State, folded

from mainspring import JournalDamagedError, JournalError, Session
from mainspring.state.session.journal_file import FileJournal
from mainspring.state.session.records import entry_of_events
from mainspring.testing import run_virtual

EVENT = st.one_of(
    st.builds(Said, st.sampled_from("abc"), st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
    st.builds(Mood, st.integers(-(2**70), 2**70)),
    st.builds(Added, st.integers(-2, 9)),  # a negative one is refused by its reducer
)
STEP = st.one_of(
    st.tuples(st.just("dispatch"), st.sampled_from(["", "kid"]), EVENT),
    st.tuples(st.just("commit"), st.sampled_from(["", "kid"]), st.lists(EVENT, max_size=4)),
    st.tuples(st.just("roll back"), st.sampled_from(["", "kid"]), st.lists(EVENT, max_size=4)),
    st.tuples(st.just("disk full"), st.sampled_from(["", "kid"]), EVENT),
    st.sampled_from([("snapshot", "", None), ("restore", "", None), ("compact", "", None), ("reopen", "", None)]),
)
QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


class Plain:
    """The same without a session: states by name, each a plain fold."""

    def __init__(self):
        self.states = {"": State(), "kid": State()}
        self.saved = dict(self.states)

    def take(self, who, events):
        self.states[who] = folded(events, self.states[who])


class RolledBack(Exception):
    pass


async def play(steps, journal):
    plain, snapshot = Plain(), Session(State).snapshot()
    session = Session.open(State, journal=journal)
    session.child("kid", State)
    await session.__aenter__()
    for kind, who, what in steps:
        target = session if not who else session.children[who]
        if kind == "dispatch":
            result = await target.dispatch(what)
            assert result.applied == (not isinstance(what, Added) or what.number >= 0)
            plain.take(who, [what])
        elif kind == "commit":
            async with target.transaction():
                for event in what:
                    await target.dispatch(event)
            plain.take(who, what)
        elif kind == "roll back":
            with pytest.raises(RolledBack):  # noqa: PT012
                async with target.transaction():
                    for event in what:
                        await target.dispatch(event)
                    raise RolledBack
        elif kind == "disk full":
            journal.fail = [FULL]
            with contextlib.suppress(JournalError):
                await target.dispatch(what)
            journal.fail = []
        elif kind == "snapshot":
            snapshot, plain.saved = session.snapshot(), dict(plain.states)
        elif kind == "restore":
            await session.restore(snapshot.to_json())
            plain.states = dict(plain.saved)
        elif kind == "compact":
            await session.compact()
        else:
            await session.__aexit__(None, None, None)
            session = Session.open(State, journal=journal)
            await session.__aenter__()
            session.child("kid", State)
        assert session.state == plain.states[""], kind
        assert session.children["kid"].state == plain.states["kid"], kind
    await session.__aexit__(None, None, None)
    async with Session.open(State, journal=journal) as session:
        assert session.state == plain.states[""]
        assert session.child("kid", State).state == plain.states["kid"]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
@given(st.lists(STEP, max_size=25))
def test_a_session_is_a_fold_of_its_events(steps):
    run_virtual(partial(play, steps, MemoryJournal()))


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=QUIET)
@given(st.lists(st.one_of(EVENT.map(lambda event: [event]), st.lists(EVENT, max_size=3)), min_size=1, max_size=6))
def test_at_each_crash_point_the_file_brings_back_what_was_whole(tmp_path, batches):
    """Killed after any byte of the file: the state is that after the last whole entry, and writing goes on from there."""
    path = tmp_path / "s.jsonl"

    async def write():
        states = [State()]
        path.unlink(missing_ok=True)
        async with Session.open(State, journal=path) as session:
            for batch in batches:
                before = path.stat().st_size
                async with session.transaction():
                    for event in batch:
                        await session.dispatch(event)
                if path.stat().st_size > before:
                    states.append(session.state)
        return states

    async def reopen(states, raw, end):
        path.write_bytes(raw[:end])
        async with Session.open(State, journal=path) as session:
            state = states[raw[: end + 1].count(b"\n")]  # an entry is whole without the end of its line
            assert session.state == state
            if end % 7 == 0:
                await session.dispatch(Mood(1))
                state = folded([Mood(1)], state)
        async with Session.open(State, journal=path) as session:
            assert session.state == state

    async def crash_everywhere():
        states = await write()
        raw = path.read_bytes()
        assert raw.count(b"\n") == len(states) - 1
        ends = sorted({*range(0, len(raw) + 1, 13), *(at + 1 for at, byte in enumerate(raw) if byte == 10), len(raw)})
        for end in ends:
            await reopen(states, raw, end)

    anyio.run(crash_everywhere)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=QUIET)
@given(st.data(), st.lists(EVENT.filter(lambda e: not isinstance(e, Added) or e.number >= 0), min_size=1, max_size=6))
def test_a_changed_byte_is_never_taken_for_what_was_written(tmp_path, data, events):
    path = tmp_path / "s.jsonl"

    async def main():
        path.unlink(missing_ok=True)
        async with Session.open(State, journal=path) as session:
            for event in events:
                await session.dispatch(event)
        raw = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(raw) - 2))
        raw[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        with pytest.raises(JournalDamagedError):
            async with Session.open(State, journal=path):
                pass

    anyio.run(main)


@given(
    st.lists(st.binary(max_size=20).map(lambda raw: entry_of_events(1, [raw.replace(b"\n", b"")])), max_size=8),
    st.integers(1, 4),
)
@settings(max_examples=20, deadline=None, suppress_health_check=QUIET)
def test_a_file_keeps_what_it_was_given_in_order(tmp_path, entries, size):
    path = tmp_path / "f.jsonl"
    path.unlink(missing_ok=True)
    journal = FileJournal(path)
    for start in range(0, len(entries), size):
        journal.open()
        journal.append(entries[start : start + size])
        journal.close()
    journal.open()
    assert list(journal.entries()) == entries
    journal.close()
