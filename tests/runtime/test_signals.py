"""ShutdownCoordinator with real signals: one receiver a process, handlers put back, early signals held."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial

import anyio
import pytest
from anyio import to_thread

from mainspring import ShutdownCoordinator
from mainspring.errors import ConfigError

pytestmark = [pytest.mark.anyio, pytest.mark.every_loop]

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


def raise_signal(signum=USR1):
    os.kill(os.getpid(), signum)


async def until(condition):
    with anyio.fail_after(60):
        while not condition():
            await anyio.sleep(0.001)


# --------------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, USR1])
async def test_a_signal_triggers_it(signum):
    called = []
    async with ShutdownCoordinator((signum,)) as coordinator:
        coordinator.register(lambda: called.append(coordinator.reason))
        assert not coordinator.triggered
        raise_signal(signum)
        await until(lambda: called)
        assert coordinator.triggered
    assert called == [signum.name]


async def test_the_second_and_the_third_signal_are_told_apart():
    repeats = []
    called = []
    async with ShutdownCoordinator((USR1, USR2), on_repeat=lambda *told: repeats.append(told)) as coordinator:
        coordinator.register(lambda: called.append(True))
        raise_signal(USR1)
        await until(lambda: called)
        raise_signal(USR2)
        await until(lambda: len(repeats) == 1)
        raise_signal(USR1)
        await until(lambda: len(repeats) == 2)
    assert repeats == [(USR2, 2), (USR1, 3)]
    assert called == [True]


async def test_the_first_signal_after_a_trigger_counts_as_a_repeat():
    """Somebody asked for a shutdown already; the operator's signal means more than that."""
    repeats = []
    async with ShutdownCoordinator((USR1,), on_repeat=lambda *told: repeats.append(told)) as coordinator:
        coordinator.trigger()
        raise_signal()
        await until(lambda: repeats)
    assert repeats == [(USR1, 1)]


async def test_earlier_handlers_are_put_back():
    def mine(signum: int, frame: object) -> None: ...

    before = signal.signal(USR1, mine)
    try:
        async with ShutdownCoordinator((USR1,)):
            assert signal.getsignal(USR1) is not mine
        assert signal.getsignal(USR1) is mine
    finally:
        signal.signal(USR1, before)
    assert signal.getsignal(USR1) is before


async def test_they_are_put_back_after_an_error_too():
    before = signal.getsignal(USR1)
    with pytest.raises(LookupError):
        async with ShutdownCoordinator((USR1,)):
            raise LookupError
    assert signal.getsignal(USR1) is before


async def test_several_coordinators_share_one_receiver():
    """Two groups of one process; the first to come is the first to go, and the other still hears."""
    heard = []

    async def listen(name, started, leave):
        async with ShutdownCoordinator((USR1,)) as coordinator:
            coordinator.register(lambda: heard.append(name))
            started.set()
            await leave.wait()

    before = signal.getsignal(USR1)
    events = [(anyio.Event(), anyio.Event()) for _ in range(3)]
    async with anyio.create_task_group() as tasks:
        for name, (started, leave) in zip("abc", events, strict=True):
            tasks.start_soon(listen, name, started, leave)
            await started.wait()
        events[0][1].set()
        await anyio.wait_all_tasks_blocked()
        raise_signal()
        await until(lambda: len(heard) == 2)
        for _, leave in events:
            leave.set()
    assert heard == ["b", "c"]
    assert signal.getsignal(USR1) is before


async def test_no_signal_falls_between_two_receivers():
    heard = []

    async with ShutdownCoordinator((USR1,), on_repeat=lambda *told: heard.append(told)) as stays:
        stays.register(lambda: heard.append("first"))
        for number in range(20):
            async with ShutdownCoordinator((USR1,)):
                await anyio.lowlevel.checkpoint()
                raise_signal()
            await until(lambda number=number: len(heard) == number + 1)


