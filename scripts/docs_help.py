"""For the site: what ``--help`` prints, in the place of the ``...`` below its command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

_BLOCK = re.compile(r"^\$ mainspring (?P<arguments>[a-z -]*--help)\n\.\.\.$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return _BLOCK.sub(lambda block: f"$ mainspring {block['arguments']}\n{_help(block['arguments'])}", markdown)


def _help(arguments: str) -> str:
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "96"}
    command = [sys.executable, "-m", "mainspring", *arguments.split()]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
