"""The registry of what there is one of per process, and what a fork does to it."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
from types import ModuleType

import anyio
import anyio.to_thread
import pytest

from mainspring import DeadLetterPolicy, InMemoryMailbox, LoopGroup, LoopThread, MainLoop
from mainspring.core import process
from mainspring.core.introspection import bearable
from mainspring.errors import ConfigError


def test_what_is_claimed_is_refused_to_others_until_it_is_given_back():
    process.claim("test thing", "group a")
    try:
        with pytest.raises(ConfigError, match="group b cannot have the process's test thing: group a has it"):
            process.claim("test thing", "group b")
    finally:
        process.disclaim("test thing")
    process.disclaim("test thing")
    process.claim("test thing", "group b")
    process.disclaim("test thing")


class Thing:
    pass


def test_shared_objects_live_while_they_are_used():
    one = process.shared("test", "name", Thing)
    assert process.shared("test", "name", Thing) is one
    assert process.shared("test", "other", Thing) is not one
    assert process.shared("test 2", "name", Thing) is not one
    number = id(one)
    del one
    gc.collect()
    again = process.shared("test", "name", lambda: [Thing(), number][0])
    assert isinstance(again, Thing)


def test_one_object_though_many_threads_ask_at_once():
    made, got = [], []
    barrier = threading.Barrier(8)

    def make() -> Thing:
        made.append(Thing())
        return made[-1]

    def ask() -> None:
        barrier.wait()
        got.append(process.shared("test threads", "name", make))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert set(map(id, got)) == {id(made[0])}


def test_the_current_one_of_a_kind():
    assert process.current("test kind") is None
    process.set_current("test kind", 5)
    assert process.current("test kind") == 5
    process.set_current("test kind", None)
    assert process.current("test kind") is None


FORK = """
import os, sys
from mainspring.core import process
process.claim("thing", "the parent")
process.set_current("kind", 5)
kept = process.shared("shared", "name", type("Thing", (), {}))
pid = os.fork()
if pid == 0:
    process.claim("thing", "the child")
    fresh = process.shared("shared", "name", type("Thing", (), {}))
    os._exit(0 if process.current("kind") is None and fresh is not kept else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), process.current("kind"))
"""


def test_a_fork_takes_none_of_it_along():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "5"]


LET_GO = """
import gc, os, signal
from mainspring.core import process
class Thing:
    def __init__(self, name): self.name = name
    def forget(self): said.append(self.name)
said = []
things = [Thing(name) for name in ("first", "second", "gone", "withdrawn")]
for thing in things:
    process.on_fork(thing, Thing.forget)
process.off_fork(things[3])
process.off_fork(things[3])
del things[2], thing
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
pid = os.fork()
if pid == 0:
    if said != ["second", "first"] or signal.set_wakeup_fd(-1) != -1 or signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        os._exit(1)
    grandchild = os.fork()
    if grandchild == 0:
        os._exit(len(said))
    os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said, signal.set_wakeup_fd(-1) == write)
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_a_forked_child_has_let_go_of_what_is_its_parents():
    """The last registered first, and each once; signals come again as before on both sides."""
    done = subprocess.run([sys.executable, "-c", LET_GO], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["2 [] True", "set()"]


COLLECTS = """
import gc, os, signal
from mainspring.core import process
class Thing:
    def __init__(self): self.itself = self
    def forget(self): said.append("forgotten")
class Key:
    def __hash__(self):
        if is_forking:
            gc.collect()
        return id(self)
gc.disable()
is_forking, said, thing = False, [], Thing()
process.on_fork(thing, Thing.forget)
for _ in range(3):
    process.shared("things", Key(), Thing)  # which only itself refers to
is_forking = True
pid = os.fork()
if pid == 0:
    os._exit(len(said) + 10 * len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_collection_of_garbage_in_a_forked_child_leaves_nothing_of_the_parents():
    done = subprocess.run([sys.executable, "-c", COLLECTS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1"]


EARLY = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signum))
from mainspring.core import process
for signum in (signal.SIGINT, signal.SIGTERM):
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signum)
"""


def test_a_signal_that_comes_before_any_code_of_a_forked_child_ends_it():
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout.split(), done.stderr) == (["True", "True"], "")


