"""``docs/thread-safety.md``: the tests that it names are there, and it names all locks that are."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "mainspring"
PAGE = (ROOT / "docs" / "thread-safety.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
LOCK = re.compile(r"\bthreading\.(Lock|RLock|Condition|Semaphore|BoundedSemaphore)\b")


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_the_tests_that_it_names_are_there(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_it_names_every_lock() -> None:
    found: Counter[tuple[str, bool]] = Counter()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
        if not room.startswith("testing."):
            found.update((room, kind == "RLock") for kind in LOCK.findall(path.read_text()))
    rows = re.findall(r"^\| `([\w.]+)` \| (R: )?", PAGE.partition("## The locks")[2], re.MULTILINE)
    assert Counter((room, bool(again)) for room, again in rows) == found
