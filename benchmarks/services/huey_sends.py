"""Sends of huey's, one by one, each durable before the next: ``python huey_sends.py FILE COUNT`` says how many a second."""

from __future__ import annotations

import sys
import time

from huey import SqliteHuey

huey = SqliteHuey("bench", filename=sys.argv[1], results=False, fsync=True)


@huey.task()
def noop(body: str) -> None:
    """Nothing to do."""


BODY = "x" * 100
count = int(sys.argv[2])
for _ in range(100):
    noop(BODY)
began = time.perf_counter()
for _ in range(count):
    noop(BODY)
print(count / (time.perf_counter() - began))
