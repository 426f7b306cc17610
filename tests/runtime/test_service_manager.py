"""What a service manager hears: real datagram sockets, and virtual time for the signs of life."""

from __future__ import annotations

import math
import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring import Context, InMemoryMailbox, LoopGroup, MainLoop
from mainspring.core import process
from mainspring.errors import ConfigError, ControlRefusedError
from mainspring.runtime.service_manager import ServiceManager, service_manager
from mainspring.services.orchestrator import Orchestrator
from mainspring.services.spec import Lifecycle, ServiceSpec, ShutdownSettings
from mainspring.testing import SimulatedProgram, SimulatedSpawner, run_virtual

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Manager:
    """The other end: a bound datagram socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.setblocking(False)

    def heard(self) -> list[dict[str, str]]:
        found = []
        while True:
            try:
                datagram = self.socket.recv(65536).decode()
            except BlockingIOError:
                return found
            found.append(dict(line.split("=", 1) for line in datagram.split("\n")))

    def count(self, name: str) -> int:
        return sum(name in news for news in self.heard())


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    made = Manager(f"@mainspring-{secrets.token_hex(8)}" if request.param == "abstract" else str(tmp_path / "notify"))
    yield made
    made.socket.close()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An environment to set, and a process that has no service manager before and after."""
    process.set_current("service manager", None)
    yield monkeypatch
    process.set_current("service manager", None)


def test_what_a_service_says_arrives_as_sd_notify_has_it(manager: Manager) -> None:
    async def speak() -> None:
        here = ServiceManager(manager.address)
        here.ready("running\n3 loops")
        here.reloading()
        here.stopping(9, "stopping: SIGTERM")

    before = time.monotonic()
    run_virtual(speak)
    ready, reloading, stopping, extended = manager.heard()
    assert ready == {"READY": "1", "STATUS": "running; 3 loops"}
    assert reloading["RELOADING"] == "1"
    assert before <= int(reloading["MONOTONIC_USEC"]) / 1e6 + 1e-6 <= time.monotonic()
    assert stopping == {"STOPPING": "1", "STATUS": "stopping: SIGTERM"}
    assert extended == {"EXTEND_TIMEOUT_USEC": "10000000"}


