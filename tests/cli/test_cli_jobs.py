"""``mainspring stats``, ``job``, ``cancel``, ``run-now``, ``reschedule`` and ``purge``."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring import DeadLetterPolicy, LoopGroup, Tasks
from mainspring.cli.app import call

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.own_time(2)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'jobs.db'}?name=emails"


@pytest.fixture
def ids(url: str) -> dict[str, str]:
    """The ids of jobs of each kind."""
    tasks = Tasks(url, dead_letter=DeadLetterPolicy(max_attempts=1))

    @tasks.task
    async def email(to: str) -> str:
        if to == "no-one":
            raise ValueError("no such address")
        return f"sent to {to}"

    async def fill() -> dict[str, str]:
        async with tasks:
            kept = await email.options(result_ttl=3_600).send("ann")
            done, dead = await email.send("bob"), await email.send("no-one")
            await LoopGroup([tasks.loop()], guardian=False).run(install_signals=False, until_empty=True)
            pending, late = await email.send("cy"), await email.options(delay=3_600).send("di")
            jobs = {"kept": kept, "done": done, "dead": dead, "pending": pending, "late": late}
            return {name: job.id for name, job in jobs.items()}

    return anyio.run(fill)


def called(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = call(arguments)
    said = capsys.readouterr()
    return status, said.out, said.err


def test_stats_say_where_the_messages_are(url, ids, capsys):
    status, out, _ = called(capsys, "stats", url)
    assert status == 0
    rows = dict(line.rsplit(None, 1) for line in out.splitlines() if not line.endswith(" s"))
    assert rows == {"delayed": "1", "pending": "1", "in flight": "0", "settled": "2", "dead": "1"}
    status, out, _ = called(capsys, "stats", url, "--json")
    assert {"mailbox": "emails", "delayed": 1, "dead": 1}.items() <= json.loads(out).items()


def test_a_job_is_shown_wherever_it_is(url, ids, capsys):
    states = {}
    for name in ("kept", "dead", "pending", "late"):
        status, out, _ = called(capsys, "job", url, ids[name], "--json")
        assert status == 0
        shown = json.loads(out)
        assert shown["task"] == "email"
        states[name] = shown["state"]
    assert states == {"kept": "done", "dead": "dead", "pending": "pending", "late": "scheduled"}
    status, out, _ = called(capsys, "job", url, ids["dead"])
    assert "no such address" in out
    assert "ValueError" in out
    assert 'arguments          {"to": "no-one"}' in out.splitlines()
    status, out, err = called(capsys, "job", url, ids["done"])
    assert (status, out) == (1, "")
    assert ids["done"] in err
    assert len(err.splitlines()) == 1


def test_a_job_is_shown_with_its_arguments_and_its_kept_result(url, capsys):
    tasks = Tasks(url)

    @tasks.task(result_ttl=3_600)
    async def upper(text: str) -> str | None:
        return text.upper() or None

    async def fill() -> list[str]:
        async with tasks:
            done = [await upper.send("ab"), await upper.send(""), await upper.send("x" * 2_000)]
            await LoopGroup([tasks.loop()], guardian=False).run(install_signals=False, until_empty=True)
            return [job.id for job in (*done, await upper.send("\x1b[2J"), await upper.send("y" * 2_000))]

    short, none, long, waits, waits_long = anyio.run(fill)
    lines = [line for job in (short, none, waits) for line in called(capsys, "job", url, job)[1].splitlines()]
    assert [line for line in lines if line.startswith(("arguments", "result"))] == [
        'result             "AB"',
        "result             null",
        'arguments          {"text": "\\u001b[2J"}',
    ]
    for job, name in ((long, "result"), (waits_long, "arguments")):
        (line,) = [line for line in called(capsys, "job", url, job)[1].splitlines() if line.startswith(name)]
        assert len(line) < 1_100
        assert line.endswith("characters; --json prints all)")
    assert json.loads(called(capsys, "job", url, long, "--json")[1])["result"] == "X" * 2_000
    shown = json.loads(called(capsys, "job", url, waits_long, "--json")[1])
    assert shown["arguments"] == {"text": "y" * 2_000}
    assert "result" not in shown
    (listed, *_) = called(capsys, "jobs", url, "--search", "2J", "--json")[1].splitlines()
    assert json.loads(listed)["arguments"] == {"text": "\x1b[2J"}


def test_jobs_are_cancelled_run_now_and_rescheduled(url, ids, capsys):
    assert called(capsys, "run-now", url, ids["late"], ids["dead"])[0] == 0
    assert json.loads(called(capsys, "stats", url, "--json")[1])["pending"] == 3
    in_an_hour = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert called(capsys, "reschedule", url, ids["late"], "--at", in_an_hour)[0] == 0
    assert called(capsys, "reschedule", url, ids["pending"], "--in", "2h")[0] == 0
    due = json.loads(called(capsys, "job", url, ids["pending"], "--json")[1])["due_at"]
    assert 7_100 < (datetime.fromisoformat(due) - datetime.now(UTC)).total_seconds() <= 7_200
    status, out, err = called(capsys, "cancel", url, ids["pending"], "no-such")
    assert status == 1
    assert out == f"{ids['pending']} removed\n"
    assert "no-such" in err
    assert called(capsys, "purge", url, "--yes")[1].startswith("2 messages dropped")
    assert json.loads(called(capsys, "purge", url, "--yes", "--json")[1]) == {"mailbox": "emails", "purged": 0}


def test_the_mailbox_can_be_named_by_the_environment_or_by_its_tasks(url, ids, capsys, monkeypatch, tmp_path):
    (tmp_path / "app_of_jobs.py").write_text(f"from mainspring import Tasks\ntasks = Tasks({url!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert called(capsys, "stats", "app_of_jobs:tasks", "--json")[0] == 0
    monkeypatch.setenv("MAINSPRING_URL", url)
    assert json.loads(called(capsys, "job", ids["late"], "--json")[1])["state"] == "scheduled"
    assert called(capsys, "stats")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("stats",), "name a mailbox"),
        (("stats", "memory://jobs"), "lives and ends with one process"),
        (("stats", "{url}", "more"), "takes a mailbox alone"),
        (("stats", "sqlite:///no-such.db?name=x"), "no mailbox"),
        (("job", "{url}"), "give the id of one job"),
        (("cancel", "{url}"), "give the ids of jobs"),
        (("reschedule", "{url}", "x"), "say when"),
        (("reschedule", "{url}", "x", "--in", "soon"), "no duration"),
        (("purge", "{url}"), "pass --yes"),
        (("stats", "json:dumps"), "name a Tasks"),
    ],
)
def test_wrong_use_is_one_line_that_says_what_to_do(url, ids, arguments, says, capsys, monkeypatch):
    monkeypatch.delenv("MAINSPRING_URL", raising=False)
    monkeypatch.setattr("sys.stdin", None)
    status, out, err = called(capsys, *(word.format(url=url) for word in arguments))
    assert status in (1, 2)
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1
