"""Each file of services on the page about them can be read, and the first one runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import blocks_of

from mainspring.services.config import parse_config
from mainspring.services.config_keys import keys_at
from mainspring.services.spec import Lifecycle, ServiceSpec

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "supervise.md"
REFERENCE = PAGE.parents[1] / "reference" / "services.md"
FILES = [block.text for block in blocks_of(PAGE) if block.language == "yaml"]


@pytest.mark.parametrize("text", FILES)
def test_each_file_of_services_can_be_read(text: str) -> None:
    assert parse_config(text.encode(), name="services.yaml", environment={}).services


def test_each_key_of_a_service_is_named() -> None:
    page = PAGE.read_text()
    unnamed = {name for name in ServiceSpec.__dataclass_fields__ if f"{name}" not in page}
    assert unnamed <= {"name"}


ONCE = ("services.NAME.lifecycle", "services.NAME.startup_probe", "services.NAME.hooks.p")
"""Places whose keys the page describes once, with those of ``lifecycle``, ``probe`` and ``pre_start``."""


def keys_below(path: tuple[str, ...], name: str = "") -> set[str]:
    """Return the name of each key of a file that takes a value."""
    found = set()
    for key in keys_at(path):
        named = f"{name}.{key}".lstrip(".")
        listed = (*path, key, "NAME")  # a list or a mapping of names
        below: set[str] = set()
        if not named.startswith(ONCE) or key == "pre_start":
            below = keys_below((*path, key), named)
            below |= keys_below(listed, f"{named}.NAME" if named == "services" else named) if not below else set()
        found |= below if below and key != "pre_start" else below | {named}
    return found


ROWS = dict(re.findall(r"^\| `([\w.]+)` \|.*\| (.*) \|$", REFERENCE.read_text(), re.MULTILINE))


def test_the_reference_has_every_key_of_a_file() -> None:
    assert set(ROWS) == keys_below(())


@pytest.mark.parametrize("key", sorted(key for key in ROWS if key.startswith("lifecycle.")))
def test_the_reference_has_the_defaults_of_the_lifecycle(key: str) -> None:
    _, part, name = key.split(".")
    default = getattr(getattr(Lifecycle(), part), name)
    shown = ROWS[key].removesuffix(" s").strip("`")
    assert shown == (str(default).lower() if isinstance(default, bool | str) else f"{default:g}")


@pytest.mark.slow
def test_the_first_file_runs_and_stops(tmp_path: Path) -> None:

    (tmp_path / "services.yaml").write_text(FILES[0])
    command = [sys.executable, "-m", "mainspring", "up", "services.yaml"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert lines[0] == "store.1 | store is ready\n"
    assert sorted(lines[1:]) == ["worker.1 | worker 1 is ready\n", "worker.2 | worker 2 is ready\n"]
