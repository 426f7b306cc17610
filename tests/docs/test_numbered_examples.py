"""The programs in examples/, by the commands that their own texts say to type. (The first has tests of its own.)"""

from __future__ import annotations

import ast
import json
import shutil
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from doc_blocks import blocks_of
from doc_session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def commands_of(file: Path) -> list[str]:
    """The indented lines of a program's docstring."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")), clean=False) or ""
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


@pytest.fixture
def session(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    """A reader in a copy of the example's directory."""
    directory = tmp_path / request.param
    shutil.copytree(EXAMPLES / request.param, directory, ignore=shutil.ignore_patterns("__pycache__", "*.db*"))
    reader = Session(directory)
    yield reader
    reader.close()


def play(session: Session, tmp_path: Path, text: str) -> None:
    page = tmp_path / "session.md"
    page.write_text(f"```console\n{text}```\n", encoding="utf-8")
    for block in blocks_of(page):
        session.play(block)


def test_every_example_has_a_command() -> None:
    directories = [path for path in sorted(EXAMPLES.iterdir()) if path.is_dir()]
    assert [path.name[:2] for path in directories] == [f"{number:02}" for number in range(1, len(directories) + 1)]
    for directory in directories:
        assert any(commands_of(file) for file in directory.glob("*.py")), f"{directory.name} says no command"


@pytest.mark.parametrize(
    ("session", "file"),
    [("03_testing", "test_reminders.py"), ("04_mailbox", "list_mailbox.py")],
    indirect=["session"],
    ids=["03_testing", "04_mailbox"],
)
def test_an_example_that_is_a_test_suite(session: Session, tmp_path: Path, file: str) -> None:
    command = commands_of(session.directory / file)[0].partition("  ")[0]
    assert command.startswith("pytest -q ")
    play(session, tmp_path, f"$ {command}\n...\n… passed…\n")


def state_of(url: str) -> tuple[int, int]:
    """How many orders the app says to be packed, and to wait."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        state = json.load(answer)
    return len(state["packed"]), state["waiting"]


@pytest.mark.parametrize("session", ["02_fastapi"], indirect=True)
def test_the_web_app_packs_what_was_ordered(session: Session, tmp_path: Path) -> None:
    serve, order, show, ready = commands_of(session.directory / "orders.py")
    play(session, tmp_path, f"$ {serve} --port 8000\n...\nINFO:     Uvicorn running on …\n")
    play(session, tmp_path, f'$ {order.replace("curl ", "curl -s ")}\n{{"id":"…"}}\n')
    play(session, tmp_path, f'$ {ready.replace("curl ", "curl -s ")}\n{{"status":"ok","group":"packing",…\n')
    url = session.with_free_ports(show.removeprefix("curl "))
    packed, waiting = state_of(url)
    while packed and waiting:  # it is packed, and about to be acknowledged
        packed, waiting = state_of(url)
    assert packed + waiting == 1
    play(session, tmp_path, "...\n^C\n...\nINFO:     Application shutdown complete.\n...\n")


@pytest.mark.parametrize("session", ["03_testing"], indirect=True)
def test_the_reminders_are_a_service_too(session: Session, tmp_path: Path) -> None:
    serve, send, _ = commands_of(session.directory / "reminders.py")
    play(session, tmp_path, f"$ {serve}\n...\n… remind: running …\n")
    play(session, tmp_path, f"$ {send.replace('--delay 5', '--delay 0.2')}\n{'0' * 24}\n")
    play(session, tmp_path, "ann: Tea\n^C\n...\nmainspring: shutdown (SIGINT) in 0.0 s: clean\n...\n")


def test_the_page_about_backends_shows_the_example_as_it_is() -> None:
    page = (EXAMPLES.parent / "docs/how-to/mailbox.md").read_text(encoding="utf-8")
    assert (EXAMPLES / "04_mailbox/list_mailbox.py").read_text(encoding="utf-8") in page
