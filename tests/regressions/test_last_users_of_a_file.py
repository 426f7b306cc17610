"""The writer thread of a SQLite file ends with its last user, and not before that user's last job is done."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace

import anyio

from interrupts import Interruption
from mainspring import open_mailbox
from mainspring.mailbox.sqlite import writer as sqlite_writer
from mainspring.mailbox.sqlite.writer import Job, Writer

HERE = SimpleNamespace(call_soon_threadsafe=lambda call: call())


def job(done):
    return Job((), lambda: 0.0, 0.0, HERE, done.set)


def test_a_release_while_the_one_before_is_done_is_done_too(tmp_path, monkeypatch):
    """Two mailboxes of one file close at the same time: the second's job arrives while the thread has the first's."""
    writer = Writer(str(tmp_path / "mail.db"))
    for _ in range(2):
        writer.acquire("full", 1.0)
    first, second = threading.Event(), threading.Event()
    transact, released = writer._transact, threading.Event()

    def overtaken(jobs):
        transact(jobs)
        if not released.is_set():
            released.set()
            writer.release(job(second))

    monkeypatch.setattr(writer, "_transact", overtaken)
    writer.release(job(first))
    assert first.wait(10)
    assert second.wait(10)


def test_a_user_who_comes_and_goes_while_the_thread_ends_is_served(tmp_path, monkeypatch):
    writer = Writer(str(tmp_path / "mail.db"))
    writer.acquire("full", 1.0)
    first, second = threading.Event(), threading.Event()
    leave, visited = writer.file.leave, threading.Event()

    def visited_meanwhile():
        leave()
        if not visited.is_set():
            visited.set()
            writer.acquire("full", 1.0)
            writer.release(job(second))

    monkeypatch.setattr(writer.file, "leave", visited_meanwhile)
    writer.release(job(first))
    assert first.wait(10)
    assert second.wait(10)


def test_a_user_who_comes_at_any_line_of_the_end_of_the_thread_is_served(tmp_path):
    """Each time another event loop opens the file as the thread that closes it comes to one line more."""
    url, visitors = f"sqlite:///{tmp_path / 'mail.db'}", []

    def use():
        async def send():
            async with open_mailbox(url) as mailbox:
                await mailbox.send("x")

        anyio.run(send)

    def visit():
        visitors.append(threading.Thread(target=use, daemon=True))
        visitors[-1].start()
        visitors[-1].join(0.01)  # it comes as far as it can while the thread stands still

    def visited(line):
        before = set(threading.enumerate())
        with Interruption((sqlite_writer,), line, visit, functions=("_ended",), threads=True) as between:
            threading.Thread(target=use, daemon=True).start()
            while begun := set(threading.enumerate()) - before:
                for thread in begun:
                    with suppress(RuntimeError):  # it is just being started
                        thread.join(20)
                        assert not thread.is_alive(), f"{thread.name} hangs, visited at line {line}"
        return between.happened

    lines = 0
    while visited(lines):
        lines += 1
    assert lines > 5

    async def count():
        async with open_mailbox(url) as mailbox:
            return (await mailbox.counts()).pending

    assert anyio.run(count) == 2 * lines + 1
