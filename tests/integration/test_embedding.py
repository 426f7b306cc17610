"""A group inside a web app, over a real uvicorn, under Starlette's TestClient, and in a script's own block."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from mainspring import ConfigError, InMemoryMailbox, LoopGroup, MainLoop
from mainspring.events import GroupStateChanged
from mainspring.http.server import bind
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from ports import free_port
from support import FaultyMailbox, fail

pytestmark = pytest.mark.slow

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # newer ones would rather have httpx2
    from starlette.testclient import TestClient

HERE = Path(__file__).parent
LIMIT = 90.0  # what hangs must not hang the suite
APPS = pytest.mark.parametrize("app", ["starlette_app", "fastapi_app"])


@contextmanager
def uvicorn(app, path, *, on_crash="terminate"):
    """uvicorn as a program on a port that it is given open, so that nobody else can take it meanwhile."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", f"embedded_program:{app}", "--fd", str(listener.fileno())],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=HERE,
            pass_fds=[listener.fileno()],
            env={
                **os.environ,
                "MAILBOX": f"sqlite:///{path}?name=jobs",
                "ON_CRASH": on_crash,
                "HEALTH_PORT": str(free_port()),
            },
        )
        process.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    give_up = threading.Timer(LIMIT, process.kill)
    give_up.start()
    try:
        process.health = until(process, "health ").removeprefix("health ")
        yield process
    finally:
        give_up.cancel()
        process.kill()
        process.communicate()


def until(process, start):
    for line in process.stdout:
        if line.startswith(start):
            return line.strip()
    raise AssertionError(f"it ended before it said {start!r}: {process.stderr.read()}")


def ask(url):
    """A question of the server, which takes the first ones before it is wholly up."""
    return httpx.get(url, timeout=LIMIT)


async def counts(path):
    async with SQLiteMailbox(path, name="jobs") as mailbox:
        messages = await mailbox.receive(max_messages=10)
        return await mailbox.counts(), [message.attempt for message in messages]


@APPS
def test_sigterm_to_uvicorn_drains_the_group_and_ends_the_process(tmp_path, app):
    path = tmp_path / "jobs.db"
    with uvicorn(app, path) as process:
        assert ask(f"{process.health}/health/ready").status_code == 200
        assert ask(f"{process.url}/send?seconds=0.3").text == "sent"
        until(process, "begun")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT)
    assert "done" in out  # the work in hand was finished
    assert process.returncode in (0, -signal.SIGTERM)  # uvicorn ends itself by the signal that it got
    assert "Application shutdown complete" in err
    assert "Traceback" not in err
    assert anyio.run(counts, path)[0].settled == 1


@APPS
def test_work_that_does_not_end_goes_back_uncharged(tmp_path, app):
    path = tmp_path / "jobs.db"
    with uvicorn(app, path) as process:
        ask(f"{process.url}/send?seconds=600")
        until(process, "begun")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT)
    assert "Application shutdown complete" in err
    assert process.returncode in (0, -signal.SIGTERM)
    left, attempts = anyio.run(counts, path)
    assert (left.settled, attempts) == (0, [1])


@APPS
def test_a_crashed_loop_ends_the_server(tmp_path, app):
    with uvicorn(app, tmp_path / "jobs.db") as process:
        ask(f"{process.url}/crash")
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode in (3, -signal.SIGTERM), err  # uvicorn's own way of saying that its lifespan failed
    assert "MailboxClosedError: mailbox 'jobs' is closed" in err


def test_a_crashed_loop_that_is_only_reported_leaves_the_server_and_ends_its_health(tmp_path):
    with uvicorn("starlette_app", tmp_path / "jobs.db", on_crash="report") as process:
        ask(f"{process.url}/crash")
        give_up = time.monotonic() + LIMIT
        while True:
            assert time.monotonic() < give_up
            try:
                assert ask(f"{process.health}/health/ready").status_code in (200, 503)
            except httpx.TransportError:
                break  # the group is over, and its health server with it: not ready
            time.sleep(0.05)
        assert ask(f"{process.url}/crash").text == "crashing"  # still served
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT)
    assert "MailboxClosedError: mailbox 'jobs' is closed" in err


# ------------------------------------------------------------------------------------------------------------ TestClient