async def test_signals_reach_the_main_thread_only():
    def elsewhere() -> None:
        async def main() -> None:
            with pytest.raises(ConfigError, match="signals reach the main thread only"):
                async with ShutdownCoordinator((USR1,)):
                    pytest.fail("it opened")
            async with ShutdownCoordinator(()) as coordinator:  # without signals it may
                coordinator.trigger()

        anyio.run(main)

    await to_thread.run_sync(elsewhere)


# --------------------------------------------------------------------------------------------------------- outside a block


def test_outside_of_a_block_plain_callbacks_are_called_by_the_trigger():
    called = []
    coordinator = ShutdownCoordinator()
    coordinator.register(lambda: called.append("before"))
    coordinator.trigger()
    coordinator.register(lambda: called.append("after"))
    assert called == ["before", "after"]


async def test_async_ones_wait_for_a_block():
    called = []

    async def callback() -> None:
        called.append("async")

    coordinator = ShutdownCoordinator(())
    coordinator.register(callback)
    coordinator.register(lambda: called.append("plain"))
    coordinator.trigger()
    assert called == []
    async with coordinator:
        await until(lambda: len(called) == 2)
    assert called == ["async", "plain"]


async def test_the_current_one_is_found():
    assert ShutdownCoordinator.get() is None
    async with ShutdownCoordinator(()) as coordinator:
        assert ShutdownCoordinator.get() is coordinator
        async with ShutdownCoordinator(()):
            assert ShutdownCoordinator.get() is coordinator  # the outer one stays
    assert ShutdownCoordinator.get() is None


async def test_an_installed_one_is_found_before_it_is_entered():
    coordinator = ShutdownCoordinator.install(signals=(USR1,))
    assert ShutdownCoordinator.get() is coordinator
    async with coordinator:
        assert ShutdownCoordinator.get() is coordinator
        raise_signal()
        await until(lambda: coordinator.triggered)
    assert ShutdownCoordinator.get() is None


# --------------------------------------------------------------------------------------------------------------- installed


async def test_install_returns_the_one_that_is_installed_or_entered():
    installed = ShutdownCoordinator.install((USR1,))
    assert ShutdownCoordinator.install() is installed
    assert ShutdownCoordinator.install((USR1,)) is installed
    with pytest.raises(ConfigError, match="is for other signals \\(SIGUSR1\\)"):
        ShutdownCoordinator.install((USR1, USR2))
    async with installed:
        assert ShutdownCoordinator.install() is installed
    assert ShutdownCoordinator.get() is None
    async with ShutdownCoordinator.install((USR1,)) as another:
        assert another is not installed


async def test_a_nested_block_leaves_the_outer_one_as_it_is():
    called = []
    async with ShutdownCoordinator.install((USR1,)) as outer:
        outer.register(lambda: called.append("outer"))
        async with ShutdownCoordinator.install() as inner:
            inner.register(lambda: called.append("inner"))
        assert ShutdownCoordinator.get() is outer
        assert called == []
        raise_signal()
        await until(lambda: called)
    assert called == ["outer", "inner"]
    assert ShutdownCoordinator.get() is None


@pytest.mark.parametrize("same", [False, True])
async def test_of_blocks_side_by_side_the_one_that_stays_hears(same):
    """Also where both have entered the same one, and the first to come is the first to go."""
    called = []
    first = ShutdownCoordinator((USR1,))
    second = first if same else ShutdownCoordinator((USR1,))
    second.register(lambda: called.append(True))
    leave = {first: anyio.Event()}, {second: anyio.Event()}

    async def stay(number, *, task_status):
        [(coordinator, left)] = leave[number].items()
        async with coordinator:
            task_status.started()
            await left.wait()

    async with anyio.create_task_group() as tasks:
        await tasks.start(stay, 0)
        await tasks.start(stay, 1)
        leave[0][first].set()
        await anyio.wait_all_tasks_blocked()
        assert ShutdownCoordinator.get() is second
        raise_signal()
        await until(lambda: called)
        leave[1][second].set()
    assert ShutdownCoordinator.get() is None


