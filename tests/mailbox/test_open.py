"""From a URL to a mailbox: by ``open_mailbox`` and by the constructors, which read the same."""

from __future__ import annotations

import inspect
import socket
import traceback

import pytest

from mainspring import ConfigError, MailboxConnectionError, MailboxError, MailboxFullError, open_mailbox
from mainspring.mailbox.life_cycle import MailboxLifeCycle
from mainspring.mailbox.memory.mailbox import InMemoryMailbox
from mainspring.mailbox.nats.mailbox import NatsMailbox
from mainspring.mailbox.postgres.mailbox import PostgresMailbox
from mainspring.mailbox.redis.mailbox import RedisMailbox
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from nats_support import place as nats_place
from postgres_support import Place, drop_schema, new_schema, until
from redis_support import place as redis_place

SERVERS = [
    (PostgresMailbox, "postgresql://ann@db:6000/app"),
    (RedisMailbox, "redis://ann@db:6000/0"),
    (NatsMailbox, "nats://ann@db:6000"),
]


@pytest.mark.parametrize(("kind", "url"), SERVERS)
def test_a_constructor_reads_the_query_as_open_mailbox_does(kind, url):
    for query in ("?name=zzz&timeout=3", "?name=z%26z", ""):
        assert kind(url + query).address == open_mailbox(url + query).address
    assert kind(f"{url}?name=zzz").name == "zzz"
    assert kind(f"{url}?timeout=3", name="given").name == "given"
    sibling = kind(f"{url}?name=zzz").backend.sibling("other")
    assert (sibling.name, sibling.address) == ("other", open_mailbox(f"{url}?name=other").address)


def test_the_first_parameter_may_be_named():
    assert NatsMailbox(server="nats://db?name=zzz").name == RedisMailbox(url="redis://db?name=zzz").name == "zzz"


ON_ASYNCIO = pytest.mark.loops("asyncio")


@pytest.mark.anyio
@ON_ASYNCIO
async def test_options_in_the_url_of_a_constructor_count_on_postgresql(postgres_url, anyio_backend):
    schema = new_schema()
    here = Place(postgres_url, schema)
    url = f"{postgres_url}{'&' if '?' in postgres_url else '?'}schema={schema}&application_name=me-{schema}&capacity=3"
    with pytest.raises(ConfigError, match="migrate"):
        async with PostgresMailbox(f"{url}&migrate=no"):
            pass
    try:
        async with PostgresMailbox(f"{url}&listen=no&name=jobs") as mailbox:
            with pytest.raises(MailboxFullError, match="at most 3 messages"):
                await mailbox.send_many(range(4))
            assert here.execute("SELECT name FROM SCHEMA.mailboxes") == [("jobs",)]
            async with PostgresMailbox(f"{url}&name=listens") as listens:
                await until(lambda: not listens.statistics().polling)
                assert mailbox.statistics().polling
            await mailbox.counts()
            assert here.execute(f"SELECT count(*) FROM pg_stat_activity WHERE application_name = 'me-{schema}'") >= [
                (1,)
            ]
    finally:
        drop_schema(postgres_url, schema)
    assert "sslmode=require" in PostgresMailbox("postgresql://db/app?sslmode=require").address


@pytest.mark.anyio
@ON_ASYNCIO
async def test_options_in_the_url_of_a_constructor_count_on_redis(redis_url, anyio_backend):
    with redis_place(redis_url) as here:
        user = here.prefix + "ann"
        here.call("ACL", "SETUSER", user, "on", ">s3cret", "~*", "&*", "+@all")
        try:
            url = f"{redis_url}?name={here.prefix}jobs&capacity=3&username={user}&password=s3cret"
            async with RedisMailbox(url) as mailbox:
                with pytest.raises(MailboxFullError, match="at most 3 messages"):
                    await mailbox.send_many(range(4))
                assert f"user={user}".encode() in here.call("CLIENT", "LIST")
        finally:
            here.call("ACL", "DELUSER", user)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(MailboxConnectionError, match=r"0\.2 s"):
        async with RedisMailbox(f"redis://127.0.0.1:{silent.getsockname()[1]}?timeout=0.2"):
            pass


