"""For the site: blocks of ``mermaid`` as diagrams. ``mkdocs.yml`` itself can name these functions only by a Python tag."""

from __future__ import annotations

from typing import Any


def on_config(config: Any) -> None:
    """Called by MkDocs when it has read ``mkdocs.yml``."""
    from pymdownx.superfences import fence_code_format

    fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format, "validator": _with_title}
    config["mdx_configs"].setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]


def _with_title(*_: Any) -> bool:
    """Accept a title, which SuperFences refuses by default. The heading above a diagram says the same."""
    return True
