"""How long each test takes by itself: the slowest are listed, and in the quick run a test above the limit fails.

The own time of a test is the greater one of two: the processor time of its process and of the processes that it has waited
for, and the time that passed while no task of this machine had to wait for a processor or a disk (Linux: ``/proc/pressure``).
So other work on the machine does not fail a test, and on a machine without ``/proc/pressure`` only processor time counts.
Fixtures of modules and sessions do not count: whichever test comes first pays for them.

The setting ``own_time_limit`` is the limit, in seconds; by default there is none, ``make test`` sets one. A run that begins on
a busy machine has none either: one whose load average is above ``own_time_load``, by default the number of its processors.
``@pytest.mark.own_time(seconds)`` is the limit of one test that is worth more.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from selection import is_full

if TYPE_CHECKING:
    from collections.abc import Generator

    from _pytest.terminal import TerminalReporter

SHOWN = 20
"""How many tests are listed."""
WORTH_SHOWING = 0.1
PRESSURE = [path for name in ("cpu", "io") if (path := Path("/proc/pressure", name)).exists()]
PROPERTY = "own time"


class Reading(NamedTuple):
    """What the clocks say."""

    passed: float
    stalled: float
    """Seconds in which some task of the machine waited for a processor or a disk."""
    busy: float

    @classmethod
    def now(cls) -> Reading:
        users = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        busy = sum(usage.ru_utime + usage.ru_stime for usage in users)
        stalled = sum(int(path.read_text().partition("total=")[2].split()[0]) for path in PRESSURE) / 1e6
        return cls(time.perf_counter(), stalled, busy)

    def since(self, before: Reading) -> Reading:
        return Reading(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def own(self) -> float:
        return max(self.busy, self.passed - self.stalled) if PRESSURE else self.busy


class OwnTime:
    """Measures the tests of this process."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._began = Reading.now()
        self._shared = 0.0

    def pytest_collection_finish(self) -> None:
        """Keep what was collected out of garbage collections, which would go through it again and again during tests."""
        gc.collect()
        gc.freeze()

    def pytest_unconfigure(self) -> None:
        gc.unfreeze()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        self._began, self._shared = Reading.now(), 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        before = Reading.now()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self._shared += Reading.now().since(before).own

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        yield
        reading = Reading.now().since(self._began)
        own = reading.own - self._shared
        item.user_properties.append((PROPERTY, [own, reading.passed, reading.busy]))
        mark = item.get_closest_marker("own_time")
        limit = mark.args[0] if mark else self._limit
        if self._limit and own > limit:
            pytest.fail(
                f"took {own:.2f} s by itself ({reading.passed:.2f} s passed, {reading.busy:.2f} s of processor time); the"
                f" quick run allows {limit} s: have it take less, in virtual time if it waits, or mark it slow",
                pytrace=False,
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the settings."""
    parser.addini("own_time_limit", "seconds that a quick test may take by itself; 0 for no limit", default="0")
    processors = str(os.cpu_count() or 1)
    parser.addini("own_time_load", "the load average above which no test fails for its own time", default=processors)


def pytest_configure(config: pytest.Config) -> None:
    """Measure, with a limit in a quick run on a machine that is not busy."""
    config.addinivalue_line("markers", "own_time(seconds): the limit of this test in the quick run")
    busy = os.getloadavg()[0] > float(config.getini("own_time_load"))
    limit = 0.0 if busy or is_full(config) else float(config.getini("own_time_limit"))
    config.pluginmanager.register(OwnTime(limit), "own time")


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """List the slowest tests, slowest first."""
    measured = [
        (*value, report.nodeid)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "teardown"
        for name, value in report.user_properties
        if name == PROPERTY and value[0] > WORTH_SHOWING
    ]
    if measured:
        terminalreporter.section("own time, seconds passed, processor time")
        for own, passed, busy, nodeid in sorted(measured, reverse=True)[:SHOWN]:
            terminalreporter.write_line(f"{own:6.2f} {passed:6.2f} {busy:6.2f}  {nodeid}")
