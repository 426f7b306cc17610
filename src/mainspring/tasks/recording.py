"""``Tasks.testing``: calls that are recorded in a list instead of sent, and can be run from there.

A call is checked and encoded as it is when it is sent, inside of the middleware, and decoded as a worker would. A run goes the
way of a delivery: ``worker.delivery`` runs the function inside of the middleware, with its dependencies. Its message is in a
mailbox in memory of its own, for what the context offers. What the run decides about the message is not carried out: an error
is raised to the test, and nothing is tried again. Chains keep their state in the mailbox that stands in for that of the tasks.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from mainspring.core.dispatcher import Dispatcher
from mainspring.core.lazy_event import LazyEvent
from mainspring.core.random import token
from mainspring.errors import ConfigError, RequestFailedError, message_of
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.open import open_mailbox
from mainspring.mailbox.records import RESULT_TTL
from mainspring.runtime.heartbeat import Heartbeat
from mainspring.tasks.calls import CallCodec, TaskCall
from mainspring.tasks.runs import TaskHandlers
from mainspring.tasks.task import USUAL
from mainspring.tasks.unique import key_of
from mainspring.validation import MAX_VISIBILITY
from mainspring.worker.call_options import RETRY, TIMEOUT
from mainspring.worker.context import NO_RESOURCES
from mainspring.worker.delivery import Delivery, HandlerRuns
from mainspring.worker.middleware import wrappers_of
from mainspring.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence

    from mainspring.mailbox.backend import Backend
    from mainspring.mailbox.message import Envelope, Message
    from mainspring.mailbox.records import RecordWrite
    from mainspring.tasks.calls import OutgoingCall
    from mainspring.tasks.task import SendOptions, Task
    from mainspring.tasks.tasks import Tasks

T = TypeVar("T")


class SentCall:
    """A call that was sent inside the block of :meth:`Tasks.testing`."""

    def __init__(self, recording: Recording, job_id: str, call: TaskCall, options: dict[str, Any]) -> None:
        self.id = job_id
        """The id of its job."""
        self.task = call.task
        """The task that is called."""
        self.arguments = call.arguments
        """The arguments by name, as a worker gets them."""
        self.options = options
        """What was said by ``task.options(…)`` or ``@tasks.task(…)`` about the sending, by name. Headers are as the middleware
        left them."""
        self.ran = False
        """True once its function has been called."""
        self._recording = recording

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"<SentCall {self.task.name}({arguments}){' ran' if self.ran else ''}>"

    async def run(self) -> Any:
        """Run the function here and now, as a worker would, at its first attempt. Return its result as a requester gets it.

        A delay, a priority and an expiry do not matter. It can be run again, as a message that comes twice. Cancelled, the
        function is cancelled.

        :raises SerializationError: the result is not what the function says that it returns.

        And what the function, its middleware or its dependencies raise, :class:`Retry` and :class:`Reject` included.
        """
        return await self._recording.run(self)


class SentCalls(list[SentCall]):
    """The calls that were sent inside the block of :meth:`Tasks.testing`, in order. It is a list: ``clear()`` forgets them."""

    async def run(self) -> list[Any]:
        """Run all calls that have not run, in order, with the calls that they send. Return their results.

        The first error is raised. The calls behind it have not run then, and another ``run()`` goes on with them.
        """
        results = []
        while call := next((call for call in self if not call.ran), None):
            results.append(await call.run())
        return results


class Recording:
    """What takes the calls inside the block of :meth:`Tasks.testing`, in the place of the mailbox, and runs them.

    ``inline``: each call runs as it is sent.
    """

    def __init__(self, tasks: Tasks, *, inline: bool, resources: Any) -> None:
        self.sent = SentCalls()
        self.inline = inline
        self._tasks = tasks
        self._resources = resources
        self._messages: dict[SentCall, Envelope] = {}
        self._by_key: dict[str, list[SentCall]] = {}

    # ------------------------------------------------------------------------------------------------------ recording

    def record(self, task: Task[..., Any], outgoing: Sequence[OutgoingCall], envelopes: list[Envelope]) -> list[str]:
        """Note calls whose messages are ready to be sent. Return the ids of their jobs."""
        return [self._record(task, call, envelope).id for call, envelope in zip(outgoing, envelopes, strict=True)]

    def _record(self, task: Task[..., Any], outgoing: OutgoingCall, envelope: Envelope) -> SentCall:
        how = task.sending
        key = _key_of(task, outgoing.arguments)
        known = [] if key is None else self._by_key.setdefault(key, [])
        for other in known:
            if not other.ran or not isinstance(how.unique, bool | str):
                if task.handling.debounce is not None:
                    other.arguments = self._decoded(envelope).arguments
                    self._messages[other].body = envelope.body
                return other
        call = self._note(envelope, _given(how, outgoing.headers))
        known.append(call)
        return call

    def record_messages(self, envelopes: Sequence[Envelope]) -> None:
        """Note the calls in messages that a chain sends, or that are sent to the mailbox itself."""
        for envelope in envelopes:
            self._note(envelope, {"priority": envelope.priority} if envelope.priority else {})

    def _note(self, envelope: Envelope, options: dict[str, Any]) -> SentCall:
        call = SentCall(self, envelope.message_id, self._decoded(envelope), options)
        self._messages[call] = envelope
        self.sent.append(call)
        return call

    def _decoded(self, envelope: Envelope) -> TaskCall:
        call: TaskCall = self._tasks.mailbox.codec.decode(envelope.body)
        return call

    async def request(self, task: Task[..., Any], outgoing: OutgoingCall, envelope: Envelope) -> Any:
        """Note a request, run it, and return its result."""
        if not self.inline:
            raise ConfigError(
                f"task {task.name}: a request waits for its result, and nothing runs the call: use tasks.testing(inline=True)"
            )
        call = self._record(task, outgoing, envelope)
        try:
            return await call.run()
        except Exception as error:
            said, kind = message_of(error), type(error).__qualname__
            raise RequestFailedError(
                f"the request {call.id} has failed: {said}", error=said, error_type=kind
            ) from error

    def blocking(self, fn: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Call an async function in a thread that is not async."""
        try:
            return anyio.from_thread.run(fn)
        except anyio.NoEventLoopError:
            return anyio.run(fn)

    # -------------------------------------------------------------------------------------------------------- running

    async def run(self, call: SentCall) -> Any:
        """Run a call. Return its result."""
        results: list[Any] = []

        async def capture(message: Message[Any, Any], run: Callable[[], Awaitable[Any]]) -> Any:
            results.append(await run())
            return results[-1]

        call.ran = True
        name, settings, handlers = self._tasks.name, WorkerSettings(), TaskHandlers(self._tasks)
        wrappers = (*wrappers_of(self._tasks.middleware), capture)
        async with handlers.pool(None, 1) as pools, _delivered(self._tasks, self._messages[call]) as delivery:
            clock, context = anyio.current_time, copy_context()
            make = partial(HandlerRuns, name, Dispatcher(), clock, context, wrappers, self._resources)
            runs = handlers.runs(delivery.message.mailbox, settings, pools, make)
            delivery.scope = anyio.CancelScope()
            with delivery.scope as scope:
                delivery.decision = await runs.make(delivery, scope)  # cancelled by a timeout, it sets it itself
        if delivery.decision is not None and delivery.decision.error is not None:
            raise delivery.decision.error
        codec = call.task.result_codec
        return codec.decode(codec.encode(results[-1])) if results else None


