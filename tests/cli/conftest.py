"""How the commands of these tests start."""

from __future__ import annotations

import os
import tempfile
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
