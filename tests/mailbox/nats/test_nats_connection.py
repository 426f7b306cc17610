"""The connection to a NATS server: whom it trusts, what it says of one that refuses, and when it breaks under a call."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import anyio
import anyio.to_thread
import pytest
from nats.aio.client import Client

from mainspring import open_mailbox
from mainspring.errors import ConfigError, MailboxClosedError, MailboxConnectionError
from mainspring.mailbox.message import Counts
from mainspring.mailbox.nats import connection, shared_client
from mainspring.mailbox.nats.client import STATE, STEPS, StrictClient, check_driver
from mainspring.mailbox.nats.mailbox import NatsMailbox
from nats_support import place, reconnected
from ports import free_port
from servers import NatsServer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loops("asyncio", "uvloop"),
]
CALLS = {
    "send": lambda box: box.send("x"),
    "receive": lambda box: box.receive(),
    "a waiting receive": lambda box: box.receive(wait_time_seconds=5, visibility_timeout=0),
    "counts": lambda box: box.counts(),
    "cancel": lambda box: box.cancel("x"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.slow
async def test_a_line_that_is_cut_again_and_again_is_a_lost_connection(here, call):
    """Calls meet the cut at any moment. uvloop raises a RuntimeError where the driver has not heard of it yet."""
    line = await here.line()
    async with here.box(over=line) as box:
        failures = 0
        done = False

        async def calls():
            nonlocal failures
            while not done:  # some calls end before a cancellation is heeded
                try:
                    await CALLS[call](box)
                except MailboxConnectionError:
                    failures += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(calls)
            for cut in range(4):
                await anyio.sleep(0.02 * cut)
                line.cut()
                await reconnected(box, cut + 1)
            done = True
            tasks.cancel_scope.cancel()
        assert failures
        await box.send("x")


@pytest.mark.slow
async def test_requests_go_on_when_the_drivers_flusher_has_ended(here):
    """Its task may be cancelled as any other of the event loop. The server answers pings all the while."""
    before = asyncio.all_tasks()
    async with here.box(timeout=1.0) as box:
        await box.send("x")
        tasks = asyncio.all_tasks() - before
        (flusher,) = [task for task in tasks if task.get_coro().__qualname__ == "Client._flusher"]
        flusher.cancel()
        with suppress(MailboxConnectionError):  # it may have been in the flusher's queue
            await box.counts()
        assert flusher.cancelled()
        for _ in range(3):
            assert await box.counts() == Counts(pending=1)


class Listener:
    """A server that says ``first`` to everybody, and remembers what it hears."""

    def __init__(self, first=b""):
        self.first = first
        self.heard = b""
        self.port = 0

    async def serve(self, reader, writer):
        writer.write(self.first)
        while more := await reader.read(65_536):
            self.heard += more
        writer.close()


@asynccontextmanager
async def listening(first=b""):
    """A :class:`Listener` on a free port."""
    made = Listener(first)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


# ------------------------------------------------------------------------------------------------------------ opening


async def test_tls_is_insisted_on_before_the_login_is_told(anyio_backend):
    info = b'INFO {"server_id":"x","version":"2.9.10","auth_required":true,"headers":true,"max_payload":1048576}\r\n'
    async with listening(info) as server:
        with anyio.fail_after(5), pytest.raises(ConfigError, match=r"does not offer TLS.*or write nats://") as refused:
            async with NatsMailbox(f"tls://me:secret@127.0.0.1:{server.port}", timeout=30):
                pass
        assert "secret" not in str(refused.value)
        await anyio.sleep(0.1)
        assert server.heard == b""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The files of a certificate for localhost that vouches for itself, and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    home = tmp_path_factory.mktemp("tls")
    cert, key = str(home / "cert.pem"), str(home / "key.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*new, *subject, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@pytest.mark.slow
async def test_tls_is_insisted_on_when_the_server_comes_back(certificate, anyio_backend, monkeypatch):
    cert, key = certificate
    options = ("--tls", "--tlscert", cert, "--tlskey", key)
    with NatsServer(*options) as server:
        url = f"tls://localhost:{server.port}"
        with anyio.fail_after(5), pytest.raises(MailboxConnectionError, match="certificate verify failed"):
            async with NatsMailbox(url, timeout=30):
                pass
        monkeypatch.setenv("SSL_CERT_FILE", cert)
        async with NatsMailbox(url, timeout=30) as box:
            await box.send("x" * 100_000)
            server.stop()
            server.options = ()
            server.start()
            with anyio.fail_after(20):
                while not (told := await refusal(box)) or "TLS" not in told:
                    await anyio.sleep(0.05)
            server.stop()
            server.options = options
            server.start()
            with anyio.fail_after(20):
                while await refusal(box):
                    await anyio.sleep(0.05)
            (message,) = await box.receive(wait_time_seconds=5)
            await message.acknowledge()


def signed_by_a_ca_of_our_own(home):
    """The files of a certificate authority, of a server's certificate by it, and of a client's."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=home)

    new = ("req", "-newkey", "rsa:2048", "-nodes")
    openssl(*new, "-x509", "-days", "2", "-subj", "/CN=our own", "-keyout", "ca.key", "-out", "ca.pem")
    (home / "names").write_text("subjectAltName=DNS:localhost")
    for who in ("server", "client"):
        openssl(*new, "-subj", f"/CN={who}", "-keyout", f"{who}.key", "-out", f"{who}.csr")
        ca = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", f"{who}.csr", *ca, "-extfile", "names", "-out", f"{who}.pem")


