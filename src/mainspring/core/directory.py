"""Directories as descriptors: for calls that name a file in one, and to write to the disk which files are in it."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def open_directory(path: str) -> Iterator[int]:
    """Open a directory for the length of a block, in which its descriptor is a ``dir_fd``."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield directory
    finally:
        os.close(directory)
