"""The ``timeout`` of a PostgreSQL mailbox is the longest that it waits for a server that does not answer."""

from __future__ import annotations

import socket
import time

import anyio
import pytest

from mainspring import MailboxConnectionError
from mainspring.mailbox.postgres.mailbox import PostgresMailbox
from mainspring.mailbox.postgres.settings import PostgresOptions, conninfo_of
from mainspring.mailbox.settings import read_url
from postgres_support import gate, until
from stopwatch import Stopwatch

pytestmark = pytest.mark.anyio
SLACK = 1.5
"""Seconds that a busy machine may add."""


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def mute():
    """The port of what accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


async def _is_told_within(seconds, call):
    begun = time.monotonic()
    with Stopwatch() as watch, pytest.raises(MailboxConnectionError, match=f"did not answer within {seconds:g} s"):
        await call()
    assert seconds - 0.002 <= time.monotonic() - begun  # uvloop counts in milliseconds: a timer can end that much early
    assert watch.seconds < seconds + SLACK


@pytest.mark.slow
async def test_opening_ends_in_time(mute):
    # The driver's own end of connecting is far off: on a busy machine the usual 2 s may be over when either is looked at.
    mailbox = PostgresMailbox(f"postgresql://ann@127.0.0.1:{mute}/app?connect_timeout=60", timeout=0.5)
    for call in (mailbox.__aenter__, mailbox.exists, mailbox.migrate_schema):
        await _is_told_within(0.5, call)


@pytest.mark.slow
async def test_a_server_of_another_kind_that_waits_for_a_line(mute):
    """As a Redis server does."""
    mailbox = PostgresMailbox(f"postgresql://ann@127.0.0.1:{mute}/app", timeout=0.2)
    for call in (mailbox.__aenter__, mailbox.exists, mailbox.migrate_schema):
        with pytest.raises(MailboxConnectionError, match=r"s; check that a PostgreSQL server listens on that port$"):
            await call()


@pytest.mark.parametrize("says", [b"INFO {}\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
async def test_a_server_of_another_kind_that_answers(says):
    async def other(stream):
        async with stream:
            await stream.receive()
            if says:
                await stream.send(says)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, other)
        with pytest.raises(MailboxConnectionError, match=r"check that a PostgreSQL server listens on that port$"):
            await PostgresMailbox(f"postgresql://ann@127.0.0.1:{port}/app").__aenter__()
        group.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("table", ["store", "mailboxes"])
async def test_opening_has_one_end_however_many_steps_it_takes(place, table):
    """Connecting that has taken long leaves so much less for what comes after it."""
    timeout = 4.0

    async def answer_late():
        await anyio.sleep(0.7 * timeout)
        way.silent = False

    async with place.mailbox():
        pass
    async with gate(place.url) as (url, way), await place.connect() as other:
        mailbox = place.mailbox(url=url, timeout=timeout)
        await other.execute(f"LOCK TABLE {place.schema}.{table}")
        for call in (mailbox.__aenter__, mailbox.exists):
            way.silent = True
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(answer_late)
                with (
                    Stopwatch() as watch,
                    pytest.raises(MailboxConnectionError, match=f"did not answer within {timeout:g} s"),
                ):
                    await call()
            assert not way.silent
            assert watch.seconds < timeout + SLACK
        await other.rollback()


@pytest.mark.slow
async def test_opening_ends_in_time_while_another_mailbox_opens(place):
    """The wait for the other opening counts. A mailbox that has time left goes on where others have none."""
    timeout = 4.0

    async def open_in_vain(name):
        with Stopwatch() as watch, pytest.raises(MailboxConnectionError, match=f"did not answer within {timeout:g} s"):
            async with place.mailbox(name, timeout=timeout):
                pass
        assert watch.seconds < timeout + 0.5

    async with place.mailbox():
        pass
    async with await place.connect() as other:
        await other.execute(f"LOCK TABLE {place.schema}.store")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_in_vain, "first")
            await anyio.sleep(0.3)
            tasks.start_soon(open_in_vain, "second")
            await anyio.sleep(1.5)
            tasks.start_soon(_unlock_in, 2.2, other)
            async with place.mailbox("third", timeout=timeout) as mailbox:
                await mailbox.send("x")


async def _unlock_in(seconds, connection):
    await anyio.sleep(seconds)
    await connection.rollback()


@pytest.mark.slow
async def test_a_call_ends_in_time_whose_cancellation_is_not_heard_either(place):
    async with gate(place.url) as (url, way), place.mailbox(url=url, timeout=3, listen=False) as mailbox:
        await mailbox.send("x")
        way.silent = True
        for _ in range(2):  # on the connection of before, and on a new one
            await _is_told_within(3, lambda: mailbox.send("y"))
            assert not mailbox.statistics().connected


async def test_a_close_does_not_wait_for_a_listening_connection_that_stands_still(place):
    async with gate(place.url) as (url, way):
        async with place.mailbox(url=url, timeout=60, silence=0.5) as mailbox:
            await until(lambda: not mailbox.statistics().polling)
            way.freeze()
            await anyio.sleep(0.3)  # by now it has been asked whether it is alive
            begun = time.monotonic()
        assert time.monotonic() - begun < SLACK


@pytest.mark.parametrize(
    ("url", "timeout", "each"),
    [
        ("postgresql://a/d", 30, 10),
        ("postgresql://a/d", 5, 5),
        ("postgresql://a,b/d", 8, 4),
        ("postgresql:///d?host=a,b,c", 8, 2),
        ("postgresql://a,b,c/d", 1, 2),
        ("postgresql://a/d?connect_timeout=3", 5, 3),
    ],
)
def test_each_of_several_hosts_gets_its_share(url, timeout, each):
    place = read_url(url, PostgresOptions.schemes)
    assert f"connect_timeout={each}" in conninfo_of(place.bare, dict(place.query), timeout).split()
