"""Where the tests of one backend have their mailboxes: a SQLite file and one open on it, a NATS server, a PostgreSQL schema."""

from __future__ import annotations

import apsw
import pytest

from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "mail.db")


@pytest.fixture
def connections():
    """The connections to files that are opened."""
    opened = []

    def note(connection):
        if connection.filename:
            opened.append(connection)

    apsw.connection_hooks.append(note)
    yield opened
    apsw.connection_hooks.remove(note)


@pytest.fixture
async def mailbox(path, anyio_backend):
    async with SQLiteMailbox(path, name="jobs") as made:
        yield made


@pytest.fixture
async def here(nats_url, anyio_backend):
    from nats_support import place

    async with place(nats_url) as made:
        yield made


@pytest.fixture
def place(postgres_url):
    from postgres_support import Place, drop_schema, new_schema

    made = Place(postgres_url, new_schema())
    yield made
    drop_schema(postgres_url, made.schema)