DROPPED = """
import gc, sys
from mainspring import ShutdownCoordinator

def close_database(): ...
async def close_more(): ...

coordinator = ShutdownCoordinator.install()
coordinator.register(close_database)
coordinator.register(close_more)
if sys.argv[1] == "entered":
    with coordinator:
        pass
elif sys.argv[1] == "triggered":
    coordinator.unregister(close_more)
    coordinator.trigger()
"""


@pytest.mark.parametrize(("how", "warned"), [("never entered", True), ("entered", False), ("triggered", False)])
def test_callbacks_that_nothing_has_called_are_told_at_the_end_of_the_interpreter(how, warned):
    program = subprocess.run([sys.executable, "-c", DROPPED, how], capture_output=True, text=True, timeout=60)
    assert program.returncode == 0
    assert ("nothing called its callbacks (close_database, close_more)" in program.stderr) is warned
    assert warned or not program.stderr


EMBEDDED = """
import os, signal, sys
import anyio
from mainspring import InMemoryMailbox, LoopGroup, MainLoop, ShutdownCoordinator

def close_database(): ...
async def handle(job: str) -> None: ...

coordinator = ShutdownCoordinator.install(() if sys.argv[1] == "by hand" else (signal.SIGTERM,))
coordinator.register(close_database)

async def main():
    async with LoopGroup([MainLoop(InMemoryMailbox(), handle)]):
        if sys.argv[1] == "entered":
            async with coordinator:
                pass

anyio.run(main)
os.kill(os.getpid(), signal.SIGTERM)  # as uvicorn does with the signal that has stopped it
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "warned"), [("never entered", True), ("entered", False), ("by hand", False)])
def test_an_embedded_group_tells_of_callbacks_that_nothing_has_called(how, warned):
    program = subprocess.run([sys.executable, "-c", EMBEDDED, how], capture_output=True, text=True, timeout=60)
    assert program.returncode == -signal.SIGTERM
    assert ("nothing called its callbacks (close_database)" in program.stderr) is warned


# ------------------------------------------------------------------------------------------------- without an event loop


def test_a_plain_loop_ends_at_a_signal():
    called, rounds = [], 0
    before = signal.getsignal(USR1)
    with ShutdownCoordinator.install((USR1,)) as coordinator:
        assert ShutdownCoordinator.get() is coordinator
        coordinator.register(lambda: called.append("first"))
        coordinator.register(lambda: called.append(coordinator.reason))
        while not coordinator.triggered:
            rounds += 1
            if rounds == 3:
                raise_signal()
        coordinator.register(lambda: called.append("late"))
        assert called == ["first", "SIGUSR1", "late"]
    assert rounds >= 3
    assert ShutdownCoordinator.get() is None
    assert signal.getsignal(USR1) is before


def test_there_async_ones_are_called_when_the_block_is_left():
    called = []

    async def close(name):
        await anyio.sleep(0)
        called.append(name)

    with ShutdownCoordinator.install(()) as coordinator:
        coordinator.register(partial(close, "async"))
        coordinator.register(lambda: close("in a plain one"))
        coordinator.register(lambda: called.append("plain"))
        coordinator.trigger()
        assert called == ["plain"]
    assert sorted(called) == ["async", "in a plain one", "plain"]


def test_there_a_raising_callback_and_another_signal_disturb_nothing(caplog):
    def broken():
        raise ValueError("broken callback")

    repeats, called = [], []
    with ShutdownCoordinator((USR1,), on_repeat=lambda *told: repeats.append(told)) as coordinator:
        coordinator.register(broken)
        coordinator.register(lambda: called.append(True))
        raise_signal()
        raise_signal()
        with ShutdownCoordinator.install(), pytest.raises(LookupError):  # the same again
            raise LookupError
        raise_signal()
    assert called == [True]
    assert repeats == [(USR1, 2), (USR1, 3)]
    assert "broken callback" in caplog.text


async def test_in_an_event_loop_a_plain_block_is_refused():
    with pytest.raises(ConfigError, match="use `async with`"), ShutdownCoordinator.install(()):
        pytest.fail("it opened")
    async with ShutdownCoordinator.install():
        pass


def test_an_event_loop_within_a_plain_block_receives_for_both(anyio_backend):
    backend, options = anyio_backend
    called = []

    async def main():
        async with ShutdownCoordinator.install() as same, ShutdownCoordinator((USR1,)) as other:
            assert same is outer
            other.register(lambda: called.append("other"))
            raise_signal()
            await until(lambda: len(called) == 2)

    with ShutdownCoordinator.install((USR1,)) as outer:
        outer.register(lambda: called.append("outer"))
        anyio.run(main, backend=backend, backend_options=options)
        assert ShutdownCoordinator.get() is outer
        assert outer.triggered
    assert sorted(called) == ["other", "outer"]


def test_a_forked_child_does_not_receive_for_its_parent():
    before = signal.getsignal(USR1)
    with ShutdownCoordinator.install((USR1,)) as coordinator:
        child = os.fork()
        if not child:
            os._exit(signal.getsignal(USR1) is not before or ShutdownCoordinator.get() is not None)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        raise_signal()
        assert coordinator.triggered


def test_a_held_signal_reaches_a_plain_block():
    code = (
        "import os, signal; from mainspring.runtime.signals import EarlySignals, ShutdownCoordinator; EarlySignals();"
        "os.kill(os.getpid(), signal.SIGTERM);"
        "c = ShutdownCoordinator.install(); c.__enter__(); print(c.triggered, c.reason)"
    )
    program = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert program.stdout == "True SIGTERM\n"


# --------------------------------------------------------------------------------------------------------- early signals

EARLY = """
import os, signal, sys, time
from mainspring.runtime.signals import EarlySignals, ShutdownCoordinator
EarlySignals()
print("ready", flush=True)
while not sys.stdin.readline().strip():
    pass

