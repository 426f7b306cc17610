"""The idle service of arq's, as its documentation writes one."""

from __future__ import annotations

import os

from arq.connections import RedisSettings


async def handle(ctx: dict[str, object], job: str) -> None:
    """Nothing to do."""


class WorkerSettings:
    functions = (handle,)
    redis_settings = RedisSettings.from_dsn(os.environ["BENCH_REDIS"])
