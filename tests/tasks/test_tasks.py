"""Functions on one mailbox: what is sent, what is run and by which options, and what does not fit."""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections import abc  # noqa: TC003 - the annotations of tasks are resolved
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict

import anyio
import pytest
from anyio import to_thread
from task_support import group_of, until_done

from mainspring import (
    Context,
    DeadLetterPolicy,
    InMemoryMailbox,
    Reject,
    ReplyError,
    RequestFailedError,
    RetryPolicy,
    TaskRouter,
    Tasks,
    open_mailbox,
)
from mainspring.errors import ConfigError, InvalidParameterError, SerializationError
from mainspring.events import MessageFinished
from mainspring.mailbox.message import Envelope
from stores import KINDS, on

pytestmark = pytest.mark.anyio

EVERYWHERE = on(*KINDS)
AT_ONCE = RetryPolicy(initial_delay=0, jitter="none")


@dataclass
class Receipt:
    to: str
    length: int


# ------------------------------------------------------------------------------------------------------------- every store


@EVERYWHERE
async def test_each_call_runs_its_own_function_with_what_was_sent(store):
    tasks = Tasks(store.url())
    seen = []

    @tasks.task
    async def email(to: str, subject: str = "Hello") -> Receipt:
        seen.append(("email", to, subject))
        return Receipt(to, len(subject))

    @tasks.task
    def resize(path: str, *, width: int, when: datetime | None = None) -> None:
        seen.append(("resize", path, width, when))

    noon = datetime(2026, 1, 2, 12, tzinfo=UTC)
    async with tasks, group_of(tasks):
        job = await email.send("ann")
        assert job.new
        assert tasks.job(job.id) == job
        assert str(job) == job.id
        await resize.send("a.png", width=3, when=noon)
        jobs = await email.send_many([("bob", "Hi"), {"to": "cy"}])
        assert len(set(jobs)) == 2
        await until_done(tasks.mailbox)
    assert sorted(seen, key=str) == [
        ("email", "ann", "Hello"), ("email", "bob", "Hi"), ("email", "cy", "Hello"), ("resize", "a.png", 3, noon),
    ]  # fmt: skip


@EVERYWHERE
async def test_a_request_returns_what_the_function_returns_as_its_type(store):
    tasks = Tasks(store.url())

    @tasks.task
    async def email(to: str, subject: str = "Hello") -> Receipt:
        return Receipt(to, len(subject))

    @tasks.task
    def halve(number: int) -> float:
        if number < 0:
            raise ReplyError("not a number to halve")
        return number / 2

    async with tasks, group_of(tasks):
        assert await email.request("ann", subject="Hi") == Receipt("ann", 2)
        assert await halve.request(7, timeout=20) == 3.5
        with pytest.raises(RequestFailedError, match="not a number to halve"):
            await halve.request(-1, timeout=20)


@EVERYWHERE
async def test_while_a_unique_call_is_unfinished_another_one_is_not_sent(store):
    tasks = Tasks(store.url())

    @tasks.task(unique=True)
    async def sync(account: int, *, full: bool = False) -> None: ...

    async with tasks:
        first = await sync.send(1, full=True)
        again = await sync.send(full=True, account=1)
        other = await sync.send(2)
        assert (first.new, again.new, other.new) == (True, False, True)
        assert again == first
        assert await sync.options(dedup_key="mine").send(1, full=True) != first
        async with group_of(tasks):
            await until_done(tasks.mailbox)
        assert (await sync.send(1, full=True)).new


async def test_a_unique_call_has_the_same_arguments_whatever_the_order_of_their_keys():
    tasks = Tasks("memory://unique")

    @tasks.task(unique=True)
    async def sync(rows: dict[str, dict[str, int]]) -> None: ...

    async with tasks:
        assert (await sync.send({"a": {"x": 1, "y": 2}, "b": {}})).new
        assert not (await sync.send({"b": {}, "a": {"y": 2, "x": 1}})).new
        assert (await sync.send({"a": {"x": 2, "y": 1}, "b": {}})).new


@pytest.mark.own_time(2)
@EVERYWHERE
async def test_a_call_of_an_unknown_task_waits_for_a_worker_that_has_it(store):
    old, new = Tasks(store.url()), Tasks(store.url())
    seen = []

    @new.task
    async def added(number: int) -> None:
        seen.append(number)

    @old.task
    async def other() -> None: ...

    async with new, old:
        await added.send(1)
        async with group_of(old, concurrency=1):
            with anyio.fail_after(20):
                while (await old.mailbox.counts()).delayed != 1:
                    await anyio.sleep(0.005)
            await other.request(timeout=20)  # its neighbours are handled
        assert seen == []
        async with group_of(new):
            await until_done(new.mailbox)
    assert seen == [1]


