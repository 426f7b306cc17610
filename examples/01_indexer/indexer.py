"""A service that indexes Python files: how long, how branchy, and what they import.

    python indexer.py send /usr/lib/python3.11         one message a file
    mainspring run indexer:group --processes 2         the service; Ctrl-C stops it
    python indexer.py report                           what it has found so far

The queue and the results are two SQLite files in $INDEXER_DIR (default: ./indexer-data).
"""

from __future__ import annotations

import ast
import json
import os
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio

from mainspring import Context, DeadLetterPolicy, LoopGroup, MainLoop, RetryPolicy, open_mailbox

HOME = Path(os.environ.get("INDEXER_DIR", "indexer-data")).absolute()
LIMIT = 2_000


@dataclass
class SourceFile:
    """The message: one file to look at."""

    path: str


@dataclass
class Figures:
    """What is measured of one file."""

    lines: int
    functions: int
    classes: int
    imports: list[str]
    longest: str
    longest_lines: int
    hardest: str
    hardest_complexity: int


# ------------------------------------------------------------------------------------------------------------ the work

BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def complexity(function: ast.AST) -> int:
    """An estimate of the cyclomatic complexity: one, and one more for each place where the way parts."""
    ways = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            ways += 1
        elif isinstance(node, ast.BoolOp):
            ways += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            ways += 1 + len(node.ifs)
    return ways


def imported(node: ast.AST) -> list[str]:
    """The top-level packages that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.partition(".")[0]]
    return []


def measure(source: bytes, path: str) -> Figures:
    """Parse a file; raises SyntaxError where it is no Python."""
    nodes = list(ast.walk(ast.parse(source, path)))
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    lengths = {f"{node.name}:{node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    ways = {f"{node.name}:{node.lineno}": complexity(node) for node in functions}
    longest = max(lengths, key=lambda name: lengths[name], default="")
    hardest = max(ways, key=lambda name: ways[name], default="")
    return Figures(
        lines=source.count(b"\n") + 1,
        functions=len(functions),
        classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
        imports=sorted({name for node in nodes for name in imported(node)}),
        longest=longest,
        longest_lines=lengths.get(longest, 0),
        hardest=hardest,
        hardest_complexity=ways.get(hardest, 0),
    )


# --------------------------------------------------------------------------------------------------------- the results


class Results:
    """A table with one row a file. A file that is measured again replaces its row, and is counted."""

    def __init__(self, home: Path) -> None:
        self._path = home / "results.db"

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=30)
        connection.row_factory = sqlite3.Row
        connection.execute(
            "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, figures TEXT NOT NULL, runs INTEGER NOT NULL,"
            " deliveries INTEGER NOT NULL, worker INTEGER NOT NULL)"
        )
        return connection

    def save(self, path: str, figures: Figures, deliveries: int) -> None:
        """Store what was found. Doing it twice changes nothing but the count: a message can come more than once."""
        with closing(self._open()) as connection, connection:
            connection.execute(
                "INSERT INTO files VALUES (?, ?, 1, ?, ?) ON CONFLICT (path) DO UPDATE SET figures = excluded.figures,"
                " runs = runs + 1, deliveries = excluded.deliveries, worker = excluded.worker",
                (path, json.dumps(asdict(figures)), deliveries, os.getpid()),
            )

    def count(self) -> int:
        """How many files are done."""
        with closing(self._open()) as connection:
            return int(connection.execute("SELECT count(*) FROM files").fetchone()[0])

    def workers(self) -> dict[int, int]:
        """Process ids by how many files each has done."""
        with closing(self._open()) as connection:
            return dict(connection.execute("SELECT worker, count(*) FROM files GROUP BY worker").fetchall())

    def rows(self) -> list[dict[str, Any]]:
        """Everything, by path."""
        with closing(self._open()) as connection:
            found = connection.execute("SELECT * FROM files ORDER BY path").fetchall()
        return [{**dict(row), **json.loads(row["figures"])} for row in found]


# --------------------------------------------------------------------------------------------------------- the service

results = Results(HOME)


def queue_url(home: Path) -> str:
    """The mailbox in this directory."""
    return f"sqlite:///{home / 'queue.db'}?name=files"


def index(file: SourceFile, ctx: Context) -> None:
    """The handler. A plain function runs in a worker thread, so parsing does not hold the event loop up."""
    figures = measure(Path(file.path).read_bytes(), file.path)
    results.save(file.path, figures, ctx.message.delivery_count)


HOME.mkdir(parents=True, exist_ok=True)
group = LoopGroup(
    [
        MainLoop(
            open_mailbox(queue_url(HOME)),
            index,
            name="indexer",
            concurrency=4,
            visibility_timeout=6,  # when a worker is killed, another one has its files after 6 seconds
            retry=RetryPolicy(initial_delay=0.5, max_delay=5),
            dead_letter=DeadLetterPolicy(max_attempts=4, include=(SyntaxError, ValueError)),  # will not parse next time
        )
    ],
    name="indexer",
    shutdown_timeout=10,
    block_threshold=5,  # below the lease
)


# --------------------------------------------------------------------------------------------------- sending, reporting


def find_sources(directories: list[Path], limit: int = LIMIT) -> list[str]:
    """The Python files below these directories, without tests (some are broken on purpose) and nested environments."""
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found: dict[str, None] = {}
    for directory in directories:
        if directory.is_file():
            found[str(directory)] = None
        for path in sorted(directory.rglob("*.py")):
            if not skipped.intersection(path.relative_to(directory).parts):
                found[str(path)] = None
    return list(found)[:limit]


async def send_files(home: Path, paths: list[str]) -> list[str]:
    """One message a file; the messages' ids."""
    async with open_mailbox(queue_url(home), body=SourceFile) as mailbox:
        return await mailbox.send_many(SourceFile(path) for path in paths)


def summary(home: Path, top: int = 5) -> dict[str, Any]:
    """Totals, and the most remarkable functions and imports."""
    rows = Results(home).rows()
    longest = sorted(rows, key=lambda row: -row["longest_lines"])[:top]
    hardest = sorted(rows, key=lambda row: -row["hardest_complexity"])[:top]
    imports = Counter(name for row in rows for name in row["imports"])
    return {
        "files": len(rows),
        "lines": sum(row["lines"] for row in rows),
        "functions": sum(row["functions"] for row in rows),
        "classes": sum(row["classes"] for row in rows),
        "longest_functions": [[f"{row['path']}:{row['longest']}", row["longest_lines"]] for row in longest],
        "most_complex_functions": [[f"{row['path']}:{row['hardest']}", row["hardest_complexity"]] for row in hardest],
        "most_imported": [list(item) for item in imports.most_common(top)],
    }


def main(arguments: list[str]) -> str:
    """The two commands above that are not ``mainspring run``."""
    if arguments[:1] == ["send"] and len(arguments) > 1:
        ids = anyio.run(send_files, HOME, find_sources([Path(name) for name in arguments[1:]]))
        return f"{len(ids)} messages sent"
    if arguments == ["report"]:
        return json.dumps(summary(HOME), indent=2)
    return str(__doc__)


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]) + "\n")
