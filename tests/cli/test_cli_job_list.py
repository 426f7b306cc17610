"""``mainspring jobs``, ``purge`` by filters, ``edit``, ``pause``, ``resume`` and ``concurrency``."""

from __future__ import annotations

import json
import os
import pty
from os import close, fdopen, write
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring import DeadLetterPolicy, LoopGroup, Rate, RequestFailedError, Tasks, chain, open_mailbox, parallel
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

    @tasks.task(key="to")
    async def email(to: str, subject: str = "Hello") -> str:
        if to == "no-one":
            raise ValueError("no such address")
        return f"sent to {to}"

    @tasks.task
    async def bill(number: int) -> None: ...

    async def fill() -> dict[str, str]:
        async with tasks:
            jobs = {"kept": await email.options(result_ttl=3_600).send("ann"), "dead": await email.send("no-one")}
            await LoopGroup([tasks.loop()], guardian=False).run(install_signals=False, until_empty=True)
            jobs |= {"late": await email.options(delay=3_600).send("ann"), "bob": await email.send("bob")}
            jobs |= {f"bill {n}": await bill.send(n) for n in range(5)}
            return {name: job.id for name, job in jobs.items()}

    return anyio.run(fill)


def called(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = call(arguments)
    said = capsys.readouterr()
    return status, said.out, said.err


def listed(capsys: Any, *arguments: str) -> list[dict[str, Any]]:
    status, out, _ = called(capsys, "jobs", *arguments, "--json")
    assert status == 0
    return [json.loads(line) for line in out.splitlines()]


def test_jobs_are_listed_a_line_each(url, ids, capsys):
    status, out, err = called(capsys, "jobs", url)
    assert status == 0
    lines = out.splitlines()
    assert {line.split()[0] for line in lines} == set(ids.values())
    assert err == "mainspring: 9 jobs of emails\n"
    (dead,) = (line for line in lines if line.startswith(ids["dead"]))
    assert "dead       email  key no-one" in dead
    assert "ValueError: no such address" in dead
    found = {job["id"]: job for job in listed(capsys, url)}
    assert found[ids["kept"]]["state"] == "done"
    assert found[ids["late"]]["due_at"]
    assert (found[ids["bill 1"]]["task"], found[ids["bill 1"]]["key"]) == ("bill", None)


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (("--state", "scheduled"), ["late"]),
        (("--state", "dead", "--state", "done"), ["dead", "kept"]),
        (("--task", "bill", "--search", '"number":3'), ["bill 3"]),
        (("--key", "ann"), ["late", "kept"]),
        (("--key", "ann", "--state", "pending"), []),
        (("--since", "1h", "--task", "email", "--state", "pending"), ["bob"]),
        (("--older-than", "1h"), []),
        (("--search", "ADDRESS"), ["dead"]),
    ],
)
def test_jobs_are_listed_by_filters(url, ids, filters, names, capsys):
    assert [job["id"] for job in listed(capsys, url, *filters)] == [ids[name] for name in names]


@pytest.mark.parametrize("limit", [2, 3])
def test_a_list_goes_on_where_it_ended(url, ids, limit, capsys):
    found: list[str] = []
    after: tuple[str, ...] = ()
    while True:
        status, out, err = called(capsys, "jobs", url, "--limit", str(limit), *after)
        assert status == 0
        assert out, "also the last page has jobs"
        found += [line.split()[0] for line in out.splitlines()]
        if "--after" not in err:
            break
        after = ("--after", err.split()[-1])
    assert sorted(found) == sorted(ids.values())
    assert [job["id"] for job in listed(capsys, url, "--limit", "0")] == found


def test_what_fits_is_purged(url, ids, capsys):
    assert called(capsys, "purge", url, "--task", "bill", "--search", '"number":3', "--yes")[1].startswith("1 message ")
    assert called(capsys, "purge", url, "--key", "ann", "--older-than", "1h", "--yes")[1].startswith("0 messages")
    _, out, _ = called(capsys, "purge", url, "--state", "dead", "--yes", "--json")
    assert json.loads(out) == {"mailbox": "emails", "purged": 1}
    left = {job["id"] for job in listed(capsys, url)}
    assert left == set(ids.values()) - {ids["dead"], ids["bill 3"]}
    assert called(capsys, "purge", url, "--task", "email", "--yes")[1] == (
        "2 messages dropped; dead letters stay (see `mainspring dead purge`)\n"
    )