# ------------------------------------------------------------------------------------------------------- options of a task


async def test_each_task_has_its_own_policies(virtual_clock):
    tasks = Tasks("memory://policies", retry=AT_ONCE, dead_letter=DeadLetterPolicy(3))
    attempts = []

    @tasks.task(dead_letter=DeadLetterPolicy(2), retry=RetryPolicy(initial_delay=60, jitter="none"))
    async def twice() -> None:
        attempts.append(("twice", round(virtual_clock.now)))
        raise ValueError

    @tasks.task
    async def by_default() -> None:
        attempts.append(("by default", round(virtual_clock.now)))
        raise ValueError

    @tasks.task(timeout=5, dead_letter=DeadLetterPolicy(1))
    async def slow() -> None:
        await anyio.sleep(10)

    @tasks.task
    async def refused() -> None:
        raise Reject("never")

    async with tasks, group_of(tasks):
        began = round(virtual_clock.now)
        for task in (twice, by_default, slow, refused):
            await task.send()
        await until_done_in_virtual_time(tasks.mailbox)
        letters = await tasks.mailbox.dead_letters()
    assert [at - began for name, at in attempts if name == "twice"] == [0, 60]
    assert [at - began for name, at in attempts if name == "by default"] == [0, 0, 0]
    assert sorted(letter.error_type for letter in letters) == [
        "HandlerTimeoutError",
        "Reject",
        "ValueError",
        "ValueError",
    ]


async def until_done_in_virtual_time(mailbox):
    with anyio.fail_after(10_000):
        while (await mailbox.counts()).waiting:
            await anyio.sleep(1)


async def test_calls_are_sent_by_the_options_of_the_task_and_by_those_of_the_call(virtual_clock):
    tasks = Tasks("memory://options")
    seen = []

    @tasks.task
    async def low(what: str) -> None:
        seen.append((what, round(virtual_clock.now - began)))

    @tasks.task(priority=5, expires_in=30)
    async def high(what: str) -> None:
        seen.append((what, round(virtual_clock.now - began)))

    async with tasks:
        began = virtual_clock.now
        await low.send("low")
        await high.send("high")
        await low.options(priority=9).send("highest")
        await low.options(delay=60).send("delayed")
        await low.send_at(virtual_clock.utc_now() - timedelta(days=1), "past")
        await high.options(delay=50).send("expired")
        async with group_of(tasks, concurrency=1):
            await until_done_in_virtual_time(tasks.mailbox)
        assert (await tasks.mailbox.counts()).dead == 1
    assert seen == [("highest", 0), ("high", 0), ("low", 0), ("past", 0), ("delayed", 60)]


async def test_events_and_log_lines_name_the_task(virtual_clock, caplog):
    tasks = Tasks("memory://named", retry=AT_ONCE, dead_letter=DeadLetterPolicy(1))
    seen = []

    @tasks.task
    async def fails() -> None:
        raise ValueError

    @tasks.task(name="renamed")
    async def works() -> None: ...

    async with tasks:
        await fails.send()
        await works.send()
        async with open_mailbox("memory://named", body=Any) as other:
            await other.send({"task": "gone", "args": {}})
        group = group_of(tasks)
        group.dispatcher.subscribe(MessageFinished, lambda event: seen.append((event.handler, event.outcome)))
        await group.run(install_signals=False, until_empty=True)
    assert sorted(seen) == [("", "dead_lettered"), ("fails", "dead_lettered"), ("renamed", "acknowledged")]
    lines = [record.getMessage() for record in caplog.records if "dead-lettered" in record.getMessage()]
    assert [bool(re.match(r"named: message \w+ of fails dead-lettered after", line)) for line in lines].count(True) == 1


async def test_the_context_is_passed_by_annotation_wherever_it_stands():
    tasks = Tasks("memory://context")
    seen = []

    @tasks.task
    async def first(ctx: Context, number: int) -> None:
        seen.append((number, ctx.request_id))

    @tasks.task
    async def last(number: int, *, about: Context) -> None:
        seen.append((number, about.request_id))

    @tasks.task
    def plain(number: int, context: Context, other: int = 4) -> None:
        assert threading.current_thread() is not threading.main_thread()
        seen.append((number + other, context.request_id))

    async with tasks, group_of(tasks):
        sent = [(await first.send(1)).id, (await last.send(2)).id, (await plain.send(3, other=5)).id]
        await until_done(tasks.mailbox)
    assert sorted(seen) == [(1, sent[0]), (2, sent[1]), (8, sent[2])]


