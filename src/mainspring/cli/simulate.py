"""``mainspring simulate``: many seeds of a simulated fleet, and of the first that fails a small case, drawn."""

from __future__ import annotations

import io
import json
import multiprocessing
import signal
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from mainspring.cli.progress import EVERY, progress
from mainspring.cli.target import load_builder
from mainspring.cli.times import duration_text
from mainspring.cli.user_errors import FAILED, WRONG_USE, UserError
from mainspring.validation import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from concurrent.futures import Future
    from contextlib import AbstractContextManager
    from pathlib import Path

    from mainspring.testing.simulation import Faults, Simulation, SimulationReport

CHUNK = 8
"""The most seeds that a process is given at once."""
INTERRUPTED = 130
"""The exit status after a Ctrl-C."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What the command line says; see ``mainspring simulate --help``."""

    seeds: int = 20
    seed: int | None = None
    duration: float = 3_600.0
    workers: int = 4
    kinds: str | None = None
    times: float | None = None
    rates: tuple[str, ...] = ()
    keep: str | None = None
    per_minute: float = 1.0
    body: str | None = None
    jobs: int = 1
    shrink: bool = True
    log: Path | None = None
    svg: Path | None = None
    as_json: bool = False
    progress_every: float = EVERY

    @property
    def factor(self) -> float:
        """Factor for the rates of all faults."""
        from mainspring.testing.simulation.run import HOURLY

        return HOURLY if self.times is None else self.times


@dataclass(slots=True)
class Results:
    """What the runs so far came to."""

    runs: int = 0
    virtual_seconds: float = 0.0
    real_seconds: float = 0.0
    faults: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, figures: dict[str, Any]) -> None:
        """Add the figures of one more run, as :meth:`SimulationReport.as_dict` gives them."""
        self.runs += 1
        self.virtual_seconds += figures["virtual_seconds"]
        self.real_seconds += figures["real_seconds"]
        self.faults += len(figures["plan"])
        self.counts.update(figures["counts"])


class ToldRun(NamedTuple):
    """The run that is told in full, and what its code printed."""

    report: SimulationReport
    printed: str


def simulate_target(target: str, options: SimulateOptions) -> int:
    """Run the seeds. Return 1 if an invariant was broken."""
    build = load_builder(target)
    first = _simulation(target, options)
    results = Results()
    try:
        seed = _hunt(first, target, build, options, results) if options.seed is None else options.seed
        told = None if seed is None else _one(first.but(seed=seed), build, options)
    except KeyboardInterrupt:
        seeds = counted(options.seeds if options.seed is None else 1, "seed")
        raise UserError(f"interrupted after {results.runs} of {seeds}", INTERRUPTED) from None
    if results.runs and told is not None and not told.report.failed:
        raise UserError(
            f"seed {seed} broke a promise, but not when it was run again: what the group does depends on more than the seed,"
            " such as the state of a module, real time or random numbers of its own",
            FAILED,
        )
    return _tell(told, results, options)


def _simulation(target: str, options: SimulateOptions) -> Simulation:
    from mainspring.testing.simulation import Simulation

    return Simulation(
        duration=options.duration,
        workers=options.workers,
        faults=_faults(options),
        per_minute=options.per_minute,
        body=_body(options.body),
        keep=_keep(options.keep),
        target=target,
        target_options=() if options.body is None else ("--body", options.body),
    )


def _faults(options: SimulateOptions) -> Faults:
    from mainspring.testing.simulation import Faults

    faults = Faults().times(options.factor)
    if options.kinds is not None:
        kinds = () if options.kinds == "none" else options.kinds.split(",")
        faults = faults.only(kind.strip() for kind in kinds)
    changed = {kind: getattr(faults, kind) for kind in Faults.kinds}
    for rate in options.rates:
        kind, equals, value = rate.partition("=")
        try:
            number = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise UserError(f"--rate {rate!r}: write KIND=NUMBER, for example --rate crash=2")
        changed[kind] = number
    return Faults.just(**changed)


