"""Replicas that work on one mailbox are replaced one after the other, under load: nothing is lost, and work never rests."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from textwrap import dedent
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import anyio
import anyio.lowlevel
import pytest
from rolling_support import Completed, Rollout

from mainspring import Dispatcher, open_mailbox
from mainspring.core.state_machine import OrchestratorState
from mainspring.events import ServiceOutput
from mainspring.services.orchestrator import Orchestrator
from mainspring.services.spawner import ProcessSpawner
from mainspring.services.spec import HttpProbe, Lifecycle, Replacement, ServiceSpec, StartupSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WORKER = """
import os
import anyio
from mainspring import LoopGroup, MainLoop, open_mailbox

done = os.open("done", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
replica = os.environ["MAINSPRING_REPLICA"]

async def handle(job: str) -> None:
    await anyio.sleep(0.02)
    os.write(done, f"{replica} {job}\\n".encode())

group = LoopGroup([MainLoop(open_mailbox(os.environ["JOBS"]), handle, concurrency=4)])
"""
READY = {"probe": {"probe": HttpProbe("unix:{socket}/health/ready")}, "notification": {"notify": True}}


class Load:
    """A mailbox that gets a message after the other, and the file in which the workers note what they have done."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.url = url
        self.sent: list[str] = []
        self.dead = -1
        (directory / "app.py").write_text(dedent(WORKER), encoding="utf-8")

    def completed(self) -> list[Completed]:
        try:
            lines = (self.directory / "done").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [(int(replica), job) for replica, job in (line.split() for line in lines)]

    async def until_completed(self, count: int) -> None:
        with anyio.fail_after(60):
            while len(self.completed()) < count:
                await anyio.sleep(0.02)

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send all the while. At the end wait until all is done."""
        async with open_mailbox(self.url, body=str) as mailbox:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send, mailbox)
                yield
                tasks.cancel_scope.cancel()
            with anyio.fail_after(60):
                while (counts := await mailbox.counts()).pending or counts.in_flight:
                    await anyio.sleep(0.02)
            self.dead = counts.dead

    async def _send(self, mailbox: Any) -> None:
        while True:
            job = f"job-{len(self.sent)}"
            with anyio.CancelScope(shield=True):
                await mailbox.send(job)
                self.sent.append(job)
            await anyio.sleep(0.01)

    def check(self) -> None:
        """Each message was done once, and none has failed."""
        assert sorted(job for _, job in self.completed()) == sorted(self.sent)
        assert self.dead == 0


def worker(load: Load, **settings: Any) -> ServiceSpec:
    return ServiceSpec(
        name="worker",
        command=(sys.executable, "-m", "mainspring", "run", "app:group", "--log-level", "ERROR"),
        working_directory=str(load.directory),
        environment={"JOBS": load.url, "PYTHONPATH": str(load.directory)},
        lifecycle=Lifecycle(startup=StartupSettings(health_check_interval=0.05)),
        **{"replicas": 3} | settings,
    )


async def replaced_under_load(
    load: Load, spec: ServiceSpec, replacing: Callable[[Orchestrator, Rollout], Awaitable[object]]
) -> Rollout:
    """Run the service, send, and replace its replicas meanwhile."""
    rollout = Rollout(spec.name, load.completed)
    dispatcher = Dispatcher()
    said: list[str] = []
    dispatcher.subscribe(ServiceOutput, lambda event: said.append(event.line))
    orchestrator = Orchestrator([spec], spawner=ProcessSpawner(), dispatcher=dispatcher)
    async with anyio.create_task_group() as tasks:
        async with load.sending():
            with rollout.following(dispatcher), anyio.fail_after(120):
                tasks.start_soon(partial(orchestrator.run, install_signals=False))
                while orchestrator.state is not OrchestratorState.RUNNING:
                    await anyio.sleep(0.02)
                await load.until_completed(20)
                await replacing(orchestrator, rollout)
            await load.until_completed(len(load.sent))
        await orchestrator.shutdown()
    load.check()
    assert not [line for line in said if "Traceback" in line]
    return rollout


def sqlite(directory: Path) -> str:
    return f"sqlite:///{directory}/jobs.db?name=jobs"


@pytest.mark.parametrize("ready", READY)
async def test_a_rolling_restart_under_load_loses_nothing_and_work_never_rests(tmp_path: Path, ready: str) -> None:
    load = Load(tmp_path, sqlite(tmp_path))
    spec = worker(load, **READY[ready])
    rollout = await replaced_under_load(load, spec, lambda orchestrator, _: orchestrator.restart("worker"))
    rollout.check(3)


async def test_a_rolling_restart_under_load_on_redis(tmp_path: Path, redis_url: str) -> None:
    load = Load(tmp_path, f"{redis_url}?name=rolling-{uuid4().hex}")
    spec = worker(load, notify=True)
    rollout = await replaced_under_load(load, spec, lambda orchestrator, _: orchestrator.restart("worker"))
    rollout.check(3)


async def test_a_reload_under_load_replaces_one_replica_after_the_other(tmp_path: Path) -> None:
    load = Load(tmp_path, sqlite(tmp_path))
    spec = worker(load, notify=True)
    changed = replace(spec, environment={**spec.environment, "NEW": "1"})
    rollout = await replaced_under_load(load, spec, lambda orchestrator, _: orchestrator.reload([changed]))
    rollout.check(3)


@pytest.mark.parametrize("worn", [Replacement(age=3), Replacement(messages=40)], ids=["age", "messages"])
async def test_worn_processes_are_replaced_under_load_one_at_a_time(tmp_path: Path, worn: Replacement) -> None:
    load = Load(tmp_path, sqlite(tmp_path))
    spec = worker(load, notify=True, replace_after=worn)

    async def replacing(_: Orchestrator, rollout: Rollout) -> None:
        while {outage.replica for outage in rollout.outages} != {1, 2, 3}:
            await anyio.sleep(0.02)

    rollout = await replaced_under_load(load, spec, replacing)
    assert rollout.most_away == 1
    rollout.check_throughput()
    assert all(len(set(pids)) == len(pids) > 1 for pids in rollout.pids.values())


ANSWERS = """
import os, signal, socket
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
held = socket.socket(fileno=3)
held.settimeout(0.02)
print("up", flush=True)
while signal.SIGTERM not in signal.sigpending():
    try:
        caller, _ = held.accept()
    except TimeoutError:
        continue
    with caller:
        caller.sendall(str(os.getpid()).encode())
"""


async def test_a_restart_of_a_service_with_a_held_socket_refuses_no_connection(tmp_path: Path) -> None:
    address = str(tmp_path / "held.sock")
    spec = ServiceSpec(
        name="web", command=(sys.executable, "-I", "-S", "-c", ANSWERS), ready_line="up", listen=(f"unix:{address}",)
    )
    orchestrator = Orchestrator([spec], spawner=ProcessSpawner())
    pids: list[bytes] = []

    async def call() -> None:
        while True:
            with anyio.CancelScope(shield=True), anyio.fail_after(60):
                async with await anyio.connect_unix(address) as stream:
                    pids.append(await stream.receive())
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(orchestrator.run, install_signals=False))
        with anyio.fail_after(60):
            while orchestrator.state is not OrchestratorState.RUNNING:
                await anyio.sleep(0.02)
            async with anyio.create_task_group() as callers:
                callers.start_soon(call)
                for restarts in range(1, 4):
                    while len(set(pids)) < restarts:
                        await anyio.sleep(0.01)
                    await orchestrator.restart("web")
                while len(set(pids)) < 4:
                    await anyio.sleep(0.01)
                callers.cancel_scope.cancel()
        await orchestrator.shutdown()
