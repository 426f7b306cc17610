"""The example worker of the compose file and of the manifests: any mailbox, by its URL.

MAILBOX_URL says which one (redis://…, postgresql://…, nats://…); CONCURRENCY how many messages at once (10). A message is a
job: ``{"seconds": 0.5}`` sleeps so long. Sent from anywhere that reaches the server:

    mainspring send 'redis://127.0.0.1:6379/0?name=jobs' '{"seconds": 0.5}'
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import anyio

from mainspring import LoopGroup, MainLoop, open_mailbox


@dataclass
class Job:
    """What there is to do."""

    seconds: float = 0.1


async def work(job: Job) -> None:
    """Take as long as the job says. Doing it twice harms nobody."""
    await anyio.sleep(job.seconds)


def group() -> LoopGroup:
    """One loop on the mailbox that the environment names."""
    jobs = open_mailbox(os.environ["MAILBOX_URL"], body=Job)
    loop = MainLoop(jobs, work, name="jobs", concurrency=int(os.environ.get("CONCURRENCY", "10")))
    return LoopGroup([loop], name="worker")