def _keep(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return () if text == "none" else tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UserError(f"--keep {text!r}: write the numbers of planned faults, for example 3,7, or none") from None


def _body(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        json.loads(text)
    except ValueError as error:
        raise UserError(f"--body is no JSON: {error}") from None
    return text.encode()


# --------------------------------------------------------------------------------------------------------------- runs


def _run(simulation: Simulation, build: Callable[..., Any], show: Callable[[float], None] | None = None) -> ToldRun:
    """Run it. What its code prints is held back: mixed with other runs', it says nothing."""
    with redirect_stdout(io.StringIO()) as printed:
        report = simulation.run(build, progress=show)
    return ToldRun(report, printed.getvalue())


def _one(simulation: Simulation, build: Callable[..., Any], options: SimulateOptions) -> ToldRun:
    from mainspring.testing.simulation import shrink

    with _progress(options, f"simulating seed {simulation.seed}", simulation.duration) as show:
        told = _run(simulation, build, show)
    if not (told.report.failed and options.shrink):
        return told
    with _progress(options, f"seed {simulation.seed} fails: looking for a smaller case", None) as show:
        runs = count(1)

        def run(candidate: Simulation) -> SimulationReport:
            show(next(runs))
            return _run(candidate, build).report

        try:
            smallest = shrink(told.report, run)
        except KeyboardInterrupt:  # of the search only: there is a failure to tell
            return told
        return told if smallest is told.report else _run(smallest.simulation, build)


def _hunt(
    first: Simulation, target: str, build: Callable[..., Any], options: SimulateOptions, results: Results
) -> int | None:
    """Return the first seed that fails, or None. The seeds run in their order, or in several processes at once."""
    seeds = range(options.seeds)
    with _progress(options, f"simulating {counted(options.seeds, 'seed')}", options.seeds) as show:
        if options.jobs == 1:
            show_part = partial(_show_part, show, results, first.duration)
            runs = (_run(first.but(seed=seed), build, show_part).report.as_dict() for seed in seeds)
        else:
            runs = _in_processes(partial(_run_in_child, target, options), seeds, options.jobs)
        with closing(runs):
            return _first_failure(runs, results, show)


def _in_processes(
    run: Callable[[range], list[dict[str, Any]]], seeds: range, processes: int
) -> Generator[dict[str, Any], None, None]:
    """Yield what ``run`` returns of the seeds, in their order. Closed or interrupted, it kills the processes."""
    size = max(1, min(CHUNK, len(seeds) // (4 * processes)))
    # A Ctrl-C goes to all processes of a terminal. Only this one acts on it.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=signal.signal, initargs=ignore) as pool:
        out: deque[Future[list[dict[str, Any]]]] = deque()
        try:
            for start in range(0, len(seeds), size):
                out.append(pool.submit(run, seeds[start : start + size]))
                if len(out) > 2 * processes:
                    yield from out.popleft().result()
            while out:
                yield from out.popleft().result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _run_in_child(target: str, options: SimulateOptions, seeds: range) -> list[dict[str, Any]]:
    build, first = load_builder(target), _simulation(target, options)
    return [_run(first.but(seed=seed), build).report.as_dict() for seed in seeds]


def _show_part(show: Callable[[float], None], results: Results, duration: float, now: float) -> None:
    """Show the runs that have ended, and the part of the present one that is over at virtual second ``now``."""
    show(results.runs + min(1.0, now / duration))


def _first_failure(runs: Iterator[dict[str, Any]], results: Results, show: Callable[[float], None]) -> int | None:
    for run in runs:
        results.add(run)
        show(results.runs)
        if run["failed"]:
            seed: int = run["seed"]
            return seed
    return None


def _progress(
    options: SimulateOptions, what: str, total: float | None
) -> AbstractContextManager[Callable[[float], None]]:
    return nullcontext(lambda done: None) if options.as_json else progress(what, total, every=options.progress_every)


# ------------------------------------------------------------------------------------------------------------ telling


def _tell(told: ToldRun | None, results: Results, options: SimulateOptions) -> int:
    from mainspring.testing.simulation.event_log import around, as_svg, as_text

    report = None if told is None else told.report
    if report is not None:
        _write(options.log, lambda: "\n".join([*report.events, ""]))
        _write(options.svg, lambda: as_svg(around(report)))
    if options.as_json:
        typer.echo(json.dumps(_as_json(told, results), indent=2))
        return FAILED if report is not None and report.failed else 0
    if results.runs:
        typer.echo(_summary(results, options))
    seeds = counted(max(1, results.runs), "seed")
    if told is None or report is None:
        typer.echo(f"{seeds}: no promise broken")
        return 0
    if told.printed:
        typer.echo(f"printed in this run:\n{told.printed.rstrip()}")
    typer.echo(str(report))
    if not report.failed:
        return 0
    typer.echo(as_text(around(report)))
    typer.echo(f"{seeds}: seed {report.seed} broke a promise")
    return FAILED


def _as_json(told: ToldRun | None, results: Results) -> dict[str, Any]:
    return {
        "runs": results.runs,
        "failed": told is not None and told.report.failed,
        "virtual_seconds": round(results.virtual_seconds, 3),
        "real_seconds": round(results.real_seconds, 3),
        "planned_faults": results.faults,
        "counts": dict(results.counts),
        "run": told.report.as_dict() | {"printed": told.printed} if told is not None else None,
    }


def _workload(options: SimulateOptions) -> str:
    """Describe what was run: a figure such as ``times real time`` says nothing without it."""
    plural = "" if options.per_minute == 1 else "s"
    kinds = "" if options.kinds is None else f" of {options.kinds}"
    return (
        f"each {duration_text(options.duration)} of {counted(options.workers, 'worker')} with {options.per_minute:g}"
        f" message{plural} a minute, {', '.join((f'{options.factor:g} times the default faults{kinds}', *options.rates))}"
    )


def _summary(results: Results, options: SimulateOptions) -> str:
    from mainspring.testing.simulation.run import told_counts

    hours = results.virtual_seconds / 3600
    speed = results.virtual_seconds / results.real_seconds if results.real_seconds else 0.0
    return (
        f"{counted(results.runs, 'seed')}, {_workload(options)}:\n"
        f"{hours:,.1f} virtual hours in {results.real_seconds:.1f} s of work ({speed:,.0f} times real time),"
        f" {counted(results.faults, 'planned fault')}\n{told_counts(results.counts)}"
    )


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        path.write_text(text(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", WRONG_USE) from error
