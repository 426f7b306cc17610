"""What kinds of functions can be handlers, and which types their annotations give.

The annotations of this module are strings (the ``__future__`` import above), as in most of users' modules.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Awaitable, Coroutine  # noqa: TC003 - the annotations are resolved at run time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypedDict

import anyio
import pytest
from pydantic import BaseModel, Field

import mainspring
from mainspring import Context, DeadLetterPolicy, DLQConsumer, InMemoryMailbox, MainLoop, RetryPolicy
from mainspring.errors import ConfigError, SerializationError
from mainspring.worker.handler import inspect_handler
from support import settled

if TYPE_CHECKING:
    from somewhere import Missing
    from somewhere import Missing as Result


@dataclass
class Job:
    number: int


class Model(BaseModel):
    number: int


class Dictionary(TypedDict):
    number: int


async def plain_async(job: Job) -> None: ...
async def with_context(job: Job, ctx: Context) -> int: ...
async def context_by_name(job: Job, ctx) -> None: ...
async def context_with_default(job: Job, context=None) -> None: ...
async def context_by_qualified_type(job: Job, c: mainspring.Context = None) -> None: ...
async def optional_extra(job: Job, verbose: bool = False) -> None: ...
async def star(*args): ...
async def star_after(job: Job, *rest): ...
def sync(job: Job) -> int: ...


@pytest.mark.parametrize(
    ("fn", "is_async", "wants_context"),
    [
        (plain_async, True, False),
        (with_context, True, True),
        (context_by_name, True, True),
        (context_with_default, True, True),
        (context_by_qualified_type, True, True),
        (optional_extra, True, False),
        (star, True, False),
        (star_after, True, False),
        (sync, False, False),
    ],
)
def test_how_a_handler_is_called(fn, is_async, wants_context):
    handler = inspect_handler(fn, {})
    assert (handler.is_async, handler.wants_context, handler.name) == (is_async, wants_context, fn.__name__)


class Database: ...


class Beats(Protocol):
    def beat(self) -> None: ...


async def optional_context(job: Job, ctx: Context | None = None) -> None: ...
async def annotated_context(job: Job, c: Annotated[Context, "the context"]) -> None: ...
async def any_context(job: Job, ctx: Any) -> None: ...
async def object_context(job: Job, ctx: object) -> None: ...
async def protocol_context(job: Job, ctx: Beats) -> None: ...
async def named_like_it(context: Job) -> None: ...


@pytest.mark.parametrize("fn", [optional_context, annotated_context, any_context, object_context, protocol_context])
def test_annotations_that_the_context_fits(fn):
    assert inspect_handler(fn, {}).wants_context


def test_a_message_may_be_called_context_if_its_type_is_said():
    handler = inspect_handler(named_like_it, {})
    assert (handler.wants_context, handler.body_type) == (False, Job)


async def context_first(ctx: Context, job: Job) -> None: ...
async def context_first_by_name(ctx, job: Job) -> None: ...
async def context_alone(ctx: Context) -> None: ...
async def context_by_keyword(job: Job, *, ctx: Context = None) -> None: ...
async def context_third(job: Job, verbose: bool = False, ctx: Context = None) -> None: ...


@pytest.mark.parametrize("fn", [context_first, context_first_by_name, context_alone, context_by_keyword, context_third])
def test_a_context_in_the_wrong_place_is_refused(fn):
    with pytest.raises(
        ConfigError, match=rf"handler {fn.__name__}\(.*\).*: the context is the second parameter; it must"
    ) as caught:
        MainLoop(InMemoryMailbox(), fn, body=Job)
    assert "\n" not in str(caught.value)


async def own_value(job: Job, database: Database) -> None: ...
async def own_context(job: Job, ctx: Database = None) -> None: ...
async def own_number(job: Job, times: int | None) -> None: ...
async def own_mapping(job: Job, ctx: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("fn", [own_value, own_context, own_number, own_mapping])
def test_a_second_parameter_that_cannot_be_the_context_is_refused(fn):
    with pytest.raises(ConfigError, match=rf"handler {fn.__name__}\(.*the second parameter gets the context; annotate"):
        MainLoop(InMemoryMailbox(), fn)
    assert not inspect_handler(functools.partial(own_value, database=Database()), {}).wants_context


def test_types_come_from_the_annotations():
    assert inspect_handler(plain_async, {}).body_type is Job
    assert inspect_handler(plain_async, {}).reply_type is None
    assert inspect_handler(with_context, {}).reply_type is int
    assert inspect_handler(star, {}).body_type is None
    assert inspect_handler(sync, {}).reply_type is int


def test_a_plain_function_that_returns_an_awaitable_replies_with_what_that_gives():
    def direct(job: Job) -> Awaitable[int]: ...
    def coroutine(job: Job) -> Coroutine[Any, Any, int]: ...

    assert inspect_handler(direct, {}).reply_type is int
    assert inspect_handler(coroutine, {}).reply_type is int


def test_annotated_types_keep_their_constraints():
    async def handle(number: Annotated[int, Field(gt=0)]) -> None: ...

    codec = MainLoop(InMemoryMailbox(), handle).mailbox.codec
    codec.check(1)
    with pytest.raises(SerializationError, match="greater than 0"):
        codec.check(0)


class Service:
    async def handle(self, job: Job, ctx: Context) -> int: ...

    @classmethod
    async def of_class(cls, job: Job) -> None: ...

    @staticmethod
    def static(job: Job) -> None: ...

    async def __call__(self, job: Job) -> str: ...


class PlainService:
    def __call__(self, job: Job, ctx: Context) -> str: ...


def test_methods_and_callable_objects():
    handler = inspect_handler(Service().handle, {})
    assert (handler.is_async, handler.wants_context, handler.body_type) == (True, True, Job)
    assert handler.name == "Service.handle"
    assert inspect_handler(Service.of_class, {}).body_type is Job
    assert not inspect_handler(Service.static, {}).is_async
    handler = inspect_handler(Service(), {})
    assert (handler.is_async, handler.wants_context, handler.body_type, handler.name) == (True, False, Job, "Service")
    handler = inspect_handler(PlainService(), {})
    assert (handler.is_async, handler.wants_context, handler.reply_type) == (False, True, str)


async def with_parts(database: object, job: Job, ctx: Context, *, table: str) -> int: ...


def test_partials_are_seen_through():
    handler = inspect_handler(functools.partial(with_parts, object(), table="jobs"), {})
    assert (handler.is_async, handler.wants_context) == (True, True)
    assert (handler.body_type, handler.reply_type) == (Job, int)
    assert handler.name == "with_parts"
    nested = functools.partial(functools.partial(with_parts, object()), table="jobs")
    assert inspect_handler(nested, {}).body_type is Job
    assert inspect_handler(functools.partial(Service().handle), {}).is_async


def test_decorated_handlers_are_seen_through():
    def twice(fn):
        @functools.wraps(fn)
        async def inner(*args):
            await fn(*args)
            return await fn(*args)

        return inner

    handler = inspect_handler(twice(with_context), {})
    assert (handler.is_async, handler.wants_context, handler.body_type) == (True, True, Job)


def test_names_are_short():
    async def local(job: Job) -> None: ...

    assert inspect_handler(local, {}).name == "local"
    assert inspect_handler(lambda job: None, {}).name == "<lambda>"


def test_a_local_class_is_found_where_the_loop_is_made():
    @dataclass
    class Local:
        number: int

    async def handle(job: Local) -> Local: ...

    loop = MainLoop(InMemoryMailbox(), handle)
    assert loop.mailbox.codec.body_type is Local
    assert loop.mailbox.reply_codec.body_type is Local


async def foreign_context(job: Job, ctx: Missing) -> Result: ...
async def unresolvable(job: Missing) -> None: ...
async def missing_attribute(job: mainspring.Nothing) -> None: ...
async def no_expression(job: "not an expression") -> None: ...  # noqa: F722


def test_only_the_body_needs_an_annotation_that_can_be_resolved():
    """Linters move the import of Context, and of what is only returned, under TYPE_CHECKING."""
    handler = inspect_handler(foreign_context, {})
    assert (handler.body_type, handler.wants_context, handler.reply_type) == (Job, True, None)


@pytest.mark.parametrize("fn", [unresolvable, missing_attribute, no_expression])
def test_an_annotation_that_cannot_be_resolved_is_named(fn):
    with pytest.raises(ConfigError, match=f"handler {fn.__name__}: .*job.*pass body="):
        MainLoop(InMemoryMailbox(), fn)


@pytest.mark.parametrize("fn", [unresolvable, missing_attribute, no_expression])
def test_body_stands_in_for_such_an_annotation(fn):
    loop = MainLoop(InMemoryMailbox(), fn, body=Job)
    assert loop.mailbox.codec.body_type is Job


async def unannotated(job): ...


def test_no_annotation_needs_body_or_a_typed_mailbox():
    with pytest.raises(ConfigError, match="first parameter has no annotation"):
        MainLoop(InMemoryMailbox(), unannotated)
    assert MainLoop(InMemoryMailbox(), unannotated, body=Any).mailbox.codec.body_type is Any
    assert MainLoop(InMemoryMailbox(body=Job), unannotated).mailbox.codec.body_type is Job


def test_a_handler_and_a_mailbox_of_different_types_are_refused():
    with pytest.raises(ConfigError, match="holds body type Model, but its handler takes Job"):
        MainLoop(InMemoryMailbox(body=Model), plain_async)


class Opaque:
    pass


async def opaque(job: Opaque) -> None: ...


def test_a_type_that_no_body_can_have_is_refused_when_the_loop_is_made():
    with pytest.raises(ConfigError, match="Opaque cannot be a message body"):
        MainLoop(InMemoryMailbox(), opaque)


async def nothing() -> None: ...
async def three(a: Job, b: Context, c: int) -> None: ...
async def keyword(*, job: Job) -> None: ...
async def needs_keyword(job: Job, *, flag: bool) -> None: ...
async def generates(job: Job):
    yield job


def generates_plainly(job: Job):
    yield job


@pytest.mark.parametrize("fn", [nothing, three, keyword, needs_keyword])
def test_other_parameters_are_refused(fn):
    with pytest.raises(ConfigError, match=rf"handler {fn.__name__}\(.*it must take \(job\) or \(job, ctx\)"):
        MainLoop(InMemoryMailbox(), fn)


@pytest.mark.parametrize("fn", [generates, generates_plainly, functools.partial(generates)])
def test_a_generator_would_never_run_and_is_refused(fn):
    with pytest.raises(ConfigError, match="is a generator, which would never run; return the result"):
        MainLoop(InMemoryMailbox(), fn)


@pytest.mark.parametrize("fn", [None, 5, "handle"])
def test_what_cannot_be_called_is_refused(fn):
    with pytest.raises(ConfigError, match="a handler must be callable"):
        MainLoop(InMemoryMailbox(), fn)


def test_a_handler_that_was_called_is_refused():
    async def handle(job):
        pass

    with pytest.raises(ConfigError, match=r"must be callable, not a coroutine; give .* without calling it"):
        MainLoop(InMemoryMailbox(), handle(1))


# -------------------------------------------------------------------------------------------------- they really run

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("serialize", [False, True])
@pytest.mark.parametrize(
    ("body_type", "body"),
    [
        (Job, Job(3)),
        (Model, Model(number=3)),
        (Dictionary, {"number": 3}),
        (int, 3),
        (str, "three"),
        (bytes, b"three"),
        (list[Job], [Job(3)]),
        (Job | None, None),
        (dict[str, Any], {"number": [3, None]}),
    ],
    ids=str,
)
async def test_bodies_arrive_as_the_type_they_were_sent_as(serialize, body_type, body):
    got = []

    async def handle(job) -> None:
        got.append(job)

    mailbox = InMemoryMailbox(serialize=serialize)
    async with MainLoop(mailbox, handle, body=body_type):
        await mailbox.send(body)
        await settled(mailbox)
    assert got == [body]
    assert type(got[0]) is type(body)


async def test_a_plain_function_runs_in_a_thread_and_leaves_the_event_loop_free():
    threads = []
    entered, leave = threading.Event(), threading.Event()

    def handle(job: int, ctx: Context) -> None:
        threads.append((threading.current_thread(), ctx.attempt, ctx.shutting_down))
        entered.set()
        assert leave.wait(10)

    mailbox = InMemoryMailbox()
    async with MainLoop(mailbox, handle):
        await mailbox.send(1)
        while not entered.is_set():
            await anyio.sleep(0.001)
        leave.set()
        await settled(mailbox)
    assert threads == [(threads[0][0], 1, False)]
    assert threads[0][0] is not threading.current_thread()


async def test_a_plain_function_may_return_what_the_event_loop_shall_await():
    ran_in = []

    async def inner(job: int) -> None:
        ran_in.append(threading.current_thread())

    mailbox = InMemoryMailbox()
    async with MainLoop(mailbox, lambda job: inner(job), body=int):
        await mailbox.send(1)
        await settled(mailbox)
    assert ran_in == [threading.current_thread()]


async def test_partials_methods_and_objects_run():
    got = []

    class Collector:
        async def method(self, job: int, ctx: Context) -> None:
            got.append(("method", job, ctx.attempt))

        async def __call__(self, job: int) -> None:
            got.append(("object", job))

    async def parts(prefix: str, job: int, *, suffix: str) -> None:
        got.append((prefix, job, suffix))

    collector = Collector()
    for handler in (collector.method, collector, functools.partial(parts, "a", suffix="z")):
        mailbox = InMemoryMailbox()
        async with MainLoop(mailbox, handler):
            await mailbox.send(1)
            await settled(mailbox)
    assert got == [("method", 1, 1), ("object", 1), ("a", 1, "z")]


# --------------------------------------------------------------------------------------- results that have not run


async def other(job: int) -> None:
    raise AssertionError("it was not to run")


async def yields(job: int):
    yield job


def decorated(fn):
    async def call(job: int):
        return fn(job)

    return call


class Later:
    def __await__(self):
        raise AssertionError("it was not to run")
        yield


async def forgets_await(job: int):
    return other(job)


async def returns_an_awaitable(job: int):
    return Later()


UNRUN = [
    (forgets_await, "forgets_await returned a coroutine, so its work has not run to its end; await it"),
    (returns_an_awaitable, "returned an awaitable (Later), so its work has not run to its end; await it"),
    (
        decorated(yields),
        "returned a generator, so its work has not run to its end; return the result instead of yielding",
    ),
    (decorated(lambda job: (step for step in "ab")), "returned a generator"),
    (lambda job: (step for step in "ab"), "returned a generator"),
    (lambda job: yields(job), "returned a generator"),
    (
        lambda job: forgets_await(job),
        "returned a coroutine",
    ),  # what a plain function leaves to the event loop is awaited
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("handler", "says"), UNRUN)
@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_result_that_has_not_run_is_a_failed_attempt_and_retried(handler, says, wrapped):
    mailbox = InMemoryMailbox()
    policies = {"retry": RetryPolicy(initial_delay=0), "dead_letter": DeadLetterPolicy(max_attempts=2)}
    loop = MainLoop(mailbox, handler, body=int, **policies)
    if wrapped:

        @loop.wrap
        async def drops_the_result(message, call):
            await call()

    async with loop:
        await mailbox.send(1)
        await settled(mailbox)
        (letter,) = await mailbox.dead_letters()
    assert (letter.attempt, letter.error_type) == (2, "TaskExitError")
    assert says in letter.error
    assert loop.outcomes == {"retried": 1, "dead_lettered": 1}


async def calls_only(message, call):
    call()


async def gives_the_call_back(message, call):
    return call()


async def drops_what_is_inside(message, call):
    await call()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("wrappers", "says"),
    [
        ([calls_only], "a wrapper has called call() without `await`, so the handler has not run"),
        ([calls_only, drops_what_is_inside], "a wrapper has called call() without `await`"),
        ([gives_the_call_back], "gives_the_call_back returned a coroutine"),
        ([gives_the_call_back, drops_what_is_inside], "gives_the_call_back returned a coroutine"),
        ([lambda message, call: None], "can't be used in 'await' expression"),
    ],
)
async def test_a_wrapper_that_does_not_run_the_handler_is_a_failed_attempt(wrappers, says):
    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, other, dead_letter=DeadLetterPolicy(max_attempts=1))
    for wrapper in wrappers:
        loop.wrap(wrapper)
    async with loop:
        await mailbox.send(1)
        await settled(mailbox)
        (letter,) = await mailbox.dead_letters()
    assert says in letter.error


async def test_a_wrapper_may_leave_the_handler_out():
    async def skips(message, call):
        return None

    mailbox = InMemoryMailbox()
    loop = MainLoop(mailbox, other)
    loop.wrap(skips)
    async with loop:
        await mailbox.send(1)
        await settled(mailbox)
    assert loop.outcomes == {"acknowledged": 1}


@pytest.mark.parametrize(
    ("wrapper", "says"),
    [
        (yields, "wrapper yields is a generator, which would never run; write `async def`, and `return await call()`"),
        (None, "a wrapper must be callable, not None"),
        (Later, "wrapper Later is a class, of which a call makes an object and runs nothing; give an object of it"),
    ],
)
def test_what_cannot_be_a_wrapper_is_refused(wrapper, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        MainLoop(InMemoryMailbox(), other).wrap(wrapper)


def test_a_class_only_makes_an_object_and_is_refused():
    class Handler:
        def __init__(self, job: int) -> None: ...

        async def __call__(self) -> None: ...

    says = "handler Handler is a class, of which a call makes an object and runs nothing; give an object of it, or a function"
    for handler in (Handler, functools.partial(Handler)):
        with pytest.raises(ConfigError, match=says):
            MainLoop(InMemoryMailbox(), handler)


@pytest.mark.filterwarnings("error")
async def test_an_unrun_result_of_a_dead_letter_handler_keeps_the_letter():
    async def handle(letter):
        return other(1)

    mailbox = InMemoryMailbox(body=int)
    async with mailbox:
        await mailbox.send(1)
        (message,) = await mailbox.receive()
        await message.dead_letter("broken")
        consumer = DLQConsumer(mailbox, handle, dead_letter=DeadLetterPolicy(max_attempts=1))
        async with consumer:
            while not consumer.outcomes:
                await anyio.sleep(0.01)
        assert consumer.outcomes == {"dead_lettered": 1} or consumer.outcomes == {"kept": 1}
        assert [letter.body for letter in await mailbox.dead_letters()] == [1]
