"""A Redis server that is not what the URL says: a ConfigError at opening, in one line that says what to do."""

from __future__ import annotations

from dataclasses import replace
from socket import gaierror
from urllib.parse import urlsplit

import anyio
import pytest
from anyio.abc import SocketAttribute

from mainspring.cli.app import call
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox.open import open_mailbox
from mainspring.mailbox.redis import connection as redis_connection
from mainspring.mailbox.redis import topology as redis_topology
from mainspring.mailbox.redis.client import Link
from mainspring.mailbox.redis.topology import Directory
from mainspring.mailbox.redis.url import parse_server
from mainspring.testing import run_virtual
from ports import free_port

pytestmark = pytest.mark.anyio


@pytest.fixture
def where(redis_url):
    return urlsplit(redis_url).netloc


@pytest.mark.parametrize(
    ("scheme", "path", "says"),
    [
        ("redis", "/99999", "has no database 99999 .*; correct the URL"),
        ("redis+sentinel", "/main/0", "is no sentinel; its scheme is redis://"),
        ("redis+cluster", "", "is no node of a cluster; its scheme is redis://"),
        ("rediss", "/0", "does not speak TLS: set it up there, or write redis://"),
    ],
)
async def test_a_server_that_is_not_what_the_url_says(where, monkeypatch, scheme, path, says):
    monkeypatch.setattr(redis_connection, "TLS_PATIENCE", 0.05)
    mailbox = open_mailbox(f"{scheme}://{where}{path}?name=jobs")
    for act in (mailbox.__aenter__, mailbox.exists):
        with pytest.raises(ConfigError, match=says):
            await act()


async def test_nobody_there(anyio_backend):
    mailbox = open_mailbox(f"redis://127.0.0.1:{free_port()}/0?name=jobs")
    for act in (mailbox.__aenter__, mailbox.exists):
        with pytest.raises(
            MailboxConnectionError, match=r"; start the server, or correct the host and the port of the URL$"
        ):
            await act()


def test_a_name_that_nobody_knows():
    assert redis_connection.trouble(gaierror(-2, "Name or service not known")).endswith(
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


def test_a_virtual_clock(where):
    async def main():
        async with open_mailbox(f"redis://{where}/0?name=jobs"):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"'jobs': a Redis server's time is real, .*; use memory:// here"):
        run_virtual(main)


async def test_after_a_connection_it_may_pass(redis_url, anyio_backend):
    server = parse_server(redis_url, {})
    link = Link(Directory(server, b"{ms:jobs}:"), 5)
    await link.connect()
    await link._drop()
    link._directory = Directory(replace(server, db=99_999), b"{ms:jobs}:")
    with pytest.raises(MailboxConnectionError, match="has no database"):
        await link.connect()


async def test_a_service_that_no_sentinel_knows(monkeypatch, anyio_backend):
    class Sentinel:
        async def call(self, *command):
            return None

        async def close(self):
            """Nothing to close."""

    async def connect(server, host, *, sentinel=False):
        return Sentinel()

    monkeypatch.setattr(redis_topology, "connect", connect)
    mailbox = open_mailbox("redis+sentinel://127.0.0.1:1/jbos/0?name=jobs")
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1 knows no 'jbos'; correct the service that the URL names"):
        await mailbox.__aenter__()


def test_the_command_line_calls_it_a_wrong_use(where, capsys):
    assert call(["send", f"redis://{where}/99999", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("correct the URL")
