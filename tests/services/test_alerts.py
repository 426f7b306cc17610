"""Alerts: what is one, who is told of it, how often, and what happens to a target that fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring import Alert, AlertCommand, AlertKind, Orchestrator, ServiceSpec, Webhook
from mainspring.errors import ConfigError, ServiceNotRunningError
from mainspring.events import AlertFailed, AlertSent, Event
from mainspring.policies import RestartPolicy
from mainspring.services.config import parse_config
from mainspring.services.spawner import ProcessSpawner
from mainspring.services.spec import Lifecycle, StartupSettings
from mainspring.testing import SimulatedProcess, SimulatedProgram, run_virtual
from orchestrator_support import World, spec

if TYPE_CHECKING:
    from pathlib import Path

Run = Callable[..., Any]
ONE_TRY = Lifecycle(startup=StartupSettings(max_retries=1), restart_policy=RestartPolicy(max_retries=0))
CRASHES = SimulatedProgram(ready_in=None, lives=0.1, returncode=3)


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run_virtual`` on each event loop."""
    return partial(run_virtual, backend=request.param)


class Receiver:
    """An alert target: a function that fails at first, or hangs."""

    def __init__(self, failures: int = 0, takes: float = 0.0) -> None:
        self.calls: list[tuple[float, Alert]] = []
        self._failures = failures
        self._takes = takes

    async def __call__(self, alert: Alert) -> None:
        self.calls.append((anyio.current_time(), alert))
        await anyio.sleep(self._takes)
        if len(self.calls) <= self._failures:
            raise RuntimeError("not now")


def outcomes(world: World) -> list[Event]:
    return [event for event in world.events if isinstance(event, AlertSent | AlertFailed)]


def test_a_service_that_is_given_up_is_an_alert(run: Run) -> None:
    async def main() -> None:
        receiver = Receiver()
        world = World([spec("web"), spec("bad", core=False)], {"bad": CRASHES}, alerts=[receiver], name="shop")
        async with world.running():
            await anyio.sleep(100)
        ((_, alert),) = receiver.calls
        assert (alert.kind, alert.orchestrator, alert.service, alert.replica, alert.core) == (
            AlertKind.SERVICE_GIVEN_UP, "shop", "bad", 1, False,
        )  # fmt: skip
        assert alert.reason == "it did not become ready in 2 tries; the last time: exit status 3 before it was ready"
        assert alert.host
        assert json.loads(json.dumps(alert.as_dict()))["at"].endswith("+00:00")
        (sent,) = outcomes(world)
        assert (type(sent), sent.alert_id) == (AlertSent, alert.id)

    run(main)


def test_the_end_of_all_by_a_core_service_waits_for_its_alert(run: Run) -> None:
    async def main() -> None:
        receiver = Receiver(takes=5)
        report = await World([spec("bad")], {"bad": CRASHES}, alerts=[receiver]).run()
        ((_, alert),) = receiver.calls
        assert (alert.service, alert.core, report.exit_status) == ("bad", True, 1)

    run(main)


def test_too_many_restarts_of_all_are_an_alert(run: Run) -> None:
    async def main() -> None:
        receiver = Receiver()
        crashes = SimulatedProgram(lives=1, returncode=3)
        world = World([spec("web")], {"web": crashes}, alerts=[receiver], max_restarts=1, period=60)
        report = await world.run()
        ((_, alert),) = receiver.calls
        assert (alert.kind, alert.reason) == (AlertKind.TOO_MANY_RESTARTS, "more than 1 restarts in 60 s")
        assert report.exit_status == 1

    run(main)


def test_an_alert_is_tried_again_with_its_id_until_it_is_taken(run: Run) -> None:
    async def main() -> None:
        receiver = Receiver(failures=4)
        world = World([spec("web"), spec("bad", core=False)], {"bad": CRASHES}, alerts=[receiver])
        async with world.running():
            await anyio.sleep(300)
        times = [at for at, _ in receiver.calls]
        assert len(times) == 5
        assert len({alert.id for _, alert in receiver.calls}) == 1
        assert [type(event) for event in outcomes(world)] == [AlertSent]

    run(main)


