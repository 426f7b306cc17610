"""The NATS mailbox keeps the mailbox contract, but for what it declares that it cannot do."""

from __future__ import annotations

import pytest

from mainspring.errors import ConfigError
from mainspring.mailbox.nats import NatsMailbox
from mainspring.testing import mailbox_contract
from nats_support import ON_ASYNCIO, place

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("anyio_backend", "storage"),
    [(ON_ASYNCIO[0], "file"), (ON_ASYNCIO[1], "memory")],
    ids=("asyncio, file", "uvloop, memory"),
)
async def test_the_contract(nats_url, anyio_backend, storage, judged):
    async with place(nats_url) as here:

        def make(name, *, body=None, reply=None):
            return here.box(name, body=body, reply=reply, storage=storage)

        backend = mailbox_contract.Backend(make, short_lease=1.0, lateness=1.0, name=f"NATS, {storage} storage")
        report = await mailbox_contract.run(backend, concurrency=20)
    judged(report, {"front_return", "priority", "transactional_reply", "lease_ends_seen"})


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_trio_is_refused(anyio_backend):
    with pytest.raises(ConfigError, match="runs on asyncio only, not on trio"):
        async with NatsMailbox("nats://127.0.0.1:1", name="jobs"):
            pass
