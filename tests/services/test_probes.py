"""Probes against real servers, and what each failure is called. Their timeouts pass in virtual time."""

from __future__ import annotations

import functools
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.streams.tls import TLSListener
from replica_play import playing

from mainspring import ConfigError
from mainspring.services import probes
from mainspring.services.spec import ExecProbe, HttpProbe, TcpProbe
from services_support import Play, PlayingSpawner, no_command

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def ask(probe, *, timeout=5, run=no_command, socket=None):
    return await probes.ask(probe, timeout=timeout, run=run, socket=socket)


class Server:
    """A server that answers each request with ``answer``: bytes, or None for never."""

    def __init__(self, answer):
        self.answer = answer
        self.requests = []
        self.closed = 0

    async def serve(self, stream):
        async with stream:
            self.requests.append(await stream.receive())
            if self.answer is None:
                await anyio.sleep_forever()
            if self.answer:
                await stream.send(self.answer)
        self.closed += 1


@asynccontextmanager
async def serving(listener, serve):
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def over_tcp(answer):
    server = Server(answer)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with serving(listener, server.serve):
        yield server, f"127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"


@asynccontextmanager
async def over_unix(path, answer):
    server = Server(answer)
    async with serving(await anyio.create_unix_listener(path), server.serve):
        yield server


