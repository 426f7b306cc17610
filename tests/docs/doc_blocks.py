"""The examples in a Markdown page: its fenced blocks, in order, with what the page says about running them.

Conventions, none of which shows in the rendered page:

- A block whose info string has ``title="name"`` is a file of the reader's; it is written into the page's directory.
- A ``python`` block without a title is run as a script there.
- A ``console`` block is a session. ``$ command`` is run, the lines below it are what it prints. A service
  (``mainspring run``, ``uvicorn``, whatever is ended by ``^C`` in its own block) stays in the foreground; a later block
  that begins with ``$`` is another terminal, one that begins without is what appears in the service's, perhaps behind
  more, and ``^C`` presses Ctrl-C there.
- ``<!-- not run: why -->`` before a block leaves it out.
- ``<!-- needs: module -->`` before a block leaves it out where the module is not installed, but not on CI.
- Blocks of other languages without a title (``text``, ``yaml`` and the like) are only to be read, and so is ``py``: Python that
  needs another library.

In expected output a line of ``...`` stands for any lines, ``…`` for any text within one, and ids, dates and decimal numbers
for any of their kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)$")
_TITLE = re.compile(r'\btitle="([^"]+)"')
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
_NEEDS = re.compile(r"<!-- needs: (\w+) -->")
_TOKENS = re.compile(
    r"(?P<anything>…)"
    r"|(?P<date>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)"
    r"|(?P<id>\b[0-9a-f]{24}\b)"
    r"|(?P<decimal>\d+\.\d+)"
    r"|(?P<space>[ \t]+)"
)
_PATTERNS = {
    "anything": r"[^\n]*?",
    "date": r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?",
    "id": r"[0-9a-f]{24}",
    "decimal": r"\d+\.\d+",
    "space": r"[ \t]+",
}


@dataclass(frozen=True)
class Block:
    """One fenced block. ``line`` is the number of its first line of content."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    not_run: str | None
    needs: str | None

    @property
    def place(self) -> str:
        """Where it stands, for failures."""
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page. An unclosed fence, or one inside a list, is an error of the page."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    info = ""
    before = ""
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if start is None and fence:
            assert not fence["indent"], f"{page.name}:{number}: an indented fence is not seen by the tests"
            start, info = number, fence["info"].strip()
        elif start is not None and line == "```":
            language = info.partition(" ")[0]
            assert language, f"{page.name}:{start}: name the block's language (text, where it is none)"
            title = _TITLE.search(info)
            reason, needs = _NOT_RUN.search(before), _NEEDS.search(before)
            text = "".join(f"{content}\n" for content in lines[start : number - 1])
            found.append(
                Block(page, start + 1, language, title and title[1], text, reason and reason[1], needs and needs[1])
            )
            start = None
        if start is None and line.strip() and line != "```":
            before = line
        elif line == "```":
            before = ""
    assert start is None, f"{page.name}:{start}: the fence is not closed"
    return found


@dataclass(frozen=True)
class Step:
    """Part of a session: a command (None: what the foreground service does next), the output below it, and Ctrl-C."""

    line: int
    command: str | None
    expected: tuple[str, ...] = ()
    interrupt: bool = False


def steps_of(block: Block) -> list[Step]:
    """The steps of a console block."""
    steps: list[Step] = []
    command: str | None = None
    begun = block.line
    expected: list[str] = []
    open_step = False

    def close(interrupt: bool = False) -> None:
        if open_step or expected or interrupt:
            steps.append(Step(begun, command, tuple(expected), interrupt))
        expected.clear()

    lines = block.text.splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        if line.startswith("$ "):
            close()
            begun, command, open_step = block.line + number, line[2:], True
            while command.endswith("\\") or _in_heredoc(command):
                number += 1
                command += "\n" + lines[number].removeprefix("> ")
        elif line == "^C":
            close(interrupt=True)
            command, open_step, begun = None, False, block.line + number
        else:
            expected.append(line)
        number += 1
    close()
    return steps


def _in_heredoc(command: str) -> bool:
    word = re.search(r"<<'?(\w+)'?", command)
    return word is not None and not command.rstrip().endswith(f"\n{word[1]}")


def pattern_of(expected: tuple[str, ...]) -> re.Pattern[str]:
    """What the output has to look like, from the beginning, for these lines to describe it."""
    parts = [r"(?:[^\n]*\n)*?" if line.strip() == "..." else _line(line.rstrip()) + r"[ \t]*\n" for line in expected]
    return re.compile("".join(parts))


def _line(line: str) -> str:
    pattern = ""
    at = 0
    for token in _TOKENS.finditer(line):
        pattern += re.escape(line[at : token.start()]) + _PATTERNS[token.lastgroup or ""]
        at = token.end()
    return pattern + re.escape(line[at:])
