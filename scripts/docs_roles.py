"""For the site: the roles of docstrings (``:class:`MainLoop```) as plain code, since Markdown knows none."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|mod|attr|exc):`~?([^`]+)`")
_LITERAL = re.compile(r"::(?=\n\s*\n)")


class Roles(griffe.Extension):
    """Rewrites each docstring as it is loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each object."""
        if obj.docstring is not None:
            text = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", obj.docstring.value)
            obj.docstring.value = _LITERAL.sub(":", text)
