"""``mainspring check``: the calibration rules of a group as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer

from mainspring.cli.limit_checks import limit_lines, limit_rules, retry_lines
from mainspring.cli.target import load_group
from mainspring.cli.user_errors import FAILED, UserError
from mainspring.group.calibration import Rule, Timeouts, all_rules, unjudged

if TYPE_CHECKING:
    from rich.console import Console


def check_target(
    target: str, *, grace: float | None, longest: float | None, beat_gap: float | None, as_json: bool
) -> int:
    """Judge the group's timeouts. Return 1 if a rule does not hold."""
    group = load_group(target)
    found = group.timeouts()
    if not found:
        raise UserError(f"{target} has no loops whose timeouts could be checked; name a LoopGroup with a MainLoop")
    known = {"grace": grace, "longest": longest, "beat_gap": beat_gap}
    told: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
    loops = [replace(timeouts, **told) for timeouts in found]
    rules = [*all_rules(loops), *limit_rules(group)]
    broken = [rule for rule in rules if not rule.ok]
    remarks = [*retry_lines(group, loops), *limit_lines(group)]
    open_questions = list(dict.fromkeys(line for timeouts in loops for line in unjudged(timeouts)))
    if as_json:
        typer.echo(json.dumps(_as_json(target, rules, open_questions, loops), indent=2))
    else:
        from rich.console import Console

        _print(Console(), target, rules, open_questions, remarks)
    return FAILED if broken else 0


def _as_json(target: str, rules: list[Rule], open_questions: list[str], loops: list[Timeouts]) -> dict[str, Any]:
    return {
        "target": target,
        "ok": all(rule.ok for rule in rules),
        "rules": [asdict(rule) if not rule.ok else {**asdict(rule), "advice": "", "value": None} for rule in rules],
        "not_judged": open_questions,
        "timeouts": [asdict(timeouts) for timeouts in loops],
    }


def _print(console: Console, target: str, rules: list[Rule], open_questions: list[str], remarks: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("loop", "rule", "left", "right", "verdict", title=f"timeouts of {target}", title_justify="left")
    for rule in rules:
        verdict = Text("holds", "green") if rule.ok else Text("fails", "red")
        table.add_row(rule.loop or "(group)", Text(rule.formula), *rule.figures, verdict)
    console.print(table)
    for line in remarks:
        console.print(Text(line), soft_wrap=True)
    for rule in rules:
        if not rule.ok:
            console.print(Text(f"fails: {rule.name}: {rule.advice}", "red"), soft_wrap=True)
    for line in open_questions:
        console.print(Text(f"not judged: {line}", "yellow"), soft_wrap=True)
