"""Beats, their callbacks, and the clock they follow."""

from __future__ import annotations

import sys
import threading

import anyio
import pytest
import trio.testing

from mainspring.core import clock
from mainspring.errors import InvalidParameterError
from mainspring.runtime.heartbeat import Heartbeat

pytestmark = pytest.mark.anyio


@pytest.fixture
def monotonic(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    return now


def in_virtual_time(fn):
    return anyio.run(fn, backend="trio", backend_options={"clock": trio.testing.MockClock(autojump_threshold=0)})


def in_a_thread(fn):
    box = []
    thread = threading.Thread(target=lambda: box.append(fn()))
    thread.start()
    thread.join()
    return box[0]


async def test_it_counts_since_the_last_beat_from_any_thread_and_loop(monotonic):
    heart = Heartbeat()
    assert heart.elapsed() == 0.0
    monotonic[0] += 5
    assert heart.elapsed() == 5.0
    assert in_a_thread(heart.elapsed) == 5.0
    in_a_thread(heart.beat)
    monotonic[0] += 2
    assert heart.elapsed() == 2.0

    async def elsewhere():
        return heart.elapsed()

    assert in_a_thread(lambda: anyio.run(elsewhere, backend="trio")) == 2.0


def test_without_an_event_loop_it_works_as_well(monotonic):
    heart = Heartbeat()
    monotonic[0] += 3
    assert heart.elapsed() == 3.0
    heart.beat()
    assert heart.elapsed() == 0.0


def test_virtual_time_rules_it():
    async def main():
        heart = Heartbeat()
        await anyio.sleep(1000)
        assert heart.elapsed() == 1000
        heart.beat()
        await anyio.sleep(1)
        assert heart.elapsed() == 1

    in_virtual_time(main)


def test_in_virtual_time_a_beat_from_elsewhere_counts_from_the_first_look():
    made_before = Heartbeat()

    async def main():
        await anyio.sleep(50)
        assert made_before.elapsed() == 0
        await anyio.sleep(10)
        assert made_before.elapsed() == 10
        in_a_thread(made_before.beat)
        assert made_before.elapsed() == 0
        await anyio.sleep(3)
        assert made_before.elapsed() == 3

    in_virtual_time(main)


def test_callbacks_are_called_in_order_and_can_be_removed():
    heart, heard = Heartbeat(), []

    class Listener:
        def hear(self):
            heard.append("bound")

    listener = Listener()
    heart.add_callback(lambda: heard.append("first"))
    heart.add_callback(listener.hear)
    heart.beat()
    assert heard == ["first", "bound"]
    heart.remove_callback(listener.hear)  # another object, but equal
    heart.remove_callback(print)
    heart.beat()
    assert heard == ["first", "bound", "first"]


def test_a_callback_runs_in_the_thread_that_beats():
    heart, threads = Heartbeat(), []
    heart.add_callback(lambda: threads.append(threading.current_thread()))
    in_a_thread(heart.beat)
    assert threads[0] is not threading.current_thread()


def test_a_raising_callback_is_logged_and_harms_nobody(monotonic, caplog):
    heartbeat = Heartbeat()
    called = []

    def bad():
        called.append("bad")
        raise ValueError("no")

    def leaves():
        called.append("leaves")
        sys.exit(3)

    for callback in (bad, leaves, lambda: called.append("last")):
        heartbeat.add_callback(callback)
    heartbeat.beat()
    assert called == ["bad", "leaves", "last"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_a_callback_that_returns_work_which_nothing_runs_is_logged(caplog):
    async def notify() -> None:
        raise AssertionError

    heart = Heartbeat()
    heart.add_callback(lambda: notify())
    heart.beat()
    assert "returned a coroutine, which nothing runs" in caplog.text


def test_a_callback_may_remove_itself():
    heart, heard = Heartbeat(), []

    def once():
        heard.append("once")
        heart.remove_callback(once)

    heart.add_callback(once)
    heart.add_callback(lambda: heard.append("always"))
    heart.beat()
    heart.beat()
    assert heard == ["once", "always", "always"]


async def asynchronous():
    raise AssertionError


@pytest.mark.parametrize("callback", [asynchronous, None, (lambda: (yield)), type("Callback", (), {})])
def test_a_callback_of_which_nothing_would_run_is_refused(callback):
    with pytest.raises(InvalidParameterError, match="heartbeat callback"):
        Heartbeat().add_callback(callback)
