"""The command processor: operations of concurrent callers, joined into one round trip.

A caller queues a command and waits for its own result or error. One runner takes everything that is queued and has it
executed; what arrives while a batch is out gathers and leaves with the next one. Nothing ever waits for a batch to fill,
so a lone command leaves at once. All the waiting of a batch hangs on one event: one wake-up for all its callers.

Where commands come one by one, handing each to the runner and waiting for it would cost two turns of the event loop: there
the caller executes its own, and the runner takes over only if the caller is cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import anyio

from mainspring.errors import MailboxClosedError, MailboxConnectionError, copied
from mainspring.mailbox.limits import CLOSE_TIMEOUT, COURTESY
from mainspring.runtime.cancellation import is_spurious_cancellation, native_cancels

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable


@dataclass(eq=False, repr=False, slots=True)
class Command:
    """One operation on its way: the backend that executes it sets ``result`` or ``error``.

    ``done``: it has taken place, though the batch is not over yet; what goes wrong with the rest of it is not its error.

    ``first``: its caller goes on before the others of its batch, where the event loop keeps order. So slots
    whose settlements were in the batch find the messages of its claim.

    ``asks_only``: nothing is lost where it is not done.

    ``mailbox``: its number on a store that numbers its mailboxes; the backend sets it. ``forsaken``: its caller was cancelled.
    """

    first: ClassVar[bool] = False
    asks_only: ClassVar[bool] = False
    result: Any = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    done: bool = field(default=False, init=False)
    forsaken: bool = field(default=False, init=False)
    mailbox: int = field(default=0, init=False)


C = TypeVar("C", bound=Command)


class _Batch(Generic[C]):
    """Commands that travel together. ``done`` is set once each has its result or error; ``first`` just before it."""

    __slots__ = ("commands", "done", "first", "forsaken")

    def __init__(self) -> None:
        self.commands: list[C] = []
        self.done = anyio.Event()
        self.first: anyio.Event | None = None
        self.forsaken = False


class Batcher(Generic[C]):
    """Joins concurrent commands for one backend. :meth:`run` belongs in the scope of the mailbox.

    :param execute: performs the commands and sets the result or error of each. What it raises becomes the error of every
        command that has none and is not ``done``; it should raise only what leaves all of those without effect.
    :param resume: goes on with an ``execute`` that was cancelled, from where it was. Without it, the runner executes all.
    :param undo: called with a command that took place though its caller was cancelled while it was out; it may
        :meth:`post` the command that takes the effect back.
    :param name: whose commands these are, for messages.

    A caller that is cancelled before its command left has caused nothing: the command is withdrawn. Afterwards the
    command may take effect, and ``undo`` is told if it did.
    """

    def __init__(
        self,
        execute: Callable[[list[C]], Awaitable[None]],
        *,
        resume: Callable[[], Awaitable[None]] | None = None,
        undo: Callable[[C], None] | None = None,
        name: str = "mailbox",
    ) -> None:
        self._execute = execute
        self._resume = resume
        self._undo = undo
        self._name = name
        self._next: _Batch[C] = _Batch()
        self._wake = anyio.Event()
        self._ended = anyio.Event()
        self._shield = anyio.CancelScope(shield=True)
        self._callers = 0
        self._running = False  # whether a batch is out
        self._out: list[C] = []  # that one
        self._cut_off: list[C] | None = None  # what a cancelled caller was executing
        self._size = 0  # of the last batch
        self._closing = False
        self.batches = 0  # each counts once, also where the runner goes on with it

    def __repr__(self) -> str:
        return f"<Batcher {self._name!r} queued={self.queued} in_flight={self.in_flight} callers={self._callers}>"

    @property
    def queued(self) -> int:
        """How many commands wait for a batch."""
        return len(self._next.commands)

    @property
    def in_flight(self) -> int:
        """How many commands the batch has that is out."""
        return len(self._out)

    async def call(self, command: C) -> Any:
        """Have ``command`` executed with the next batch; its result, or raises its error.

        Raises :class:`MailboxClosedError` when the batcher is closing.
        """
        if self._closing:
            raise MailboxClosedError(f"{self._name} is closed")
        batch = self._next
        if self._resume is not None and self._size <= 1 and not self._running and not batch.commands:
            await self._execute_own([command])
            if command.error is not None:
                raise command.error
            return command.result
        batch.commands.append(command)
        done = batch.done
        if command.first:
            if batch.first is None:
                batch.first = anyio.Event()
            done = batch.first
        self._wake.set()
        self._callers += 1
        try:
            await done.wait()
        except BaseException:
            self._forsake(command, batch)
            raise
        finally:
            self._callers -= 1
            if self._closing:
                self._wake.set()
        if command.error is not None:
            raise command.error
        return command.result

    async def _execute_own(self, commands: list[C]) -> None:
        """Execute a single command for its caller. If that is cancelled, the runner goes on with it."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._running = True
        self._callers += 1
        self.batches += 1
        try:
            await self._perform(commands, self._execute)
        except BaseException:
            commands[0].forsaken = True
            self._cut_off = commands
            raise
        finally:
            self._running = self._cut_off is not None
            self._callers -= 1
            if self._running or self._closing or self._next.commands:
                self._wake.set()

    def post(self, command: C) -> None:
        """Queue a command without a caller, before all that is queued; allowed until the runner has ended."""
        self._next.commands.insert(0, command)
        self._wake.set()

    async def run(self) -> None:
        """Execute batch after batch until :meth:`stop` or :meth:`close`.

        The runner outlives a cancellation of the scope it is in: those who clean up under a shield still need it. Its end
        is a close, which every mailbox reaches on its way out, and which has a deadline. It outlives one of asyncio's own as
        well, of its task or of what ``execute`` waits for; the commands that were out then fail as with a lost connection.
        """
        try:
            with self._shield:
                while not await self._has_ended():
                    pass
        finally:
            self._closing = True
            _refuse(self._next.commands, MailboxClosedError(f"{self._name} was closed before the operation began"))
            self._end(self._next)
            self._ended.set()

    async def close(self) -> None:
        """Take nothing new, finish what is queued and out, end the runner; where this is cancelled, end it at once."""
        self.stop()
        try:
            await self._ended.wait()
        finally:
            self._shield.cancel()

    def stop(self) -> None:
        """Begin to close: what is queued and out still has :data:`CLOSE_TIMEOUT` seconds to finish.

        Where none of it is owed to a caller it has :data:`COURTESY` seconds: a server that does not answer keeps no idle
        process from ending.
        """
        if not self._closing:
            self._closing = True
            left = [*self._next.commands, *(self._out if self._running else ())]
            owed = any(not (command.forsaken or command.asks_only) for command in left)
            self._shield.deadline = anyio.current_time() + (CLOSE_TIMEOUT if owed else COURTESY)
        self._wake.set()

    async def _has_ended(self) -> bool:
        """Run to the end; False where a cancellation came in between that is spurious."""
        try:
            await self._run()
        except anyio.get_cancelled_exc_class():
            if not await is_spurious_cancellation():
                raise
            return False
        return True

    async def _run(self) -> None:
        while True:
            batch = self._next
            if self._cut_off is not None:
                commands, self._cut_off = self._cut_off, None
                await self._send(commands, self._go_on)
            elif self._running:
                await self._woken()
            elif batch.commands:
                # Callers that the same turn of the event loop set going come along; a lone command leaves after one turn.
                joined = int(self._callers == 1)  # no other caller could come along
                while joined < (joined := len(batch.commands)):
                    await anyio.lowlevel.checkpoint()
                self._next = _Batch()
                if batch.forsaken:
                    batch.commands = [command for command in batch.commands if not command.forsaken]
                try:
                    if batch.commands:
                        self.batches += 1
                        await self._send(batch.commands, self._execute)
                finally:
                    self._end(batch)
            elif self._closing and not self._callers:
                return
            else:
                await self._woken()

    async def _woken(self) -> None:
        self._wake = anyio.Event()
        await self._wake.wait()

    async def _go_on(self, _: list[C]) -> None:
        assert self._resume is not None
        await self._resume()

    async def _send(self, commands: list[C], execute: Callable[[list[C]], Awaitable[None]]) -> None:
        self._running = True
        try:
            while not await self._has_performed(commands, execute):
                execute = self._go_on
        except BaseException:
            _refuse(commands, MailboxClosedError(f"{self._name} was closed while the operation was out"))
            raise
        finally:
            self._running = False

    async def _has_performed(self, commands: list[C], execute: Callable[[list[C]], Awaitable[None]]) -> bool:
        """Whether that is over; False where a spurious cancellation ended it and it can be resumed."""
        cancelling = native_cancels()
        try:
            await self._perform(commands, execute)
        except anyio.get_cancelled_exc_class():
            this_task = cancelling() > 0  # else it is something that `execute` waits for
            if not await is_spurious_cancellation():
                raise
            if this_task and self._resume is not None:
                return False
            _refuse(commands, MailboxConnectionError(f"{self._name}: a spurious cancellation ended the call"))
        return True

    async def _perform(self, commands: list[C], execute: Callable[[list[C]], Awaitable[None]]) -> None:
        self._size = len(commands)
        self._out = commands
        try:
            await execute(commands)
        except Exception as error:
            _refuse(commands, error)
        finally:
            self._out = []  # they may be large, and the next ones may be long in coming
        if self._undo is not None and any(command.forsaken for command in commands):
            for command in commands:
                if command.forsaken and command.error is None:
                    self._undo(command)

    def _forsake(self, command: C, batch: _Batch[C]) -> None:
        if not batch.done.is_set():
            command.forsaken = batch.forsaken = True
        elif self._undo is not None and command.error is None and not command.forsaken:
            self._undo(command)

    def _end(self, batch: _Batch[C]) -> None:
        """Let the callers go on."""
        if batch.first is not None:
            batch.first.set()
        batch.done.set()


def _refuse(commands: Iterable[Command], error: Exception) -> None:
    """Give each command without a result its own copy."""
    for command in commands:
        if command.error is None and not command.done:
            command.error = copied(error)
