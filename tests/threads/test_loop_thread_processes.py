"""``LoopThread`` and the life of processes: their end loses nothing that was accepted and hangs on nothing; forks are told."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.own_time(2)

PRELUDE = """
import anyio, asyncio, os, sys, threading, time
from mainspring import ConfigError, LoopNotRunningError, LoopThread
"""
LOOPS = pytest.mark.parametrize(
    "loop",
    [
        'backend_options={"use_uvloop": False}',
        'backend_options={"use_uvloop": True}',
        'backend="trio"',
    ],
    ids=["asyncio", "uvloop", "trio"],
)


def run(program, *, timeout=60):
    """What a program of its own prints, and how it ends."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@LOOPS
@pytest.mark.parametrize("dropped", [False, True])
def test_the_end_of_the_interpreter_loses_nothing_that_was_accepted(loop, dropped):
    status, out, err = run(f"""
        thread = LoopThread({loop})
        thread.start()

        async def task():
            await anyio.sleep(0.2)
            print("task")

        thread.post(lambda: time.sleep(0.1))
        thread.submit(task)
        for number in range(600):
            thread.post(lambda number=number: print(number))
        if {dropped}:
            del thread
    """)
    assert (status, err) == (0, "")
    assert sorted(out.split()) == sorted([*map(str, range(600)), "task"])


@LOOPS
def test_the_end_of_the_interpreter_does_not_hang(loop):
    """On a callback that blocks and on a task that swallows its cancellation."""
    status, out, err = run(f"""
        blocked = LoopThread({loop}, name="blocked", stop_timeout=0.1, cancel_grace=0.1)
        blocked.start()
        blocked.post(threading.Event().wait)
        stubborn = LoopThread({loop}, name="stubborn", stop_timeout=0.1, cancel_grace=0.1)
        stubborn.start()
        begun = threading.Event()

        async def swallow():
            begun.set()
            while True:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.01)

        stubborn.submit(swallow)
        begun.wait()
        print("over")
    """)
    assert (status, out) == (0, "over\n")
    assert "loop thread 'blocked' has not ended within 0.2 s" in err
    assert "loop thread 'stubborn' has not ended within 0.2 s" in err


def test_an_error_of_the_program_ends_it_too():
    status, out, err = run("""
        thread = LoopThread()
        thread.start()
        thread.post(lambda: print("called"))
        sys.exit(3)
    """)
    assert (status, out, err) == (3, "called\n", "")


@pytest.mark.slow
@LOOPS
def test_in_a_forked_child_each_call_is_refused_by_name(loop):
    status, out, err = run(f"""
        thread = LoopThread({loop}, name="parents")
        thread.start()
        idle = LoopThread({loop})
        with thread:
            child = os.fork()
            if child == 0:
                async def task(): pass
                for call in (lambda: thread.post(print), lambda: thread.submit(task), thread.stop, thread.start):
                    try:
                        print(call(), "was not refused")
                    except ConfigError as error:
                        assert f"loop thread 'parents' runs in process {{os.getppid()}}" in str(error), error
                        assert "make a new LoopThread after the fork" in str(error)
                with idle, LoopThread({loop}) as own:  # what nobody had started, and a new one, work
                    for works in (idle, own):
                        assert works.submit(anyio.sleep, 0).wait_sync(60) is None
                sys.exit(7)  # leaves the block, and the interpreter, which has threads of the parent's to stop
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            done = threading.Event()
            assert thread.post(done.set) and done.wait(60)
        print("over")
    """)
    assert (status, out, err) == (0, "over\n", "")


def test_a_child_forked_in_the_midst_of_a_start_or_stop_does_not_hang():
    """What threads of the parent's wait for then comes in the parent only: the child must not wait for it."""
    status, out, err = run("""
        held, go = threading.Event(), threading.Event()
        def slowly():
            held.set()
            go.wait(60)
            return asyncio.new_event_loop()
        idle = LoopThread(name="starting", backend_options={"loop_factory": slowly, "use_uvloop": False})
        running = LoopThread(name="stopping", stop_timeout=0, cancel_grace=30)
        running.start()
        running.post(lambda: go.wait(60))
        threads = [threading.Thread(target=idle.start), threading.Thread(target=running.stop)]
        for thread in threads:
            thread.start()
        held.wait(60)
        while running.state != "stopping":
            time.sleep(0.001)
        child = os.fork()
        if child == 0:
            for thread in (idle, running):
                for call in (thread.start, thread.stop, lambda: thread.post(print)):
                    try:
                        call()
                    except ConfigError:
                        continue
                    os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        go.set()
        for thread in threads:
            thread.join()
        idle.stop()
    """)
    assert (status, out, err) == (0, "0\n", "")


def test_a_forked_child_leaves_to_its_parent_an_error_that_nobody_asks_for():
    status, out, err = run("""
        async def bad():
            raise LookupError("no such row")

        thread = LoopThread(name="own")
        thread.start()
        ticket = thread.submit(bad)
        thread.stop()
        child = os.fork()
        if child == 0:
            del ticket
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("--", file=sys.stderr)
        del ticket
    """)
    assert (status, out) == (0, "")
    before, after = err.split("--\n")
    assert before == ""
    assert after.startswith(
        "bad, submitted to loop thread 'own', failed, and its ticket was not read: LookupError: no such row"
    )
