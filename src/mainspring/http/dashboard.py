"""The dashboard: one page without outside parts, and the policy that lets a browser run that page and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).with_name("dashboard.html")


class Page(NamedTuple):
    """The page, and its ``Content-Security-Policy``: its own script and style by their hashes, requests to its own origin."""

    html: str
    policy: str


def page() -> Page:
    """The page as it is shipped."""
    html = _FILE.read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(html, 'script')}; style-src {_hash(html, 'style')}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html, policy)


def _hash(html: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    assert found is not None, f"the dashboard has no <{tag}>"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
