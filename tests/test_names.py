"""One class name stands for one class in the whole package, with or without an underscore before it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import mainspring

PACKAGE = Path(mainspring.__file__).parent


@pytest.mark.own_time(2)
def test_one_class_name_stands_for_one_class() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if "examples" in path.relative_to(PACKAGE).parts:  # where it is installed; they are programs of their own
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 400
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
