"""What the benchmarks share: rounds, rates, ratios, and the row that a figure is reported as."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from types import ModuleType

HERE = Path(__file__).parent
PEERS = HERE.parent / ".venv-peers"
BODY = "x" * 100
"""A body of 100 bytes."""
MIB = 1024 * 1024

NOT_TO_BE_QUOTED = (
    "--quick: small counts and few rounds, to see that the benchmarks run. These figures are not to be quoted."
)


@dataclass
class Row:
    """One figure. ``ratios`` has one for each round; their median is compared with ``goal``: at least it, or at most it."""

    name: str
    ours: str
    other: str
    ratios: list[float] = field(default_factory=list)
    goal: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return median(self.ratios) if self.ratios else None

    @property
    def spread(self) -> str:
        """The smallest and the largest ratio of the rounds."""
        if len(self.ratios) < 2:
            return "one run" if self.ratios else ""
        return f"{min(self.ratios):.2f} to {max(self.ratios):.2f}, {len(self.ratios)} rounds"

    @property
    def ok(self) -> bool | None:
        if self.ratio is None or self.goal is None:
            return None
        return self.ratio <= self.goal if self.at_most else self.ratio >= self.goal


def beside(
    name: str,
    ours: list[float],
    theirs: list[float] | float,
    goal: float | None,
    show: Callable[[float], str],
    *,
    at_most: bool = False,
    note: str = "",
) -> Row:
    """The row of two figures a round, or of one beside a fixed figure. A ratio is ours by theirs of the same round.

    So it holds where the machine's speed drifts. ``show`` makes a figure readable; the row has the medians of both.
    """
    others = theirs if isinstance(theirs, list) else [theirs] * len(ours)
    ratios = [a / b for a, b in zip(ours, others, strict=True)]
    return Row(name, show(median(ours)), show(median(others)), ratios, goal, at_most, note)


def missing(name: str, why: str) -> Row:
    """The row of what could not be measured here."""
    return Row(name, "-", why)


def report(*rows: Row) -> None:
    """Print the rows for the program that started this script: a line of JSON each."""
    if quick() and not _said:
        _said.append(NOT_TO_BE_QUOTED)
        print(NOT_TO_BE_QUOTED)
        atexit.register(print, NOT_TO_BE_QUOTED)
    for row in rows:
        print(json.dumps(asdict(row)), flush=True)


_said: list[str] = []


def in_turns(rounds: int, *runs: Callable[[], float]) -> list[list[float]]:
    """The figures of each run, one a round. All take part in each round, and which is the first changes with it."""
    figures: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        for which in rotated(list(range(len(runs))), number):
            figures[which].append(runs[which]())
    return figures


def rotated(things: list[Any], by: int) -> list[Any]:
    at = by % len(things) if things else 0
    return things[at:] + things[:at]


def machine() -> str:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} x {model}, Linux {platform.release()}, Python {platform.python_version()}"


def on_uvloop(fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    return anyio.run(fn, *args, backend="asyncio", backend_options={"use_uvloop": True})


def rate(count: int, began: float) -> float:
    return count / (time.perf_counter() - began)


def per_second(value: float) -> str:
    return f"{value:,.0f}/s"


def median(values: list[float]) -> float:
    return statistics.median(values)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs"


def mebibytes(size: float) -> str:
    return f"{size / MIB:.1f} MiB"


def costs(rates: list[float]) -> list[float]:
    """Seconds for each message, of messages a second."""
    return [1 / one for one in rates]


def quick() -> bool:
    return "--quick" in sys.argv


def words() -> list[str]:
    """What the command line names: neither options nor URLs."""
    return [word for word in sys.argv[1:] if not word.startswith("-") and "://" not in word]


def given_url() -> str | None:
    """The URL on the command line."""
    return next((word for word in sys.argv[1:] if "://" in word), None)


def chosen(names: list[str], known: Iterable[str]) -> list[str]:
    """``names``, or all that are known where there are none. Ends the program if one is unknown."""
    if unknown := set(names) - set(known):
        raise SystemExit(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return names or list(known)


def benchmark(name: str) -> ModuleType:
    """The benchmark of that name. A driver may have the same one, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peer(name: str, *packages: str) -> Path | None:
    """The Python of a peer's own virtual environment, made at first use; None where it cannot be installed."""
    home = PEERS / name
    python, made = home / "bin" / "python", home / "made"
    if not made.exists():  # or only in part
        shutil.rmtree(home, ignore_errors=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, capture_output=True)
            subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True, capture_output=True)
        except subprocess.CalledProcessError:
            return None
        made.touch()
    return python


def version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()
