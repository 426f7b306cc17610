"""``mailbox.sync``: the calls of a mailbox for threads that are not async."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.to_thread
import pytest

from mainspring import (
    CancelOutcome,
    ConfigError,
    InvalidParameterError,
    LoopGroup,
    LoopThread,
    Mailbox,
    MailboxClosedError,
    MainLoop,
    RequestTimeoutError,
    SerializationError,
    open_mailbox,
)
from mainspring.core.state_machine import MailboxState
from mainspring.mailbox.sync import SyncMailbox

PATIENCE = 60


@dataclass
class Order:
    item: str


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/shop.db?name=orders"


def loop_threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "mainspring mailboxes"]


# ------------------------------------------------------------------------------------------------------- opened by itself


def test_a_script_without_any_loop(url):
    mailbox = open_mailbox(url, body=Order)
    with mailbox.sync as orders:
        first = orders.send(Order("lamp"))
        orders.send_many([Order("chair"), Order("table")], delay=60)
        assert orders.counts().waiting == orders.approximate_count() == 3
        (message,) = orders.receive(max_messages=10)
        assert (message.id, message.body) == (first, Order("lamp"))
        orders.call(message.extend_visibility, 90)
        orders.call(message.dead_letter, "no such lamp")
        assert [letter.body for letter in orders.dead_letters(limit=5)] == [Order("lamp")]
        assert orders.dead_letter(first).error == "no such lamp"
        assert orders.replay_dead_letters([first]) == 1
        (message,) = orders.receive()
        orders.call(message.acknowledge)
        assert orders.cancel(first) is CancelOutcome.UNKNOWN
        assert orders.purge() == 2
        assert orders.purge_dead_letters() == 0
    assert mailbox.state is MailboxState.CLOSED


def test_requests_from_a_script(url):
    def price(order: Order) -> int:
        return len(order.item)

    mailbox = open_mailbox(url, body=Order)
    with mailbox.sync as orders:
        with pytest.raises(RequestTimeoutError):
            orders.request(Order("lamp"), timeout=0.01)
        with LoopThread() as thread:
            LoopGroup([MainLoop(open_mailbox(url, body=Order), price)], guardian=False).start_in(thread)
            assert orders.request(Order("table"), timeout=PATIENCE) == 5
            pending = orders.submit(Order("chair!"))
            assert orders.call(pending.result, timeout=PATIENCE) == 6


def test_mailboxes_share_one_event_loop_which_ends_with_the_last(tmp_path):
    one, two = (open_mailbox(f"sqlite:///{tmp_path}/{name}.db?name=jobs") for name in ("one", "two"))
    assert loop_threads() == []
    with one.sync:
        with two.sync:
            assert len(loop_threads()) == 1
            two.sync.send(1)
        assert two.state is MailboxState.CLOSED
        assert len(loop_threads()) == 1
        one.sync.send(1)
    assert loop_threads() == []
    with two.sync:  # and can be opened again
        assert two.sync.counts().pending == 1
    assert loop_threads() == []


def test_threads_that_open_the_same_mailbox_share_it(url):
    mailbox = open_mailbox(url)
    errors = []
    gate = threading.Barrier(8)

    def use():
        try:
            gate.wait(PATIENCE)
            for number in range(10):
                with mailbox.sync as jobs:
                    jobs.send(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == []
    assert mailbox.state is MailboxState.CLOSED
    with mailbox.sync as jobs:
        assert jobs.counts().pending == 80
    assert loop_threads() == []


def test_open_and_close_without_a_block(url):
    mailbox = open_mailbox(url)
    mailbox.sync.open()
    mailbox.sync.open()
    mailbox.sync.close()
    mailbox.sync.send(1)
    mailbox.sync.close()
    mailbox.sync.close()  # idempotent
    assert mailbox.state is MailboxState.CLOSED
    with pytest.raises(MailboxClosedError, match=r"is closed; open it with `with mailbox\.sync:`"):
        mailbox.sync.send(2)


def test_a_mailbox_that_cannot_be_opened_raises_why(tmp_path, caplog):
    (tmp_path / "shop.db").write_text("this is no database, and long enough to be seen as none" * 20)
    mailbox = open_mailbox(f"sqlite:///{tmp_path}/shop.db?name=orders")
    for _ in range(2):
        with pytest.raises(Exception, match="database"), mailbox.sync:
            pytest.fail("it is open")
    assert loop_threads() == []
    gc.collect()
    assert caplog.text == "", "who opens it is told, and nobody else"


def test_errors_are_those_of_the_async_calls(url):
    with open_mailbox(url, body=Order).sync as orders, pytest.raises(SerializationError):
        orders.send(3)


def not_to_be_called():
    raise AssertionError("it would block the event loop")


@pytest.mark.parametrize(
    ("what", "got"), [(not_to_be_called, "and not_to_be_called is plain; call it without"), (None, "not None")]
)
def test_a_call_of_what_is_not_async_has_a_name(url, what, got):
    with open_mailbox(url).sync as orders:
        with pytest.raises(InvalidParameterError, match=f"sync.call: an async function is needed.*{got}") as caught:
            orders.call(what)
        assert "\n" not in str(caught.value)
        assert orders.counts().waiting == 0


def test_a_coroutine_instead_of_a_function_is_told_what_to_write(url):
    mailbox = open_mailbox(url)
    with mailbox.sync as orders:
        orders.send({"id": 1})
        (message,) = orders.receive()
        with pytest.raises(
            InvalidParameterError,
            match=r"not a coroutine: write sync.call\(acknowledge, …\) instead of sync.call\(acknowledge\(…\)\)",
        ):
            orders.call(message.acknowledge())
        orders.call(message.acknowledge)


def test_a_memory_mailbox_is_opened_like_any_other():
    mailbox = open_mailbox("memory://sync-memory")
    with pytest.raises(MailboxClosedError, match="mailbox 'sync-memory' is unopened; open it with"):
        mailbox.sync.send(1)
    with mailbox.sync as jobs:
        jobs.send(1)
        assert [message.body for message in jobs.receive(wait_time_seconds=PATIENCE)] == [1]


# ------------------------------------------------------------------------------------------------- open somewhere else


def test_a_mailbox_in_a_loop_thread(url, anyio_backend):
    backend, options = anyio_backend
    mailbox = open_mailbox(url)
    opened, done = threading.Event(), threading.Event()

    async def hold():
        async with mailbox:
            opened.set()
            while not done.is_set():
                await anyio.sleep(0.005)

    with LoopThread(backend=backend, backend_options=options) as thread:
        held = thread.submit(hold)
        assert opened.wait(PATIENCE)
        mailbox.sync.send(1)
        assert mailbox.sync.counts().pending == 1
        with pytest.raises(ConfigError, match="already open; open it in one place"):
            mailbox.sync.open()
        assert loop_threads() == []
        done.set()
        held.wait_sync(PATIENCE)


@pytest.mark.anyio
async def test_a_mailbox_that_an_app_has_open(url, anyio_backend):
    """As in a server whose plain endpoints run in worker threads."""
    async with open_mailbox(url) as mailbox:
        await anyio.to_thread.run_sync(mailbox.sync.send, 1)
        assert (await mailbox.counts()).pending == 1


@pytest.mark.anyio
async def test_a_mailbox_that_a_group_uses(anyio_backend):
    """Also one in memory, which works unopened: it is used in the event loop of the group."""
    mailbox = open_mailbox("memory://sync-group")
    handled = anyio.Event()

    async def handle(number: int) -> None:
        handled.set()

    async with LoopGroup([MainLoop(mailbox, handle)]):
        await anyio.to_thread.run_sync(mailbox.sync.send, 1)
        with anyio.fail_after(PATIENCE):
            await handled.wait()


@pytest.mark.anyio
async def test_in_an_event_loop_it_is_refused_by_name(url, anyio_backend):
    async with open_mailbox(url) as mailbox:
        for call, name, instead in (
            (partial(mailbox.sync.send, 1), "send", "await the async send"),
            (mailbox.sync.counts, "counts", "await the async counts"),
            (mailbox.sync.open, "open", "use `async with` the mailbox"),
            (mailbox.sync.close, "close", "await the async close"),
        ):
            with pytest.raises(ConfigError, match=rf"sync\.{name}\(\) would block the event loop .*; {instead}"):
                call()


@pytest.mark.anyio
async def test_a_close_meanwhile_ends_the_wait(anyio_backend):
    """A receive that waits returns nothing, as the async one; another call is told."""
    mailbox = open_mailbox("memory://sync-close")
    results = []
    begun = anyio.Event()

    async def forever():
        begun.set()
        await anyio.sleep_forever()

    def wait():
        try:
            results.append(mailbox.sync.call(forever))
        except MailboxClosedError as error:
            results.append(str(error))

    async with anyio.create_task_group() as tasks, mailbox:
        tasks.start_soon(anyio.to_thread.run_sync, wait)
        with anyio.fail_after(PATIENCE):
            await begun.wait()
    (result,) = results
    assert result == "mailbox 'sync-close' was closed before the end of forever() of mailbox sync-close"


def test_a_loop_that_is_gone_is_told():
    """Of a mailbox that was never closed, since its event loop was not ended in an orderly way."""
    mailbox = open_mailbox("memory://gone")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(mailbox.__aenter__())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    assert mailbox.state is MailboxState.OPEN
    with pytest.raises(MailboxClosedError, match="was closed before the end of send"):
        mailbox.sync.send(1)


def test_an_interrupt_cancels_the_call(url):
    """Ctrl-C in the main thread while it waits: nobody goes on receiving for it."""
    mailbox = open_mailbox(url)
    ended = threading.Event()
    begun = threading.Event()

    async def receive():
        begun.set()
        try:
            return await mailbox.receive(wait_time_seconds=PATIENCE)
        finally:
            ended.set()

    def interrupt():
        begun.wait(PATIENCE)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        while not ended.wait(5):  # CPython's locks can miss a signal that comes just as the wait begins
            os.kill(os.getpid(), signal.SIGINT)

    with mailbox.sync as jobs:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            jobs.call(receive)
        assert ended.wait(PATIENCE)
        jobs.send(1)


def test_what_a_call_raises_ends_no_mailbox(url):
    async def leave():
        raise SystemExit(3)

    with open_mailbox(url).sync as jobs:
        with pytest.raises(MailboxClosedError, match="before the end of leave"):
            jobs.call(leave)
        jobs.send(1)


def test_each_name_and_signature_is_the_async_ones(url):
    """So that a call that is added there is not forgotten here, but for those that belong to the ones who open it."""
    mailbox = open_mailbox(url)
    # For those who open it, and for the engine.
    own = {"acknowledge_many", "close", "exists", "settle", "extend", "request_prepared", "save_checkpoint"}
    public = {
        name
        for name, fn in inspect.getmembers(Mailbox, inspect.iscoroutinefunction)
        if not name.startswith("_") and name not in own
    } | {"jobs"}  # which is iterated
    assert public == {name for name in vars(mailbox.sync) if not name.startswith("_")}
    for name in public:
        assert inspect.signature(getattr(mailbox.sync, name)) == inspect.signature(getattr(mailbox, name))
        assert name in SyncMailbox.__doc__


@pytest.mark.slow
def test_a_forked_child_is_told(tmp_path):
    program = f"""
        import os, sys
        from mainspring import ConfigError, open_mailbox
        mailbox = open_mailbox("sqlite:///{tmp_path}/parent.db?name=jobs")
        unopened = open_mailbox("sqlite:///{tmp_path}/child.db?name=jobs")
        with mailbox.sync as jobs:
            child = os.fork()
            if child == 0:
                for call in (lambda: jobs.send(1), jobs.open, jobs.close):
                    try:
                        print(call(), "was not refused")
                    except ConfigError as error:
                        assert "is open in process" in str(error) and "after the fork" in str(error), error
                with unopened.sync as own:
                    own.send("child")
                    print([message.body for message in own.receive()])
                sys.exit(7)  # leaves the block, and the interpreter
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            jobs.send(1)
            print(jobs.counts().pending)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "['child']\n7\n1\n", "")


