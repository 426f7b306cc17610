"""A reader of the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from doc_session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """A reader in an empty directory."""
    reader = Session(tmp_path)
    yield reader
    reader.close()
