"""Fails where a file or a function is longer than the house allows."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FILE_LINES = 800
FUNCTION_LINES = 60
CHECKED = ("src", "examples", "benchmarks", "scripts")


def too_long(path: Path) -> list[str]:
    """What is too long in this file, one line each."""
    source = path.read_text(encoding="utf-8")
    lines = len(source.splitlines())
    found = [f"{path}: {lines} lines, at most {FILE_LINES} are allowed"] if lines > FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(
                    f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES} are allowed"
                )
    return found


def main(directories: list[str]) -> int:
    """Look at every Python file below these directories, those in ``CHECKED`` by default."""
    paths = [path for directory in directories or CHECKED for path in sorted(Path(directory).rglob("*.py"))]
    found = [line for path in paths for line in too_long(path)]
    sys.stdout.writelines(f"{line}\n" for line in found)
    sys.stdout.write(f"{len(paths)} files, {len(found)} too long\n")
    return 1 if found or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
