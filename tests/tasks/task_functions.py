"""Tasks of a module, which a worker process imports."""

from __future__ import annotations

import os

from mainspring import Tasks

tasks = Tasks("memory://task-functions")


@tasks.task(offload="process")
def process_of(number: int) -> tuple[int, int]:
    return number, os.getpid()
