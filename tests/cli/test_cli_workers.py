"""``mainspring workers``: the loops of other processes, also of a killed process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from mainspring.cli.app import call

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.own_time(3)

PROGRAM = """
import sys
import anyio
from mainspring import LoopGroup, MainLoop, open_mailbox

async def work(job: str) -> None: ...

async def main() -> None:
    async with open_mailbox(sys.argv[1]) as mailbox:
        async with LoopGroup([MainLoop(mailbox, work, concurrency=4)], name="service", guardian=False):
            while not await mailbox.workers():
                await anyio.sleep(0.01)
            print("there", flush=True)
            await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'jobs.db'}?name=emails"


@pytest.fixture
def worker(url: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            yield process
        finally:
            process.kill()


def called(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = call(arguments)
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_killed_worker_is_still_shown_with_when_it_was_seen(url, worker, capsys):
    worker.kill()
    worker.wait()
    status, out, err = called(capsys, "workers", url)
    assert (status, err) == (0, "")
    line, total = out.splitlines()
    assert total == "1 loop"
    assert re.fullmatch(
        rf"\S+:{worker.pid}  work  in service  running  0 in hand of 4  since 20\S+ \S+Z  mainspring \S+"
        r"  last seen \d+ s ago",
        line,
    )
    status, out, _ = called(capsys, "workers", url, "--json")
    (shown,) = json.loads(out)
    facts = {"loop": "work", "group": "service", "state": "running", "concurrency": 4, "in_flight": 0, "jobs": {}}
    assert facts.items() <= shown.items()
    assert shown["last_seen"] >= shown["started_at"]


def test_a_mailbox_without_workers_has_an_empty_list(tmp_path, capsys):
    url = f"sqlite:///{tmp_path / 'jobs.db'}?name=emails"
    assert called(capsys, "send", url, "1")[0] == 0
    assert called(capsys, "workers", url) == (0, "0 loops\n", "")
    assert called(capsys, "workers", url, "--json")[1] == "[]\n"


@pytest.mark.parametrize("more", ["x", "a:b"])
def test_it_takes_a_mailbox_alone(url, capsys, more):
    status, out, err = called(capsys, "workers", url, more)
    assert (status, out) == (2, "")
    assert "takes a mailbox alone" in err
