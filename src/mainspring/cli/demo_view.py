"""What the demo shows: a live bar on a terminal, plain lines elsewhere, and the report as tables or as JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from types import TracebackType

    from mainspring.cli.demo_report import DemoReport

PLAIN_STEP = 0.1
"""Without a terminal: the share of the work after which the next line is printed."""


class View:
    """Prints what goes on. Entered, it may own the screen's last lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def note(self, text: str) -> None:
        """Something the demo has done."""
        self._console.print(Text(text), soft_wrap=True)

    def service(self, line: str) -> None:
        """A line that the service wrote."""
        self._console.print(Text(f"  | {line}", "dim"), soft_wrap=True)

    def progress(self, done: int, total: int, in_flight: int, seconds: float) -> None:
        """How far it is."""
        if done >= total or done >= (self._shown + PLAIN_STEP) * total:
            if self._shown < 1:
                rate = done / seconds if seconds else 0.0
                self.note(f"{done:,} of {total:,} done, {in_flight} in flight, {seconds:.1f} s, {rate:,.0f} a second")
            self._shown = 1.0 if done >= total else done / total

    def report(self, report: DemoReport) -> None:
        """The account at the end."""
        self._console.print(_account(report))
        for path, error in report.dead.items():
            self._console.print(Text(f"dead letter: {path}: {error}", "yellow"), soft_wrap=True)
        self._console.print(_findings(report))
        if report.ok:
            self._console.print(Text("every file is accounted for, exactly once", "bold green"))
        for problem in report.problems:
            self._console.print(Text(f"NOT AS PROMISED: {problem}", "bold red"), soft_wrap=True)


class LiveView(View):
    """The same with a bar that moves."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("indexing"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:,.0f} a second, {task.fields[in_flight]} in flight"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("indexing", total=None, rate=0.0, in_flight=0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def progress(self, done: int, total: int, in_flight: int, seconds: float) -> None:
        rate = done / seconds if seconds else 0.0
        self._bar.update(self._task, completed=done, total=total, rate=rate, in_flight=in_flight)


class JsonView(View):
    """What goes on to standard error, the report to standard output as JSON."""

    def report(self, report: DemoReport) -> None:
        typer.echo(json.dumps(report.as_json(), indent=2))


def make_view(*, as_json: bool) -> View:
    """The view that fits where the output goes."""
    if as_json:
        return JsonView(Console(stderr=True))
    console = Console()
    return LiveView(console) if sys.stdout.isatty() else View(console)


def _account(report: DemoReport) -> Table:
    account = Table("", "", show_header=False, title="what became of the files", title_justify="left")
    for name, value in (
        ("files", f"{report.files:,}"),
        ("messages sent", f"{report.sent:,}"),
        ("done", f"{report.done:,}"),
        ("redelivered", f"{report.redelivered:,} (of these, {report.run_twice:,} had been done but not acknowledged)"),
        ("dead-lettered", f"{len(report.dead):,}"),
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
    """``…/asyncio/tasks.py:wait:373`` to its last two parts."""
    return "/".join(place.split("/")[-2:])
