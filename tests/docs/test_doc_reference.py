"""The reference and the architecture: nothing is missing, and nothing is named that is not there."""

from __future__ import annotations

import importlib
import re
from functools import partial
from pathlib import Path

import pytest
import yaml

import mainspring
from mainspring import InMemoryMailbox, LoopGroup, MainLoop
from mainspring.cli.app import app
from mainspring.telemetry.merged_metrics import merged_page
from mainspring.telemetry.metrics import GroupMetrics
from mainspring.telemetry.service_metrics import ServiceMetrics
from mainspring.testing import run_virtual
from orchestrator_support import World, spec

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = Path(mainspring.__file__).parent
DIRECTIVE = re.compile(r"^::: (mainspring\S+)$", re.MULTILINE)
EARLIER_PATHS = {
    "mainspring.budget.Usage": "mainspring.state.budget.Usage",
    "mainspring.loops.tool_calls.ToolCallBlock": "mainspring.worker.tool_calls.ToolCallBlock",
    "mainspring.session.append": "mainspring.state.session.append",
    "mainspring.session.journal.Journal": "mainspring.state.session.journal.Journal",
    "mainspring.session.journal_file.FileJournal": "mainspring.state.session.journal_file.FileJournal",
    "mainspring.session.journal_sqlite.SQLiteJournal": "mainspring.state.session.journal_sqlite.SQLiteJournal",
    "mainspring.session.on": "mainspring.state.session.on",
    "mainspring.session.replace_latest": "mainspring.state.session.replace_latest",
    "mainspring.session.upsert_by": "mainspring.state.session.upsert_by",
    "mainspring.session.versioned": "mainspring.state.session.versioned",
    "mainspring.states.LoopThreadState": "mainspring.core.state_machine.LoopThreadState",
    "mainspring.watchdog.HeartbeatSubject": "mainspring.HeartbeatSubject",
}
"""What earlier releases documented under another path, which stays importable for one release, and where it is now."""


def named_in_the_reference() -> list[str]:
    return [path for page in sorted((DOCS / "reference").glob("*.md")) for path in DIRECTIVE.findall(page.read_text())]


def found_at(path: str) -> object:
    """The module or the object of a module that a dotted path means."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", named_in_the_reference())
def test_what_the_reference_names_exists_and_has_a_docstring(path: str) -> None:
    assert found_at(path).__doc__


@pytest.mark.parametrize(("earlier", "now"), EARLIER_PATHS.items())
def test_what_the_reference_named_before_is_importable_by_that_path(earlier: str, now: str) -> None:
    assert found_at(earlier) is found_at(now)


def test_the_reference_has_every_public_name() -> None:
    shown = {path.rpartition(".")[2] for path in named_in_the_reference()}
    errors = {name for name in dir(importlib.import_module("mainspring.errors")) if name.endswith("Error")}
    assert {"mainspring.errors", "mainspring.events"} <= set(named_in_the_reference())
    assert set(mainspring.__all__) - shown - errors - {"__version__"} == set()


def test_the_reference_has_every_verb() -> None:
    page = (DOCS / "reference" / "command-line.md").read_text()
    groups = [group.typer_instance for group in app.registered_groups]
    named_groups = [each for each in groups if isinstance(each.info.name, str)]
    commands = [each.registered_commands for each in (app, *groups) if each not in named_groups]
    verbs = {command.name or getattr(command.callback, "__name__", "") for each in commands for command in each}
    verbs |= {each.info.name for each in named_groups}
    named = {
        verb for heading in re.findall(r"^## mainspring (.+)$", page, re.MULTILINE) for verb in heading.split(", ")
    }
    assert named == {verb.replace("_", "-") for verb in verbs}


def test_the_reference_has_every_metric() -> None:
    async def handle(job: str) -> None: ...

    group = LoopGroup([MainLoop(InMemoryMailbox("jobs"), handle)])
    text, _ = GroupMetrics(group).render()
    services = run_virtual(partial(ServiceMetrics(World([spec("web")]).orchestrator, registry=None).collect, {}))
    text += merged_page(services, [], "").text
    kinds = dict(re.findall(r"^# TYPE (mainspring_\w+) (\w+)$", text.decode(), re.MULTILINE))
    page = (DOCS / "reference" / "http.md").read_text()
    assert set(re.findall(r"`(mainspring_\w+)`", page)) == set(kinds)


def test_the_site_has_every_page() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(entries: object) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        parts = entries.values() if isinstance(entries, dict) else entries
        return [page for part in parts for page in pages(part)]  # type: ignore[attr-defined]

    assert sorted(pages(config["nav"])) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_architecture_names_every_package_and_no_other_module() -> None:
    text = (DOCS / "architecture.md").read_text()
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)*)`", text))
    folders = [
        folder.parent.relative_to(PACKAGE) for folder in PACKAGE.rglob("__init__.py") if "examples" not in folder.parts
    ]
    packages = {".".join(folder.parts) for folder in folders if folder.parts}
    assert packages - named == set(), "docs/architecture.md does not name these"
    modules = {".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in PACKAGE.rglob("*.py")} | packages
    dotted = {name for name in named if name.partition(".")[0] in packages and "." in name}
    assert dotted - modules == set(), "docs/architecture.md names modules that are not there"


def test_the_layers_there_the_page_are_those_of_the_contract() -> None:
    contract = (ROOT / ".importlinter").read_text()
    layers = re.search(r"^layers =\n((?:    .+\n)+)", contract, re.MULTILINE)
    assert layers is not None
    layers_there = [set(re.split(r"\s*[|:]\s*", line.strip())) for line in layers[1].splitlines()]
    table = (DOCS / "architecture.md").read_text().partition("| layer |")[2].partition("\n\n")[0]
    shown = [set(re.findall(r"`([a-z_]+)`", row)) for row in table.splitlines()[2:]]
    assert shown == layers_there
