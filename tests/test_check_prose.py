"""The part of ``make lint`` that reads prose finds each banned phrase, and where it stands."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
MODULE = '''\
"""Work that somebody
does, be
it well."""

user = "nobody"  # Whoever reads this
# sees it all
# the same; a nobody-like word in code does not count
reason = f"{user} is there: so many callers, and nobody in {1}"


def whoever() -> None:
    """Do it.

    Somebody, in a paragraph further down.
    """
'''


@pytest.fixture
def check_prose(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    yield import_module("check_prose")
    sys.modules.pop("check_prose")


@pytest.fixture
def written(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_texts_and_comments_are_read_and_code_is_not(check_prose, written):
    path = written("module.py", MODULE)
    found = {line.removeprefix(f"{path}:") for line in check_prose.banned(path)}
    assert found == {
        "1: 'somebody'",
        "2: 'be it'",
        "5: 'whoever'",
        "6: 'all the same'",
        "7: 'nobody'",
        "8: 'so many'",
        "8: 'nobody'",
        "14: 'somebody'",
    }


def test_of_a_page_all_is_read(check_prose, written):
    path = written("page.md", "# A page\n\nIt is for `nobody`.\n")
    assert check_prose.banned(path) == [f"{path}:3: 'nobody'"]


def test_sql_and_lua_are_read(check_prose, written):
    path = written("claims.sql", "-- One that nobody has, be\n-- it late.\nSELECT 1;\n")
    assert check_prose.banned(path) == [f"{path}:1: 'nobody'", f"{path}:1: 'be it'"]


def test_the_status_says_whether_all_is_well(check_prose, written, capsys):
    bad, good = written("bad.py", "# nobody\n"), written("good.py", "nobody = 'nobody'\n")
    assert check_prose.main([str(bad), str(good)]) == 1
    assert "bad.py:1" in capsys.readouterr().out
    assert check_prose.main([str(good)]) == 0
    assert check_prose.main([str(good), str(good.with_name("missing"))]) == 1
