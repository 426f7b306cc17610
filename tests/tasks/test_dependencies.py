"""Dependencies: opened for each run and closed after it, in the event loop, whatever the function does."""

from __future__ import annotations

import functools
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import anyio
import pytest

from mainspring import (
    CallArgument,
    Context,
    DeadLetterPolicy,
    Depends,
    LoopGroup,
    Provided,
    RequestFailedError,
    RetryPolicy,
    Tasks,
)
from mainspring.errors import ConfigError

pytestmark = pytest.mark.anyio

AT_ONCE: dict[str, Any] = {"retry": RetryPolicy(initial_delay=0), "dead_letter": DeadLetterPolicy(2)}
log: list[str] = []


@dataclass
class Session:
    name: str


@asynccontextmanager
async def session(ctx: Context[str] = CallArgument("ctx")):
    log.append(f"begin {ctx.resources}")
    try:
        yield Session(f"{ctx.resources} of attempt {ctx.attempt}")
    except BaseException as error:
        log.append(f"roll back: {type(error).__name__}")
        raise
    log.append("commit")


def repository(session: Session = Depends(session)) -> list[Session]:
    return [session]


Db = Annotated[Session, Depends(session)]


@asynccontextmanager
async def lifespan():
    yield "database"


@pytest.fixture(autouse=True)
def empty_log():
    log.clear()


def group_of(tasks):
    return LoopGroup([tasks.loop()], lifespan=lifespan, guardian=False)


async def test_a_run_has_its_own_and_they_are_no_part_of_the_message():
    tasks = Tasks("memory://depends")

    @tasks.task
    async def by_annotation(ctx: Context, number: int, db: Db = Provided) -> str:
        log.append(f"run {number}")
        return db.name

    @tasks.task
    async def by_default(
        ctx: Context, rows: list[Session] = Depends(repository), db: Session = Depends(session)
    ) -> bool:
        return rows[0] is db

    @tasks.task
    def plain(number: int, ctx: Context, db: Db = Provided) -> str:
        assert threading.current_thread() is not threading.main_thread()
        return f"{number} {db.name}"

    async with tasks, group_of(tasks):
        assert await by_annotation.request(7) == "database of attempt 1"
        assert log == ["begin database", "run 7", "commit"]
        assert await by_default.request()
        assert log.count("begin database") == 2
        assert await plain.request(3) == "3 database of attempt 1"
    assert log.count("commit") == 3


async def test_a_failure_of_the_function_goes_through_them():
    tasks = Tasks("memory://rolled-back", **AT_ONCE)

    @tasks.task
    async def work(ctx: Context, db: Db = Provided) -> None:
        raise ValueError(f"attempt {ctx.attempt}")

    async with tasks, group_of(tasks):
        with pytest.raises(RequestFailedError, match="attempt 2"):
            await work.request()
    assert log == ["begin database", "roll back: ValueError"] * 2


async def test_one_that_cannot_be_opened_is_a_failed_attempt_and_the_function_does_not_run():
    tasks = Tasks("memory://unopened", **AT_ONCE)

    def broken() -> None:
        raise OSError("no database")

    @tasks.task
    async def work(number: int, db: None = Depends(broken)) -> None:
        log.append("run")

    async with tasks, group_of(tasks):
        with pytest.raises(RequestFailedError, match="no database"):
            await work.request(1)
    assert log == []


async def test_one_that_fails_as_it_is_closed_is_a_failed_attempt():
    tasks = Tasks("memory://unclosed", **AT_ONCE)

    @asynccontextmanager
    async def unit():
        yield
        raise OSError("the commit failed")

    @tasks.task
    async def work(number: int, db: None = Depends(unit)) -> int:
        log.append("run")
        return number

    async with tasks, group_of(tasks):
        with pytest.raises(RequestFailedError, match="the commit failed"):
            await work.request(1)
    assert log == ["run", "run"]


async def test_a_cancelled_run_closes_them(virtual_clock):
    tasks = Tasks("memory://cancelled-dependency")

    @tasks.task(timeout=5, dead_letter=DeadLetterPolicy(1))
    async def work(ctx: Context, db: Db = Provided) -> None:
        await anyio.sleep(100)

    async with tasks, group_of(tasks):
        with pytest.raises(RequestFailedError, match="its timeout of 5 s"):
            await work.request()
    assert log[0] == "begin database"
    assert log[1].startswith("roll back: Cancelled")


def test_a_wrong_declaration_is_refused_where_the_task_is_registered():
    tasks = Tasks("memory://declared")
    with pytest.raises(ConfigError, match=r"task work: Parameter 'db' .* defaults to Provided"):

        @tasks.task
        async def work(db: int = Provided) -> None: ...

    async def partial(number: int, db: Db = Provided) -> None: ...

    with pytest.raises(ConfigError, match="task partial: only a function can have dependencies"):
        tasks.task(name="partial")(functools.partial(partial, 1))
