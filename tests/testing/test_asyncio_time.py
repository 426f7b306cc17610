"""Virtual time on asyncio: code that uses asyncio itself, what holds the clock there, and which order a seed changes."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import anyio
import pytest

from mainspring import Context, InMemoryMailbox, LoopGroup, MainLoop, OffloadPool, open_mailbox
from mainspring.errors import ConfigError
from mainspring.testing import DeadlockError, VirtualClock, run_virtual
from mainspring.testing.asyncio_time import AsyncioTime

Main = Callable[[], Coroutine[Any, Any, Any]]
run = partial(run_virtual, backend="asyncio")


def held(work: Main) -> None:
    """Check that the clock stands still during ``work``, and jumps over an hour afterwards."""

    async def main() -> None:
        other = asyncio.create_task(asyncio.sleep(3600))
        await work()
        assert VirtualClock().now == 0
        await other
        assert VirtualClock().now == 3600

    run(main)


# ---------------------------------------------------------------------------------------------------- asyncio's own time


def test_asyncio_waits_by_the_virtual_clock() -> None:
    async def main() -> None:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        await asyncio.sleep(3600)
        assert loop.time() == anyio.current_time() == VirtualClock().now == 3600
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(event.wait(), 100)
        loop.call_later(50, event.set)
        assert await asyncio.wait_for(event.wait(), 100)
        assert VirtualClock().now == 3750
        async with asyncio.TaskGroup() as group:
            for seconds in (30, 10, 20):
                group.create_task(asyncio.sleep(seconds))
        assert VirtualClock().now == 3780

    run(main)


def test_a_timer_runs_at_its_instant_however_late_that_is() -> None:
    async def main() -> None:
        loop, ran = asyncio.get_running_loop(), []
        await asyncio.sleep(400 * 86_400 + 0.1)  # where a float is further from the next than asyncio's clock resolves
        now = loop.time()
        for instant in (now + 0.3, now + 0.3 + 1e-7, now + 0.1):
            loop.call_at(instant, lambda instant=instant: ran.append((instant, loop.time())))
        await asyncio.sleep(1)
        assert [instant for instant, _ in ran] == sorted(instant for instant, _ in ran)
        assert all(instant == at for instant, at in ran)

    run(main)


def test_timers_of_one_instant_follow_the_seed_and_callbacks_their_calls() -> None:
    async def main() -> tuple[list[int], list[int]]:
        soon: list[int] = []
        timed: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(9):
            loop.call_soon(soon.append, number)
            loop.call_at(5, timed.append, number)
        await asyncio.sleep(6)
        return soon, timed

    runs = [run(main, seed=seed) for seed in (0, 1, 1, 2)]
    assert all(soon == [*range(9)] for soon, _ in runs)
    zero, one, again, two = (tuple(timed) for _, timed in runs)
    assert one == again
    assert len({zero, one, two}) == 3


def test_advance_lets_what_is_due_run_and_nothing_else() -> None:
    async def main() -> None:
        virtual = VirtualClock()
        due, later = (asyncio.create_task(asyncio.sleep(seconds)) for seconds in (5, 6))
        await asyncio.sleep(0)
        with virtual.hold():
            await virtual.advance(5)
            assert (due.done(), later.done(), virtual.now) == (True, False, 5)
        await later
        assert virtual.now == 6

    run(main)


def test_anyio_waits_for_blocked_tasks_without_time() -> None:
    async def main() -> None:
        done = []

        async def work(steps: int) -> None:
            for _ in range(steps):
                await asyncio.sleep(0)
            done.append(steps)
            await asyncio.sleep(60)

        async def wait() -> None:
            await anyio.wait_all_tasks_blocked()
            assert (sorted(done), VirtualClock().now) == ([1, 50], 0)

        async with anyio.create_task_group() as group:
            for steps in (1, 50):
                group.start_soon(work, steps)
            group.start_soon(wait)
            with VirtualClock().hold():
                await wait()
            with anyio.CancelScope() as scope:
                scope.cancel()
                await anyio.wait_all_tasks_blocked()
            await asyncio.sleep(0.1)
            assert VirtualClock().now == 0.1

    run(main)


def test_a_deadlock_names_asyncio_tasks_too() -> None:
    async def child() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        VirtualClock().patience = 0.05
        task = asyncio.create_task(child(), name="the child")
        await asyncio.shield(task)

    with pytest.raises(
        DeadlockError, match=r"(?s)in main: await asyncio\.shield.*the child: .*in child: await asyncio"
    ):
        run(main)


def test_a_deadlock_ends_a_handler_that_swallows_its_cancellation_once() -> None:
    async def main() -> None:
        VirtualClock().patience = 0.05
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="no deadline is pending"):
        run(main)


# ---------------------------------------------------------------------------------------------- what holds the clock


def test_an_executor_holds_the_clock() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, time.sleep, 0.03)
        await asyncio.to_thread(time.sleep, 0.03)
        with ThreadPoolExecutor() as own:
            await loop.run_in_executor(own, time.sleep, 0.03)
        await loop.getaddrinfo("localhost", 80)

    held(work)


def test_a_call_that_is_given_up_no_longer_holds_it() -> None:
    async def main() -> None:
        release = threading.Event()
        call = asyncio.get_running_loop().run_in_executor(None, release.wait)
        call.cancel()
        await asyncio.sleep(100)
        assert VirtualClock().now == 100
        release.set()

    run(main)


def test_a_thread_may_wait_for_a_coroutine_that_sleeps() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def blocking() -> None:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(100), loop).result()

        await loop.run_in_executor(None, blocking)
        assert VirtualClock().now == 100

    run(main)


def test_a_thread_that_leaves_a_coroutine_to_the_loop_still_holds_it() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()

        def going_on() -> None:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(1), loop)
            time.sleep(0.05)

        await loop.run_in_executor(None, going_on)

    held(work)


def test_offload_pools_and_sqlite_mailboxes_hold_it(tmp_path: Any) -> None:
    async def work() -> None:
        async with OffloadPool("thread") as pool, open_mailbox(f"sqlite:///{tmp_path}/jobs.db", body=int) as jobs:
            await pool.run(time.sleep, 0.03)
            await jobs.send(1)
            (message,) = await jobs.receive()
            await message.acknowledge()

    held(work)


LIBRARY = """
import asyncio, queue, threading, time

