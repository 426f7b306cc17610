"""``mainspring demo`` as a process, small; and its account of what became of the files."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from cli_helpers import only_line, processes_with, run, started, wait_until_gone

from mainspring.cli.demo_report import account
from mainspring.mailbox.message import Counts, DeadLetter

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_every_file_is_accounted_for_though_workers_are_killed_and_stopped(tmp_path: Path) -> None:
    ended = run("demo", "--files", "500", "--json", "--dir", "work", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert report["ok"] is True
    assert report["files"] == report["sent"] == 501
    assert report["done"] == 500
    (broken,) = report["dead_lettered"].items()
    assert broken[0].endswith("work/broken.py")
    assert "SyntaxError" in broken[1]
    assert report["killed"] != report["drained"]
    assert len(report["workers"]) >= 3
    assert report["service_exit_status"] == 0
    assert report["summary"]["functions"] > 1_000
    assert "killed (SIGKILL)" in ended.stderr
    again = run("demo", "--dir", "work", cwd=tmp_path)
    assert again.returncode == 2
    assert "holds an earlier run" in only_line(again.stderr)


@pytest.mark.slow
def test_ctrl_c_stops_the_workers_and_leaves_no_files(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with started("demo", "--json", cwd=tmp_path, TMPDIR=str(temporary)) as command:
        command.expect(r"worker process \d+ killed")
        assert len(processes_with(f"INDEXER_DIR={temporary}")) >= 2
        command.send(signal.SIGINT)
        assert command.wait() == 128 + signal.SIGINT
        assert "ended by SIGINT; the workers are stopped" in command.text
    assert processes_with(f"INDEXER_DIR={temporary}") == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_killed_it_leaves_no_workers_behind(tmp_path: Path) -> None:
    with started("demo", "--json", "--dir", str(tmp_path / "work"), cwd=tmp_path) as command:
        command.expect("done, .* in flight")
        workers = processes_with(f"INDEXER_DIR={tmp_path / 'work'}")
        assert len(workers) >= 2
        command.send(signal.SIGKILL)
        for pid in workers:
            wait_until_gone(pid)


def letter(path: str) -> DeadLetter:
    class Body:
        def __init__(self) -> None:
            self.path = path

    now = datetime(2026, 1, 1, tzinfo=UTC)
    return DeadLetter(
        message_id="id", body=Body(), raw=b"", mailbox="files", delivery_count=1, attempt=1, error="invalid syntax",
        error_type="SyntaxError", traceback="", enqueued_at=now, first_received_at=now, dead_lettered_at=now,
        request_id="id",
    )  # fmt: skip


def facts(**changes: Any) -> dict[str, Any]:
    """A run in which all went well, with changes."""
    row = {"deliveries": 1, "runs": 1, "worker": 7}
    return {
        "paths": ["a", "b", "broken"],
        "broken": "broken",
        "sent": 3,
        "rows": [{"path": "a", **row}, {"path": "b", **row, "deliveries": 2, "runs": 2, "worker": 8}],
        "dead": [letter("broken")],
        "counts": Counts(settled=2, dead=1),
        "seconds": 2.0,
        "killed": 7,
        "drained": 8,
        "service_status": 0,
        "summary": {},
        **changes,
    }


def test_an_account_in_which_all_went_well() -> None:
    report = account(**facts())
    assert report.ok
    assert (report.done, report.redelivered, report.run_twice) == (2, 1, 1)
    assert report.dead_lettered == {"broken": "SyntaxError: invalid syntax"}
    assert report.workers == {7: 1, 8: 1}
    assert report.rate == 1.5
    assert report.as_json()["messages_per_second"] == 1.5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"rows": facts()["rows"][:1], "counts": Counts(settled=1, dead=1)},
            "1 of 3 files are missing, the first is b",
        ),
        ({"sent": 2}, "a message was not sent"),
        ({"paths": ["a", "broken"], "sent": 2}, "there are results of files that were not sent"),
        ({"dead": [letter("broken"), letter("a")]}, "both among the results and among the dead letters"),
        ({"counts": Counts(settled=2, dead=1, pending=4)}, "4 messages are still waiting"),
        ({"counts": Counts(settled=3, dead=1)}, "2 results, but 3 messages acknowledged"),
        ({"broken": "other"}, "the broken file is not among the dead letters"),
        ({"service_status": 70}, "the service left with exit status 70"),
        ({"killed": None}, "no worker was killed"),
        ({"drained": None}, "no worker was told to stop"),
    ],
)
def test_an_account_names_what_is_not_as_promised(changes: dict[str, Any], problem: str) -> None:
    report = account(**facts(**changes))
    assert not report.ok
    assert any(problem in text for text in report.problems), report.problems
    assert replace(report, problems=()).ok
