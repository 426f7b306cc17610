"""``mainspring call``: a call of a task that a program declares, with arguments from the command line."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring import DeadLetterPolicy, LoopGroup, Tasks
from mainspring.cli.app import call
from mainspring.cli.target import load_attribute

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mainspring import JobStatus

pytestmark = pytest.mark.own_time(2)

PROGRAM = """
from dataclasses import dataclass
from datetime import date

from mainspring import DeadLetterPolicy, InMemoryMailbox, Tasks

tasks = Tasks({url!r}, dead_letter=DeadLetterPolicy(max_attempts=1), modules=["more_calls"])
in_memory = Tasks(InMemoryMailbox())
group = 5


@dataclass
class Address:
    name: str
    host: str = "example.org"


@tasks.task(key="to", result_ttl=60)
async def email(to: str, when: date | None = None, count: int = 1, cc: list[Address] = []) -> str:
    assert all(isinstance(each, Address) for each in cc)
    if to == "no-one":
        raise ValueError("no such address")
    return f"{{to}} {{when}} {{count + 1}} {{len(cc)}}"
"""
MORE = """
from app_of_calls import tasks


@tasks.task
async def report() -> None: ...
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tasks]:
    (tmp_path / "app_of_calls.py").write_text(PROGRAM.format(url=f"sqlite:///{tmp_path / 'jobs.db'}?name=calls"))
    (tmp_path / "more_calls.py").write_text(MORE)
    monkeypatch.syspath_prepend(tmp_path)
    yield load_attribute("app_of_calls:tasks")
    for name in ("app_of_calls", "more_calls"):
        sys.modules.pop(name, None)


def called(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = call(["call", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def waiting(tasks: Tasks) -> list[JobStatus]:
    """The calls that were sent, by their ids."""

    async def look() -> list[JobStatus]:
        async with tasks:
            return sorted([job async for job in tasks.mailbox.jobs()], key=lambda job: job.id)

    return anyio.run(look)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (["to=ann"], {"to": "ann"}),
        (["to=a=b", "count=3", "when=2026-01-10"], {"to": "a=b", "count": 3, "when": "2026-01-10"}),
        (['to="42"', "when=null"], {"to": "42", "when": None}),
        (['cc=[{"name": "bob"}]', "to=x y"], {"to": "x y", "cc": [{"name": "bob", "host": "example.org"}]}),
        (['{"to": "42", "count": 2}'], {"to": "42", "count": 2}),
    ],
)
def test_the_arguments_are_of_the_types_of_the_function(tasks, capsys, given, sent):
    status, out, err = called(capsys, "app_of_calls:tasks", "email", *given)
    assert (status, err) == (0, "")
    (job,) = waiting(tasks)
    assert (out, job.arguments, job.key) == (f"{job.id}\n", sent, sent["to"])


def test_options_of_the_call(tasks, capsys):
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=2)
    email = ("app_of_calls:tasks", "email", "to=ann")
    assert called(capsys, *email, "--delay", "1h", "--key", "tenant", "--priority", "5", "--expires-in", "2h")[0] == 0
    assert called(capsys, *email, "--at", at.isoformat())[0] == 0
    first, second = waiting(tasks)
    assert 3_590 < (first.due_at - first.enqueued_at).total_seconds() < 3_610
    assert (first.key, second.key) == ("tenant", "ann")
    assert abs((second.due_at - at).total_seconds()) < 1


def test_a_call_that_is_sent_already_is_not_sent_again(tasks, capsys, monkeypatch):
    monkeypatch.setenv("MAINSPRING_URL", "app_of_calls:tasks")
    first = json.loads(called(capsys, "report", "--unique", "--json")[1])
    assert first == {"mailbox": "calls", "task": "report", "id": first["id"], "new": True}
    status, out, err = called(capsys, "report", "--unique")
    assert (status, out) == (0, f"{first['id']}\n")
    assert err == f"mainspring: nothing was sent: job {first['id']} has the same key and is not finished\n"
    assert len(waiting(tasks)) == 1


def test_a_task_whose_name_has_a_colon_is_called_on_the_tasks_of_the_environment(tasks, capsys, monkeypatch):
    tasks.task(name="mails:welcome")(lambda: None)
    monkeypatch.setenv("MAINSPRING_URL", "app_of_calls:tasks")
    assert called(capsys, "mails:welcome")[0] == 0
    assert called(capsys, "app_of_calls:tasks", "mails:welcome")[0] == 0
    assert [job.task for job in waiting(tasks)] == ["mails:welcome"] * 2
    monkeypatch.setenv("MAINSPRING_URL", "sqlite:///elsewhere.db")
    assert called(capsys, "app_of_calls:tasks", "mails:welcome")[0] == 0


