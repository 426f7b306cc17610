"""The NATS mailbox keeps the mailbox contract, but for what it declares that it cannot do."""

from __future__ import annotations

import pytest

from loops import LOOPS
from mainspring.errors import ConfigError
from mainspring.mailbox.nats.mailbox import NatsMailbox
from mainspring.testing import mailbox_contract
from nats_support import place
from servers import NatsServer

pytestmark = pytest.mark.anyio
LACKING = {"front_return", "priority", "transactional_reply", "lease_ends_seen", "announces_records", "limits"}

TIMEOUT = 30.0
"""Seconds for each call: a busy machine has those of twenty behaviours at once."""


async def contract(url, storage, name):
    """What the contract finds of mailboxes on that server."""
    async with place(url) as here:

        def make(mailbox, *, body=None, reply=None):
            return here.box(mailbox, body=body, reply=reply, storage=storage, timeout=TIMEOUT)

        backend = mailbox_contract.BackendUnderTest(make, short_lease=1.0, lateness=1.0, name=name)
        return await mailbox_contract.run(backend, concurrency=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("anyio_backend", "storage"),
    [(LOOPS["asyncio"], "file"), (LOOPS["uvloop"], "memory")],
    ids=("asyncio, file", "uvloop, memory"),
)
async def test_the_contract(nats_url, anyio_backend, storage, judged):
    judged(await contract(nats_url, storage, f"NATS, {storage} storage"), LACKING)


@pytest.mark.slow
@pytest.mark.loops("asyncio")
async def test_the_contract_on_a_server_that_syncs_always(anyio_backend, judged):
    server = NatsServer.synced()
    if server is None:
        pytest.skip("this NATS server does not know sync_interval: 2.10 and later do")
    with server:
        judged(await contract(server.url, "file", "NATS, synced"), LACKING)


@pytest.mark.loops("trio")
async def test_trio_is_refused(anyio_backend):
    with pytest.raises(ConfigError, match=r"runs on asyncio only, not on trio: choose that \(`mainspring run --loop`"):
        async with NatsMailbox("nats://127.0.0.1:1", name="jobs"):
            pass
