"""Shutdowns for real: processes, signals, and handlers that behave as badly as they can.

The table of expectations is the one of docs/shutdown.md, which a test compares with it.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import anyio
import pytest

from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox

PROGRAM = Path(__file__).with_name("shutdown_program.py")
DOCS = Path(__file__).parents[2] / "docs" / "shutdown.md"
LOOPS = ("asyncio", "uvloop", "trio")
PHASES = ("running", "drain delay", "finish", "cancel")
AT_ONCE = 10  # processes
LIMIT = 120.0  # what hangs must not hang the suite
SLACK = 10.0  # seconds that a loaded machine may add; what hangs takes LIMIT
TIMEOUT, GRACE, BLOCK, DELAY = 0.5, 1.0, 1.0, 0.3
WITHIN = TIMEOUT + GRACE + 1 + SLACK
KILLED = -signal.SIGKILL

TABLE = {
    # what the handler does: exit status when it begins to do so in each of PHASES, and where its message is afterwards
    "thread": ((70, 70, 70, 70), "leased"),
    "swallow": ((70, 70, 70, 70), "leased"),
    "native": ((0, 0, 0, 70), "back"),
    "exit": ((0, 0, 0, 70), "back"),
    "sleep": ((KILLED,) * 4, "leased"),
    "regex": ((KILLED,) * 4, "leased"),
    "ack": ((70, 70, 70, 70), "leased"),
}


@dataclass(frozen=True)
class Case:
    """One process: what its bad handler does, from when on, and which signals it gets once it has said which lines.

    After the last of the lines there need be no signal.
    """

    how: str
    when: str
    backend: str
    signals: tuple[int, ...] = (signal.SIGTERM,)
    until: tuple[str, ...] = ("begun",)
    bodies: tuple[str, ...] = ("bad", "good")
    options: tuple[tuple[str, float], ...] = ()

    def __str__(self):
        return "-".join((self.how, self.when, self.backend, *(signal.Signals(n).name for n in self.signals)))


@dataclass
class Outcome:
    status: int
    seconds: float  # from the last line that was waited for, and its signal, to the end
    out: str
    err: str
    counts: object
    received: dict[str, tuple[int, int]]  # kind: (attempt, delivery count)


def matrix_case(how, when, backend):
    blocks_at_once = when == "running" and "ack" not in how
    return Case(
        how,
        when,
        backend,
        until=("misbehaving" if blocks_at_once else "begun",),
        bodies=("bad", "good", "later"),
        options=(("drain_delay", DELAY if when == "drain delay" else 0),),
    )


def cases(how, when, *, signals=((signal.SIGTERM,),), until=("begun",), bodies=("bad", "good"), loops=LOOPS, **options):
    """One for each event loop and sequence of signals."""
    return each(Case(how, when, loop, s, until, bodies, tuple(options.items())) for loop in loops for s in signals)


def each(found):
    """One test for each of these cases, which are slow."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in found])


class Processes:
    """The processes of all cases of this run, each started a few before it is asked for.

    So those of one file that goes to several processes of tests are mostly run once.
    """

    def __init__(self, cases, directory, pool):
        self._cases = list(cases)
        self._directory = directory
        self._pool = pool
        self._begun = {}

    def outcome(self, case):
        begin = self._cases.index(case)
        for number, ahead in enumerate(self._cases[begin : begin + AT_ONCE], begin):
            if ahead not in self._begun:
                self._begun[ahead] = self._pool.submit(run, self._directory / f"{number}.db", ahead)
        return self._begun[case].result()


@pytest.fixture(scope="module")
def processes(request, tmp_path_factory):
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    wanted = dict.fromkeys(c for item in items if isinstance(c := item.callspec.params.get("case"), Case))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield Processes(wanted, tmp_path_factory.mktemp("shutdowns"), pool)


@pytest.fixture
def outcome(processes, case):
    return processes.outcome(case)


