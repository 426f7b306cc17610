"""``Journal``: where a session's entries are kept; and from what users name to the journal that it means."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import anyio
from anyio import CapacityLimiter, to_thread

from mainspring.core.clock import real_work
from mainspring.errors import JournalDamagedError, JournalError, MainspringError, describe
from mainspring.events import log_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Journal(ABC):
    """Keeps entries (bytes without a line break) in order, for one writer at a time.

    The session calls the methods in worker threads, one at a time, so they may block. Each use of it begins with :meth:`open`,
    and none but that is called after :meth:`close`. A method that takes longer than :attr:`timeout` is given up, but not
    beside others: what comes after it is ``close`` alone. What they raise that is no error of Mainspring becomes a
    :class:`JournalError`.
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
        """All entries, oldest first.

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
    """Calls a journal's methods in worker threads, one at a time, each with an end.

    A call that is given up goes on in its thread. None comes after it, but for the closing, which its thread does when it ends.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._pid = os.getpid()
        self._limiter = CapacityLimiter(1)
        self._lock = threading.Lock()
        self._call: object | None = None
        self._begun = False
        self._is_held = False
        self._let_go = False
        self._unusable = ""

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way, given up or not, so that nothing else may be asked of the journal."""
        return self._call is not None

    def check(self) -> None:
        """Raise :class:`JournalError` once a call was given up, and in a forked child."""
        if self._unusable:
            raise JournalError(self._unusable)
        if os.getpid() != self._pid:
            raise JournalError(f"{self._journal.name} is the one of the process that this one was forked from")

    async def open(self) -> None:
        """:meth:`Journal.open`."""
        await self._ask(self._open, "try again later")

    async def entries(self) -> Entries:
        """:meth:`Journal.entries`."""
        found: Entries = await self._ask(lambda: Entries(iter(self._journal.entries())), "try again later")
        return found

    async def read(self, entries: Entries, most: int) -> list[bytes]:
        """The next ones of ``entries``, from :meth:`entries`; none at their end."""
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
        call = self._begin(let_go=True)
        if call is None:
            return
        try:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + timeout), real_work():
                await to_thread.run_sync(self._run, call, self._close, abandon_on_cancel=True, limiter=self._limiter)
        except RuntimeError:
            if not self._withdraw(call):
                raise
            self._named(self._close)  # no thread can be started, and it would be locked as long as the process lives
        else:
            if self._withdraw(call):
                self._named(self._close)  # nor has one become free

    async def _ask(self, fn: Callable[[], Any], otherwise: str) -> Any:
        """``fn()`` in a worker thread. Cancelled, it leaves the thread to itself.

        :raises JournalError: it cannot be done; or it has taken longer than :attr:`Journal.timeout`, now or before.
        """
        self.check()
        call = self._begin()
        given_up, timeout = False, self._journal.timeout
        try:
            with real_work(), anyio.move_on_after(timeout):
                return await to_thread.run_sync(self._run, call, fn, abandon_on_cancel=True, limiter=self._limiter)
            given_up = True
        except RuntimeError as error:  # no thread can be started
            raise JournalError(f"{self._journal.name}: {describe(error)}") from error
        finally:
            if not self._withdraw(call) and given_up:
                self._unusable = f"{self._journal.name} has not answered within {timeout:g} s; {otherwise}"
        self.check()
        raise JournalError(f"{self._journal.name}: no thread could be had for it within {timeout:g} s")

    def _begin(self, *, let_go: bool = False) -> object | None:
        """The next call; None where it is to let go, and one under way will do it when it ends."""
        with self._lock:
            if self._call is None:
                self._call = object()
                return self._call
            self._let_go = self._let_go or let_go
        if let_go:
            return None
        raise JournalError(f"{self._journal.name}: a call of it has not ended; open the session anew")

    def _withdraw(self, call: object) -> bool:
        """Make nothing of a call that no thread has begun; whether that is so."""
        with self._lock:
            if self._call is not call or self._begun:
                return False
            self._call = None
            return True

    # ------------------------------------------------------------------------------------------------- in worker threads

    def _run(self, call: object, fn: Callable[[], Any]) -> Any:
        with self._lock:
            if self._call is not call:
                return None  # withdrawn
            self._begun = True
        try:
            return self._named(fn)
        finally:
            with self._lock:
                let_go = self._let_go
                if not let_go:
                    self._call, self._begun = None, False
            if let_go:
                self._close_at_last()

    def _named(self, fn: Callable[[], Any]) -> Any:
        """``fn()``. Whatever it raises, an exit too, is the journal's error, and no other's."""
        try:
            return fn()
        except MainspringError:
            raise
        except BaseException as error:
            raise JournalError(f"{self._journal.name}: {describe(error)}") from error

    def _close_at_last(self) -> None:
        try:
            self._close()
        except Exception as error:  # no caller waits for it
            log_error("%s could not be closed", self._journal.name, error)
        finally:
            with self._lock:
                self._call, self._begun = None, False

    def _open(self) -> None:
        self._journal.open()
        self._is_held = True

    def _close(self) -> None:
        if self._is_held:
            self._is_held = False
            self._journal.close()


class Entries:
    """A journal's entries, some at a time; what is damaged is raised after all that stands before it was taken."""

    def __init__(self, entries: Iterator[bytes]) -> None:
        self._entries = entries
        self._damage: JournalDamagedError | None = None

    def take(self, most: int) -> list[bytes]:
        """The next ones; none at their end."""
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


def free_name(path: str) -> str:
    """A name beside ``path`` for what is put aside of a damaged journal."""
    return next(name for number in count(1) if not os.path.lexists(name := f"{path}.damaged-{number}"))
