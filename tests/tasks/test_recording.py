"""``tasks.testing()``: calls that are recorded instead of sent, and run from there, without a store."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import anyio
import pytest
from pydantic import BaseModel

from mainspring import (
    ConfigError,
    Context,
    Depends,
    HandlerTimeoutError,
    InvalidParameterError,
    Middleware,
    Reject,
    ReplyError,
    RequestFailedError,
    Retry,
    SerializationError,
    Tasks,
    chain,
    parallel,
)
from mainspring.testing import run_virtual

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop, pytest.mark.loops("asyncio", "trio")]


class Receipt(BaseModel):
    to: str


class Noting(Middleware):
    def __init__(self) -> None:
        self.noted: list[str] = []

    @asynccontextmanager
    async def sending(self, calls: Any) -> Any:
        for call in calls:
            call.headers["tenant"] = "acme"
        self.noted.append("sending")
        yield

    @asynccontextmanager
    async def handling(self, message: Any) -> Any:
        self.noted.append(f"handling {message.headers.get('tenant')}")
        yield


NOTING = Noting()
tasks = Tasks("redis://127.0.0.1:1/0?name=calls", middleware=[NOTING])
made: list[Any] = []


@asynccontextmanager
async def opened() -> Any:
    made.append("opened")
    yield "session"
    made.append("closed")


@tasks.task
async def email(to: str, subject: str = "Hello") -> Receipt:
    made.append((to, subject))
    return Receipt(to=to)


@tasks.task(priority=3)
async def with_all(ctx: Context[Any], number: int, session: str = Depends(opened)) -> Any:
    made.append((session, ctx.resources, ctx.attempt, ctx.message.body.task.name))
    await ctx.progress(1, 2)
    await ctx.checkpoint({"done": number})
    await email.send(f"{number}@example.org")
    return number


@tasks.task
def plain(number: int) -> int:
    return number + 1


@tasks.task
async def wrong(number: int) -> int:
    return "no number"  # type: ignore[return-value]


@tasks.task
async def fail(kind: str) -> None:
    raise {"retry": Retry(), "reject": Reject("never"), "reply": ReplyError("no"), "own": LookupError("own")}[kind]


@tasks.task(timeout=0.01)
async def slow() -> None:
    await anyio.sleep(10)


@tasks.task(unique="pending")
async def once(number: int) -> int:
    return number


@tasks.task(debounce=60, key="to")
async def latest(to: str, number: int) -> int:
    made.append(number)
    return number


@tasks.task
async def add(first: int, second: int) -> int:
    return first + second


@tasks.task
async def total(numbers: list[int]) -> int:
    made.append(sum(numbers))
    return sum(numbers)


@tasks.task(batch=10)
async def many(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


@pytest.fixture(autouse=True)
def _afresh() -> None:
    made.clear()
    NOTING.noted.clear()


async def test_calls_are_recorded_and_nothing_runs() -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    with tasks.testing() as sent:
        job = await email.send("ann", subject="Tea")
        await email.options(delay=60, priority=5, result_ttl=10, headers={"own": "yes"}).send("ben")
        await email.send_at(at, "cleo")
        await email.send_many([("dan",), {"to": "eve"}])
    assert [call.arguments["to"] for call in sent] == ["ann", "ben", "cleo", "dan", "eve"]
    first, second, third, *_ = sent
    assert (first.task, first.arguments, first.id) == (email, {"to": "ann", "subject": "Tea"}, job.id)
    assert first.options == {"headers": {"tenant": "acme"}}
    assert second.options == {
        "delay": 60, "priority": 5, "result_ttl": 10, "headers": {"own": "yes", "tenant": "acme"},
    }  # fmt: skip
    assert third.options["at"] == at
    assert len(sent) == 5
    assert [call.arguments["to"] for call in sent[3:]] == ["dan", "eve"]
    assert made == []
    assert NOTING.noted == ["sending"] * 4
    assert repr(sent[0]) == "<SentCall email(to='ann', subject='Tea')>"
    sent.clear()
    assert not sent


async def test_arguments_are_checked_as_for_a_store() -> None:
    with tasks.testing() as sent:
        with pytest.raises(InvalidParameterError, match="missing a required argument"):
            await email.send()  # type: ignore[call-arg]
        with pytest.raises(SerializationError, match="to"):
            await email.send(5)  # type: ignore[arg-type]
        with pytest.raises(InvalidParameterError, match="priority"):
            await email.options(priority=1_000_000).send("ann")
        assert len(sent) == 0


async def test_a_run_has_middleware_dependencies_context_and_what_is_sent_in_it() -> None:
    with tasks.testing(resources="resources") as sent:
        await with_all.send(7)
        assert sent[0].options["priority"] == 3
        assert await sent.run() == [7, Receipt(to="7@example.org")]
        assert [call.task for call in sent] == [with_all, email]
        assert made == ["opened", ("session", "resources", 1, "with_all"), "closed", ("7@example.org", "Hello")]
        assert NOTING.noted == ["sending", "handling acme", "sending", "handling acme"]
        assert [call.ran for call in sent] == [True, True]
        assert await sent.run() == []
        assert await sent[1].run() == Receipt(to="7@example.org")


async def test_plain_functions_and_batches_run() -> None:
    with tasks.testing() as sent:
        await plain.send(1)
        await many.send_many([(1,), (2,)])
        assert await sent.run() == [2, 2, 4]


async def test_errors_are_raised_and_the_rest_can_go_on() -> None:
    with tasks.testing() as sent:
        for kind in ("retry", "reject", "reply", "own"):
            await fail.send(kind)
        await wrong.send(1)
        await slow.send()
        await email.send("ann")
        for error in (Retry, Reject, ReplyError, LookupError, SerializationError, HandlerTimeoutError):
            with pytest.raises(error):
                await sent.run()
        assert await sent.run() == [Receipt(to="ann")]


async def test_inline_each_call_runs_as_it_is_sent() -> None:
    with tasks.testing(inline=True, resources="shared") as sent:
        job = await email.send("ann")
        assert made == [("ann", "Hello")]
        assert (job.new, sent[0].ran) == (True, True)
        with pytest.raises(LookupError, match="own"):
            await fail.send("own")
        assert await email.request("ben") == Receipt(to="ben")
        assert await plain.request(1) == 2
        with pytest.raises(RequestFailedError, match="own") as caught:
            await fail.request("own")
        assert (caught.value.error_type, type(caught.value.__cause__)) == ("LookupError", LookupError)
        await with_all.send(7)
        assert [call.task.name for call in sent[-2:]] == ["with_all", "email"]
        assert all(call.ran for call in sent)


async def test_a_request_needs_inline() -> None:
    with tasks.testing(), pytest.raises(ConfigError, match=r"tasks\.testing\(inline=True\)"):
        await email.request("ann")


async def test_one_call_of_a_key_is_recorded() -> None:
    with tasks.testing() as sent:
        first, second = await once.send(1), await once.send(1)
        assert (first.new, second.new, first == second) == (True, False, True)
        assert (await email.options(dedup_key="k").send("ann")).new
        assert not (await email.options(dedup_key="k").send("ben")).new
        await latest.send("ann", 1)
        await latest.send("ann", 2)
        await latest.send("ben", 3)
        for_a_while = once.options(unique=60)
        assert (await for_a_while.send(5)).new
        assert [call.task for call in sent] == [once, email, latest, latest, once]
        assert await sent.run() == [1, Receipt(to="ann"), 2, 3, 5]
        assert (await once.send(1)).new
        assert not (await for_a_while.send(5)).new


async def test_chains_are_recorded_as_they_go_on() -> None:
    with tasks.testing() as sent:
        job = await chain(add.s(1, 2), add.s(10)).send()
        assert [call.arguments for call in sent] == [{"first": 1, "second": 2}]
        assert await sent.run() == [3, 13]
        assert await job.result(timeout=1) == 13
        await parallel([plain.s(number) for number in range(3)], then=total.s()).send()
        assert await sent.run() == [1, 2, 3, 6]
    with tasks.testing(inline=True):
        await chain(add.s(1, 2), total.s(numbers=[5])).send()
        assert made == [6, 5]


async def test_calls_that_are_sent_as_messages_are_recorded() -> None:
    with tasks.testing() as sent:
        message_id = await tasks.mailbox.send(email.s("ann"))
        assert [(call.id, call.task, call.arguments["to"]) for call in sent] == [(message_id, email, "ann")]
        assert await sent.run() == [Receipt(to="ann")]
        assert await tasks.mailbox.approximate_count() == 0


async def test_nothing_is_opened_and_all_is_as_before() -> None:
    before = tasks.mailbox
    with tasks.testing() as sent:
        async with tasks:
            await email.send("ann")
        with tasks.testing() as inner:
            await email.send("ben")
        await email.send("cleo")
    assert (tasks.mailbox, tasks.recording) == (before, None)
    assert [call.arguments["to"] for call in sent] == ["ann", "cleo"]
    assert len(inner) == 1
    with pytest.raises(LookupError), tasks.testing():
        raise LookupError
    assert (tasks.mailbox, tasks.recording) == (before, None)


def test_code_that_is_not_async_sends_and_runs_too() -> None:
    with tasks.testing() as sent:
        job = email.sync.send("ann")
        email.sync.send_many([("ben",)])
        email.options(connection=object()).sync.send("cleo")
        assert sent[0].id == job.id
        assert len(sent) == 3
    with tasks.testing(inline=True):
        assert plain.sync.request(1) == 2
        email.sync.send("dan")
    assert made == [("dan", "Hello")]
    with tasks.testing(inline=True), tasks.sync:
        assert plain.sync.request(2) == 3


async def test_threads_of_an_event_loop_send_too() -> None:
    with tasks.testing() as sent:
        await anyio.to_thread.run_sync(email.sync.send, "ann")
        assert await sent.run() == [Receipt(to="ann")]
        with pytest.raises(
            ConfigError, match=r"sync\.send\(\) would block the event loop .* the async send\(\) instead"
        ):
            email.sync.send("ben")
        with pytest.raises(ConfigError, match=r"the async send_many\(\) instead"):
            email.sync.send_many([("ben",)])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_run_in_virtual_time(backend: str) -> None:
    own = Tasks("redis://127.0.0.1:1/0?name=calls")

    @own.task
    async def long(seconds: float) -> float:
        await anyio.sleep(seconds)
        return anyio.current_time()

    async def main() -> None:
        with own.testing() as sent:
            await long.options(delay=86_400).send(3600.0)
            assert await sent[0].run() == 3600

    run_virtual(main, backend=backend)


def test_what_was_recorded_can_be_run_on_a_later_event_loop() -> None:
    with tasks.testing() as sent:
        asyncio.run(email.send("ann"))
        assert asyncio.run(sent.run()) == [Receipt(to="ann")]


def test_a_call_of_another_type_comes_as_the_worker_gets_it() -> None:
    own = Tasks("memory://own")

    @own.task
    async def save(receipt: Receipt, tags: Annotated[list[str], "of it"]) -> None: ...

    async def main() -> None:
        with own.testing() as sent:
            given = Receipt(to="ann")
            await save.send(given, ["a"])
            assert sent[0].arguments == {"receipt": given, "tags": ["a"]}
            assert sent[0].arguments["receipt"] is not given

    run_virtual(main)
