"""The container and the manifest of the tutorial: what can be held against the program without a cluster."""

from __future__ import annotations

import json
from configparser import ConfigParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from doc_blocks import blocks_of
from starlette.routing import Route

from mainspring import InMemoryMailbox, LoopGroup, MainLoop
from mainspring.cli.app import app
from mainspring.http.app import health_app

if TYPE_CHECKING:
    from doc_session import Session

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL = DOCS / "tutorial.md"


def last(title: str) -> str:
    """The file of that name as the page has it at its end."""
    return [block.text for block in blocks_of(TUTORIAL) if block.title == title][-1]


def some_group() -> LoopGroup:
    async def handle(job: str) -> None: ...

    return LoopGroup([MainLoop(InMemoryMailbox("jobs"), handle)])


def container() -> dict[str, Any]:
    spec = yaml.safe_load(last("deployment.yaml"))["spec"]["template"]["spec"]
    (only,) = spec["containers"]
    return {"grace": spec["terminationGracePeriodSeconds"], **only}


def test_the_manifest_waits_long_enough_for_the_defaults() -> None:
    settings = some_group().settings
    needed = settings.drain_delay + settings.shutdown_timeout + settings.cancel_grace + 1
    assert container()["grace"] >= needed


def test_the_probes_ask_for_what_there_is() -> None:
    routes = {route.path for route in health_app(some_group()).routes if isinstance(route, Route)}
    assert {container()[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")} <= routes


@pytest.mark.slow
def test_the_command_of_the_image_runs_and_ends_clean(session: Session, tmp_path: Path) -> None:
    (line,) = [line for line in last("Dockerfile").splitlines() if line.startswith("CMD ")]
    command = json.loads(line.removeprefix("CMD "))
    assert command == container()["command"]
    (tmp_path / "lists").mkdir()
    (tmp_path / "mailing.py").write_text(session.with_free_ports(last("mailing.py")))
    page = tmp_path / "page.md"
    page.write_text(
        f"```console\n$ {' '.join(command)}\n...\n…mailings: running…\n^C\n...\n…ended with exit status 0…\n"
        "...\n$ echo $?\n0\n```\n"
    )
    for block in blocks_of(page):
        session.play(block)


def test_the_unit_for_systemd_fits_the_defaults() -> None:
    (text,) = [block.text for block in blocks_of(DOCS / "shutdown.md") if block.title == "worker.service"]
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    service, settings = unit["Service"], some_group().settings
    assert service["Type"] == "notify"
    assert float(service["TimeoutStopSec"]) >= settings.stop_within
    assert settings.block_threshold is not None
    assert float(service["WatchdogSec"]) > settings.block_threshold
    program, verb, *_ = service["ExecStart"].split()
    assert program.endswith("/mainspring")
    assert verb in {
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    }
