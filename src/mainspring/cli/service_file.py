"""Files of services at the command line: which target is one, and its faults as lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mainspring.cli.user_errors import WRONG_USE, UserError, say
from mainspring.errors import ConfigError

if TYPE_CHECKING:
    from mainspring.services.config import OrchestratorConfig


def is_service_file(target: str) -> bool:
    """True if a target is a file, and no ``MODULE:ATTR``."""
    return target.endswith((".yaml", ".yml")) or ("/" in target and ":" not in target) or Path(target).is_file()


def read_service_file(path: str) -> OrchestratorConfig:
    """Read a file of services.

    :raises UserError: it has faults. All but the last are said already, each on a line.
    """
    from mainspring.services.config import read_config

    try:
        return read_config(path)
    except ConfigError as error:
        *others, last = str(error).splitlines()
        for line in others:
            say(line)
        raise UserError(last, WRONG_USE) from None
