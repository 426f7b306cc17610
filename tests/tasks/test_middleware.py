"""Middleware: in order around each send and each run, of a group, a loop, tasks and a task; and what it must not do."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import anyio
import pytest

from mainspring import (
    DeadLetterPolicy,
    InMemoryMailbox,
    LoopGroup,
    MainLoop,
    Middleware,
    Reject,
    RequestFailedError,
    RetryPolicy,
    Tasks,
)
from mainspring.errors import ConfigError, TaskExitError

pytestmark = pytest.mark.anyio

AT_ONCE: dict[str, Any] = {"retry": RetryPolicy(initial_delay=0), "dead_letter": DeadLetterPolicy(2)}
tenant: ContextVar[str] = ContextVar("tenant", default="none")


class Logged(Middleware):
    """Writes down when it is entered and left, and how."""

    def __init__(self, name, log):
        self.name = name
        self.log = log

    @asynccontextmanager
    async def sending(self, calls):
        self.log.append(f"{self.name} sends {len(calls)}")
        yield
        self.log.append(f"{self.name} has sent")

    @asynccontextmanager
    async def handling(self, message):
        self.log.append(f"{self.name} begins")
        try:
            yield
        except BaseException as error:
            self.log.append(f"{self.name} sees {type(error).__name__}")
            raise
        self.log.append(f"{self.name} ends")


class Tenants(Middleware):
    """Carries a context variable from the sender to the handler, in a header."""

    @asynccontextmanager
    async def sending(self, calls):
        for call in calls:
            call.headers["tenant"] = tenant.get()
        yield

    @asynccontextmanager
    async def handling(self, message):
        tenant.set(message.headers["tenant"])
        yield


def group_of(tasks, **options):
    return LoopGroup([tasks.loop(concurrency=1)], guardian=False, **options)


async def drain(group):
    await group.run(install_signals=False, until_empty=True)


async def test_the_first_is_the_outermost_and_a_tasks_own_is_inside_of_all(virtual_clock):
    log = []
    tasks = Tasks("memory://ordered", middleware=[Logged("first", log), Logged("second", log)])

    @tasks.task(middleware=[Logged("own", log)])
    async def work() -> None:
        log.append("runs")

    @tasks.task
    async def other() -> None:
        log.append("the other runs")

    async with tasks:
        await work.send()
        assert log == [
            "first sends 1",
            "second sends 1",
            "own sends 1",
            "own has sent",
            "second has sent",
            "first has sent",
        ]
        log.clear()
        await other.send_many([()] * 3)
        assert log == ["first sends 3", "second sends 3", "second has sent", "first has sent"]
        await tasks.mailbox.purge()
        await work.send()
        log.clear()
        await drain(group_of(tasks, middleware=[Logged("group", log)]))
    assert log == [
        "group begins", "first begins", "second begins", "own begins", "runs", "own ends", "second ends", "first ends",
        "group ends",
    ]  # fmt: skip


async def test_a_plain_loop_has_it_too_outside_of_its_wrappers_that_came_before(virtual_clock):
    log = []

    async def handle(body: int) -> None:
        log.append(body)

    mailbox = InMemoryMailbox("plain")
    loop = MainLoop(mailbox, handle, middleware=[Logged("outer", log), Logged("inner", log)])

    @loop.wrap
    async def wrapper(message, call):
        log.append("wrapper")
        return await call()

    await mailbox.send(7)
    await drain(LoopGroup([loop]))
    assert log == ["wrapper", "outer begins", "inner begins", 7, "inner ends", "outer ends"]


async def test_it_carries_context_from_the_sender_to_the_function():
    tasks = Tasks("memory://tenants", middleware=[Tenants()])
    seen = []

    @tasks.task
    async def work(number: int) -> str:
        seen.append((number, tenant.get()))
        return tenant.get()

    @tasks.task
    def plain(number: int) -> str:
        return tenant.get()

    async with tasks, group_of(tasks):
        tenant.set("ann")
        assert await work.request(1) == "ann"
        assert await plain.request(1) == "ann"
        tenant.set("bob")
        assert await work.options(headers={"other": "kept"}).request(2) == "bob"
    assert seen == [(1, "ann"), (2, "bob")]


async def test_arguments_that_it_changes_are_those_that_are_sent():
    class Doubling(Middleware):
        @asynccontextmanager
        async def sending(self, calls):
            for call in calls:
                call.arguments["number"] *= 2
            yield

    tasks = Tasks("memory://doubled", middleware=[Doubling()])
    seen = []

    @tasks.task
    async def work(number: int) -> int:
        seen.append(number)
        return number

    async with tasks, group_of(tasks):
        assert await work.request(3) == 6
        await work.send(number=4)
        await work.send_many([(5,)])
        with anyio.fail_after(10):
            while len(seen) < 3:
                await anyio.sleep(0.001)
    assert sorted(seen) == [6, 8, 10]


async def test_what_it_raises_at_a_send_is_raised_and_nothing_is_sent():
    class Refusing(Middleware):
        @asynccontextmanager
        async def sending(self, calls):
            raise PermissionError("not for you")
            yield

    tasks = Tasks("memory://refusing", middleware=[Refusing()])

    @tasks.task
    async def work() -> None: ...

    async with tasks:
        for call in (
            work.send,
            lambda: work.send_many([()]),
            work.request,
            lambda: work.options(delay=timedelta(1)).send(),
        ):
            with pytest.raises(PermissionError, match="not for you"):
                await call()
        assert await tasks.mailbox.approximate_count() == 0


async def test_an_error_of_a_send_that_it_suppresses_is_not_taken_for_a_job():
    class Swallowing(Middleware):
        @asynccontextmanager
        async def sending(self, calls):
            with suppress(Exception):
                yield

    tasks = Tasks("memory://swallowed", middleware=[Swallowing()])

    @tasks.task
    async def work(number: int) -> None: ...

    async with tasks:
        with pytest.raises(TaskExitError, match="suppressed the error of a send"):
            await work.send("no number")
        await work.send(1)


async def test_what_it_raises_around_a_run_is_a_failed_attempt(virtual_clock):
    class Failing(Middleware):
        def __init__(self, when):
            self.when = when

        @asynccontextmanager
        async def handling(self, message):
            if self.when == "before":
                raise OSError("no database")
            yield
            raise Reject("after all")

    for when, error, attempts, runs in (("before", "OSError: no database", 2, 0), ("after", "after all", 1, 1)):
        tasks, seen = Tasks(f"memory://failing-{when}", middleware=[Failing(when)], **AT_ONCE), []

        @tasks.task
        async def work() -> None:
            seen.append(1)  # noqa: B023

        async with tasks:
            await work.send()
            await drain(group_of(tasks))
            (letter,) = await tasks.mailbox.dead_letters()
        assert (letter.attempt, len(seen)) == (attempts, runs)
        assert error in f"{letter.error_type}: {letter.error}"


async def test_an_error_that_it_suppresses_is_no_success(virtual_clock):
    class Swallowing(Middleware):
        @asynccontextmanager
        async def handling(self, message):
            with suppress(ValueError):
                yield

    tasks = Tasks("memory://suppressed", middleware=[Swallowing()], **AT_ONCE)

    @tasks.task
    async def work() -> None:
        raise ValueError("wrong")

    async with tasks, group_of(tasks):
        with pytest.raises(RequestFailedError, match=r"Swallowing.handling has suppressed .* ValueError: wrong"):
            await work.request()


async def test_a_cancelled_run_passes_through_it_and_the_message_goes_back(virtual_clock):
    log = []
    tasks = Tasks("memory://cancelled-run", middleware=[Logged("outer", log)])

    @tasks.task
    async def work() -> None:
        await anyio.sleep(1_000)

    async with tasks:
        await work.send()
        group = group_of(tasks, shutdown_timeout=1)
        async with group:
            await anyio.sleep(1)
        assert (await tasks.mailbox.counts()).pending == 1
    assert len(log) == 4
    assert log[2] == "outer begins"
    assert log[3].startswith("outer sees Cancelled")


def test_what_is_no_middleware_is_refused_where_it_is_given():
    class Undecorated(Middleware):
        async def handling(self, message):
            yield

    class Coroutine(Middleware):
        async def sending(self, calls): ...

    mailbox = InMemoryMailbox("any", body=int)
    for wrong, text in (
        (7, "must be objects of classes derived from Middleware, not 7"),
        (Middleware, "must be objects of classes derived from Middleware"),
        (Undecorated(), "Undecorated.handling must be decorated with @asynccontextmanager"),
        (Coroutine(), "Coroutine.sending must be decorated with @asynccontextmanager"),
    ):
        for give in (
            lambda: MainLoop(mailbox, print, middleware=[wrong]),  # noqa: B023
            lambda: LoopGroup([], middleware=[wrong]),  # noqa: B023
            lambda: Tasks("memory://any", middleware=[wrong]),  # noqa: B023
            lambda: Tasks("memory://any").task(name="x", middleware=[wrong])(lambda: None),  # noqa: B023
        ):
            with pytest.raises(ConfigError, match=text):
                give()
    with pytest.raises(ConfigError, match="middleware must be a list of them, not <"):
        Tasks("memory://any", middleware=Middleware())
