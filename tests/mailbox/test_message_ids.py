"""No two messages have one id, whichever process sent them."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os
import sys

import anyio

from mainspring import open_mailbox

mailbox = open_mailbox(sys.argv[1])

async def send():
    async with mailbox:
        return [await mailbox.send("one"), *await mailbox.send_many(["two", "three"])]

def tell():
    os.write(1, "".join(f"{each}\\n" for each in anyio.run(send)).encode())

tell()
children = []
for _ in range(2):
    children.append(os.fork())
    if children[-1] == 0:
        tell()
        os._exit(0)
for child in children:
    os.waitpid(child, 0)
tell()
"""


@pytest.mark.slow
def test_what_forked_children_send_has_ids_of_its_own(path):
    """The mailbox was open in the parent before, and each child goes on from the same state of it.

    Where a store keeps messages by their ids, two of one id would be one message: the other is lost.
    """
    url = f"sqlite:///{path}?name=jobs"
    ran = subprocess.run([sys.executable, "-c", PROGRAM, url], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    ids = ran.stdout.split()
    assert len(ids) == 12
    assert len(set(ids)) == 12
