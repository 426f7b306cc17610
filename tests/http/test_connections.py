"""Connections that ask nothing, half, or slowly: they neither keep a probe out nor use up the process's descriptors."""

from __future__ import annotations

import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from test_server import read_all, read_until, serving

from http_fakes import FakeGroup
from mainspring.http.app import health_app
from mainspring.http.connections import Connections, HttpConnection

if TYPE_CHECKING:
    from anyio.abc import SocketStream
    from starlette.requests import Request

pytestmark = pytest.mark.anyio

PROBE = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def connect(url: str, first: bytes = b"") -> SocketStream:
    stream = await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2]))
    if first:
        await stream.send(first)
    return stream


async def test_at_the_limit_the_connection_that_has_waited_longest_gives_way_and_a_probe_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(health_app(FakeGroup()), connections=10) as server:
        streams = [await connect(server.url, b"GET /health/li") for _ in range(30)]
        async with await connect(server.url, PROBE) as probe:
            assert b" 200 " in await read_until(probe, b"}")
        for stream in streams[:20]:
            assert await read_all(stream) == b""  # closed
        async with streams[-1] as youngest:  # still there: the rest of its head is all that it needs
            await youngest.send(b"ve HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in await read_until(youngest, b"}")
        for stream in streams:
            await stream.aclose()
    assert [record.getMessage() for record in caplog.records if "limit" in record.getMessage()] == [
        "the health server is at its limit of 10 connections: it closes those that ask nothing"
    ]


def test_there_are_never_more_than_the_limit_and_the_longest_waiting_gives_way() -> None:
    closed: list[int] = []
    connections = Connections(3)

    def opened(number: int) -> HttpConnection | None:
        return connections.open(partial(closed.append, number))

    def given(connection: HttpConnection | None) -> HttpConnection:
        assert connection is not None
        return connection

    held = [given(opened(number)) for number in range(5)][2:]
    assert (closed, len(connections)) == ([0, 1], 3)
    for connection in held:
        assert connections.begin(connection, "/health/live")
        assert len(connections) == 3
    assert opened(5) is None
    connections.end(held[1])
    connections.end(held[0])
    assert len(connections) == 3
    given(opened(6))
    given(opened(7))
    assert (closed, len(connections)) == ([0, 1, 3, 2], 3)
    for connection in held:
        connection.closed()
        connections.end(connection)  # its request ends after it
    assert len(connections) == 2


async def test_a_request_that_fails_gives_its_place_back() -> None:
    async def broken(scope: object, receive: object, send: object) -> None:
        raise LookupError

    connections = Connections(2)
    connection = connections.open(bool)
    assert connection is not None
    for _ in range(3):
        with pytest.raises(LookupError):
            await connection.counted(broken)({"path": "/status"}, None, None)  # type: ignore[arg-type]
    assert connections.give_way()
    assert len(connections) == 0


async def test_the_last_place_is_kept_for_probes() -> None:
    go, all_asked, asked = anyio.Event(), anyio.Event(), 0

    async def wait(_: Request) -> PlainTextResponse:
        nonlocal asked
        asked += 1
        if asked == 4:
            all_asked.set()
        await go.wait()
        return PlainTextResponse("done")

    async def live(_: Request) -> PlainTextResponse:
        return PlainTextResponse("alive")

    app = Starlette(routes=[Route("/wait", wait), Route("/health/live", live)])
    request = b"GET /wait HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with serving(app, connections=5) as server:
        busy = [await connect(server.url, request) for _ in range(4)]
        await all_asked.wait()
        async with await connect(server.url, request) as refused:
            assert b" 503 " in await read_until(refused, b"under way")
        async with await connect(server.url, PROBE) as probe:
            assert (await read_until(probe, b"alive")).endswith(b"alive")
        go.set()
        for stream in busy:
            await read_until(stream, b"done")
            await stream.aclose()


@pytest.mark.parametrize("before", [b"", b"GET /health/live HT", PROBE])
async def test_a_head_that_does_not_come_ends_the_connection(before: bytes) -> None:
    """Also where a byte comes now and then: each byte is no new time limit."""
    async with (
        serving(health_app(FakeGroup()), head_timeout=0.2) as server,
        await connect(server.url, before) as stream,
        anyio.create_task_group() as tasks,
    ):
        if before == PROBE:
            await read_until(stream, b"}")
        tasks.start_soon(trickle, stream)
        await read_all(stream)
        tasks.cancel_scope.cancel()


async def trickle(stream: SocketStream) -> None:
    try:
        while True:
            await anyio.sleep(0.05)
            await stream.send(b"G")
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return


STORM = """
import anyio, os, resource, sys
from http_fakes import FakeGroup
from mainspring.http.app import health_app
from mainspring.http.server import HealthServer, bind
from mainspring.runtime.scope import DaemonScope

async def main():
    server = HealthServer(health_app(FakeGroup()), bind("127.0.0.1", 0))
    async with DaemonScope("storm") as scope:
        await scope.start(server.serve, stop=server.stop)
        held = []
        if sys.argv[2] == "exhausted":  # by the handlers of the process
            try:
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                pass
        print(server.url, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        while held:
            os.close(held.pop())
        await anyio.to_thread.run_sync(sys.stdin.readline)
        server.stop()

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("descriptors", ["free", "exhausted"])
def test_a_storm_of_idle_connections_is_one_line_in_the_log(backend: str, descriptors: str) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", STORM, backend, descriptors],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    with program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        port = int(program.stdout.readline().rpartition(":")[2])
        held = []
        for _ in range(100):  # fewer than the kernel queues while none can be accepted
            connection = socket.create_connection(("127.0.0.1", port), timeout=20)
            held.append(connection)
            connection.sendall(b"GET /hea")
        program.stdin.write("\n")  # descriptors are free again
        program.stdin.flush()
        with socket.create_connection(("127.0.0.1", port), timeout=20) as probe:
            probe.sendall(PROBE)
            assert probe.recv(12) == b"HTTP/1.1 200"
        program.stdin.write("\n")
        program.stdin.close()
        errors = program.stderr.read()
        for connection in held:
            connection.close()
        assert program.wait(20) == 0
    assert len(errors.splitlines()) <= 2, errors
