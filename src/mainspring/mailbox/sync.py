"""``mailbox.sync``: a mailbox for code that is not async: the same calls, which block their thread until they are done."""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial, wraps
from inspect import isawaitable
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, cast

import anyio

from mainspring.core.introspection import gives_coroutine, instead_of, name_of
from mainspring.core.process import async_library, call_soon, carried_context, event_loop, in_event_loop, shared
from mainspring.errors import ConfigError, InvalidParameterError, MailboxClosedError, TicketAbandonedError
from mainspring.threads.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from types import TracebackType

    from mainspring.mailbox.job_list import JobList
    from mainspring.mailbox.jobs import JobStatus
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.runtime.scope import Daemon, DaemonScope
    from mainspring.threads.loop_thread import LoopThread
    from mainspring.threads.ticket import TicketWriter

T = TypeVar("T")
R = TypeVar("R")
X = TypeVar("X")
P = ParamSpec("P")


class SyncMailbox(Generic[T, R]):
    """The calls of a mailbox for threads that are not async, each under its own name and with its own parameters.

    They run in the event loop in which the mailbox is open, under a LoopGroup or an ``async with`` of any thread. They block
    the calling thread until they are done. If the mailbox is not open, ``with mailbox.sync:`` opens it, in an event loop of the
    process that all mailboxes opened so share. That loop is there from the first to the last of them.

    ``send``, ``send_many``, ``receive``, ``request``, ``submit``, ``cancel``, ``counts``, ``approximate_count``, ``workers``,
    ``jobs``, ``replace_body``, ``purge``, ``pause``, ``resume``, ``set_concurrency``, ``limits``, ``dead_letters``,
    ``dead_letter``, ``replay_dead_letters`` and ``purge_dead_letters`` are those of :class:`Mailbox`, and :meth:`call` makes
    every other call of what they return. The ``connection=`` of ``send`` and ``send_many`` is the calling thread's own, a
    synchronous one, and only that thread uses it.

    :raises ConfigError: the caller's thread runs an event loop, which would stand still; or this process was forked from the
        one in which the mailbox is open.
    :raises MailboxClosedError: the mailbox is not open, or was closed before the call was done.
    """

    def __init__(self, mailbox: Mailbox[T, R]) -> None:
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._users = 0
        self._opening: _Opening | None = None
        self._pid = os.getpid()  # of the process whose lock and opening these are
        self.send = self._sending(mailbox.send)
        self.send_many = self._sending(mailbox.send_many)
        self.receive = self._blocking(mailbox.receive)
        self.request = self._blocking(mailbox.request)
        self.submit = self._blocking(mailbox.submit)
        self.cancel = self._blocking(mailbox.cancel)
        self.counts = self._blocking(mailbox.counts)
        self.approximate_count = self._blocking(mailbox.approximate_count)
        self.jobs = self._iterating(mailbox.jobs)
        self.replace_body = self._blocking(mailbox.replace_body)
        self.workers = self._blocking(mailbox.workers)
        self.purge = self._blocking(mailbox.purge)
        self.pause = self._blocking(mailbox.pause)
        self.resume = self._blocking(mailbox.resume)
        self.set_concurrency = self._blocking(mailbox.set_concurrency)
        self.limits = self._blocking(mailbox.limits)
        self.dead_letters = self._blocking(mailbox.dead_letters)
        self.dead_letter = self._blocking(mailbox.dead_letter)
        self.replay_dead_letters = self._blocking(mailbox.replay_dead_letters)
        self.purge_dead_letters = self._blocking(mailbox.purge_dead_letters)

    def __repr__(self) -> str:
        return f"<sync of {self._mailbox!r}>"

    def _blocking(self, method: Callable[P, Awaitable[X]]) -> Callable[P, X]:
        @wraps(method)
        def call(*args: P.args, **keywords: P.kwargs) -> X:
            return self._call(method, *args, **keywords)

        return call

    def _iterating(self, method: Callable[P, JobList]) -> Callable[P, Iterator[JobStatus]]:
        @wraps(method)
        def iterate(*args: P.args, **keywords: P.kwargs) -> Iterator[JobStatus]:
            found = method(*args, **keywords)
            return chain.from_iterable(iter(partial(self._call, found.batch), []))

        return iterate

    def _sending(self, method: Callable[P, Awaitable[X]]) -> Callable[P, X]:
        @wraps(method)
        def send(*args: P.args, **keywords: P.kwargs) -> X:
            given = keywords.get("connection")
            if given is None:
                return self._call(method, *args, **keywords)
            given = ThreadConnection(given)
            cast("dict[str, Any]", keywords)["connection"] = given
            found = self._call(method, *args, **keywords)
            return found if given.work is None else cast("X", given.run(many=isinstance(found, list)))

        return send

    def call(self, method: Callable[P, Awaitable[X]], /, *args: P.args, **keywords: P.kwargs) -> X:
        """Run any async function where the mailbox lives, and return its result: ``mailbox.sync.call(message.acknowledge)``.

        What interrupts the wait, as Ctrl-C does, cancels the call.

        :raises InvalidParameterError: it is not async: a plain function would block the event loop.
        """
        if not callable(method):
            raise InvalidParameterError(f"sync.call: an async function is needed, {instead_of(method, 'sync.call')}")
        if not gives_coroutine(method):
            raise InvalidParameterError(
                f"sync.call: an async function is needed, and {name_of(method)} is plain; call it without sync.call"
            )
        return self._call(method, *args, **keywords)

    def _call(self, method: Callable[P, Awaitable[X]], /, *args: P.args, **keywords: P.kwargs) -> X:
        name = getattr(method, "__name__", repr(method))
        self._check_thread(name)
        routers = self._mailbox.reply_routers
        if not routers:
            raise MailboxClosedError(
                f"mailbox {self._mailbox.name!r} is {self._mailbox.state}; open it with `with mailbox.sync:`, or run a"
                " LoopGroup on it"
            )
        return routers[-1].host.call(
            partial(_awaited, method, *args, **keywords), f"{name}() of mailbox {self._mailbox.name}"
        )

    # --------------------------------------------------------------------------------------------------- life cycle

    def open(self) -> None:
        """Open it, in the event loop that the mailboxes of the process share, until as many :meth:`close`.

        :raises ConfigError: it is open already, in another way; then it needs no opening here.
        """
        self._check_thread("open")
        if self._pid != os.getpid():
            self._come_from_a_fork()
        with self._lock:
            if self._opening is None:
                self._opening = _Opening(self._mailbox)
            self._users += 1

    def close(self) -> None:
        """Give up what :meth:`open` gave; the last one closes the mailbox."""
        self._check_thread("close")
        if self._pid != os.getpid():
            self._come_from_a_fork()
        with self._lock:
            self._users = max(0, self._users - 1)
            if self._users or self._opening is None:
                return
            opening, self._opening = self._opening, None
            opening.close()

    def _come_from_a_fork(self) -> None:
        """Raise where the parent had it open, or was about to; else it is this process's own from here on."""
        if self._opening is not None or self._lock.locked():  # which would stay locked here
            _check_process(self._mailbox.name, self._pid)
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid == os.getpid():  # a forked child that leaves the block has nothing to close
            self.close()

    def _check_thread(self, name: str) -> None:
        if in_event_loop():
            instead = "use `async with` the mailbox" if name == "open" else f"await the async {name}()"
            raise ConfigError(
                f"mailbox {self._mailbox.name!r}: sync.{name}() would block the event loop of this thread; {instead} instead"
            )


