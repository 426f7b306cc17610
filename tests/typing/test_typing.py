"""The public surface types as users expect: ``surface.py`` passes mypy --strict, and mypy is seen to look at it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SURFACE = Path(__file__).with_name("surface.py")


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


def test_the_check_would_notice(mypy, tmp_path):
    """Without its ignores, each line that is to be refused is: the surface is no pile of Any."""
    bare = tmp_path / "bare.py"
    text = SURFACE.read_text(encoding="utf-8")
    refused = [number for number, line in enumerate(text.splitlines(), 1) if "  # type: ignore[" in line]
    bare.write_text("\n".join(line.partition("  # type: ignore[")[0] for line in text.splitlines()), encoding="utf-8")
    status, output = mypy(bare)
    assert status == 1
    found = {int(line.split(":")[1]) for line in output.splitlines() if ": error:" in line}
    assert found == set(refused)