def test_a_pause_of_the_task_is_said_where_its_result_is_waited_for(tasks, capsys):
    async def pause() -> None:
        async with tasks:
            await tasks.pause("report")

    anyio.run(pause)
    status, _, err = called(capsys, "app_of_calls:tasks", "report", "--wait", "1")
    assert status == 1
    assert "task report is paused" in err
    assert "paused" not in called(capsys, "app_of_calls:tasks", "email", "to=ann")[2]


def test_the_result_is_waited_for(tasks, capsys):
    def work() -> None:
        program = Tasks(tasks.mailbox.address, dead_letter=DeadLetterPolicy(max_attempts=1))
        program.task(name="email")(email)
        program.task(name="report")(report)
        group = LoopGroup([program.loop()], guardian=False)

        async def main() -> None:
            with anyio.move_on_after(20):
                async with group:
                    while len(ran) < 3:
                        await anyio.sleep(0.01)

        anyio.run(main)

    ran: list[str] = []

    async def email(to: str) -> str:
        ran.append(to)
        if to == "no-one":
            raise ValueError("no such\n\x1b[31maddress")
        return f"sent to {to}"

    async def report() -> None:
        ran.append("report")

    worker = Thread(target=work)
    worker.start()
    try:
        wait = partial(called, capsys, "app_of_calls:tasks")
        status, out, err = wait("email", "to=ann", "--wait", "20s")
        assert (status, out) == (0, '"sent to ann"\n')
        assert err.startswith("mainspring: waiting for job ")
        found = json.loads(wait("report", "--wait", "20s", "--json")[1])
        assert (found["task"], found["result"]) == ("report", None)
        status, out, err = wait("email", "to=no-one", "--wait", "20s")
        assert (status, out) == (1, "")
        assert err.splitlines()[-1].endswith(r"is dead: ValueError: no such\n\x1b[31maddress")
    finally:
        ran.extend(["stop"] * 3)
        worker.join()
    status, out, err = wait("email", "to=bob", "--wait", "0.1s")
    assert (status, out) == (1, "")
    assert "was not finished within 0.1 s" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["app_of_calls:tasks"], "name a task behind the tasks: email, report"),
        (["app_of_calls:tasks", "emial"], "there is no task 'emial'; did you mean 'email'? there are: email, report"),
        (["app_of_calls:tasks", "email"], "missing a required argument: 'to'"),
        (["app_of_calls:tasks", "email", "to=a", "from=b"], "unexpected keyword argument 'from'"),
        (["app_of_calls:tasks", "email", "to=a", "to=b"], "'to=b' is no argument of its own"),
        (["app_of_calls:tasks", "email", "ann"], "'ann' is no argument of its own"),
        (
            ["app_of_calls:tasks", "email", "to=5"],
            "to: Input should be a valid string; a text that reads as JSON takes quotes of its own: to='\"5\"'",
        ),
        (
            ["app_of_calls:tasks", "email", "to=a", "count=b"],
            "call: task email: count: Input should be a valid integer",
        ),
        (["app_of_calls:tasks", "email", '{"to": "a"'], "is no JSON"),
        (["app_of_calls:tasks", "email", "to=\udcff"], r"call: the argument 'to=\udcff' is not UTF-8; give text in"),
        (["app_of_calls:tasks", "email", '{"to": "\udcff"}'], "is not UTF-8; give text in UTF-8"),
        (["app_of_calls:tasks", "email", "\udcff=5"], "is not UTF-8; give text in UTF-8"),
        (["app_of_calls:tasks", "email", "to=a", "--delay", "1h", "--at", "2099-01-01T00:00:00Z"], "delay"),
        (
            ["app_of_calls:group", "email"],
            "app_of_calls:group is an object of type int; name a Tasks; it has app_of_calls:tasks",
        ),
        (["app_of_calls:task", "email"], "has no 'task'; it has app_of_calls:tasks"),
        (["app_of_calls:in_memory", "email"], "a memory:// mailbox lives and ends with one process"),
        (["sqlite:///jobs.db", "email"], "name the Tasks as MODULE:ATTR"),
        (["app.queue", "email"], "call: name the Tasks as MODULE:ATTR, as app.queue:tasks, not 'app.queue' alone"),
    ],
)
def test_wrong_use_is_one_line_that_says_what_to_do(tasks, words, says, capsys):
    status, out, err = called(capsys, *words)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert says in err
