"""The writer thread of a SQLite file ends with its last user, and not before that user's last job is done."""

from __future__ import annotations

import threading
from contextlib import suppress

import anyio
import pytest

from interrupts import Interruption
from mainspring import open_mailbox
from mainspring.mailbox.sqlite import shared_file, threads


class User(threading.Thread):
    """Opens the file in an event loop of its own, sends, and leaves once it may."""

    def __init__(self, url, *, may_leave=False):
        super().__init__(daemon=True)
        self.url = url
        self.sent, self.may_leave = threading.Event(), threading.Event()
        if may_leave:
            self.may_leave.set()
        self.start()

    def run(self):
        async def use():
            async with open_mailbox(self.url) as mailbox:
                await mailbox.send("x")
                self.sent.set()
                self.may_leave.wait(20)
                await mailbox.close()  # which has no time limit, as the end of the block has

        anyio.run(use)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["comes", "leaves"])
def test_whatever_the_thread_that_closes_the_file_does_just_then_another_user_is_served(tmp_path, other):
    """Each time the other one comes, or leaves, as the thread comes to one line more."""
    url = f"sqlite:///{tmp_path / 'mail.db'}"
    users = []

    def act():
        if other == "comes":
            users.append(User(url, may_leave=True))
        users[-1].may_leave.set()
        users[-1].join(0.01)  # it comes as far as it can while the thread stands still

    def closed(line):
        before = set(threading.enumerate())
        with Interruption((shared_file, threads), line, act, thread="mainspring sqlite writer") as between:
            users[:] = [User(url)]
            if other == "leaves":
                users.append(User(url))
            assert all(user.sent.wait(20) for user in users)
            between.begin()
            users[0].may_leave.set()
            users[0].join(20)
            users[-1].may_leave.set()
            while begun := set(threading.enumerate()) - before:
                for thread in begun:
                    with suppress(RuntimeError):  # it is just being started
                        thread.join(20)
                        assert not thread.is_alive(), f"{thread.name} hangs, as another one {other} at line {line}"
        return between.happened

    lines = 0
    while closed(lines):
        lines += 1
    assert lines > 20

    async def count():
        async with open_mailbox(url) as mailbox:
            return (await mailbox.counts()).pending

    assert anyio.run(count) == (2 * lines + 1 if other == "comes" else 2 * lines + 2)
