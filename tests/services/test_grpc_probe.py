"""The gRPC probe against real health services. Without the extra ``grpc`` it is refused."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import anyio
import pytest

from mainspring import ConfigError
from mainspring.services import probes
from services_support import no_command

grpc = pytest.importorskip("grpc")
health = pytest.importorskip("grpc_health.v1.health")
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402

from mainspring.services.spec import GrpcProbe  # noqa: E402

pytestmark = pytest.mark.anyio

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WITHOUT = """
import sys
sys.modules["grpc"] = None
from mainspring import ConfigError
from mainspring.services.spec import GrpcProbe, HttpProbe
HttpProbe("http://localhost")
try:
    GrpcProbe("localhost:50051")
except ConfigError as error:
    print(error)
"""


async def ask(probe, *, timeout=10, socket=None):
    return await probes.ask(probe, timeout=timeout, run=no_command, socket=socket)


@contextmanager
def serving(*servicers, address="127.0.0.1:0"):
    """Serve gRPC, with a health service or without; yield the address."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        for servicer in servicers:
            health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port(address)
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait(10)


@pytest.mark.every_loop
async def test_it_passes_while_the_service_says_serving(tmp_path):
    servicer = health.HealthServicer()
    servicer.set("orders", NOT_SERVING)
    with serving(servicer) as address:
        assert await ask(GrpcProbe(address)) is None
        assert await ask(GrpcProbe(address, "orders")) == "it answered NOT_SERVING"
        assert await ask(GrpcProbe(address, "stock")) == "its health service does not know 'stock'"
    path = tmp_path / "grpc.sock"
    with serving(servicer, address=f"unix:{path}"):
        assert await ask(GrpcProbe("unix:{socket}"), socket=str(path)) is None


@pytest.mark.every_loop
async def test_a_refused_connection_and_a_server_without_health_are_named():
    with serving() as address:
        assert await ask(GrpcProbe(address)) == "it has no gRPC health service"
    assert await ask(GrpcProbe(address)) == "connection refused"
    with serving(health.HealthServicer(), address=address):  # it is asked at once: no backoff of the one before counts
        assert await ask(GrpcProbe(address)) is None


@pytest.mark.every_loop
async def test_one_that_hangs_has_failed_at_the_timeout():
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        assert await ask(GrpcProbe(f"127.0.0.1:{port}"), timeout=0.1) == "no answer within 0.1 s"


async def test_a_cancelled_call_ends_at_the_server():
    began, ended = threading.Event(), threading.Event()

    class Hangs(health_pb2_grpc.HealthServicer):
        def Check(self, request, context):
            context.add_callback(ended.set)
            began.set()
            ended.wait(30)
            return health_pb2.HealthCheckResponse()

    with serving(Hangs()) as address:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, GrpcProbe(address))
            await anyio.to_thread.run_sync(began.wait, 30)
            tasks.cancel_scope.cancel()
        assert await anyio.to_thread.run_sync(ended.wait, 5)


@pytest.mark.parametrize("address", ["localhost", "http://localhost:50051", 50051])
def test_an_address_that_cannot_work_is_refused(address):
    with pytest.raises(ConfigError, match=r"^GrpcProbe: address must be "):
        GrpcProbe(address)


def test_without_the_extra_it_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("a gRPC probe needs an extra: pip install 'mainspring[grpc]' (")
