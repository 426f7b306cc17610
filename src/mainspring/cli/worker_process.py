"""What a worker process of ``mainspring run --processes`` tells its supervisor beyond what ``sd_notify(3)`` knows.

A notification is one datagram, which can also be sent during an import, and while the event loop does not turn.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, NamedTuple

from mainspring.runtime.service_manager import service_manager
from mainspring.services.process import DRAIN_TIMEOUT, FINISHED, MAX_MESSAGES, USED_UP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mainspring.runtime.service_manager import ServiceManager

NUMBER = "MAINSPRING_WORKER"
"""The environment variable with the number of a worker, from 1."""
MARGIN = 5.0
"""Seconds beyond the longest shutdown after which a worker that still lives is killed."""
PROBLEM = "X_MAINSPRING_PROBLEM"
DIRECTORIES = "X_MAINSPRING_DIRECTORIES"


class WorkerProcess:
    """This process as one worker of several. Telling is best effort: a supervisor that is gone needs to hear nothing."""

    def __init__(self, number: int, manager: ServiceManager) -> None:
        self.number = number
        self._manager = manager

    @classmethod
    def from_environment(cls) -> WorkerProcess | None:
        """Return which worker this process is; None if it was started by hand. What it starts is no worker."""
        text = os.environ.pop(NUMBER, "")
        manager = service_manager() if text.isascii() and text.isdigit() else None
        return None if manager is None else cls(int(text), manager)

    def __str__(self) -> str:
        return f"worker.{self.number}"

    def tell_longest_stop(self, seconds: float) -> None:
        """Tell how long a shutdown may take."""
        self._manager.tell(**{DRAIN_TIMEOUT: f"{seconds + MARGIN:.3f}"})

    def tell_problem(self, text: str) -> None:
        """Tell why this process cannot run."""
        self._manager.tell(**{PROBLEM: text})

    def tell_finished(self) -> None:
        """Tell that its work is over."""
        self._manager.tell(**{FINISHED: 1})

    def tell_directories(self, found: list[str]) -> None:
        """Tell in which directories its source files are."""
        self._manager.tell(**{DIRECTORIES: json.dumps(found)})


class MessageBudget(NamedTuple):
    """After how many handled messages this process is to be replaced, and the supervisor that is to hear of it."""

    messages: int
    manager: ServiceManager

    @classmethod
    def from_environment(cls) -> MessageBudget | None:
        """Return what the supervisor has set (``replace_after: {messages: …}``), or None. What this process starts has none."""
        text = os.environ.pop(MAX_MESSAGES, "")
        manager = service_manager() if text.isascii() and text.isdigit() else None
        return None if manager is None else cls(int(text), manager)

    def tell_used_up(self) -> None:
        """Ask for another process in the place of this one."""
        self.manager.tell(**{USED_UP: 1})


def directories_in(news: Mapping[str, str]) -> list[str]:
    """Return the directories that a notification names."""
    found: list[str] = json.loads(news.get(DIRECTORIES, "[]"))
    return found
