"""Names are looked up, and connections made, while all threads of the event loop are the user's."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.abc import SocketAttribute

from mainspring import open_mailbox
from mainspring.core import random
from mainspring.core.process import async_library
from mainspring.errors import MailboxConnectionError
from mainspring.runtime.resolver import connect_tcp, resolve
from mainspring.testing import run_virtual
from postgres_support import moved

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from anyio.abc import SocketStream

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def _no_thread_left() -> AsyncIterator[None]:
    """Occupy every thread of the default executor, and of anyio's and trio's default limiter, inside the block."""
    go_on = threading.Event()
    limiters = [anyio.to_thread.current_default_thread_limiter()]
    executor: list[asyncio.Future[bool]] = []
    try:
        for limiter in limiters:
            limiter.total_tokens, before = 1, limiter.total_tokens
        if async_library() == "asyncio":
            loop = asyncio.get_running_loop()
            loop.set_default_executor(_one_thread())
            executor = [loop.run_in_executor(None, go_on.wait) for _ in range(2)]
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, go_on.wait)
            await anyio.sleep(0.01)
            try:
                yield
            finally:
                go_on.set()
    finally:
        go_on.set()
        limiters[0].total_tokens = before
        if executor:
            await asyncio.gather(*executor)


def _one_thread() -> Any:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1)


async def test_a_name_is_looked_up_and_connected_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with _no_thread_left():
            with anyio.fail_after(10):
                assert set(await resolve("localhost")) <= {"127.0.0.1", "::1"}
                stream = await connect_tcp("localhost", server.getsockname()[1])  # also where ::1 comes first
                await stream.aclose()


async def test_what_is_no_host_or_takes_no_connection_is_an_error_of_the_system() -> None:
    assert await resolve("::1") == ["::1"]
    for name in ("no-such-host.invalid", "." * 70, "x" * 70):
        with pytest.raises(OSError):  # noqa: PT011 - each system has its own words
            await resolve(name)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        await connect_tcp("127.0.0.1", port)


async def test_a_caller_that_is_cancelled_leaves_no_connection_behind() -> None:
    """Wherever that meets it: also just as the connection is made. The server sees the end of each."""
    begun = ended = made = 0

    async def serve(stream: SocketStream) -> None:
        nonlocal begun, ended
        begun += 1
        async with stream:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        ended += 1

    async def cancel(scope: anyio.CancelScope, steps: int) -> None:
        for _ in range(steps):
            await anyio.sleep(0)
        scope.cancel()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(SocketAttribute.local_port)
        for steps in range(60):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as canceller:
                    canceller.start_soon(cancel, scope, steps)
                    stream = await connect_tcp("127.0.0.1", port)
                    made += 1
                    await stream.aclose()
        gc.collect()  # what was left behind is told of, as a ResourceWarning
        with anyio.fail_after(20):
            while not (made and begun >= made and ended == begun):
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()


def test_virtual_time_does_not_pass_a_look_up() -> None:
    async def main() -> None:
        with anyio.fail_after(1):
            assert await resolve("localhost")

    run_virtual(main)


@pytest.mark.slow
@pytest.mark.loops("asyncio")
@pytest.mark.parametrize("kind", ["nats", "redis", "postgres"])
async def test_a_mailbox_connects_to_a_name_while_no_thread_is_free(
    kind: str, request: pytest.FixtureRequest, anyio_backend: str
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    options: dict[str, Any] = {"schema": request.getfixturevalue("schema")} if kind == "postgres" else {}
    ports = {"nats": 4222, "redis": 6379, "postgres": 5432}
    named = moved(url, _port_of(url, ports[kind])).replace("@127.0.0.1", "@localhost")
    async with _no_thread_left():
        with anyio.fail_after(10):
            async with open_mailbox(named, name=f"~{random.token(64)}", **options) as mailbox:
                await mailbox.send("x")
                (message,) = await mailbox.receive(wait_time_seconds=5)
                await message.acknowledge()
                await mailbox.backend.drop()


async def test_a_file_is_looked_at_while_no_thread_is_free(tmp_path: Path) -> None:
    async with _no_thread_left():
        with anyio.fail_after(10):
            assert not await open_mailbox(f"sqlite:///{tmp_path}/jobs.db").exists()


def _port_of(url: str, default: int) -> int:
    from urllib.parse import urlsplit

    return urlsplit(url).port or default


@pytest.fixture
def schema(postgres_url: str) -> Any:
    from postgres_support import drop_schema, new_schema

    made = new_schema()
    yield made
    drop_schema(postgres_url, made)


@pytest.mark.parametrize("url", ["redis://localhost:1/0", "nats://localhost:1", "postgresql://localhost:1/jobs"])
async def test_a_process_without_another_thread_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    if not url.startswith("redis") and async_library() == "trio":
        pytest.skip("runs on asyncio only")

    def no_thread(*_: Any) -> threading.Thread:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("mainspring.runtime.resolver.OwnThread", no_thread)
    with pytest.raises(MailboxConnectionError, match="can't start new thread"):
        async with open_mailbox(f"{url}?name=jobs"):
            pass
