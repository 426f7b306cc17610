"""Fails where a file or a function is longer, or a function nested deeper, than the house allows."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FILE_LINES = 800
FUNCTION_LINES = 60
NESTING = 4
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
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
            if (levels := nesting(node)) > NESTING:
                found.append(
                    f"{path}:{node.lineno}: {node.name} has {levels} levels of blocks, at most {NESTING} are allowed"
                )
    return found


def nesting(node: ast.AST, level: int = 0) -> int:
    """Return the deepest level of blocks in ``node``, without inner functions. An ``elif`` is as deep as its ``if``."""
    deepest = level
    for name, value in ast.iter_fields(node):
        children = [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
        for child in children:
            if isinstance(child, DEFINITIONS):
                continue
            is_elif = isinstance(node, ast.If) and name == "orelse" and len(children) == 1 and isinstance(child, ast.If)
            inner = level + 1 if isinstance(child, BLOCKS) and not is_elif else level
            deepest = max(deepest, nesting(child, inner))
    return deepest


def main(directories: list[str]) -> int:
    """Look at every Python file below these directories, those in ``CHECKED`` by default."""
    paths = [path for directory in directories or CHECKED for path in sorted(Path(directory).rglob("*.py"))]
    found = [line for path in paths for line in too_long(path)]
    sys.stdout.writelines(f"{line}\n" for line in found)
    sys.stdout.write(f"{len(paths)} files, {len(found)} too long or too deep\n")
    return 1 if found or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
