"""``Tasks``: many functions on one mailbox."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, Self, TypeVar, overload

from mainspring.core.introspection import check_runs, instead_of, name_of
from mainspring.errors import ConfigError, describe
from mainspring.mailbox.codec import Codec
from mainspring.mailbox.limits import check_id, check_send, is_task_name
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.open import open_mailbox
from mainspring.tasks.batches import check_batch
from mainspring.tasks.calls import CallCodec, Parameters
from mainspring.tasks.job import Job
from mainspring.tasks.keys import check_key, check_weight
from mainspring.tasks.limits import LimitOptions, check_bounded, check_concurrency
from mainspring.tasks.runs import TaskHandlers
from mainspring.tasks.task import BATCH_WAIT, SendOptions, Task, TaskOptions
from mainspring.tasks.unique import Debounce
from mainspring.validation import as_seconds
from mainspring.worker.handler import check_offload
from mainspring.worker.main_loop import MainLoop, check_handling
from mainspring.worker.middleware import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Concatenate

    from mainspring.mailbox.limiters import LimitState
    from mainspring.mailbox.sync import SyncMailbox
    from mainspring.mailbox.workers import WorkerStatus
    from mainspring.offload.pool import OffloadPool
    from mainspring.policies import DeadLetterPolicy, LeasePolicy, Rate, RetryPolicy
    from mainspring.tasks.chain_runs import ChainJob
    from mainspring.tasks.keys import Key, Weight
    from mainspring.tasks.limits import Ordered
    from mainspring.tasks.recording import Recording, SentCalls
    from mainspring.tasks.schedule_verbs import Schedules
    from mainspring.tasks.schedules import Misfire, Schedule
    from mainspring.tasks.unique import Unique
    from mainspring.validation import Seconds
    from mainspring.worker.context import Context
    from mainspring.worker.middleware import Middleware

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")
Y = TypeVar("Y")

CONCURRENCY = 10
"""How many calls a loop of tasks runs at once, where nothing else is said."""


class _Decorator(Protocol):
    """What ``@tasks.task(…)`` returns: it takes the function."""

    @overload
    def __call__(self, fn: Callable[Concatenate[Context[X], P], Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[Context[X], P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Task[P, R]: ...


class _BatchDecorator(Protocol):
    """What ``@tasks.task(batch=…)`` returns: it takes the function."""

    @overload
    def __call__(
        self,
        fn: Callable[[list[Context[Y]], list[X]], Coroutine[Any, Any, Sequence[R | BaseException] | None]],
        /,
    ) -> Task[[X], R]: ...
    @overload
    def __call__(
        self, fn: Callable[[list[Context[Y]], list[X]], Sequence[R | BaseException] | None], /
    ) -> Task[[X], R]: ...
    @overload
    def __call__(
        self, fn: Callable[[list[X]], Coroutine[Any, Any, Sequence[R | BaseException] | None]], /
    ) -> Task[[X], R]: ...
    @overload
    def __call__(self, fn: Callable[[list[X]], Sequence[R | BaseException] | None], /) -> Task[[X], R]: ...


class Tasks:
    """Functions that are called by messages of one mailbox: ``@tasks.task`` registers one, ``tasks.loop()`` works on them.

    It is unopened, like a mailbox: ``async with tasks:`` opens the mailbox, and so does a LoopGroup that runs its loop.

    :param mailbox: a mailbox URL, or an unopened mailbox that is bound to no type.
    :param name: for logs, metrics and reports; the mailbox's by default.
    :param retry: how long a failed call waits before it is tried again, where its task does not say.
    :param dead_letter: when a call is given up, where its task does not say.
    :param middleware: what runs around each send and each run of its tasks, the outermost first.
    :param modules: modules that register tasks, as ``["app.emails"]``: a loop imports them as it starts, so that a worker has
        all tasks whatever its own module imports.
    :param max_concurrency: how many messages of the mailbox are in flight at once in the whole fleet; None: as many as its
        loops take.
    :raises ConfigError: the URL cannot be used, or the mailbox has a type of bodies.
    """

    def __init__(
        self,
        mailbox: str | Mailbox[Any, Any],
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        dead_letter: DeadLetterPolicy | None = None,
        middleware: Sequence[Middleware] = (),
        modules: Sequence[str] = (),
        max_concurrency: int | None = None,
    ) -> None:
        if isinstance(modules, str) or not all(isinstance(module, str) for module in modules):
            raise ConfigError(
                f"Tasks: modules must be a list of names of modules, as ['app.emails'], not {modules!r:.100}"
            )
        self._modules = tuple(modules)
        self.registered: dict[str, Task[..., Any]] = {}
        """The tasks by their names and aliases."""
        self._schedules: Schedules | None = None
        self.loops = 0
        """How many loops run on it in this process."""
        self.declared_in: object | None = None
        """The opening of the mailbox in which the limits of all tasks were declared."""
        self.recording: Recording | None = None
        """What takes the calls inside the block of :meth:`testing`; None outside of it."""
        if isinstance(mailbox, str):
            mailbox = open_mailbox(mailbox)
        if not isinstance(mailbox, Mailbox):
            raise ConfigError(f"Tasks: give a mailbox URL or a Mailbox (see open_mailbox), not {mailbox!r}")
        check_concurrency("Tasks: max_concurrency", max_concurrency)
        if max_concurrency is not None:
            check_bounded("Tasks: max_concurrency", mailbox)
        self.max_concurrency = max_concurrency
        mailbox.bind(body=CallCodec(self.registered))
        self.mailbox: Mailbox[Any, Any] = mailbox
        """Where the calls are. Its bodies are calls of tasks."""
        self.name = name or mailbox.name
        check_handling(f"tasks {self.name!r}", "timeout", None, retry, dead_letter)
        self.middleware = checked(middleware, f"tasks {self.name!r}")
        self.retry = retry
        self.dead_letter = dead_letter

    def __repr__(self) -> str:
        return f"<Tasks {self.name!r} on {self.mailbox!r}>"

    # ---------------------------------------------------------------------------------------------------- registering

    @overload
    def task(self, fn: Callable[Concatenate[Context[X], P], Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def task(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def task(self, fn: Callable[Concatenate[Context[X], P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, fn: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        aliases: Sequence[str] = (),
        retry: RetryPolicy | None = None,
        dead_letter: DeadLetterPolicy | None = None,
        timeout: float | None = None,
        priority: int = 0,
        rate: Rate | str | None = None,
        concurrency: int | None = None,
        key: Key | None = None,
        key_rate: Rate | str | None = None,
        key_concurrency: int | None = None,
        ordered: Ordered = False,
        weight: Weight | None = None,
        unique: Unique = False,
        debounce: Seconds | tuple[Seconds, Seconds] | None = None,
        result_ttl: Seconds = 0,
        expires_in: Seconds | None = None,
        offload: Literal["thread", "process"] | OffloadPool | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> _Decorator: ...
    @overload
    def task(
        self,
        /,
        *,
        batch: int,
        batch_wait: float = BATCH_WAIT,
        name: str | None = None,
        aliases: Sequence[str] = (),
        retry: RetryPolicy | None = None,
        dead_letter: DeadLetterPolicy | None = None,
        timeout: float | None = None,
        priority: int = 0,
        rate: Rate | str | None = None,
        concurrency: int | None = None,
        key: Key | None = None,
        key_rate: Rate | str | None = None,
        key_concurrency: int | None = None,
        ordered: Ordered = False,
        weight: Weight | None = None,
        unique: Unique = False,
        debounce: Seconds | tuple[Seconds, Seconds] | None = None,
        result_ttl: Seconds = 0,
        expires_in: Seconds | None = None,
        offload: Literal["thread", "process"] | OffloadPool | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> _BatchDecorator: ...

    def task(
        self, fn: Callable[..., Any] | None = None, /, *, name: str | None = None, retry: RetryPolicy | None = None,
        dead_letter: DeadLetterPolicy | None = None, timeout: float | None = None, priority: int = 0,
        rate: Rate | str | None = None, concurrency: int | None = None, key: Key | None = None,
        key_rate: Rate | str | None = None, key_concurrency: int | None = None, ordered: Ordered = False,
        weight: Weight | None = None, unique: Unique = False, debounce: Seconds | tuple[Seconds, Seconds] | None = None,
        result_ttl: Seconds = 0, expires_in: Seconds | None = None,
        offload: Literal["thread", "process"] | OffloadPool | None = None, middleware: Sequence[Middleware] = (),
        batch: int | None = None, batch_wait: float = BATCH_WAIT, aliases: Sequence[str] = (),
    ) -> Any:  # fmt: skip
        """Register a function: ``@tasks.task``, or ``@tasks.task(timeout=60)``. Return it as a :class:`Task`.

        An ``async def`` runs on the worker's event loop, a plain ``def`` in a thread of its worker. Its parameters are
        annotated with types that JSON can hold; a parameter annotated as :class:`Context` gets the context, and is no part of
        the message. Put it first, so that type checkers know that callers leave it out.

        :param name: how messages name it; the function's name by default. Keep the name when the function is renamed.
        :param aliases: former names, as ``["email"]``: their calls also run here, within the limits of the task.
        :param retry: how long a failed call waits before it is tried again.
        :param dead_letter: when a call is given up.
        :param timeout: seconds after which the function is cancelled, as a failed attempt.
        :param priority: of its calls: higher is begun sooner.
        :param rate: how many calls may begin in a time, in the whole fleet: a text as ``"100/m"``, or a :class:`Rate`.
        :param concurrency: how many calls run at once in the whole fleet.
        :param key: the key of a call: the name of a parameter, or a function of the arguments. Keys take turns, and the
            options below go by it. So do ``unique`` and ``debounce``, which go by all arguments without it.
        :param key_rate: how many calls of each key may begin in a time.
        :param key_concurrency: how many calls of each key run at once.
        :param ordered: True or ``"retry"``: of each key one call runs at once, in the order of the sends, and a call that waits
            for its next attempt holds up the later ones. ``"running"``: only a running call does. ``"dead"``: also a
            dead letter does, until it is replayed and done, or purged.
        :param weight: how many calls of a key come in turn for one of weight 1: 0.01 to 100; or as ``key``, by the arguments.
        :param unique: a second call with the same key is not sent, and its job is that of the first: True: while the first is
            unfinished; ``"pending"``: until the first has begun; seconds, or a timedelta: for that long after its send.
        :param debounce: seconds, or a timedelta, for which a call waits. If another with its key is sent meanwhile, it waits
            anew, and of both the later is run: at most ten times as long in all, or ``(seconds, most seconds)``.
        :param result_ttl: seconds, or a timedelta (0 to 366 days), for which the end of a call is kept: what it returned, or
            that it was cancelled. 0: it is not kept.
        :param expires_in: seconds, or a timedelta, after which a call that has not begun goes to the dead letters.
        :param offload: where a plain function runs: ``"thread"``, ``"process"``, or an :class:`OffloadPool`.
        :param middleware: what runs around each send and each run of this task, inside of that of the ``Tasks``.
        :param batch: the function takes up to that many calls at once, as a list: ``(docs: list[Doc])``; each sends one.
            It returns None if all are done, or a list with a result or an exception for each; what it raises holds for
            all. Each call is settled, and tried again, by itself. A batch is no larger than the loop's ``concurrency``. A
            parameter of type ``list[Context]``, put first, gets the context of each call: beat all of them in a long run.
        :param batch_wait: seconds that a batch waits for more calls, from its first one on.
        :raises ConfigError: the name is taken, a parameter cannot be sent, a value is impossible, or a loop runs already.
        """
        caller = sys._getframe(1)  # noqa: SLF001 - annotations may name classes local to the calling function
        names = {**caller.f_globals, **caller.f_locals}
        around, debounced = checked(middleware, "task"), Debounce.of(name or "", debounce)
        handling = TaskOptions(
            retry, dead_letter, timeout, offload, around, batch, batch_wait, key, weight, debounce=debounced
        )
        limits = LimitOptions(rate, concurrency, key_rate, key_concurrency, ordered, weight)
        sending = SendOptions(priority=priority, unique=unique, result_ttl=result_ttl, expires_in=expires_in)
        register = partial(
            self._register, name=name, aliases=aliases, handling=handling, limits=limits, sending=sending, names=names
        )
        return register if fn is None else register(fn)

    def _register(
        self,
        fn: Callable[..., Any],
        name: str | None,
        aliases: Sequence[str],
        handling: TaskOptions,
        limits: LimitOptions,
        sending: SendOptions,
        names: dict[str, Any],
    ) -> Task[..., Any]:
        if not callable(fn):
            raise ConfigError(f"a task must be a function, {instead_of(fn, 'task')}")
        check_runs(fn, "task")
        name = name_of(fn).rpartition(".")[2] if name is None else name
        if isinstance(aliases, str):
            raise ConfigError(f"task {name!r}: aliases must be a list of names, as [{aliases!r}], not a text")
        for each in (name, *aliases):
            self._check_name(each)
        if self.loops:
            raise ConfigError(f"task {name!r}: a loop of {self.name!r} runs already; register tasks before")
        check_handling(f"task {name}", "timeout", handling.timeout, handling.retry, handling.dead_letter)
        if handling.dead_letter is not None and handling.dead_letter.keep is not None:
            raise ConfigError(
                f"task {name}: keep is for the dead letters of a whole mailbox: give it to Tasks(…, dead_letter=…)"
            )
        check_send(0.0, None, sending.priority, None, as_seconds(sending.expires_in))
        check_batch(name, handling.batch, handling.batch_wait)
        parameters = Parameters(name, fn, names, is_batch=handling.batch is not None)
        check_key(name, handling.key, parameters.names)
        check_weight(name, handling.weight, parameters.names)
        handling = replace(handling, limits=limits.checked(name, handling.key, self.mailbox), aliases=tuple(aliases))
        task: Task[..., Any] = Task(self, name, fn, parameters, handling, sending)
        check_offload(f"task {name}", handling.offload, is_async=task.is_async)
        self.registered |= dict.fromkeys((name, *aliases), task)
        self.declared_in = None
        return task

    def _check_name(self, name: Any) -> None:
        if not is_task_name(name):
            raise ConfigError(
                f"task {name!r}: a name is up to 200 letters, digits and _ . : / -, and begins with a letter; give name="
            )
        if name in self.registered:
            raise ConfigError(
                f"task {name!r} is registered already on {self.name!r}; give one of the two another name="
            )

    # ----------------------------------------------------------------------------------------------------- schedules

    @property
    def schedules(self) -> Schedules:
        """The schedules of its mailbox, to make, show and change them at run time."""
        if self._schedules is None:
            from mainspring.tasks.schedule_verbs import Schedules

            self._schedules = Schedules(self)
        return self._schedules

    def schedule(self, schedule: Schedule) -> Schedule:
        """Declare a schedule: it is ticked by the loops of programs that declare it, once per tick among all of them.

        The store remembers by its name where it stands, so that a restart or a deploy loses no tick and sends none twice. What
        is changed in the code holds as soon as a worker starts with it; the next tick stays if the times are the same. Where
        workers with two definitions run, that of the worker which started last holds for all of them. When the last worker
        with that definition has gone, the other one takes its place within two minutes.

        :raises ConfigError: the name is declared already, a loop runs, the mailbox keeps no records (``Capabilities.records``),
            or the task has options that mean one call: ``delay``, ``at``, ``deadline``, ``connection``.
        :raises InvalidParameterError: an argument is missing or unknown.
        :raises SerializationError: an argument is not of its type.
        """
        self.schedules.declare(schedule)
        return schedule

    def cron(
        self,
        line: str,
        task: Task[..., Any],
        *,
        name: str | None = None,
        args: tuple[Any, ...] | Mapping[str, Any] = (),
        tz: str = "UTC",
        misfire: Misfire = "once",
        jitter: Seconds = 0,
    ) -> Schedule:
        """Declare a :class:`Schedule` by a cron line, of the name of its task if nothing else is said; see :meth:`schedule`."""
        from mainspring.tasks.schedules import Schedule

        name = task.name if name is None and isinstance(task, Task) else name
        return self.schedule(
            Schedule(name or str(task), task, cron=line, args=args, tz=tz, misfire=misfire, jitter=jitter)
        )

    def import_modules(self) -> None:
        """Import the modules that register tasks.

        :raises ConfigError: one cannot be imported.
        """
        for module in self._modules:
            try:
                import_module(module)
            except Exception as error:
                raise ConfigError(
                    f"tasks {self.name!r}: module {module!r} does not import: {describe(error)}"
                ) from error

    # ------------------------------------------------------------------------------------------------------- working

    def loop(
        self,
        *,
        name: str | None = None,
        concurrency: int = CONCURRENCY,
        visibility_timeout: float = 60,
        wait_time_seconds: float = 30,
        lease: LeasePolicy | None = None,
        shutdown_timeout: float | None = None,
        shutdown_priority: int = 0,
        offload: Literal["thread", "process"] | OffloadPool | None = None,
    ) -> MainLoop:
        """Return a loop that runs the calls, for a LoopGroup; see :class:`MainLoop` for the parameters.

        It runs each task that is registered by the time it starts. Then the loop fails with :class:`ConfigError` where JSON
        cannot hold the type of one's parameter.
        """
        return MainLoop(
            self.mailbox,
            TaskHandlers(self),
            name=name or self.name,
            concurrency=concurrency,
            visibility_timeout=visibility_timeout,
            wait_time_seconds=wait_time_seconds,
            retry=self.retry,
            dead_letter=self.dead_letter,
            middleware=self.middleware,
            lease=lease,
            shutdown_timeout=shutdown_timeout,
            shutdown_priority=shutdown_priority,
            offload=offload,
        )

    def job(self, job_id: str) -> Job[Any]:
        """Return the job of that id, as :attr:`Job.id` gave it, perhaps in another process. The store is not asked for it.

        :raises InvalidParameterError: it is no text.
        """
        check_id("tasks.job: job_id", job_id)
        return Job(self, job_id)

    def chain_job(self, chain_id: str) -> ChainJob:
        """Return the job of the chain of that id, as :attr:`ChainJob.id` gave it, perhaps in another process.

        :raises InvalidParameterError: it is no text.
        """
        from mainspring.tasks.chain_runs import ChainJob

        check_id("tasks.chain_job: chain_id", chain_id)
        return ChainJob(self, chain_id)

    async def workers(self) -> list[WorkerStatus]:
        """Return the loops that work on the mailbox; see :meth:`Mailbox.workers`."""
        return await self.mailbox.workers()

    def read_result(self, task_name: str | None, raw: bytes | None) -> Any:
        """Return the result that a store has kept: of the type of its task, or as JSON data if that is not registered here.

        :raises SerializationError: it does not fit what the function says that it returns.
        """
        if raw is None:
            return None
        task = self.registered.get(task_name or "")
        return Codec().decode(raw) if task is None else task.result_codec.decode(raw)

    # ------------------------------------------------------------------------------------------------- the whole fleet

    async def pause(self, task: Task[..., Any] | str | None = None) -> None:
        """Let no worker begin calls (with ``task``: calls of that task) until :meth:`resume`; see :meth:`Mailbox.pause`."""
        await self.mailbox.pause(_task_name(task))

    async def resume(self, task: Task[..., Any] | str | None = None) -> None:
        """End a :meth:`pause`; see :meth:`Mailbox.resume`."""
        await self.mailbox.resume(_task_name(task))

    async def set_concurrency(self, most: int | None, task: Task[..., Any] | str | None = None) -> None:
        """Change how many calls, or calls of ``task``, run at once in the whole fleet; see :meth:`Mailbox.set_concurrency`."""
        await self.mailbox.set_concurrency(most, _task_name(task))

    async def limits(self) -> list[LimitState]:
        """Return the limits, the pauses and the changed concurrency of tasks; see :meth:`Mailbox.limits`."""
        return await self.mailbox.limits()

    # ------------------------------------------------------------------------------------------------------- testing

    @contextmanager
    def testing(self, *, inline: bool = False, resources: Any = None) -> Iterator[SentCalls]:
        """Record calls inside the block instead of sending them: ``with tasks.testing() as sent:``. No store is needed.

        ``sent`` is a list of the calls: ``sent[0].task``, ``.arguments``, ``.options``. Middleware is entered for each send,
        and the arguments are checked and encoded as for a store. ``await sent.run()`` runs what was sent, and what that sends;
        ``await sent[0].run()`` runs one call. The functions run inside of the middleware of the tasks, with their dependencies,
        timeouts and the check of their results. What they raise is raised there, and nothing is tried again.

        A call with the key (``unique``, ``debounce``, ``dedup_key``) of a call that has not run is not recorded: its job is
        that of the other one (``job.new`` is False). ``unique=`` seconds hold for the whole block.

        :param inline: True: each call runs as it is sent, and what it raises is raised to the sender. ``task.request`` works
            only then.
        :param resources: what ``ctx.resources`` is; None: there are none, as without a lifespan.
        """
        from mainspring.tasks.recording import recorded

        with recorded(self, inline=inline, resources=resources) as sent:
            yield sent

    # ---------------------------------------------------------------------------------------------------- life cycle

    @property
    def sync(self) -> SyncMailbox[Any, Any]:
        """The mailbox for threads that are not async: ``with tasks.sync:`` opens it, for ``task.sync.send(…)``."""
        return self.mailbox.sync

    async def __aenter__(self) -> Self:
        """Open the mailbox."""
        await self.mailbox.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self.mailbox.__aexit__(kind, error, trace)


def _task_name(task: Task[..., Any] | str | None) -> str | None:
    return task.name if isinstance(task, Task) else task
