"""The server mailboxes beside their peers: who takes part, how their rounds are run, and what becomes of the figures.

Each contender has a script in ``peers`` (see ``peers/harness.py``), which its own interpreter runs. All of them talk to the
same server, which is emptied before each run; rounds go through all contenders in turn, so that a machine whose speed
drifts is the same to all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import HERE, Row, median, paired_ratio, peer, per_second, quick, report

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 1 if quick() else 5
SECONDS = 0.5 if quick() else 2.0
"""About how long one run of a contender takes: the count of its messages follows from its speed in the trial."""
TRIAL = 1_000
MOST = 200_000
PICKUPS = 100 if quick() else 500
PATIENCE = 180.0
LONG = 900.0
"""Seconds that a run may take, and one over a million messages."""
TAKEN = 2_000 if quick() else 20_000
PENDING = 20_000 if quick() else 1_000_000
MEMORY = 20_000 if quick() else 1_000_000

WHAT = {
    "send-one": "sends, one by one",
    "send-100": "sends, 100 concurrent senders",
    "send-bulk": "sends in bulk, by 1,000",
    "drain": "drain, one worker process",
    "drain-default": "drain at defaults, one worker process",
}


@dataclass
class Contender:
    """One system in the comparison: ``script`` in ``peers``, run in the environment ``home`` with ``packages`` in it."""

    name: str
    script: str
    home: str | None = None
    packages: tuple[str, ...] = ()
    python: Path | None = None
    about: dict[str, Any] = field(default_factory=dict)
    concurrency: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def install(self) -> bool:
        """Make its environment where there is none; whether there is one."""
        self.python = Path(sys.executable) if self.home is None else peer(self.home, *self.packages)
        return self.python is not None

    @property
    def title(self) -> str:
        first = next(iter(self.about.get("versions", {}).values()), "")
        return f"{self.name} {first}".strip()


def ours() -> Contender:
    return Contender("Mainspring", "ours.py")


@dataclass
class Comparison:
    """Ours and its peers on one server. ``url`` is where each connects; ``reset`` empties the server."""

    server: str
    url: Callable[[Contender], str]
    reset: Callable[[], None]
    peers: list[Contender]
    ours: Contender = field(default_factory=ours)
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peers = [contender for contender in self.peers if self._ready(contender)]
        self._ready(self.ours)

    def _ready(self, contender: Contender) -> bool:
        """Whether it can be run here; a row says where not."""
        if contender.install():
            about = self.run(contender, "about", 0)
            if about is not None:
                contender.about = about
                choices = about["concurrency"]
                contender.concurrency = choices[len(choices) // 2]
                return True
        why = self.failures.get(contender.name, "not installable here")
        report(Row(f"{self.server}: {contender.name} takes no part", "-", why, None, None))
        return False

    def run(
        self,
        contender: Contender,
        verb: str,
        count: int,
        *,
        concurrency: int | None = None,
        behind: int = 0,
        patience: float = PATIENCE,
    ) -> Any:
        """One run on the emptied server; what the script says, or None where it failed."""
        self.reset()
        command = [str(contender.python), str(HERE / "peers" / contender.script), verb, self.url(contender), str(count)]
        command += [str(concurrency or contender.concurrency or 1), str(behind)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, trouble = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            kill_session(process)
            out, trouble = "", f"{verb} did not end within {patience:g} s"
        except BaseException:
            kill_session(process)
            raise
        line = next((line for line in reversed(out.splitlines()) if line.startswith("{")), None)
        if line is None:
            self.failures[contender.name] = (trouble.strip().splitlines() or ["no result"])[-1][:120]
            return None
        return json.loads(line)

    # ---------------------------------------------------------------------------------------------------- the figures

    def taking_part(self, verb: str) -> list[Contender]:
        return [contender for contender in [self.ours, *self.peers] if verb in contender.about["verbs"]]

    def choose_concurrency(self) -> None:
        """Give each worker the concurrency that it drains fastest with."""
        for contender in self.taking_part("drain"):
            choices = contender.about["concurrency"]
            if quick() or len(choices) == 1:
                continue
            speeds = {}
            for choice in choices:
                rough = self.run(contender, "drain", TRIAL, concurrency=choice)
                if rough is not None:
                    speeds[choice] = self.run(contender, "drain", _count("drain", rough["rate"]), concurrency=choice)
            known = {choice: result["rate"] for choice, result in speeds.items() if result is not None}
            contender.concurrency = max(known, key=lambda choice: known[choice], default=contender.concurrency)

    def rates(self, verb: str) -> dict[str, list[float]]:
        """The rates of each contender, round by round; one that fails is left out of it, and a row says why."""
        field_ = self.taking_part(verb)
        for contender in field_:
            rough = self.run(contender, verb, TRIAL)
            contender.counts[verb] = _count(verb, rough["rate"]) if rough is not None else 0
        rates: dict[str, list[float]] = {contender.name: [] for contender in field_ if contender.counts[verb]}
        for _ in range(ROUNDS):
            for contender in field_:
                result = self.run(contender, verb, contender.counts[verb]) if contender.name in rates else None
                if result is not None:
                    rates[contender.name].append(result["rate"])
        self._tell_failures(verb, field_, rates)
        return {name: some for name, some in rates.items() if len(some) == ROUNDS}

    def report_rate(self, verb: str, goal: float) -> list[float]:
        """The row of ours beside the fastest peer, the others in its note; the rates of ours."""
        rates = self.rates(verb)
        mine = rates.pop(self.ours.name, [])
        ranking = sorted(rates, key=lambda name: -median(rates[name]))
        if not mine or not ranking:
            return mine
        best, rest = ranking[0], ranking[1:]
        note = f"{self._settings(best, verb)}; ours: {self._settings(self.ours.name, verb)}"
        if rest:
            note += "; others: " + ", ".join(f"{name} {per_second(median(rates[name]))}" for name in rest)
        report(Row(f"{self.server}: {WHAT[verb]} / {self._named(best).title}", per_second(median(mine)),
                   per_second(median(rates[best])), paired_ratio(mine, rates[best]), goal, note=note))  # fmt: skip
        return mine

    def report_pickup(self) -> None:
        """The rows of the times from a send to its handler: the median beside the lowest, and the 99th percentile."""
        field_ = self.taking_part("pickup")
        times: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in field_}
        for _ in range(min(ROUNDS, 3)):
            for contender in field_:
                result = self.run(contender, "pickup", PICKUPS)
                if result is not None:
                    times[contender.name].append(result)
        self._tell_failures("pickup", field_, times)
        for which in ("p50", "p99"):
            values = {name: [one[which] for one in some] for name, some in times.items() if len(some) == min(ROUNDS, 3)}
            mine = values.pop(self.ours.name, [])
            ranking = sorted(values, key=lambda name: median(values[name]))
            if not mine or not ranking:
                return
            best, rest = ranking[0], ranking[1:]
            others = ", ".join(f"{name} {_ms(median(values[name]))}" for name in rest)
            report(Row(f"{self.server}: pickup by an idle worker, {which} / {self._named(best).title}", _ms(median(mine)),
                       _ms(median(values[best])), paired_ratio(mine, values[best]), 1.0, at_most=True,
                       note=f"a send every 20 ms; others: {others}"))  # fmt: skip

    def report_bare(self, bare: Contender, goal: float, what: str) -> None:
        """The row of our drain beside a loop that does nothing but claim and acknowledge."""
        if not self._ready(bare):
            return
        mine, theirs = [], []
        for _ in range(ROUNDS):
            for contender, rates in ((self.ours, mine), (bare, theirs)):
                result = self.run(contender, "drain", 10_000 if quick() else 100_000)
                if result is not None:
                    rates.append(result["rate"])
        if len(mine) == len(theirs) == ROUNDS:
            note = f"{bare.about['note']}; ours: {self._settings(self.ours.name, 'drain')}"
            report(Row(f"{self.server}: drain / {what}", per_second(median(mine)), per_second(median(theirs)),
                       paired_ratio(mine, theirs), goal, note=note))  # fmt: skip

    def report_flatness(self, goal: float) -> None:
        """The same messages taken from the front of a short queue and of a long one."""
        small, large = [], []
        for _ in range(1 if quick() else 3):
            for behind, rates in ((1_000, small), (PENDING, large)):
                result = self.run(self.ours, "drain", TAKEN, behind=behind, patience=LONG)
                if result is not None:
                    rates.append(result["rate"])
        if small and len(small) == len(large):
            report(Row(f"{self.server}: cost per message at {PENDING:,} pending / at 1,000", per_second(median(large)),
                       per_second(median(small)), paired_ratio(small, large), goal, at_most=True,
                       note=f"{TAKEN:,} messages drained"))  # fmt: skip

    def report_memory(self, goal: float) -> None:
        """The resident memory of a worker, early and late."""
        result = self.run(self.ours, "memory", MEMORY, patience=LONG)
        if result is not None:
            early, late = result["early"], result["late"]
            report(Row(f"{self.server}: memory of a worker after {MEMORY:,} messages / after a tenth of them", _mib(late),
                       _mib(early), late / early, goal, at_most=True))  # fmt: skip

    def _tell_failures(self, verb: str, field_: list[Contender], results: dict[str, Any]) -> None:
        for contender in field_:
            if not results.get(contender.name):
                why = self.failures.get(contender.name, "")
                report(Row(f"{self.server}: {verb}: {contender.name} failed", "-", why, None, None))

    def _named(self, name: str) -> Contender:
        return next(contender for contender in [self.ours, *self.peers] if contender.name == name)

    def _settings(self, name: str, verb: str) -> str:
        contender = self._named(name)
        note = contender.about["note"]
        if verb == "drain-default":
            return f"nothing set, concurrency {contender.about['default']}"
        return f"{note}, concurrency {contender.concurrency}" if verb == "drain" else note


def _count(verb: str, speed: float) -> int:
    """How many messages take about ``SECONDS``, in whole thousands."""
    return max(TRIAL, min(int(speed * SECONDS) // TRIAL * TRIAL, MOST))


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def kill_session(process: subprocess.Popen[str]) -> None:
    """End a process that leads a session of its own, with its children."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
