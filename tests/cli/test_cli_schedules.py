"""``mainspring schedules`` and its verbs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from mainspring import LoopGroup, Schedule, Tasks
from mainspring.cli.app import call

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.own_time(2)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A mailbox with a declared schedule and one made at run time."""
    url = f"sqlite:///{tmp_path / 'jobs.db'}?name=emails"
    tasks = Tasks(url)

    @tasks.task
    async def email(to: str) -> None: ...

    tasks.cron("0 3 * * *", email, args=("ann",), tz="Europe/Berlin", name="nightly")

    async def fill() -> None:
        async with tasks:
            await LoopGroup([tasks.loop()], guardian=False).run(install_signals=False, until_empty=True)
            await tasks.schedules.add(Schedule("often", email, every=60, args=("bob",)))

    anyio.run(fill)
    return url


def called(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = call(arguments)
    said = capsys.readouterr()
    return status, said.out, said.err


def test_schedules_are_listed(url, capsys):
    status, out, _ = called(capsys, "schedules", "list", url)
    assert status == 0
    nightly, often, count = out.splitlines()
    assert nightly.startswith("nightly  email  0 3 * * * (Europe/Berlin)  next 2")
    assert nightly.endswith("declared")
    assert often.startswith("often  email  every 60 s  next 2")
    assert often.endswith("added")
    assert count == "2 schedules"
    status, out, _ = called(capsys, "schedules", "list", url, "--json")
    assert [(each["name"], each["cron"], each["every"], each["declared"]) for each in json.loads(out)] == [
        ("nightly", "0 3 * * *", None, True),
        ("often", None, 60.0, False),
    ]


def test_schedules_are_paused_resumed_run_and_removed(url, capsys):
    assert called(capsys, "schedules", "pause", url, "nightly", "often") == (0, "nightly paused\noften paused\n", "")
    assert called(capsys, "schedules", "list", url)[1].count("  paused  ") == 2
    assert called(capsys, "schedules", "resume", url, "often", "--json")[1] == (
        '{"mailbox": "emails", "done": {"often": "resumed"}}\n'
    )
    status, out, _ = called(capsys, "schedules", "run-now", url, "often")
    assert status == 0
    assert out.startswith("often sent ")
    assert called(capsys, "stats", url)[1].splitlines()[1].split() == ["pending", "1"]
    assert called(capsys, "schedules", "remove", url, "often") == (0, "often removed\n", "")
    assert called(capsys, "schedules", "list", url)[1].endswith("1 schedule\n")


def test_what_cannot_be_done_is_one_line_and_a_status(url, capsys):
    status, out, err = called(capsys, "schedules", "pause", url, "nope")
    assert (status, out) == (1, "")
    assert "there is no schedule 'nope' in this mailbox; `mainspring schedules list`" in err
    assert len(err.splitlines()) == 1
    status, _, err = called(capsys, "schedules", "remove", url, "nightly")
    assert status == 1
    assert "is declared in the code of running workers" in err
    assert called(capsys, "schedules", "pause", url)[0] == 2
    assert called(capsys, "schedules", "list", url, "more")[0] == 2
    assert called(capsys, "schedules", "list", url.replace("emails", "mails"))[0] == 1
