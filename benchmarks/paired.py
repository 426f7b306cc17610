"""This code beside an earlier revision of it, in turns: ``python benchmarks/paired.py [--quick] REVISION [STORE ...]``.

The stores: memory, sqlite, redis, postgres, nats. A ratio is this code's rate by that of the revision (for pickup the
revision's time by this code's), so that above 1 is better in every row; each is the median of the rounds' own ratios.
The revision is checked out beside, and runs in this interpreter with the packages that are installed in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import HERE, Row, benchmark, chosen, median, quick, report, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = HERE.parent
ROUNDS = 3 if quick() else 7
GOAL = 0.97
"""Nothing may become slower by more than 3 %."""
PATIENCE = 300.0


@dataclass(frozen=True)
class Case:
    """One verb of ``peers/harness.py``, with the count and the concurrency it is run with."""

    verb: str
    count: int
    concurrency: int = 100
    figure: str = "rate"
    less_is_better: bool = False


SENDS = (Case("send-one", 2_000), Case("send-100", 20_000), Case("send-bulk", 50_000))
CASES = {
    "sqlite": (*SENDS, Case("drain", 40_000)),
    "redis": (*SENDS, Case("drain", 60_000), Case("pickup", 200, figure="p50", less_is_better=True)),
    "postgres": (*SENDS, Case("drain", 40_000, 1_000), Case("pickup", 200, figure="p50", less_is_better=True)),
    "nats": (*SENDS, Case("drain", 20_000, 300), Case("pickup", 200, figure="p50", less_is_better=True)),
}


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The sources of ``revision`` in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="paired-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


@contextmanager
def store(name: str) -> Iterator[tuple[str, Callable[[], None]] | None]:
    """The URL of a mailbox on a store of that kind, and what empties it; None where there is no server."""
    with ExitStack() as stack:
        if name == "sqlite":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()), "mailbox")

            def empty() -> None:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()

            yield f"sqlite:///{folder}/bench.db?name=bench", empty
        elif name == "postgres":
            import postgres

            stack.callback(postgres.drop)
            yield postgres.url(postgres.Contender("Mainspring", "ours.py")), postgres.renew
        else:
            import local_server

            kind = benchmark(name)
            there = stack.enter_context(local_server.server(getattr(kind, name.upper())))
            yield None if there is None else (local_server.with_name(there), lambda: kind.empty(there))


def measure(tree: Path, command: list[str], figure: str, row: str = "") -> Any:
    """The figure that one run of ``command`` gives with the sources of ``tree``, of the row that has ``row`` in its name."""
    run = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": str(tree / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    rows = (json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    return next(found for found in rows if row in found.get("name", ""))[figure]


def row(name: str, case: Case, run: Callable[[Path], float], trees: tuple[Path, Path]) -> Row:
    """Both in turns; which of the two is first changes from round to round."""
    figures: dict[Path, list[float]] = {tree: [] for tree in trees}
    for number in range(ROUNDS):
        for tree in trees if number % 2 else trees[::-1]:
            figures[tree].append(run(tree))
    now, before = (figures[tree] for tree in trees)
    better, worse = (before, now) if case.less_is_better else (now, before)
    ratios = [a / b for a, b in zip(better, worse, strict=True)]
    what = f"{name}: {case.verb}, this code / the revision"
    return Row(what, f"{median(now):,.4g}", f"{median(before):,.4g}", ratios, GOAL)


def main() -> int:
    if not words():
        print(__doc__, file=sys.stderr)
        return 2
    revision, *named = words()
    names = chosen(named, ["memory", *CASES])
    with checked_out(revision) as before:
        trees = (ROOT, before)
        if "memory" in names:
            command = [str(HERE / "memory.py"), "--quick"]

            def memory(tree: Path) -> float:
                return median(measure(tree, command, "ratios", "serialize=False"))

            report(row("memory", Case("full path", 0), memory, trees))
        for name in names:
            for case in CASES.get(name, ()):
                compare(name, case, trees)
    return 0


def compare(name: str, case: Case, trees: tuple[Path, Path]) -> None:
    """Report one row, if there is a server for it."""
    with store(name) as there:
        if there is None:
            return
        url, empty = there

        def run(tree: Path) -> float:
            empty()
            command = [str(HERE / "peers" / "ours.py"), case.verb, url, str(case.count), str(case.concurrency)]
            return measure(tree, command, case.figure)

        report(row(name, case, run, trees))


if __name__ == "__main__":
    sys.exit(main())
