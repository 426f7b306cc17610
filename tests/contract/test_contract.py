"""Every backend keeps the contract: one test a behaviour in virtual time, one test of all of them on each event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from contract.backends import NAMES, backend
from mainspring.testing import mailbox_contract

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mainspring.testing import VirtualClock

LACKING: dict[str, set[str]] = {
    "memory-json": {"durable", "cross_process"},
    "memory-objects": {"durable", "cross_process", "serializes"},
    "sqlite": {"announces_records"},
}


@pytest.mark.own_time(2)  # some behaviours are of hundreds of operations
@pytest.mark.parametrize("anyio_backend", ["trio", pytest.param("asyncio", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
@mailbox_contract.parametrize
async def test_in_virtual_time(
    name: str, behaviour: mailbox_contract.Behaviour, tmp_path: Path, virtual_clock: VirtualClock
) -> None:
    await behaviour(backend(name, tmp_path))


@pytest.mark.slow
@pytest.mark.anyio
async def test_in_real_time(
    tmp_path: Path, anyio_backend: object, judged: Callable[[mailbox_contract.Report, set[str]], None]
) -> None:
    """They wait beside each other: that is nearly all they do."""
    reports: dict[str, mailbox_contract.Report] = {}

    async def run(name: str) -> None:
        reports[name] = await mailbox_contract.run(backend(name, tmp_path), concurrency=24)

    async with anyio.create_task_group() as tasks:
        for name in NAMES:
            tasks.start_soon(run, name)
    for name in NAMES:
        judged(reports[name], LACKING[name])
