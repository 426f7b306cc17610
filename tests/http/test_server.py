"""The server over real sockets: starting, answering, and above all ending."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from trio.testing import MockClock

from http_fakes import FakeGroup
from mainspring.errors import ConfigError
from mainspring.http.app import health_app
from mainspring.http.server import HealthServer, bind, is_loopback, url
from mainspring.runtime.scope import DaemonScope
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from anyio.abc import ByteStream, TaskStatus
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]

AN_HOUR = 3600.0


class Slow:
    """An app with a request that ends when told to and a stream that never does."""

    def __init__(self) -> None:
        self.asked = anyio.Event()
        self.go = anyio.Event()
        self.app = Starlette(routes=[Route("/wait", self.wait), Route("/stream", self.stream)])

    async def wait(self, _: Request) -> PlainTextResponse:
        self.asked.set()
        await self.go.wait()
        return PlainTextResponse("done")

    async def stream(self, _: Request) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            while True:
                yield b"x"
                self.asked.set()
                await anyio.sleep(AN_HOUR)

        return StreamingResponse(chunks())


@asynccontextmanager
async def serving(
    app: Any, *, grace: float = AN_HOUR, host: str = "127.0.0.1", **settings: Any
) -> AsyncIterator[HealthServer]:
    """The app on a port that nobody has afterwards; the end of the block stops it, which must not take for ever."""
    server = HealthServer(app, bind(host, free_port()), grace=grace, **settings)
    with anyio.fail_after(20):
        async with DaemonScope("test", timeout=AN_HOUR) as scope:
            assert await scope.start(server.serve, name="health server", stop=server.stop) == server.url
            yield server
    assert all(report.ending == "finished" for report in scope.reports)  # it was not cancelled


async def connect(server: HealthServer) -> ByteStream:
    where = httpx.URL(server.url)
    assert where.port is not None
    return await anyio.connect_tcp(where.host, where.port)


@asynccontextmanager
async def asking(server: HealthServer, path: str | None) -> AsyncIterator[ByteStream]:
    """A connection on which ``path`` was asked for (None: nothing)."""
    async with await connect(server) as stream:
        if path is not None:
            await stream.send(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        yield stream


async def read_until(stream: ByteStream, end: bytes) -> bytes:
    got = b""
    while end not in got:
        got += await stream.receive()
    return got


async def read_all(stream: ByteStream) -> bytes:
    got = b""
    try:
        while True:
            got += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return got


async def assert_refuses(server: HealthServer) -> None:
    with pytest.raises(OSError, match=r".*"):
        await connect(server)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost", "0.0.0.0", "::"])
async def test_it_answers_while_it_runs_and_refuses_when_it_has_ended(host: str) -> None:
    async with serving(health_app(FakeGroup()), host=host) as server:
        address = httpx.URL(server.url).copy_with(host="::1" if ":" in host else "127.0.0.1")
        async with httpx.AsyncClient() as client:
            response = await client.get(address.join("/health/live"))
        assert response.status_code == 200
        assert response.headers.get_list("date") == [response.headers["date"]]
        assert "server" not in response.headers
    await assert_refuses(server)


async def test_both_families_where_the_host_is_all_of_them() -> None:
    async with serving(health_app(FakeGroup()), host="::") as server:
        port = httpx.URL(server.url).port
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/health/live")).status_code == 200


async def test_stopping_does_not_wait_for_an_idle_connection() -> None:
    async with serving(health_app(FakeGroup())) as server, asking(server, "/health/live") as stream:
        await read_until(stream, b"}")
        server.stop()
        assert b"HTTP/1.1" not in await read_all(stream)  # it is closed


async def test_stopping_does_not_wait_for_a_connection_that_never_asked() -> None:
    async with serving(health_app(FakeGroup())) as server, asking(server, None) as silent:
        async with asking(server, "/health/live") as later:
            await read_until(later, b"}")  # accepted in order: now the silent one is too
        server.stop()
        assert await read_all(silent) == b""


async def test_a_request_under_way_is_finished_and_no_new_one_taken() -> None:
    slow = Slow()
    async with serving(slow.app) as server, asking(server, "/wait") as stream:
        await slow.asked.wait()
        server.stop()
        await until_refusing(server)
        slow.go.set()
        assert (await read_all(stream)).endswith(b"done")  # and the connection is closed behind it


async def until_refusing(server: HealthServer) -> None:
    while True:
        try:
            stream = await connect(server)
        except OSError:
            return
        await stream.aclose()
        await anyio.sleep(0.001)


async def test_a_stream_without_an_end_is_cut_off_after_the_grace(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    async with serving(slow.app, grace=0.02) as server, asking(server, "/stream") as stream:
        await slow.asked.wait()
        server.stop()
        assert b"HTTP/1.1 200" in await read_all(stream)
    assert loud(caplog) == []


async def test_a_client_that_reads_nothing_of_a_long_answer_is_cut_off_after_the_grace() -> None:
    asked, left = anyio.Event(), anyio.Event()

    async def flood(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        asked.set()
        for _ in range(100):
            await send({"type": "http.response.body", "body": bytes(1_048_576), "more_body": True})

    async def leave(stream: ByteStream) -> None:
        await anyio.sleep(5)
        left.set()
        await stream.aclose()

    async with anyio.create_task_group() as tasks:
        async with serving(flood, grace=0.02) as server:
            stream = await connect(server)
            tasks.start_soon(leave, stream)
            await stream.send(b"GET /flood HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await asked.wait()
            await anyio.sleep(0.1)  # until the buffers are full
        tasks.cancel_scope.cancel()
    await stream.aclose()
    assert not left.is_set(), "it ended when the client had left"


def loud(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


CLOCK = MockClock()


@pytest.mark.parametrize("anyio_backend", [("trio", {"clock": CLOCK})], ids=["virtual"])
async def test_on_trio_too_the_grace_is_the_one_asked_for() -> None:
    slow = Slow()
    async with serving(slow.app, grace=0.25) as server, asking(server, "/stream") as stream:
        await slow.asked.wait()
        began = anyio.current_time()
        server.stop()
        CLOCK.autojump_threshold = 0.05
        await read_all(stream)
        assert anyio.current_time() - began == pytest.approx(0.25)
        CLOCK.autojump_threshold = math.inf


@pytest.mark.parametrize("path", ["/stream", "/wait", None])
async def test_cancelled_it_closes_every_socket(path: str | None, caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    server = HealthServer(slow.app, bind("127.0.0.1", free_port()), grace=AN_HOUR)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            await group.start(server.serve)
            idle = await group.start(hold, server, path)
            stream = await group.start(hold, server, path or "/stream")  # accepted in order: so the idle one is too
            await slow.asked.wait()
            group.cancel_scope.cancel()
        async with stream, idle:
            await read_all(stream)
            await read_all(idle)
        await assert_refuses(server)
    assert loud(caplog) == []


async def hold(server: HealthServer, path: str | None, *, task_status: TaskStatus[ByteStream]) -> None:
    stream = await connect(server)
    if path is not None:
        await stream.send(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    task_status.started(stream)


async def test_a_stop_before_the_start_is_remembered() -> None:
    server = HealthServer(health_app(FakeGroup()), bind("127.0.0.1", free_port()), grace=AN_HOUR)
    server.stop()
    with anyio.fail_after(20):
        await server.serve()
    await assert_refuses(server)


@pytest.mark.loops("asyncio")  # uvloop does not show its timers
async def test_while_nobody_asks_nothing_runs() -> None:
    server = HealthServer(health_app(FakeGroup()), bind("127.0.0.1", 0))
    async with DaemonScope("test") as scope:
        await scope.start(server.serve, stop=server.stop)
        await anyio.wait_all_tasks_blocked()
        assert asyncio.get_running_loop()._scheduled == []  # type: ignore[attr-defined]


async def test_signals_and_the_loggers_of_an_embedding_server_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    access = logging.getLogger("uvicorn.access")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    access.addHandler(handler)
    try:
        with caplog.at_level(logging.DEBUG):
            async with serving(health_app(FakeGroup())) as server, httpx.AsyncClient() as client:
                assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
                await client.get(server.url + "/health/live")
        assert access.handlers == [handler]
        assert records == []
    finally:
        access.removeHandler(handler)
    assert [record for record in caplog.records if record.name.startswith(("uvicorn", "anycorn"))] == []


async def test_bytes_that_are_no_request_get_a_400_and_harm_nobody() -> None:
    async with serving(health_app(FakeGroup())) as server:
        async with asking(server, None) as stream:
            await stream.send(b"\x16\x03\x01 this is TLS\r\n\r\n")
            assert b" 400 " in await read_all(stream)
        async with httpx.AsyncClient() as client:
            assert (await client.get(server.url + "/health/live")).status_code == 200


@pytest.mark.loops("trio")
async def test_on_trio_a_missing_anycorn_is_a_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anycorn.config", None)
    server = HealthServer(health_app(FakeGroup()), bind("127.0.0.1", free_port()))
    with pytest.raises(ConfigError, match=r"pip install 'mainspring\[trio\]'"):
        async with DaemonScope("test") as scope:
            await scope.start(server.serve, stop=server.stop)
    await assert_refuses(server)


# ---------------------------------------------------------------------------------------------------------- Unix sockets


async def test_a_unix_socket_serves_this_user_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "health.sock"
    async with serving(health_app(FakeGroup()), host=f"unix:{path}") as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert server.url == f"unix:{path}"
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path))) as client:
            assert (await client.get("http://service/health/ready")).status_code == 200
            assert (await client.post("http://service/drain")).status_code == 202
        with pytest.raises(ConfigError, match="in use by another program"):
            bind(f"unix:{path}", 0)
        server.stop()
        assert not path.exists()  # already: behind the last connection, a successor could have made its own


async def test_the_file_of_a_program_that_is_gone_is_replaced_and_a_successors_is_left(tmp_path: Path) -> None:
    path = tmp_path / "health.sock"
    bind(f"unix:{path}", 0).close()  # leaves its file behind, as a kill does
    assert path.exists()
    async with serving(health_app(FakeGroup()), host=f"unix:{path}"):
        path.unlink()
        successor = bind(f"unix:{path}", 0)
    assert path.exists()
    successor.close()


# --------------------------------------------------------------------------------------------------------------- binding


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", -1, "0 (any free one) to 65535"),
        ("127.0.0.1", 65_536, "0 (any free one) to 65535"),
        ("127.0.0.1", True, "0 (any free one) to 65535"),
        ("127.0.0.1", "8080", "0 (any free one) to 65535"),
        ("", 0, "127.0.0.1 for this machine only"),
        ("192.0.2.1", 0, "is not an address of this machine"),
        ("no-such-host.invalid", 0, "cannot be resolved"),
        ("two words", 0, "cannot be resolved"),
        ("x" * 70 + ".example", 0, "cannot be resolved"),
        ("unix:", 0, "names no path"),
        ("unix:/no/such/directory/s", 0, "choose a path of at most 107 bytes"),
        ("unix:/" + "x" * 200, 0, "choose a path of at most 107 bytes"),
        ("unix:/etc/hostname", 0, "is no socket"),
    ],
)
def test_what_cannot_be_bound_is_one_line_that_says_what_to_do(host: str, port: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind(host, port)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_busy_port_is_one_line() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"health_port {port} on 127.0.0.1 is in use by another program: choose"):
            bind("127.0.0.1", port)


def test_a_port_is_busy_too_where_both_would_share_it_until_they_listen() -> None:
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        first.listen()
        with pytest.raises(ConfigError, match="in use"):
            bind("127.0.0.1", first.getsockname()[1])


def test_a_port_that_needs_privileges_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigError, match=r"needs privileges .* choose one from 1024 up"):
        bind("127.0.0.1", 80)


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("::", False)])
def test_who_can_reach_it(host: str, loopback: bool) -> None:
    with bind(host, 0) as sock:
        assert is_loopback(sock) is loopback
        assert httpx.URL(url(sock)).port == sock.getsockname()[1]
        assert not os.get_inheritable(sock.fileno())


# ----------------------------------------------------------------------------------------------------------- import cost


def test_nothing_of_it_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, mainspring, mainspring.http.server, mainspring.http.depths;"
        "import mainspring.telemetry.status, mainspring.telemetry.logs;"
        "print(sorted({'starlette', 'uvicorn', 'anycorn', 'prometheus_client', 'h11'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