async def test_a_task_is_called_here_as_the_function_that_it_is():
    tasks = Tasks("memory://called")

    @tasks.task
    async def double(number: int) -> int:
        """Double it."""
        return 2 * number

    @tasks.task
    def halve(number: int) -> float:
        return number / 2

    assert await double(4) == 8
    assert halve(4) == 2
    assert (double.__name__, double.__doc__) == ("double", "Double it.")
    assert "'double'" in repr(double)


async def test_an_object_that_can_be_called_is_a_task_whatever_its_attributes_are_called():
    class Row(TypedDict):
        number: int

    class Doubler:
        def __init__(self) -> None:
            self.send = self.options = 2

        def __call__(self, row: Row) -> abc.Awaitable[Receipt]:
            return self.double(row)

        async def double(self, row: Row) -> Receipt:
            return Receipt("twice", self.send * row["number"])

    tasks = Tasks("memory://object")
    double = tasks.task(name="double")(Doubler())
    async with tasks, group_of(tasks):
        assert await double.options(priority=1).request({"number": 4}) == Receipt("twice", 8)


@pytest.mark.slow
async def test_a_plain_function_runs_in_another_process_where_its_task_says_so():
    from task_functions import process_of, tasks

    async with tasks, group_of(tasks, concurrency=1):
        number, process = await process_of.request(7, timeout=60)
    assert number == 7
    assert process != os.getpid()


async def test_a_cancelled_job_is_not_run():
    tasks = Tasks("memory://cancelled")
    seen = []

    @tasks.task
    async def work(number: int) -> None:
        seen.append(number)

    async with tasks:
        jobs = await work.send_many([(1,), (2,)])
        await tasks.job(jobs[0].id).cancel()
        async with group_of(tasks):
            await until_done(tasks.mailbox)
    assert seen == [2]


def test_plain_code_sends_and_requests_without_an_event_loop(tmp_path):
    tasks = Tasks(f"sqlite:///{tmp_path / 'jobs.db'}")

    @tasks.task
    async def double(number: int) -> int:
        return 2 * number

    threads = set()

    def calls():
        threads.add(threading.get_ident())
        yield (2,)
        yield {"number": 3}

    with tasks.sync:
        assert double.sync.send(1).new
        assert len(double.sync.send_many(calls())) == 2
        assert threads == {threading.get_ident()}  # it may block, which the event loop of the mailbox must not
        double.sync.send_at(datetime.now(UTC) + timedelta(hours=1), 4)
        assert tasks.sync.counts().pending == 3

    async def worker():
        async with group_of(tasks):
            return await anyio.to_thread.run_sync(lambda: double.sync.request(8, timeout=20))

    assert anyio.run(worker) == 16


# ----------------------------------------------------------------------------------------------------- what does not fit


async def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent():
    tasks = Tasks("memory://refused")

    @tasks.task
    async def email(to: str, subject: str = "Hello") -> None: ...

    async with tasks:
        for call, error, text in (
            (
                lambda: email.send(),
                InvalidParameterError,
                "task email(to: str, subject: str = 'Hello'): missing a required",
            ),
            (lambda: email.send("a", "b", "c"), InvalidParameterError, "too many positional arguments"),
            (lambda: email.send("a", to="b"), InvalidParameterError, "multiple values for argument 'to'"),
            (lambda: email.send("a", cc="b"), InvalidParameterError, "unexpected keyword argument 'cc'"),
            (
                lambda: email.send(7),
                SerializationError,
                "a call does not fit task email: to: Input should be a valid string",
            ),
            (lambda: email.send_many([("a",), "b"]), InvalidParameterError, "as a tuple or a mapping, not 'b'"),
            (lambda: email.send_many([("a",), {"too": "b"}]), InvalidParameterError, "'to'"),
            (lambda: email.options(unique=True).request("a"), ConfigError, "its result goes to one requester"),
        ):
            with pytest.raises(error, match=re.escape(text)):
                await call()
        assert await tasks.mailbox.approximate_count() == 0


