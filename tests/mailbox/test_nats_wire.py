"""The connection to a NATS server when it breaks under a call."""

from __future__ import annotations

import pytest

from mainspring.errors import MailboxConnectionError
from nats_support import ON_ASYNCIO, place

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ON_ASYNCIO, ids=("asyncio", "uvloop")),
]
CALLS = {
    "send": lambda box: box.send("x"),
    "receive": lambda box: box.receive(),
    "a waiting receive": lambda box: box.receive(wait_time_seconds=5),
    "counts": lambda box: box.counts(),
    "cancel": lambda box: box.cancel("x"),
}


@pytest.mark.parametrize("call", CALLS)
async def test_what_a_closed_transport_says_is_a_lost_connection(nats_url, anyio_backend, monkeypatch, call):
    """uvloop raises a RuntimeError where a connection was closed and the driver has not heard of it yet."""

    async def closed(*_, **__):
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async with place(nats_url) as here, here.box() as box:
        with monkeypatch.context() as broken:
            broken.setattr(box._wire.client, "publish", closed)
            with pytest.raises(MailboxConnectionError, match="the handler is closed"):
                await CALLS[call](box)
        await box.send("x")
