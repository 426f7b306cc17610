"""Every backend keeps the contract: one test a behaviour in virtual time, one test a backend on each event loop."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import pytest

from contract.backends import NAMES, backend
from mainspring import Capabilities
from mainspring.testing import mailbox_contract

if TYPE_CHECKING:
    from pathlib import Path

    from mainspring.testing import VirtualClock


@pytest.mark.parametrize("name", NAMES)
@mailbox_contract.parametrize
async def test_in_virtual_time(
    name: str, behaviour: mailbox_contract.Behaviour, tmp_path: Path, virtual_clock: VirtualClock
) -> None:
    await behaviour(backend(name, tmp_path))


@pytest.mark.anyio
@pytest.mark.parametrize("name", NAMES)
async def test_in_real_time(name: str, tmp_path: Path, anyio_backend: object) -> None:
    under_test = backend(name, tmp_path)
    report = await mailbox_contract.run(under_test, concurrency=8)
    print(report)
    assert report.ok, str(report)
    declared = {field.name for field in fields(Capabilities) if field.type == "bool"} | {"serializes"}
    sample = under_test.factory("sample")
    lacking = {need for need in declared if not getattr(sample.capabilities, need, sample.serializes)}
    expected = {found.name for found in mailbox_contract.behaviours() if found.needs & lacking}
    assert set(report.skipped) == expected
