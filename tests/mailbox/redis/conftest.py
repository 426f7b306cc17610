"""What the tests of the Redis mailbox have beside ``here``, the place that each module makes."""

from __future__ import annotations

import anyio
import pytest

from redis_support import Waiting, line_to


@pytest.fixture
async def line(here, anyio_backend):
    async with line_to(here) as made:
        yield made


@pytest.fixture
async def waiting(anyio_backend):
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            yield Waiting(group)
            group.cancel_scope.cancel()