@pytest.mark.anyio
async def test_the_event_loop_and_its_library(anyio_backend):
    assert process.async_library() == anyio_backend[0]
    assert process.event_loop() is process.event_loop()


@pytest.mark.anyio
async def test_call_soon_reaches_the_loop_from_another_thread():
    called = anyio.Event()
    threads = []

    def note() -> None:
        threads.append(threading.current_thread())
        called.set()

    loop = process.event_loop()
    await anyio.to_thread.run_sync(process.call_soon, loop, note)
    with anyio.fail_after(20):
        await called.wait()
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_call_soon_on_a_loop_that_is_gone_does_nothing(backend):
    async def get() -> object:
        return process.event_loop()

    process.call_soon(anyio.run(get, backend=backend), pytest.fail)


def test_there_is_no_loop_outside_of_one():
    with pytest.raises(RuntimeError):
        process.event_loop()
    assert not process.in_event_loop()


@pytest.mark.anyio
async def test_a_bare_callback_runs_in_the_event_loop_though_anyio_does_not_know_it(anyio_backend):
    """Whoever blocked there would stop everything just the same."""
    loop, answers, over = process.event_loop(), [], anyio.Event()

    def ask() -> None:
        answers.append(process.in_event_loop())
        if len(answers) == 2:
            over.set()

    assert process.in_event_loop()
    await anyio.to_thread.run_sync(process.call_soon, loop, ask)
    contextvars.Context().run(process.call_soon, loop, ask)
    with anyio.fail_after(60):
        await over.wait()
    assert answers == [True, True]
    assert not await anyio.to_thread.run_sync(process.in_event_loop)


def test_so_it_is_under_a_plain_asyncio_run():
    """With and without sniffio, which anyio asks where it is installed."""
    answers = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: answers.append(process.in_event_loop()))
        loop.call_soon(lambda: answers.append(process.in_event_loop()), context=contextvars.Context())
        loop.call_later(0, lambda: answers.append(process.in_event_loop()))
        await anyio.sleep(0.01)

    asyncio.run(main())
    assert answers == [True, True, True]


@pytest.mark.parametrize("name", ["asyncio", "trio", "sniffio", "concurrent.futures"])
def test_a_library_that_another_thread_is_importing_runs_nothing(name, monkeypatch):
    """It is among the modules already, and empty."""
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    error = ValueError()
    assert not process.in_event_loop()
    assert not process.in_task_of(object())
    assert process.carried_context(None).run(lambda: 1) == 1
    assert bearable(error, "it") is error


def test_while_another_thread_imports_trio_sync_calls_and_handlers_work(monkeypatch):
    """They ended in an AttributeError: httpx, for one, imports trio at its first use."""
    started, go_on = threading.Event(), threading.Event()

    async def fail(_: int) -> None:
        started.set()
        await anyio.to_thread.run_sync(go_on.wait)
        raise ValueError("its own")

    async def serve(box: InMemoryMailbox) -> None:
        once = DeadLetterPolicy(max_attempts=1)
        await LoopGroup([MainLoop(box, fail, dead_letter=once)]).run(install_signals=False, until_empty=True)

    async def keep(box: InMemoryMailbox, opened: anyio.Event, closed: anyio.Event) -> None:
        async with box:
            opened.set()
            await closed.wait()

    with LoopThread(backend="asyncio") as thread:
        box = InMemoryMailbox(body=int)
        opened, closed = anyio.Event(), anyio.Event()
        kept = thread.submit(keep, box, opened, closed)
        thread.submit(opened.wait).wait_sync(10)
        box.sync.send(1)
        served = thread.submit(serve, box)
        assert started.wait(10)
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "trio", ModuleType("trio"))
            patched.delitem(sys.modules, "trio.testing", raising=False)
            box.sync.send(2)
            go_on.set()
            served.wait_sync(10)
            letters = box.sync.dead_letters()
        thread.post(closed.set)
        kept.wait_sync(10)
    assert [letter.error for letter in letters] == ["its own"] * 2


def test_the_main_thread_is_told_from_others():
    answers = [process.in_main_thread()]
    thread = threading.Thread(target=lambda: answers.append(process.in_main_thread()))
    thread.start()
    thread.join()
    assert answers == [True, False]
