"""What depends on who runs first is tried under many schedules: a lost wake-up shows under some of them only."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from contract.backends import NAMES, backend
from mainspring.testing import mailbox_contract, run_virtual
from mainspring.testing.mailbox_contract import receiving
from mainspring.testing.mailbox_contract.harness import behaviours_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

RACY = [found.name for found in behaviours_of(receiving)] + [
    "close_ends_a_waiting_receive_at_once",
    "counts_add_up_under_concurrency",
    "a_reply_wakes_the_requester",
]


@pytest.mark.parametrize("name", NAMES)
def test_under_many_schedules(name: str, tmp_path: Path) -> None:
    for seed in range(6 if name == "sqlite" else 25):
        report = run_virtual(partial(mailbox_contract.run, backend(name, tmp_path), only=RACY), seed=seed)
        assert report.ok, f"seed {seed}: {report}"