async def test_objects_that_are_not_serialized_are_checked_alike():
    tasks = Tasks(InMemoryMailbox("objects", serialize=False))
    seen = []

    @tasks.task
    async def keep(what: Any, count: int) -> object:
        seen.append(what)
        return what

    mark = object()
    async with tasks, group_of(tasks):
        assert await keep.request(mark, 1) is mark
        with pytest.raises(SerializationError, match="count: Input should be a valid integer"):
            await keep.send(mark, "1")
    assert seen == [mark]


async def test_what_no_longer_fits_is_tried_again_and_dead_when_its_attempts_run_out(virtual_clock):
    tasks = Tasks("memory://changed", retry=AT_ONCE, dead_letter=DeadLetterPolicy(3))

    @tasks.task
    async def email(to: str) -> None: ...

    bodies = (
        {"task": "email", "args": {"address": "ann"}},
        {"task": "email", "args": {"to": 5}},
        {"task": "email", "args": {"to": "ann", "cc": "bob"}},
        {"task": "gone", "args": {}},
        {"args": {"to": "ann"}},
        "email",
    )
    async with tasks:
        async with open_mailbox("memory://changed", body=Any) as other:
            await other.send_many(bodies)
        async with group_of(tasks):
            await until_done_in_virtual_time(tasks.mailbox)
            letters = await tasks.mailbox.dead_letters()
    assert {letter.attempt for letter in letters} == {3}
    texts = sorted(letter.error for letter in letters)
    assert [re.sub(r"[^a-z ].*", "", text) for text in texts] == [
        "no task ", *["the stored body does not fit task email"] * 3,
        "the stored body is no call of a task", "the stored body is no call of a task",
    ]  # fmt: skip
    assert {letter.error_type for letter in letters} == {"SerializationError", "UnknownTaskError"}


async def test_a_call_that_another_program_has_written_is_read_too():
    tasks = Tasks("memory://foreign")
    seen = []

    @tasks.task
    async def email(to: str, subject: str = "Hello") -> None:
        seen.append((to, subject))

    async with tasks:
        async with open_mailbox("memory://foreign", body=Any) as other:
            await other.send({"args": {"to": 'a","args":{'}, "task": "email"})
            await other.send({"task": "email", "args": {"subject": "ü", "to": "b"}})
        async with group_of(tasks):
            await until_done(tasks.mailbox)
    assert sorted(seen) == [('a","args":{', "Hello"), ("b", "ü")]


async def test_bytes_that_another_program_has_written_never_end_the_loop(virtual_clock):
    tasks = Tasks("memory://bytes", retry=AT_ONCE, dead_letter=DeadLetterPolicy(2))
    seen = []

    @tasks.task(name="a/b")
    async def keep(x: int) -> None:
        seen.append(x)

    read = (
        rb'{"task":"a\/b","args":{"x":1}}',
        b'{"task":"a/b","args":{"x":2}}\n',
        b'{"task":"a/b","args":{"x":0},"args":{"x":3}}',
        b'{"task":"a/b","args":{"x":4}}',
    )
    no_json = (b'{"task":"a/b","args":{"x":5}X', b'{"task":"\xff","args":{}}', b'{"task":"a/b","args":{"x":5}', b"")
    no_call = (b'{"task":"a/b","args":{"x":5},"version":2}', b'{"task":7}', b'{"task":7,"args":{}}', b"[]")
    unknown = (b'{"task":"%s","args":{}}' % (b"n" * 100_000),)
    async with tasks:
        mailbox = tasks.mailbox
        for raw in (*read, *no_json, *no_call, *unknown):
            await mailbox.send_prepared([Envelope(mailbox.new_id(), raw)])
        async with group_of(tasks):
            await until_done_in_virtual_time(mailbox)
            letters = await mailbox.dead_letters()
    assert sorted(seen) == [1, 2, 3, 4]
    assert [(letter.error_type, letter.attempt) for letter in sorted(letters, key=lambda each: each.message_id)] == [
        *[("NotJsonError", 1)] * 4, *[("SerializationError", 2)] * 4, ("UnknownTaskError", 2),
    ]  # fmt: skip
    assert all(len(letter.error) < 1_000 for letter in letters)


