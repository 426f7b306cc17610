"""``TaskRegistry``: functions that are registered by name, and ``TaskRouter``: such functions that have no mailbox yet."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, overload

from mainspring.core.introspection import check_runs, instead_of, name_of
from mainspring.errors import ConfigError
from mainspring.mailbox.limits import check_expires_in, check_priority, is_task_name
from mainspring.tasks.batches import check_batch
from mainspring.tasks.calls import Parameters
from mainspring.tasks.keys import check_key, check_weight
from mainspring.tasks.limits import LimitOptions
from mainspring.tasks.task import BATCH_WAIT, NoTasks, SendOptions, Task, TaskOptions
from mainspring.tasks.unique import Debounce
from mainspring.validation import as_seconds
from mainspring.worker.handler import check_offload
from mainspring.worker.main_loop import check_handling
from mainspring.worker.middleware import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Concatenate

    from mainspring.offload.pool import OffloadPool
    from mainspring.policies import DeadLetterPolicy, Rate, RetryPolicy
    from mainspring.tasks.keys import Key, Weight
    from mainspring.tasks.limits import Ordered
    from mainspring.tasks.tasks import Tasks
    from mainspring.tasks.unique import Unique
    from mainspring.validation import Seconds
    from mainspring.worker.context import Context
    from mainspring.worker.middleware import Middleware

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")
Y = TypeVar("Y")


NO_TASKS = (
    "register them with @tasks.task in a module that it imports or that Tasks(modules=) names; those of a TaskRouter need"
    " tasks.include(router)"
)
"""What to do where a :class:`Tasks` has no tasks."""


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


class TaskRegistry:
    """Functions by the names of their tasks."""

    name: str

    def __init__(self, owner: Tasks | NoTasks) -> None:
        self.registered: dict[str, Task[..., Any]] = {}
        """The tasks by their names and aliases."""
        self.declared_in: object | None = None
        """The opening of the mailbox in which the limits of all tasks were declared."""
        self._owner = owner

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
        :param result_ttl: seconds, or a timedelta, for which the result of a call, or its cancellation, is kept; 0: not at all.
        :param expires_in: seconds, or a timedelta, after which a call that waits, or its retry, goes to the dead letters.
        :param offload: where a plain function runs: ``"thread"``, ``"process"``, or an :class:`OffloadPool`.
        :param middleware: what runs around each send and each run of this task, inside of that of the ``Tasks``.
        :param batch: the function takes up to that many calls at once, as a list: ``(docs: list[Doc])``; each sends one.
            It returns None if all are done, or a list with a result or an exception for each; what it raises holds for
            all. Each call is settled, and tried again, by itself. A batch is no larger than the loop's ``concurrency``. A
            parameter of type ``list[Context]``, put first, gets the context of each call: beat all of them in a long run.
        :param batch_wait: seconds that a batch waits for more calls, from its first one on.
        :raises ConfigError: the name is taken, a parameter cannot be sent, a value is impossible, or a loop runs already.
        :raises InvalidParameterError: ``priority``, ``unique``, ``result_ttl`` or ``expires_in`` is outside its limits.
        """
        caller = sys._getframe(1)  # noqa: SLF001 - annotations may name classes local to the calling function
        names = {**caller.f_globals, **caller.f_locals}
        handling = TaskOptions(retry, dead_letter, timeout, offload, (), batch, batch_wait, key, weight)
        limits = LimitOptions(rate, concurrency, key_rate, key_concurrency, ordered, weight)
        sending = SendOptions(priority=priority, unique=unique, result_ttl=result_ttl, expires_in=expires_in)
        register = partial(
            self._register, name=name, aliases=aliases, handling=handling, limits=limits, sending=sending, names=names,
            middleware=middleware, debounce=debounce,
        )  # fmt: skip
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
        middleware: Sequence[Middleware],
        debounce: Seconds | tuple[Seconds, Seconds] | None,
    ) -> Task[..., Any]:
        if not callable(fn):
            raise ConfigError(f"a task must be a function, {instead_of(fn, 'task')}")
        check_runs(fn, "task")
        name = name_of(fn).rpartition(".")[2] if name is None else name
        if isinstance(aliases, str):
            raise ConfigError(f"task {name!r}: aliases must be a list of names, as [{aliases!r}], not a text")
        for each in (name, *aliases):
            self._check_name(each)
        self._check_open(f"task {name!r}")
        check_handling(f"task {name}", "timeout", handling.timeout, handling.retry, handling.dead_letter)
        if handling.dead_letter is not None and handling.dead_letter.keep is not None:
            raise ConfigError(
                f"task {name}: keep is for the dead letters of a whole mailbox: give it to Tasks(…, dead_letter=…)"
            )
        check_priority(f"task {name}", sending.priority)
        if sending.expires_in is not None:
            check_expires_in(f"task {name}", as_seconds(sending.expires_in))
        check_batch(name, handling.batch, handling.batch_wait)
        parameters = Parameters(name, fn, names, is_batch=handling.batch is not None)
        check_key(name, handling.key, parameters.names)
        check_weight(name, handling.weight, parameters.names)
        handling = replace(
            handling, middleware=checked(middleware, f"task {name}"), debounce=Debounce.of(name, debounce),
            limits=limits.checked(name, handling.key), aliases=tuple(aliases), limited_by=limits.first,
        )  # fmt: skip
        task: Task[..., Any] = Task(self._owner, name, fn, parameters, handling, sending)
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

    def _check_open(self, what: str) -> None:
        """Raise :class:`ConfigError` if it is too late to register tasks."""


class TaskRouter(TaskRegistry):
    """Tasks that are declared without a mailbox, for a module or a library: ``@router.task`` as ``@tasks.task``.

    ``tasks.include(router)`` registers them on a :class:`Tasks`. Before that they cannot be sent.

    :param name: for error texts.
    """

    def __init__(self, name: str = "router") -> None:
        self.name = name
        self._waiting = NoTasks(name)
        super().__init__(self._waiting)

    def __repr__(self) -> str:
        return f"<TaskRouter {self.name!r} of {', '.join(self.registered) or 'no tasks'}>"

    def included_in(self, tasks: Tasks) -> None:
        """Let its tasks be those of ``tasks``, for :meth:`Tasks.include`."""
        self._check_open("include")
        self._waiting.included_in(tasks)

    def _check_open(self, what: str) -> None:
        if self._waiting.tasks is not None:
            raise ConfigError(
                f"{what}: the router {self.name!r} is included in {self._waiting.tasks!r} already; include it once, behind its"
                " tasks"
            )
