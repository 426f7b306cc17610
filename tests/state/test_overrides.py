"""``Overrides``: versions that many write at once and nobody ever reads half, and names that lead nowhere else."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import warnings
from hashlib import sha256

import anyio
import pytest

from mainspring import InvalidParameterError, OverrideDamagedError, OverrideError, OverrideLockedError, Overrides
from mainspring.core.clock import utc_now

pytestmark = pytest.mark.anyio


@pytest.fixture
def overrides(tmp_path):
    return Overrides(tmp_path / "overrides")


async def test_the_default_until_there_is_one(anyio_backend, overrides):
    assert await overrides.read("planner", "You plan.") == "You plan."
    assert await overrides.versions("planner") == ()
    assert not os.path.exists(overrides.directory)  # reading makes nothing
    assert await overrides.write("planner", "You plan well.\r\nÜ") == 1
    assert await overrides.read("planner", "You plan.") == "You plan well.\r\nÜ"
    assert await overrides.read("agents/planner", "You plan.") == "You plan."


async def test_versions_tags_and_hashes(anyio_backend, overrides):
    before = utc_now()
    for number, tags in enumerate([("stable",), (), ("stable", "de:2"), ()], 1):
        assert await overrides.write("agents/planner.system", f"text {number}", tags=tags) == number
    assert await overrides.write("agents", "a name may be part of another") == 1
    versions = await overrides.versions("agents/planner.system")
    assert [found.version for found in versions] == [1, 2, 3, 4]
    assert [found.tags for found in versions] == [("stable",), (), ("stable", "de:2"), ()]
    assert [found.current for found in versions] == [False, False, False, True]
    assert versions[0].sha256 == sha256(b"text 1").hexdigest()
    assert before <= versions[0].written_at <= versions[3].written_at <= utc_now()
    assert await overrides.read("agents/planner.system", "", tag="stable") == "text 3"
    assert await overrides.read("agents/planner.system", "none", tag="nightly") == "none"
    assert await overrides.read("agents/planner.system", "") == "text 4"


async def test_rollback(anyio_backend, overrides):
    for number in range(1, 4):
        await overrides.write("p", f"text {number}")
    assert await overrides.rollback("p") == 2
    assert await overrides.read("p", "default") == "text 2"
    assert await overrides.rollback("p", 3) == 3
    assert await overrides.rollback("p", 1) == 1
    assert await overrides.rollback("p") == 0
    assert await overrides.read("p", "default") == "default"
    with pytest.raises(InvalidParameterError, match="override 'p' has nothing before its version 0"):
        await overrides.rollback("p")
    with pytest.raises(InvalidParameterError, match="override 'p' has no version 4; there are 3"):
        await overrides.rollback("p", 4)
    assert await overrides.write("p", "text 4") == 4
    assert await overrides.read("p", "default") == "text 4"
    with pytest.raises(InvalidParameterError, match="there is no override 'q'"):
        await overrides.rollback("q")
    with pytest.raises(InvalidParameterError, match="version must be a whole number from 0, or None"):
        await overrides.rollback("p", -1)


async def test_rollback_returns_to_what_was_current_before(anyio_backend, overrides):
    assert await overrides.write("p", "good") == 1
    assert await overrides.write("p", "bad") == 2
    assert await overrides.rollback("p") == 1
    assert await overrides.write("p", "third") == 3
    assert await overrides.rollback("p") == 1  # not to the bad one
    assert await overrides.rollback("p", 3) == 3  # asked for by its number, it may be returned to
    assert await overrides.rollback("p", 3) == 3
    assert await overrides.rollback("p") == 1
    assert await overrides.rollback("p") == 0
    assert await overrides.write("p", "fourth") == 4
    assert await overrides.write("p", "fifth") == 5
    assert await overrides.rollback("p", 0) == 0
    assert await overrides.write("p", "sixth") == 6
    assert await overrides.rollback("p") == 0


async def test_an_index_that_does_not_say_what_was_current_before(anyio_backend, overrides):
    await overrides.write("p", "text")
    path = os.path.join(overrides.directory, "p", "@index.json")
    with open(path) as file:
        index = json.load(file)
    for before in (None, [4], [-1], ["1"], "0"):
        with open(path, "w") as file:
            json.dump({**index, "before": before}, file)
        with pytest.raises(OverrideDamagedError):
            await overrides.rollback("p")


@pytest.mark.parametrize("tags", [None, 5, "abc", b"abc", [None], ["a b"]])
async def test_what_are_no_tags(anyio_backend, overrides, tags):
    with pytest.raises(InvalidParameterError, match="write: tags are words of letters"):
        await overrides.write("p", "text", tags=tags)
    assert await overrides.versions("p") == ()


async def test_tags_that_can_be_read_once(anyio_backend, overrides):
    await overrides.write("p", "text", tags=(tag for tag in ("a", "b")))
    assert (await overrides.versions("p"))[0].tags == ("a", "b")


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../a",
        "a/../b",
        "a/..",
        "/etc/passwd",
        "a/",
        "/a",
        "a//b",
        "a\x00b",
        "a\nb",
        "a b",
        ".hidden",
        "@lock",
        "a/@index.json",
        "-a",
        "a\\b",
        "ä",
        "x" * 101,
        "/".join("a" * 11),
        None,
        3,
        b"a",
        ("a",),
        "a\n",
    ],
)
async def test_what_is_no_name(anyio_backend, tmp_path, overrides, name):
    for call in (
        overrides.read(name, "default"),
        overrides.write(name, "text"),
        overrides.versions(name),
        overrides.rollback(name),
    ):
        with pytest.raises(InvalidParameterError, match="is no name of an override: write it like 'agents/planner"):
            await call
    assert list(tmp_path.iterdir()) == []


async def test_links_lead_nowhere(anyio_backend, tmp_path, overrides):
    outside = tmp_path / "outside"
    outside.mkdir()
    await overrides.write("real", "text")
    await Overrides(outside).write("p", "secret")
    root = tmp_path / "overrides"
    (root / "dir").symlink_to(outside)
    (root / "file").write_text("x")
    for name in ("dir/p", "dir", "file", "file/p"):
        for call in (overrides.read(name, ""), overrides.write(name, "mine"), overrides.versions(name)):
            with pytest.raises(InvalidParameterError, match="part of its path is a link or a file"):
                await call
    index = root / "real" / "@index.json"
    index.rename(root / "moved.json")
    index.symlink_to(root / "moved.json")
    with pytest.raises(InvalidParameterError, match=r"its @index\.json is no plain file"):
        await overrides.read("real", "")
    assert await Overrides(outside).read("p", "") == "secret"


async def test_a_file_elsewhere_that_has_another_name_here_is_not_written(anyio_backend, tmp_path, overrides):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    folder = tmp_path / "overrides" / "p"
    folder.mkdir(parents=True)
    os.link(outside, folder / "@new")
    await overrides.write("p", "text")
    assert outside.read_text() == "precious"
    (folder / "@new").symlink_to(outside)
    await overrides.write("p", "another")
    assert (outside.read_text(), await overrides.read("p", "")) == ("precious", "another")


@pytest.mark.parametrize("name", ["@index.json", "@lock"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")], ids=["fifo", "dir", "link"]
)
async def test_what_is_no_plain_file_is_refused_and_keeps_nobody_waiting(
    anyio_backend, tmp_path, overrides, name, make
):
    await overrides.write("p", "text")
    file = tmp_path / "overrides" / "p" / name
    file.unlink()
    make(file)
    with pytest.raises(InvalidParameterError, match=f"its {name} is no plain file"):
        await overrides.write("p", "another")
    if name == "@index.json":
        with pytest.raises(InvalidParameterError, match=f"its {name} is no plain file"):
            await overrides.read("p", "")


@pytest.mark.parametrize("directory", [None, 5, b"prompts", "", "a\0b"])
def test_what_is_no_directory(directory):
    with pytest.raises(InvalidParameterError, match="directory must be the path of a directory"):
        Overrides(directory)


async def test_what_the_system_refuses_has_a_name(anyio_backend, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OverrideError, match=r"override 'a': (File exists|Not a directory)"):
        await Overrides(tmp_path / "file").write("a", "text")
    with pytest.raises(OverrideError, match="override 'a': "):
        await Overrides("/proc/nothing/here").write("a", "text")


async def test_a_tag_can_be_moved(anyio_backend, overrides):
    await overrides.write("p", "one", tags=["stable"])
    await overrides.write("p", "two", tags=["stable", "new"])
    await overrides.tag("p", "stable", 1)
    assert await overrides.read("p", "", tag="stable") == "one"
    assert [found.tags for found in await overrides.versions("p")] == [("stable",), ("new",)]
    await overrides.tag("p", "stable", 0)
    assert await overrides.read("p", "the default", tag="stable") == "the default"
    with pytest.raises(InvalidParameterError, match="tag: override 'p' has no version 3; there are 2"):
        await overrides.tag("p", "stable", 3)
    with pytest.raises(InvalidParameterError, match="tag: there is no override 'q'"):
        await overrides.tag("q", "stable", 1)
    for tag, version, complaint in (("a b", 1, "a tag is one of the words"), ("a", -1, "version must be a whole")):
        with pytest.raises(InvalidParameterError, match=complaint):
            await overrides.tag("p", tag, version)


async def test_the_names_there_are(anyio_backend, tmp_path, overrides):
    assert await overrides.names() == ()
    for name in ("b", "a/c.d", "a"):
        await overrides.write(name, "text")
    (tmp_path / "overrides" / "empty" / "deeper").mkdir(parents=True)
    (tmp_path / "overrides" / "link").symlink_to(tmp_path / "overrides" / "b")
    (tmp_path / "overrides" / "no name").mkdir()
    assert await overrides.names() == ("a", "a/c.d", "b")


async def test_the_directory_itself_may_be_reached_by_a_link(anyio_backend, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    await Overrides(tmp_path / "link").write("p", "text")
    assert await Overrides(tmp_path / "there").read("p", "") == "text"


@pytest.mark.parametrize(
    ("text", "tags", "complaint"),
    [
        (b"x", (), "the text must be a string"),
        ("\ud800", (), "cannot be written as UTF-8"),
        ("x", "stable", "tags are words of letters"),
        ("x", ("a b",), "tags are words of letters"),
        ("x", (3,), "tags are words of letters"),
    ],
)
async def test_what_cannot_be_written(anyio_backend, overrides, text, tags, complaint):
    with pytest.raises(InvalidParameterError, match=complaint):
        await overrides.write("p", text, tags=tags)
    assert not os.path.exists(overrides.directory)


@pytest.mark.parametrize("timeout", [-1, "x", None, float("nan")])
def test_a_bad_timeout(timeout):
    with pytest.raises(InvalidParameterError, match="Overrides: lock_timeout must be 0 or more seconds"):
        Overrides("x", lock_timeout=timeout)


# ----------------------------------------------------------------------------------------------------------- many at once


async def test_many_tasks_write_and_none_is_lost(anyio_backend, overrides):
    numbers, seen = [], set()

    async def write(number):
        numbers.append(await overrides.write("p", f"{number} " * 500))

    async def read():
        for _ in range(20):
            seen.add(len(set((await overrides.read("p", "x")).split())))

    async with anyio.create_task_group() as tasks:
        for number in range(30):
            tasks.start_soon(write, number)
        for _ in range(3):
            tasks.start_soon(read)
    assert sorted(numbers) == list(range(1, 31))
    assert seen == {1}  # one text or another, never parts of two
    assert len(await overrides.versions("p")) == 30


WRITER = """
import anyio, sys
from mainspring import Overrides

