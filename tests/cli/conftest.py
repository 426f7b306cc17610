"""How the commands of these tests start."""

from __future__ import annotations

import cli_helpers
import pytest

from selection import is_full


@pytest.fixture(scope="session", autouse=True)
def start_of_commands(pytestconfig: pytest.Config) -> None:
    """Let a full run start each command from the beginning, as a user does."""
    cli_helpers.warm = not is_full(pytestconfig)
