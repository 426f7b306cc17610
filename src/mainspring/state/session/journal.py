"""``Journal``: where a session's entries are kept; and how a session calls it from its event loop."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from functools import partial
from itertools import count, islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.core.clock import real_work
from mainspring.core.dispatcher import log_error
from mainspring.errors import (
    ConfigError,
    JournalDamagedError,
    JournalError,
    JournalLockedError,
    MainspringError,
    describe,
)
from mainspring.threads.own_thread import OwnThread
from mainspring.threads.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Journal(ABC):
    """Keeps entries (bytes without a line break) in order, for one writer at a time.

    The session calls the methods one at a time, in a thread of the journal's own, so they may block. Each use of it begins
    with :meth:`open`, and none but that is called after :meth:`close`. A method that takes longer than :attr:`timeout` is given
    up, and only ``close`` is called after it. An error that is none of Mainspring's becomes a :class:`JournalError`.
    """

    name: str
    """What it is called in errors."""
    timeout: float = 30.0
    """Seconds that one call may take: to open it, to read the next thousand entries, to write, or to rewrite it."""

    @abstractmethod
    def open(self) -> None:
        """Take hold of it, and make it where there is none.

        :raises JournalLockedError: another writer has it.
        :raises JournalError: it cannot be opened.
        """

    @abstractmethod
    def entries(self) -> Iterator[bytes]:
        """Yield all entries, oldest first.

        :raises JournalDamagedError: it holds what was never written to it.
        """

    @abstractmethod
    def append(self, entries: Sequence[bytes]) -> None:
        """Add entries. Returns once all of them are durable.

        :raises JournalError: none of them is kept, as far as is known.
        """

    @abstractmethod
    def rewrite(self, entries: Sequence[bytes]) -> None:
        """Replace all entries by these, at once or not at all.

        :raises JournalError: it is as it was; or which of both it is cannot be known, and it refuses all writing until it is
            opened anew.
        """

    def cut(self, entries: Sequence[bytes]) -> str:
        """Keep only these entries, which come before what is damaged. Return where all that there was is put aside.

        The default puts nothing aside: it is :meth:`rewrite`, and returns an empty text.

        :raises JournalError: as by :meth:`rewrite`.
        """
        self.rewrite(entries)
        return ""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


class JournalCalls:
    """Calls a journal's methods in a daemon thread of its own, in the order in which they are asked for, each with an end.

    A call that is given up goes on in the thread. The thread then closes the journal, and nothing else is asked of it.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._pid = os.getpid()
        self._asked: SimpleQueue[tuple[Callable[[], Any], Ticket[Any]] | None] = SimpleQueue()
        self._last: Ticket[Any] = Ticket()
        self._thread: OwnThread[None] | None = None
        self._is_held = False
        self._unusable = ""

    @property
    def is_busy(self) -> bool:
        """True until the journal is closed, and its last call has ended."""
        return self._thread is not None and not self._thread.done

    def check(self) -> None:
        """Raise :class:`JournalError` once a call was given up, and in a forked child."""
        if self._unusable:
            raise JournalError(self._unusable)
        if os.getpid() != self._pid:
            raise JournalError(f"{self._journal.name} is the one of the process that this one was forked from")

    async def open(self) -> None:
        """:meth:`Journal.open`."""
        try:
            self._thread = OwnThread(self._work, f"mainspring {self._journal.name}")
        except RuntimeError as error:
            raise JournalError(f"{self._journal.name}: no thread can be started for it: {error}") from error
        await self._ask(self._open, "try again later")

    async def entries(self) -> Entries:
        """:meth:`Journal.entries`."""
        found: Entries = await self._ask(lambda: Entries(iter(self._journal.entries())), "try again later")
        return found

    async def read(self, entries: Entries, most: int) -> list[bytes]:
        """Return the next ones of ``entries``, from :meth:`entries`; none at their end."""
        found: list[bytes] = await self._ask(partial(entries.take, most), "try again later")
        return found

    async def cut(self, entries: Sequence[bytes]) -> str:
        """:meth:`Journal.cut`."""
        aside: str = await self._ask(partial(self._journal.cut, entries), "it may still write; open the session anew")
        return aside

    async def append(self, entries: Sequence[bytes]) -> None:
        """:meth:`Journal.append`."""
        await self._ask(partial(self._journal.append, entries), "it may still write; open the session anew")

    async def rewrite(self, entries: Sequence[bytes]) -> None:
        """:meth:`Journal.rewrite`."""
        await self._ask(partial(self._journal.rewrite, entries), "it may still write; open the session anew")

    async def let_go(self, timeout: float) -> None:
        """Call :meth:`Journal.close` if it is open, even when cancelled. Wait at most ``timeout`` seconds for it.

        If a call is still under way, its thread closes the journal afterwards, and this returns at once.
        """
        if self._thread is None:
            return
        if not self._last.is_ready:
            self._put(self._close_unwatched)
            self._asked.put(None)
            return
        closing = self._put(self._close)
        self._asked.put(None)
        with real_work():
            await self._thread.wait_ended(timeout)
        if closing.is_ready:
            closing.wait_sync()  # raises what it failed with; it does not block

    async def _ask(self, fn: Callable[[], Any], otherwise: str) -> Any:
        """Call ``fn()`` in the thread. Cancelled, it leaves the thread to itself.

        :raises JournalError: it cannot be done; or it has taken longer than :attr:`Journal.timeout`, now or before.
        """
        self.check()
        timeout, answer = self._journal.timeout, self._put(fn)
        with real_work(), anyio.move_on_after(timeout):
            return await answer.wait()
        self._unusable = f"{self._journal.name} has not answered within {timeout:g} s; {otherwise}"
        raise JournalError(self._unusable)

    def _put(self, fn: Callable[[], Any]) -> Ticket[Any]:
        self._last = ticket = Ticket[Any](self._journal.name)
        self._asked.put((fn, ticket))
        return ticket

    # ---------------------------------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            self._answer(*asked)

    def _answer(self, fn: Callable[[], Any], ticket: Ticket[Any]) -> None:
        """Answer with the result of ``fn()``. Whatever it raises, an exit too, is the journal's error, and no other's."""
        try:
            ticket.offer(fn())
        except MainspringError as error:
            ticket.offer_error(error)
        except BaseException as error:
            failed = JournalError(f"{self._journal.name}: {describe(error)}")
            failed.__cause__ = error
            ticket.offer_error(failed)

    def _open(self) -> None:
        self._journal.open()
        self._is_held = True

    def _close(self) -> None:
        if self._is_held:
            self._is_held = False
            self._journal.close()

    def _close_unwatched(self) -> None:
        try:
            self._close()
        except Exception as error:  # no caller waits for it
            log_error("%s could not be closed", self._journal.name, error)


