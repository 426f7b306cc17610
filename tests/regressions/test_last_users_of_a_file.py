"""The writer thread of a SQLite file ends with its last user, and not before that user's last job is done."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from mainspring.mailbox.sqlite_writer import Job, Writer

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
