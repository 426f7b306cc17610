"""The app of an orchestrator: asked in virtual time, and over its real sockets."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from mainspring.core.state_machine import OrchestratorState
from mainspring.errors import ConfigError
from mainspring.events import ServiceOutput
from mainspring.http.orchestrator_app import orchestrator_app
from mainspring.runtime.scope import DaemonScope
from mainspring.services.recent_output import RecentOutput
from mainspring.testing import SimulatedProgram, run_virtual
from orchestrator_support import World, spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

Run = Callable[..., Any]


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run_virtual`` on each event loop."""
    return partial(run_virtual, backend=request.param)


@asynccontextmanager
async def client_of(
    world: World, output: RecentOutput | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app of an orchestrator that runs."""
    async with DaemonScope("servers") as scope, world.running() as orchestrator:
        app = orchestrator_app(orchestrator, scope, output=output or RecentOutput(), **options)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8080") as client:
            yield client


async def _probes(client: httpx.AsyncClient) -> tuple[int, int, int]:
    answers = [await client.get(f"/health/{probe}") for probe in ("live", "ready", "startup")]
    return answers[0].status_code, answers[1].status_code, answers[2].status_code


def test_it_is_ready_once_core_services_have_started_and_while_each_has_a_replica_that_works(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("store", replicas=2), spec("web", "store"), spec("mailer", core=False)],
            {"store": SimulatedProgram(ready_in=3), "mailer": SimulatedProgram(ready_in=1e9)},
        )
        async with client_of(world) as client:
            assert await _probes(client) == (200, 503, 503)
            await anyio.sleep(5)
            assert await _probes(client) == (200, 200, 200), "an optional service does not count"
            await client.post("/services/store/stop?replica=1")
            assert await _probes(client) == (200, 200, 200), "the other replica works"
            await client.post("/services/store/stop")
            assert await _probes(client) == (200, 503, 200)
            answer = (await client.get("/health/ready")).json()
            assert answer["reasons"] == ["no replica of service 'store' works", "no replica of service 'web' works"]
            assert [(each["name"], each["state"], each["ready"]) for each in answer["services"]][:2] == [
                ("store", "stopped", False),
                ("web", "stopped", False),
            ]
            await client.post("/drain")
            answer = (await client.get("/health/ready")).json()
            assert answer["reasons"] == ["it shuts down: drain requested over HTTP"]

    run(main)


def test_a_service_that_has_done_its_work_is_ready_and_one_that_was_given_up_is_not(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("migrate", restart="transient"), spec("web"), spec("mailer", core=False)],
            {"migrate": SimulatedProgram(lives=2), "mailer": SimulatedProgram(lives=0.1, returncode=3)},
        )
        async with client_of(world) as client:
            await anyio.sleep(300)
            services = {each["name"]: each for each in (await client.get("/status")).json()["services"]}
            assert (services["migrate"]["state"], services["mailer"]["failed"]) == ("stopped", True)
            answer = (await client.get("/health/ready")).json()
            ready = {each["name"]: each["ready"] for each in answer["services"]}
            assert (answer["status"], ready) == ("ok", {"migrate": True, "web": True, "mailer": False})

    run(main)


def test_the_status_is_the_tree(run: Run) -> None:
    async def main() -> None:
        async with client_of(World([spec("store"), spec("web", "store", replicas=2)])) as client:
            await anyio.sleep(1)
            status = (await client.get("/status")).json()
            assert (status["kind"], status["name"], status["state"]) == ("orchestrator", "mainspring", "running")
            assert (status["ready"], status["reasons"]) == (True, [])
            web = status["services"][1]
            assert (web["name"], web["depends_on"], web["state"]) == ("web", ["store"], "running")
            assert [replica["number"] for replica in web["replicas"]] == [1, 2]
            assert all(replica["pid"] and replica["restarts"] == 0 for replica in web["replicas"])

    run(main)


def test_a_restart_is_answered_when_it_is_done_or_its_wait_is_over_and_goes_on(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web", replicas=2)], {"web": SimulatedProgram(ready_in=8)})
        async with client_of(world) as client:
            await anyio.sleep(20)
            begun = anyio.current_time()
            answer = await client.post("/services/web/restart")
            assert (answer.status_code, answer.json()["status"]) == (202, "restart is under way")
            assert anyio.current_time() == begun + 10
            assert len(world.spawner.of("web")) == 4
            answer = await client.post("/services/web/restart?wait=60")
            assert (answer.status_code, answer.json()["status"]) == (200, "restarted")
            assert anyio.current_time() == begun + 32, "after the one before it: each took 16 s"
            answer = await client.post("/services/web/restart?replica=2&wait=60")
            assert (answer.status_code, len(world.spawner.of("web"))) == (200, 7)

    run(main)


def test_a_restart_of_all_goes_through_the_services_in_their_order_and_leaves_the_stopped_ones(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web", "store"), spec("store"), spec("other")], {"store": SimulatedProgram(ready_in=2)})
        async with client_of(world) as client:
            await anyio.sleep(5)
            await client.post("/services/other/stop")
            assert (await client.post("/restart?wait=60")).status_code == 200
            assert (world.began("store"), world.began("web"), world.began("other")) == ([0, 5], [2, 7], [0])

    run(main)


def test_what_cannot_be_done_says_why(run: Run) -> None:
    async def main() -> None:
        world = World(
            [spec("web"), spec("bad", core=False)], {"bad": SimulatedProgram(ready_in=None, lives=0.1, returncode=3)}
        )
        async with client_of(world) as client:
            await anyio.sleep(100)
            for path, status, text in [
                ("/services/store/restart", 404, "'store' is no service of 'mainspring'; there are: web, bad"),
                ("/services/web/stop?replica=7", 404, "service 'web' has replicas 1 to 1, and none 7"),
                ("/services/bad/start?wait=900", 409, "service 'bad.1' does not run: "),
                ("/services/web/restart?wait=soon", 400, "wait must be a number from 0 to 86400, not 'soon'"),
                ("/services/web/restart?replica=-1", 400, "replica must be a whole number from 0 to 100000, not '-1'"),
                ("/services/web/restart?replica=1.5", 400, "replica must be a whole number"),
            ]:
                answer = await client.post(path)
                assert (answer.status_code, answer.text.startswith(text)) == (status, True), answer.text
            await client.post("/drain")
            answer = await client.post("/services/web/restart")
            assert (answer.status_code, answer.text) == (
                409,
                "orchestrator 'mainspring' takes no orders: it is shutting down\n",
            )

    run(main)


def test_acts_and_output_need_the_token_where_others_reach_the_server(run: Run) -> None:
    async def main() -> None:
        async with client_of(World([spec("web")]), admin_token="secret", loopback=False) as client:
            await anyio.sleep(1)
            token = {"authorization": "Bearer secret"}
            paths = [("POST", "/services/web/restart"), ("POST", "/restart"), ("POST", "/services/web/stop")]
            paths += [
                ("POST", "/services/web/start"),
                ("GET", "/logs"),
                ("GET", "/services/web/logs"),
                ("POST", "/drain"),
            ]
            for method, path in paths:
                assert (await client.request(method, path)).status_code == 401, path
            assert (await client.get("/status")).status_code == 200
            for method, path in paths:
                assert (await client.request(method, path, headers=token)).status_code in (200, 202), path

    run(main)


def test_logs_are_the_last_lines_of_a_replica_a_service_or_all(run: Run) -> None:
    async def main() -> None:
        output = RecentOutput()
        async with client_of(World([spec("web", replicas=2), spec("store")]), output) as client:
            for number in range(600):
                output.note(ServiceOutput("web", 1 + number % 2, "stdout", f"line {number}"))
            output.note(ServiceOutput("store", 1, "stderr", "x" * 70_000))
            output.note(ServiceOutput("store", 1, "stderr", "ä\x00"))

            async def lines(path: str) -> list[str]:
                answer = await client.get(path)
                assert answer.headers["content-type"] == "application/x-ndjson"
                return [json.loads(line)["line"] for line in answer.text.splitlines()]

            assert await lines("/services/web/logs?lines=3") == ["line 597", "line 598", "line 599"]
            assert await lines("/services/web/logs?lines=2&replica=1") == ["line 596", "line 598"]
            assert len(await lines("/services/web/logs?lines=10000")) == 600
            assert await lines("/services/store/logs") == ["ä\x00"], "what is too much is gone"
            assert await lines("/logs?lines=2") == ["line 599", "ä\x00"]
            assert await lines("/logs?lines=0") == []
            assert (await client.get("/services/nothing/logs")).status_code == 404
            assert (await client.get("/services/web/logs?replica=3&follow=1")).status_code == 404
            assert (await client.head("/logs?follow=1")).status_code == 200, "it ends"
            for _ in range(301):
                output.note(ServiceOutput("store", 1, "stdout", ""))
            assert len(await lines("/services/store/logs?lines=10000")) == 300

    run(main)


def test_a_reader_that_follows_gets_each_line_once_and_is_told_what_it_was_too_slow_for(run: Run) -> None:
    async def main() -> None:
        output = RecentOutput()
        output.note(ServiceOutput("web", 1, "stdout", "before"))
        read: list[tuple[int, list[str]]] = []

        async def follow(pause: float) -> None:
            async for lost, events in output.follow(10, "web"):
                read.append((lost, [event.line for event in events]))
                await anyio.sleep(pause)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, 1)
            await anyio.sleep(0.5)
            output.note(ServiceOutput("store", 1, "stdout", "of another service"))
            for number in range(1002):
                output.note(ServiceOutput("web", 1, "stdout", str(number)))
            await anyio.sleep(1)
            output.note(ServiceOutput("web", 2, "stdout", "last"))
            output.close()
        assert read[0] == (0, ["before"])
        assert (read[1][0], read[1][1][0], len(read[1][1])) == (2, "2", 1000)
        assert read[2:] == [(0, ["last"])]

    run(main)


def test_the_dashboard_reads_what_the_status_says_and_asks_for_routes_that_are_there(run: Run) -> None:
    async def main() -> None:
        async with client_of(World([spec("store"), spec("web", "store", replicas=2)])) as client:
            await anyio.sleep(1)
            status = (await client.get("/status")).json()
            page = (await client.get("/")).text
            script = page.partition("function treeOf(")[2]
            functions = dict(re.findall(r"^function (\w+)(.*?)^}$", script, re.DOTALL | re.MULTILINE))
            read = set(re.findall(r"\bstatus\.(\w+)", functions["showServices"] + functions["showOrchestrator"]))
            assert {"services", "state"} <= read <= set(status)
            service, replica = status["services"][1], status["services"][1]["replicas"][0]
            read = set(re.findall(r"\bservice\.(\w+)", script))
            assert {"name", "depends_on", "error"} <= read <= set(service), read - set(service)
            read = set(re.findall(r"\b(?:replica|each|one)\.(\w+)", functions["showRow"] + functions["newRow"]))
            assert {"number", "state", "error"} <= read <= set(replica), read - set(replica)
            verbs = re.findall(r'\["(\w+)", (?=["r])', functions["newRow"])
            acts = [f"/services/web/{verb}" for verb in verbs] + [
                f"/{path}" for path in re.findall(r'post\("(\w+)', script)
            ]
            assert acts == [
                "/services/web/start",
                "/services/web/restart",
                "/services/web/stop",
                "/restart",
                "/drain",
                "/drain",
            ]
            for act in acts:
                assert (await client.post(act)).status_code in (200, 202), act

    run(main)


def test_a_reader_that_is_stuck_holds_at_most_a_mebibyte_of_long_lines(run: Run) -> None:
    async def main() -> None:
        output = RecentOutput()
        output.note(ServiceOutput("web", 1, "stdout", "first"))
        follower = output.follow(1)
        async with aclosing(follower):
            assert len((await anext(follower))[1]) == 1
            for number in range(40):
                output.note(ServiceOutput("web", 1, "stdout", f"{number:05}".ljust(65_536)))
            lost, events = await anext(follower)
            assert (lost, [event.line.strip() for event in events]) == (24, [f"{n:05}" for n in range(24, 40)])

    run(main)


def test_an_act_that_the_shutdown_overtakes_says_so(run: Run) -> None:
    async def main() -> None:
        world = World([spec("web", replicas=2)], {"web": SimulatedProgram(ready_in=8)})
        async with client_of(world) as client, anyio.create_task_group() as tasks:
            await anyio.sleep(20)

            async def drain() -> None:
                await anyio.sleep(5)
                assert (await client.post("/drain")).status_code == 202

            tasks.start_soon(drain)
            answer = await client.post("/services/web/restart?wait=60")
            assert (answer.status_code, answer.text) == (409, "service 'web.1' does not run: it was told to stop\n")

    run(main)


@pytest.mark.anyio
async def test_the_control_socket_is_this_users_and_serves_until_all_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    world = World(
        [spec("web")],
        {"web": SimulatedProgram(stops_in=0.1)},
        control=path,
        health_port=0,
    )
    orchestrator = world.orchestrator
    assert orchestrator.health_url is None
    async with world.running():
        while orchestrator.state is not OrchestratorState.RUNNING:
            await anyio.sleep(0.01)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
            httpx.AsyncClient(base_url=str(orchestrator.health_url)) as other,
            client.stream("GET", "/logs?follow=1&lines=5") as following,
        ):
            orchestrator.dispatcher.dispatch(ServiceOutput("web", 1, "stdout", "hello"))
            lines = following.aiter_lines()
            assert json.loads(await anext(lines))["line"] == "hello"
            assert (await other.get("/health/ready")).status_code == 200
            assert (await client.post("/services/web/restart")).json()["status"] == "restarted"
            assert (await client.post("/drain")).status_code == 202
            assert (await other.get("/health/ready")).status_code == 503
            assert (await client.get("/status")).json()["state"] == "shutting down"
            assert [line async for line in lines] == [], "the stream ends with the orchestrator"
    assert not path.exists()
    assert orchestrator.report is not None
    assert orchestrator.report.clean


@pytest.mark.anyio
async def test_a_client_that_leaves_a_stream_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    world = World([spec("web")], control=path)
    async with world.running() as orchestrator:
        while not path.exists():
            await anyio.sleep(0.01)
        for number in range(3):
            async with await anyio.connect_unix(path) as client:
                await client.send(b"GET /services/web/logs?follow=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
                orchestrator.dispatcher.dispatch(ServiceOutput("web", 1, "stdout", f"hello {number}"))
                received = b""
                while f"hello {number}".encode() not in received:
                    received += await client.receive()


@pytest.mark.anyio
async def test_what_was_asked_for_goes_on_when_the_client_leaves(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    world = World([spec("web", replicas=2)], {"web": SimulatedProgram(ready_in=0.05)}, control=path)
    async with world.running() as orchestrator:
        while orchestrator.state is not OrchestratorState.RUNNING:
            await anyio.sleep(0.01)
        async with await anyio.connect_unix(path) as client:
            await client.send(b"POST /restart HTTP/1.1\r\nhost: localhost\r\n\r\n")
            while len(world.spawner.of("web")) == 2:
                await anyio.sleep(0.01)
        with anyio.move_on_after(5):
            while len(world.spawner.of("web")) < 4:
                await anyio.sleep(0.01)
        assert len(world.spawner.of("web")) == 4


@pytest.mark.anyio
async def test_an_address_that_cannot_be_used_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for settings, text in [
        ({"control": tmp_path / "file"}, "the file exists and is no socket"),
        ({"control": tmp_path / "missing" / "control.sock"}, "a directory that exists"),
        ({"control": tmp_path / ("x" * 120)}, "a path of at most 107 bytes"),
        ({"health_port": 0, "health_host": "no.such.host.invalid"}, "health_host 'no.such.host.invalid'"),
    ]:
        world = World([spec("web")], **settings)
        with pytest.raises(ConfigError, match=text):
            await world.run()
        assert not world.spawner.records
    with pytest.raises(ConfigError, match="health_port must be 0 to 65535, or None, not 70000"):
        World([spec("web")], health_port=70_000)


@pytest.mark.anyio
async def test_the_output_of_services_that_reloads_take_away_is_not_kept_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    world = World([spec("keep"), spec("old")], control=path)
    async with world.running() as orchestrator:
        while orchestrator.state is not OrchestratorState.RUNNING:
            await anyio.sleep(0.01)
        for service in ("old", "keep"):
            orchestrator.dispatcher.dispatch(ServiceOutput(service, 1, "stdout", f"of {service}"))
        await orchestrator.reload([spec("keep"), spec("new")])
        orchestrator.dispatcher.dispatch(ServiceOutput("new", 1, "stdout", "of new"))
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.get("/logs")
        assert [json.loads(line)["line"] for line in answer.text.splitlines()] == ["of keep", "of new"]
