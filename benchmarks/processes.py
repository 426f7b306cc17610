"""Several worker processes on one queue: what a message costs in each, and how many they handle beside those of peers.

``python benchmarks/processes.py [redis|postgres …] [--quick] [--flush]``; both stores where none is named. The servers are
those of ``redis.py`` and ``postgres.py``. A worker has concurrency 100 and a handler that does nothing; peers have that of
theirs which drains fastest in one process. The processes are started first (see ``peers/together.py``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

sys.path.append(sys.path.pop(0))  # beside this file is one with the name of a driver, which must be found first

from brokers import Comparison, Contender, kill_session
from common import HERE, benchmark, beside, chosen, in_turns, microseconds, missing, per_second, quick, report, words
from local_server import server, with_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROCESSES = (2, 4)
ROUNDS = 1 if quick() else 5
SECONDS = 0.5 if quick() else 2.0
"""About how long a run takes: its count of messages follows from the speed of a trial."""
TRIAL = 4_000
CONCURRENCY = 100
GOAL = 1.3
PATIENCE = 300.0


@contextmanager
def redis() -> Iterator[tuple[Callable[[Contender], str], Callable[[], None], list[Contender]] | None]:
    there = benchmark("redis")
    with server(there.REDIS) as url:
        yield url and (
            lambda contender: with_name(url) if contender.home is None else url.partition("?")[0],
            lambda: there.empty(url),
            list(there.PEERS),
        )


@contextmanager
def postgres() -> Iterator[tuple[Callable[[Contender], str], Callable[[], None], list[Contender]] | None]:
    there = benchmark("postgres")
    try:
        yield there.url, there.renew, list(there.PEERS)
    finally:
        there.drop()


STORES = {"redis": ("Redis", redis), "postgres": ("PostgreSQL", postgres)}


class Together:
    """Runs of several processes of a contender, on the emptied server."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.counts: dict[str, int] = {}

    def run(self, contender: Contender, processes: int, count: int, concurrency: int | None = None) -> Any:
        """What ``peers/together.py`` says, or None where it failed."""
        self.comparison.reset()
        url, script = self.comparison.url(contender), contender.script.removesuffix(".py")
        command = [str(contender.python), str(HERE / "peers" / "together.py"), script, url]
        command += [str(number) for number in (count, concurrency or contender.concurrency, processes)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, trouble = process.communicate(timeout=PATIENCE)
        except BaseException:
            kill_session(process)
            raise
        if process.returncode:
            self.comparison.failures[contender.name] = (trouble.strip().splitlines() or ["no result"])[-1][:120]
            return None
        return json.loads(out)

    def prepare(self, contender: Contender, choices: list[int]) -> float:
        """Choose its concurrency and its count of messages; its rate in two processes, or 0 where it fails."""
        tried = {choice: self.run(contender, 2, TRIAL, choice) for choice in choices}
        rates = {choice: result["rate"] for choice, result in tried.items() if result is not None}
        if not rates:
            report(
                missing(f"{self.comparison.server}: {contender.name} failed", self.comparison.failures[contender.name])
            )
            return 0.0
        contender.concurrency = max(rates, key=lambda choice: rates[choice])
        best = rates[contender.concurrency]
        self.counts[contender.name] = max(TRIAL, int(best * SECONDS) // 1_000 * 1_000)
        return best

    def figure(self, contender: Contender, processes: int, which: str) -> float:
        """One figure of a run that must not fail."""
        result = self.run(contender, processes, self.counts[contender.name])
        if result is None:
            raise SystemExit(f"{contender.name} failed: {self.comparison.failures[contender.name]}")
        return float(result[which])


def report_store(comparison: Comparison) -> None:
    together, ours, title = Together(comparison), comparison.ours, comparison.server
    if not together.prepare(ours, [CONCURRENCY]):
        return
    numbers = (1, *PROCESSES)
    alone, *others = in_turns(
        ROUNDS, *[lambda number=number: together.figure(ours, number, "processor") for number in numbers]
    )
    for number, costs in zip(PROCESSES, others, strict=True):
        report(beside(f"{title}: processor time a message, {number} worker processes / one", costs, alone, GOAL, microseconds,
                      at_most=True, note=f"concurrency {CONCURRENCY}, all workers together, without the server"))  # fmt: skip
    rates = {
        contender.name: together.prepare(contender, list(contender.about["concurrency"]))
        for contender in comparison.peers
    }
    for best in comparison.peers:
        if not rates[best.name] or rates[best.name] < max(rates.values()):
            continue
        for number in PROCESSES:
            mine, theirs = in_turns(
                ROUNDS,
                *[
                    lambda each=contender, number=number: together.figure(each, number, "rate")
                    for contender in (ours, best)
                ],
            )
            report(beside(f"{title}: drain, {number} worker processes / {best.title}", mine, theirs, 1.0, per_second,
                          note=f"{best.about['note']}, concurrency {best.concurrency}; ours: {CONCURRENCY}"))  # fmt: skip


def main() -> int:
    for name in chosen(words(), STORES):
        title, store = STORES[name]
        with store() as there:
            if there is not None:
                url, reset, peers = there
                reset()
                report_store(Comparison(title, url, reset, peers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