@pytest.fixture
def closed_port():
    """A port at which nothing listens, and which is not given to others meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def status_line(status):
    return f"HTTP/1.1 {status} So\r\nContent-Length: 0\r\n\r\n".encode()


# ------------------------------------------------------------------------------------------------------------------- http


@pytest.mark.every_loop
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (199, None), (200, None), (204, None), (302, None), (399, None),
        (400, "it answered with status 400"), (503, "it answered with status 503"),
    ],
)  # fmt: skip
async def test_http_passes_by_its_status(status, error):
    answer = status_line(status) if status != 199 else b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK
    async with over_tcp(answer) as (server, address):
        assert await ask(HttpProbe(f"http://{address}/health/ready?full=1")) == error
    request = server.requests[0]
    assert request.startswith(b"GET /health/ready?full=1 HTTP/1.1\r\n")
    assert f"Host: {address}\r\n".encode() in request
    assert b"Connection: close\r\n" in request


@pytest.mark.every_loop
async def test_http_over_a_unix_socket_that_is_found_by_looking(tmp_path):
    path = tmp_path / "a.b" / "worker"
    path.parent.mkdir()
    async with over_unix(path, OK) as server:
        assert await ask(HttpProbe(f"unix:{path}/health/ready")) is None
        assert await ask(HttpProbe(f"unix:{path}/")) is None
        assert await ask(HttpProbe("unix:{socket}/health"), socket=str(path)) is None
        assert await ask(HttpProbe("unix:{socket}"), socket=str(path)) is None
    assert [request.split()[1] for request in server.requests] == [b"/health/ready", b"/", b"/health", b"/"]
    assert b"Host: localhost\r\n" in server.requests[0]


async def test_a_unix_socket_where_nothing_listens(tmp_path):
    path = tmp_path / "worker.sock"
    assert await ask(HttpProbe(f"unix:{path}/health/ready")) == "no such file or directory"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert await ask(HttpProbe(f"unix:{path}/health/ready")) == "connection refused"
    assert await ask(HttpProbe("unix:{socket}/health/ready")) == "there is no {socket}"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "the connection was closed without an answer"),
        (b"HTTP/1.1 200", "the connection was closed without an answer"),
        (b"+PONG\r\n\r\n", "it does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nLong: " + b"x" * 200_000, "it does not answer in HTTP"),
    ],
    ids=["nothing", "half", "foreign", "long"],
)
async def test_an_answer_that_is_none(answer, error):
    async with over_tcp(answer) as (_, address):
        assert await ask(HttpProbe(f"http://{address}")) == error


@pytest.mark.every_loop
async def test_a_refused_connection_is_a_reason_in_words(closed_port):
    assert await ask(HttpProbe(f"http://127.0.0.1:{closed_port}/")) == "connection refused"
    assert await ask(HttpProbe(f"https://127.0.0.1:{closed_port}/")) == "connection refused"
    assert await ask(TcpProbe(f"127.0.0.1:{closed_port}")) == "connection refused"
    assert await ask(TcpProbe(f"localhost:{closed_port}")) == "connection refused"


@pytest.mark.every_loop
async def test_a_server_that_hangs_has_failed_at_the_timeout_and_is_hung_up_on():
    async with over_tcp(None) as (server, address):
        assert await ask(HttpProbe(f"http://{address}"), timeout=0.05) == "no answer within 0.05 s"
        assert len(server.requests) == 1


async def test_a_cancelled_probe_leaves_no_connection():
    closed = anyio.Event()

    async def serve(stream):
        async with stream:
            await stream.receive()
            asked.set()
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
            closed.set()

    asked = anyio.Event()
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    address = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
    async with serving(listener, serve):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, HttpProbe(address))
            await asked.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(10):
            await closed.wait()


@pytest.fixture(scope="module")
def own_certificate(tmp_path_factory):
    """The TLS context of a server whose certificate only it vouches for."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    home = tmp_path_factory.mktemp("tls")
    cert, key = home / "cert.pem", home / "key.pem"
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    made = [*new, "-subj", "/CN=elsewhere", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return context


@pytest.mark.every_loop
async def test_https_does_not_check_the_certificate(own_certificate):
    server = Server(status_line(503))
    plain = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = plain.extra(anyio.abc.SocketAttribute.local_port)
    async with serving(TLSListener(plain, own_certificate, standard_compatible=False), server.serve):
        assert await ask(HttpProbe(f"https://127.0.0.1:{port}/health")) == "it answered with status 503"
    assert server.requests[0].startswith(b"GET /health HTTP/1.1\r\n")


# -------------------------------------------------------------------------------------------------------------------- tcp


@pytest.mark.every_loop
async def test_tcp_passes_by_a_connection():
    async def serve(stream):
        async with stream:
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with serving(listener, serve):
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        assert await ask(TcpProbe(f"127.0.0.1:{port}")) is None


async def test_a_host_that_does_not_exist():
    assert "known" in await ask(TcpProbe("no-such-host.invalid:80"), timeout=60)


# -------------------------------------------------------------------------------------------------------------------- exec


async def test_exec_passes_by_its_exit_status(virtual_clock):
    spawner = PlayingSpawner(
        {
            "fine": Play(),
            "bad": Play(("starting", "no route"), returncode=2),
            "missing": Play(refused="no such program: missing"),
        }
    )
    said = [await ask(ExecProbe([command]), run=spawner.run) for command in ("fine", "bad", "missing")]
    assert said == [None, "exit status 2: no route", "no such program: missing"]


async def test_exec_that_hangs_is_killed_at_the_timeout(virtual_clock):
    spawner = PlayingSpawner({"hangs": Play(seconds=1000)})
    assert await ask(ExecProbe(("hangs",)), run=spawner.run) == "no answer within 5 s"
    assert virtual_clock.now == 5
    assert spawner.processes[0].gone


# ---------------------------------------------------------------------------------------------------------------- callables


async def test_a_callable_passes_unless_it_returns_false_or_raises(virtual_clock):
    async def coroutine(answer):
        return answer

    async def raises():
        raise OSError("no route")

    answers = [await ask(functools.partial(coroutine, answer)) for answer in (None, True, 0, False)]
    assert answers == [None, None, None, "it returned False"]
    assert [await ask(lambda answer=answer: answer) for answer in (None, False)] == [None, "it returned False"]
    assert await ask(raises) == "OSError: no route"


async def test_a_callable_that_hangs_ends_at_the_timeout(virtual_clock):
    ended = []

    async def hangs():
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(virtual_clock.now)

    assert await ask(hangs) == "no answer within 5 s"
    assert ended == [5]


async def test_a_plain_callable_has_a_thread_of_its_own_and_is_not_called_while_it_is_out():
    calls, answer = [], threading.Event()

    def plain():
        calls.append(threading.get_ident())
        answer.wait(60)

    probe = probes.of_replica(plain, service="shop", replica=1)
    assert probes.of_replica(probe, service="shop", replica=1) is probe
    for _ in range(3):
        assert await ask(probe, timeout=0.02) == "no answer within 0.02 s"
    assert len(calls) == 1
    assert calls[0] != threading.get_ident()
    answer.set()
    with anyio.fail_after(10):
        while await ask(probe, timeout=1) is not None:
            await anyio.sleep(0.001)
    assert len(calls) == 2


# --------------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(HttpProbe, "localhost:8080/health"),
        functools.partial(HttpProbe, "ftp://localhost/health"),
        functools.partial(HttpProbe, "http://"),
        functools.partial(HttpProbe, "http://localhost:99999/"),
        functools.partial(HttpProbe, "http://localhost:0/"),
        functools.partial(HttpProbe, "http://user:word@localhost/"),
        functools.partial(HttpProbe, "http://localhost/a b"),
        functools.partial(HttpProbe, "http://localhost/ä"),
        functools.partial(HttpProbe, "unix:relative.sock/health"),
        functools.partial(HttpProbe, 8080),
        functools.partial(TcpProbe, "localhost"),
        functools.partial(TcpProbe, "localhost:"),
        functools.partial(TcpProbe, ":8080"),
        functools.partial(TcpProbe, "::1:8080"),
        functools.partial(TcpProbe, "localhost:http"),
        functools.partial(TcpProbe, "localhost:0"),
        functools.partial(TcpProbe, "localhost:65536"),
        functools.partial(ExecProbe, "curl -f localhost"),
        functools.partial(ExecProbe, ()),
        functools.partial(ExecProbe, ("",)),
    ],
    ids=lambda make: f"{make.func.__name__} {make.args[0]!r}",
)
def test_an_address_that_cannot_work_is_refused(make):
    with pytest.raises(ConfigError, match=f"^{make.func.__name__}: (url|address|command) must "):
        make()


