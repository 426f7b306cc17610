"""``Task``: a function that can be called here, or sent to be called by a worker."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

from mainspring.core.introspection import is_async
from mainspring.core.process import in_event_loop
from mainspring.errors import ConfigError, InvalidParameterError, SerializationError, TaskExitError
from mainspring.mailbox.codec import Codec
from mainspring.mailbox.jobs import with_identity
from mainspring.mailbox.limits import check_seconds
from mainspring.mailbox.message import Envelope, is_new
from mainspring.mailbox.records import RESULT_TTL
from mainspring.mailbox.sync import ThreadConnection
from mainspring.runtime.deadline import inherited
from mainspring.tasks.calls import OutgoingCall, Parameters, TaskCall, head
from mainspring.tasks.chains import Chain, together
from mainspring.tasks.job import Job
from mainspring.tasks.keys import check_number, is_known_by, share_of
from mainspring.tasks.limits import UNLIMITED, check_limited, declare, needs_key
from mainspring.tasks.unique import DEBOUNCE_KEY, check_unique, key_of, send_debounced, send_once
from mainspring.validation import MAX_DELAY, as_seconds
from mainspring.worker.call_options import option_headers
from mainspring.worker.main_loop import check_handling
from mainspring.worker.middleware import overriding

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
    from datetime import datetime

    from mainspring.mailbox.limiters import TaskLimits
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.offload.pool import OffloadPool
    from mainspring.policies import DeadLetterPolicy, RetryPolicy
    from mainspring.runtime.deadline import Deadline, Inherited
    from mainspring.tasks.keys import Key, Weight
    from mainspring.tasks.tasks import Tasks
    from mainspring.tasks.unique import Debounce, Unique
    from mainspring.validation import Seconds
    from mainspring.worker.middleware import Middleware

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

BATCH_WAIT = 0.5
"""Seconds that a batch waits for more calls, where nothing else is said."""


@dataclass(frozen=True)
class TaskOptions:
    """How the calls of a task are handled; see :meth:`Tasks.task`."""

    retry: RetryPolicy | None = None
    dead_letter: DeadLetterPolicy | None = None
    timeout: float | None = None
    offload: str | OffloadPool | None = None
    middleware: tuple[Middleware, ...] = ()
    batch: int | None = None
    batch_wait: float = BATCH_WAIT
    key: Key | None = None
    weight: Weight | None = None
    limits: TaskLimits = UNLIMITED
    debounce: Debounce | None = None
    aliases: tuple[str, ...] = ()
    limited_by: str | None = None
    """The first of its options that only a mailbox with limits can keep."""

    @property
    def is_limited(self) -> bool:
        """True if the task has a limit."""
        return self.limits != UNLIMITED


@dataclass(frozen=True)
class SendOptions:
    """How a call is sent: what :meth:`Mailbox.send` takes, and what is kept of it."""

    delay: Seconds = 0
    at: datetime | None = None
    priority: int = 0
    headers: Mapping[str, str] | None = None
    expires_in: Seconds | None = None
    deadline: Deadline | Inherited | None = "inherit"
    dedup_key: str | None = None
    key: str | None = None
    weight: float | None = None
    unique: Unique = False
    result_ttl: Seconds = 0
    timeout: float | None = None
    retry: RetryPolicy | None = None
    connection: Any = None

    def check(self, name: str) -> None:
        """Raise an error that names the task if a value is impossible. The rest is checked by each send."""
        check_handling(f"task {name}", "timeout", self.timeout, self.retry, None)
        check_unique(name, self.unique)
        if self.weight is not None:
            check_number(f"task {name}: weight", self.weight)
        check_seconds(f"task {name}: result_ttl", as_seconds(self.result_ttl), MAX_DELAY)

    @property
    def own_headers(self) -> dict[str, str]:
        """The headers of its messages, with the headers of the kept result and of the handling."""
        asked = {RESULT_TTL: f"{as_seconds(self.result_ttl):g}"} if self.result_ttl else {}
        return {**(self.headers or {}), **asked, **option_headers(self.timeout, self.retry)}


USUAL = SendOptions()
"""How a call is sent of which nothing is said."""


class NoTasks:
    """Stands for the :class:`Tasks` of a router's tasks until there is one, and hands on what is asked of that then."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks: Tasks | None = None
        self._made: list[Task[..., Any]] = []

    def __getattr__(self, name: str) -> Any:
        if self.tasks is None:
            raise ConfigError(
                f"the router {self.name!r} is included in no Tasks yet, so its tasks have no mailbox: tasks.include(router)"
            )
        return getattr(self.tasks, name)

    def add(self, task: Task[..., Any]) -> None:
        """Note a task, or a form of it with other options."""
        self._made.append(task)

    def included_in(self, tasks: Tasks) -> None:
        """Let all tasks that were made belong to ``tasks``, or none, where the mailbox lacks what one needs."""
        for task in self._made:
            task.check_capabilities(tasks.mailbox)
        for task in self._made:
            task.belong_to(tasks)
        self.tasks = tasks
        self._made.clear()