def test_dead_letters_are_chosen_by_their_task(url, ids, capsys, monkeypatch, tmp_path):
    (tmp_path / "app_of_dead.py").write_text(f"from mainspring import Tasks\ntasks = Tasks({url!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MAINSPRING_URL", url)
    for target in ((url,), ("app_of_dead:tasks",), ()):
        found = json.loads(called(capsys, "dead", "list", *target, "--task", "email", "--json")[1])
        assert [letter["message_id"] for letter in found["letters"]] == [ids["dead"]]
        assert found["letters"][0]["body"] == {"task": "email", "args": {"to": "no-one"}}
        assert (
            json.loads(called(capsys, "dead", "show", *target, ids["dead"], "--json")[1])["error_type"] == "ValueError"
        )
    assert called(capsys, "dead", "purge", "--task", "bill", "--yes")[1] == "0 dead letter(s) purged\n"
    assert called(capsys, "dead", "replay", "--yes", "--task", "email", "--error", "ValueError", "--older-than", "1h")[
        1
    ].startswith("0")
    assert (
        called(capsys, "dead", "replay", "--yes", "--task", "email", "--error", "ValueError")[1]
        == "1 dead letter(s) replayed\n"
    )
    assert called(capsys, "jobs", "--state", "dead")[1] == ""


def test_dead_letters_of_calls_by_an_alias_are_chosen_by_their_task(url, capsys):
    before, now = Tasks(url), Tasks(url, dead_letter=DeadLetterPolicy(max_attempts=1))

    @before.task
    async def email(to: str) -> None: ...

    @now.task(aliases=["email"], concurrency=1)
    async def mail(to: str) -> None:
        raise ValueError("no such address")

    async def fill() -> None:
        async with before:
            await email.send("ann")
        await LoopGroup([now.loop()], guardian=False).run(install_signals=False, until_empty=True)

    anyio.run(fill)
    found = json.loads(called(capsys, "dead", "list", url, "--task", "mail", "--json")[1])
    assert [letter["body"]["task"] for letter in found["letters"]] == ["email"]
    assert called(capsys, "dead", "purge", url, "--task", "mail", "--yes")[1] == "1 dead letter(s) purged\n"


def test_a_purge_of_what_fits_asks_with_their_number(url, ids, capsys, monkeypatch):
    terminal, typed = pty.openpty()
    try:
        write(terminal, b"n\n")
        with fdopen(os.dup(typed)) as typing:
            monkeypatch.setattr("sys.stdin", typing)
            status, _, err = called(capsys, "purge", url, "--task", "bill")
    finally:
        close(terminal)
        close(typed)
    assert status == 1
    assert "Drop 5 messages of emails" in err
    assert len(listed(capsys, url, "--task", "bill")) == 5


