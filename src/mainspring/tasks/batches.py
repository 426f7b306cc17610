"""Tasks whose function takes several calls at once.

Each call is a message of its own, in a slot of its own, with its own lease, timeout, retries and settlement. Its slot runs
:meth:`CallBatches.join`, which adds the call to the open batch and waits until the function has run. A batch is closed when it
is full, when ``batch_wait`` is over, when every slot of the loop waits for a batch, or when the loop is told to stop: none
could join it then. The function runs in a task of the loop, not in a slot: so a call that is cancelled or lost ends alone.
When the last one has left, the function is cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from mainspring.errors import ConfigError, TaskExitError, copied
from mainspring.runtime.cancellation import is_spurious_cancellation
from mainspring.validation import is_number, is_whole

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from mainspring.worker.context import Context

CLEAN_UP = 5.0
"""Seconds for which the last call that leaves a batch waits until the cancelled function has ended."""


class BatchItem(NamedTuple):
    """One call of a batch: its argument, and its context if the function takes that."""

    argument: Any
    context: Context | None


class CallBatch:
    """The calls that one run of the function is for."""

    def __init__(self) -> None:
        self.items: dict[int, BatchItem] = {}
        """The calls, each by a number of its own."""
        self.results: dict[int, Any] = {}
        self.error: Exception | None = None
        self.closed = anyio.Event()
        self.ended = anyio.Event()
        self.scope = anyio.CancelScope()
        self.waiting = 0
        """How many calls wait for it."""


class OpenBatches:
    """The open batches of one run of a loop. ``slots`` is how many calls it runs at once."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._open: set[CallBatch] = set()
        self._shut_down = False

    def add(self, batch: CallBatch) -> None:
        """Note a batch that calls may join."""
        self._open.add(batch)

    def close(self, batch: CallBatch) -> None:
        """Let the function run for ``batch`` (idempotent)."""
        self._open.discard(batch)
        batch.closed.set()

    def close_if_all_wait(self) -> None:
        """Close all of them if every slot of the loop waits for one, or if the loop is told to stop."""
        if self._shut_down or sum(len(batch.items) for batch in self._open) >= self._slots:
            for batch in list(self._open):
                self.close(batch)

    def resize(self, slots: int) -> None:
        """Know that the loop runs that many calls at once from now on."""
        self._slots = slots
        self.close_if_all_wait()

    def shut_down(self) -> None:
        """Close all of them, now and later: the loop is told to stop."""
        self._shut_down = True
        self.close_if_all_wait()


class CallBatches:
    """The batches of one task in one run of a loop.

    :param call: runs the function for a list of calls.
    :param tasks: in which it runs.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[list[BatchItem]], Awaitable[Any]],
        *,
        size: int,
        wait: float,
        tasks: TaskGroup,
        open_batches: OpenBatches,
    ) -> None:
        self._name = name
        self._call = call
        self._size = size
        self._wait = wait
        self._tasks = tasks
        self._open_batches = open_batches
        self._open: CallBatch | None = None
        self._numbers = 0

    async def join(self, item: BatchItem) -> Any:
        """Add a call to the open batch; wait until the function has run, and return what it returned for this call.

        Raises what the function raised, or returned for this call. Cancelled, the call leaves the batch.
        """
        batch = self._open
        if batch is None or batch.closed.is_set():
            self._open = batch = CallBatch()
            self._open_batches.add(batch)
            self._tasks.start_soon(self._run, batch, name=f"batch of {self._name}")
        self._numbers += 1
        number = self._numbers
        batch.items[number] = item
        batch.waiting += 1
        if len(batch.items) == self._size:
            self._open_batches.close(batch)
        self._open_batches.close_if_all_wait()
        try:
            await batch.ended.wait()
        except anyio.get_cancelled_exc_class():
            await self._leave(batch, number)
            raise
        if batch.error is not None:
            raise copied(batch.error)
        result = batch.results[number]
        if isinstance(result, BaseException):
            raise result
        return result

    async def _leave(self, batch: CallBatch, number: int) -> None:
        batch.waiting -= 1
        if not batch.closed.is_set():
            del batch.items[number]
        if not batch.waiting:
            self._open_batches.close(batch)
            batch.scope.cancel()
            with anyio.move_on_after(CLEAN_UP, shield=True):
                await batch.ended.wait()

    async def _run(self, batch: CallBatch) -> None:
        try:
            with batch.scope:
                with anyio.move_on_after(self._wait):
                    await batch.closed.wait()
                self._open_batches.close(batch)
                if batch.items:
                    await self._run_function(batch)
        finally:
            if batch.error is None and len(batch.results) < len(batch.items):
                batch.error = TaskExitError(f"task {self._name}: its batch was cancelled")
            batch.ended.set()

    async def _run_function(self, batch: CallBatch) -> None:
        try:
            returned = await self._call(list(batch.items.values()))
            batch.results = dict(zip(batch.items, self._checked(returned, len(batch.items)), strict=True))
        except Exception as error:
            batch.error = error
        except anyio.get_cancelled_exc_class() as error:
            if batch.scope.cancel_called or not await is_spurious_cancellation():
                raise
            batch.error = TaskExitError(f"task {self._name} raised a spurious cancellation; catch it where it arises")
            batch.error.__cause__ = error
        except BaseException as error:  # raised in a task of its own, it would end the loop
            batch.error = TaskExitError(
                f"task {self._name} raised {error!r}; raise Reject, or call shutdown() of the group"
            )
            batch.error.__cause__ = error

    def _checked(self, returned: Any, calls: int) -> Sequence[Any]:
        if returned is None:
            return [None] * calls
        if not isinstance(returned, Sequence) or isinstance(returned, str | bytes) or len(returned) != calls:
            raise TaskExitError(
                f"task {self._name} was called for {calls} calls and returned {returned!r:.100}; return None, or a list with"
                " a result or an exception for each call"
            )
        for result in returned:
            if isinstance(result, type) and issubclass(result, BaseException):
                raise TaskExitError(
                    f"task {self._name} returned the class {result.__qualname__} for a call; return an instance of it"
                )
        return returned


def check_batch(name: str, batch: Any, batch_wait: Any) -> None:
    """Raise :class:`ConfigError` for a size or a time that cannot be."""
    if batch is not None and not is_whole(batch, 1):
        raise ConfigError(f"task {name}: batch must be a whole number from 1, or None, not {batch!r}")
    if not is_number(batch_wait, 0):
        raise ConfigError(f"task {name}: batch_wait must be 0 or more seconds and finite, not {batch_wait!r}")