@pytest.mark.slow
async def test_a_ca_of_ones_own_and_a_certificate_of_the_clients(tmp_path, anyio_backend):
    await anyio.to_thread.run_sync(signed_by_a_ca_of_our_own, tmp_path)
    files = {name: str(tmp_path / name) for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")}
    server_side = ("--tls", "--tlscert", files["server.pem"], "--tlskey", files["server.key"])
    with NatsServer(*server_side, "--tlsverify", "--tlscacert", files["ca.pem"]) as server:
        url = f"tls://localhost:{server.port}?name=jobs"
        trusting = f"{url}&ca_file={files['ca.pem']}"
        for refused, why in ((url, "certificate verify failed"), (trusting, "no connection to a NATS server")):
            with anyio.fail_after(10), pytest.raises(MailboxConnectionError, match=why):
                async with open_mailbox(refused, timeout=3):
                    pass
        shown = f"{trusting}&cert_file={files['client.pem']}&key_file={files['client.key']}"
        async with open_mailbox(shown) as box:
            assert await box.send("x") is not None
            async with box.sibling("other") as other:
                assert await other.counts() == Counts()
        context = ssl.create_default_context(cafile=files["ca.pem"])
        context.load_cert_chain(files["client.pem"], files["client.key"])
        async with open_mailbox(url, ssl_context=context) as box:
            (message,) = await box.receive(wait_time_seconds=5)
            await message.acknowledge()


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("nats://h", {"ca_file": "ca.pem"}, "the scheme for TLS is tls://"),
        ("nats://h", {"ssl_context": ssl.create_default_context()}, "the scheme for TLS is tls://"),
        ("tls://me:secret@h", {"ca_file": "/no/such/ca.pem"}, r"'tls://h'.*cannot be read"),
        ("tls://h", {"key_file": "key.pem"}, "belongs to a cert_file"),
        ("tls://h?ssl_context=x", {}, "must be an ssl.SSLContext .in a URL name the files: "),
        (
            "tls://h",
            {"ssl_context": ssl.create_default_context(), "ca_file": "ca.pem"},
            "with ssl_context there is no ca_file",
        ),
    ],
)
def test_options_of_tls_that_cannot_work(url, options, why, anyio_backend):
    with pytest.raises(ConfigError, match=why) as refused:
        open_mailbox(url, **options)
    assert "secret" not in str(refused.value)


async def refusal(box):
    """What a send says that fails."""
    try:
        await box.send("y")
    except MailboxConnectionError as error:
        return str(error)
    return ""


async def test_a_refused_connection_is_told_at_once(anyio_backend):
    ports = [free_port(), free_port()]
    places = ",".join(f"127.0.0.1:{port}" for port in ports)
    with (
        anyio.fail_after(5),
        pytest.raises(MailboxConnectionError, match="no connection to a NATS server at") as refused,
    ):
        async with NatsMailbox(f"nats://me:secret@{places}", timeout=30):
            pass
    assert all(f"127.0.0.1:{port}" in str(refused.value) for port in ports)
    assert "secret" not in str(refused.value)
    assert str(refused.value).endswith("; start the server, or correct the host and the port of the URL")


@pytest.mark.slow
async def test_a_server_that_does_not_answer_leaves_time_for_the_next(nats_url, anyio_backend, monkeypatch):
    monkeypatch.setattr("nats.aio.client.shuffle", lambda pool: None)
    async with listening() as silent, place(nats_url) as here:
        here.url = f"nats://127.0.0.1:{silent.port},{nats_url.removeprefix('nats://')}"
        async with here.box(timeout=6) as box:
            await box.send("x")


async def test_a_login_of_any_letters(anyio_backend):
    with NatsServer("--user", "us er", "--pass", "p@s:s%/") as server:
        url = f"nats://us%20er:{{}}@127.0.0.1:{server.port}"
        async with NatsMailbox(url.format("p%40s%3As%25%2F"), timeout=5) as box:
            await box.send("x")
        for wrong in (url.format("wrong"), f"nats://127.0.0.1:{server.port}", f"nats://token@127.0.0.1:{server.port}"):
            mailbox = NatsMailbox(wrong, timeout=30)
            for act in (mailbox.__aenter__, mailbox.exists):
                with (
                    anyio.fail_after(5),
                    pytest.raises(ConfigError, match=r"Authorization Violation.*; check the user"),
                ):
                    await act()


async def test_a_refused_login_may_pass_where_another_server_is_away(anyio_backend):
    with (
        NatsServer("--user", "me", "--pass", "x") as server,
        anyio.fail_after(5),
        pytest.raises(MailboxConnectionError, match="Authorization Violation"),
    ):
        await NatsMailbox(f"nats://127.0.0.1:{server.port},127.0.0.1:{free_port()}", timeout=30).__aenter__()


