"""The Redis mailbox keeps the mailbox contract, on the three event loops."""

from __future__ import annotations

import pytest

from mainspring.mailbox.redis import RedisMailbox
from mainspring.testing import mailbox_contract
from redis_support import place

pytestmark = pytest.mark.anyio


async def test_the_contract(redis_url, anyio_backend):
    with place(redis_url) as here:

        def make(name, *, body=None, reply=None):
            return RedisMailbox(redis_url, name=here.prefix + name, body=body, reply=reply)

        report = await mailbox_contract.run(mailbox_contract.Backend(make, short_lease=0.5), concurrency=20)
        assert report.ok, str(report)
        assert not report.skipped
