"""Supervised services: what they cost and what they survive, beside other supervisors.

``python benchmarks/services.py [CASE …] [SYSTEM …] [--quick]``; all cases and all systems where none is named. The supervisors
are set up as their documentation says (``supervisors/systems.py``, ``supervisors/config``); all run the same shell programs
(``supervisors/programs``). Each case has a directory and a session of its own, and all its processes are killed at its end. The
cells of all cases are written to standard error as a table.

supervisord, circus and honcho run in virtual environments of their own; s6 and runit are Debian's packages.
"""

from __future__ import annotations

import signal
import statistics
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from common import Row, machine, missing, quick, report, rotated, words
from supervisors import tree
from supervisors.cases import CASES, MANY, STOPPED, Cell
from supervisors.systems import Mainspring, System, systems

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 1 if quick() else 3
MEASURED = ("many", "latency", "stop")
"""Cases with figures, which are measured in rounds; of the others one run tells all."""
GOALS: dict[str, tuple[str, float, Callable[[float], str]]] = {
    f"{MANY} services: said to be running": ("20 s", 20.0, lambda value: f"{value:.2f} s"),
    f"{MANY} services: memory (RSS)": ("80 MiB", 80.0, lambda value: f"{value:.1f} MiB"),
    f"{MANY} idle services: CPU": ("1 % of a core", 0.01, lambda value: f"{value:.2%}"),
    "SIGKILL to replacement": ("50 ms", 0.05, lambda value: f"{value * 1e3:.1f} ms"),
    f"stop of {STOPPED}": ("1 s", 1.0, lambda value: f"{value:.2f} s"),
}
Figures = dict[str, dict[str, list[Cell]]]
"""The cells of each line of the table, by system, one for each round."""


def asked() -> tuple[list[str], list[System]]:
    """The cases and the systems that the command line names."""
    known = {system.title.lower(): system for system in systems()}
    names = [word.lower() for word in words()]
    if unknown := set(names) - set(known) - set(CASES):
        raise SystemExit(f"there is no {', '.join(sorted(unknown))}; there are {', '.join([*CASES, *known])}")
    cases = [name for name in CASES if name in names] or list(CASES)
    return cases, [known[name] for name in known if name in names] or list(known.values())


def measured(case: str, system: System) -> dict[str, Cell]:
    try:
        return CASES[case](system)
    except TimeoutError as error:
        return {case: Cell(str(error))}


def measure(cases: list[str], there: list[System]) -> Figures:
    figures: Figures = {}
    for case in cases:
        for number in range(ROUNDS if case in MEASURED else 1):
            for system in rotated(there, number):
                print(f"{case}: {system.title} …", file=sys.stderr)
                for line, cell in measured(case, system).items():
                    figures.setdefault(line, {}).setdefault(system.title, []).append(cell)
    return figures


def shown(cells: list[Cell]) -> str:
    """The cell of the median round."""
    with_value = sorted((cell for cell in cells if cell.value is not None), key=lambda cell: cell.value or 0.0)
    if not with_value:
        return cells[0].text if cells else "-"
    return statistics.median_low([(cell.value or 0.0, cell.text) for cell in with_value])[1]


def table(figures: Figures, all_systems: list[System], away: dict[str, str]) -> Table:
    text = Table(title=f"Supervisors, on {machine()}", title_justify="left", show_lines=True)
    text.add_column("case")
    for system in all_systems:
        text.add_column(f"{system.title} {'' if system.title in away else system.version()}".strip())
    for line, cells in figures.items():
        text.add_row(line, *(away.get(one.title) or shown(cells.get(one.title, [])) for one in all_systems))
    return text


def rows(figures: Figures, peers: list[System]) -> list[Row]:
    """Ours beside its goals, then each line beside what the peers have."""
    ours = Mainspring.title
    found = []
    for line, (goal, most, show) in GOALS.items():
        if values := [cell.value for cell in figures.get(line, {}).get(ours, []) if cell.value is not None]:
            found.append(
                Row(f"services: {line} / {goal}", show(statistics.median(values)), goal, [one / most for one in values],
                    1.0, at_most=True, note=shown(figures[line][ours]))
            )  # fmt: skip
    for line, cells in figures.items():
        others = "; ".join(f"{one.title}: {shown(cells[one.title])}" for one in peers if one.title in cells)
        found.append(Row(f"services: {line}", shown(cells.get(ours, [])), others))
    return found


def main() -> None:
    tree.adopt()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes of the case are killed
    cases, chosen = asked()
    away = {system.title: why for system in chosen if (why := system.missing()) is not None}
    there = [system for system in chosen if system.title not in away]
    report(*(missing(f"services: {title}", why) for title, why in away.items()))
    figures = measure(cases, there)
    Console(stderr=True, width=220).print(table(figures, chosen, away))
    report(*rows(figures, [system for system in there if not isinstance(system, Mainspring)]))


if __name__ == "__main__":
    main()