async def test_credentials_that_cannot_be_used(nats_url, tmp_path, anyio_backend, monkeypatch):
    with pytest.raises(ConfigError, match=r"'/no/such.creds' cannot be read \(No such file"):
        await NatsMailbox(nats_url, credentials="/no/such.creds").__aenter__()
    (tmp_path / "my.creds").touch()
    monkeypatch.setitem(sys.modules, "nkeys", None)
    with pytest.raises(ConfigError, match=r"needs nkeys.*pip install 'nats-py\[nkeys\]'"):
        await NatsMailbox(nats_url, credentials=str(tmp_path / "my.creds")).__aenter__()


async def test_credentials_of_which_no_login_can_be_made_are_not_taken_for_the_servers_fault(
    tmp_path, anyio_backend, monkeypatch
):
    def from_seed(seed):
        raise TypeError("object of type 'NoneType' has no len()")  # what nkeys makes of a file without a seed

    nkeys = ModuleType("nkeys")
    nkeys.__spec__ = ModuleSpec("nkeys", None)
    nkeys.from_seed = from_seed
    monkeypatch.setitem(sys.modules, "nkeys", nkeys)
    file = tmp_path / "my.creds"
    file.write_text("-----BEGIN NATS USER JWT-----\nabc\n------END NATS USER JWT------\n")
    info = b'INFO {"server_id":"x","version":"2.9.10","auth_required":true,"nonce":"abc","headers":true}\r\n'
    async with listening(info) as server:
        box = NatsMailbox(f"nats://127.0.0.1:{server.port}", credentials=str(file), timeout=30)
        with anyio.fail_after(5), pytest.raises(ConfigError, match=r"no login can be made of the credentials.*no len"):
            await box.__aenter__()
        await anyio.sleep(0.1)  # the server notices


async def test_a_driver_whose_private_parts_have_changed_is_refused(anyio_backend):
    class Changed(Client):
        async def _flush_pending(self, force_flush=False, urgent=False):
            pass

    check_driver(Client())
    with pytest.raises(ConfigError, match=r"nats-py \S+ does not work with .*: _flush_pending changed; install"):
        check_driver(Client(), Changed)
    with pytest.raises(ConfigError, match="_subs, _transport, buf, nc changed"):
        check_driver(SimpleNamespace(**dict.fromkeys(STATE[:-2])))


def test_all_private_methods_of_the_driver_that_are_overridden_are_checked():
    assert {name for name in vars(StrictClient) if hasattr(Client, name) and not name.startswith("__")} - {
        "publish"
    } <= STEPS.keys()


async def test_a_token_of_any_letters(anyio_backend):
    with NatsServer("--auth", "to@k/en") as server:
        async with NatsMailbox(f"nats://to%40k%2Fen@127.0.0.1:{server.port}", timeout=5) as box:
            await box.send("x")


@pytest.mark.parametrize(("query", "options"), [("?capacity=5", {}), ("", {"capacity": 5})])
def test_what_bounds_a_mailbox_instead_of_a_capacity_is_said(query, options, anyio_backend):
    with pytest.raises(ConfigError, match=r"has no option 'capacity'; limit the storage"):
        open_mailbox(f"nats://127.0.0.1{query}", **options)


# ------------------------------------------------------------------------------------------------------------ closing


async def none_is_left(of):
    """Wait until the event loop has no other tasks than these."""
    with anyio.move_on_after(5):
        while asyncio.all_tasks() - of:
            await anyio.sleep(0.01)
    assert asyncio.all_tasks() - of == set()


async def test_a_close_that_is_cancelled_hangs_up(here):
    """It is not tried again: what is left would stay until the process ends."""
    line = await here.line()
    before = asyncio.all_tasks()
    async with here.box(over=line) as box:
        sent = line.hold(here.names().to_queue + "*")

        async def send():
            with pytest.raises(MailboxClosedError):
                await box.send("x")

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            await sent.full()
            with anyio.move_on_after(0.2) as scope:
                await box.close()
            assert scope.cancelled_caught
        with anyio.fail_after(5):
            while line.links:
                await anyio.sleep(0.01)
    await none_is_left(before)


async def lost(box, body):
    """Send what does not arrive."""
    with suppress(MailboxConnectionError, MailboxClosedError):
        await box.send(body)


@pytest.mark.slow
async def test_a_close_does_not_wait_for_one_who_takes_nothing(here, monkeypatch):
    """What is still to be written stands in the way of the driver's own close: it is dropped, and its tasks end."""
    for module in (connection, shared_client):
        monkeypatch.setattr(module, "CLOSE_TIMEOUT", 0.4)
    line = await here.line()
    box = here.box(over=line, timeout=2)
    before = asyncio.all_tasks()
    await box.__aenter__()
    async with anyio.create_task_group() as group:
        line.silent = True
        for _ in range(40):
            group.start_soon(lost, box, "x" * 500_000)
        await anyio.sleep(0.2)
        await box.close()
        group.cancel_scope.cancel()
    line.silent = False
    await none_is_left(before)
