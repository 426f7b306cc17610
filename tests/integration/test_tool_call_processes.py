"""A worker is killed by SIGKILL before, in and after the effect of a call; the next one knows what it must ask about."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest

from mainspring import open_mailbox

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("tool_call_program.py")


def start(path: Path, effects: Path, wanted: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(path), str(effects), wanted],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def send(path: Path) -> None:
    async with open_mailbox(f"sqlite:///{path}?name=orders", body=str) as orders:
        await orders.send("order-1")


@pytest.mark.parametrize(
    ("place", "known", "restored"), [("begun", [False], None), ("charged", [True], "charged"), ("ended", [], "charged")]
)
def test_a_killed_workers_call_is_known_to_the_next(tmp_path, place, known, restored):
    path, effects = tmp_path / "orders.db", tmp_path / "effects"
    anyio.run(send, path)
    began = datetime.now(UTC)
    with start(path, effects, place) as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            if line.strip() == place:
                break
        killed.kill()
    with start(path, effects, "nowhere") as worker:
        out, err = worker.communicate(timeout=60)
    assert worker.returncode == 0, err
    lines = out.splitlines()
    found = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("unfinished")]
    assert [call[-1] for call in found] == known
    for name, key, info, attempt, begun_at, _ in found:
        assert (name, key, info, attempt) == ("charge", "order-1", {"cents": 5}, 1)
        assert began - timedelta(seconds=1) <= datetime.fromisoformat(begun_at) <= datetime.now(UTC)
    assert f"restored {json.dumps(restored)}" in lines
    assert lines[-1] == "0"
    assert effects.read_text() == "order-1\n"  # once, wherever the worker died
