"""The public surface types as users expect, for mypy --strict and for pyright, and both are seen to look at it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SURFACE = Path(__file__).with_name("surface.py")
MARK = "  # type: ignore["


def refused() -> set[int]:
    """The lines of the surface that a user is to get an error for."""
    return {number for number, line in enumerate(SURFACE.read_text(encoding="utf-8").splitlines(), 1) if MARK in line}


@pytest.fixture
def bare(tmp_path):
    """The surface without its ignores."""
    path = tmp_path / "bare.py"
    lines = SURFACE.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.partition(MARK)[0] for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def mypy(pytestconfig: pytest.Config):
    pytest.importorskip("mypy", reason="mypy is not installed")
    # Kept from run to run: reading the dependencies' types takes most of the time.
    cache = getattr(pytestconfig, "cache", None)
    kept = cache.mkdir("mypy") if cache is not None else ".mypy_cache"

    def check(path: Path) -> tuple[int, str]:
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={kept}", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        return done.returncode, done.stdout + done.stderr

    return check


def test_the_surface_types_as_users_expect(mypy):
    status, output = mypy(SURFACE)
    assert status == 0, output


def test_mypy_refuses_each_line_that_is_to_be_refused_and_no_other(mypy, bare):
    status, output = mypy(bare)
    assert status == 1
    assert {int(line.split(":")[1]) for line in output.splitlines() if ": error:" in line} == refused()


def test_pyright_refuses_each_line_that_is_to_be_refused_and_no_other(bare):
    pytest.importorskip("basedpyright", reason="pyright is not installed")
    project = bare.with_name("pyrightconfig.json")
    project.write_text(json.dumps({"typeCheckingMode": "standard"}), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--project", str(project), "--level", "error", "--outputjson"]
    command += ["--pythonpath", sys.executable, str(bare)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert {one["range"]["start"]["line"] + 1 for one in found} == refused(), found
