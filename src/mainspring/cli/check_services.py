"""``mainspring check FILE``: do the times of supervised services fit together, and into the orchestrator's kill time."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from mainspring.cli.service_file import read_service_file
from mainspring.cli.user_errors import FAILED
from mainspring.group.calibration import KILL_MARGIN, Rule, seconds
from mainspring.services.stop_times import stop_chains, stop_phases

if TYPE_CHECKING:
    from mainspring.services.config import OrchestratorConfig
    from mainspring.services.spec import ServiceSpec
    from mainspring.services.stop_times import StopChain, StopPhases


def check_service_file(path: str, *, grace: float | None, as_json: bool) -> int:
    """Judge the times of a file of services. Return 1 if a rule does not hold."""
    config = read_service_file(path)
    phases = [stop_phases(spec) for spec in config.services]
    chains = stop_chains(config.services, config.shutdown.timeout)
    longest = max(chains, key=lambda chain: chain.within)
    rules = [*_service_rules(config, phases), _chain_fits(chains), *_whole_rules(longest, grace)]
    needed = longest.within + KILL_MARGIN
    unknown = f"the orchestrator's kill time is unknown (--grace); it must be {seconds(needed)} or more"
    open_questions = [unknown] if grace is None else []
    if as_json:
        report = {
            "target": path,
            "ok": all(rule.ok for rule in rules),
            "rules": [asdict(rule) for rule in rules],
            "not_judged": open_questions,
            "timeouts": [{**each._asdict(), "seconds": each.seconds} for each in phases],
            "longest_stop": {**longest._asdict(), "within": longest.within},
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(path, phases, longest, rules, open_questions)
    return 0 if all(rule.ok for rule in rules) else FAILED


def _service_rules(config: OrchestratorConfig, phases: list[StopPhases]) -> list[Rule]:
    rules = []
    for spec, stop in zip(config.services, phases, strict=True):
        rules.append(_phases_fit(stop))
        if spec.probe is not None or spec.startup_probe is not None:
            rules.append(_is_asked_in_time(spec))
    return rules


def _phases_fit(stop: StopPhases) -> Rule:
    value = float(math.ceil(stop.phases))
    return Rule(
        "no phase of the stop is cut short",
        "pre_stop + drain_timeout + force_kill_timeout + post_stop <= shutdown.timeout",
        stop.phases,
        stop.timeout,
        stop.phases <= stop.timeout,
        f"set shutdown.timeout of {stop.service} to {value:.0f} s or more, or its drain_timeout or the timeouts of its hooks to"
        " less",
        "shutdown.timeout",
        value,
        stop.service,
    )


def _is_asked_in_time(spec: ServiceSpec) -> Rule:
    startup = spec.lifecycle.startup
    return Rule(
        "a service that starts is asked before its time is over",
        "startup.health_check_interval < startup.timeout",
        startup.health_check_interval,
        startup.timeout,
        startup.health_check_interval < startup.timeout,
        f"set startup.health_check_interval of {spec.name} below {seconds(startup.timeout)}, or its startup.timeout above"
        f" {seconds(startup.health_check_interval)}",
        "startup.timeout",
        float(math.ceil(startup.health_check_interval * 2)),
        spec.name,
    )


def _chain_fits(chains: list[StopChain]) -> Rule:
    worst = max(chains, key=lambda chain: chain.seconds - chain.limit)
    value = float(math.ceil(worst.seconds))
    return Rule(
        "no service is killed because of the time that others took to stop",
        f"stop of {' + '.join(worst.services)} <= lifecycle.shutdown.timeout, or the longer ones of these services",
        worst.seconds,
        worst.limit,
        worst.seconds <= worst.limit,
        f"set lifecycle.shutdown.timeout to {value:.0f} s or more, or the drain_timeout of {' and '.join(worst.services)} to"
        " less",
        "lifecycle.shutdown.timeout",
        value,
    )


def _whole_rules(longest: StopChain, grace: float | None) -> list[Rule]:
    if grace is None:
        return []
    needed = longest.within + KILL_MARGIN
    value = float(math.ceil(needed))
    return [
        Rule(
            "all services have stopped before the orchestrator kills the supervisor",
            f"stop of {' + '.join(longest.services)} + 1 <= grace",
            needed,
            grace,
            needed <= grace,
            f"set the orchestrator's kill time (terminationGracePeriodSeconds) to {value:.0f} s or more, or the drain_timeout"
            f" of {' and '.join(longest.services)} to less",
            "grace",
            value,
        )
    ]


def _print(
    path: str, phases: list[StopPhases], longest: StopChain, rules: list[Rule], open_questions: list[str]
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    columns = ("service", "pre_stop", "drain", "kill", "post_stop", "cap", "stops within")
    table = Table(*columns, title=f"stops of {path}", title_justify="left")
    for stop in phases:
        times = (stop.pre_stop, stop.drain, stop.force_kill, stop.post_stop, stop.timeout, stop.seconds)
        table.add_row(stop.service, *map(seconds, times))
    console.print(table)
    chain = " then ".join(longest.services)
    console.print(Text(f"all services stop within {seconds(longest.within)}: {chain}"), soft_wrap=True)
    for rule in rules:
        owner = f"{rule.loop}: " if rule.loop else ""
        left, right = rule.figures
        if rule.ok:
            console.print(Text(f"holds: {owner}{rule.formula} ({left} against {right})", "green"), soft_wrap=True)
        else:
            console.print(
                Text(f"fails: {owner}{rule.name} ({left} against {right}): {rule.advice}", "red"), soft_wrap=True
            )
    for line in open_questions:
        console.print(Text(f"not judged: {line}", "yellow"), soft_wrap=True)
