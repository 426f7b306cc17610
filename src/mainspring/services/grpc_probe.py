"""The call of a gRPC probe (``grpc.health.v1``), which needs the extra ``grpc``.

grpc's own asyncio API would leave trio out. A call of its plain API does not wait: grpc works in threads of its own, and tells
the event loop when the call is over.
"""

from __future__ import annotations

from typing import Any

import anyio

from mainspring.core.clock import real_work
from mainspring.core.process import call_soon, event_loop
from mainspring.errors import ConfigError
from mainspring.services.callables import late

try:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
except ImportError as error:
    raise ConfigError(f"a gRPC probe needs an extra: pip install 'mainspring[grpc]' ({error})") from error

OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # the service is here
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own: that of an earlier call may be breaking just now
)


async def check(address: str, service: str, timeout: float) -> str | None:
    """Return None where the health service at ``address`` says SERVING of ``service``, else why not."""
    ended = anyio.Event()
    loop = event_loop()
    channel = grpc.insecure_channel(address, options=OPTIONS)
    try:
        request = health_pb2.HealthCheckRequest(service=service)
        call = health_pb2_grpc.HealthStub(channel).Check.future(request, timeout=timeout)
        call.add_done_callback(lambda _: call_soon(loop, ended.set))
        with real_work():
            await ended.wait()
    finally:
        channel.close()  # it ends the call too
    if call.code() is not grpc.StatusCode.OK:
        return late(timeout) if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED else _in_words(call, service)
    status: int = call.result().status
    if status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"it answered {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}"


def _in_words(call: Any, service: str) -> str:
    code, said = call.code(), call.details() or ""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "it has no gRPC health service"
    if code is grpc.StatusCode.NOT_FOUND:
        return f"its health service does not know {service!r}"
    if "connection refused" in said.lower():
        return "connection refused"
    return f"{code.name}: {said}" if said else str(code.name)