@asynccontextmanager
async def _delivered(tasks: Tasks, envelope: Envelope) -> AsyncIterator[Delivery]:
    """Yield a delivery of a message, the only one of a mailbox in memory."""
    mailbox = open_mailbox(f"memory://testing-{token()}")
    mailbox.bind(body=tasks.mailbox.codec)
    async with mailbox:
        plain = replace(envelope, delay=0.0, dedup_key=None, priority=0, expires_in=None)
        await mailbox.send_prepared([plain])
        (message,) = await mailbox.receive(visibility_timeout=MAX_VISIBILITY)
        now = anyio.current_time()
        yield Delivery(tasks.name, anyio.current_time, Heartbeat(), LazyEvent(), MAX_VISIBILITY, now, message)
        await mailbox.purge()


def _key_of(task: Task[..., Any], arguments: dict[str, Any]) -> str | None:
    """Return the key of a call of which another one may take the place, or None."""
    if task.sending.dedup_key is not None:
        return task.sending.dedup_key
    if task.sending.unique or task.handling.debounce is not None:
        return key_of(task, TaskCall(task, arguments))
    return None


def _given(how: SendOptions, headers: dict[str, str]) -> dict[str, Any]:
    """Return the options of a send that say something."""
    given = {field.name: getattr(how, field.name) for field in fields(how) if field.name != "headers"}
    options = {name: value for name, value in given.items() if value != getattr(USUAL, name)}
    own = {name: value for name, value in headers.items() if name not in (RESULT_TTL, TIMEOUT, RETRY)}
    return {**options, "headers": own} if own else options


class _RecordingBackend:
    """A backend in memory that notes the messages it is given, as those of chains, and keeps records only."""

    def __init__(self, inner: Backend, recording: Recording) -> None:
        self._inner = inner
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        self._recording.record_messages(envelopes)
        return [envelope.message_id for envelope in envelopes]

    async def write_record(self, write: RecordWrite, envelopes: Sequence[Envelope] = ()) -> int | None:
        version = await self._inner.write_record(write)
        if version is not None:
            self._recording.record_messages(envelopes)
        return version


class _NeverOpen(Mailbox[Any, Any]):
    """A mailbox that is as good as open, on any event loop: it checks and encodes calls, and none is sent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Do nothing: it was not opened."""


@contextmanager
def recorded(tasks: Tasks, *, inline: bool, resources: Any) -> Iterator[SentCalls]:
    """Record the calls of tasks inside the block; see :meth:`Tasks.testing`."""
    before = tasks.mailbox, tasks.recording
    recording = Recording(tasks, inline=inline, resources=NO_RESOURCES if resources is None else resources)
    memory = open_mailbox(f"memory://testing-{token()}").backend
    recorder: Any = _RecordingBackend(memory, recording)
    tasks.mailbox, tasks.recording = _NeverOpen(recorder, body=CallCodec(tasks.registered)), recording
    try:
        yield recording.sent
    finally:
        tasks.mailbox, tasks.recording = before