def test_a_target_that_fails_or_hangs_is_given_up_named_and_keeps_no_other_waiting(run: Run) -> None:
    async def main() -> None:
        failing, hanging, well = Receiver(failures=99), Receiver(takes=1e9), Receiver()
        world = World([spec("web"), spec("bad", core=False)], {"bad": CRASHES}, alerts=[failing, hanging, well])
        async with world.running():
            await anyio.sleep(500)
        assert (len(failing.calls), len(hanging.calls), len(well.calls)) == (6, 6, 1)
        assert well.calls[0][0] == failing.calls[0][0]
        assert [at for at, _ in hanging.calls][1] >= hanging.calls[0][0] + 10
        errors = sorted(event.error for event in outcomes(world) if isinstance(event, AlertFailed))
        assert errors == ["RuntimeError: not now", "no answer within 10 s"]

    run(main)


def test_the_end_waits_ten_seconds_for_what_is_not_sent_and_names_it(run: Run) -> None:
    async def main() -> None:
        hanging = Receiver(takes=1e9)
        world = World([spec("bad")], {"bad": CRASHES}, alerts=[hanging])
        await world.run()
        assert anyio.current_time() == hanging.calls[0][0] + 10
        (failed,) = outcomes(world)
        assert isinstance(failed, AlertFailed)
        assert failed.error == "it was not sent before the end"

    run(main)


def test_the_same_alert_is_not_sent_again_within_an_hour(run: Run) -> None:
    async def main() -> None:
        receiver = Receiver()
        world = World([spec("web"), spec("bad", core=False, replicas=2)], {"bad": CRASHES}, alerts=[receiver])
        async with world.running() as orchestrator:
            for _ in range(2):
                await anyio.sleep(100)
                with pytest.raises(ServiceNotRunningError):
                    await orchestrator.start("bad", 1)
            assert len(receiver.calls) == 1, "neither of the other replica, nor of the next start"
            await anyio.sleep(3600)
            with pytest.raises(ServiceNotRunningError):
                await orchestrator.start("bad", 1)
            await anyio.sleep(100)
            assert len(receiver.calls) == 2

    run(main)


def test_a_command_finds_the_alert_in_its_arguments_and_its_environment(run: Run) -> None:
    async def main() -> None:
        launches: list[tuple[str, ...]] = []

        async def page(process: SimulatedProcess) -> int:
            launches.append(process.launch.command)
            environment = process.launch.environment
            assert json.loads(environment["MAINSPRING_ALERT"])["id"] == environment["MAINSPRING_ALERT_ID"]
            assert environment["MAINSPRING_ALERT_SERVICE"] == "bad"
            return 1 if len(launches) == 1 else 0

        target = AlertCommand(("page", "{service}.{replica}", "{kind}"))
        world = World([spec("web"), spec("bad", core=False)], {"bad": CRASHES, "page": page}, alerts=[target])
        async with world.running():
            await anyio.sleep(100)
        assert launches == [("page", "bad.1", "service given up")] * 2
        (sent,) = outcomes(world)
        assert isinstance(sent, AlertSent)
        assert sent.target == "command page"

    run(main)


