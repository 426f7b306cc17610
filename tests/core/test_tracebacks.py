"""Which line a report names."""

from __future__ import annotations

import gc
import importlib
import json
import linecache
import os
import pdb
import sys
import threading
import types
import weakref
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from mainspring.core.tracebacks import all_stacks, in_debugger, where, where_raised, where_thread
from mainspring.errors import SerializationError
from mainspring.mailbox.codec import Codec
from mainspring.runtime.scope import DaemonScope

pytestmark = pytest.mark.anyio

PATIENCE = 60


async def plain():
    await anyio.sleep_forever()  # line: plain


async def nested():
    await plain()


async def numbers():
    yield 1
    await anyio.sleep_forever()  # line: numbers
    yield 2


async def iterating():
    async for _ in numbers():
        pass


@asynccontextmanager
async def opened():
    await anyio.sleep_forever()  # line: opened
    yield


async def opening():
    async with opened():
        pass


class Wrapped:
    def __await__(self):
        return plain().__await__()


class Generated:
    def __await__(self):
        yield from plain().__await__()


async def awaiting(thing):
    await thing


async def in_a_group():
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep_forever)
        await anyio.sleep_forever()  # line: in_a_group


async def in_a_thread():
    await anyio.to_thread.run_sync(threading.Event().wait, 0.2)  # line: in_a_thread


def line_of(name):
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith(f"# line: {name}"))
    return f"{__file__}:{number} in {name}: {lines[number - 1].strip()}"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (plain, "plain"),
        (nested, "plain"),
        (iterating, "numbers"),
        (opening, "opened"),
        (partial(awaiting, Wrapped()), "plain"),
        (partial(awaiting, Generated()), "plain"),
        (in_a_group, "in_a_group"),
    ],
)
async def test_a_suspended_task_is_named_by_its_innermost_line(function, name):
    async with DaemonScope() as scope:
        daemon = scope.start_soon(function)
        await wait_all_tasks_blocked()
        assert daemon.where == line_of(name)


async def test_a_task_that_waits_for_a_thread_is_named_by_the_line_that_sent_it():
    async with DaemonScope() as scope:
        daemon = scope.start_soon(in_a_thread)
        await checkpoint()
        await checkpoint()
        assert daemon.where == line_of("in_a_thread")
        await daemon.wait()
        assert daemon.where == ""


async def test_an_ended_coroutine_stands_nowhere():
    coroutine = checkpoint()
    await coroutine
    assert where(coroutine) == ""
    assert where(object()) == ""


async def test_without_a_line_of_the_users_the_packages_own_is_named_before_the_event_loops():
    async with DaemonScope() as scope:
        daemon = scope.start_soon(anyio.sleep_forever)
        await wait_all_tasks_blocked()
        assert "scope.py" in daemon.where


async def test_where_everything_is_the_event_loops_code_the_innermost_line_of_that_is_named():
    coroutine = anyio.sleep_forever()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: coroutine)
        await wait_all_tasks_blocked()
        assert "/asyncio/" in where(coroutine) or "/trio/" in where(coroutine) or "/anyio/" in where(coroutine)
        group.cancel_scope.cancel()
    assert where(coroutine) == ""


def test_a_users_directory_may_have_the_name_of_an_event_loop():
    module = types.ModuleType("shop")
    exec(compile("async def wait(inner):\n    await inner\n", "/srv/trio/asyncio/shop.py", "exec"), module.__dict__)
    sleep = anyio.sleep_forever()
    coroutine = module.wait(sleep)

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: coroutine)
            await wait_all_tasks_blocked()
            assert where(coroutine) == "/srv/trio/asyncio/shop.py:2 in wait"
            group.cancel_scope.cancel()

    anyio.run(main)


@pytest.fixture
def waiting_thread():
    release = threading.Event()

    def rest():
        release.wait(30)  # line: rest

    thread = threading.Thread(target=rest, name="resting")
    thread.start()
    yield thread
    release.set()
    thread.join()


def test_a_thread_is_named_by_the_users_line(waiting_thread):
    while "wait" not in where_thread(waiting_thread.ident):
        pass
    assert where_thread(waiting_thread.ident) == line_of("rest")
    assert not in_debugger(waiting_thread.ident)


def test_of_a_thread_in_the_packages_own_code_that_is_named_and_not_the_program_that_runs_the_loop():
    blocked, release = threading.Event(), threading.Event()
    namespace = {"__name__": "mainspring.something", "blocked": blocked, "release": release}
    source = "async def settle():\n    blocked.set()\n    release.wait(30)\n"
    exec(compile(source, "/own/something.py", "exec"), namespace)
    thread = threading.Thread(target=lambda: anyio.run(namespace["settle"]))
    thread.start()
    blocked.wait(30)
    try:
        assert where_thread(thread.ident).startswith("/own/something.py:")
    finally:
        release.set()
        thread.join()


def test_a_thread_that_ended_stands_nowhere():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert where_thread(thread.ident) == ""


def test_a_thread_in_nothing_but_plumbing_is_named_by_its_innermost_line():
    event = threading.Event()
    thread = threading.Thread(target=event.wait, args=(30,))
    thread.start()
    try:
        while "in wait" not in where_thread(thread.ident):
            pass
    finally:
        event.set()
        thread.join()


