"""Results of messages that another process has acknowledged: the mailbox objects that listen hear of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from mainspring.mailbox.records import RESULT
from stores import SERVERS, on

PROGRAM = Path(__file__).with_name("result_program.py")


@pytest.mark.slow
@pytest.mark.anyio
@on("sqlite", *SERVERS, everywhere=False)
async def test_results_of_another_process_are_announced(store):
    async with store.box() as mailbox:
        heard: list[str] = []
        unsubscribe = mailbox.backend.notifications.results.subscribe(heard.extend)
        await anyio.sleep(1.5)  # no receive waits here, and yet it listens on: longer than a file does by itself
        worker = subprocess.Popen([sys.executable, str(PROGRAM), store.url()])
        try:
            ids = await mailbox.send_many(["job"] * 40)
            with anyio.fail_after(30):
                while len(heard) < 40:
                    await anyio.sleep(0.01)
            assert sorted(heard) == sorted(ids)
            assert len(await mailbox.backend.find_records(RESULT, ids)) == 40
            unsubscribe()
            await mailbox.send("last")
            with anyio.fail_after(30):
                while worker.poll() is None:
                    await anyio.sleep(0.01)
        finally:
            worker.kill()
            worker.wait()
        assert len(heard) == 40
