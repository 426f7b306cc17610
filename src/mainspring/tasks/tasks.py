"""``Tasks``: many functions on one mailbox."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar

from mainspring.errors import ConfigError, describe
from mainspring.mailbox.codec import Codec
from mainspring.mailbox.limits import check_id
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.open import open_mailbox
from mainspring.tasks.calls import CallCodec
from mainspring.tasks.job import Job
from mainspring.tasks.limits import check_bounded, check_concurrency
from mainspring.tasks.registry import TaskRegistry, TaskRouter
from mainspring.tasks.runs import TaskHandlers
from mainspring.tasks.task import Task
from mainspring.worker.main_loop import MainLoop, check_handling
from mainspring.worker.middleware import checked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from mainspring.mailbox.limiters import LimitState
    from mainspring.mailbox.sync import SyncMailbox
    from mainspring.mailbox.workers import WorkerStatus
    from mainspring.offload.pool import OffloadPool
    from mainspring.policies import DeadLetterPolicy, LeasePolicy, RetryPolicy
    from mainspring.tasks.chain_runs import ChainJob
    from mainspring.tasks.recording import Recording, SentCalls
    from mainspring.tasks.schedule_verbs import Schedules
    from mainspring.tasks.schedules import Misfire, Schedule
    from mainspring.validation import Seconds
    from mainspring.worker.middleware import Middleware

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")
Y = TypeVar("Y")

CONCURRENCY = 10
"""How many calls a loop of tasks runs at once, where nothing else is said."""


class Tasks(TaskRegistry):
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
        super().__init__(self)
        self.loops = 0
        """How many loops run on it in this process."""
        self._schedules: Schedules | None = None
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

    def include(self, router: TaskRouter) -> None:
        """Register the tasks of a router here. They are sent to this mailbox from then on, inside of its middleware.

        :raises ConfigError: a name is taken, the mailbox cannot do what an option of a task needs, a loop runs already, or the
            router is included already.
        """
        if not isinstance(router, TaskRouter):
            raise ConfigError(f"tasks.include takes a TaskRouter, not {router!r:.200}")
        if any(self.registered.get(name) is task for name, task in router.registered.items()):
            raise ConfigError(
                f"include: the router {router.name!r} is included in {self.name!r} already; include it once"
            )
        for name in router.registered:
            self._check_name(name)
        self._check_open("include")
        router.included_in(self)
        self.registered |= router.registered
        self.declared_in = None

    def _check_open(self, what: str) -> None:
        if self.loops:
            raise ConfigError(f"{what}: a loop of {self.name!r} runs already; register tasks before")

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

        It runs each task that is registered by the time it starts. Then the loop fails with :class:`ConfigError` where none is,
        or where JSON cannot hold the type of one's parameter.
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