async def test_what_was_not_serialized_is_run_by_the_task_of_its_name_in_this_worker(virtual_clock):
    mine = Tasks("memory://shared?serialize=false", retry=AT_ONCE, dead_letter=DeadLetterPolicy(2))
    other = Tasks("memory://shared?serialize=false")
    seen = []

    @mine.task(name="both")
    def both(x: int) -> None:
        seen.append(f"mine {x}")

    @other.task(name="both")
    def both_there(x: int) -> None:
        seen.append(f"other {x}")

    @other.task(name="typed")
    def only_there(x: str) -> None: ...

    mine.task(name="typed")(both.fn)
    only_other = other.task(name="gone")(both.fn)
    async with mine, other, open_mailbox("memory://shared?serialize=false", body=int) as plain:
        await both.options(priority=1).send(1)
        await both_there.send(2)
        await only_there.send("three")
        await only_other.send(4)
        await plain.send(5)
        async with group_of(mine):
            await until_done_in_virtual_time(mine.mailbox)
            letters = await mine.mailbox.dead_letters()
    assert sorted(seen) == ["mine 1", "mine 2"]
    assert sorted(letter.error_type for letter in letters) == ["SerializationError"] * 2 + ["UnknownTaskError"]


def test_what_cannot_be_a_task_is_refused_where_it_is_registered():
    tasks = Tasks("memory://declared")

    @tasks.task
    async def taken() -> None: ...

    async def missing(to) -> None: ...
    async def variable(*to: str) -> None: ...
    async def keywords(**to: str) -> None: ...
    async def positional(to: str, /) -> None: ...
    async def unknown(to: Nowhere) -> None: ...  # noqa: F821
    async def two_contexts(ctx: Context, more: Context) -> None: ...
    def generator():
        yield 1

    for fn, options, text in (
        (taken.fn, {}, "task 'taken' is registered already"),
        (missing, {}, "annotate to with its type"),
        (variable, {}, "arguments are sent by name"),
        (keywords, {}, "arguments are sent by name"),
        (positional, {}, "arguments are sent by name"),
        (unknown, {}, "the annotation of to cannot be resolved"),
        (two_contexts, {}, "ctx and more are the context"),
        (max, {}, "its parameters cannot be read"),
        (generator, {}, "generator"),
        (7, {}, "a task must be a function"),
        (taken.fn, {"name": "a b"}, "task 'a b': a name"),
        (taken.fn, {"name": "x", "offload": "process"}, "is async and runs on the event loop"),
        (taken.fn, {"name": "x", "timeout": 0}, "timeout"),
        (taken.fn, {"name": "x", "timeout": "5"}, "timeout"),
        (lambda: None, {"name": "x", "offload": "moon"}, "offload must be"),
        (taken.fn, {"name": "x", "retry": 5}, "task x: RetryPolicy expected"),
        (taken.fn, {"name": "x", "dead_letter": 5}, "task x: DeadLetterPolicy expected"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            tasks.task(**options)(fn)
    with pytest.raises(ConfigError, match="a mailbox URL or a Mailbox"):
        Tasks(7)
    with pytest.raises(ConfigError, match="holds body type str"):
        Tasks(InMemoryMailbox("typed", body=str))
    assert list(tasks.registered) == ["taken"]


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("priority", 1.5, "priority must be a whole number"),
        ("unique", "soon", "unique must be True or False, 'pending'"),
        ("result_ttl", -1, "result_ttl must be 0 to"),
        ("expires_in", 0, "expires_in must be above 0 seconds"),
        ("expires_in", "1h", "expires_in must be 0 to"),
        ("middleware", [5], "middleware must be objects"),
        ("debounce", 0, "debounce must be above 0 seconds"),
    ],
)
def test_the_error_of_an_option_names_the_task(option, value, text):
    async def email(to: str) -> None: ...

    with pytest.raises((ConfigError, InvalidParameterError), match=f"^task email: {text}"):
        Tasks(InMemoryMailbox()).task(**{option: value})(email)
    with pytest.raises((ConfigError, InvalidParameterError), match=f"^task mails:email: {text}"):
        TaskRouter().task(name="mails:email", **{option: value})(email)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("unique", "soon", "unique must be True or False, 'pending'"),
        ("result_ttl", -1, "result_ttl must be 0 to"),
        ("timeout", 0, "timeout must be above 0 seconds"),
        ("weight", 1_000, "weight must be a number"),
    ],
)
def test_the_error_of_an_option_of_one_call_names_the_task(option, value, text):
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(key="to")
    async def email(to: str) -> None: ...

    with pytest.raises((ConfigError, InvalidParameterError), match=f"^task email: {text}"):
        email.options(**{option: value})


