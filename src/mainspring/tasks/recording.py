"""``Tasks.testing``: calls that are recorded in a list instead of sent, and can be run from there.

A call is checked and encoded as it is when it is sent, inside of the middleware, and decoded as a worker would. A run goes the
way of a delivery: ``worker.delivery`` runs the function inside of the middleware, with its dependencies. Its message is in a
mailbox in memory of its own, for what the context offers. What the run decides about the message is not carried out: an error
is raised to the test, and nothing is tried again. Chains keep their state in the mailbox that stands in for that of the tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import anyio

from mainspring.core.dispatcher import Dispatcher
from mainspring.core.lazy_event import LazyEvent
from mainspring.core.random import token
from mainspring.errors import ConfigError, RequestFailedError, message_of
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.open import open_mailbox
from mainspring.mailbox.records import RESULT_TTL
from mainspring.runtime.heartbeat import Heartbeat
from mainspring.tasks.calls import CallCodec
from mainspring.tasks.runs import TaskHandlers
from mainspring.tasks.task import USUAL
from mainspring.tasks.unique import key_of
from mainspring.validation import MAX_VISIBILITY
from mainspring.worker.delivery import Delivery, HandlerRuns
from mainspring.worker.middleware import wrappers_of
from mainspring.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator

    from mainspring.mailbox.backend import Backend
    from mainspring.mailbox.message import Envelope, Message
    from mainspring.mailbox.records import RecordWrite
    from mainspring.tasks.calls import OutgoingCall, TaskCall
    from mainspring.tasks.task import SendOptions, Task
    from mainspring.tasks.tasks import Tasks

T = TypeVar("T")


class SentCall:
    """A call that was sent inside the block of :meth:`Tasks.testing`."""

    def __init__(
        self, sent: SentCalls, call: TaskCall, options: dict[str, Any], envelope: Envelope, key: str | None
    ) -> None:
        self.task = call.task
        """The task that is called."""
        self.arguments = call.arguments
        """The arguments by name, as a worker gets them."""
        self.options = options
        """What was said by ``task.options(…)`` or ``@tasks.task(…)`` about the sending, by name; headers as the middleware left
        them."""
        self.id = envelope.message_id
        """The id of its job."""
        self.ran = False
        """True once its function has been called."""
        self.envelope = envelope
        self.key = key
        self._sent = sent

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
        return await self._sent.run_call(self)


class SentCalls(Sequence[SentCall]):
    """The calls that were sent inside the block of :meth:`Tasks.testing`, in order: ``sent[0].task``, ``len(sent)``."""

    def __init__(self, tasks: Tasks, *, inline: bool, resources: Any) -> None:
        self.inline = inline
        """True if each call runs as it is sent."""
        self._tasks = tasks
        self._resources = resources
        self._calls: list[SentCall] = []

    @overload
    def __getitem__(self, place: int) -> SentCall: ...
    @overload
    def __getitem__(self, place: slice) -> list[SentCall]: ...
    def __getitem__(self, place: int | slice) -> SentCall | list[SentCall]:
        return self._calls[place]

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        return repr(self._calls)

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()

    async def run(self) -> list[Any]:
        """Run all calls that have not run, in order, with those that they send. Return their results.

        The first error is raised. The calls behind it have not run then, and another ``run()`` goes on with them.
        """
        results = []
        while call := next((call for call in self._calls if not call.ran), None):
            results.append(await self.run_call(call))
        return results

    # ------------------------------------------------------------------------------------------------------ recording

    def record(self, task: Task[..., Any], outgoing: Sequence[OutgoingCall], envelopes: list[Envelope]) -> list[str]:
        """Note calls whose messages are ready to be sent. Return the ids of their jobs."""
        return [self._record(task, call, envelope) for call, envelope in zip(outgoing, envelopes, strict=True)]

    def _record(self, task: Task[..., Any], outgoing: OutgoingCall, envelope: Envelope) -> str:
        call: TaskCall = self._tasks.mailbox.codec.decode(envelope.body)
        how, key = task.sending, None
        if how.dedup_key is not None:
            key = how.dedup_key
        elif how.unique or task.handling.debounce is not None:
            key = key_of(task, call)
        for known in self._calls if key is not None else ():
            if known.key == key and (not known.ran or not isinstance(how.unique, bool | str)):
                if task.handling.debounce is not None:
                    known.arguments, known.envelope.body = call.arguments, envelope.body
                return known.id
        self._calls.append(SentCall(self, call, _given(how, outgoing.headers), envelope, key))
        return envelope.message_id

    def record_parts(self, envelopes: Sequence[Envelope]) -> None:
        """Note the calls that a chain sends."""
        for envelope in envelopes:
            call: TaskCall = self._tasks.mailbox.codec.decode(envelope.body)
            options = {"priority": envelope.priority} if envelope.priority else {}
            self._calls.append(SentCall(self, call, options, envelope, None))

    async def request(self, task: Task[..., Any], outgoing: OutgoingCall, envelope: Envelope) -> Any:
        """Note a request, run it, and return its result."""
        if not self.inline:
            raise ConfigError(
                f"task {task.name}: a request waits for its result, and nothing runs the call: use tasks.testing(inline=True)"
            )
        self._record(task, outgoing, envelope)
        try:
            return await self._calls[-1].run()
        except Exception as error:
            said, kind = message_of(error), type(error).__qualname__
            raise RequestFailedError(
                f"the request {envelope.message_id} has failed: {said}", error=said, error_type=kind
            ) from error

    def blocking(self, fn: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Call an async function in a thread that is not async."""
        try:
            return anyio.from_thread.run(fn)
        except anyio.NoEventLoopError:
            return anyio.run(fn)

    # -------------------------------------------------------------------------------------------------------- running

    async def run_call(self, call: SentCall) -> Any:
        """Run a call. Return its result."""
        results: list[Any] = []

        async def capture(message: Message[Any, Any], run: Callable[[], Awaitable[Any]]) -> Any:
            results.append(await run())
            return results[-1]

        call.ran = True
        name, settings, handlers = self._tasks.name, WorkerSettings(), TaskHandlers(self._tasks)
        wrappers = (*wrappers_of(self._tasks.middleware), capture)
        async with handlers.pool(None, 1) as pools, _delivered(self._tasks, call) as delivery:
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
async def _delivered(tasks: Tasks, call: SentCall) -> AsyncIterator[Delivery]:
    """Yield a delivery of a call, whose message is the only one of a mailbox in memory."""
    mailbox = open_mailbox(f"memory://testing-{call.id}")
    mailbox.bind(body=tasks.mailbox.codec)
    async with mailbox:
        plain = replace(call.envelope, delay=0.0, dedup_key=None, priority=0, expires_in=None)
        await mailbox.send_prepared([plain])
        (message,) = await mailbox.receive(visibility_timeout=MAX_VISIBILITY)
        now = anyio.current_time()
        yield Delivery(tasks.name, anyio.current_time, Heartbeat(), LazyEvent(), MAX_VISIBILITY, now, message)
        await mailbox.purge()


def _given(how: SendOptions, headers: dict[str, str]) -> dict[str, Any]:
    """Return the options of a send that say something."""
    given = {field.name: getattr(how, field.name) for field in fields(how) if field.name != "headers"}
    options = {name: value for name, value in given.items() if value != getattr(USUAL, name)}
    own = {name: value for name, value in headers.items() if name != RESULT_TTL}
    return {**options, "headers": own} if own else options


class _ChainRecorder:
    """A backend in memory that notes the calls of chains, which are sent together with records, and does not store them."""

    def __init__(self, inner: Backend, sent: SentCalls) -> None:
        self._inner = inner
        self._sent = sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def write_record(self, write: RecordWrite, envelopes: Sequence[Envelope] = ()) -> int | None:
        version = await self._inner.write_record(write)
        if version is not None:
            self._sent.record_parts(envelopes)
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
    sent = SentCalls(tasks, inline=inline, resources=resources)
    memory = open_mailbox(f"memory://testing-{token()}").backend
    recorder: Any = _ChainRecorder(memory, sent)
    tasks.mailbox, tasks.recording = _NeverOpen(recorder, body=CallCodec(tasks.registered)), sent
    try:
        yield sent
    finally:
        tasks.mailbox, tasks.recording = before
