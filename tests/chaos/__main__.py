"""Chaos: real workers and senders on real servers, while all of them are killed, frozen and cut off.

``python tests/chaos [--backends sqlite,redis] [--messages 100000] [--seed 1]``; 1 where a promise was broken, 2 where a backend
that was named cannot be tried. See docs/reliability.md.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

import anyio
import pytest
from rich.console import Console

sys.path.append(str(Path(__file__).parents[1]))

from chaos_backends import BACKENDS
from chaos_report import Outcome, table
from chaos_run import full, one, short


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/chaos", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--backends", default="", help=f"of {', '.join(BACKENDS)}, by comma; default: those that are there"
    )
    parser.add_argument("--messages", type=int, default=100_000, help="how many on each backend (default: 100,000)")
    parser.add_argument("--seed", type=int, help="of jobs, faults and victims (default: another one each time)")
    parser.add_argument(
        "--short", action="store_true", help="slower handlers and three faults of each kind, as in the tests"
    )
    parser.add_argument("--keep", action="store_true", help="keep the journals, also where nothing was broken")
    given = parser.parse_args()
    given.named = [name for name in given.backends.split(",") if name]
    if unknown := set(given.named) - set(BACKENDS):
        parser.error(f"no backend is named {', '.join(sorted(unknown))}; there are {', '.join(BACKENDS)}")
    if given.messages < 100:
        parser.error("--messages must be at least 100")
    return given


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # so that it leaves nothing running
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    console = Console(width=None if sys.stdout.isatty() else 140)
    settings = (short if given.short else full)(given.messages, seed)
    outcomes: list[Outcome] = []
    missing = False
    for name in given.named or list(BACKENDS):
        directory = Path(tempfile.mkdtemp(prefix=f"mainspring-chaos-{name}-"))
        console.print(f"{name}: {given.messages:,} messages, seed {seed}", style="dim")
        try:
            outcome = anyio.run(partial(one, BACKENDS[name], settings, directory))
        except (pytest.skip.Exception, pytest.fail.Exception) as error:
            console.print(f"{name}: not tried: {error}")
            missing = missing or bool(given.named)
            continue
        outcomes.append(outcome)
        if given.keep or outcome.verdict.broken:
            console.print(f"{name}: the journals are in {directory}")
        else:
            shutil.rmtree(directory)
    if outcomes:
        console.print(table(outcomes))
    for outcome in outcomes:
        for broken in outcome.verdict.broken[:20]:
            console.print(f"BROKEN {outcome.backend}: {broken[:800]}", markup=False, highlight=False)
    bad = [outcome.backend for outcome in outcomes if outcome.verdict.broken]
    if bad:
        again = f"make chaos BACKENDS={','.join(bad)} MESSAGES={given.messages} SEED={seed}"
        if given.short:
            again = f"python tests/chaos --short --backends {','.join(bad)} --messages {given.messages} --seed {seed}"
        console.print(f"to run it again: {again}", soft_wrap=True, markup=False, highlight=False)
        return 1
    return 2 if missing or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
