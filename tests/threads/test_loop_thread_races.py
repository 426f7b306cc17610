"""``LoopThread`` where its calls meet: rounds of threads that switch as often as they can.

``make soak`` plays 10,000 rounds of each race (MAINSPRING_RACE_ROUNDS says how many), and else there is a share of them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, cycle, islice

import anyio
import pytest

from loops import LOOPS
from mainspring import LoopNotRunningError, LoopThread
from mainspring.core.state_machine import LoopThreadState

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("MAINSPRING_RACE_ROUNDS", "2000"))
"""For each of the four tests here."""
PATIENCE = 60
POSTS = 8
SUBMITS = 4


@pytest.fixture(autouse=True)
def eager_switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def race():
    """Call functions at the same moment, each in a thread of its own; what they return."""
    with ThreadPoolExecutor(8) as pool:

        def run(*functions):
            barrier = threading.Barrier(len(functions))

            def begin(fn):
                barrier.wait(PATIENCE)
                return fn()

            return [future.result(PATIENCE) for future in [pool.submit(begin, fn) for fn in functions]]

        yield run


def rounds(started=True):
    for backend, options in islice(cycle(LOOPS.values()), ROUNDS):
        thread = LoopThread(name="racing", backend=backend, backend_options=options)
        if started:
            thread.start()
        yield thread
        assert thread.state is LoopThreadState.STOPPED
        assert "racing" not in {running.name for running in threading.enumerate()}


def post_many(thread, called, who):
    """Post until refused, at most so often; which were accepted."""
    posts = [(who, number) for number in range(POSTS)]
    return [post for post in posts if thread.post(partial(called.append, post))]


def agree(called, accepted):
    """Each accepted callback was called once, no other was, and each thread's in their order."""
    assert sorted(called) == sorted(accepted)
    for who in {who for who, _ in accepted}:
        assert [post for post in called if post[0] == who] == [post for post in accepted if post[0] == who]


def test_posts_from_four_threads_against_a_stop(race):
    met = 0
    for thread in rounds():
        called = []
        *accepted, _ = race(*(partial(post_many, thread, called, who) for who in range(4)), thread.stop)
        agree(called, list(chain.from_iterable(accepted)))
        met += 0 < len(called) < 4 * POSTS
    assert met  # some rounds were races


def test_stops_from_many_threads(race):
    def stop():
        return thread.stop(), thread.state

    for thread in rounds():
        called = []
        accepted = post_many(thread, called, 0)
        thread.post(thread.stop)
        assert race(stop, stop, stop, stop) == [(True, LoopThreadState.STOPPED)] * 4
        agree(called, accepted)


def test_a_stop_during_the_start(race):
    def start():
        try:
            thread.start()
        except LoopNotRunningError:
            return False
        return True

    outcomes = set()
    for thread in rounds(started=False):
        called = []
        started, _, accepted = race(start, thread.stop, partial(post_many, thread, called, 0))
        agree(called, accepted)
        outcomes.add(started)
    assert False in outcomes


def test_submits_against_a_stop(race):
    async def add(number):
        await anyio.lowlevel.checkpoint()
        called.append(number)
        return number + 1

    def submit_many(who):
        tickets = []
        for n in range(who * SUBMITS, who * SUBMITS + SUBMITS):
            begun.append(n)
            tickets.append((n, thread.submit(add, n)))
        return tickets

    def stop_amid(stop, submits):
        """Left to chance, a stop hardly ever comes between two submits."""
        while len(begun) < submits:
            time.sleep(0)
        stop()

    met = 0
    for number, thread in enumerate(rounds()):
        begun, called = [], []
        stop = partial(stop_amid, thread.stop, number % (2 * SUBMITS))
        *tickets, _ = race(partial(submit_many, 0), partial(submit_many, 1), stop)
        done = []
        for n, ticket in chain.from_iterable(tickets):
            assert ticket.is_ready  # a stop that has returned leaves none behind
            try:
                assert ticket.wait_sync(0) == n + 1
            except LoopNotRunningError:
                continue
            done.append(n)
        assert sorted(called) == sorted(done)
        met += 0 < len(done) < 2 * SUBMITS
    assert met
