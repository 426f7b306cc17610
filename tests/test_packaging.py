"""What the installed package holds, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import mainspring
from mainspring.cli.demo import example_directory

HEAVY = (
    "anycorn", "apsw", "asyncio", "fastapi", "prometheus_client", "pydantic", "rich", "starlette", "trio", "typer",
    "uvicorn", "uvloop", "yaml",
)  # fmt: skip


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = f"import sys, mainspring; print([name for name in {HEAVY!r} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_running_a_service_without_a_health_server_imports_no_web_server() -> None:
    script = (
        "import sys, mainspring.group, mainspring.cli.run;"
        "print([name for name in ('starlette', 'uvicorn', 'prometheus_client', 'trio', 'apsw') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    for name in mainspring.__all__:
        assert getattr(mainspring, name) is not None
    assert not set(mainspring.__all__) - set(dir(mainspring))
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        mainspring.Nope  # noqa: B018


def test_the_examples_come_with_the_package() -> None:
    assert (example_directory() / "indexer.py").is_file()


def test_a_wheel_holds_the_examples_the_dashboard_and_the_typing_marker() -> None:
    files = {str(path) for path in distribution("mainspring").files or ()}
    if "mainspring/__init__.py" not in files:
        pytest.skip("installed in place, not from a wheel")
    assert {
        "mainspring/py.typed",
        "mainspring/http/dashboard.html",
        "mainspring/examples/01_indexer/indexer.py",
    } <= files
    assert not [name for name in files if name.startswith(("tests/", "benchmarks/"))]


def test_the_command_is_installed() -> None:
    (entry,) = [found for found in distribution("mainspring").entry_points if found.group == "console_scripts"]
    assert entry.name == "mainspring"
    command = Path(sys.executable).with_name("mainspring")
    ended = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"mainspring {mainspring.__version__}\n"
