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
FEATURES = [
    # Ours that begin with a feature: HTTP, metrics and the status, the command line, kept state, pools, tests, another store.
    "mainspring.cli", "mainspring.http", "mainspring.mailbox.memory", "mainspring.mailbox.nats", "mainspring.mailbox.postgres",
    "mainspring.mailbox.redis", "mainspring.mailbox.tls", "mainspring.offload", "mainspring.services", "mainspring.state",
    "mainspring.telemetry.metrics", "mainspring.telemetry.status", "mainspring.testing",
    # Others' that they need.
    "anycorn", "anyio.pytest_plugin", "fastapi", "hiredis", "http", "logging.config", "multiprocessing", "nats",
    "prometheus_client", "psycopg", "pydantic_settings", "rich", "sqlite3", "starlette", "trio", "typer", "urllib.request",
    "uvicorn", "uvloop", "xml", "yaml",
]  # fmt: skip
OF_A_MAILBOX = [
    "apsw", "asyncio", "email", "importlib.metadata", "mainspring.mailbox.json_round_trip", "mainspring.mailbox.settings",
    "mainspring.mailbox.sqlite", "pathlib", "pydantic", "pydantic_core", "shutil", "ssl", "tempfile", "urllib", "uuid",
]  # fmt: skip
"""What comes with the first mailbox or event loop, and not with the names."""
OF_A_RUN = [
    "anyio.from_thread",
    "concurrent.futures",
    "mainspring.events",
    "mainspring.group.calibration",
    "mainspring.group.lifetime",
    "mainspring.mailbox.limiters",
    "mainspring.mailbox.workers",
    "mainspring.telemetry",
    "mainspring.threads.loop_thread",
    "mainspring.watchdog",
    "mainspring.worker.worker",
]
"""What only a group or a loop that runs has use for, and a program that sends has not."""
NAMES = "from mainspring import LoopGroup, MainLoop, open_mailbox"
USE = f"""{NAMES}
import sys, anyio

async def main():
    async with open_mailbox("sqlite:///" + sys.argv[1], body=dict[str, list[int]]) as mailbox:
        await mailbox.send({{"job": [1]}})
        for message in await mailbox.receive():
            await message.acknowledge()

anyio.run(main)"""


def loaded(code, *arguments, of=HEAVY):
    program = f"{code}\nimport sys; print(*(name for name in {of!r} if name in sys.modules))"
    command = [sys.executable, "-I", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_the_package_alone_imports_nothing_heavy():
    assert loaded("import mainspring") == set()


@pytest.mark.slow
def test_the_core_names_import_nothing_that_only_some_need():
    """What a loop needs is anyio; pydantic comes with the first body type, apsw with the first file, and so on."""
    code = "from mainspring import MainLoop, LoopGroup, InMemoryMailbox, RetryPolicy, open_mailbox, ShutdownCoordinator"
    assert loaded(code) <= {"anyio", "asyncio"}


def test_the_names_of_a_service_import_no_feature_and_nothing_of_a_mailbox():
    assert loaded(NAMES, of=[*FEATURES, *OF_A_MAILBOX, *OF_A_RUN]) == set()


@pytest.mark.slow
def test_a_sqlite_mailbox_imports_its_driver_and_of_pydantic_the_core(tmp_path):
    watched = [
        *FEATURES,
        "apsw",
        "email",
        "importlib.metadata",
        "mainspring.mailbox.sqlite",
        "pydantic",
        "pydantic_core",
    ]
    assert loaded(USE, tmp_path / "jobs.db", of=watched) == {"apsw", "mainspring.mailbox.sqlite", "pydantic_core"}


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
