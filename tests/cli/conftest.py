"""How the commands of these tests start."""

from __future__ import annotations

import cli_helpers
import pytest

from selection import is_full


@pytest.fixture(scope="session", autouse=True)
def start_of_commands(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let a full run start each command from the beginning, as a user does; make the first one of a quick run no slower."""
    cli_helpers.warm = not is_full(pytestconfig)
    cli_helpers.run("--version", cwd=tmp_path_factory.getbasetemp())
