"""Modules that fail in unusual ways, and standard streams that are not there: one line, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mainspring.cli.target import load_group
from mainspring.cli.user_errors import UserError
from mainspring.errors import ConfigError
from mainspring.mailbox.open import open_mailbox

pytestmark = pytest.mark.own_time(2)

URL = "sqlite:///mail.db?name=jobs"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise BaseException('at import')", "does not import: spoiled.py:1: BaseException: at import"),
        ("raise GeneratorExit", "does not import: spoiled.py:1: GeneratorExit"),
        (
            "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
            "does not import: spoiled.py:3: E (it cannot be printed)",
        ),
        ("def __getattr__(name): raise RuntimeError('computed')", "does not give 'group': spoiled.py:1: RuntimeError"),
        ("def group(): raise GeneratorExit", "group() failed: spoiled.py:1: GeneratorExit"),
    ],
)
def test_whatever_a_module_raises_is_one_line(tmp_path, monkeypatch, code, says):
    (tmp_path / "spoiled.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "spoiled", raising=False)
    with pytest.raises(UserError) as caught:
        load_group("spoiled:group")
    sys.modules.pop("spoiled", None)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def mainspring(*arguments, cwd, **streams):
    """One command; its exit status and what it wrote to standard error."""
    with subprocess.Popen(
        [sys.executable, "-m", "mainspring", *arguments], cwd=cwd, stderr=subprocess.PIPE, text=True, **streams
    ) as process:
        _, said = process.communicate(timeout=60)
    return process.returncode, said


def closed(descriptor):
    """For ``preexec_fn``: the command starts without that stream, as under a shell's ``<&-`` or ``>&-``."""
    return lambda: os.close(descriptor)


@pytest.mark.parametrize(
    ("body", "why"),
    [("1e999", "too large"), ('"\\ud800"', "surrogates"), ("[" * 5_000 + "]" * 5_000, "nested too deeply")],
)
def test_json_that_no_mailbox_can_keep_is_found_before_anything_is_sent(tmp_path, body, why):
    (tmp_path / "bodies").write_text("1\n" * 1_500 + body + "\n")
    status, said = mainspring("send", URL, "--file", "bodies", cwd=tmp_path)
    assert (status, said.count("\n")) == (2, 1)
    assert "line 1501 of bodies" in said
    assert why in said
    assert not (tmp_path / "mail.db").exists()


def test_a_closed_standard_input_is_one_line(tmp_path):
    status, said = mainspring("send", URL, cwd=tmp_path, preexec_fn=closed(0))
    assert (status, said.count("\n")) == (2, 1)
    assert "there is no standard input" in said


@pytest.fixture
def made(tmp_path):
    """The mailbox is there: a send that makes it says so."""
    assert mainspring("send", URL, "0", cwd=tmp_path, stdout=subprocess.DEVNULL)[0] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("made")
def test_a_closed_standard_output_is_no_failure(tmp_path):
    assert mainspring("send", URL, "1", cwd=tmp_path, preexec_fn=closed(1)) == (0, "")


@pytest.mark.slow
@pytest.mark.usefixtures("made")
def test_ids_that_cannot_be_printed_are_told_apart_from_messages_that_were_not_sent(tmp_path):
    with open("/dev/full", "w") as full:
        status, said = mainspring("send", URL, "1", cwd=tmp_path, stdout=full)
    assert (status, said.count("\n")) == (1, 1)
    assert "1 message(s) were sent" in said


@pytest.mark.parametrize("directory", ["taken", "/proc/none"])
def test_a_directory_for_the_demo_that_cannot_be_is_one_line(tmp_path, directory):
    (tmp_path / "taken").write_text("")
    status, said = mainspring("demo", "--dir", directory, cwd=tmp_path)
    assert (status, said.count("\n")) == (2, 1)
    assert "cannot be made" in said


@pytest.mark.parametrize(
    ("url", "says"),
    [("jobs.db", "is no mailbox URL"), ("sqlite:///a#b.db?name=x", "write %23"), ("sqlite:///%00.db", "a file")],
)
def test_an_url_that_means_no_mailbox(url, says):
    with pytest.raises(ConfigError, match=says):
        open_mailbox(url)
