"""What a shutdown report says, and the exit status that follows from it."""

from __future__ import annotations

import pytest

from mainspring import ShutdownReport
from mainspring.runtime.shutdown_report import Ending, PartReport

FINE = PartReport("jobs", Ending.FINISHED, 0.5)


@pytest.mark.parametrize(
    ("parts", "forced_by", "clean", "status"),
    [
        ((), None, True, 0),
        ((FINE,), None, True, 0),
        ((FINE, PartReport("mail", Ending.CANCELLED, 30)), None, False, 70),
        ((PartReport("mail", Ending.STUCK, 35),), None, False, 70),
        ((PartReport("mail", Ending.CRASHED, 0),), None, False, 1),
        ((FINE,), 2, False, 130),
        ((PartReport("mail", Ending.CANCELLED, 1),), 15, False, 143),
    ],
)
def test_the_exit_status(parts, forced_by, clean, status):
    report = ShutdownReport("SIGTERM", 1.0, parts, forced_by=forced_by)
    assert (report.clean, report.exit_status) == (clean, status)


def test_it_reads_well():
    parts = (FINE, PartReport("mail", Ending.CANCELLED, 30.014, ("app.py:12 in send: await post(url)", "x.py:3 in f")))
    report = ShutdownReport("SIGTERM", 30.25, parts, {"finish": 30.0, "cancel": 0.01})
    assert str(report).splitlines() == [
        "shutdown (SIGTERM) in 30.25 s: not clean, exit status 70",
        "  phases: finish 30.00 s, cancel 0.01 s",
        "  jobs: finished after 0.50 s",
        "  mail: cancelled after 30.01 s",
        "      waiting at app.py:12 in send: await post(url)",
        "      waiting at x.py:3 in f",
    ]
    assert str(ShutdownReport("drain()", 0.0)) == "shutdown (drain()) in 0.00 s: clean"
