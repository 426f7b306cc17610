"""Redis URLs, taken apart and put together."""

from __future__ import annotations

import ssl

import pytest

from mainspring import open_mailbox
from mainspring.errors import ConfigError
from mainspring.mailbox.redis.mailbox import RedisMailbox
from mainspring.mailbox.redis.settings import RedisOptions, RedisServer

DEFAULTS = {
    "name": "jobs", "timeout": 5, "silence": 5, "capacity": None, "fallback_interval": 5, "recovery_interval": 60,
    "allow_eviction": False,
}  # fmt: skip


def server_of(url: str, **options: object) -> RedisServer:
    """The server that a mailbox with that URL and those options goes to."""
    return RedisServer.of(url, RedisOptions.of(url, **{**DEFAULTS, **options}))


@pytest.mark.parametrize(
    ("url", "hosts", "kind", "service", "db", "login"),
    [
        ("redis://", (("localhost", 6379),), "single", "", 0, (None, None)),
        ("redis://db:7000/3?name=x", (("db", 7000),), "single", "", 3, (None, None)),
        ("redis://:p%40ss@db", (("db", 6379),), "single", "", 0, (None, "p@ss")),
        ("redis://me:p%3Ass@db/", (("db", 6379),), "single", "", 0, ("me", "p:ss")),
        ("redis://[::1]:7000/1", (("::1", 7000),), "single", "", 1, (None, None)),
        ("redis://[::1]", (("::1", 6379),), "single", "", 0, (None, None)),
        ("redis+sentinel://a,b:7/main/2", (("a", 26379), ("b", 7)), "sentinel", "main", 2, (None, None)),
        ("redis+sentinel://u:p@a/main", (("a", 26379),), "sentinel", "main", 0, ("u", "p")),
        ("redis+cluster://a:1,b,[::1]:3", (("a", 1), ("b", 6379), ("::1", 3)), "cluster", "", 0, (None, None)),
    ],
)
def test_a_url_says_where(url, hosts, kind, service, db, login):
    server = server_of(url)
    assert (server.hosts, server.kind, server.service, server.db) == (hosts, kind, service, db)
    assert (server.username, server.password) == login
    assert server.tls is None
    mailbox = RedisMailbox(url)
    assert mailbox.backend.local_name(server.address) == "default"
    assert mailbox.backend.local_name(mailbox.address) == mailbox.name
    assert server_of(server.address).hosts == hosts


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://db:x", "no host and port"),
        ("redis://db:0", "no host and port"),
        ("redis://db:70000", "no host and port"),
        pytest.param(f"redis://db:{'1' * 5_000}", "no host and port", id="a port of 5,000 digits"),
        pytest.param(f"redis://db/{'1' * 5_000}", "number of the database", id="a database of 5,000 digits"),
        ("redis://db/jobs", "number of the database"),
        ("redis://db/1/2", "number of the database"),
        ("redis://a,b", "several hosts"),
        ("redis+sentinel://a", "names no service"),
        ("redis+cluster://a/1", "database 0 only"),
    ],
)
def test_a_bad_url_says_what_is_wrong(url, says):
    with pytest.raises(ConfigError, match=says):
        server_of(url)


def test_no_error_and_no_repr_shows_a_secret():
    with pytest.raises(ConfigError) as caught:
        server_of("redis://me:secret@db:x/1")
    assert "secret" not in str(caught.value)
    server = server_of("redis://me:secret@db/1", sentinel_password="other secret")
    assert "secret" not in repr(server)
    assert "secret" not in server.address


def test_options_go_before_the_url():
    server = server_of("redis://me:pass@db", username="you", password="word")
    assert (server.username, server.password) == ("you", "word")


def test_tls_belongs_to_rediss():
    context = ssl.create_default_context()
    assert server_of("rediss://db").tls is not None
    assert server_of("rediss+cluster://db", ssl_context=context).tls is context
    assert server_of("rediss+sentinel://db/main").address == "rediss+sentinel://db:26379/main/0"
    with pytest.raises(ConfigError, match="rediss://"):
        server_of("redis://db", ca_file="ca.pem")
    with pytest.raises(ConfigError, match="cannot be read"):
        server_of("rediss://db", ca_file="/no/such/ca.pem")


@pytest.mark.parametrize(
    "other", ["redis://db/1", "redis://db:7000/0", "redis://else/0", "redis+cluster://db", "redis://db:x"]
)
def test_another_server_is_another(other):
    assert RedisMailbox("redis://db/0").backend.local_name(other) is None


@pytest.mark.parametrize("rest", ["db/0?name=a&name=b", "db/0#jobs", "db/0?=&&"])
def test_no_error_of_open_mailbox_shows_a_secret(rest):
    with pytest.raises(ConfigError) as caught:
        open_mailbox(f"redis://me:secret@{rest}")
    assert "secret" not in str(caught.value)
    assert "redis://db/0" in str(caught.value)


@pytest.mark.slow
def test_servers_are_one_by_what_was_given_for_tls_not_by_what_was_made_of_it():
    """Mailboxes of one server share connections; each makes a context of its own of the same files."""
    url, context = "rediss://h:6380/0", ssl.create_default_context()
    assert server_of(url) == server_of(url)
    assert hash(server_of(url)) == hash(server_of(url))
    assert server_of(url, ssl_context=context) == server_of(url, ssl_context=context)
    others = [
        {"ssl_context": context},
        {"ssl_context": ssl.create_default_context()},
        {"password": "p"},
        {"username": "u"},
    ]
    assert len({server_of(url), *(server_of(url, **options) for options in others)}) == 5
    assert server_of(url) != server_of("redis://h:6380/0")
