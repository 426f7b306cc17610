"""The Redis mailbox keeps the mailbox contract, on the three event loops."""

from __future__ import annotations

import pytest

from mainspring.mailbox.redis.mailbox import RedisMailbox
from mainspring.testing import mailbox_contract
from redis_support import place

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_the_contract(redis_url, anyio_backend, judged):
    made = set()

    def make(name, *, body=None, reply=None):
        made.add(name.rpartition("-")[0])  # a behaviour's own names have a random part before the last dash
        # Time for each call: a busy machine has those of twenty behaviours at once.
        return RedisMailbox(redis_url, name=name, body=body, reply=reply, timeout=30)

    with place(redis_url) as here:
        try:
            report = await mailbox_contract.run(
                mailbox_contract.BackendUnderTest(make, short_lease=1.0, name="Redis"), concurrency=20
            )
        finally:
            for prefix in made:
                here.clean(prefix)
    judged(report, {"announces_records"})
