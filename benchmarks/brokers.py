"""The server mailboxes beside their peers: who takes part, how their rounds are run, and what becomes of the figures.

Each contender has a script in ``peers`` (see ``peers/harness.py``), which its own interpreter runs. All of them talk to the
same server, which is emptied before each run; rounds go through all contenders in turn, each time from another one on, so
that a machine whose speed drifts is the same to all.
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

from common import (
    BODY,
    HERE,
    MIB,
    beside,
    costs,
    in_turns,
    mebibytes,
    median,
    microseconds,
    milliseconds,
    missing,
    peer,
    per_second,
    quick,
    report,
    rotated,
)

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
    "through": "sends to a running worker, 100 out at once",
}
SUSTAINED = 0.8
"""The part of its own maximum up to which a contender is taken to sustain a rate."""
TIMED = 2.0 if quick() else 10.0
"""Seconds of sends at a given rate."""
LARGE_BYTES = 20_000_000 if quick() else 200_000_000
"""Bytes of a large body, and how many messages have one."""
IN_TREE = 1_000
"""Messages that a worker handles before the memory of its processes is read."""


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
        report(missing(f"{self.server}: {contender.name} takes no part", why))
        return False

    def run(
        self,
        contender: Contender,
        verb: str,
        count: int,
        *,
        concurrency: int | None = None,
        behind: int = 0,
        rate: float = 0.0,
        size: int = len(BODY),
        patience: float = PATIENCE,
    ) -> Any:
        """One run on the emptied server; what the script says, or None where it failed."""
        self.reset()
        command = [str(contender.python), str(HERE / "peers" / contender.script), verb, self.url(contender), str(count)]
        command += [str(concurrency or contender.concurrency or 1), f"--behind={behind}", f"--rate={rate}"]
        command += [f"--size={size}"]
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

    def figure(self, contender: Contender, verb: str, count: int, which: str, **options: Any) -> float:
        """One figure of a run that must not fail."""
        result = self.run(contender, verb, count, **options)
        if result is None:
            raise SystemExit(f"{self.server}: {verb}: {contender.name} failed: {self.failures[contender.name]}")
        return float(result[which])

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

    def results(self, verb: str, rounds: int, counts: dict[str, int], **options: Any) -> dict[str, list[Any]]:
        """What each contender of ``counts`` says in each round; one that fails is left out of it, and a row says why."""
        field_ = [contender for contender in self.taking_part(verb) if contender.name in counts]
        results: dict[str, list[Any]] = {contender.name: [] for contender in field_}
        for number in range(rounds):
            for contender in rotated(field_, number):
                result = self.run(contender, verb, counts[contender.name], **options)
                if result is not None:
                    results[contender.name].append(result)
        for contender in field_:
            if not results[contender.name]:
                report(
                    missing(f"{self.server}: {verb}: {contender.name} failed", self.failures.get(contender.name, ""))
                )
        return {name: some for name, some in results.items() if len(some) == rounds}

    def rates(self, verb: str) -> dict[str, list[float]]:
        """The rates of each contender, round by round."""
        counts = {}
        for contender in self.taking_part(verb):
            rough = self.run(contender, verb, TRIAL)
            counts[contender.name] = TRIAL if rough is None else _count(verb, rough["rate"])
        return {name: [one["rate"] for one in some] for name, some in self.results(verb, ROUNDS, counts).items()}

    def report_best(
        self,
        what: str,
        figures: dict[str, list[float]],
        goal: float | None,
        show: Callable[[float], str],
        note: Callable[[str], str],
        *,
        at_most: bool = False,
    ) -> None:
        """The row of ours beside the best peer's, the others' in what it says; ``note`` says how the best was run."""
        mine = figures.get(self.ours.name, [])
        theirs = {name: some for name, some in figures.items() if name != self.ours.name}
        ranking = sorted(theirs, key=lambda name: median(theirs[name]), reverse=not at_most)
        if not mine or not ranking:
            return
        how = note(ranking[0])
        if others := ", ".join(f"{name} {show(median(theirs[name]))}" for name in ranking[1:]):
            how += f"; others: {others}"
        title = f"{self.server}: {what} / {self._named(ranking[0]).title}"
        report(beside(title, mine, theirs[ranking[0]], goal, show, at_most=at_most, note=how))

    def report_rate(self, verb: str, goal: float) -> None:
        """The row of ours beside the fastest peer."""

        def note(best: str) -> str:
            return f"{self._settings(best, verb)}; ours: {self._settings(self.ours.name, verb)}"

        self.report_best(WHAT[verb], self.rates(verb), goal, per_second, note)

    def report_large(self, verb: str, goal: float, size: int) -> None:
        """The row of ours beside the fastest peer, with bodies of ``size`` bytes.

        A drain is timed from its first handler: let no contender have all of the messages in hand by then.
        """
        counts = {contender.name: LARGE_BYTES // size for contender in self.taking_part(verb)}
        results = self.results(verb, ROUNDS, counts, size=size)
        rates = {name: [one["rate"] for one in some] for name, some in results.items()}
        self.report_best(f"{WHAT[verb]}, bodies of {size // 1_000:,} KB", rates, goal, per_second,
                         lambda best: self._settings(best, verb))  # fmt: skip

    def report_pickup(self) -> None:
        """The rows of the times from a send to its handler: the median beside the lowest, and the 99th percentile."""
        counts = {contender.name: PICKUPS for contender in self.taking_part("pickup")}
        times = self.results("pickup", min(ROUNDS, 3), counts)
        for which in ("p50", "p99"):
            figures = {name: [one[which] for one in some] for name, some in times.items()}
            self.report_best(f"pickup by an idle worker, {which}", figures, 1.0, milliseconds, lambda _: "a send every 20 ms",
                             at_most=True)  # fmt: skip

    def report_latency(self) -> None:
        """The rows of the times from the instant a send is due to its handler, at half of the maximum.

        The maximum is what a sender with 100 sends out and a worker do at once. Ours alone is at half of its own. Beside peers
        the rate is half of the best peer's maximum, where those take part that sustain it; and of the slowest's, for all.
        """
        maxima = self.rates("through")
        self.report_best(WHAT["through"], maxima, 1.0, per_second, lambda best: self._settings(best, "through"))
        most = {name: median(rates) for name, rates in maxima.items()}
        if self.ours.name not in most:
            return
        rate = most.pop(self.ours.name) / 2
        alone = self.latencies(rate, [self.ours.name]).get(self.ours.name, [])
        if alone:
            p50, p99, p999 = ([one[which] for one in alone] for which in ("p50", "p99", "p999"))
            note = f"{per_second(rate)}, half of its maximum, in turns; p99.9 {milliseconds(median(p999))}"
            report(beside(f"{self.server}: latency under load, p99 / p50", p99, p50, 5.0, milliseconds, at_most=True,
                          note=note))  # fmt: skip
        if most:
            self._report_latency_beside("best", max(most.values()) / 2, most)
        if len(most) > 1:
            self._report_latency_beside("slowest", min(most.values()) / 2, most)

    def _report_latency_beside(self, whose: str, rate: float, most: dict[str, float]) -> None:
        steady = [name for name, maximum in most.items() if maximum * SUSTAINED >= rate]
        note = f"{per_second(rate)}, sustained by {len(steady)} of {len(most)} peers"
        times = self.latencies(rate, [self.ours.name, *steady])
        for which, goal in (("p50", 1.0), ("p99", 1.0), ("p999", None)):
            figures = {name: [one[which] for one in some] for name, some in times.items()}
            what = f"latency at half of the {whose} peer's maximum, {which}"
            self.report_best(what, figures, goal, milliseconds, lambda _: note, at_most=True)

    def latencies(self, rate: float, names: list[str]) -> dict[str, list[dict[str, float]]]:
        count = max(TRIAL, int(rate * TIMED))
        return self.results("latency", min(ROUNDS, 3), dict.fromkeys(names, count), rate=rate)

    def report_tree(self, most: float | None = None) -> None:
        """The rows of the memory of an idle worker's processes, its children included, beside the smallest peer's.

        ``most``: how many MiB ours may have.
        """
        counts = {contender.name: IN_TREE for contender in self.taking_part("tree")}
        sizes = self.results("tree", min(ROUNDS, 3), counts)
        if most is not None:
            ours = [float(one["pss"]) for one in sizes[self.ours.name]]
            what = f"{self.server}: proportional memory of an idle worker's processes / {most:g} MiB"
            report(beside(what, ours, most * MIB, 1.0, mebibytes, at_most=True))
        for which, what in (("pss", "proportional"), ("uss", "unique"), ("rss", "resident")):
            figures = {name: [float(one[which]) for one in some] for name, some in sizes.items()}
            self.report_best(
                f"{what} memory of an idle worker's processes", figures, None, mebibytes,
                lambda _: f"nothing set, {IN_TREE:,} messages handled before", at_most=True,
            )  # fmt: skip

    def report_bare(self, bare: Contender, goal: float, what: str) -> None:
        """The row of our drain beside a loop that does nothing but claim and acknowledge."""
        if not self._ready(bare):
            return
        count = 10_000 if quick() else 100_000
        mine, theirs = in_turns(
            ROUNDS,
            *[lambda each=contender: self.figure(each, "drain", count, "rate") for contender in (self.ours, bare)],
        )
        note = f"{bare.about['note']}; ours: {self._settings(self.ours.name, 'drain')}"
        report(beside(f"{self.server}: drain / {what}", mine, theirs, goal, per_second, note=note))

    def report_flatness(self, goal: float) -> None:
        """The same messages taken from the front of a short queue and of a long one."""
        small, large = in_turns(
            1 if quick() else 3,
            *[
                lambda each=behind: self.figure(self.ours, "drain", TAKEN, "rate", behind=each, patience=LONG)
                for behind in (1_000, PENDING)
            ],
        )
        report(beside(f"{self.server}: cost per message at {PENDING:,} pending / at 1,000", costs(large), costs(small), goal,
                      microseconds, at_most=True, note=f"{TAKEN:,} messages drained"))  # fmt: skip

    def report_memory(self, goal: float) -> None:
        """The resident memory of a worker, early and late."""
        result = self.run(self.ours, "memory", MEMORY, patience=LONG)
        if result is not None:
            what = f"memory of a worker after {MEMORY:,} messages / after a tenth of them"
            report(beside(f"{self.server}: {what}", [result["late"]], [result["early"]], goal, mebibytes, at_most=True))

    def _named(self, name: str) -> Contender:
        return next(contender for contender in [self.ours, *self.peers] if contender.name == name)

    def _settings(self, name: str, verb: str) -> str:
        contender = self._named(name)
        note = contender.about["note"]
        if verb == "drain-default":
            return f"nothing set, concurrency {contender.about['default']}"
        return f"{note}, concurrency {contender.concurrency}" if verb in ("drain", "through") else note


def _count(verb: str, speed: float) -> int:
    """How many messages take about ``SECONDS``, in whole thousands."""
    return max(TRIAL, min(int(speed * SECONDS) // TRIAL * TRIAL, MOST))


def kill_session(process: subprocess.Popen[str]) -> None:
    """End a process that leads a session of its own, with its children."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
