"""The health server of a real group: what it says from the start to the end of a run."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from mainspring import InMemoryMailbox, LoopGroup, MainLoop
from mainspring.errors import ConfigError
from mainspring.events import CalibrationWarning
from mainspring.http.server import bind

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]


async def until(client: httpx.AsyncClient, path: str, status: int) -> httpx.Response:
    while True:
        response = await client.get(path)
        if response.status_code == status:
            return response
        await anyio.sleep(0.005)


@pytest.mark.slow
async def test_from_work_through_a_drain_to_the_end() -> None:
    hold, seen = anyio.Event(), anyio.Event()

    async def handle(job: str) -> None:
        if job == "slow":
            seen.set()
            await hold.wait()

    mailbox: InMemoryMailbox[str, None] = InMemoryMailbox("jobs")
    group = LoopGroup(
        [MainLoop(mailbox, handle, name="indexer", concurrency=4)],
        name="shop",
        health_port=0,
        checks={"disk": lambda: True},
        on_crash="report",
    )
    with anyio.fail_after(30):
        async with group:
            assert group.health_url is not None
            async with httpx.AsyncClient(base_url=group.health_url) as client:
                assert (await client.get("/health/startup")).status_code == 200
                ready = await client.get("/health/ready")
                assert ready.status_code == 200, ready.text
                assert [(loop["name"], loop["state"]) for loop in ready.json()["loops"]] == [("indexer", "running")]
                assert ready.json()["checks"] == {"disk": None}
                await mailbox.send_many(["quick", "slow"])
                await seen.wait()
                tree = (await client.get("/status")).json()
                assert tree["loops"][0]["in_flight"] == 1
                assert tree["mailboxes"][0]["counts"]["in_flight"] == 1
                text = (await client.get("/metrics")).text
                assert 'mainspring_messages_total{loop="indexer",outcome="acknowledged"} 1.0' in text
                assert 'mainspring_mailbox_depth{mailbox="jobs",state="in_flight"} 1.0' in text

                assert (await client.post("/drain")).status_code == 202
                reasons = (await until(client, "/health/ready", 503)).json()["reasons"]
                assert reasons[0] == "shutting down: drain requested over HTTP"
                live = await client.get("/health/live")
                assert live.status_code == 200
                assert live.json()["loops"][0]["state"] == "stopping"
                assert (
                    'mainspring_loop_state{loop="indexer",state="stopping"} 1.0' in (await client.get("/metrics")).text
                )
                assert 'mainspring_shutdown_seconds{phase="finish"}' in (await client.get("/metrics")).text
                assert (await client.get("/status")).json()["shutdown_reason"] == "drain requested over HTTP"
                hold.set()
    assert group.report is not None
    assert group.report.clean
    assert group.health_url is None


async def test_a_busy_port_keeps_the_group_from_starting() -> None:
    async def handle(job: str) -> None:
        raise AssertionError(job)

    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        group = LoopGroup([MainLoop(InMemoryMailbox("jobs"), handle)], health_port=port)
        with pytest.raises(ConfigError, match=f"health_port {port} on 127.0.0.1 is in use"):
            async with group:
                raise AssertionError("it started")


async def test_a_slow_look_up_of_the_host_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    turned, waited, real = threading.Event(), [], socket.getaddrinfo

    def slow(host: Any, *args: Any, **options: Any) -> Any:
        if host == "slow.example":
            waited.append(turned.wait(5))
            host = "127.0.0.1"
        return real(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    group = LoopGroup(
        [MainLoop(InMemoryMailbox("jobs", body=str), lambda job: None)], health_host="slow.example", health_port=0
    )

    async def turn() -> None:
        await anyio.sleep(0.01)
        turned.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turn)
        async with group:
            assert group.health_url is not None
            assert waited == [True]


async def test_a_host_that_does_not_exist_keeps_the_group_from_starting() -> None:
    loop = MainLoop(InMemoryMailbox("jobs", body=str), lambda job: None)
    with pytest.raises(ConfigError, match=r"health_host 'no-such-host\.invalid' cannot be resolved"):
        async with LoopGroup([loop], health_host="no-such-host.invalid", health_port=0):
            raise AssertionError("it started")


@pytest.mark.parametrize(
    ("host", "inside", "warned"), [("127.0.0.1", True, True), ("127.0.0.1", False, False), ("0.0.0.0", True, False)]
)
async def test_probes_that_a_kubelet_cannot_reach_are_warned_of(
    host: str, inside: bool, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if inside:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    group = LoopGroup([MainLoop(InMemoryMailbox("jobs", body=str), lambda job: None)], health_host=host, health_port=0)
    said: list[str] = []
    group.dispatcher.subscribe(CalibrationWarning, lambda event: said.append(event.text))
    async with group:
        pass
    about = [text for text in said if "health_host='0.0.0.0'" in text]
    assert len(about) == warned


SERVICE = """
import anyio, sys
from mainspring import InMemoryMailbox, LoopGroup, MainLoop

async def handle(job: str) -> None:
    pass

group = LoopGroup([MainLoop(InMemoryMailbox("jobs"), handle)], health_host="unix:" + sys.argv[1], health_port=0)
backend, uvloop = sys.argv[2:]
options = {"use_uvloop": True} if uvloop == "True" else {}
sys.exit(anyio.run(group.run, backend=backend, backend_options=options).exit_status)
"""


@pytest.mark.slow
async def test_sigterm_ends_a_real_process_with_its_server(tmp_path: Path, anyio_backend: object) -> None:
    backend, options = anyio_backend  # type: ignore[misc]
    path = tmp_path / "health.sock"
    arguments = [str(path), backend, str(options.get("use_uvloop", False))]
    async with await anyio.open_process([sys.executable, "-c", SERVICE, *arguments], stderr=subprocess.PIPE) as process:
        with anyio.fail_after(60):
            while not path.exists():
                assert process.returncode is None
                await anyio.sleep(0.01)
            async with httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://service"
            ) as client:
                await until(client, "/health/ready", 200)
                process.send_signal(signal.SIGTERM)  # with a keep-alive connection open
                assert await process.wait() == 0
            assert process.stderr is not None
            assert [chunk async for chunk in process.stderr] == []
    assert not path.exists()
