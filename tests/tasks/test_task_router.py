"""``TaskRouter``: tasks that are declared without a mailbox, and included in a ``Tasks``."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from schedule_support import virtually
from task_support import group_of, until_done

from mainspring import Context, InMemoryMailbox, TaskRouter, Tasks, chain, open_mailbox
from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.worker.middleware import Middleware

NATS = "nats://127.0.0.1:1?name=nothing"


def declared():
    """A router of three tasks, and what their functions were called with."""
    router, ran = TaskRouter("mails"), []

    @router.task
    def plain(to: str) -> None:
        ran.append((to, "plain"))

    @router.task(aliases=["mail"], concurrency=1)
    async def email(ctx: Context, to: str, subject: str = "Hello") -> str:
        ran.append((to, subject))
        return to

    @router.task(batch=2)
    async def many(numbers: list[int]) -> None:
        ran.extend(numbers)

    return router, (email, plain, many), ran


@virtually
async def test_included_tasks_are_sent_and_run_like_any_other():
    router, (email, plain, many), ran = declared()
    urgent = email.options(priority=5, result_ttl=60)
    tasks = Tasks(InMemoryMailbox())
    steps = chain(email.s("step"), plain.s())
    tasks.include(router)
    assert {"email", "mail", "plain", "many"} == tasks.registered.keys()
    assert repr(email) == "<Task 'email' of 'memory'>" or email.tasks is tasks
    async with tasks, group_of(tasks):
        assert await (await urgent.send("ann", subject="Now")).result(timeout=9) == "ann"
        assert await email.request("bob") == "bob"
        await plain.send("cy")
        await many.send(1)
        await steps.send()
        await until_done(tasks.mailbox, seconds=60, every=0.5)
        assert [state.task for state in await tasks.limits()] == ["email", "mail"]
        with pytest.raises(InvalidParameterError, match="missing a required argument: 'to'"):
            await email.send()
    assert sorted(ran, key=str) == sorted(
        [("ann", "Now"), ("bob", "Hello"), ("cy", "plain"), 1, ("step", "Hello"), ("step", "plain")], key=str
    )


@virtually
async def test_middleware_and_recording_of_the_tasks_hold_for_included_ones():
    entered = []

    class Noting(Middleware):
        @asynccontextmanager
        async def sending(self, calls):
            entered.extend(call.task.name for call in calls)
            yield

    router, (email, plain, _), _ = declared()
    tasks = Tasks(InMemoryMailbox(), middleware=[Noting()])
    tasks.include(router)
    with tasks.testing() as sent:
        await email.send("ann")
        await plain.send("bob")
    assert [call.task for call in sent] == [email, plain]
    assert entered == ["email", "plain"]


@virtually
async def test_a_task_that_is_not_included_has_no_mailbox():
    _, (email, plain, _), ran = declared()
    for use in (lambda: plain.send("ann"), lambda: email.request("ann"), lambda: email.send_many([("ann",)])):
        with pytest.raises(ConfigError, match="the router 'mails' is included in no Tasks yet"):
            await use()
    with pytest.raises(ConfigError, match="is included in no Tasks yet"):
        _ = plain.sync
    plain("here")  # called, it is its function
    assert ran == [("here", "plain")]
    assert repr(plain) == "<Task 'plain' of 'mails'>"


def test_a_router_is_included_once_and_as_a_whole():
    router, (email, plain, _), _ = declared()
    tasks = Tasks(InMemoryMailbox())

    @tasks.task(name="mail")
    async def other() -> None: ...

    with pytest.raises(ConfigError, match="'mail' is registered already"):
        tasks.include(router)
    nats = Tasks(open_mailbox(NATS))
    with pytest.raises(ConfigError, match=r"task email: concurrency needs a mailbox with Capabilities\.limits"):
        nats.include(router)
    assert (list(tasks.registered), nats.registered) == (["mail"], {})
    assert repr(plain) == "<Task 'plain' of 'mails'>"
    home = Tasks(InMemoryMailbox())
    home.include(router)
    assert email.tasks is home
    with pytest.raises(ConfigError, match=r"include: the router 'mails' is included in <Tasks .*> already"):
        Tasks(InMemoryMailbox()).include(router)
    with pytest.raises(ConfigError, match="task 'late': the router 'mails' is included in"):
        router.task(name="late")(other.fn)
    with pytest.raises(ConfigError, match=r"tasks\.include takes a TaskRouter, not <Tasks"):
        home.include(tasks)
    with pytest.raises(ConfigError, match=r"include: the router 'mails' is included in .* already; include it once"):
        home.include(router)


async def test_a_loop_whose_tasks_are_on_a_router_that_is_included_nowhere_does_not_start(anyio_backend):
    tasks = Tasks(InMemoryMailbox())
    declared()
    with pytest.raises(ConfigError, match=r"has no tasks: .* need tasks\.include\(router\)"):
        await tasks.loop().run()


@virtually
async def test_nothing_is_included_while_a_loop_runs():
    tasks = Tasks(InMemoryMailbox())

    @tasks.task
    async def early() -> None: ...

    async with tasks, group_of(tasks):
        with pytest.raises(ConfigError, match=r"include: a loop of .* runs already; register tasks before"):
            tasks.include(TaskRouter())
    tasks.include(TaskRouter())