@pytest.mark.anyio
@ON_ASYNCIO
async def test_options_in_the_url_of_a_constructor_count_on_nats(nats_url, anyio_backend):
    async with nats_place(nats_url) as here:
        url = f"{nats_url}?name={here.prefix}-jobs&ack_wait=3&storage=memory"
        with pytest.raises(MailboxError, match="replicas"):
            async with NatsMailbox(f"{url}&replicas=3"):
                pass
        async with NatsMailbox(url):
            queue = here.names().queue
            assert (await here.server.api(f"STREAM.INFO.{queue}"))["config"]["storage"] == "memory"
            assert (await here.server.consumer(queue))["config"]["ack_wait"] == 3e9


@pytest.mark.parametrize(("kind", "url"), SERVERS)
def test_what_stands_in_the_url_and_is_given_too_is_refused(kind, url):
    for make in (kind, open_mailbox):
        for options in ({"name": "b"}, {"name": "default"}):
            with pytest.raises(ConfigError, match="'name' is given twice"):
                make(f"{url}?name=a", **options)
        with pytest.raises(ConfigError, match="'name' is given twice"):
            make(f"{url}?name=a&name=b")
        for option in ("nonsense", "url", "server", "self", "body", "reply"):
            with pytest.raises(ConfigError, match=f"no option '{option}'"):
                make(f"{url}?{option}=x")
        with pytest.raises(ConfigError, match="timeout"):
            make(f"{url}?timeout=soon")
        with pytest.raises(ConfigError, match="write %23"):
            make(f"{url}?name=a#b")


@pytest.mark.parametrize(
    ("kind", "where", "has"),
    [
        *((kind, url, "it has name, .*timeout") for kind, url in SERVERS),
        (SQLiteMailbox, "jobs.db", "it has name, synchronous, capacity, busy_timeout"),
        (InMemoryMailbox, "jobs", "it has capacity, serialize"),
    ],
)
def test_an_option_that_a_constructor_has_not_is_refused_with_those_that_it_has(kind, where, has):
    with pytest.raises(ConfigError, match=f"mailbox has no option 'colour'; {has}"):
        kind(where, colour="red")


def test_what_a_mailbox_on_nats_has_instead_of_a_capacity_the_constructor_says_too():
    with pytest.raises(ConfigError, match="limit the storage of the account"):
        NatsMailbox("nats://db", capacity=3)


@pytest.mark.parametrize(("kind", "url"), SERVERS)
def test_a_constructor_takes_urls_of_its_own_kind_only(kind, url):
    for _, other in SERVERS:
        if other != url:
            with pytest.raises(ConfigError, match=r"open_mailbox\(\)"):
                kind(other)
    assert next(iter(inspect.signature(kind).parameters)) in ("url", "server")


def test_what_takes_no_url_says_so():
    for path in ("sqlite:///jobs.db", "sqlite:///jobs.db?name=x"):
        with pytest.raises(ConfigError, match=r"open_mailbox\(\)"):
            SQLiteMailbox(path)
    with pytest.raises(ConfigError, match=r"open_mailbox\(\)"):
        InMemoryMailbox("memory://jobs?capacity=3")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:///app?name=jobs&host=/var/run/postgresql",
        "postgresql:///app?name=jobs",
        "postgres:///app?name=jobs",
        "postgresql://?name=jobs",
        "postgresql://ann@/app?name=jobs",
        "postgresql://:6000/app?name=jobs",
        "postgresql://a,b:6000/app?name=jobs",
    ],
)
def test_a_postgresql_url_may_leave_the_host_to_libpq(url):
    assert open_mailbox(url).name == PostgresMailbox(url).name == "jobs"
    assert open_mailbox(url).address == PostgresMailbox(url).address
    assert ("/app?" in open_mailbox(url).address) == ("/app" in url)