class Entries:
    """A journal's entries, some at a time; what is damaged is raised after all that stands before it was taken."""

    def __init__(self, entries: Iterator[bytes]) -> None:
        self._entries = entries
        self._damage: JournalDamagedError | None = None

    def take(self, most: int) -> list[bytes]:
        """Return the next ones; none at their end."""
        if self._damage is not None:
            raise self._damage
        found: list[bytes] = []
        try:
            for entry in islice(self._entries, most):
                if not isinstance(entry, bytes):
                    raise TypeError(f"an entry is bytes, and entries() gave {entry!r}")
                found.append(entry)
        except JournalDamagedError as error:
            if not found:
                raise
            self._damage = error
        return found


# ------------------------------------------------------------------------------------------------ journals in a file


def check_directory(name: str, path: str) -> str:
    """Return the directory of the journal ``name`` at ``path``, or raise :class:`ConfigError` if there is none."""
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        raise ConfigError(f"{name} has no directory: make {directory} first")
    return directory


def locked(name: str) -> JournalLockedError:
    """Return the error of a journal that another session has."""
    return JournalLockedError(f"{name} is open in another session; it has one writer at a time")


def is_at(path: str, file: os.stat_result) -> bool:
    """True if ``path`` leads to that file.

    A session that opens the journal by its name would not find what is written to another file. A file of that name may also
    belong to another session.
    """
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(path), file)
    return False


def free_name(path: str) -> str:
    """Return a name beside ``path`` for what is put aside of a damaged journal."""
    return next(name for number in count(1) if not os.path.lexists(name := f"{path}.damaged-{number}"))
