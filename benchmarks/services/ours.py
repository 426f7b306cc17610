"""The idle service of ours that is measured: one loop on a SQLite mailbox."""

from __future__ import annotations

import os

from mainspring import LoopGroup, MainLoop, open_mailbox


async def handle(job: str) -> None:
    """Nothing to do."""


port = os.environ.get("BENCH_HEALTH_PORT")
group = LoopGroup(
    [MainLoop(open_mailbox(f"sqlite:///{os.environ['BENCH_DB']}?name=jobs"), handle)],
    health_port=int(port) if port else None,
)