import anyio

async def main():
    async with ShutdownCoordinator((signal.SIGTERM, signal.SIGINT), on_repeat=lambda *t: print("repeat", flush=True)) as c:
        with anyio.fail_after(60):
            while not c.triggered:
                await anyio.sleep(0.001)
        print(c.reason, flush=True)
        await anyio.sleep(0.05)

anyio.run(main, backend=sys.argv[1], backend_options={"use_uvloop": True} if sys.argv[2] == "uvloop" else {})
"""


def early(*loop):
    return subprocess.Popen(
        [sys.executable, "-c", EARLY, *loop], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop", [("asyncio", ""), ("asyncio", "uvloop"), ("trio", "")], ids=lambda loop: "-".join(loop)
)
def test_a_signal_before_there_is_an_event_loop_is_held_for_it(loop):
    with early(*loop) as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGTERM)
        time.sleep(0.1)  # the kernel delivers when it likes; nothing can be seen of it from here
        rest, _ = program.communicate("go\n", timeout=30)
    assert rest.splitlines() == ["SIGTERM"]
    assert program.returncode == 0


def test_a_second_signal_before_there_is_an_event_loop_ends_the_process():
    with early("asyncio", "") as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        program.send_signal(signal.SIGINT)
        assert program.wait(30) == 128 + signal.SIGINT


@pytest.mark.parametrize(
    "signals",
    [
        None,
        5,
        ["TERM"],
        "TERM",
        [-1],
        [0],
        [99_999],
        [True],
        [1.5],
        pytest.param([10**5_000], id="digits"),
        [signal.SIGKILL],
    ],
)
@pytest.mark.parametrize("make", [ShutdownCoordinator, ShutdownCoordinator.install])
def test_signals_that_no_handler_can_be_installed_for_are_refused_by_name(make, signals):
    with pytest.raises(ConfigError, match=r"signals must be signals that a process can handle, as \(signal\.SIGTERM"):
        make(signals)


def test_what_cannot_be_called_at_a_repeated_signal_is_refused():
    with pytest.raises(ConfigError, match="on_repeat must be a function, or None, not 5"):
        ShutdownCoordinator(on_repeat=5)