@pytest.mark.parametrize(
    "url",
    ["http://[::1]:8080/", "https://example.org", "http://h:80{replica}/", "unix:{socket}/health", "http://h?full"],
)
def test_an_address_that_can_work(url):
    assert HttpProbe(url).url == url
    assert TcpProbe("[::1]:8080").address == "[::1]:8080"


def test_each_replica_has_an_address_of_its_own():
    probe = HttpProbe("http://{service}.local:80{replica}/health")
    assert probes.of_replica(probe, service="shop", replica=12) == HttpProbe("http://shop.local:8012/health")
    assert probes.of_replica(TcpProbe("h:80{replica}"), service="shop", replica=2) == TcpProbe("h:802")
    command = ExecProbe(("ask", "{replica}"))
    assert probes.of_replica(command, service="shop", replica=2) is command


async def test_a_replica_calls_a_plain_probe_that_hangs_once(virtual_clock):
    calls, asked, answer = [], threading.Event(), threading.Event()

    def hangs():
        calls.append(threading.current_thread())
        asked.set()
        answer.wait(60)

    async with playing(probe=hangs) as play:
        await anyio.to_thread.run_sync(asked.wait, 60)
        virtual_clock.advance(5)  # the clock stands still for a thread
        await anyio.sleep(20)
        assert play.replica.error == "not ready yet: no answer within 5 s"
        assert len(calls) == 1
        answer.set()
        await anyio.to_thread.run_sync(calls[0].join, 60)  # or hours of virtual time could pass before it has returned
        await play.running()
        assert len(calls) == 2
