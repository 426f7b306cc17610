"""``mainspring check``: the table, the verdicts and the exit status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from cli_helpers import only_line, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.own_time(2)

SOURCE = """
from mainspring import DeadLetterPolicy, InMemoryMailbox, LeasePolicy, LoopGroup, MainLoop, RetryPolicy

async def mail(number: int) -> None: ...
async def bill(number: int) -> None: ...

group = LoopGroup([
    MainLoop(InMemoryMailbox("mail"), mail),
    MainLoop(InMemoryMailbox("bill"), bill, visibility_timeout=20, lease=LeasePolicy(renew="never"),
             retry=RetryPolicy(initial_delay=3, jitter="none"), dead_letter=DeadLetterPolicy(max_attempts=2)),
])
plain = LoopGroup([MainLoop(InMemoryMailbox("plain"), mail)])
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


def test_the_defaults_hold_and_what_is_unknown_is_said(directory: Path) -> None:
    ended = run("check", "app:plain", cwd=directory)
    assert ended.returncode == 0, ended.stderr
    assert "not judged: the orchestrator's kill time is unknown (--grace); it must be 36 s or more" in ended.stdout
    assert "fails" not in ended.stdout
    assert (
        "mail: a failing message is tried 20 times over 14.2 h to 28.4 h; one whose worker dies each time is delivered 5"
        " times; then it is a dead letter\n"
    ) in ended.stdout


def test_each_policy_of_tasks_has_a_line(directory: Path) -> None:
    (directory / "policies.py").write_text(
        "from mainspring import DeadLetterPolicy, LoopGroup, RetryPolicy, Tasks\n"
        "tasks = Tasks('memory://policies', retry=RetryPolicy(1, 1, jitter='none'))\n"
        "for name, most in (('a', 5), ('b', 3), ('c', 3)):\n"
        "    async def work() -> None: ...\n"
        "    tasks.task(name=name, dead_letter=DeadLetterPolicy(max_attempts=most))(work)\n"
        "group = LoopGroup([tasks.loop()])\n"
    )
    lines = [line for line in run("check", "policies:group", cwd=directory).stdout.splitlines() if "failing" in line]
    assert [line.partition(";")[0] for line in lines] == [
        "policies: a failing call of a is tried 5 times over 4 s",
        "policies: a failing call of b, c is tried 3 times over 2 s",
    ]


def test_callbacks_for_a_shutdown_are_not_missed_by_a_command_that_runs_nothing(directory: Path) -> None:
    with (directory / "app.py").open("a", encoding="utf-8") as app:
        app.write("from mainspring import ShutdownCoordinator\nShutdownCoordinator.install().register(print)\n")
    ended = run("check", "app:plain", cwd=directory)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_defaults_do_not_fit_into_thirty_seconds(directory: Path) -> None:
    ended = run("check", "app:plain", "--grace", "30", "--longest", "60", cwd=directory)
    assert ended.returncode == 1
    assert "to 36 s or more, or LoopGroup(shutdown_timeout=24)" in ended.stdout
    assert run("check", "app:plain", "--grace", "45", "--longest", "60", cwd=directory).returncode == 0


def test_each_loop_is_judged_with_its_own_numbers(directory: Path) -> None:
    ended = run("check", "app:group", "--grace", "45", "--longest", "60", "--json", cwd=directory)
    assert ended.returncode == 1
    printed = json.loads(ended.stdout)
    assert printed["ok"] is False
    broken = {(rule["loop"], rule["setting"]): rule["value"] for rule in printed["rules"] if not rule["ok"]}
    assert broken == {("bill", "block_threshold"): 10, ("bill", "visibility_timeout"): 1170}
    assert printed["not_judged"] == []
    assert [timeouts["loop"] for timeouts in printed["timeouts"]] == ["mail", "bill"]
    mail, bill = printed["timeouts"]
    assert (mail["max_attempts"], mail["max_crashes"], mail["horizon"][0]) == (20, 5, pytest.approx(51_147, abs=1))
    assert (bill["max_attempts"], bill["horizon"]) == (2, [3.0, 3.0])


def test_a_beat_gap_shorter_than_the_longest_processing(directory: Path) -> None:
    arguments = ("check", "app:plain", "--grace", "45", "--longest", "7200")
    assert run(*arguments, cwd=directory).returncode == 1
    assert run(*arguments, "--beat-gap", "60", cwd=directory).returncode == 0
    written_otherwise = ("check", "app:plain", "--grace", "45s", "--longest", "2h", "--beat-gap", "1m")
    assert run(*written_otherwise, cwd=directory).returncode == 0


@pytest.mark.parametrize("option", ["--grace", "--longest", "--beat-gap"])
def test_a_negative_time_is_wrong_use(directory: Path, option: str) -> None:
    ended = run("check", "app:plain", option, "-1", cwd=directory)
    assert ended.returncode == 2
    assert option in only_line(ended.stderr)


def test_what_the_package_warns_of_says_who_warns_and_other_warnings_are_left_alone(directory: Path) -> None:
    source = "import logging"
    for logger, text in (("mainspring.mailbox", "careful"), ("app", "theirs")):
        source += f"\nlogging.getLogger({logger!r}).warning({text!r})"
    (directory / "app.py").write_text(source + SOURCE, encoding="utf-8")
    ended = run("check", "app:plain", cwd=directory)
    assert ended.stderr.splitlines() == ["mainspring: careful", "theirs"]


LIMITED = """
from mainspring import LoopGroup, Rate, Tasks

tasks = Tasks("memory://jobs", max_concurrency=50)

@tasks.task(rate=Rate(100, 60, burst=10), concurrency=5, key="to", key_rate="1/s", ordered=True)
async def fits(to: str) -> None: ...

@tasks.task(rate="1/h", expires_in=60, concurrency=60, batch=100)
async def never(docs: list[int]) -> None: ...

@tasks.task
async def free() -> None: ...

group = LoopGroup([tasks.loop()])
"""


def test_limits_are_shown_and_those_that_cannot_be_reached_fail(tmp_path: Path) -> None:
    (tmp_path / "limited.py").write_text(LIMITED, encoding="utf-8")
    ended = run("check", "limited:group", "--grace", "45", "--longest", "60", cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    for line in (
        "jobs: 50 messages of the mailbox at once in the whole fleet",
        "jobs: task fits in the whole fleet: 100 calls in 60 s (up to 10 together), 5 at once, 1 call of each key in 1 s, 1 of",
        "1 of each key at once: a failing one holds up its key for up to 28.4 h; what ran in a worker that is killed counts",
        "jobs: task never in the whole fleet: 1 call in 60 min, 60 at once; what ran",
        "fails: a call of task never has its turn before it expires: let the calls of never expire after more than 60 min,",
        "fails: the batch of task never can be reached: no more than 60 run at once: set batch=60 for never, or raise",
        "fails: the batch of task never can be reached: no more than 50 run at once: set batch=50 for never, or raise",
        "fails: the concurrency of task never can be reached: no more than 50 run at once: set concurrency=50",
    ):
        assert line in ended.stdout
    assert "free" not in ended.stdout
    assert "fails: the concurrency of task fits" not in ended.stdout
