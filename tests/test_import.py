"""``import mainspring`` is quick because it imports nothing heavy; and every public name is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mainspring

HEAVY = [
    "anycorn", "anyio", "apsw", "asyncio", "fastapi", "multiprocessing", "prometheus_client", "pydantic",
    "pydantic_core", "pydantic_settings", "rich", "sqlite3", "starlette", "trio", "typer", "uvicorn", "uvloop", "yaml",
]  # fmt: skip


def loaded(code):
    program = f"{code}\nimport sys; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_the_package_alone_imports_nothing_heavy():
    assert loaded("import mainspring") == set()


@pytest.mark.slow
def test_the_core_names_import_nothing_that_only_some_need():
    """What a loop needs is anyio; pydantic comes with the first body type, apsw with the first file, and so on."""
    code = "from mainspring import MainLoop, LoopGroup, InMemoryMailbox, RetryPolicy, open_mailbox, ShutdownCoordinator"
    assert loaded(code) <= {"anyio", "asyncio"}


def test_the_check_would_notice():
    assert {"pydantic", "pydantic_core"} <= loaded("import mainspring, pydantic")


@pytest.mark.parametrize("name", mainspring.__all__)
def test_every_public_name_is_there(name):
    assert getattr(mainspring, name) is not None
    assert name in dir(mainspring)


def test_names_are_kept_where_they_were_asked_for():
    assert mainspring.MainLoop is mainspring.MainLoop
    from mainspring.worker.main_loop import MainLoop

    assert mainspring.MainLoop is MainLoop


def test_each_public_class_is_documented():
    missing = [
        name
        for name in mainspring.__all__
        if isinstance(getattr(mainspring, name), type) and not getattr(mainspring, name).__doc__
    ]
    assert missing == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'mainspring' has no attribute 'MainLop'"):
        _ = mainspring.MainLop  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        exec("from mainspring import MainLop")


def test_the_star_brings_all_of_it():
    names: dict[str, object] = {}
    exec("from mainspring import *", names)
    assert set(mainspring.__all__) <= set(names)


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert version("mainspring") == mainspring.__version__
