"""Every backend keeps the contract: one test a behaviour in virtual time, one test a backend on each event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    "sqlite": set(),
}


@pytest.mark.parametrize("name", NAMES)
@mailbox_contract.parametrize
async def test_in_virtual_time(
    name: str, behaviour: mailbox_contract.Behaviour, tmp_path: Path, virtual_clock: VirtualClock
) -> None:
    await behaviour(backend(name, tmp_path))


@pytest.mark.anyio
@pytest.mark.parametrize("name", NAMES)
async def test_in_real_time(
    name: str, tmp_path: Path, anyio_backend: object, judged: Callable[[mailbox_contract.Report, set[str]], None]
) -> None:
    report = await mailbox_contract.run(backend(name, tmp_path), concurrency=24)
    judged(report, LACKING[name])
