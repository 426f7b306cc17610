"""A PostgreSQL server that will not have us: what lasts is a ConfigError at opening, what may pass is no such thing."""

from __future__ import annotations

import struct
from contextlib import asynccontextmanager

import anyio
import psycopg
import pytest

from mainspring.cli.app import call
from mainspring.errors import ConfigError, InvalidParameterError, MailboxConnectionError
from mainspring.mailbox.postgres.mailbox import PostgresMailbox
from postgres_support import until, worker_role

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@asynccontextmanager
async def refusing(text):
    """The port of a server that refuses everybody with those words."""
    said = (b"S", b"FATAL"), (b"V", b"FATAL"), (b"M", text.encode())

    async def serve(stream):
        async with stream:
            await stream.receive()
            fields = b"".join(kind + value + b"\0" for kind, value in said) + b"\0"
            await stream.send(b"E" + struct.pack("!i", len(fields) + 4) + fields)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield listener.extra(anyio.abc.SocketAttribute.local_port)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    "text",
    [
        'password authentication failed for user "app"',
        'no pg_hba.conf entry for host "10.0.0.1", user "app", database "app", no encryption',
        'role "app" is not permitted to log in',
        'permission denied for database "app"',
        "no such user: app",
    ],
)
async def test_a_refused_login_is_a_mistake_of_the_url(text, anyio_backend):
    async with refusing(text) as port:
        mailbox = PostgresMailbox(f"postgresql://app:secret@127.0.0.1:{port}/app?sslmode=disable")
        for act in (mailbox.__aenter__, mailbox.exists, mailbox.migrate_schema):
            with pytest.raises(ConfigError, match=r"check the user, the password and the database of the URL$") as told:
                await act()
            assert text in str(told.value)
            assert "secret" not in str(told.value)
            assert "\n" not in str(told.value)


@pytest.mark.parametrize("text", ["sorry, too many clients already", "the database system is starting up", "désolé"])
async def test_a_refusal_that_may_pass_is_none(text, anyio_backend):
    async with refusing(text) as port:
        with pytest.raises(MailboxConnectionError, match=text):
            await PostgresMailbox(f"postgresql://app@127.0.0.1:{port}/app?sslmode=disable").__aenter__()


async def test_too_many_connections_are_an_error_that_says_what_to_do(anyio_backend):
    async with refusing("sorry, too many clients already") as port:
        with pytest.raises(
            MailboxConnectionError, match=r"already; raise the limits of connections, or connect through"
        ):
            await PostgresMailbox(f"postgresql://app@127.0.0.1:{port}/app?sslmode=disable").__aenter__()


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("statement_timeout=50ms", "canceling statement due to statement timeout; if that was the statement_timeout"),
        (
            "default_transaction_read_only=on",
            "in a read-only transaction; let the URL lead to a server and a role that",
        ),
        ("lock_timeout=50ms", "canceling statement due to lock timeout; end the transaction that holds the lock"),
    ],
)
async def test_a_call_that_the_server_gives_up_is_an_error_that_says_what_to_do(place, setting, says, anyio_backend):
    """It is one short line, without the places in the functions of the server."""
    async with place.mailbox():
        pass
    async with await place.connect() as other:
        await other.execute(f"LOCK TABLE {place.schema}.tallies IN EXCLUSIVE MODE")
        with pytest.raises(MailboxConnectionError, match=says) as told:
            async with place.mailbox(options=f"-c {setting}", listen=False) as mailbox:
                await mailbox.send("x")
        assert "PL/pgSQL" not in str(told.value)
        assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("no room\nDETAIL:  none at all.\nHINT:  go", "no room; DETAIL: none at all. HINT: go"),
        ("all of them:\n- a\n\n- b?\n\tor c", "all of them: - a; - b? or c"),
    ],
)
async def test_where_its_lines_end_is_seen_in_one_line_too(text, line, anyio_backend):
    async with refusing(text) as port:
        with pytest.raises(MailboxConnectionError) as told:
            await PostgresMailbox(f"postgresql://app@127.0.0.1:{port}/app?sslmode=disable").__aenter__()
        assert str(told.value).endswith(f"FATAL: {line}")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"dbname": "no_such_database"}, 'database "no_such_database" does not exist.*check the user'),
        ({"user": "no_such_role"}, "check the user"),
        ({"sslmode": "banana"}, "sslmode.*correct the parameters"),
        ({"port": "99999"}, "port.*99999.*correct the parameters"),
        ({"connect_timeout": "abc"}, "connect_timeout.*correct the parameters"),
        ({"options": "-c no_such_setting=1"}, "no_such_setting.*correct the parameters"),
        ({"sslmode": "verify-full", "sslrootcert": "/no/such/file"}, "check the sslmode and the certificates"),
    ],
)
async def test_what_no_later_try_would_escape_is_a_mistake_of_the_url(place, changed, says, anyio_backend):
    with pytest.raises(ConfigError, match=says):
        await place.mailbox(timeout=5, **changed).__aenter__()


async def test_once_there_was_a_connection_a_refusal_may_pass(place, anyio_backend):
    await place.mailbox().migrate_schema()
    ours = "FROM pg_stat_activity WHERE usename = %s"
    async with worker_role(place) as url:
        mailbox = place.mailbox(url=url, migrate=False, listen=False)
        async with mailbox:
            place.execute(f"ALTER ROLE {place.schema} NOLOGIN")
            place.execute(f"SELECT pg_terminate_backend(pid) {ours}", place.schema)
            await until(lambda: not place.execute(f"SELECT {ours}", place.schema))
            with pytest.raises(MailboxConnectionError, match="is not permitted to log in"):
                await mailbox.send("x")
        with pytest.raises(ConfigError, match="is not permitted to log in"):
            await mailbox.__aenter__()


def test_the_command_line_calls_it_a_wrong_use(place, capsys):
    url = psycopg.conninfo.conninfo_to_dict(place.url)
    where = f"postgresql://{url.get('user', 'postgres')}@{url.get('host', '127.0.0.1')}:{url.get('port', 5432)}"
    assert call(["send", f"{where}/no_such_database", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("check the user, the password and the database of the URL")


async def test_a_transaction_that_may_not_write_is_the_senders_mistake(place, anyio_backend):
    async with place.mailbox() as mailbox, await place.connect() as connection:
        await connection.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(
            InvalidParameterError, match=r"may not write .*read-only transaction.*; send in a transaction that may"
        ):
            await mailbox.send("x", connection=connection)


def test_so_is_one_of_a_thread(place):
    with place.mailbox().sync as mailbox, psycopg.connect(place.url) as connection:
        connection.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(InvalidParameterError, match="may not write"):
            mailbox.send("x", connection=connection)