def test_it_takes_its_variables_out_of_the_environment(manager: Manager, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("NOTIFY_SOCKET", manager.address)
    environment.setenv("WATCHDOG_USEC", "30000000")
    environment.setenv("WATCHDOG_PID", str(os.getpid()))
    found = service_manager()
    assert found is not None
    assert (found.address, found.watchdog) == (manager.address, 30.0)
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & os.environ.keys()
    assert service_manager() is found


def test_without_a_socket_there_is_none(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("NOTIFY_SOCKET", raising=False)
    environment.setenv("WATCHDOG_USEC", "30000000")
    assert service_manager() is None
    assert "WATCHDOG_USEC" not in os.environ


@pytest.mark.parametrize("address", ["vsock:2:9", "@", "relative/path"])
def test_an_address_that_it_cannot_use_is_said_and_passed_over(
    address: str, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv("NOTIFY_SOCKET", address)
    assert service_manager() is None
    assert address in caplog.text


@pytest.mark.parametrize(("usec", "pid"), [("30000000", "1"), ("soon", ""), ("-3", ""), ("0", ""), ("", "")])
def test_no_watchdog_where_it_is_none_or_that_of_another_process(
    usec: str, pid: str, environment: pytest.MonkeyPatch
) -> None:
    for name, value in {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": usec, "WATCHDOG_PID": pid}.items():
        environment.setenv(name, value)
    found = service_manager()
    assert found is not None
    assert found.watchdog is None


def test_signs_of_life_come_at_half_the_interval_and_only_while_it_is_alive(manager: Manager) -> None:
    alive, counts = True, []

    async def live() -> None:
        nonlocal alive
        here = ServiceManager(manager.address, watchdog=20.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(here.run, lambda: alive)
            await anyio.sleep(95)
            counts.append(manager.count("WATCHDOG"))
            alive = False
            await anyio.sleep(100)
            counts.append(manager.count("WATCHDOG"))
            alive = True
            await anyio.sleep(2)  # it is asked again soon: its recovery must not wait for half an interval
            counts.append(manager.count("WATCHDOG"))
            tasks.cancel_scope.cancel()

    run_virtual(live)
    assert counts == [10, 0, 1]


def test_a_stop_without_a_limit_is_extended_again_and_again_until_it_has_one(manager: Manager) -> None:
    counts = []

    async def drain() -> None:
        here = ServiceManager(manager.address)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(here.run, lambda: True)
            here.stopping(math.inf)
            await anyio.sleep(90)
            counts.append([int(news.get("EXTEND_TIMEOUT_USEC", 0)) for news in manager.heard()])
            here.extend(5)
            await anyio.sleep(90)
            counts.append([int(news.get("EXTEND_TIMEOUT_USEC", 0)) for news in manager.heard()])
            tasks.cancel_scope.cancel()

    run_virtual(drain)
    assert counts == [[0, *[60_000_000] * 5], [6_000_000]]


def test_what_a_busy_manager_cannot_take_is_sent_when_it_can(manager: Manager) -> None:
    heard: list[dict[str, str]] = []

    async def flood() -> None:
        here = ServiceManager(manager.address)
        sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sender.setblocking(False)
        place = "\0" + manager.address[1:] if manager.address.startswith("@") else manager.address
        try:
            while True:
                sender.sendto(b"NOISE=1", place)
        except BlockingIOError:
            pass
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(here.run, lambda: True)
            await anyio.sleep(0.1)
            here.ready()
            assert manager.count("READY") == 0
            await anyio.sleep(2)
            heard.extend(manager.heard())
            tasks.cancel_scope.cancel()
        sender.close()

    run_virtual(flood)
    assert heard == [{"READY": "1"}]


def test_a_manager_that_is_gone_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = ServiceManager(str(tmp_path / "gone"))
    here.tell(STATUS="a")
    here.tell(STATUS="b")
    assert caplog.text.count("cannot be told") == 1


# ------------------------------------------------------------------------------------------------------------ of a group


def run_group(manager: Manager, environment: pytest.MonkeyPatch, group: LoopGroup, act: Any, usec: str = "") -> None:
    environment.setenv("NOTIFY_SOCKET", manager.address)
    environment.setenv("WATCHDOG_USEC", usec)

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(act)
            await group.run()

    run_virtual(run)


def test_a_group_says_ready_when_it_runs_and_how_long_its_stop_may_take(
    manager: Manager, environment: pytest.MonkeyPatch
) -> None:
    async def handle(body: int) -> None:
        await anyio.sleep(4)

    mailbox = InMemoryMailbox(name="jobs")
    group = LoopGroup([MainLoop(mailbox, handle)], shutdown_timeout=7, cancel_grace=2, drain_delay=3, guardian=False)
    heard: list[list[dict[str, str]]] = []

    async def act() -> None:
        await mailbox.send(1)
        await anyio.sleep(1)
        heard.append(manager.heard())
        group.request_shutdown("enough")
        await anyio.sleep(1)
        heard.append(manager.heard())

    run_group(manager, environment, group, act)
    assert heard[0] == [{"READY": "1", "STATUS": "running 1 loop"}]
    assert {"STOPPING": "1", "STATUS": "stopping: enough"} in heard[1]
    assert {"EXTEND_TIMEOUT_USEC": "14000000"} in heard[1]  # 3 + 7 + 2, and twice a second of margin
    rest = manager.heard()
    assert {"STATUS": "stopping: enough: stop intake"} in rest
    assert "READY" not in {name for news in rest for name in news}


def test_a_group_with_a_stalled_message_gives_no_sign_of_life_until_that_has_ended(
    manager: Manager, environment: pytest.MonkeyPatch
) -> None:
    async def handle(body: int, ctx: Context) -> None:
        try:
            await anyio.sleep(100)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(30)

    mailbox = InMemoryMailbox(name="jobs")
    group = LoopGroup(
        [MainLoop(mailbox, handle, visibility_timeout=300)], watchdog_threshold=21, watchdog_interval=5, cancel_grace=40,
        guardian=False,
    )  # fmt: skip
    counts = []

    async def act() -> None:
        await mailbox.send(1)
        for seconds in (20.5, 30, 8):
            await anyio.sleep(seconds)
            counts.append(manager.count("WATCHDOG"))
        await mailbox.close()
        group.request_shutdown("enough")

    run_group(manager, environment, group, act, usec="10000000")
    assert counts == [5, 0, 2]  # a queue of datagrams may be as short as ten


def test_an_embedded_group_leaves_the_manager_to_the_program_around_it(
    manager: Manager, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("NOTIFY_SOCKET", manager.address)

    async def run() -> None:
        async with LoopGroup([MainLoop(InMemoryMailbox(name="jobs"), print, body=int)]):
            await anyio.sleep(1)

    run_virtual(run)
    assert manager.heard() == []
    assert os.environ["NOTIFY_SOCKET"] == manager.address


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_an_orchestrator_says_ready_in_place_of_its_programs(
    manager: Manager, environment: pytest.MonkeyPatch, backend: str
) -> None:
    environment.setenv("NOTIFY_SOCKET", manager.address)
    environment.setenv("WATCHDOG_USEC", "60000000")
    spawner = SimulatedSpawner({"web": SimulatedProgram(ready_in=3.0)})
    settings = Lifecycle(shutdown=ShutdownSettings(timeout=40, force_kill_timeout=4))
    web = ServiceSpec(name="web", command=("web",), notify=True, lifecycle=settings)
    orchestrator = Orchestrator([web], spawner=spawner, shutdown=ShutdownSettings(timeout=20))
    heard = []

    async def act() -> None:
        for seconds in (2, 3):
            await anyio.sleep(seconds)
            heard.append(manager.heard())
        orchestrator.request_shutdown("enough")

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(act)
            await orchestrator.run()

    run_virtual(run, backend=backend)
    assert {"READY": "1", "STATUS": "ready: all core services have started"} not in heard[0]
    assert {"WATCHDOG": "1"} in heard[0]
    assert {"READY": "1", "STATUS": "ready: all core services have started"} in heard[1]
    assert {"STATUS": "running"} in heard[1]
    rest = manager.heard()
    assert {"STOPPING": "1", "STATUS": "stopping: enough"} in rest
    assert {"EXTEND_TIMEOUT_USEC": "46000000"} in rest  # 40 + 4, and twice a second of margin
    for launch in (record.launch for record in spawner.records):
        assert "WATCHDOG_USEC" not in launch.environment
        assert launch.environment.get("NOTIFY_SOCKET") != manager.address


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_reload_is_told_from_its_begin_to_its_end_however_it_ends(
    manager: Manager, environment: pytest.MonkeyPatch, backend: str
) -> None:
    environment.setenv("NOTIFY_SOCKET", manager.address)
    web = ServiceSpec(name="web", command=("web",), notify=True)
    orchestrator = Orchestrator([web], spawner=SimulatedSpawner({"web": SimulatedProgram(ready_in=3.0)}))
    heard: list[list[dict[str, str]]] = []

    async def specified_anew() -> list[ServiceSpec]:
        return [replace(web, ready_after=4)]

    async def act() -> None:
        await anyio.sleep(1)
        await orchestrator.reload([replace(web, ready_after=2)])
        await anyio.sleep(1)
        heard.append(manager.heard())
        await orchestrator.reload(specified_anew)
        heard.append(manager.heard())
        with pytest.raises(ConfigError):
            await orchestrator.reload([])
        heard.append(manager.heard())
        with anyio.move_on_after(1):
            await orchestrator.reload([replace(web, ready_after=6)])
        heard.append(manager.heard())
        await anyio.sleep(10)
        manager.heard()
        orchestrator.request_shutdown("enough")
        with suppress(ControlRefusedError):
            await orchestrator.reload([web])

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(act)
            await orchestrator.run()

    run_virtual(run, backend=backend)
    assert [news for news in heard[0] if "RELOADING" in news or "READY" in news] == [
        {"READY": "1", "STATUS": "ready: all core services have started"}
    ], "it was not ready before"
    for news, status in zip(heard[1:], ("running", "reload failed: ", "the reload was cancelled"), strict=True):
        told = [each for each in news if "RELOADING" in each or "READY" in each]
        assert [next(iter(each)) for each in told] == ["RELOADING", "READY"]
        assert "MONOTONIC_USEC" in told[0]
        assert told[1]["STATUS"].startswith(status)
    assert not any("RELOADING" in news or "READY" in news for news in manager.heard()[1:]), "it stops"


PROGRAM = """
import os, subprocess, sys, anyio
from mainspring import InMemoryMailbox, LoopGroup, MainLoop

async def handle(body: int):
    print(subprocess.run(["/bin/sh", "-c", "echo ${NOTIFY_SOCKET-none} ${WATCHDOG_USEC-none}"], capture_output=True).stdout)

async def main():
    mailbox = InMemoryMailbox(name="jobs")
    group = LoopGroup([MainLoop(mailbox, handle)])
    async with mailbox:
        await mailbox.send(1)
        print(await group.run(until_empty=True))

anyio.run(main)
"""


@pytest.mark.slow
def test_a_program_under_a_manager_and_the_environment_of_its_children(manager: Manager) -> None:
    environment = {**os.environ, "NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "60000000"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "none none" in done.stdout
    names = [name for news in manager.heard() for name in news]
    assert names.index("READY") < names.index("STOPPING") < names.index("EXTEND_TIMEOUT_USEC")
    assert "WATCHDOG" in names
