"""The PostgreSQL mailbox keeps the mailbox contract, on the event loops that its driver runs on."""

from __future__ import annotations

import pytest

from mainspring.core.process import async_library
from mainspring.errors import ConfigError
from mainspring.testing import mailbox_contract
from postgres_support import Place, drop_schema, new_schema

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_the_contract(postgres_url, anyio_backend, judged):
    place = Place(postgres_url, new_schema())
    try:
        if async_library() == "trio":
            with pytest.raises(ConfigError, match="asyncio only"):
                await place.mailbox().__aenter__()
            return
        backend = mailbox_contract.BackendUnderTest(place.mailbox, short_lease=1.0, name="PostgreSQL")
        report = await mailbox_contract.run(backend, concurrency=20)
    finally:
        drop_schema(postgres_url, place.schema)
    judged(report, {"announces_records"})
