"""Fails where prose has a phrase that hides who does what: it should name the caller, the worker, the server.

Read are docstrings, comments and texts in Python (strings of more than one word, such as those of errors and log lines), and
all of the docs, Lua, SQL and HTML.
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
CHECKED = ("src/mainspring", "docs", "examples", "README.md", "CONTRIBUTING.md")
SUFFIXES = (".py", ".lua", ".sql", ".html", ".md")

ROOT = Path(__file__).resolve().parent.parent
PHRASE = re.compile(r"\b(?:" + "|".join(BANNED).replace(" ", r"[\s#-]+") + r")\b", re.IGNORECASE)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield each string of more than one word of a Python module, as it is written, with the number of its first line."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
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
    """Yield the texts and comments of a file. Except in Python, nothing else has those words: there it is the whole file."""
    source = path.read_text(encoding="utf-8")
    return chain(texts(source), comments(source)) if path.suffix == ".py" else iter([(1, source)])


def banned(path: Path) -> list[str]:
    """Return a line for each banned phrase in this file."""
    found = [
        f"{path}:{line + text.count(chr(10), 0, phrase.start())}: {' '.join(re.split(r'[^a-z]+', phrase[0].lower()))!r}"
        for line, text in prose(path)
        for phrase in PHRASE.finditer(text)
    ]
    return list(dict.fromkeys(found))  # of an f-string, each part is a text that has all its lines


def main(names: list[str]) -> int:
    """Check these files and all below these folders, those in ``CHECKED`` by default."""
    places = [ROOT / name for name in names or CHECKED]
    paths = [path for place in places for path in sorted(place.rglob("*") if place.is_dir() else [place])]
    paths = [path for path in paths if path.suffix in SUFFIXES]
    found = [f"{place}: there is no such file or directory" for place in places if not place.exists()]
    found += [f"{line}: name the one who acts" for path in paths if path.exists() for line in banned(path)]
    sys.stdout.writelines(f"{line}\n" for line in found)
    sys.stdout.write(f"{len(paths)} files, {len(found)} faults\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