@pytest.mark.anyio
@pytest.mark.own_time(3)
async def test_a_webhook_is_a_post_that_is_tried_again_and_shows_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    requests: list[bytes] = []

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            received = b""
            while not re.search(rb"\r\n\r\n\{.*\}", received):
                received += await stream.receive()
            requests.append(received)
            status = b"503 Busy" if len(requests) == 1 else b"204 Done"
            await stream.send(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        hook = Webhook(f"http://127.0.0.1:{port}/secret/path", {"X-Team": "ops"})
        assert "secret" not in repr(hook)
        assert "ops" not in repr(hook)
        world = World(
            [spec("bad", lifecycle=ONE_TRY, core=False)],
            {"bad": SimulatedProgram(ready_in=None, lives=0.0, returncode=3)},
            alerts=[hook],
        )
        with anyio.fail_after(20):
            await world.run()
        tasks.cancel_scope.cancel()
    assert len(requests) == 2
    bodies = [json.loads(request.partition(b"\r\n\r\n")[2]) for request in requests]
    assert bodies[0] == bodies[1]
    assert (bodies[0]["service"], bodies[0]["kind"]) == ("bad", "service given up")
    assert b"x-team: ops" in requests[0].lower()
    assert f"x-mainspring-alert: {bodies[0]['id']}".encode() in requests[0].lower()
    (sent,) = outcomes(world)
    assert isinstance(sent, AlertSent)
    assert sent.target == "webhook 127.0.0.1"
    assert "secret" not in caplog.text


@pytest.mark.anyio
async def test_a_refused_webhook_is_not_tried_again() -> None:
    count = 0

    async def serve(stream: anyio.abc.SocketStream) -> None:
        nonlocal count
        async with stream:
            await stream.receive()
            count += 1
            await stream.send(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\ncontent-length: 0\r\n\r\n")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        world = World(
            [spec("bad", lifecycle=ONE_TRY, core=False)],
            {"bad": SimulatedProgram(ready_in=None, lives=0.0, returncode=3)},
            alerts=[Webhook(f"http://127.0.0.1:{port}/secret/path")],
        )
        with anyio.fail_after(20):
            await world.run()
        tasks.cancel_scope.cancel()
    (failed,) = outcomes(world)
    assert isinstance(failed, AlertFailed)
    assert (count, failed.error) == (1, "it answered with status 404")


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_real_command_is_told_before_all_has_ended(tmp_path: Path) -> None:
    orchestrator = Orchestrator(
        [ServiceSpec(name="bad", command=("sh", "-c", "exit 3"), lifecycle=ONE_TRY, ready_after=9)],
        spawner=ProcessSpawner(),
        alerts=[AlertCommand(("sh", "-c", 'echo "$MAINSPRING_ALERT" > "$0/told"', str(tmp_path)))],
    )
    with anyio.fail_after(30):
        await orchestrator.run(install_signals=False)
    assert json.loads((tmp_path / "told").read_text())["service"] == "bad"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Webhook("ftp://example.org"), "url must be http://host/path or https://host/path"),
        (lambda: Webhook("http://[bad"), "url must be"),
        (lambda: Webhook("https://example.org", timeout=0), "timeout must be above 0 seconds, not 0"),
        (lambda: Webhook("https://example.org", {"a": 1}), "headers must be a mapping of texts to texts"),
        (lambda: Webhook("https://example.org:port"), "url must be"),
        (lambda: Webhook("https://example.org", {"X-Key": "1234\n"}), "header X-Key must be printable ASCII without"),
        (lambda: Webhook("https://example.org", {"X Key": "1"}), "the name of a header must be letters, digits"),
        (lambda: AlertCommand(()), "command must name a program"),
        (lambda: AlertCommand("page me"), "command must be a list of strings"),
        (lambda: World([spec("web")], alerts=[print]), "alerts takes Webhook, AlertCommand and async functions"),
    ],
)
def test_a_target_that_cannot_work_is_named(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


FILE = """
alerts:
  - webhook: https://hooks.example.org/T0/B0
    headers: {Authorization: Bearer x}
    timeout: 5s
  - command: page {service}
services:
  web: {command: [x]}
"""


def test_alerts_of_a_file() -> None:
    config = parse_config(FILE.encode(), name="up.yaml", environment={})
    assert config.alerts == (
        Webhook("https://hooks.example.org/T0/B0", {"Authorization": "Bearer x"}, 5.0),
        AlertCommand(("page", "{service}"), 10.0),
    )


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("https://hooks.example.org/T0/B0", "mailto:me", "up.yaml:3: alerts[0]: url must be http://host/path or"),
        (
            "  - command: page {service}",
            "  - timeout: 5s",
            "up.yaml:6: alerts[1]: it names no target; allowed: a mapping",
        ),
        ("headers:", "header:", "up.yaml:4: alerts[0].header: unknown key, did you mean headers?"),
        ("page {service}", "''", "up.yaml:6: alerts[1].command: "),
        ("    timeout: 5s", "    command: x", "up.yaml:3: alerts[0]: webhook and command stand together"),
    ],
)
def test_a_fault_of_an_alert_has_its_line(old: str, new: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(FILE.replace(old, new).encode(), name="up.yaml", environment={})
    assert str(refused.value).startswith(line), refused.value
