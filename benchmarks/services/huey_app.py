"""The service of huey's that is measured, as its documentation writes one: SQLite storage, results off."""

from __future__ import annotations

import os
import time

from huey import SqliteHuey

huey = SqliteHuey("bench", filename=os.environ["BENCH_DB"], results=False)


@huey.task()
def noop(body: str) -> None:
    """Nothing to do."""


@huey.task()
def last(body: str) -> None:
    """The end of the measured run: when it happened, for the one who waits."""
    with open(os.environ["BENCH_DONE"], "w") as file:
        file.write(str(time.time()))
