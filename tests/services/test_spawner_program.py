"""The spawner's program: what belongs to which service, and what it imports."""

from __future__ import annotations

import ast
import os
import signal
import sys
from pathlib import Path

import pytest

from mainspring.services import spawner_main
from mainspring.services.spawner_main import Belongings, Cgroups, ProcessStat, Service, descendants, read_process


def test_it_imports_the_standard_library_only():
    """It is run by path with ``-I -S``, so nothing else would be found."""
    nodes = list(ast.walk(ast.parse(Path(spawner_main.__file__).read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert names
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


NO_PID = 4_194_304  # the greatest pid there can be, so nothing is read of it


def service(number, pid, start):
    made = Service(number, pid, f"token.{number}")
    made.start = start
    return made


def process(offset, parent, session, start=0):
    return ProcessStat(NO_PID + offset, NO_PID + parent, NO_PID + session, start, zombie=False)


@pytest.fixture
def two():
    """Two services of which the second is younger."""
    return service(1, NO_PID + 1, 100), service(2, NO_PID + 2, 200)


def members(of):
    return sorted(pid - NO_PID for pid in of.members)


def test_a_process_belongs_to_the_service_of_its_session_or_of_its_parent(two):
    Belongings().sort(
        [*two], [process(1, 0, 1, 100), process(2, 0, 2, 200), process(10, 1, 10, 300), process(11, 0, 2, 300)]
    )
    assert [members(each) for each in two] == [[1, 10], [2, 11]]


def test_a_process_that_was_seen_below_a_service_belongs_to_it_when_it_has_lost_its_parent(two):
    belongings = Belongings()
    belongings.sort([*two], [process(1, 0, 1, 100), process(10, 1, 10, 300), process(12, 10, 10, 300)])
    two[0].reaped = True
    belongings.sort([*two], [process(2, 0, 2, 200), process(12, 0, 99, 300), process(13, 0, 10, 301)])
    assert [members(each) for each in two] == [[12, 13], [2]]


def test_a_pid_that_was_given_again_belongs_to_no_one_by_what_was_seen(two):
    belongings = Belongings()
    belongings.sort([*two], [process(1, 0, 1, 100), process(10, 1, 10, 300)])
    two[0].sessions.discard(NO_PID + 10)
    belongings.sort([*two], [process(1, 0, 1, 100), process(10, 0, 77, 301)])
    assert members(two[0]) == [1]
    assert [each.pid - NO_PID for each in belongings.strangers] == [10]


def test_an_unknown_process_belongs_to_the_only_service_that_was_there(two):
    belongings = Belongings()
    belongings.sort([*two], [process(20, 0, 20, 150), process(21, 0, 21, 250), process(22, 0, 22, 50)])
    assert [members(each) for each in two] == [[20], []]
    assert [each.pid - NO_PID for each in belongings.strangers] == [21, 22]
    Belongings(guess=False).sort([*two], [process(30, 0, 30, 150)])
    assert members(two[0]) == []


def test_a_process_is_read_with_its_start_whatever_it_is_called():
    me = read_process(os.getpid())
    assert me is not None
    assert (me.pid, me.parent, me.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert me.start > 0
    assert read_process(NO_PID + 1) is None
    assert me.pid in {each.pid for each in descendants(os.getppid())}


# ---- cgroups, in a folder that stands for one


def test_a_cgroup_holds_the_limits_of_memory_and_processes(tmp_path):
    cgroups = Cgroups(str(tmp_path), os.getpid())
    limits = {"memory": 1 << 20, "processes": 9, "open_files": 5}
    path, held = cgroups.make(7, limits)
    assert held == ["memory", "processes"]
    assert Path(path).parent == Path(cgroups.path)
    assert {each.name: each.read_text() for each in Path(path).iterdir()} == {
        "memory.max": "1048576",
        "memory.oom.group": "1",
        "memory.swap.max": "0",
        "pids.max": "9",
    }
    assert cgroups.make(8, {})[1] == []


def test_where_no_cgroup_can_be_made_none_is_used(tmp_path):
    assert Cgroups(None, os.getpid()).make(1, {"memory": 1}) == (None, [])
    (tmp_path / "file").write_text("")
    assert Cgroups(str(tmp_path / "file"), os.getpid()).path is None


def test_a_leaf_that_an_earlier_spawner_made_gets_none_below_it(tmp_path):
    leaf = tmp_path / Cgroups.LEAF
    leaf.mkdir()
    assert Path(Cgroups(str(leaf), os.getpid()).path).parent == tmp_path


@pytest.mark.parametrize(
    ("returncode", "killed", "oom_kills", "cpu_seconds", "used", "limit"),
    [
        (-signal.SIGKILL, False, 1, 0, 0.0, "memory"),
        (-signal.SIGKILL, False, 0, 0, 0.0, None),
        (-signal.SIGKILL, True, 1, 0, 0.0, None),
        (1, False, 1, 0, 0.0, None),
        (-signal.SIGXCPU, False, 0, 3, 3.0, "cpu_seconds"),
        (-signal.SIGXCPU, False, 0, 0, 3.0, None),
        (-signal.SIGKILL, False, 0, 3, 8.1, "cpu_seconds"),
        (-signal.SIGKILL, False, 0, 3, 2.9, None),
        (-signal.SIGKILL, True, 0, 3, 8.1, None),
    ],
)
def test_an_end_is_named_after_the_limit_that_caused_it(
    tmp_path, returncode, killed, oom_kills, cpu_seconds, used, limit
):
    (tmp_path / "memory.events").write_text(f"low 0\nmax 12\noom 1\noom_kill {oom_kills}\n")
    ended = service(1, NO_PID + 1, 0)
    ended.cgroup, ended.killed, ended.cpu_seconds = str(tmp_path), killed, cpu_seconds
    assert ended.limit_reached(returncode, used) == limit
