"""The mailbox contract's verdict on each backend, and what it skipped, at the end of every run of the tests: passed or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from _pytest.terminal import TerminalReporter

    from mainspring.testing.mailbox_contract import Report

PROPERTY = "mailbox contract"


def line(report: Report) -> str:
    """What a backend passed, and what it skipped, by the reason."""
    skips: dict[str, list[str]] = {}
    for name, reason in sorted(report.skipped.items()):
        skips.setdefault(reason.removeprefix(f"{report.backend}: "), []).append(name)
    why = "; ".join(f"{reason}: {', '.join(names)}" for reason, names in sorted(skips.items()))
    failed = f", failed {len(report.failed)}" if report.failed else ""
    return f"{report.backend}: passed {len(report.passed)}{failed}, skipped {len(report.skipped)}{f' ({why})' if why else ''}"


@pytest.fixture
def judged(record_property: Callable[[str, object], None]) -> Callable[[Report, AbstractSet[str]], None]:
    """Fails where a report is not as it must be: nothing failed, and just ``lacking`` is declared as lacking.

    The report's line becomes a property of the test: that travels from the processes of xdist to the one that prints.
    """

    def judge(report: Report, lacking: AbstractSet[str]) -> None:
        record_property(PROPERTY, line(report))
        assert report.ok, str(report)
        assert report.lacking == lacking

    return judge


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    lines: dict[str, int] = {}
    for outcome in ("passed", "failed"):
        for test in terminalreporter.getreports(outcome):
            for name, value in test.user_properties:
                if name == PROPERTY:
                    lines[str(value)] = lines.get(str(value), 0) + 1
    if lines:
        terminalreporter.section("mailbox contract")
        for text, times in sorted(lines.items()):
            terminalreporter.write_line(f"{text}{f' [{times} runs]' if times > 1 else ''}")
