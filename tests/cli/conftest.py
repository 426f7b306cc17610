"""How the commands of these tests start."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import cli_helpers
import pytest

from selection import is_full

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def runtime_directory() -> Iterator[str]:
    """Keep the control sockets of these tests apart from those of other supervisors of this user."""
    with tempfile.TemporaryDirectory(prefix="ms") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAINSPRING_RUNTIME_DIR", directory)
        yield directory


@pytest.fixture(scope="session", autouse=True)
def start_of_commands(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, runtime_directory: str
) -> None:
    """Let a full run start each command from the beginning, as a user does; make the first one of a quick run no slower."""
    assert os.path.isdir(runtime_directory)
    cli_helpers.warm = not is_full(pytestconfig)
    cli_helpers.run("--version", cwd=tmp_path_factory.getbasetemp())


@pytest.fixture
def place(
    request: pytest.FixtureRequest, tmp_path: Path, runtime_directory: str, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A directory with the ``SERVICES`` of the test's module as services.yaml, and a fresh one for control sockets."""
    directory = Path(runtime_directory, f"{os.getpid()}-{len(os.listdir(runtime_directory))}")
    monkeypatch.setenv("MAINSPRING_RUNTIME_DIR", str(directory))
    (tmp_path / "services.yaml").write_text(dedent(request.module.SERVICES), encoding="utf-8")
    return tmp_path


@pytest.fixture
def up(place: Path) -> Iterator[cli_helpers.Command]:
    """A supervisor that runs, in the directory ``place``."""
    with cli_helpers.started("up", "services.yaml", cwd=place) as command:
        command.expect("services: running")
        yield command
