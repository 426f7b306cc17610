"""CONTRIBUTING.md: the commands, the files and the packages that it names are there, and no package is missing."""

from __future__ import annotations

import re
from pathlib import Path

import mainspring

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
PACKAGE = Path(mainspring.__file__).parent
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
FILE = re.compile(r"/|\.(?:md|py|toml|txt)$|^\.importlinter$")
OLD_PATHS = {"loops", "session"}
"""Packages that only keep old import paths."""
VARIABLE = re.compile(r"\b([A-Z_]{4,})=")


def named() -> list[str]:
    """What stands in backticks, on one line each."""
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", PAGE.read_text(encoding="utf-8"))]


def answers() -> set[str]:
    """The packages and modules that the table of questions names."""
    table = PAGE.read_text(encoding="utf-8").partition("| question | answer |")[2].partition("\n\n")[0]
    return {name.rstrip("/") for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[2])}


def test_the_targets_and_variables_of_make_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    used = {words.split()[1] for words in named() if words.startswith("make ")}
    assert {"test", "lint", "simulate", "chaos", "mutants", "bench"} <= used
    assert used <= set(TARGET.findall(makefile))
    given = {variable for words in named() for variable in VARIABLE.findall(words)}
    assert given
    assert {variable for variable in given if f"$({variable})" not in makefile} == set()


def test_the_files_are_there() -> None:
    words = {word.rpartition("=")[2] for text in named() for word in text.split()}
    paths = {word for word in words if FILE.search(word)} - {".venv/bin/python", "/metrics"}
    assert len(paths) > 40
    assert {path for path in paths if not ((ROOT / path).exists() or (PACKAGE / path).exists())} == set()


def test_each_package_answers_a_question() -> None:
    found = answers()
    assert {name for name in found if not (PACKAGE / name).exists()} == set()
    packages = {init.parent.relative_to(PACKAGE) for init in PACKAGE.rglob("__init__.py")} - {Path()}
    top = {path.as_posix() for path in packages if len(path.parts) == 1 and path.name != "examples"}
    backends = {path.as_posix() for path in packages if path.parts[0] == "mailbox" and len(path.parts) == 2}
    modules = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    everywhere = found | {name.rstrip("/") for name in named()}
    assert (top - OLD_PATHS | backends) - found == set(), "the table of CONTRIBUTING.md lacks these packages"
    assert (modules | OLD_PATHS) - everywhere == set(), "CONTRIBUTING.md lacks these"
