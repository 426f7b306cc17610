"""Fails where a docstring or a comment has a phrase that hides who does what.

Such prose is hard to read: it should name the caller, the worker, the server. Only the packages in ``CHECKED`` are read; a
package is added once its prose is plain.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BANNED = ("whoever", "nobody", "somebody", "so many", "be it", "all the same", "sees to")
CHECKED = (
    "__init__.py",
    "__main__.py",
    "budget.py",
    "cli",
    "core",
    "errors.py",
    "events.py",
    "group",
    "http",
    "mailbox",
    "offload",
    "policies.py",
    "redaction.py",
    "runtime",
    "loops",
    "session",
    "state",
    "states.py",
    "telemetry",
    "testing",
    "threads",
    "validation.py",
    "watchdog",
    "worker",
)
"""Packages and modules below ``src/mainspring``."""

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "mainspring"
PHRASE = re.compile(r"\b(?:" + "|".join(BANNED).replace(" ", r"[\s#-]+") + r")\b", re.IGNORECASE)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield each string that stands alone in a Python module, as it is written, with the number of its first line."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, "\n".join(lines[node.lineno - 1 : node.end_lineno])


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a Python module, those on neighbouring lines together, with the number of the first line."""
    found = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for _, block in groupby(enumerate(found), lambda one: one[1][0] - one[0]):
        texts = [comment for _, comment in block]
        yield texts[0][0], "\n".join(text for _, text in texts)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a file. In Lua and SQL nothing else has those words: there it is the whole file."""
    source = path.read_text(encoding="utf-8")
    return chain(docstrings(source), comments(source)) if path.suffix == ".py" else iter([(1, source)])


def banned(path: Path) -> list[str]:
    """Return a line for each banned phrase in this file."""
    return [
        f"{path}:{line + text.count(chr(10), 0, found.start())}: {' '.join(re.split(r'[^a-z]+', found[0].lower()))!r}"
        for line, text in prose(path)
        for found in PHRASE.finditer(text)
    ]


def main(names: list[str]) -> int:
    """Check these packages and modules, those in ``CHECKED`` by default."""
    places = [PACKAGE / name for name in names or CHECKED]
    paths = [path for place in places for path in sorted(place.rglob("*") if place.is_dir() else [place])]
    paths = [path for path in paths if path.suffix in (".py", ".lua", ".sql")]
    found = [f"{place}: there is no such file or directory" for place in places if not place.exists()]
    found += [f"{line}: name the one who acts" for path in paths if path.exists() for line in banned(path)]
    sys.stdout.writelines(f"{line}\n" for line in found)
    sys.stdout.write(f"{len(paths)} files, {len(found)} faults\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
