"""A server that falls silent under loops with default settings: each loop says so within ten seconds."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import nats_support
import redis_support
from mainspring import LoopGroup, MailboxConnectionError, MainLoop, open_mailbox
from mainspring.core import random
from mainspring.mailbox.limits import SILENCE
from mainspring.mailbox.nats import shared_client as nats_client
from mainspring.mailbox.postgres import connection as postgres_connection
from mainspring.mailbox.postgres import listener as postgres_listener
from mainspring.mailbox.redis import listener as redis_listener
from mainspring.mailbox.redis.mailbox import RedisMailbox
from postgres_support import moved
from silent_line import Line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
BOUND = 10.0


class Watched:
    """A loop, and how long after ``since`` it was first seen not ready, and heard to say so."""

    def __init__(self, loop: MainLoop, caplog: pytest.LogCaptureFixture) -> None:
        self.loop = loop
        self.not_ready = self.said = float("inf")
        self._caplog = caplog

    async def watch(self, since: float) -> None:
        while max(self.not_ready, self.said) == float("inf"):
            await anyio.sleep(0.02)
            passed = anyio.current_time() - since
            if self.loop.trouble is not None:
                self.not_ready = min(self.not_ready, passed)
            if f"{self.loop.name}: the mailbox cannot be reached" in self._caplog.text:
                self.said = min(self.said, passed)


@asynccontextmanager
async def loops(url: str, prefix: str, options: dict[str, Any]) -> AsyncIterator[list[MainLoop]]:
    """Loops on mailboxes of their own: one that is idle, one with all slots busy, one that claims and settles all the time."""
    kind = url.partition(":")[0]

    async def hold(body: int) -> None:
        await anyio.sleep(60)

    async def pass_by(body: int) -> None: ...

    def box(name: str, **apart: Any) -> Any:
        return open_mailbox(url, name=f"{prefix}{name}", body=int, **options, **apart)

    # The busy one has connections of its own: no call of the others tells it.
    apart = {"postgresql": {"application_name": "busy"}, "redis": {}, "nats": {}}[kind]
    made = [
        MainLoop(box("idle"), pass_by, name=f"{kind}-idle"),
        MainLoop(box("busy", **apart), hold, concurrency=1, name=f"{kind}-busy"),
        MainLoop(box("working"), pass_by, concurrency=1, name=f"{kind}-working"),
    ]

    async def feed(mailbox: Any) -> None:
        while True:
            try:
                await mailbox.send(1)
            except MailboxConnectionError:
                return
            await anyio.sleep(0.01)

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(LoopGroup(made, guardian=False))
        await made[1].mailbox.send(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed, made[2].mailbox)
            await anyio.sleep(1)
            yield made
            tasks.cancel_scope.cancel()
            for loop in made:
                loop.cancel_work()


async def test_a_loop_with_defaults_tells_of_a_silent_server_within_ten_seconds(
    request: pytest.FixtureRequest, anyio_backend_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = ["redis"] if anyio_backend_name == "trio" else ["redis", "postgres", "nats"]
    caplog.set_level(logging.INFO, "mainspring")
    prefix = f"silent-{random.token(48)}-"
    line = {kind: Line(request.getfixturevalue(f"{kind}_url")) for kind in kinds}
    watched: list[Watched] = []
    async with anyio.create_task_group() as serving, AsyncExitStack() as stack:
        for kind in kinds:
            options = {"schema": request.getfixturevalue("place").schema} if kind == "postgres" else {}
            way = moved(request.getfixturevalue(f"{kind}_url"), await serving.start(line[kind].listen))
            made = await stack.enter_async_context(loops(way, prefix, options))
            watched += [Watched(loop, caplog) for loop in made]
        since = anyio.current_time()
        for one in line.values():
            one.silent = True
        with anyio.move_on_after(20):
            async with anyio.create_task_group() as watching:
                for each in watched:
                    watching.start_soon(each.watch, since)
        for one in line.values():
            one.silent = False
        assert all(max(each.said, each.not_ready) < BOUND for each in watched), {
            each.loop.name: (each.said, each.not_ready) for each in watched
        }
        with anyio.fail_after(30):  # and of its return
            while any(each.loop.trouble for each in watched):
                await anyio.sleep(0.05)
        await stack.aclose()
        await anyio.sleep(0.2)  # what was still being accepted has its task by then, which closes it
        serving.cancel_scope.cancel()
    if "nats" in kinds:
        await nats_support.remove(request.getfixturevalue("nats_url"), nats_support.encoded(prefix))
    redis_support.Place(request.getfixturevalue("redis_url")).clean(prefix)


def test_with_defaults_the_bound_holds_whenever_the_silence_begins() -> None:
    """As above for the worst instant, by the defaults themselves."""
    redis_timeout = signature(RedisMailbox).parameters["timeout"].default
    assert (redis_listener.PING_SHARE + redis_listener.PONG_SHARE) * SILENCE + redis_timeout <= 9
    look = postgres_listener.POLL_INTERVAL + (2 * postgres_connection.WATCH + postgres_connection.ANSWER) * SILENCE
    listener = (postgres_listener.QUIET + postgres_listener.ANSWER + postgres_connection.ANSWER) * SILENCE
    assert max(look, listener) <= 9
    assert 3 * nats_client.PING_SHARE * SILENCE <= 9


@pytest.mark.parametrize("fault", ["cut", "short silence"])
@pytest.mark.parametrize("kind", ["redis", "postgres"])
async def test_a_hiccup_is_not_told_of(
    kind: str, fault: str, request: pytest.FixtureRequest, anyio_backend_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only lasting silence fails the receives that wait: of another fault the next call may know nothing."""
    if (kind, anyio_backend_name) == ("postgres", "trio"):
        pytest.skip("its driver does not run there")
    caplog.set_level(logging.INFO, "mainspring")
    url = request.getfixturevalue(f"{kind}_url")
    options = {"schema": request.getfixturevalue("place").schema} if kind == "postgres" else {}
    line, name = Line(url), f"cut-{random.token(48)}"
    handled = anyio.Event()

    async def handle(body: int) -> None:
        handled.set()

    async with anyio.create_task_group() as serving:
        mailbox = open_mailbox(moved(url, await serving.start(line.listen)), name=name, body=int, **options)
        async with LoopGroup([MainLoop(mailbox, handle)], guardian=False):
            await anyio.sleep(0.5)
            if fault == "cut":
                line.cut()
            line.silent = fault == "short silence"
            await anyio.sleep(3)
            line.silent = False
            await mailbox.send(1)
            with anyio.fail_after(5):
                await handled.wait()
        serving.cancel_scope.cancel()
    assert "cannot be reached" not in caplog.text
    if kind == "redis":
        redis_support.Place(url).clean(name)
