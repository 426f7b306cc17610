"""What the backends of the contract passed and skipped stands at the end of a run, also where all passed and under xdist."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

CONFTEST = """
import sys
sys.path.append({tests!r})
from contract_summary import judged, pytest_terminal_summary
"""
TESTS = """
import pytest
from mainspring import InMemoryMailbox
from mainspring.testing import mailbox_contract, run_virtual

@pytest.mark.parametrize("time", [1, 2])
def test_contract(judged, time):
    async def main():
        backend = mailbox_contract.BackendUnderTest(InMemoryMailbox, name="memory")
        return await mailbox_contract.run(backend, only=["first_in_first_out", "two_mailboxes_of_one_name_are_one_queue"])
    judged(run_virtual(main), {lacking})
"""
LACKING = {"durable", "cross_process"}
SKIPPED = "has not the capability 'cross_process': two_mailboxes_of_one_name_are_one_queue"
LINE = f"memory: passed 1, skipped 1 ({SKIPPED}) [[]2 runs]"


def run(pytester: pytest.Pytester, lacking: set[str], *options: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST.format(tests=str(Path(__file__).parents[1])))
    pytester.makepyfile(TESTS.replace("{lacking}", repr(lacking)))
    return pytester.runpytest_subprocess("-q", "-p", "no:randomly", "-p", "no:cacheprovider", *options)


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=("one process", "xdist"))
def test_skips_are_printed_where_all_passed(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    result = run(pytester, LACKING, *options)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*= mailbox contract =*", LINE])


def test_and_where_a_test_failed(pytester: pytest.Pytester) -> None:
    result = run(pytester, {"durable"})
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*= mailbox contract =*", LINE])