def run(path, case):
    """Fill a store, run the program on it, signal it when it is there, and look at what is left."""
    anyio.run(fill, path, case.bodies)
    settings = {"shutdown_timeout": TIMEOUT, "cancel_grace": GRACE, "block_threshold": BLOCK, **dict(case.options)}
    text = json.dumps(
        {"how": case.how, "when": case.when, "backend": case.backend, "path": str(path), "group": settings}
    )
    process = subprocess.Popen(
        [sys.executable, PROGRAM, text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    give_up = threading.Timer(LIMIT, process.kill)
    give_up.start()
    lines = []
    began = time.monotonic()
    try:
        for line, signum in zip_longest(case.until, case.signals):
            wait_for(process, line, lines)
            began = time.monotonic()
            if signum is not None:
                process.send_signal(signum)
        out, err = process.communicate()
        seconds = time.monotonic() - began
    finally:
        give_up.cancel()
        process.kill()
        process.communicate()
    counts, received = anyio.run(look, path)
    return Outcome(process.returncode, seconds, "".join(lines) + out, err, counts, received)


def wait_for(process, wanted, seen):
    while True:
        line = process.stdout.readline()
        seen.append(line)
        if line.strip() == wanted:
            return
        assert line, f"it ended before it said {wanted!r}: {process.stderr.read()}"


async def fill(path, bodies):
    async with SQLiteMailbox(path, name="jobs") as mailbox:
        for kind in bodies:
            await mailbox.send({"kind": kind})


async def look(path):
    async with SQLiteMailbox(path, name="jobs") as mailbox:
        counts = await mailbox.counts()
        messages = await mailbox.receive(max_messages=10)
        return counts, {m.body["kind"]: (m.attempt, m.delivery_count) for m in messages}


def guilty_line(how):
    lines = PROGRAM.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# guilty: {how}"))


@each(matrix_case(how, when, loop) for how in TABLE for when in PHASES for loop in LOOPS)
def test_each_phase_against_each_misbehaviour(case, outcome):
    how, when = case.how, case.when
    statuses, fate = TABLE[how]
    status = statuses[PHASES.index(when)]
    assert outcome.status == status, outcome.err
    assert outcome.seconds < (DELAY if when == "drain delay" else 0) + WITHIN
    if how in ("native", "exit"):
        check_failed_handler(outcome, when)
    elif status == 70:
        check_report(outcome, how)
    else:
        assert re.search(rf'{PROGRAM.name}", line {guilty_line(how)},? in misbehave', outcome.err)
    check_nothing_is_lost(outcome, fate)
    if status != KILLED or when in ("finish", "cancel"):
        assert outcome.counts.settled >= 1  # the good one


def check_failed_handler(outcome, when):
    """It was a failed attempt, unless it came when the handler was cancelled anyway."""
    if when == "cancel":
        assert re.search(r"jobs: cancelled after 0\.\d+ s\n      waiting at .*: await anyio.sleep\(600\)", outcome.err)
        assert outcome.received["bad"] == (1, 2)  # handed back, not charged
    else:
        assert "shutdown (SIGTERM)" in outcome.err
        assert "jobs: finished" in outcome.err
        assert outcome.counts.delayed == 1  # waits for its next attempt


def check_report(outcome, how):
    assert "shutdown (SIGTERM)" in outcome.err
    assert "not clean, exit status 70" in outcome.err
    ending = "cancelled" if how == "ack" else "stuck"  # an acknowledgement can be cancelled, the others cannot
    at = "the settlement of message" if "ack" in how else f"{re.escape(str(PROGRAM))}:{guilty_line(how)} in "
    assert re.search(rf"  jobs: {ending} after \d\.\d\d s\n(      waiting at .*\n)?      waiting at {at}", outcome.err)


def check_nothing_is_lost(outcome, fate):
    counts = outcome.counts
    assert counts.delayed + counts.pending + counts.in_flight + counts.settled == 3
    assert counts.dead == 0
    if fate == "leased":
        assert counts.in_flight >= 1  # with a lease that nobody renews, so that it comes again
        assert "bad" not in outcome.received
    if "later" in outcome.received:  # it may have been claimed and handed back
        assert outcome.received["later"][0] == 1


# --------------------------------------------------------------------------------------------------------------- signals


@cases("none", "drain delay", signals=[(signal.SIGTERM,), (signal.SIGINT,)], drain_delay=0.1)
def test_a_signal_lets_the_work_in_hand_finish(case, outcome):
    assert outcome.status == 0, outcome.err
    assert f"shutdown ({signal.Signals(case.signals[0]).name}) in" in outcome.err
    assert ": clean\n" in outcome.err
    assert outcome.counts.settled == 2


@cases(
    "none", "cancel", signals=[(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)],
    until=("begun", "finish"), shutdown_timeout=600,
)  # fmt: skip
def test_a_second_signal_skips_to_the_cancelling(case, outcome):
    first, second = case.signals
    assert outcome.status == 128 + second, outcome.err
    assert outcome.seconds < GRACE + 1 + SLACK
    assert f"shutdown ({signal.Signals(first).name})" in outcome.err
    assert f"exit status {128 + second}" in outcome.err
    assert outcome.received["bad"] == (1, 2)


@cases(
    "swallow",
    "running",
    signals=[(signal.SIGTERM, signal.SIGTERM)],
    until=("misbehaving", "finish"),
    shutdown_timeout=600,
)
def test_a_second_signal_leaves_by_force_where_a_handler_stays(case, outcome):
    assert outcome.status == 128 + signal.SIGTERM
    assert GRACE * 0.9 < outcome.seconds < GRACE + 1 + SLACK
    assert "jobs: stuck after" in outcome.err
    assert "  in hand: 1 message; each comes again when its lease ends\n" in outcome.err
    assert f"{PROGRAM.name}:{guilty_line('swallow')} in misbehave" in outcome.err


@cases(
    "swallow", "running", signals=[(signal.SIGTERM, signal.SIGTERM, signal.SIGINT)],
    until=("misbehaving", "finish", "cancel"), shutdown_timeout=600, cancel_grace=600,
)  # fmt: skip
def test_a_third_signal_leaves_at_once(case, outcome):
    assert outcome.status == 128 + signal.SIGINT
    assert outcome.seconds < SLACK
    assert outcome.counts.in_flight >= 1  # nothing was waited for
    assert "leaving at once: shutdown (SIGTERM)" in outcome.err
    assert f"not clean, exit status {128 + signal.SIGINT}" in outcome.err
    assert f"{PROGRAM.name}:{guilty_line('swallow')} in misbehave" in outcome.err
    assert re.search(r"  in hand: [12] messages?; each comes again when its lease ends\n", outcome.err)


@cases("slow-open", "running", signals=[(signal.SIGTERM,), (signal.SIGINT,)], until=("opening",), shutdown_timeout=20)
def test_a_signal_during_the_start_ends_it(case, outcome):
    """The mailbox is being opened, and for a while its opening cannot be cancelled."""
    assert outcome.status == 0, outcome.err
    assert f"shutdown ({signal.Signals(case.signals[0]).name})" in outcome.err
    assert "begun" not in outcome.out
    assert outcome.counts.pending == 2


@cases("stuck-open", "running", until=("opening",))
def test_a_start_that_hangs_is_left_by_force(case, outcome):
    assert outcome.status == 70
    assert outcome.seconds < WITHIN
    assert "shutdown (SIGTERM)" in outcome.err
    assert "not clean, exit status 70" in outcome.err
    assert outcome.counts.pending == 2


@cases("shielded-ack", "finish")
def test_an_acknowledgement_that_cannot_be_cancelled_is_left_by_force(case, outcome):
    assert outcome.status == 70
    assert outcome.seconds < WITHIN
    check_report(outcome, "shielded-ack")
    assert outcome.counts.in_flight == 1


@cases("close", "drain delay", drain_delay=0.1)
def test_a_store_that_does_not_close_is_left_by_force(case, outcome):
    assert outcome.status == 70
    assert outcome.seconds < 0.1 + WITHIN
    assert "stop daemons" in outcome.err  # the phase that it did not get out of
    assert "not clean, exit status 70" in outcome.err
    assert re.search(r"^  mailbox \w+: stuck after .*\n      waiting at ", outcome.err, re.MULTILINE)
    assert outcome.counts.settled == 2


@cases("drain-close", "drain delay", signals=[()], drain_delay=0.1)
def test_neither_is_one_after_a_drain_which_has_no_limit_of_its_own(case, outcome):
    assert outcome.status == 70
    assert outcome.seconds < 0.1 + WITHIN
    assert "shutdown (the test)" in outcome.err
    assert outcome.counts.settled == 2


@cases("abandon", "running", until=("misbehaving",))
def test_a_thread_that_its_cancelled_handler_left_behind_does_not_keep_the_process(case, outcome):
    assert outcome.status == 70
    assert outcome.seconds < WITHIN
    assert outcome.received["bad"] == (1, 2)
    if case.backend != "trio":  # whose threads are daemons
        assert "1 thread(s) that handlers had left behind did not end" in outcome.err


@cases("abandon-early", "finish", until=("misbehaving",), loops=LOOPS[:2])
def test_a_thread_that_a_finished_handler_left_behind_does_not_keep_the_process(case, outcome):
    assert outcome.status == 70
    assert outcome.err.count("not clean, exit status 70") == 1
    assert re.search(r"^  thread '.*': stuck after .*\n      waiting at .*shutdown_program", outcome.err, re.MULTILINE)
    assert outcome.seconds < WITHIN
    assert outcome.counts.settled == 2


# ------------------------------------------------------------------------------------------------------------------ docs

DESCRIBED = {
    "thread": "runs in a thread and does not return",
    "swallow": "swallows cancellation, over and over",
    "native": "raises a native `CancelledError`",
    "exit": "calls `sys.exit`",
    "sleep": "blocks the event loop in C (`time.sleep`)",
    "regex": "blocks it in C and holds the interpreter (`re.match`)",
    "ack": "ends, but its acknowledgement hangs",
}


def test_the_documented_table_is_the_tested_one():
    expected = [
        [DESCRIBED[how], fate, *("SIGKILL" if status == KILLED else str(status) for status in statuses)]
        for how, (statuses, fate) in TABLE.items()
    ]
    header = ["the handler", "its message", *PHASES]
    tables = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        for block in DOCS.read_text().split("\n\n")
        if block.startswith("|")
    ]
    (rows,) = [table for table in tables if table[0] == header]
    assert rows[2:] == expected