def app_with(group, mailbox):
    async def send(request):
        await mailbox.send(1)
        while (await mailbox.counts()).settled < 1:
            await anyio.sleep(0.001)
        return JSONResponse({"ready": group.status().ready})

    return Starlette(routes=[Route("/send", send)], lifespan=group.lifespan)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_under_the_test_client_the_lifespan_runs_off_the_main_thread(backend):
    threads = []

    async def handle(job: int) -> None:
        threads.append(threading.current_thread())

    mailbox = InMemoryMailbox()
    group = LoopGroup([MainLoop(mailbox, handle)])
    app = app_with(group, mailbox)
    for _ in range(2):  # and again, as test after test does
        with TestClient(app, backend=backend) as client:
            assert client.get("/send").json() == {"ready": True}
        assert group.report.exit_status == 0
        assert not group.running
    assert threads
    assert threading.main_thread() not in threads


def test_under_the_test_client_a_crash_does_not_end_the_tests_process():
    async def handle(job: int) -> None:
        pass

    mailbox = FaultyMailbox()
    mailbox.always("claim", fail(LookupError("a bug in the driver")))
    group = LoopGroup([MainLoop(mailbox, handle)])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # it would end this process
    with pytest.raises(LookupError, match="a bug in the driver"), TestClient(app_with(group, mailbox)):
        pass


# ------------------------------------------------------------------------------------------- the three event loops


@pytest.mark.anyio
async def test_the_health_server_answers_through_all_phases_and_is_stopped_last():
    asked = []

    async def handle(job: int) -> None:
        await anyio.sleep(600)

    mailbox = InMemoryMailbox()
    times = {"drain_delay": 0.2, "shutdown_timeout": 0.2, "cancel_grace": 1}
    group = LoopGroup([MainLoop(mailbox, handle)], health_port=free_port(), **times)
    phases = []
    group.dispatcher.subscribe(GroupStateChanged, lambda event: phases.append(str(event.new)))
    await mailbox.send(1)
    async with httpx.AsyncClient(timeout=LIMIT) as client:
        async with group:
            url = group.health_url
            assert (await client.get(f"{url}/health/ready")).status_code == 200
            assert (await client.get(f"{url}/health/startup")).status_code == 200
            group.request_shutdown("deploy")
            while group.running:
                try:
                    ready = await client.get(f"{url}/health/ready")
                    live = await client.get(f"{url}/health/live")
                except httpx.TransportError:
                    break
                asked.append((live.json()["state"], ready.status_code, live.status_code))
        with pytest.raises(httpx.TransportError):
            await client.get(f"{url}/health/live")
    assert {(ready, live) for _, ready, live in asked} == {(503, 200)}
    assert {"drain delay", "finish"} <= {state for state, *_ in asked}
    assert phases[-2:] == ["stop daemons", "stopped"]


@pytest.mark.anyio
@pytest.mark.parametrize("install_signals", [True, False])
async def test_a_busy_health_port_is_one_line(install_signals):
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]

        async def handle(job: int) -> None:
            raise AssertionError("nothing may start")

        mailbox = InMemoryMailbox()
        await mailbox.send(1)
        group = LoopGroup([MainLoop(mailbox, handle)], health_port=port)
        with pytest.raises(ConfigError, match=f"health_port {port} on 127.0.0.1 is in use") as caught:
            await group.run(install_signals=install_signals)
        assert "\n" not in str(caught.value)
        with pytest.raises(ConfigError, match="in use"):
            async with group:
                raise AssertionError("nothing may start")
        assert (await mailbox.counts()).pending == 1
        assert not group.running


def test_a_busy_health_port_is_one_line_and_status_1_at_the_command_line(tmp_path):
    (tmp_path / "service.py").write_text(
        "from mainspring import InMemoryMailbox, LoopGroup, MainLoop\n"
        "async def handle(job: int) -> None: ...\n"
        "group = LoopGroup([MainLoop(InMemoryMailbox(), handle)])\n"
    )
    with bind("127.0.0.1", 0) as taken:
        command = [
            sys.executable,
            "-m",
            "mainspring",
            "run",
            "service:group",
            "--health-port",
            str(taken.getsockname()[1]),
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "is in use by another program: choose another one" in line


@pytest.mark.anyio
async def test_a_block_in_a_script_works_and_ends():
    seen = []

    async def handle(job: int) -> None:
        seen.append(job)

    mailbox = InMemoryMailbox()
    async with LoopGroup([MainLoop(mailbox, handle)]) as group:
        await mailbox.send_many([1, 2, 3])
        while len(seen) < 3:
            await anyio.sleep(0.001)
    assert seen == [1, 2, 3]
    assert group.report.exit_status == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # it never took a signal
