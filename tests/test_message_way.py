"""``scripts/message_way.py``: the way of a message is counted, and the count is the same each time."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def message_way(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    yield import_module("message_way")
    sys.modules.pop("message_way")


def test_the_way_in_memory_is_the_same_each_time(message_way):
    first, second = message_way.measured("memory", 5), message_way.measured("memory", 5)
    assert set(first.entered) == set(second.entered)
    assert {"mailbox", "worker"} <= {function.file.partition("/")[0] for function in first.entered}
    assert first.functions(threading.get_ident()) == first.functions()


def test_functions_on_other_threads_count(message_way):
    way = message_way.measured("sqlite", 5)
    loop = threading.get_ident()
    assert 0 < way.functions(loop) < way.functions()
    assert 0 < way.files(loop) < way.files()


def test_a_goal_is_reached_or_missed(message_way, capsys):
    goal = message_way.GOALS["memory"]
    here = {threading.get_ident()}

    def way(files, functions):
        places = [message_way.Function(f"{min(n, files - 1)}.py", n, f"f{n}") for n in range(functions)]
        return message_way.Way(dict.fromkeys(places, here))

    assert message_way.report("memory", way(goal.files, goal.functions))
    assert not message_way.report("memory", way(goal.files + 1, goal.functions))
    assert not message_way.report("memory", way(goal.files, goal.functions + 1))
    assert message_way.report("nats", way(goal.files + 1, goal.functions + 1)), "there is no goal"
    assert f"{goal.files + 1} files (goal {goal.files})" in capsys.readouterr().out
