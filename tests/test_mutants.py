"""``make mutants``: its list fits the code."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    yield import_module("mutants")
    sys.modules.pop("mutants")


def test_each_fault_of_the_list_can_be_planted(mutants):
    faults = mutants.read(mutants.LIST)
    assert len(faults) >= 60
    assert all(
        (mutants.ROOT / test.partition("::")[0]).exists() for fault in faults for test in fault.tests if "/" in test
    )


def test_unknown_numbers_are_refused(mutants):
    faults = mutants.read(mutants.LIST)
    with pytest.raises(ValueError, match=r"no fault has the number 0, 999; the list has 1 to"):
        mutants.chosen(faults, [1, 0, 999])
    assert mutants.chosen(faults, [2]) == [faults[1]]
