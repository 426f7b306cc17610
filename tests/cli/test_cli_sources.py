"""Which files are watched for a reload, and which change counts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

import mainspring
from mainspring.cli.sources import SourceWatch, changed, loaded_directories, snapshot

if TYPE_CHECKING:
    from mainspring.testing import VirtualClock


def test_only_python_files_right_in_the_directories_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    (tmp_path / "b.txt").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").touch()
    assert snapshot([str(tmp_path), str(tmp_path / "gone")]).keys() == {str(tmp_path / "a.py")}


def test_a_file_that_cannot_be_looked_at_hides_no_other(tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / f"{name}.py").touch()
    before = snapshot([str(tmp_path)])
    (tmp_path / ".#c.py").symlink_to("user@host.1234")  # Emacs locks a file that is being edited so
    assert snapshot([str(tmp_path)]) == before


def test_new_gone_and_different_files_are_changes() -> None:
    before = {"a.py": (1, 1), "b.py": (1, 1)}
    assert changed(before, dict(before)) is None
    assert changed(before, {**before, "c.py": (1, 1)}) == "c.py"
    assert changed(before, {"b.py": (1, 1)}) == "a.py"
    assert changed(before, {**before, "b.py": (2, 1)}) == "b.py"
    assert changed(before, {**before, "b.py": (1, 2)}) == "b.py"


def test_the_directories_of_loaded_modules_without_python_and_installed_packages() -> None:
    found = loaded_directories()
    assert str(Path(__file__).parent) in found
    assert not any(directory.startswith(os.path.dirname(anyio.__file__)) for directory in found)
    assert not any(directory.startswith(str(Path(mainspring.__file__).parent)) for directory in found)


async def test_each_change_is_told_once_and_added_directories_count_from_then_on(
    tmp_path: Path, virtual_clock: VirtualClock
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
        (directory / "a.py").write_text("1", encoding="utf-8")
    watch = SourceWatch([str(first)])
    watch.add([str(second)])
    with anyio.fail_after(30):
        (second / "a.py").write_text("22", encoding="utf-8")
        assert await watch.next_change() == str(second / "a.py")
        (first / "b.py").write_text("1", encoding="utf-8")
        assert await watch.next_change() == str(first / "b.py")
        (first / "b.py").unlink()
        assert await watch.next_change() == str(first / "b.py")