def test_a_type_that_json_cannot_hold_is_refused_at_the_first_send_and_by_the_worker():
    tasks = Tasks("memory://types")

    @tasks.task
    async def listen(socket: threading.Event) -> None: ...

    async def main():
        async with tasks:
            await listen.send(threading.Event())

    with pytest.raises(ConfigError, match="cannot be"):
        anyio.run(main)

    async def work():
        async with tasks:
            await tasks.mailbox.send_prepared([Envelope("1", b'{"task":"listen","args":{}}')])
            try:
                await group_of(tasks).run(install_signals=False, until_empty=True)
            finally:
                assert (await tasks.mailbox.counts()).pending == 1

    with pytest.raises(ConfigError, match="cannot be"):
        anyio.run(work)


async def test_a_body_that_is_no_call_is_refused_by_the_mailbox_of_tasks():
    tasks = Tasks("memory://no-calls")

    @tasks.task
    async def add(number: int) -> None: ...

    async with tasks:
        job = await add.send(1)
        with pytest.raises(SerializationError, match=r"takes calls, not a dict: send by task.send"):
            await tasks.mailbox.send({"number": 2})
        with pytest.raises(SerializationError, match=r"not a dict: .* change by job.edit"):
            await tasks.mailbox.replace_body(job.id, {"number": 2})


async def test_a_task_is_not_registered_while_a_loop_runs():
    tasks = Tasks("memory://late")

    @tasks.task
    async def early() -> None: ...

    async with tasks, group_of(tasks):
        with pytest.raises(ConfigError, match="register tasks before"):
            tasks.task(test_a_task_is_not_registered_while_a_loop_runs)
    tasks.task(name="later")(test_a_task_is_not_registered_while_a_loop_runs)


async def test_a_loop_imports_the_modules_that_register_tasks(anyio_backend, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    base, more = f"base_{tmp_path.name}", f"more_{tmp_path.name}"
    (tmp_path / f"{base}.py").write_text(
        f"from mainspring import Tasks\ntasks = Tasks('memory://{base}', modules=['{more}'])\nran = []\n"
    )
    (tmp_path / f"{more}.py").write_text(
        f"from {base} import ran, tasks\n@tasks.task\nasync def late(number: int) -> None:\n    ran.append(number)\n"
    )
    module = importlib.import_module(base)
    assert module.tasks.registered == {}
    async with group_of(module.tasks):
        await module.tasks.registered["late"].send(1)
        await until_done(module.tasks.mailbox)
    assert module.ran == [1]


async def test_a_module_that_does_not_import_is_named(anyio_backend):
    tasks = Tasks("memory://no-module", modules=["no_such_module"])
    with pytest.raises(ConfigError, match="'no_such_module' does not import: ModuleNotFoundError"):
        await group_of(tasks).run(install_signals=False)
    for wrong in ("app.emails", [5]):
        with pytest.raises(ConfigError, match="a list of names of modules"):
            Tasks("memory://no-module", modules=wrong)


async def test_a_parameter_may_have_any_name():
    ran: list[tuple[int, int, int]] = []
    tasks = Tasks(InMemoryMailbox())

    @tasks.task
    async def work(self: int, at: int, fn: int) -> int:
        ran.append((self, at, fn))
        return self + at + fn

    @tasks.task(name="plain")
    def plain(self: int, at: int, fn: int) -> int:
        ran.append((self, at, fn))
        return self + at + fn

    named = {"self": 1, "at": 2, "fn": 3}
    with tasks.testing(inline=True):
        for task in (work, plain):
            await task.send(**named)
            await task.send_at(datetime(2026, 1, 1, tzinfo=UTC), **named)
            assert await task.request(**named) == 6
            await to_thread.run_sync(lambda task=task: task.sync.send(**named))
            await to_thread.run_sync(lambda task=task: task.sync.send_at(datetime(2026, 1, 1, tzinfo=UTC), **named))
            assert await to_thread.run_sync(lambda task=task: task.sync.request(**named)) == 6
            assert task.s(**named).arguments == named
    assert (ran, await work(**named), plain(**named)) == ([(1, 2, 3)] * 14, 6, 6)


async def test_a_parameter_called_self_reaches_a_worker_from_each_way_to_send():
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(result_ttl=60)
    async def work(self: int, fn: int = 1) -> int:
        return self + fn

    async with group_of(tasks):
        jobs = [await work.send(self=1), await to_thread.run_sync(lambda: work.sync.send(self=2, fn=2))]
        assert [await job.result(timeout=10) for job in jobs] == [2, 4]
        assert await work.request(self=3) == 4
        assert await to_thread.run_sync(lambda: work.sync.request(self=4, fn=3)) == 7