@pytest.mark.slow
def test_a_forked_child_opens_what_its_parent_could_not_or_no_longer_has(tmp_path):
    program = f"""
        import os, sys
        from mainspring import ConfigError, MainspringError, open_mailbox
        later, closed, held = [open_mailbox(f"sqlite:///{tmp_path}/later/{{name}}.db?name=jobs") for name in "abc"]
        try:
            later.sync.open()
        except MainspringError:
            os.mkdir("{tmp_path}/later")
        with closed.sync:
            closed.sync.send("parent")
        held.sync._lock.acquire()  # a thread of the parent's is opening it
        child = os.fork()
        if child == 0:
            for mailbox in (later, closed):
                with mailbox.sync as own:
                    own.send("child")
                    print(sorted(message.body for message in own.receive(max_messages=2)), flush=True)
            try:
                held.sync.open()
            except ConfigError as error:
                assert f"is open in process {{os.getppid()}}" in str(error), error
            else:
                print("was not refused")
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        held.sync._lock.release()
        with later.sync, held.sync:
            print(later.sync.counts().in_flight)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "['child']\n['child', 'parent']\n7\n1\n", "")


@pytest.mark.slow
def test_a_program_that_ends_with_it_open_closes_it(tmp_path):
    program = f"""
        from mainspring import open_mailbox
        from mainspring.mailbox.sqlite.mailbox import SQLiteBackend
        real = SQLiteBackend.close
        async def told(self):
            await real(self)
            print("closed")
        SQLiteBackend.close = told
        jobs = open_mailbox("sqlite:///{tmp_path}/jobs.db?name=jobs")
        jobs.sync.open()
        jobs.sync.send(1)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
