"""What the demo prints: a line for each step, and the report as tables or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from mainspring.cli.demo_report import DemoReport

PROGRESS_STEP = 0.1
"""The share of the work after which the next line about progress is printed."""


class DemoView:
    """Prints what goes on. With ``as_json`` that goes to standard error, and the report to standard output."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = Console(stderr=as_json)
        self._printed = 0.0

    def note(self, text: str) -> None:
        """Print a step of the demo."""
        self._console.print(Text(text), soft_wrap=True)

    def service(self, line: str) -> None:
        """Print a line that the service wrote."""
        self._console.print(Text(f"  | {line}", "dim"), soft_wrap=True)

    def progress(self, done: int, total: int, in_flight: int, seconds: float) -> None:
        """Print how much is done, if that is a step more than in the last line."""
        share = min(1.0, done / total)
        if share >= min(1.0, self._printed + PROGRESS_STEP) and self._printed < 1:
            rate = done / seconds if seconds else 0.0
            self.note(f"{done:,} of {total:,} done, {in_flight} in flight, {seconds:.1f} s, {rate:,.0f} a second")
            self._printed = share

    def report(self, report: DemoReport) -> None:
        """Print the account at the end."""
        if self._as_json:
            typer.echo(json.dumps(report.as_json(), indent=2))
            return
        self._console.print(_account(report))
        for path, error in report.dead_lettered.items():
            self._console.print(Text(f"dead letter: {path}: {error}", "yellow"), soft_wrap=True)
        self._console.print(_findings(report))
        if report.ok:
            self._console.print(Text("every file is accounted for, exactly once", "bold green"))
        for problem in report.problems:
            self._console.print(Text(f"NOT AS PROMISED: {problem}", "bold red"), soft_wrap=True)


def _account(report: DemoReport) -> Table:
    account = Table("", "", show_header=False, title="what became of the files", title_justify="left")
    for name, value in (
        ("files", f"{report.files:,}"),
        ("messages sent", f"{report.sent:,}"),
        ("done", f"{report.done:,}"),
        ("redelivered", f"{report.redelivered:,} (of these, {report.run_twice:,} had been done but not acknowledged)"),
        ("dead-lettered", f"{len(report.dead_lettered):,}"),
        ("time", f"{report.seconds:.1f} s"),
        ("messages per second", f"{report.rate:,.0f}"),
        ("files by worker process", ", ".join(f"{pid}: {count:,}" for pid, count in report.workers.items())),
        ("killed (SIGKILL)", _or_none(report.killed)),
        ("drained (SIGTERM)", _or_none(report.drained)),
    ):
        account.add_row(name, Text(value))
    return account


def _or_none(pid: int | None) -> str:
    return "nobody" if pid is None else f"process {pid}"


def _findings(report: DemoReport) -> Table:
    found = report.summary
    totals = f"{found['lines']:,} lines, {found['functions']:,} functions, {found['classes']:,} classes"
    table = Table(title=f"what is in them: {totals}", title_justify="left")
    for heading in ("longest functions", "lines", "most complex", "ways", "most imported", "files"):
        table.add_column(heading, overflow="fold")
    columns = (found["longest_functions"], found["most_complex_functions"], found["most_imported"])
    for row in zip(*columns, strict=False):
        table.add_row(
            *(Text(str(cell) if isinstance(cell, int) else _short(str(cell))) for pair in row for cell in pair)
        )
    return table


def _short(place: str) -> str:
    """Shorten ``…/asyncio/tasks.py:wait:373`` to its last two parts."""
    return "/".join(place.split("/")[-2:])
