"""How far a long command has come, on standard error: a bar on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from mainspring.core import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EVERY = 10.0
"""Seconds between two lines where standard error is no terminal."""


@contextmanager
def progress(what: str, total: float | None, *, every: float = EVERY) -> Iterator[Callable[[float], None]]:
    """Yield a function that shows how much of ``total`` is done, from any thread; None if the total is not known."""
    if not sys.stderr.isatty():
        yield _Lines(what, total, every).show
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


class _Lines:
    def __init__(self, what: str, total: float | None, every: float) -> None:
        self._what = what
        self._total = total
        self._every = every
        self._began = clock.monotonic()
        self._next = self._began + every

    def show(self, done: float) -> None:
        now = clock.monotonic()
        if now < self._next:
            return
        self._next = now + self._every
        typer.echo(f"{self._what}: {self._told(done, now - self._began)}", err=True)

    def _told(self, done: float, took: float) -> str:
        if self._total is None:
            return f"{done:,.0f} runs in {took:.0f} s"
        left = f", about {took * (self._total - done) / done:.0f} s to go" if done > 0 else ""
        return f"{done / self._total:.0%} in {took:.0f} s{left}"
