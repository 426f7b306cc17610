"""The life cycle of a mailbox: unopened, open on one event loop of one process, closed."""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self

import anyio

from mainspring.core.process import async_library, identity, off_fork, on_fork
from mainspring.core.state_machine import MAILBOX, MailboxState, StateMachine
from mainspring.errors import ConfigError, MailboxClosedError, MainspringError, in_brief
from mainspring.mailbox import replies
from mainspring.mailbox.limits import CLOSE_TIMEOUT
from mainspring.runtime.scope import DaemonScope

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from weakref import WeakSet

    from mainspring.core.process import Identity
    from mainspring.mailbox.backend import Backend, Capabilities
    from mainspring.mailbox.ownership import Owner


class MailboxLifeCycle:
    """What opens and closes a :class:`~mainspring.mailbox.mailbox.Mailbox`, and says whether it is open here."""

    def __init__(self, backend: Backend) -> None:
        self.name = name = backend.name
        self.backend = backend
        """The store. Its calls check no parameter, and encode nothing. It may be replaced while the mailbox is not open."""
        self.opened_by: Owner | None = None
        """The group or loop that has opened it and closes it at its end; None where a user did, or it is not open."""
        self._state: StateMachine[MailboxState] = StateMachine(MAILBOX, MailboxState.UNOPENED, name=f"mailbox {name!r}")
        self._usable = backend.works_unopened
        self._thread: int | None = None
        """The thread of the event loop on which it is open; None while it is not."""
        self._process: Identity | None = None
        self._scope: DaemonScope | None = None
        self.reply_routers: list[replies.ReplyRouter] = []
        """What replies to other stores go out through, and replies come in through; none while it is not open."""
        self._open_ones: WeakSet[Any] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of its backend."""
        return self.backend.capabilities

    @property
    def state(self) -> MailboxState:
        """Its state: unopened, open or closed."""
        return self._state.state

    @property
    def opening(self) -> object | None:
        """An object that stands for its present opening: another one each time that it is opened. None while it is not."""
        return self._scope

    async def exists(self) -> bool:
        """Return True if the store has a mailbox of this name, empty or not. It need not be open.

        Nothing is made, and nothing is brought up to date. There is one as soon as it was opened once, or a reply was
        sent to its name. One in memory always is.

        :raises ConfigError: what is there is not a mailbox's, or of a newer Mainspring; the server refuses the login.
        :raises MailboxConnectionError: the store cannot be reached, so it is not known.
        """
        self._check_async_backend()
        try:
            return self._state.state is MailboxState.OPEN or await self.backend.exists()
        except MainspringError as error:
            raise in_brief(error)

    async def __aenter__(self) -> Self:
        self._check_async_backend()
        if self._scope is not None:
            self._check_process()
            raise ConfigError(f"mailbox {self.name!r} is already open; open it in one place and pass it on")
        self._scope = scope = DaemonScope(f"mailbox {self.name}")
        try:
            await scope.__aenter__()
            try:
                await self.backend.open(scope)
            except BaseException as error:
                await scope.__aexit__(type(error), error, error.__traceback__)
                if isinstance(error, MainspringError):
                    raise in_brief(error)
                raise
        except BaseException:
            self._scope = None
            raise
        self._end_routing = self.route_replies(scope)
        self._state.to(MailboxState.OPEN, anyio.current_time())
        self._usable = True
        self._thread, self._process = get_ident(), identity()
        on_fork(self, MailboxLifeCycle._forget)
        open_ones: WeakSet[Any] = replies.open_mailboxes()
        open_ones.add(self)
        self._open_ones = open_ones
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        scope, self._scope = self._scope, None
        self._end_routing()
        try:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT):
                await self.close()
        except BaseException as failed:
            if scope is not None:
                await scope.__aexit__(type(failed), failed, failed.__traceback__)
            raise
        return await scope.__aexit__(kind, error, trace) if scope is not None else None

    def route_replies(self, scope: DaemonScope) -> Callable[[], None]:
        """Let replies to other stores go out through daemons of ``scope``, until the function that this returns is called."""
        router = replies.ReplyRouter(self.name, scope)
        self.reply_routers.append(router)
        return partial(self.reply_routers.remove, router)  # which does not refer back to the mailbox

    async def close(self) -> None:
        """Wake the waiting receives (they return ``[]``), finish the calls under way, disconnect. Idempotent.

        Messages in flight stay leased until their leases end. Later calls raise :class:`MailboxClosedError`. Cancelled, it
        leaves the mailbox closed to its users, and what it had not finished is finished when the ``async with`` block ends.
        """
        if self._state.state is MailboxState.CLOSED or (self._process is not None and not self._process.here):
            return
        opened = self._state.state is MailboxState.OPEN
        self._state.to(MailboxState.CLOSED, anyio.current_time())
        self._usable, self._thread = False, None
        off_fork(self)
        if self._open_ones is not None:
            self._open_ones.discard(self)
        self.backend.stop_claims()
        if opened:
            await self.backend.close()
        if self._scope is not None:  # not cancelled: its scope holds the body of the `async with` block as well
            await self._scope.stop(timeout=0)

    def check_open(self) -> None:
        """Raise :class:`MailboxClosedError` unless it is open, and :class:`ConfigError` unless it is so on this event loop."""
        if not self._usable:
            self._check_process()
            raise MailboxClosedError(
                f"mailbox {self.name!r} is {self._state.state}; use it inside `async with` or under a running LoopGroup"
            )
        if self._thread is not None and self._thread != get_ident():  # a thread has one event loop at a time
            raise ConfigError(
                f"mailbox {self.name!r} is open in the event loop of another thread; open a mailbox of your own here, or"
                " use mailbox.sync"
            )

    def _forget(self) -> None:
        """Forget the connections and the event loop, in a forked child: they are the parent's."""
        self._usable, self._thread = False, None

    def _check_process(self) -> None:
        if self._process is not None and not self._process.here and self._state.state is MailboxState.OPEN:
            raise ConfigError(
                f"mailbox {self.name!r} is open in process {self._process.pid}, from which this one was forked, and"
                " must not be used across a fork; open one of its own here (for SQLite: in a process that subprocess or the"
                " spawn method has started)"
            )

    def _check_async_backend(self) -> None:
        if (library := async_library()) not in self.capabilities.async_backends:
            supported = " or ".join(sorted(self.capabilities.async_backends))
            raise ConfigError(
                f"mailbox {self.name!r}: {type(self).__name__} runs on {supported} only, not on {library}: choose that"
                " (`mainspring run --loop`, anyio.run(…, backend=)), or use memory:// where time is virtual"
            )