# ----------------------------------------------------------------------------------------------------------- passwords


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3c@ret/w:rd@127.0.0.1:6379/0?name=x",
        "redis://:s3c?ret@127.0.0.1:6379/0",
        "redis://:s3c@ret?x@127.0.0.1:6379/0",
        "redis://:s3c@ret#x@127.0.0.1:6379/0",
        "redis://:123/ret@127.0.0.1:6379/0",
        "redis://:123?ret@127.0.0.1:6379/0",
        "nats://wk:s3c@ret/w@127.0.0.1:4222?name=x",
        "nats://s3c/ret@127.0.0.1:4222",
        "postgresql://ann:s3c@ret@127.0.0.1/app?name=x",
        "postgresql://ann:s3c@ret/x@127.0.0.1/app",
    ],
)
def test_a_password_that_must_be_escaped_is_told_and_not_shown(url):
    kind = {"r": RedisMailbox, "n": NatsMailbox, "p": PostgresMailbox}[url[0]]
    for make in (kind, open_mailbox):
        with pytest.raises(ConfigError, match="in a user or a password must be written %2F") as caught:
            make(url)
        assert "s3c" not in str(caught.value)
        assert "ret" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "password"),
    [
        *((scheme, password) for scheme in ("redis", "nats", "postgresql") for password in ("s3c[ret", "s3c\u2100ret")),
        ("postgresql", "s3c%ret"),
        ("postgresql", "s3c%ZZret"),
    ],
)
def test_no_password_is_shown_by_what_cannot_read_it(scheme, password):
    with pytest.raises(ConfigError) as caught:
        open_mailbox(f"{scheme}://ann:{password}@127.0.0.1:1")
    assert "s3c" not in str(caught.value)
    assert "ret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://[::1]/0?name=a@b",
        "redis+cluster://a:1,b/0?name=a@b",
        "redis://:p%40ss%2Fw@h/0?name=a@b",
        "nats://a,b:2?name=a@b",
        "postgresql://a:1,b/app?name=a@b&user=ann@corp",
        "postgresql:///app?name=a@b",
    ],
)
def test_an_at_sign_in_an_option_is_no_login(url):
    assert open_mailbox(url).name == "a@b"


# ---------------------------------------------------------------------------------------- what cannot be opened

CLOSED_PORT = "127.0.0.1:1"
UNOPENABLE = [
    f"redis://{CLOSED_PORT}/0",
    f"postgresql://{CLOSED_PORT}/app",
    f"nats://{CLOSED_PORT}",
    "sqlite:////no/such/directory/app.db",
]


async def enter(url):
    async with open_mailbox(url):
        pass


@pytest.mark.anyio
@ON_ASYNCIO
@pytest.mark.parametrize("url", UNOPENABLE)
async def test_an_error_at_opening_prints_without_the_steps_to_it(url):
    with pytest.raises((MailboxConnectionError, ConfigError)) as raised:
        await enter(url)
    check_brief(raised.value)


@pytest.mark.anyio
@ON_ASYNCIO
@pytest.mark.parametrize("url", UNOPENABLE[:3])
async def test_so_does_one_of_exists(url):
    with pytest.raises(MailboxConnectionError) as raised:
        await open_mailbox(url).exists()
    check_brief(raised.value)


@pytest.mark.anyio
@ON_ASYNCIO
async def test_so_does_a_refused_login(redis_url):
    with pytest.raises(ConfigError, match="WRONGPASS") as raised:
        await enter(redis_url.replace("://", "://ann:wrong@"))
    check_brief(raised.value)


def check_brief(error):
    """Below the caller's own lines it prints one of the mailbox; what caused it is kept."""
    printed = traceback.format_exception(error)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert [file for file in files if file != __file__] == [inspect.getfile(MailboxLifeCycle)]
    assert len(printed) == len(files) + 2, "".join(printed)  # the heading, the frames, the error
    assert error.__context__ is not None
