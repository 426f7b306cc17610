"""What the imports of a user's program cost, above a Python that runs nothing: ``make bench BENCH=imports``.

Ours: the three names that a service imports; and these with a SQLite mailbox opened, one message sent, received and
acknowledged. SAQ's: ``Queue`` and ``Worker`` as its documentation imports them; and these with a queue made, which imports
its Redis driver and connects to nothing. Each runs in a fresh interpreter, with its bytecode there; its processor time counts,
less that of a bare interpreter of the same environment. The programs take turns, and a ratio is the median of the rounds'.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from common import beside, milliseconds, missing, peer, quick, report, rotated, version

ROUNDS = 5 if quick() else 25
NAMES = "from mainspring import LoopGroup, MainLoop, open_mailbox"
USED = f"""{NAMES}
import sys, anyio

async def main():
    async with open_mailbox("sqlite:///" + sys.argv[1]) as mailbox:
        await mailbox.send("hello")
        for message in await mailbox.receive():
            await message.acknowledge()

anyio.run(main)
"""
SAQ = "import saq; from saq import Queue, Worker"
SAQ_QUEUE = f"{SAQ}; Queue.from_url('redis://localhost')"
# A variable that forbids to write bytecode would have each run compile what the run before did.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def used_by_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def seconds(python: Path, code: str, path: Path) -> float:
    before = used_by_children()
    subprocess.run([str(python), "-c", code, str(path)], check=True, env=ENVIRONMENT)
    return used_by_children() - before


def above_bare(programs: dict[str, tuple[Path, str]]) -> dict[str, list[float]]:
    """Processor seconds of each program above a bare interpreter, one for each round."""
    pythons = {python for python, _ in programs.values()}
    taken: dict[str, list[float]] = {name: [] for name in programs}
    with TemporaryDirectory() as directory:
        for number in range(ROUNDS + 1):  # the first leaves the bytecode behind, and does not count
            bare = {python: seconds(python, "", Path(directory)) for python in pythons}
            for name, (python, code) in rotated(list(programs.items()), number):
                taken[name].append(seconds(python, code, Path(directory, f"{number}.db")) - bare[python])
    return {name: values[1:] for name, values in taken.items()}


def spread(ours: list[float], theirs: list[float]) -> str:
    low, _, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    least = f"least {min(ours) * 1e3:.0f} and {min(theirs) * 1e3:.0f} ms"
    return f"half of the ratios within {low:.2f} and {high:.2f}; {least}"


def main() -> None:
    programs = {"names": (Path(sys.executable), NAMES), "used": (Path(sys.executable), USED)}
    python = peer("saq", "saq[redis]", "hiredis", "uvloop", "typing_extensions")
    if python is not None:
        programs |= {"saq": (python, SAQ), "saq queue": (python, SAQ_QUEUE)}
    taken = above_bare(programs)
    report(
        beside("import, and use of a SQLite mailbox / 120 ms", taken["used"], 0.12, 1.0, milliseconds, at_most=True,
               note=f"least {min(taken['used']) * 1e3:.0f} ms")
    )  # fmt: skip
    if python is None:
        report(missing("import / SAQ's import", "not installable here"))
        return
    for what, ours in (("import", "names"), ("import, and use of a SQLite mailbox", "used")):
        for other, theirs in (("import", "saq"), ("import, and making of a queue", "saq queue")):
            goal = 0.6 if (ours, theirs) == ("names", "saq queue") else None
            report(
                beside(f"{what} / SAQ's {other}", taken[ours], taken[theirs], goal, milliseconds, at_most=True,
                       note=f"saq {version(python, 'saq')}; {spread(taken[ours], taken[theirs])}")
            )  # fmt: skip


if __name__ == "__main__":
    main()