class ThreadConnection:
    """A ``connection=`` that a plain thread has given: what is to be done on it, that thread does itself.

    A mailbox that takes such a connection sets ``work``, which results in the ids of what was sent, instead of sending.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.work: Callable[[], list[str]] | None = None

    def run(self, *, many: bool) -> list[str] | str:
        """Do it; the ids, or the one id."""
        assert self.work is not None
        ids = self.work()
        return ids if many else ids[0]


class HostLoop:
    """Where a mailbox is open: the scope that its tasks belong to, and the event loop of that, for other threads."""

    def __init__(self, name: str, scope: DaemonScope) -> None:
        self._name = name
        self._scope = scope
        self._loop = event_loop()
        self._library = async_library()
        self._pid = os.getpid()

    def call(self, fn: Callable[[], Awaitable[X]], name: str) -> X:
        """Run ``fn()`` as a task of the scope, and wait for its result."""
        _check_process(self._name, self._pid)
        ticket: Ticket[X] = Ticket(name)
        task: list[Daemon] = []
        # Nothing else holds the writer: an event loop that has gone drops it, and the ticket fails.
        begin = partial(self._begin, fn, ticket.writer(), name, task)
        call_soon(self._loop, partial(carried_context(self._library).run, begin))
        del begin
        try:
            return ticket.wait_sync()
        except TicketAbandonedError:
            raise MailboxClosedError(f"mailbox {self._name!r} was closed before the end of {name}") from None
        except BaseException:
            if not ticket.is_ready:
                call_soon(self._loop, lambda: task[0].cancel() if task else None)
            raise
        finally:
            del ticket  # it keeps the error, whose traceback refers to this frame

    def _begin(self, fn: Callable[[], Awaitable[X]], answer: TicketWriter[X], name: str, task: list[Daemon]) -> None:
        with contextlib.suppress(RuntimeError):  # the scope has been left: the writer is dropped, and tells
            task.append(self._scope.start_soon(_answer, fn, answer, name=name))


async def _awaited(method: Callable[P, Awaitable[X]], /, *args: P.args, **keywords: P.kwargs) -> X:
    result = method(*args, **keywords)
    if not isawaitable(result):
        raise InvalidParameterError(
            f"sync.call: an async function is needed, not {name_of(method)}: it returned {result!r}; call it without sync.call"
        )
    return await result


async def _answer(fn: Callable[[], Awaitable[X]], answer: TicketWriter[X]) -> None:
    # The writer gives the reader each error but a cancellation, which goes its way. None must end the mailbox.
    try:
        with contextlib.suppress(Exception, SystemExit, KeyboardInterrupt), answer:
            answer.complete(await fn())
    finally:
        del answer  # as in `HostLoop.call`


class _SharedLoop:
    """The process's one event loop for mailboxes that plain code has opened: there while one of them is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._thread: LoopThread | None = None

    def take(self) -> LoopThread:
        from mainspring.threads.loop_thread import LoopThread

        with self._lock:
            if self._thread is None:
                thread = LoopThread(name="mainspring mailboxes")
                thread.start()
                self._thread = thread
            self._users += 1
            return self._thread

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users or self._thread is None:
                return
            thread, self._thread = self._thread, None
        thread.stop()


