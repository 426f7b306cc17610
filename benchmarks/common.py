"""What the benchmarks share: rounds, rates, ratios, and the row that a figure is reported as."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

HERE = Path(__file__).parent
PEERS = HERE.parent / ".venv-peers"
BODY = "x" * 100
"""A body of 100 bytes."""


@dataclass
class Row:
    """One figure. ``ratio`` is compared with ``goal``: at least it, or at most where ``at_most``."""

    name: str
    ours: str
    other: str
    ratio: float | None
    goal: float | None
    at_most: bool = False
    note: str = ""

    @property
    def ok(self) -> bool | None:
        if self.ratio is None or self.goal is None:
            return None
        return self.ratio <= self.goal if self.at_most else self.ratio >= self.goal


def report(*rows: Row) -> None:
    """Hand the rows to whoever started this script: a line of JSON each."""
    for row in rows:
        print(json.dumps(asdict(row)), flush=True)


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


def paired_ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios round by round, which holds where the machine's speed drifts."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def quick() -> bool:
    return "--quick" in sys.argv


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