class Connection:
    def __init__(self):
        self.calls = queue.SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while (call := self.calls.get()) is not None:
            future, seconds = call
            time.sleep(seconds)
            future.get_loop().call_soon_threadsafe(future.set_result, None)

    async def execute(self, seconds):
        future = asyncio.get_running_loop().create_future()
        self.calls.put((future, seconds))
        await future

    def close(self):
        self.calls.put(None)
"""


def test_a_library_with_a_thread_of_its_own_holds_it_while_a_call_is_out() -> None:
    library = ModuleType("library")
    exec(compile(LIBRARY, "/site-packages/library.py", "exec"), vars(library))

    async def main() -> None:
        other = asyncio.create_task(asyncio.sleep(3600))
        connection = library.Connection()
        await connection.execute(0.03)
        await connection.execute(0.03)
        assert VirtualClock().now == 0
        await other  # the thread waits for a call meanwhile, which holds nothing
        assert VirtualClock().now == 3600
        connection.close()

    run(main)


def test_threads_that_have_nothing_to_do_with_a_future_do_not_hold_it() -> None:
    async def main() -> None:
        timer = threading.Timer(60, print)  # as a plugin that ends tests that hang has it
        timer.start()
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(100, future.set_result, None)
        await future
        assert VirtualClock().now == 100
        timer.cancel()
        timer.join()

    run(main)


def test_a_thread_that_ends_just_before_a_jump_is_heard_first() -> None:
    class EndsNow(AsyncioTime):
        """Its real work ends at the very moment when it is looked for."""

        waiting: asyncio.Future[None] | None = None

        def real_work(self, main: Any) -> str | None:
            if self.waiting is not None:
                future, self.waiting = self.waiting, None
                ending = partial(future.get_loop().call_soon_threadsafe, future.set_result, None)
                thread = threading.Thread(target=ending)
                thread.start()
                thread.join()
            return None

    virtual = EndsNow(can_leave=True)

    async def main() -> None:
        other = asyncio.create_task(asyncio.sleep(3600))
        await asyncio.sleep(1)
        virtual.waiting = asyncio.get_running_loop().create_future()
        await virtual.waiting
        assert VirtualClock().now == 1
        await other

    anyio.run(virtual.judge.watch, main, backend_options=virtual.options)


def test_aiosqlite_and_sqlalchemy_hold_it(tmp_path: Any) -> None:
    aiosqlite = pytest.importorskip("aiosqlite", reason="aiosqlite is not installed")
    sqlalchemy = pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed")
    from sqlalchemy.ext.asyncio import create_async_engine

    async def main() -> None:
        other = asyncio.create_task(asyncio.sleep(3600))
        async with aiosqlite.connect(tmp_path / "one.db") as connection:
            await connection.execute("CREATE TABLE orders (number INTEGER)")
            await connection.execute("INSERT INTO orders VALUES (7)")
            await connection.commit()
            async with connection.execute("SELECT number FROM orders") as rows:
                assert [row async for row in rows] == [(7,)]
            assert VirtualClock().now == 0
            await asyncio.sleep(60)
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/two.db")
        async with engine.begin() as connection:
            await connection.execute(sqlalchemy.text("CREATE TABLE orders (number INTEGER)"))
            assert VirtualClock().now == 60
        await engine.dispose()
        await other
        assert VirtualClock().now == 3600

    run(main)


def test_a_child_process_holds_it_while_a_task_waits_for_its_end() -> None:
    async def work() -> None:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(0.1)")
        assert await child.wait() == 0
        child = await asyncio.create_subprocess_exec("echo", "done", stdout=subprocess.PIPE)
        assert (await child.communicate())[0] == b"done\n"

    held(work)


# ------------------------------------------------------------------------------------------------- sockets and pipes


def test_connections_within_the_event_loop_do_not_hold_it() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            await asyncio.sleep(10)
            writer.write(line)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1")
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"hello\n")
            assert await reader.readline() == b"hello\n"
            assert VirtualClock().now == 10
            await asyncio.sleep(100)  # the connection is open and idle
            assert VirtualClock().now == 110
            writer.close()
            await writer.wait_closed()

    run(main)


def answer_late(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(100)
        time.sleep(0.05)
        connection.sendall(b"late\n")


def test_a_connection_to_elsewhere_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer_late, args=(listener,)).start()

        async def work() -> None:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"question\n")
            assert await asyncio.wait_for(reader.readline(), 30) == b"late\n"
            writer.close()
            await writer.wait_closed()

        held(work)


def test_a_connection_that_stays_silent_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()

        async def main() -> None:
            VirtualClock().patience = 0.05
            _, writer = await asyncio.open_connection(host, port)
            try:
                await asyncio.sleep(1)
            finally:
                writer.close()

        with pytest.raises(
            DeadlockError, match=rf"a connection to \('127.0.0.1', {port}\) did not end within 0.05 real"
        ):
            run(main)


def test_a_pipe_holds_it_unless_its_other_end_is_here() -> None:
    async def work() -> None:
        ours, theirs = os.pipe()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.1); print()"], stdout=theirs)
        os.close(theirs)
        await anyio.wait_readable(ours)
        os.close(ours)
        child.wait()

    held(work)

    async def main() -> None:
        ours, theirs = os.pipe()
        with anyio.move_on_after(100):
            await anyio.wait_readable(ours)
        assert VirtualClock().now == 100
        os.close(ours)
        os.close(theirs)

    run(main)


def test_a_mailbox_on_a_server_is_refused() -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")

    async def main(url: str) -> None:
        async with open_mailbox(url):
            pass

    for url in ("postgresql://127.0.0.1:1/nothing", "redis://127.0.0.1:1/0", "nats://127.0.0.1:1"):
        with pytest.raises(ConfigError, match="time is real, and this event loop's is virtual; use memory:// here"):
            run(main, url)


# --------------------------------------------------------------------------------------------------------- handlers


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_handler_that_uses_asyncio_is_retried_and_renews_its_lease(virtual_clock: VirtualClock) -> None:
    attempts: list[float] = []

    async def handle(body: int, ctx: Context) -> None:
        attempts.append(virtual_clock.now)
        if ctx.attempt == 1:
            await asyncio.wait_for(asyncio.Event().wait(), 90)
        await asyncio.sleep(3600)
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.01)

    jobs = InMemoryMailbox("jobs", body=int)
    group = LoopGroup([MainLoop(jobs, handle, visibility_timeout=60)], watchdog_threshold=None)
    await jobs.send(1)
    report = await group.run(install_signals=False, until_empty=True)
    assert report.clean
    first, second = attempts
    assert first == 0
    assert 90 < second < 92
    assert second + 3600 <= virtual_clock.now < second + 3601
