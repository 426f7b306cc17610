"""Plants the faults of ``scripts/mutants.toml``, one at a time in a copy of the sources, and runs the tests that should fail.

A fault is *caught* if a test fails, hangs for longer than ``--timeout``, or takes more than 4 GiB of memory. Its tests must
pass without it: ``--check`` tries that first. Prints a table by kind and names the survivors. Fails where fewer than 95 % are
caught, or a text to replace is not found exactly once: the code has moved on, and the list must follow.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
GOAL = 0.95
MEMORY = 4 * 1024**3
"""Bytes of address space that a process of the tests may have: a fault can make a loop that takes memory without end."""
COPIED = (
    "src",
    "tests",
    "examples",
    "docs",
    "docker",
    "scripts",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "mkdocs.yml",
)


@dataclass(frozen=True)
class Mutant:
    """One fault: in ``file``, ``old`` becomes ``new``; ``tests`` are paths and further arguments of pytest."""

    number: int
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return f"{self.number:>3} {self.kind:<12} {self.file.removeprefix('src/mainspring/')}: {self.why}"


def read(path: Path) -> list[Mutant]:
    """Return the faults of a list; raise ValueError where one of them does not fit the code."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    mutants = [Mutant(number, **(entry | {"tests": tuple(entry["tests"])})) for number, entry in enumerate(entries, 1)]
    for mutant in mutants:
        found = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if found != 1:
            raise ValueError(f"{mutant}: the text to replace is found {found} times, not once")
    return mutants


def run(tree: Path, tests: tuple[str, ...], timeout: float) -> str:
    """Run these tests on the sources of ``tree``: "passed", "failed", "hung", or what is wrong with the run itself."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--full", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command += tests
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY, MEMORY))
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return "hung"
        if status in (0, 1):
            return "passed" if status == 0 else "failed"
        output.seek(0)
        last = output.read().decode(errors="replace").strip().splitlines()[-1:]
        # Collecting fails where the fault breaks an import: that is caught, and 4 and 5 are no run at all.
        return "failed" if status not in (4, 5) else f"no run: {' '.join(last)}"


def plant(tree: Path, mutant: Mutant, timeout: float) -> str:
    """Run the tests of one fault with it, in ``tree``, which is as before afterwards."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return run(tree, mutant.tests, timeout)
    finally:
        path.write_text(text, encoding="utf-8")


def copy(to: Path) -> Path:
    """Copy what the tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, to / name)
    return to


def table(results: dict[Mutant, str]) -> str:
    """How many faults were planted and caught, by kind."""
    planted = Counter(mutant.kind for mutant in results)
    caught = Counter(mutant.kind for mutant, result in results.items() if result in ("failed", "hung"))
    lines = [f"{'kind':<14} planted  caught"]
    lines += [f"{kind:<14} {planted[kind]:>7} {caught[kind]:>7}" for kind in sorted(planted)]
    lines.append(f"{'all':<14} {planted.total():>7} {caught.total():>7}  {caught.total() / planted.total():.0%}")
    return "\n".join(lines)


def chosen(mutants: list[Mutant], numbers: list[int] | None) -> list[Mutant]:
    """Return the faults of these numbers, or all of them. Raise ValueError for a number that the list does not have."""
    if not numbers:
        return mutants
    if unknown := sorted(set(numbers) - {one.number for one in mutants}):
        raise ValueError(f"no fault has the number {', '.join(map(str, unknown))}; the list has 1 to {len(mutants)}")
    return [one for one in mutants if one.number in numbers]


def main() -> int:
    """Plant the faults, and say which were caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=Path, default=LIST, help="the faults (default: %(default)s)")
    parser.add_argument("--only", type=int, nargs="*", help="only the faults of these numbers")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the tests of one fault")
    parser.add_argument("--check", action="store_true", help="run the tests without any fault first")
    arguments = parser.parse_args()
    try:
        mutants = chosen(read(arguments.list), arguments.only)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    results: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(arguments.jobs):
            trees.put(copy(Path(folder, str(number))))

        def in_a_tree(mutant: Mutant) -> tuple[Mutant, str]:
            tree = trees.get()
            try:
                if arguments.check and (clean := run(tree, mutant.tests, arguments.timeout)) != "passed":
                    return mutant, f"without the fault: {clean}"
                return mutant, plant(tree, mutant, arguments.timeout)
            finally:
                trees.put(tree)

        for mutant, result in pool.map(in_a_tree, mutants):
            results[mutant] = result
            sys.stdout.write(f"{'SURVIVED' if result == 'passed' else result:<9} {mutant}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{table(results)}\n")
    caught = sum(result in ("failed", "hung") for result in results.values())
    return 0 if caught >= GOAL * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
