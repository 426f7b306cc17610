"""Each file of services on the page about them can be read, and the first one runs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import blocks_of

from mainspring.services.config import parse_config
from mainspring.services.spec import ServiceSpec

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "supervise.md"
FILES = [block.text for block in blocks_of(PAGE) if block.language == "yaml"]


@pytest.mark.parametrize("text", FILES)
def test_each_file_of_services_can_be_read(text: str) -> None:
    assert parse_config(text.encode(), name="services.yaml", environment={}).services


def test_each_key_of_a_service_is_named() -> None:
    page = PAGE.read_text()
    unnamed = {name for name in ServiceSpec.__dataclass_fields__ if f"{name}" not in page}
    assert unnamed <= {"name"}


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