def test_the_stacks_name_every_thread_but_those_left_out(waiting_thread):
    text = all_stacks()
    assert text.index("Thread MainThread") < text.index("Thread resting")
    assert "release.wait(30)" in text
    assert f"({waiting_thread.ident}), most" not in all_stacks(without=(waiting_thread.ident,))


def test_a_thread_that_a_debugger_holds_is_known():
    read, write = os.pipe()
    with os.fdopen(read) as commands, os.fdopen(write, "w") as keyboard, open(os.devnull, "w") as screen:

        def stop_here():
            pdb.Pdb(stdin=commands, stdout=screen, nosigint=True, readrc=False).set_trace()
            rest = 1  # a line to stop at
            del rest

        thread = threading.Thread(target=stop_here)
        thread.start()
        try:
            while thread.is_alive() and not in_debugger(thread.ident):
                pass
            assert thread.is_alive()
        finally:
            keyboard.write("continue\n")
            keyboard.flush()
            thread.join()


# -------------------------------------------------------------------------------------------------------------- libraries

LIBRARY = """
import contextlib

async def wait(wait): await wait()

def call(fn): fn()

def fail(): raise LookupError("no such row")

@contextlib.contextmanager
def block(fn):
    fn()
    yield
"""


@pytest.fixture(params=["site-packages", "dist-packages"])
def library(request, tmp_path):
    """An installed module."""
    found = types.ModuleType("client")
    exec(compile(LIBRARY, f"{tmp_path}/{request.param}/client/__init__.py", "exec"), vars(found))
    return found


async def test_a_task_in_a_library_is_named_by_the_users_line(library):
    async def handle():
        await library.wait(anyio.sleep_forever)  # line: library

    async with anyio.create_task_group() as tasks:
        coroutine = handle()
        tasks.start_soon(awaiting, coroutine)
        await wait_all_tasks_blocked()
        assert "in handle: await library.wait(anyio.sleep_forever)" in where(coroutine)
        bare = library.wait(anyio.sleep_forever)
        tasks.start_soon(awaiting, bare)
        await wait_all_tasks_blocked()
        assert "client/__init__.py:4 in wait" in where(bare), "where there is none of the user's, the library's"
        tasks.cancel_scope.cancel()


def test_an_error_out_of_a_library_is_named_by_the_users_line(library):
    for fail in (library.fail, lambda: json.loads("{"), lambda: importlib.import_module("no_such_module")):
        with pytest.raises((LookupError, ValueError, ImportError)) as caught:
            fail()
        assert f"{__file__}:" in where_raised(caught.value)


def test_an_error_of_this_package_names_no_line_of_it():
    """What it says is about the user's data; where in the package that was found out helps nobody."""
    with pytest.raises(SerializationError) as caught:
        Codec(int).encode("five")
    assert "Codec(int).encode" in where_raised(caught.value)
    inside = caught.value.__traceback__.tb_next
    assert where_raised(caught.value.with_traceback(inside)) == ""
    assert "codec.py:" in where_raised(TypeError("a mistake of ours").with_traceback(inside))


async def test_a_thread_in_a_library_is_named_by_the_users_line(library):
    lines = []

    def look_from_there():
        library.call(types.FunctionType(LOOK, {"lines": lines, "__name__": "client", "where_thread": where_thread}))

    def look_in_its_block():
        with library.block(
            types.FunctionType(LOOK, {"lines": lines, "__name__": "client", "where_thread": where_thread})
        ):
            pass

    for fn in (look_from_there, look_in_its_block):
        await anyio.to_thread.run_sync(fn)
    assert "in look_from_there: " in lines[0]
    assert "in look_in_its_block: " in lines[1]


LOOK = compile(
    "lines.append(where_thread(__import__('threading').get_ident()))", "/x/site-packages/client/look.py", "exec"
)


STEPS = ("sys._current_frames(", ".f_back", ".cr_frame", ".gi_frame", ".ag_frame")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 and later collect no garbage within a call")
def test_no_garbage_is_collected_in_the_midst_of_a_step_through_a_stack():
    """A finalizer would then let another thread go on, and end the very frame: a segmentation fault, or a deadlock."""

    @types.coroutine
    def turn():
        yield

    async def waits(depth):
        await (waits(depth - 1) if depth else turn())

    def descend(depth):
        if depth:
            return descend(depth - 1)
        standing.set()
        return leave.wait(PATIENCE)

    def collects(phase, _):
        frame = sys._getframe(1)
        collected.append(linecache.getline(frame.f_code.co_filename, frame.f_lineno))

    standing, leave, collected = threading.Event(), threading.Event(), []
    other = threading.Thread(target=descend, args=(20,))
    other.start()
    assert standing.wait(PATIENCE)
    task = waits(20)
    task.send(None)
    before = gc.get_threshold()
    gc.callbacks.append(collects)
    gc.set_threshold(1)
    try:
        for look in (where_thread, in_debugger, lambda _: all_stacks()):
            look(other.ident)
        where(task)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collects)
        leave.set()
        other.join()
        task.close()
    assert collected
    assert not [line for line in collected if any(step in line for step in STEPS)]
    assert gc.isenabled()


@pytest.mark.parametrize("look", [where_thread, in_debugger, lambda _: all_stacks()])
def test_a_look_at_the_stacks_keeps_nothing(look):
    """Of all that is on them, until garbage is collected."""

    class Local:
        pass

    def looking():
        local = Local()
        look(threading.get_ident())
        return weakref.ref(local)

    gc.disable()
    try:
        assert looking()() is None
    finally:
        gc.enable()
