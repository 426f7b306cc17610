"""The simulation can fail: every planted fault is found, by the rule that it breaks, within 200 seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import simulation_variants  # noqa: F401 - it fills the table
from simulation_planting import VARIANTS, Variant

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.slow


def variants() -> Iterable[Variant]:
    return VARIANTS.values()


@pytest.mark.parametrize("variant", variants(), ids=lambda variant: variant.name)
def test_planted_fault_is_caught(variant: Variant) -> None:
    report = variant.hunt()
    assert report is not None, "no seed has found it"
    assert report.violation is not None
    assert report.violation.rule in variant.rules, str(report)
    assert f"seed={report.seed}" in report.violation.replay


def test_there_are_enough_of_them() -> None:
    assert len(VARIANTS) >= 12
