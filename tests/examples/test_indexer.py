"""The indexer example: what it measures, and its commands as its text says to type them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from mainspring.cli.demo import example_directory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def indexer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module, working in a directory of its own."""
    monkeypatch.setenv("INDEXER_DIR", str(tmp_path / "data"))
    spec = importlib.util.spec_from_file_location("indexer_under_test", example_directory() / "indexer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


SOURCE = dedent(
    """
    import os.path
    from json import loads as read, dumps
    from . import near

    def plain():
        return 1

    class Shop:
        async def busy(self, items):
            for item in items:
                if item and self.open or self.late:
                    yield [part for part in item if part]
            assert items
    """
).encode()


def test_the_figures_of_a_file(indexer: Any) -> None:
    figures = indexer.measure(SOURCE, "shop.py")
    assert (figures.functions, figures.classes, figures.lines) == (2, 1, 15)
    assert figures.imports == ["json", "os"]
    assert (figures.longest, figures.longest_lines) == ("busy:10", 5)
    # one way, for, if, and, or, comprehension, its condition, assert
    assert (figures.hardest, figures.hardest_complexity) == ("busy:10", 8)


def test_an_empty_file_has_no_longest_function(indexer: Any) -> None:
    figures = indexer.measure(b"", "empty.py")
    assert (figures.functions, figures.longest, figures.longest_lines) == (0, "", 0)


def test_doing_a_file_twice_leaves_one_row_and_counts(indexer: Any, tmp_path: Path) -> None:
    results = indexer.Results(tmp_path)
    results.save("a.py", indexer.measure(SOURCE, "a.py"), 1)
    results.save("a.py", indexer.measure(b"", "a.py"), 2)
    (row,) = results.rows()
    assert (row["runs"], row["deliveries"], row["functions"]) == (2, 2, 0)
    assert results.count() == 1
    assert results.workers() == {os.getpid(): 1}


def test_tests_and_nested_environments_are_not_indexed(indexer: Any, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    for name in ("a.py", "b.txt", "pkg/c.py", "pkg/tests/d.py", "lib/site-packages/e.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    assert indexer.find_sources([root, root]) == [str(root / "a.py"), str(root / "pkg" / "c.py")]
    assert indexer.find_sources([root], limit=1) == [str(root / "a.py")]


@pytest.mark.slow
def test_the_commands_of_its_text(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    for number in range(20):
        (sources / f"file{number}.py").write_bytes(SOURCE)
    (sources / "broken.py").write_text("def broken(:", encoding="utf-8")
    environment = {**os.environ, "INDEXER_DIR": str(tmp_path / "data")}

    def command(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments], cwd=example_directory(), env=environment, capture_output=True, text=True,
            check=True, timeout=60,
        ).stdout  # fmt: skip

    assert command("indexer.py", "send", str(sources)) == "21 messages sent\n"
    # The service as `mainspring run indexer:group` runs it, but until nothing is left.
    script = (
        "import anyio, functools, indexer; print(anyio.run(functools.partial(indexer.group.run, until_empty=True)))"
    )
    assert "clean" in command("-c", script)
    report = json.loads(command("indexer.py", "report"))
    assert (report["files"], report["functions"]) == (20, 40)
    assert report["most_imported"] == [["json", 20], ["os", 20]]
    assert "mainspring run indexer:group" in command("indexer.py")