class Task(Generic[P, R]):
    """A function of a :class:`~mainspring.tasks.tasks.Tasks`. Called, it runs here and now, as if it were no task.

    Its calls are sent by :meth:`send` and the methods beside it, with the arguments that the function takes, but for its
    :class:`~mainspring.worker.context.Context`. Each raises :class:`InvalidParameterError` where arguments are missing, unknown
    or too many, :class:`SerializationError` where one is not of its type, and what :meth:`Mailbox.send` raises.
    """

    def __init__(
        self,
        tasks: Tasks | NoTasks,
        name: str,
        fn: Callable[..., Any],
        parameters: Parameters,
        options: TaskOptions,
        sending: SendOptions,
    ) -> None:
        sending.check(name)
        update_wrapper(self, fn, updated=())  # an object that is called may have attributes of any name
        self.name = name
        self.fn = fn
        self.parameters = parameters
        self.handling = options
        self.stands_for_key = options.debounce is not None or not isinstance(sending.unique, bool)
        """True if a record says which call stands for a key."""
        self.has_key = sending.key is not None or options.key is not None
        """True if its calls have a key, and so a share and the limits of it."""
        self.sending = USUAL if sending == USUAL else sending
        self._headers = sending.own_headers
        self.head = head(name)
        """How the JSON of each of its calls begins."""
        self.is_async = is_async(fn)
        self.tasks: Tasks
        self.senders: tuple[Middleware, ...] = ()
        """The middleware that is entered for each send."""
        self._is_simple = False
        """True if nothing is to be done for a send but to store the message."""
        self._result_codec: Codec | None = None
        if isinstance(tasks, NoTasks):
            self.tasks = cast("Tasks", tasks)
            tasks.add(self)
        else:
            self.belong_to(tasks)

    def belong_to(self, tasks: Tasks) -> None:
        """Let its calls go to the mailbox of ``tasks``, inside of its middleware.

        :raises ConfigError: the mailbox cannot do what an option needs.
        """
        self.check_capabilities(tasks.mailbox)
        self.tasks = tasks
        self.senders = overriding((*tasks.middleware, *self.handling.middleware), "sending")
        self._is_simple = not (self.senders or self.stands_for_key or self.handling.is_limited)

    def __call__(self, /, *args: P.args, **keywords: P.kwargs) -> Any:
        """Call the function itself. Its context, too, is an argument of the caller."""
        return self.fn(*args, **keywords)

    def __repr__(self) -> str:
        return f"<Task {self.name!r} of {self.tasks.name!r}>"

    def __reduce__(self) -> str:
        return self.fn.__qualname__  # pickled by its name, as its function would be: for worker processes

    @property
    def result_codec(self) -> Codec:
        """The codec of what it returns."""
        if self._result_codec is None:
            self._result_codec = Codec(self.parameters.result_type, what="a result")
        return self._result_codec

    def options(
        self,
        *,
        delay: Seconds | None = None,
        at: datetime | None = None,
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        expires_in: Seconds | None = None,
        deadline: Deadline | Inherited | None = "inherit",
        dedup_key: str | None = None,
        key: str | None = None,
        weight: float | None = None,
        unique: Unique | None = None,
        result_ttl: Seconds | None = None,
        timeout: float | None = None,
        retry: RetryPolicy | None = None,
        connection: Any = None,
    ) -> Task[P, R]:
        """Return the same task with other options for sending: ``await email.options(delay=60).send(…)``.

        :param delay: seconds, or a timedelta, from the send until it may begin.
        :param at: instead of ``delay``, the instant from which it may begin, with a time zone.
        :param priority: higher is begun sooner (-32 767 to 32 767).
        :param headers: strings that travel with the message.
        :param expires_in: seconds, or a timedelta, after which it goes to the dead letters, unless a worker holds it.
        :param deadline: the instant by which it must be done; by default that of the code that sends it.
        :param dedup_key: while a call with this key is unfinished, another one is not sent: ``job.new`` is False then.
        :param key: its key, 1 to 512 characters, instead of what the task says.
        :param weight: its weight, 0.01 to 100, instead of what the task says.
        :param unique: for how long a second call with the same key is not sent, as for :meth:`Tasks.task`.
        :param result_ttl: seconds, or a timedelta (0 to 366 days), for which the end of the call is kept, for
            :meth:`Job.result` and :meth:`Job.status`; 0: it is not.
        :param timeout: seconds after which the function is cancelled, instead of what the task says.
        :param retry: how long a failed attempt waits, instead of what the task says.
        :param connection: of a mailbox with ``Capabilities.transactions``: the connection whose transaction the call joins.
        """
        given: dict[str, Any] = {
            "delay": delay, "at": at, "priority": priority, "headers": headers, "expires_in": expires_in,
            "dedup_key": dedup_key, "key": key, "weight": weight, "unique": unique, "result_ttl": result_ttl,
            "timeout": timeout, "retry": retry, "connection": connection,
        }  # fmt: skip
        changed = {name: value for name, value in given.items() if value is not None}
        if deadline != "inherit":
            changed["deadline"] = deadline
        changed_task = self.sent_as(replace(self.sending, **changed))
        if weight is not None:
            check_limited(f"task {self.name}: weight", self.tasks.mailbox)
            if not changed_task.has_key:
                raise needs_key(self.name, "weight")
        return changed_task

    def sent_as(self, sending: SendOptions) -> Task[P, R]:
        """Return the same task, sent in that way."""
        return Task(self.tasks, self.name, self.fn, self.parameters, self.handling, sending)

    # ------------------------------------------------------------------------------------------------------- sending

    async def send(self, /, *args: P.args, **keywords: P.kwargs) -> Job[R]:
        """Send one call. Return its job once the message is as durable as the mailbox makes it."""
        call = self.parameters.bind(args, keywords)
        if not self._is_simple or self.tasks.recording is not None:
            return (await self.send_calls([call]))[0]
        envelopes = self._prepare([call], self._headers)
        stored = await self.tasks.mailbox.send_prepared(envelopes, connection=self.sending.connection)
        return self.jobs([envelopes[0].message_id], stored)[0]

    async def send_at(self, at: datetime, /, *args: P.args, **keywords: P.kwargs) -> Job[R]:
        """Send one call that may begin at ``at``, a datetime with a time zone; a past one is now."""
        return await self.options(at=at).send(*args, **keywords)

    async def send_many(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> list[Job[R]]:
        """Send calls, all or none, in order: each a tuple of positional arguments, or a mapping of named ones.

        With ``debounce``, or a ``unique`` other than True, each is sent by itself.
        """
        return await self.send_calls(self.bound(calls))

    async def request(self, /, *args: Any, timeout: float = 30.0, **keywords: Any) -> R:
        """Send one call, and return what the function returns, in whatever process it runs.

        :param timeout: seconds to wait. A parameter of the function that is called so too is given by its position.
        :raises RequestTimeoutError: there is no result yet; the call is cancelled.
        :raises RequestFailedError: the call was dead-lettered, or answered with :class:`ReplyError`.
        :raises ReplyNotAvailableError: the mailbox is not open with ``async with``, nor under a running loop.
        :raises ConfigError: the options have a ``dedup_key``, ``unique`` or ``debounce``: a result goes to one requester; or
            ``connection``.
        """
        call = OutgoingCall(self, self.parameters.bind(args, keywords), self._headers)
        await self.declare_limits()
        async with self.entered([call]):
            self._check_request()
            (envelope,) = self._prepare([call.arguments], call.headers)
            if (recording := self.tasks.recording) is not None:
                return cast("R", await recording.request(self, call, envelope))
            return self._result(await self.tasks.mailbox.request_prepared(envelope, timeout=timeout))

    @property
    def sync(self) -> SyncTask[P, R]:
        """The same calls for threads that are not async; they block until they are done. See :attr:`Mailbox.sync`."""
        return SyncTask(self)

    def s(self, /, *args: Any, **keywords: Any) -> TaskCall:
        """Return a call for :func:`chain` and :func:`parallel`. It may lack the argument that gets the result before.

        :raises InvalidParameterError: there are too many arguments, or one is given twice.
        """
        return TaskCall(self, dict(self.parameters.bind(args, keywords)))

    def map(self, items: Iterable[Any], *, then: TaskCall | Chain | None = None, concurrency: int = 100) -> Chain:
        """Return a call for each of ``items``, its first argument, to be made in parallel; see :func:`parallel`."""
        return together((self.s(item) for item in items), then, concurrency, self.tasks)

    def check_call(self, arguments: dict[str, Any], *, takes_result: bool) -> None:
        """Raise :class:`InvalidParameterError` if arguments are missing; one may be where the call takes a result.

        :raises ConfigError: the task's calls may be left out, or run at another time.
        """
        if self.handling.debounce is not None or self.sending.at is not None:
            raise ConfigError(
                f"task {self.name}: a call in a chain takes no debounce or at: it runs after the one before"
            )
        if self.sending.unique:
            raise ConfigError(
                f"task {self.name}: a call in a chain is always sent; write {self.name}.options(unique=False).s(…)"
            )
        if self.sending.connection is not None or self.sending.dedup_key is not None:
            raise ConfigError(f"task {self.name}: a call in a chain takes no connection= or dedup_key=; leave them out")
        missing = self.parameters.missing(arguments)
        if missing is not None and not takes_result:
            raise InvalidParameterError(f"task {self.name}: {missing} is missing, and no result before gives it")
        if self.has_key and not is_known_by(self, arguments):
            raise ConfigError(
                f"task {self.name}: the key or the weight of a call in a chain cannot follow from a result; give both to"
                " options(key=, weight=)"
            )

    # -------------------------------------------------------------------------------------------------- what is sent

    def encode(self, arguments: dict[str, Any]) -> bytes:
        """Return the JSON bytes of a call."""
        parameters = self.parameters
        try:
            return self.head + parameters.codec.encode(arguments) + b"}"
        except SerializationError:
            parameters.check_names(arguments)
            raise

    def encode_result(self, result: Any) -> bytes:
        """Return the JSON bytes of what the function has returned.

        :raises SerializationError: it is not what the function says that it returns.
        """
        return self.result_codec.encode(result)

    def _prepare(self, calls: Iterable[dict[str, Any]], headers: Mapping[str, str] | None) -> list[Envelope]:
        """Return the messages of calls with these arguments, checked and encoded."""
        mailbox, has_key = self.tasks.mailbox, self.has_key
        is_usual = self.sending is USUAL and not headers and mailbox.serializes and inherited() is None
        new_id, encode, name, none = mailbox.new_id, self.encode, self.name, dict[str, str]()
        envelopes = []
        for arguments in calls:
            if is_usual:  # without what it does not need
                envelope = Envelope(new_id(), encode(arguments), 0.0, None, None, 0, none, None, name)
            else:
                envelope = self._prepare_with_options(TaskCall(self, arguments), headers)
            if has_key:
                envelope.key, envelope.weight = share_of(self, arguments)
            envelopes.append(envelope)
        return list(map(with_identity, envelopes)) if has_key or self.sending.result_ttl else envelopes

    def _prepare_with_options(self, call: TaskCall, headers: Mapping[str, str] | None) -> Envelope:
        how = self.sending
        envelope = self.tasks.mailbox.prepare(
            call,
            delay=how.delay,
            at=how.at,
            dedup_key=self.dedup_key_of(call),
            priority=how.priority,
            headers=headers,
            expires_in=how.expires_in,
            deadline=how.deadline,
        )
        envelope.task = self.name
        return envelope

    async def send_calls(self, calls: Iterable[dict[str, Any]]) -> list[Job[R]]:
        """Send calls with these arguments, all or none."""
        jobs = self.jobs(*await self.store(calls, self.sending.connection))
        if (recording := self.tasks.recording) is not None and recording.inline:
            await recording.sent.run()
        return jobs

    async def store(self, calls: Iterable[dict[str, Any]], connection: Any) -> tuple[list[str], list[str]]:
        """Put calls with these arguments into the mailbox, inside of the middleware.

        Return the ids of their messages, and the ids under which these are stored; see :func:`is_new`.
        """
        mailbox, recording = self.tasks.mailbox, self.tasks.recording
        if not self.senders and not self.stands_for_key and recording is None:
            await self.declare_limits()
            envelopes = self._prepare(calls, self._headers)
            return _ids(envelopes), await mailbox.send_prepared(envelopes, connection=connection)
        outgoing = [OutgoingCall(self, arguments, self._headers) for arguments in calls]
        async with self.prepared(outgoing) as envelopes:
            if recording is not None:
                return _ids(envelopes), recording.record(self, outgoing, envelopes)
            if self.stands_for_key:
                each = zip(outgoing, envelopes, strict=True)
                return _ids(envelopes), [await self._send_by_key(call.arguments, envelope) for call, envelope in each]
            return _ids(envelopes), await mailbox.send_prepared(envelopes, connection=connection)

    async def _send_by_key(self, arguments: dict[str, Any], envelope: Envelope) -> str:
        """Send a call unless another stands for its key. Return the id of the call that stands for it."""
        key, debounce = key_of(self, TaskCall(self, arguments)), self.handling.debounce
        if debounce is None:
            return await send_once(self, envelope, key)
        envelope.headers = {**envelope.headers, DEBOUNCE_KEY: key}
        return await send_debounced(self, envelope, self.encode(arguments), key, debounce.wait)

    async def declare_limits(self) -> None:
        """Declare the limits of the task in the store before its first message."""
        if self.handling.is_limited and self.tasks.recording is None:
            await declare(self.tasks)

    @asynccontextmanager
    async def prepared(self, calls: list[OutgoingCall]) -> AsyncIterator[list[Envelope]]:
        """Enter the middleware for a send of ``calls``, and yield their messages, which are to be sent in the block."""
        await self.declare_limits()
        async with self.entered(calls):
            yield [envelope for call in calls for envelope in self._prepare([call.arguments], call.headers)]

    def jobs(self, ids: list[str], stored: list[str]) -> list[Job[R]]:
        """Return the jobs of messages with these ids, which are in the store under those."""
        tasks = self.tasks
        if stored == ids:
            return [Job(tasks, message_id) for message_id in ids]
        return [Job(tasks, there, new=is_new(sent, there)) for sent, there in zip(ids, stored, strict=True)]

    @asynccontextmanager
    async def entered(self, calls: list[OutgoingCall]) -> AsyncIterator[None]:
        """Enter the middleware for a send of these calls."""
        passed = False
        async with AsyncExitStack() as stack:
            for middleware in self.senders:
                await stack.enter_async_context(middleware.sending(calls))
            yield
            passed = True
        if not passed:
            raise TaskExitError(
                f"task {self.name}: a middleware has suppressed the error of a send, and nothing may have been sent; let it"
                " pass, or raise another in its place"
            )

    def bound(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the arguments of each call by their names. Nothing keeps them once the call is encoded."""
        bind = self.parameters.bind
        for each in calls:
            if isinstance(each, tuple):
                yield bind(each, {})
            elif isinstance(each, Mapping):
                yield dict(each)
            else:
                raise InvalidParameterError(
                    f"task {self.name}: send_many takes the arguments of each call as a tuple or a mapping, not {each!r:.100}"
                )

    def dedup_key_of(self, call: TaskCall) -> str | None:
        """Return the key of a call, or None: while one with that key is unfinished, another one is not sent."""
        if self.sending.unique is not True or self.sending.dedup_key is not None:
            return self.sending.dedup_key
        return key_of(self, call)

    def check_capabilities(self, mailbox: Mailbox[Any, Any]) -> None:
        """Raise :class:`ConfigError` if its options exclude each other, or need what the mailbox cannot do."""
        how = self.sending
        if self.handling.limited_by is not None:
            check_limited(f"task {self.name}: {self.handling.limited_by}", mailbox)
        option = "result_ttl" if how.result_ttl else "unique" if not isinstance(how.unique, bool) else "debounce"
        needs = ("records", "lookup") if self.stands_for_key else ("records",) if how.result_ttl else ()
        for need in needs:
            if not getattr(mailbox.capabilities, need):
                raise ConfigError(
                    f"task {self.name}: {option} needs a mailbox with Capabilities.{need}, not {mailbox!r}"
                )
        if self.stands_for_key and (how.connection is not None or how.dedup_key is not None):
            raise ConfigError(
                f"task {self.name}: {option} takes no connection= or dedup_key=; leave them out, or use unique=True"
            )
        if self.handling.debounce is not None and (how.unique or how.delay or how.at is not None):
            raise ConfigError(
                f"task {self.name}: debounce takes no unique, delay or at: it says itself when the call runs"
            )
        expires_in = as_seconds(how.expires_in)
        if self.handling.debounce is not None and expires_in is not None and self.handling.debounce.most >= expires_in:
            raise ConfigError(
                f"task {self.name}: a debounced call waits up to {self.handling.debounce.most:g} s, and would expire after"
                f" {expires_in:g} s; let expires_in be longer, or write debounce=(seconds, most seconds)"
            )

    def _check_request(self) -> None:
        how = self.sending
        if how.unique or how.dedup_key is not None or how.connection is not None or self.handling.debounce is not None:
            raise ConfigError(
                f"task {self.name}: a request takes no unique, debounce, dedup_key or connection, as its result goes to one"
                " requester"
            )

    def _result(self, reply: Any) -> R:
        """Return a reply, which came as JSON data, as what the function returns."""
        if not self.tasks.mailbox.serializes:
            return cast("R", reply)
        from pydantic_core import to_json

        return cast("R", self.result_codec.decode(to_json(reply)))


def _ids(envelopes: list[Envelope]) -> list[str]:
    return [envelope.message_id for envelope in envelopes]


class SyncTask(Generic[P, R]):
    """The calls of a :class:`Task` for threads that are not async, each with the parameters and errors of its namesake.

    They run where the mailbox is open; ``with tasks.sync:`` opens it where nothing else does. See :class:`SyncMailbox`.
    """

    def __init__(self, task: Task[P, R]) -> None:
        self._task = task
        self._mailbox = task.tasks.mailbox.sync

    def send(self, /, *args: P.args, **keywords: P.kwargs) -> Job[R]:
        """Send one call."""
        return self._send([self._task.parameters.bind(args, keywords)], "send")[0]

    def send_at(self, at: datetime, /, *args: P.args, **keywords: P.kwargs) -> Job[R]:
        """Send one call that may begin at ``at``."""
        return self._task.options(at=at).sync.send(*args, **keywords)

    def send_many(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> list[Job[R]]:
        """Send calls, all or none."""
        return self._send(list(self._task.bound(calls)), "send_many")

    def request(self, /, *args: Any, timeout: float = 30.0, **keywords: Any) -> R:
        """Send one call, and return what the function returns."""
        return self._call(self._task.request, *args, timeout=timeout, **keywords)

    def _send(self, calls: list[dict[str, Any]], name: str) -> list[Job[R]]:
        if in_event_loop():
            raise ConfigError(
                f"task {self._task.name}: sync.{name}() would block the event loop of this thread; await the async {name}()"
                " instead"
            )
        connection = self._task.sending.connection
        if connection is None or self._task.tasks.recording is not None:
            return self._call(self._task.send_calls, calls)
        given = ThreadConnection(connection)
        ids, stored = self._mailbox.call(self._task.store, calls, given)
        if given.work is not None:  # on the caller's own connection, which only its thread uses
            stored = given.work()
        return self._task.jobs(ids, stored)

    def _call(self, fn: Callable[..., Coroutine[Any, Any, T]], /, *args: Any, **keywords: Any) -> T:
        recording = self._task.tasks.recording
        if recording is not None and not in_event_loop():
            return recording.blocking(partial(fn, *args, **keywords))
        return self._mailbox.call(fn, *args, **keywords)
