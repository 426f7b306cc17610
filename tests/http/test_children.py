"""What an orchestrator asks of the servers of its replicas, and how that is shown."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mainspring.core.state_machine import OrchestratorState
from mainspring.http import children as children_module
from mainspring.http.children import AGENT, Children
from mainspring.http.client import HttpAnswerError, Origin, get
from mainspring.services.orchestrator import Orchestrator
from mainspring.services.spawner import ProcessSpawner
from mainspring.services.spec import HttpProbe, Lifecycle, ServiceSpec, StartupSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from anyio.abc import SocketStream

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]


def answer(body: bytes, content_type: str = "application/json", status: int = 200) -> bytes:
    head = f"HTTP/1.1 {status} So\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Server:
    """Answers each request with the bytes for its path, in pieces; without any, never."""

    def __init__(self, **answers: bytes) -> None:
        self.answers = answers
        self.requests: list[bytes] = []
        self.open = self.most_open = 0

    async def serve(self, stream: SocketStream) -> None:
        async with stream:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            request = await stream.receive()
            self.requests.append(request)
            said = self.answers.get(request.split()[1].decode().strip("/"))
            try:
                if said is None:
                    await stream.receive()  # until it is hung up on
                    return
                await stream.send(said[:30])
                await anyio.sleep(0)
                await stream.send(said[30:])
            except (anyio.BrokenResourceError, anyio.EndOfStream):
                pass
            finally:
                self.open -= 1


@asynccontextmanager
async def serving(path: Path, **answers: bytes) -> AsyncIterator[tuple[Server, Origin]]:
    server = Server(**answers)
    async with await anyio.create_unix_listener(path) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, server.serve)
        yield server, Origin("localhost", unix=str(path))
        tasks.cancel_scope.cancel()


# ----------------------------------------------------------------------------------------------------------------- client


async def test_a_get_returns_status_headers_and_body(tmp_path: Path) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Kind: a\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    until_end = b"HTTP/1.1 404 No\r\n\r\nuntil the end"
    async with serving(tmp_path / "a", chunked=chunked, end=until_end) as (_, origin):
        said = await get(origin, "/chunked", agent="test", limit=5)
        assert (said.status, said.headers["x-kind"], said.body) == (200, "a", b"abcde")
        said = await get(origin, "/end", agent="test", limit=100)
        assert (said.status, said.body) == (404, b"until the end")


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (answer(b"x" * 11), "its answer is longer than 10 bytes"),
        (answer(b"x" * 9)[:-1], "it does not answer in HTTP"),
        (b"", "the connection was closed without an answer"),
    ],
    ids=["long", "cut off", "none"],
)
async def test_an_answer_that_cannot_be_taken(tmp_path: Path, said: bytes, error: str) -> None:
    async with serving(tmp_path / "a", x=said) as (_, origin):
        with pytest.raises(HttpAnswerError, match=error):
            await get(origin, "/x", agent="test", limit=10)


# --------------------------------------------------------------------------------------------------------------- children


async def test_statuses_are_those_that_are_json_objects(tmp_path: Path) -> None:
    said = {
        "a": answer(b'{"kind": "group", "age": 0.12345, "odd": NaN}'),
        "b": answer(b"[1]"),
        "c": answer(b"<html>"),
        "d": answer(b'{"status": "no"}', status=404),
        "e": answer(b"[" * 50_000),
        "f": answer(b'{"odd": 1e999}'),
    }
    found = {}
    for name, body in said.items():
        async with serving(tmp_path / name, status=body) as (server, origin):
            found |= await Children().statuses({(name, 1): origin})
        assert b"Accept: application/json\r\n" in server.requests[0]
    assert found == {("a", 1): {"kind": "group", "age": 0.123, "odd": None}, ("f", 1): {"odd": None}}


async def test_metrics_are_those_in_the_text_format(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "a", metrics=answer(b"a 1\n", "text/plain; version=0.0.4")) as (_, a),
        serving(tmp_path / "b", metrics=answer(b"<html>", "text/html")) as (_, b),
    ):
        found = await Children().metrics({("a", 1): a, ("b", 2): b})
    assert [tuple(each) for each in found] == [("a", 1, "a 1\n")]


async def test_one_that_hangs_holds_up_no_other_and_is_named_once(
    tmp_path: Path, virtual_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    children = Children()
    async with serving(tmp_path / "a", status=answer(b"{}")) as (_, good), serving(tmp_path / "b") as (_, hangs):
        servers = {("hangs", 1): hangs, ("gone", 1): Origin("localhost", unix=str(tmp_path / "c")), ("good", 1): good}
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                began = anyio.current_time()
                assert await children.statuses(servers) == {("good", 1): {}}
                assert anyio.current_time() - began <= children_module.ASK_WITHIN + 0.5
    lines = sorted(record.getMessage() for record in caplog.records)
    assert len(lines) == 2
    assert lines[0].startswith("replica 1 of service 'gone' does not answer at /status: FileNotFoundError")
    assert lines[1] == "replica 1 of service 'hangs' does not answer at /status: no answer within 2 s"


async def test_many_that_hang_have_one_deadline_and_are_asked_a_few_at_once(tmp_path: Path, virtual_clock: Any) -> None:
    async with serving(tmp_path / "a") as (server, origin):
        began = anyio.current_time()
        servers = {("many", number): origin for number in range(children_module.AT_ONCE * 4)}
        assert await Children().metrics(servers) == []
        assert anyio.current_time() - began <= children_module.ASK_ALL_WITHIN + 0.5
        assert server.most_open <= children_module.AT_ONCE


# ------------------------------------------------------------------------------------------------- a real orchestrator

CHILD = """
import os
from http.server import BaseHTTPRequestHandler
from socketserver import UnixStreamServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        kind = "application/json" if self.path == "/status" else "text/plain; version=0.0.4"
        jobs = f'# TYPE jobs_total counter\\njobs_total{{kind="a"}} {os.environ["MAINSPRING_REPLICA"]}\\n'
        body = ('{"kind": "group"}' if self.path == "/status" else jobs).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def address_string(self): return ""
    def log_message(self, *_): pass