def test_arguments_of_a_call_are_edited(url, ids, capsys, monkeypatch, tmp_path):
    assert called(capsys, "edit", url, ids["bob"], '{"to": "bö"}')[1] == f"{ids['bob']} edited\n"
    assert [job["id"] for job in listed(capsys, url, "--search", '"to":"bö"')] == [ids["bob"]]
    status, out, err = called(capsys, "edit", url, ids["dead"], '{"to": "cy"}')
    assert (status, out) == (1, "")
    assert f"job {ids['dead']}: it is dead; replay it first" in err
    assert "no such message is scheduled" in called(capsys, "edit", url, "unknown", "to=cy")[2]
    (tmp_path / "app_of_edits.py").write_text(
        f"from mainspring import Tasks\ntasks = Tasks({url!r})\n@tasks.task\ndef email(to: str, subject: str = ''): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    target = "app_of_edits:tasks"
    status, _, err = called(capsys, "edit", target, ids["bob"], '{"to": 7}')
    assert status != 0
    assert "edit: task email: to: " in err
    assert len(err.splitlines()) == 1
    status, _, err = called(capsys, "edit", target, ids["bob"], "too=cy")
    assert status != 0
    assert "task email(to: str, subject: str = '')" in err
    assert "'too'" in err
    assert called(capsys, "edit", target, ids["bob"], "to=cy", "subject=Two words")[0] == 0
    assert [job["id"] for job in listed(capsys, url, "--search", '"to":"cy","subject":"Two words"')] == [ids["bob"]]
    assert called(capsys, "edit", target, ids["bob"], '{"subject": "New"}', "--json")[0] == 0
    assert [job["id"] for job in listed(capsys, url, "--search", '"subject":"New"')] == [ids["bob"]]


def test_a_pause_of_the_task_or_the_mailbox_of_jobs_that_wait_is_said(url, ids, capsys):
    bob, dead, of_task = (
        ("job", url, ids["bob"]),
        ("job", url, ids["dead"]),
        "mainspring: task email is paused: its jobs",
    )
    assert "paused" not in called(capsys, *bob)[2] + called(capsys, "jobs", url)[2]
    called(capsys, "pause", url, "--task", "email")
    assert called(capsys, *bob)[2].startswith(of_task)
    assert "`mainspring resume --task email`" in called(capsys, "jobs", url, "--json")[2]
    assert "paused" not in called(capsys, *dead)[2] + called(capsys, "jobs", url, "--task", "bill")[2]
    called(capsys, "pause", url)
    assert "mainspring: emails is paused: its jobs begin after `mainspring resume`\n" in called(capsys, *bob)[2]
    assert "emails is paused" in called(capsys, "jobs", url, "--task", "bill")[2]
    assert "paused" not in called(capsys, *dead)[2]


def test_a_dead_call_gets_other_arguments_while_its_task_is_paused(url, ids, capsys):
    assert called(capsys, "pause", url, "--task", "email")[0] == 0
    assert called(capsys, "dead", "replay", url, ids["dead"])[0] == 0
    assert called(capsys, "edit", url, ids["dead"], "to=dora")[0] == 0
    assert called(capsys, "resume", url, "--task", "email")[0] == 0
    edited = json.loads(called(capsys, "job", url, ids["dead"], "--json")[1])
    assert (edited["state"], edited["arguments"]["to"]) == ("pending", "dora")


def test_a_body_that_is_no_call_is_replaced(tmp_path, capsys):
    plain = f"sqlite:///{tmp_path / 'jobs.db'}?name=plain"

    async def fill() -> str:
        async with open_mailbox(plain) as box:
            return await box.send({"n": 1})

    message_id = anyio.run(fill)
    assert "the message calls no task: give one JSON value" in called(capsys, "edit", plain, message_id, "n=2")[2]
    assert called(capsys, "edit", plain, message_id, "[1, 2]")[0] == 0
    assert [job["id"] for job in listed(capsys, plain, "--search", "[1,2]")] == [message_id]


def test_a_chain_is_listed_shown_and_cancelled(url, capsys):
    tasks = Tasks(url)

    @tasks.task
    async def work(number: int) -> int:
        return number

    async def send() -> str:
        async with tasks:
            return (await parallel([work.s(n) for n in range(3)]).send()).id

    chain_id = anyio.run(send)
    found = listed(capsys, url)
    assert len(found) == 4
    assert {job["chain"] for job in found} == {chain_id}
    assert f"{chain_id}  running    chain" in called(capsys, "jobs", url)[1]
    assert json.loads(called(capsys, "job", url, chain_id, "--json")[1])["state"] == "running"
    shown = called(capsys, "job", url, chain_id)[1]
    assert "0 of 3 done" in shown
    assert f"{chain_id}-0-2  pending" in shown
    assert "result" not in shown
    searched = listed(capsys, url, "--search", chain_id)
    assert {job["id"] for job in searched} == {chain_id, *(f"{chain_id}-0-{n}" for n in range(3))}
    assert called(capsys, "cancel", url, chain_id)[:2] == (0, f"{chain_id} cancelled\n")
    assert called(capsys, "cancel", url, chain_id)[0] == 1
    (ended,) = listed(capsys, url)
    assert (ended["id"], ended["state"]) == (chain_id, "cancelled")


def test_a_chain_with_a_dead_part_is_shown_as_dead_with_the_part_and_its_error(url, capsys):
    tasks = Tasks(url, dead_letter=DeadLetterPolicy(max_attempts=1))

    @tasks.task
    async def count() -> int:
        return 7

    @tasks.task
    async def check(number: int) -> int:
        raise ValueError(f"{number} is bad")

    async def run() -> str:
        async with LoopGroup([tasks.loop(wait_time_seconds=1)]):
            job = await chain(count.s(), check.s()).send()
            with pytest.raises(RequestFailedError):
                await job.result(timeout=30)
            return job.id

    chain_id = anyio.run(run)
    shown = called(capsys, "job", url, chain_id)[1]
    assert "dead" in shown
    assert "1 (the first is 0) of 2 stages" in shown
    assert f"{chain_id}-1-0  dead  {check.name}  attempt 1  ValueError: 7 is bad" in shown
    said = json.loads(called(capsys, "job", url, chain_id, "--json")[1])
    assert (said["state"], said["stage"], said["last_error"]) == ("dead", 1, "7 is bad")
    assert [part["id"] for part in said["under_way"]] == [f"{chain_id}-1-0"]
    assert "result" not in said


def test_a_mailbox_and_a_task_are_paused_and_limited(url, ids, capsys):
    assert called(capsys, "pause", url, "--task", "bill")[1] == "task bill of emails: paused\n"
    assert json.loads(called(capsys, "pause", url, "--json")[1]) == {
        "mailbox": "emails",
        "task": None,
        "done": "paused",
    }
    assert called(capsys, "concurrency", url, "3", "--task", "bill")[1] == "task bill of emails: concurrency 3\n"
    shown = called(capsys, "stats", url)[1].splitlines()
    assert shown[-2:] == ["all tasks: paused", "task bill: paused, concurrency 3 (changed)"]
    stats = json.loads(called(capsys, "stats", url, "--json")[1])
    assert stats["pending"] == 6
    assert [(each["task"], each["paused"], each["concurrency"]) for each in stats["limits"]] == [
        ("", True, None),
        ("bill", True, 3),
    ]
    assert {job["state"] for job in listed(capsys, url, "--task", "bill")} == {"pending"}
    assert called(capsys, "resume", url)[0] == 0
    assert called(capsys, "resume", url, "--task", "bill")[0] == 0
    assert called(capsys, "concurrency", url, "declared", "--task", "bill")[0] == 0
    assert "bill" not in called(capsys, "stats", url)[1]


def test_a_task_that_the_mailbox_has_no_trace_of_may_be_mistyped(url, ids, capsys):
    hint = "mainspring: no job or limit of a task 'bil' is in emails now: check the name\n"
    assert called(capsys, "resume", url, "--task", "bil") == (0, "task bil of emails: resumed\n", hint)
    assert called(capsys, "concurrency", url, "3", "--task", "bil")[2] == hint
    assert called(capsys, "concurrency", url, "declared", "--task", "bil")[2] == ""  # its limit is there
    assert called(capsys, "pause", url, "--task", "bil")[2] == hint
    assert called(capsys, "pause", url, "--task", "bill")[2] == ""
    assert called(capsys, "pause", url)[2] == ""


def test_a_mistyped_task_of_a_tasks_is_refused_and_changes_nothing(url, ids, capsys, tmp_path, monkeypatch):
    (tmp_path / "app_that_pauses.py").write_text(
        f"from mainspring import Tasks\ntasks = Tasks({url!r})\n@tasks.task\nasync def deliver() -> None: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    status, out, err = called(capsys, "pause", "app_that_pauses:tasks", "--task", "delivr")
    assert (status, out) == (2, "")
    assert "pause: there is no task 'delivr'; did you mean 'deliver'? there are: deliver" in err
    assert "paused" not in called(capsys, "stats", url)[1]
    for known in ("deliver", "bill"):  # of the program; of the store, as of a program before
        assert called(capsys, "pause", "app_that_pauses:tasks", "--task", known)[0] == 0


def test_stats_show_the_rates_of_tasks(url, capsys):
    tasks = Tasks(url)

    @tasks.task(rate=Rate(120, 60, burst=2), key="to", key_rate="5/s")
    async def ask(to: str) -> None: ...

    with tasks.sync:
        ask.sync.send("ann")
    shown = called(capsys, "stats", url)[1].splitlines()
    assert shown[-1] == "task ask: rate 120 in 60 s (burst 2), rate per key 5 in 1 s; 1 running or next"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("jobs", "{url}", "more"), "takes a mailbox alone"),
        (("jobs", "{url}", "--state", "waiting"), "there is no such state; there are: scheduled"),
        (("jobs", "{url}", "--task", ""), "at least one character"),
        (("jobs", "{url}", "--after", "there"), "position of a job"),
        (("jobs", "{url}", "--since", "soon"), "no time ago"),
        (("jobs", "{url}", "--since", "1h", "--older-than", "2h"), "no time is between"),
        (("purge", "{url}", "--task", "bill"), "pass --yes"),
        (("edit", "{url}", "x"), "the id of one job and NAME=VALUE"),
        (("edit", "{url}", "{id}", "{{"), "is no JSON"),
        (("edit", "{url}", "{id}", "[1]"), "give NAME=VALUE for each"),
        (("pause", "{url}", "bill"), "--task"),
        (("pause", "{url}", "--task", ""), "name of a task"),
        (("concurrency", "{url}"), "one number from 1"),
        (("concurrency", "{url}", "0"), "mainspring pause"),
        (("concurrency", "{url}", "-1"), ""),
    ],
)
def test_wrong_use_of_lists_is_one_line_that_says_what_to_do(url, ids, arguments, says, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    status, out, err = called(capsys, *(word.format(url=url, id=ids["bob"]) for word in arguments))
    assert status == 2
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1
    assert len(listed(capsys, url)) == len(ids)
