"""A Redis server that is not what the URL says: a ConfigError at opening, in one line that says what to do."""

from __future__ import annotations

from socket import gaierror
from urllib.parse import urlsplit

import anyio
import pytest
from anyio.abc import SocketAttribute

from mainspring.cli.app import call
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox.message import Counts
from mainspring.mailbox.open import open_mailbox
from mainspring.mailbox.redis import connection as redis_connection
from mainspring.testing import run_virtual
from ports import free_port
from redis_support import CALLS, place
from scripted_redis import Sentinel
from servers import RedisServer

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def few_databases():
    """The URL of a server that has two databases."""
    with RedisServer("--appendonly", "no", "--databases", "2") as server:
        yield server.url


@pytest.fixture
def here(redis_url):
    with place(redis_url.replace("/0", "/3")) as made:
        yield made


@pytest.fixture
def where(redis_url):
    return urlsplit(redis_url).netloc


@pytest.mark.parametrize(
    ("scheme", "path", "says"),
    [
        ("redis", "/99999", "has no database 99999 .*; correct the URL"),
        ("redis+sentinel", "/main/0", "is no sentinel; its scheme is redis://"),
        ("redis+cluster", "", "is no node of a cluster; its scheme is redis://"),
    ],
)
async def test_a_server_that_is_not_what_the_url_says(where, scheme, path, says):
    mailbox = open_mailbox(f"{scheme}://{where}{path}?name=jobs")
    for act in (mailbox.__aenter__, mailbox.exists):
        with pytest.raises(ConfigError, match=says):
            await act()


@pytest.mark.slow
@pytest.mark.loops("asyncio")
async def test_a_server_that_speaks_no_tls(where, anyio_backend):
    """It waits for the end of a line, and says nothing."""
    mailbox = open_mailbox(f"rediss://{where}/0?name=jobs&timeout=0.2")
    for act in (mailbox.__aenter__, mailbox.exists):
        with pytest.raises(
            MailboxConnectionError, match=r"did not answer within 0\.2 s; the port may be one without TLS"
        ):
            await act()


async def test_nobody_there(anyio_backend):
    mailbox = open_mailbox(f"redis://127.0.0.1:{free_port()}/0?name=jobs")
    for act in (mailbox.__aenter__, mailbox.exists):
        with pytest.raises(
            MailboxConnectionError, match=r"; start the server, or correct the host and the port of the URL$"
        ):
            await act()


def test_a_name_that_nobody_knows():
    assert redis_connection.explain(gaierror(-2, "Name or service not known")).endswith(
        "; correct the host of the URL, or mend the name service"
    )


async def test_a_server_of_another_kind(anyio_backend):
    async def web(stream):
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, web)
        with pytest.raises(
            MailboxConnectionError, match=r"is no Redis server: correct the host and the port of the URL$"
        ):
            await open_mailbox(f"redis://127.0.0.1:{port}/0?name=jobs").__aenter__()
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        ("redis", "check that a Redis server listens on that port; for one with TLS write rediss://"),
        ("rediss", "check that a Redis server with TLS listens on that port"),
    ],
)
async def test_a_server_that_hangs_up_when_greeted(scheme, says, anyio_backend):
    """As PostgreSQL does, and a Redis server with TLS that is greeted without."""

    async def hang_up(stream):
        async with stream:
            await stream.receive()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, hang_up)
        mailbox = open_mailbox(f"{scheme}://127.0.0.1:{port}/0?name=jobs")
        for act in (mailbox.__aenter__, mailbox.exists):
            with pytest.raises(
                MailboxConnectionError, match=rf"127\.0\.0\.1:{port}/0: it hung up when greeted; {says}$"
            ):
                await act()
        group.cancel_scope.cancel()


def test_a_virtual_clock(where):
    async def main():
        async with open_mailbox(f"redis://{where}/0?name=jobs"):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"'jobs': a Redis server's time is real, .*; use memory:// here"):
        run_virtual(main)


async def test_after_a_connection_it_may_pass(here, line, few_databases, anyio_backend):
    """After a first login, a refusal counts as a lost connection: it may be mended."""
    async with line.mailbox() as mailbox:
        line.lead_to(few_databases)
        line.cut(CALLS)
        for says in ("the connection was lost", "has no database 3"):
            with pytest.raises(MailboxConnectionError, match=says):
                await mailbox.counts()
        line.lead_to(here.url)
        assert await mailbox.counts() == Counts()


async def test_a_service_that_no_sentinel_knows(anyio_backend):
    async with Sentinel(None) as sentinel:
        where = f"127.0.0.1:{sentinel.port}"
        with pytest.raises(ConfigError, match=rf"{where} knows no 'jbos'; correct the service that the URL names"):
            await open_mailbox(f"redis+sentinel://{where}/jbos/0?name=jobs").__aenter__()


def test_the_command_line_calls_it_a_wrong_use(where, capsys):
    assert call(["send", f"redis://{where}/99999", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("correct the URL")