UnixStreamServer(os.environ["MAINSPRING_SOCKET"], Handler).serve_forever()
"""


@pytest.mark.slow
async def test_the_status_and_the_metrics_of_real_replicas_are_shown(tmp_path: Path) -> None:
    lifecycle = Lifecycle(startup=StartupSettings(health_check_interval=0.05))
    services = [
        ServiceSpec(
            name="web",
            command=(sys.executable, "-Sc", CHILD),
            replicas=2,
            probe=HttpProbe("unix:{socket}/health"),
            lifecycle=lifecycle,
        ),
        ServiceSpec(name="plain", command=("sleep", "1000")),
    ]
    path = tmp_path / "control.sock"
    orchestrator = Orchestrator(services, spawner=ProcessSpawner(), control=path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: orchestrator.run(install_signals=False))
        with anyio.fail_after(20):
            while orchestrator.state is not OrchestratorState.RUNNING:
                await anyio.sleep(0.02)
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=20) as client:
            status = (await client.get("/status")).json()
            web, plain = (service["replicas"] for service in status["services"])
            assert [replica["child"] for replica in (*web, *plain)] == [{"kind": "group"}, {"kind": "group"}, None]
            assert all(replica["usage"]["memory_bytes"] > 2**16 for replica in (*web, *plain))
            assert [replica["usage"]["processes"] for replica in plain] == [1]
            text = (await client.get("/metrics")).text
            families = {family.name: family for family in text_string_to_metric_families(text)}
            jobs = {sample.labels["replica"]: sample.value for sample in families["jobs"].samples}
            assert jobs == {"1": 1, "2": 2}
            memory = {
                (sample.labels["service"], sample.labels["replica"])
                for sample in families["mainspring_service_memory_bytes"].samples
            }
            assert memory == {("web", "1"), ("web", "2"), ("plain", "1")}
            assert families["mainspring_service_probes"].samples[0].value >= 1
            asked_in_a_circle = await client.get("/metrics", headers={"user-agent": AGENT})
            assert "mainspring_service_state" in asked_in_a_circle.text
            assert "jobs_total" not in asked_in_a_circle.text
            assert json.loads((await client.get("/status", headers={"user-agent": AGENT})).text)["services"]
        orchestrator.request_shutdown("end of the test")


async def test_a_page_that_a_replica_does_not_have_is_not_asked_for_again_at_once(tmp_path: Path) -> None:
    pages = {"status": answer(b"no such page", "text/plain", 404), "metrics": answer(b"jobs 1\n", "text/plain")}
    async with serving(tmp_path / "a.sock", **pages) as (server, origin):
        children = Children()
        for _ in range(3):
            assert await children.statuses({("a", 1): origin}) == {}
            assert len(await children.metrics({("a", 1): origin})) == 1
        asked = [request.split()[1] for request in server.requests]
        assert (asked.count(b"/status"), asked.count(b"/metrics")) == (1, 3)