class _Opening:
    """One mailbox, open in the shared event loop from here to :meth:`close`."""

    def __init__(self, mailbox: Mailbox[Any, Any]) -> None:
        self._told = anyio.Event()
        self._shared = shared("event loop", "mailboxes", _SharedLoop)
        self._thread = self._shared.take()
        opened: Ticket[None] = Ticket(f"opening of mailbox {mailbox.name}")
        self._end = self._thread.submit(self._keep, mailbox, opened.writer(), stop=self._told.set)
        try:
            opened.wait_sync()
        except BaseException as error:
            self._thread.post(self._told.set)
            try:
                if isinstance(error, TicketAbandonedError):
                    self._end.wait_sync()  # which says why
                elif isinstance(error, Exception):
                    with contextlib.suppress(Exception):
                        self._end.wait_sync()  # the same once more, which is raised here and nowhere else
            finally:
                self._shared.release()
            raise

    async def _keep(self, mailbox: Mailbox[Any, Any], opened: TicketWriter[None]) -> None:
        with opened:
            async with mailbox:
                opened.complete(None)
                await self._told.wait()

    def close(self) -> None:
        """Close it and wait for that; raises what has ended the mailbox before its time."""
        try:
            self._thread.post(self._told.set)
            self._end.wait_sync()
        finally:
            self._shared.release()


def _check_process(name: str, pid: int) -> None:
    if pid != os.getpid():
        raise ConfigError(
            f"mailbox {name!r} is open in process {pid}, from which this one was forked; open one of its own after the fork"
        )
