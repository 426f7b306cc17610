"""Every example in README and docs/, run as its reader would run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from doc_blocks import blocks_of, pattern_of, steps_of

if TYPE_CHECKING:
    from doc_session import Session

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
ROUTE = re.compile(r"^@app\.(get|post|put|delete)\(\"([^\"]+)\"", re.MULTILINE)
REQUEST = r"curl .*-X {upper} '?http://[^/\s]+{path}|client\.{method}\(\"{path}\""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_examples_of_a_page(page: Path, session: Session) -> None:
    for block in blocks_of(page):
        session.play(block)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_links_of_a_page(page: Path) -> None:
    """Links to files lead to files of the repository, and their anchors to headings."""
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name}: {target} leads nowhere"
        if anchor and path.suffix == ".md":
            assert anchor in _anchors(path), f"{page.name}: {path.name} has no heading #{anchor}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_each_route_of_a_page_is_requested(page: Path) -> None:
    """That an app starts says nothing of what its routes answer: a later command or test of the page requests each."""
    blocks = blocks_of(page)
    for number, block in enumerate(blocks):
        for method, path in ROUTE.findall(block.text):
            later = "\n".join(following.text for following in blocks[number + 1 :])
            requests = re.findall(REQUEST.format(method=method, upper=method.upper(), path=re.escape(path)), later)
            assert requests, f"{block.place}: the page requests {method.upper()} {path} nowhere"


def test_few_blocks_are_left_out_and_each_says_why() -> None:
    left_out = [block for page in PAGES for block in blocks_of(page) if block.not_run is not None]
    assert len(left_out) <= 8, [f"{block.place}: {block.not_run}" for block in left_out]


# ---------------------------------------------------------------------------------------------------- of the harness


def page_with(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nassert False\n```\n", "exit status 1"),
        ("```console\n$ echo yes\nno\n```\n", "the page says"),
        ("```console\n$ false\n```\n", "exit status 1"),
        ("```console\n$ echo yes\nyes\nand more\n```\n", "the page says"),
        ("```console\noutput of nobody\n```\n", "none is running"),
    ],
)
def test_an_example_that_does_not_work_is_noticed(tmp_path: Path, session: Session, text: str, complaint: str) -> None:
    (block,) = blocks_of(page_with(tmp_path, text))
    with pytest.raises(AssertionError, match=complaint):
        session.play(block)


@pytest.mark.parametrize(
    "text",
    [
        "```console\n$ false\n$ echo $?\n1\n```\n",
        "```console\n$ echo 12.5 s, 2026-01-02 03:04:05.678\n99.25 s, 1999-12-31 23:59:59.000\n```\n",
        "```console\n$ seq 9\n1\n...\n9\n```\n",
        "```console\n$ echo a b c\na … c\n```\n",
        "```console\n$ cat <<EOF\none\nEOF\none\n```\n",
        '```text title="a.txt"\nword\n```\n',
        "<!-- not run: it fails -->\n```console\n$ false\n```\n",
    ],
)
def test_an_example_that_works_passes(tmp_path: Path, session: Session, text: str) -> None:
    (block,) = blocks_of(page_with(tmp_path, text))
    session.play(block)


def test_a_block_is_left_out_only_by_the_comment_right_before_it(tmp_path: Path) -> None:
    text = "<!-- not run: why -->\n```console\n$ a\n```\n\n```console\n$ b\n```\n"
    first, second = blocks_of(page_with(tmp_path, text))
    assert (first.not_run, second.not_run) == ("why", None)


def test_a_block_that_needs_a_missing_module_is_left_out_but_not_on_ci(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = blocks_of(page_with(tmp_path, "<!-- needs: no_such_module -->\n```console\n$ false\n```\n"))
    monkeypatch.delenv("CI", raising=False)
    session.play(block)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match="exit status 1"):
        session.play(block)


def test_an_indented_fence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="indented"):
        blocks_of(page_with(tmp_path, "- item\n\n  ```python\n  x\n  ```\n"))


def test_what_a_thread_prints_and_what_is_logged_meanwhile_do_not_share_a_line(
    tmp_path: Path, session: Session
) -> None:
    (tmp_path / "talk.py").write_text(
        "import sys, threading\n"
        "def log():\n"
        "    for _ in range(2000): sys.stderr.write('logged\\n')\n"
        "thread = threading.Thread(target=log)\n"
        "thread.start()\n"
        "for _ in range(2000): print('printed')\n"
        "thread.join()\n"
    )
    text = "```console\n$ python talk.py 2>&1 | sort -u\nlogged\nprinted\n```\n"
    (block,) = blocks_of(page_with(tmp_path, text))
    session.play(block)


def test_the_steps_of_a_session(tmp_path: Path) -> None:
    text = "```console\nline before\n$ mainspring run a:b\nstarted\n^C\nended\n$ echo $?\n0\n```\n"
    (block,) = blocks_of(page_with(tmp_path, text))
    steps = [(step.command, step.expected, step.interrupt) for step in steps_of(block)]
    assert steps == [
        (None, ("line before",), False),
        ("mainspring run a:b", ("started",), True),
        (None, ("ended",), False),
        ("echo $?", ("0",), False),
    ]


def test_a_pattern_takes_values_of_a_kind_and_nothing_else() -> None:
    pattern = pattern_of(("took 0.50 s",))
    assert pattern.fullmatch("took 12.25 s\n")
    assert not pattern.fullmatch("took none s\n")
    assert not pattern.fullmatch("took 0.50 s\nand more\n")
