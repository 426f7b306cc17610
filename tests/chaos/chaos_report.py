"""The table of a run, and what it says of broken promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chaos_plan import Kind
from rich.table import Table

if TYPE_CHECKING:
    from chaos_judge import History, Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """One backend's run and its judgement."""

    backend: str
    history: History
    verdict: Verdict
    faults: dict[Kind, int]
    seconds: float


def table(outcomes: list[Outcome]) -> Table:
    """One column a backend."""
    shown = Table(title="Chaos", title_justify="left")
    shown.add_column("")
    for outcome in outcomes:
        shown.add_column(outcome.backend, justify="right")
    for name, *cells in rows(outcomes):
        shown.add_row(name, *cells)
    return shown


def rows(outcomes: list[Outcome]) -> list[list[str]]:
    """The lines of the table, a cell for each backend."""

    def line(name: str, cell: object) -> list[str]:
        return [name, *(str(cell(outcome)) for outcome in outcomes)]  # type: ignore[operator]

    reasons = sorted({why for outcome in outcomes for why in outcome.verdict.again})
    return [
        line("messages accepted", lambda o: f"{len(o.history.accepted):,}"),
        line("handler runs", lambda o: f"{len(o.history.runs):,}"),
        *(line(kind, lambda o, kind=kind: o.faults.get(kind, "-")) for kind in Kind),
        line("begun with more claimed ahead", lambda o: f"{o.verdict.ahead:,}"),
        line("  most in hand", lambda o: o.verdict.most_ahead),
        line("  given back before they began", lambda o: f"{o.history.given_back:,}"),
        line("ticks of schedules", lambda o: f"{sum(len(list(due.ticks)) for due in o.history.due.values()):,}"),
        *(
            line(f"calls of {what} at once", lambda o, what=what: o.verdict.at_once.get(what, "-"))
            for what in dict.fromkeys(what for outcome in outcomes for what in outcome.verdict.at_once)
        ),
        line("lost", lambda o: o.verdict.lost),
        line("twice in transactions", lambda o: "-" if o.verdict.twice is None else o.verdict.twice),
        line("runs again", lambda o: o.verdict.again.total()),
        *(line(f"  {why}", lambda o, why=why: o.verdict.again[why]) for why in reasons),
        line("  effect done before", lambda o: o.verdict.doubled),
        line("dead letters", lambda o: len(o.history.dead)),
        line("longest gap", lambda o: f"{o.verdict.gap:.1f} s"),
        line("time", lambda o: f"{o.seconds:.0f} s"),
        line("messages a second", lambda o: f"{len(o.history.accepted) / o.seconds:,.0f}" if o.seconds else "-"),
        line("promises broken", lambda o: len(o.verdict.broken)),
    ]
