"""A SQLite file, and a mailbox open on it."""

from __future__ import annotations

import pytest

from mainspring.mailbox.sqlite import SQLiteMailbox


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "mail.db")


@pytest.fixture
async def mailbox(path, anyio_backend):
    async with SQLiteMailbox(path, name="jobs") as made:
        yield made
