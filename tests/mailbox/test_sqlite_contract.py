"""The SQLite mailbox keeps the mailbox contract: each behaviour in virtual time, all of them on the three event loops."""

from __future__ import annotations

import pytest

from mainspring.mailbox.sqlite import SQLiteMailbox
from mainspring.testing import mailbox_contract


@pytest.fixture
def factory(tmp_path):
    def make(name, *, body=None, reply=None):
        return SQLiteMailbox(tmp_path / "contract.db", name=name, body=body, reply=reply)

    return make


@mailbox_contract.parametrize
async def test_in_virtual_time(behaviour, factory, virtual_clock):
    await behaviour(factory)


@pytest.mark.anyio
async def test_in_real_time(factory, anyio_backend):
    report = await mailbox_contract.run(mailbox_contract.Backend(factory, short_lease=0.5), concurrency=20)
    assert report.ok, str(report)
    assert not report.lacking
