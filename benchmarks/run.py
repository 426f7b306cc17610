"""All benchmarks, one after the other, as one table of ratios: ``python benchmarks/run.py [--quick] [--flush] [NAME …]``.

Each ratio is measured in one run on this machine: the contenders take turns, a ratio is the median of the rounds' own, and the
table has the smallest and the largest of these beside it. Rows that fall short of their goal come first. Peers run in virtual
environments of their own (``.venv-peers``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common import HERE, NOT_TO_BE_QUOTED, Row, chosen, machine, missing, quick, words

SCRIPTS = (
    "memory",
    "sqlite",
    "idle",
    "many_mailboxes",
    "leaving",
    "imports",
    "offload",
    "simulation",
    "redelivery",
    "redis",
    "postgres",
    "postgres_churn",
    "nats",
    "processes",
    "portal",
    "session",
    "tasks",
    "schedules",
    "limits",
    "services",
)


def measure(name: str, flags: list[str]) -> list[Row]:
    run = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), *flags], stdout=subprocess.PIPE, text=True, check=False
    )
    rows = [Row(**json.loads(line)) for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode:
        rows.append(missing(f"{name}: failed with status {run.returncode}", "-"))
    return rows


def shown(row: Row) -> tuple[str, ...]:
    goal = "-" if row.goal is None else f"{'<=' if row.at_most else '>='} {row.goal:g}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    verdict = {True: "reached", False: "FALLS SHORT", None: ""}[row.ok]
    return row.name, row.ours, row.other, ratio, row.spread, goal, verdict, row.note


def main() -> int:
    flags = [word for word in sys.argv[1:] if word.startswith("-")]
    names = chosen(words(), SCRIPTS)
    rows: list[Row] = []
    console = Console(width=None if sys.stdout.isatty() else 200)
    if quick():
        console.print(NOT_TO_BE_QUOTED, style="bold")
    for name in names:
        console.print(f"measuring {name} …", style="dim")
        rows += measure(name, flags)
    table = Table(title=f"Mainspring, measured on {machine()}", title_justify="left")
    for column in ("what", "ours", "other", "ratio", "spread", "goal", "", "how"):
        table.add_column(column, justify="right" if column in ("ours", "other", "ratio", "spread", "goal") else "left")
    for row in sorted(rows, key=lambda row: row.ok is not False):  # rows that fall short are first
        table.add_row(*shown(row))
    console.print(table)
    Path("bench.json").write_text(json.dumps([vars(row) for row in rows], indent=1))
    failed = [row for row in rows if row.ok is False or "failed with status" in row.name]
    console.print(
        f"{len(rows) - len(failed)} rows reached or without a goal, {len(failed)} fell short; bench.json has them"
    )
    if quick():
        console.print(NOT_TO_BE_QUOTED, style="bold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