async def main():
    overrides = Overrides(sys.argv[1])
    while True:
        number = await overrides.write("p", f"{sys.argv[2]} " * 2000)
        print(number, flush=True)

anyio.run(main)
"""


@pytest.mark.slow
@pytest.mark.loops("asyncio")
async def test_processes_that_are_killed_leave_whole_versions(anyio_backend, overrides):
    written = []
    for round_number in range(3):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, overrides.directory, f"{round_number}.{number}"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        for writer in writers:
            written += [int(writer.stdout.readline()) for _ in range(5)]
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
        for writer in writers:
            written += [int(line) for line in writer.stdout.read().splitlines()]
            writer.stdout.close()
            writer.wait()
        assert len(set((await overrides.read("p", "x")).split())) == 1
    versions = await overrides.versions("p")
    assert len(set(written)) == len(written)  # no number was given twice
    assert len(versions) >= max(written)
    for found in versions:
        await overrides.rollback("p", found.version)
        text = await overrides.read("p", "x")
        assert sha256(text.encode()).hexdigest() == found.sha256


async def test_a_lock_that_is_held_too_long(anyio_backend, overrides):
    await overrides.write("p", "text")
    with open(os.path.join(overrides.directory, "p", "@lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OverrideLockedError, match=r"'p' is being written by others for longer than 0\.05 s"):
            await Overrides(overrides.directory, lock_timeout=0.05).write("p", "other")
        assert await overrides.read("p", "") == "text"  # readers do not wait
    assert await overrides.write("p", "other") == 2


# ------------------------------------------------------------------------------------------------------------------ damage


async def test_a_child_that_is_forked_during_a_write_does_not_keep_the_lock(anyio_backend, overrides, monkeypatch):
    real, children = os.replace, []
    there, here = os.pipe()

    def replace(*args, **options):
        if not children:
            children.append(os.fork())
            if not children[0]:
                os.close(here)
                os.read(there, 1)  # until the parent is done, or gone
                os._exit(0)
        return real(*args, **options)

    monkeypatch.setattr(os, "replace", replace)
    overrides = Overrides(overrides.directory, lock_timeout=0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
            assert await overrides.write("a", "1") == 1
        assert await overrides.write("a", "2") == 2
    finally:
        os.close(here)
        os.close(there)
        os.waitpid(children[0], 0)


async def test_a_crash_before_the_index_is_replaced_leaves_the_version_before(anyio_backend, overrides, monkeypatch):
    await overrides.write("p", "one")
    replace = os.replace

    def crash(source, target, **options):
        if target == "@index.json":
            raise OSError("the power is gone")
        replace(source, target, **options)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OverrideError, match="override 'p': the power is gone"):
        await overrides.write("p", "two")
    monkeypatch.undo()
    assert await overrides.read("p", "") == "one"
    assert await overrides.write("p", "three") == 2
    assert await overrides.read("p", "") == "three"


async def test_a_changed_text_is_told_from_what_was_written(anyio_backend, overrides):
    await overrides.write("p", "one")
    await overrides.write("p", "two")
    (file,) = (
        entry for entry in os.scandir(os.path.join(overrides.directory, "p")) if entry.name.startswith("@000002")
    )
    with open(file.path, "a") as text:
        text.write("!")
    with pytest.raises(OverrideDamagedError, match="override 'p': version 2 is not what was written; roll back"):
        await overrides.read("p", "default")
    os.unlink(file.path)
    with pytest.raises(OverrideDamagedError):
        await overrides.read("p", "default")
    await overrides.rollback("p")
    assert await overrides.read("p", "default") == "one"


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"current": 2, "versions": []}',
        '{"current": -1, "versions": []}',
        '{"current": 0, "versions": [{}]}',
        '{"current": 0, "versions": {}}',
        '{"current": 1, "versions": [3]}',
        *(
            json.dumps({"current": 1, "versions": [{"sha256": digest, "tags": tags, "written_at": "2030-01-01"}]})
            for digest, tags in [("x", []), ("../" * 21 + "x", []), ("A" * 64, []), ("0" * 64, [3])]
        ),
        json.dumps({"current": 1, "versions": [{"sha256": 3, "tags": [], "written_at": "2030-01-01"}]}),
    ],
)
async def test_a_damaged_index_has_a_name(anyio_backend, overrides, index):
    await overrides.write("p", "one")
    with open(os.path.join(overrides.directory, "p", "@index.json"), "w") as file:
        file.write(index)
    for call in (overrides.read("p", ""), overrides.write("p", "x"), overrides.versions("p"), overrides.rollback("p")):
        with pytest.raises(OverrideDamagedError, match=r"override 'p': its index \(@index\.json\) is not what was"):
            await call


async def test_in_virtual_time(virtual_clock, tmp_path):
    overrides = Overrides(tmp_path)
    await overrides.write("p", "one")
    assert (await overrides.versions("p"))[0].written_at == utc_now()
    await anyio.sleep(60)
    assert await overrides.read("p", "") == "one"
    assert virtual_clock.now == 60
