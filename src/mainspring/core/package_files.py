"""Files that are part of the package: SQL and Lua."""

from __future__ import annotations

import pkgutil


def read_package_file(package: str, name: str) -> bytes:
    """Return the content of a file in a package, which may be in a zip archive.

    ``importlib.resources`` would do the same for 850 KiB of memory and 14 ms more: it imports ``zipfile`` and ``tempfile``.
    """
    content = pkgutil.get_data(package, name)
    assert content is not None  # only a loader that cannot read files returns None
    return content
