"""What a journal raises, a user's own too, is told as its error with the cause; and a file that is gone holds nothing."""

from __future__ import annotations

import threading

import anyio
import pytest
from session_state import Added, MemoryJournal, State

from mainspring import JournalError, Session

pytestmark = pytest.mark.anyio


class Raises(MemoryJournal):
    """Raises ``error`` in the method of that name. Its ``entries`` is no generator: it does its work when it is called."""

    name = "mine"

    def __init__(self, method="", error=None, entries=()):
        super().__init__(entries)
        self.method, self.error, self.threads = method, error, {}

    def _do(self, method):
        self.threads[method] = threading.current_thread()
        if method == self.method:
            raise self.error

    def open(self):
        self._do("open")
        super().open()

    def entries(self):
        self._do("entries")
        return iter(self.kept)

    def append(self, entries):
        self._do("append")
        super().append(entries)

    def rewrite(self, entries):
        self._do("rewrite")
        super().rewrite(entries)

    def close(self):
        super().close()
        self._do("close")


ERRORS = [
    RuntimeError("mine"),
    OSError(28, "No space"),
    SystemExit(2),
    KeyboardInterrupt(),
    StopIteration(),
    MemoryError(),
]


async def use(journal):
    async with Session.open(State, journal=journal) as session:
        await session.dispatch(Added(1))
        await session.compact()


async def test_all_of_it_happens_in_worker_threads(anyio_backend):
    journal = Raises()
    await use(journal)
    assert set(journal.threads) == {"open", "entries", "append", "rewrite", "close"}
    assert threading.current_thread() not in journal.threads.values()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", ["open", "entries", "append", "rewrite", "close"])
async def test_whatever_it_raises_is_its_error(anyio_backend, method, error):
    with anyio.fail_after(30), pytest.raises(JournalError, match=f"mine: .*{type(error).__name__}") as raised:
        await use(Raises(method, error))
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_session_goes_on_after_it(anyio_backend, error):
    journal = Raises("append", error)
    async with Session.open(State, journal=journal) as session:
        waiting = [session.dispatch_nowait(Added(1)) for _ in range(3)]
        failed = []
        for ticket in waiting:
            with anyio.fail_after(30), pytest.raises(JournalError, match="mine: ") as raised:
                await ticket.wait()
            failed.append(raised.value)
            assert raised.value.__cause__ is error
        assert len({id(one) for one in failed}) == 3
        journal.method = ""
        assert (await session.dispatch(Added(1))).seq == 1


@pytest.mark.parametrize("entry", ["x", 5, None])
async def test_entries_that_are_no_bytes(anyio_backend, entry):
    with pytest.raises(JournalError, match="mine: TypeError: an entry is bytes, and entries"):
        await use(Raises(entries=[entry]))


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
@pytest.mark.parametrize("kind", ["sqlite", "jsonl"])
@pytest.mark.parametrize("what", ["dispatch", "compact"])
async def test_what_is_written_to_a_file_that_is_gone_is_not_durable(anyio_backend, tmp_path, kind, how, what):
    path = tmp_path / "s.jsonl"
    journal = path if kind == "jsonl" else f"sqlite:///{path}"
    async with Session.open(State, journal=journal) as session:
        await session.dispatch(Added(1))
        if how == "removed":
            path.unlink()
        else:
            path.rename(tmp_path / "other")
        if how == "replaced":
            path.write_bytes(b"another one")
        for _ in range(2):
            with pytest.raises(JournalError, match="its file was removed or renamed; open the session anew"):
                await (session.dispatch(Added(2)) if what == "dispatch" else session.compact())
        assert session.state.total == 1
    if how == "replaced":
        assert path.read_bytes() == b"another one"
