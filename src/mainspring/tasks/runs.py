"""The handler runs of a loop whose messages are calls of tasks: each by the options of its task."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import anyio

from mainspring.errors import ConfigError, MailboxConnectionError, MailboxError, Retry, SerializationError
from mainspring.mailbox import replies
from mainspring.mailbox.records import CHAIN_PART
from mainspring.tasks.batches import BatchItem, CallBatches, OpenBatches
from mainspring.tasks.calls import TaskCall, is_call_of
from mainspring.tasks.chain_runs import Recordings, chain_step
from mainspring.tasks.limits import declare
from mainspring.tasks.registry import NO_TASKS
from mainspring.tasks.unique import latest_call
from mainspring.worker.delivery import Phase
from mainspring.worker.handler import Handler, Handlers, as_coroutine_function
from mainspring.worker.middleware import wrappers_of
from mainspring.worker.outcome import RELEASED

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from anyio.abc import TaskGroup

    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.mailbox.message import Envelope, Message
    from mainspring.offload.pool import OffloadPool
    from mainspring.tasks.task import Task
    from mainspring.tasks.tasks import Tasks
    from mainspring.worker.context import Context
    from mainspring.worker.delivery import Delivery, HandlerRuns, Runs, Wrapper
    from mainspring.worker.outcome import Decision
    from mainspring.worker.settings import WorkerSettings


class TaskHandlers(Handlers):
    """The functions of a :class:`Tasks`, as the handlers of a loop."""

    def __init__(self, tasks: Tasks) -> None:
        self.name = tasks.name
        self.tasks = tasks
        self.before = partial(declare, tasks)
        if tasks.mailbox.capabilities.records:
            self.beside = self._run_schedules

    def bind(self, mailbox: Mailbox[Any, Any]) -> None:
        """Do nothing: the mailbox was made for calls."""

    def pool(self, offload: OffloadPool | str | None, workers: int) -> Pools:
        """Return what the plain functions run in that say no ``offload`` of their own."""
        return Pools(self.tasks, offload, workers)

    async def _run_schedules(self) -> None:
        from mainspring.tasks.ticker import Ticker

        await Ticker(self.tasks).run()

    def runs(
        self, mailbox: Mailbox[Any, Any], settings: WorkerSettings, pool: Any, make: Callable[..., HandlerRuns]
    ) -> TaskRuns:
        """Return the handler runs of one run of a loop."""
        return TaskRuns(mailbox, settings, pool, make)


class Pools:
    """The pools that the plain functions of a :class:`Tasks` run in: one of each kind, and the pools of ``offload=``."""

    def __init__(self, tasks: Tasks, offload: OffloadPool | str | None, workers: int) -> None:
        self._tasks = tasks
        self._offload = offload
        self._workers = workers
        self._by_kind: dict[str, OffloadPool] = {}
        self._by_task: dict[str, OffloadPool] = {}
        self._opened = AsyncExitStack()
        self.tasks: TaskGroup
        """In which batches run, for as long as the loop does."""

    async def __aenter__(self) -> Self:
        """Import the modules of tasks, and open the pools of the tasks that are registered by then.

        :raises ConfigError: no task is registered, a module cannot be imported, a function cannot run where its task says, or
            JSON cannot hold the type of a parameter.
        """
        self._tasks.import_modules()
        if not self._tasks.registered:  # each call would become a dead letter
            raise ConfigError(f"the loop of {self._tasks.name!r} has no tasks: {NO_TASKS}")
        for task in self._tasks.registered.values():
            task.parameters.check_types()
        pools = {task.name: self._pool_of(task) for task in self._tasks.registered.values() if not task.is_async}
        async with AsyncExitStack() as opened:
            for pool in dict.fromkeys(pools.values()):
                await opened.enter_async_context(pool)
            self.tasks = await opened.enter_async_context(anyio.create_task_group())
            self._opened = opened.pop_all()
        self._by_task = pools
        self._tasks.loops += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._tasks.loops -= 1
        return await self._opened.__aexit__(kind, error, trace)

    def set_workers(self, workers: int) -> None:
        """Let the pools that were not given run that many functions at once."""
        self._workers = workers
        for pool in self._by_kind.values():
            pool.set_workers(workers)

    def __getitem__(self, task: Task[..., Any]) -> OffloadPool:
        return self._by_task[task.name]

    def _pool_of(self, task: Task[..., Any]) -> OffloadPool:
        from mainspring.offload.pool import OffloadPool

        where: Any = task.handling.offload or self._offload or "thread"
        if where in ("thread", "process"):
            name = f"{where} pool of {self._tasks.name}"
            where = self._by_kind.setdefault(where, OffloadPool(where, workers=self._workers, name=name))
        pool = as_handler(task).pool(where, self._workers)
        assert pool is not None  # the function is plain
        return pool


class TaskRuns:
    """The handler runs of one run of a loop: those of a task are made at its first call."""

    def __init__(
        self, mailbox: Mailbox[Any, Any], settings: WorkerSettings, pools: Pools, make: Callable[..., HandlerRuns]
    ) -> None:
        self._settings = settings
        self._pools = pools
        self._make = make
        self._by_task: dict[Task[..., Any], Runs] = {}
        self._in_chains: dict[Task[..., Any], Runs] = {}
        """Those of calls that are parts of chains."""
        self._calls: dict[Task[..., Any], Callable[..., Coroutine[Any, Any, Any]]] = {}
        self._open_batches = OpenBatches(settings.concurrency)
        self._recordings = Recordings()
        self._unreadable = make(as_coroutine_function(_never), settings, mailbox.reply_to)
        """Of messages that are no call of a registered task: reading the body raises before the function is called."""

    @property
    def cancelled(self) -> bool:
        """True once the loop itself is being cancelled, and its handlers with it."""
        return self._unreadable.cancelled

    @cancelled.setter
    def cancelled(self, cancelled: bool) -> None:
        for runs in (self._unreadable, *self._by_task.values(), *self._in_chains.values()):
            runs.cancelled = cancelled

    def shut_down(self) -> None:
        """Let the batches run that wait for more calls: none come."""
        self._open_batches.shut_down()

    def resize(self, slots: int) -> None:
        """Let batches be as large as the loop's concurrency is from now on."""
        self._open_batches.resize(slots)

    def make(self, delivery: Delivery, scope: anyio.CancelScope) -> Coroutine[Any, Any, Decision]:
        """Run the function of a call once; see :meth:`HandlerRuns.make`."""
        return self._of(delivery).make(delivery, scope)

    def judge(self, delivery: Delivery, error: BaseException) -> Decision:
        """Decide what a failure of the function, or of its reply, means for the message."""
        return self._of(delivery).judge(delivery, error)

    def handler_of(self, delivery: Delivery) -> str:
        """Return the name of its task, or nothing if it is no call of a registered one."""
        runs = self._of(delivery)
        return "" if runs is self._unreadable else runs.handler_of(delivery)

    def _of(self, delivery: Delivery) -> Runs:
        message = delivery.message
        try:
            task = message.body.task
        except SerializationError:
            return self._unreadable
        headers = message.delivery.headers
        if headers and CHAIN_PART in headers:
            return self._in_chains.get(task) or self._runs_of(task, in_chain=True)
        return self._by_task.get(task) or self._runs_of(task, in_chain=False)

    def _runs_of(self, task: Task[..., Any], *, in_chain: bool) -> Runs:
        how = task.handling
        settings = self._settings._replace(
            handler=task.name,
            retry=how.retry or self._settings.retry,
            dead_letter=how.dead_letter or self._settings.dead_letter,
            handler_timeout=self._settings.handler_timeout if how.timeout is None else how.timeout,
            timeout_option="timeout",
            wants_context=task.parameters.context is not None,
            in_thread=not task.is_async and how.batch is None,
        )
        runs: Runs = self._make(
            self._calls.get(task) or self._call_of(task),
            settings,
            _replier(task),
            inner=wrappers_of(how.middleware),
            outer=self._outer(task, in_chain=in_chain),
            encode_result=task.encode_result,
        )
        if how.aliases and task.tasks.mailbox.capabilities.limits:
            runs = AliasRuns(runs, task)
        runs.cancelled = self.cancelled
        (self._in_chains if in_chain else self._by_task)[task] = runs
        return runs

    def _call_of(self, task: Task[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return what runs the function of a task for one call, or lets that join a batch."""
        if task.handling.batch is not None:
            call = self._batched(task, task.handling.batch)
        else:
            call = _coroutine_of(task) if task.is_async else _offloaded(task, self._pools[task])
        self._calls[task] = call
        return call

    def _outer(self, task: Task[..., Any], *, in_chain: bool) -> tuple[Wrapper, ...]:
        """Return what runs around all middleware: what it records is true once that has ended well."""
        debounce = task.handling.debounce
        of_key = () if debounce is None else (latest_call(task, debounce),)
        return (*of_key, chain_step(task, self._recordings)) if in_chain else of_key

    def _batched(self, task: Task[..., Any], size: int) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return what lets a call join a batch of its task."""
        batches = CallBatches(
            task.name,
            _of_many(task, None if task.is_async else self._pools[task]),
            size=size,
            wait=task.handling.batch_wait,
            tasks=self._pools.tasks,
            open_batches=self._open_batches,
        )

        def join(call: TaskCall, context: Context | None = None) -> Coroutine[Any, Any, Any]:
            (argument,) = call.arguments.values()
            return batches.join(BatchItem(argument, context))

        return join


class AliasRuns:
    """The handler runs of a task with aliases: a call by an alias comes under the limits of the task before it runs.

    The store knows a message by the name that it was sent with. So a worker that claims a call by an alias gives it the name of
    the task there, if the task has limits. This releases the call, which is no attempt. The call waits at the limiters of the
    task, in its old place.
    """

    def __init__(self, runs: Runs, task: Task[..., Any]) -> None:
        self._runs = runs
        self._task = task

    @property
    def cancelled(self) -> bool:
        return self._runs.cancelled

    @cancelled.setter
    def cancelled(self, cancelled: bool) -> None:
        self._runs.cancelled = cancelled

    def shut_down(self) -> None:
        self._runs.shut_down()

    def resize(self, slots: int) -> None:
        self._runs.resize(slots)

    async def make(self, delivery: Delivery, scope: anyio.CancelScope) -> Decision:
        claimed, task = delivery.message.delivery, self._task
        if not is_call_of(task, claimed.body):
            try:
                is_released = await task.tasks.mailbox.backend.set_task(claimed, task.name)
            except MailboxError as error:
                delivery.phase = Phase.ENDED
                # The function has not begun: a store that does not answer is no failure of it.
                return self.judge(delivery, Retry(charge=False) if isinstance(error, MailboxConnectionError) else error)
            if is_released:
                delivery.phase = Phase.ENDED
                delivery.message.settlement = RELEASED.settlement
                return RELEASED
        return await self._runs.make(delivery, scope)

    def judge(self, delivery: Delivery, error: BaseException) -> Decision:
        return self._runs.judge(delivery, error)

    def handler_of(self, delivery: Delivery) -> str:
        return self._runs.handler_of(delivery)


def _of_many(task: Task[..., Any], pool: OffloadPool | None) -> Callable[[list[BatchItem]], Coroutine[Any, Any, Any]]:
    """Return what runs the function of a task for the arguments of several calls."""
    (name,) = task.parameters.names

    async def run(items: list[BatchItem]) -> Any:
        given: dict[str, list[Any]] = {name: [item.argument for item in items]}
        if task.parameters.context is not None:
            given[task.parameters.context] = [item.context for item in items]
        if not task.parameters.dependencies:
            return await call(given)
        from mainspring.tasks.dependencies import provided

        async with provided(task.fn, given) as arguments:
            return await call(arguments)

    async def call(arguments: dict[str, Any]) -> Any:
        if pool is None:
            return await task.fn(**arguments)
        return await pool.run_to_the_end(_PlainBatch(task), arguments)

    return run


class _PlainBatch:
    """What a pool calls for several calls of a task: pickled, it names the task."""

    def __init__(self, task: Task[..., Any]) -> None:
        self._task = task
        self.__qualname__ = task.name

    def __call__(self, arguments: dict[str, Any]) -> Any:
        return self._task.fn(**arguments)


def _arguments(task: Task[..., Any], call: TaskCall, context: tuple[Any, ...]) -> dict[str, Any]:
    """Return what the function is called with, but for its dependencies."""
    name = task.parameters.context
    return call.arguments if name is None else {**call.arguments, name: context[0]}


class _PlainCall:
    """What a pool calls for a task: pickled, it names the task."""

    def __init__(self, task: Task[..., Any]) -> None:
        self._task = task
        self.__qualname__ = task.name

    def __call__(self, call: TaskCall, *context: Any) -> Any:
        return self._task.fn(**_arguments(self._task, call, context))


def as_handler(task: Task[..., Any]) -> Handler:
    """Return the plain function of a task as the handler of a loop."""
    return Handler(_PlainCall(task), task.name, task.is_async, task.parameters.context is not None, None, None)


def _coroutine_of(task: Task[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return what gives the coroutine of a call."""
    fn, name = as_coroutine_function(task.fn), task.parameters.context
    if task.parameters.dependencies:
        from mainspring.tasks.dependencies import provided

        async def run(call: TaskCall, *context: Any) -> Any:
            async with provided(task.fn, _arguments(task, call, context)) as arguments:
                return await fn(**arguments)

        return run
    if name is None:
        return lambda call: fn(**call.arguments)
    return lambda call, context: fn(**call.arguments, **{name: context})


def _offloaded(task: Task[..., Any], pool: OffloadPool) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return what runs a plain function in a pool. Its dependencies are opened and closed on the event loop."""
    in_pool = as_handler(task).caller(pool)
    if not task.parameters.dependencies:
        return in_pool
    from mainspring.tasks.dependencies import provided

    async def run(delivery: Delivery, call: TaskCall, *context: Any) -> Any:
        async with provided(task.fn, _arguments(task, call, context)) as arguments:
            return await in_pool(delivery, TaskCall(task, arguments), *context)

    return run


def _replier(task: Task[..., Any]) -> Callable[[Message[Any, Any], Any], Envelope]:
    """Return what makes the reply of a result, which is checked against what the function says that it returns."""
    mailbox = task.tasks.mailbox

    def reply_to(message: Message[Any, Any], result: Any) -> Envelope:
        codec = task.result_codec
        encoded = codec.encode(result) if mailbox.serializes else codec.unserialized(result)
        return replies.reply_to(mailbox, message.delivery, encoded)

    return reply_to


async def _never(_: Any) -> None:
    """Stand for the function of a message whose body cannot be read: it is not called."""
