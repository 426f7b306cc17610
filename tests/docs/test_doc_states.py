"""The drawings of states are those of the tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from doc_blocks import blocks_of

from mainspring.core.state_machine import ORCHESTRATOR, SERVICE, OrchestratorState, ServiceState

if TYPE_CHECKING:
    from enum import StrEnum

PAGE = Path(__file__).parents[2] / "docs" / "service-states.md"
MACHINES = [
    ("service", SERVICE, ServiceState.INITIALIZING),
    ("orchestrator", ORCHESTRATOR, OrchestratorState.UNINITIALIZED),
]


def drawing(table: dict[Any, frozenset[Any]], initial: StrEnum) -> str:
    """The drawing of a table, as the page has it."""
    names = {state: str(state).replace(" ", "_") for state in table}
    moves = [f"{names[old]} --> {names[new]}" for old in table for new in table if new in table[old]]
    ends = [f"{names[state]} --> [*]" for state in table if not table[state]]
    return "\n    ".join(["stateDiagram-v2", f"[*] --> {names[initial]}", *moves, *ends])


@pytest.mark.parametrize(("title", "table", "initial"), MACHINES)
def test_a_drawing_is_that_of_its_table(title: str, table: dict[Any, frozenset[Any]], initial: StrEnum) -> None:
    (block,) = [block.text for block in blocks_of(PAGE) if block.title == title]
    assert block.strip() == drawing(table, initial)


@pytest.mark.parametrize(("title", "table"), [machine[:2] for machine in MACHINES])
def test_each_state_is_explained(title: str, table: dict[Any, frozenset[Any]]) -> None:
    _, text = PAGE.read_text().split(f'title="{title}"')
    states = re.findall(r"^\| ([a-z ]+) \|", text.split("\n## ")[0], re.MULTILINE)
    assert states[1:] == [str(state) for state in table]
