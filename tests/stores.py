"""One mailbox on a store of any kind, for tests that every kind has to pass: as many objects of it as a test wants."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import anyio
import pytest

from loops import LOOPS
from mainspring import open_mailbox
from mainspring.core import random

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mainspring import Mailbox

SERVERS = ("redis", "postgres", "nats")
KINDS = ("memory", "sqlite", *SERVERS)


def on(*kinds: str, everywhere: bool = True) -> pytest.MarkDecorator:
    """Run a test on these kinds of stores: with a server on one event loop that its driver runs on, without one on every event
    loop (in the quick run on asyncio), or (not ``everywhere``) on one as well."""
    of = {"redis": ("trio",), "postgres": ("asyncio",), "nats": ("uvloop",)}
    runs = [(kind, loop) for kind in kinds for loop in of.get(kind, LOOPS if everywhere else ("asyncio",))]
    return pytest.mark.parametrize(
        ("kind", "anyio_backend"),
        [
            pytest.param(
                kind,
                LOOPS[loop],
                id=f"{kind}-{loop}",
                marks=() if kind in SERVERS or loop == "asyncio" else pytest.mark.slow,
            )
            for kind, loop in runs
        ],
    )


class Store:
    """A mailbox of a name that nobody else has, by its URL."""

    def __init__(self, kind: str, url: str, name: str, options: dict[str, str]) -> None:
        self.kind = kind
        self.name = name
        self._url = url
        self._options = options

    def url(self, suffix: str = "", /, **options: Any) -> str:
        """The URL of the mailbox, or of another one of this place."""
        if self.kind == "memory":
            return f"memory://{self.name}{suffix}"
        return f"{self._url}?{urlencode({'name': self.name + suffix, **self._options, **options})}"

    def box(self, suffix: str = "", /, **options: Any) -> Mailbox[Any, Any]:
        """An unopened object of it."""
        return open_mailbox(self.url(suffix), **options)


@pytest.fixture(scope="module")
def store_schema(postgres_url: str) -> Iterator[str]:
    """A schema that the tests of a module share."""
    from postgres_support import drop_schema, new_schema

    made = new_schema()
    yield made
    drop_schema(postgres_url, made)


@pytest.fixture
def store(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    """What a test that is parametrized by ``kind`` works on."""
    with store_of(kind, tmp_path, request.getfixturevalue) as made:
        yield made


@contextmanager
def store_of(kind: str, directory: Path, given: Any) -> Iterator[Store]:
    """A store of that kind; ``given`` says what the fixtures of the servers have."""
    name = f"test-{random.token(48)}"
    if kind == "memory":
        yield Store(kind, "", name, {})
    elif kind == "sqlite":
        yield Store(kind, f"sqlite:///{directory / 'mail.db'}", name, {})
    elif kind == "postgres":
        yield Store(kind, given("postgres_url"), name, {"schema": given("store_schema")})
    elif kind == "redis":
        from redis_support import place

        url = given("redis_url")
        with place(url) as here:
            yield Store(kind, url, here.prefix, {})
    else:
        from mainspring.mailbox.nats.names import encoded
        from nats_support import remove

        url = given("nats_url")
        try:
            yield Store(kind, url, name, {})
        finally:
            anyio.run(remove, url, encoded(name))
