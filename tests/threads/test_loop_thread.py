"""``LoopThread``: what is accepted is done, what is refused never is, and every way to its end has one."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial, wraps
from types import SimpleNamespace

import anyio
import anyio.to_thread
import pytest
import trio
from event_loops import taking_part

import mainspring
from interrupts import Interruption, in_thread
from loops import LOOPS
from mainspring import (
    ConfigError,
    Heartbeat,
    InMemoryMailbox,
    InvalidParameterError,
    LoopGroup,
    LoopNotRunningError,
    LoopThread,
    MainLoop,
    MainspringError,
    TaskExitError,
    Ticket,
    TicketAbandonedError,
    open_mailbox,
    threads,
)
from mainspring.core.process import async_library, in_event_loop
from mainspring.core.state_machine import LoopThreadState

pytestmark = pytest.mark.every_loop

PATIENCE = 60
MANY = 500

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.fixture
def make(anyio_backend):
    """LoopThreads on one of the three event loops."""
    backend, options = anyio_backend
    made = []

    def new(**keywords):
        made.append(LoopThread(**{"backend": backend, "backend_options": options, **keywords}))
        return made[-1]

    yield new
    for thread in made:
        thread.stop(timeout=0)


@pytest.fixture
def thread(make):
    thread = make(name="own")
    thread.start()
    return thread


def flush(thread):
    """Wait until all that was posted before has been called."""
    done = threading.Event()
    assert thread.post(done.set)
    assert done.wait(PATIENCE)


def living(name):
    """The threads of that name that have not ended."""
    return [thread for thread in threading.enumerate() if thread.name == name]


async def add(left, right=1):
    await anyio.lowlevel.checkpoint()
    return left + right


# --------------------------------------------------------------------------------------------------------------- states


def test_its_life(make):
    thread = make(name="own")
    assert thread.state is LoopThreadState.IDLE
    assert not thread.post(pytest.fail)
    thread.start()
    assert thread.state is LoopThreadState.RUNNING
    assert repr(thread) == "<LoopThread 'own' running>"
    seen = []
    thread.post(lambda: seen.extend((threading.current_thread().name, in_event_loop())))
    assert thread.stop() is True
    assert thread.state is LoopThreadState.STOPPED
    assert seen == ["own", True]
    assert not thread.post(pytest.fail)
    assert thread.stop() is True  # idempotent


def test_a_block_starts_and_stops_it(make):
    with make() as thread:
        assert thread.submit(add, 2).wait_sync(PATIENCE) == 3
    assert thread.state is LoopThreadState.STOPPED


def test_a_running_one_is_not_started_twice(thread):
    before = threading.active_count()
    thread.start()
    assert threading.active_count() == before


def test_it_lives_once(thread):
    thread.stop()
    with pytest.raises(LoopNotRunningError, match="loop thread 'own' is stopped; make a new LoopThread"):
        thread.start()


def test_stopped_before_it_was_started_it_stays_so(make):
    thread = make()
    assert thread.stop() is True
    with pytest.raises(LoopNotRunningError, match="is stopped"):
        thread.start()


def test_the_start_raises_what_went_wrong():
    thread = LoopThread(backend_options={"loop_factory": lambda: 1 / 0, "use_uvloop": False})
    with pytest.raises(ZeroDivisionError):
        thread.start()
    assert thread.state is LoopThreadState.STOPPED
    assert thread.stop() is True
    assert not thread.post(pytest.fail)


def test_a_thread_that_cannot_be_had_is_an_error_of_the_start(make, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    thread = make()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread.start()
    assert thread.state is LoopThreadState.STOPPED


def test_a_stop_while_it_starts(make, anyio_backend):
    """The loop is held as it begins: the stop comes in between, and both it and the start come to their end."""
    began, go = threading.Event(), threading.Event()
    options = taking_part(*anyio_backend, at_begin=lambda: (began.set(), go.wait(PATIENCE)))
    thread = make(backend_options=options)
    errors = []

    def start():
        try:
            thread.start()
        except LoopNotRunningError as error:
            errors.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    assert began.wait(PATIENCE)
    assert thread.state is LoopThreadState.STARTING
    assert not thread.post(pytest.fail)
    stopper = threading.Thread(target=thread.stop)
    stopper.start()
    while thread.state is LoopThreadState.STARTING:
        pass
    assert thread.state is LoopThreadState.STOPPING
    go.set()
    for waiting in (starter, stopper):
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
    assert thread.state is LoopThreadState.STOPPED
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"name": ""}, "name must be text"),
        ({"name": 3}, "name must be text"),
        ({"backend": "curio"}, 'backend must be "asyncio" or "trio"'),
        ({"stop_timeout": -1}, "stop_timeout must be 0 or more seconds"),
        ({"backend_options": 5}, "backend_options must be options by name"),
        ({"backend_options": "use_uvloop"}, "backend_options must be options by name"),
        ({"stop_timeout": float("inf")}, "stop_timeout must be 0 or more seconds"),
        ({"cancel_grace": None}, "cancel_grace must be 0 or more seconds"),
    ],
)
def test_impossible_values(keywords, message):
    with pytest.raises(ConfigError, match=message):
        LoopThread(**keywords)


def test_trio_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "trio", None)
    with pytest.raises(ConfigError, match=r"pip install 'mainspring\[trio\]'"):
        LoopThread(backend="trio")


def test_uvloop_is_taken_where_it_is_installed(monkeypatch):
    def kind(thread):
        async def module():
            return type(anyio.lowlevel.current_token().native_token).__module__

        with thread:
            return thread.submit(module).wait_sync(PATIENCE)

    assert kind(LoopThread()).startswith("uvloop")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert kind(LoopThread()).startswith("asyncio")


# ------------------------------------------------------------------------------------------------------------- callbacks


def test_callbacks_are_called_in_order(thread):
    called = []
    for number in range(MANY):
        assert thread.post(partial(called.append, number))
    flush(thread)
    assert called == list(range(MANY))


@pytest.mark.loops("asyncio", "uvloop")
def test_posts_share_a_wake_up(make, anyio_backend):
    """While the queue has not been emptied, nobody wakes the event loop again."""
    wakes = []
    thread = make(backend_options=taking_part(*anyio_backend, at_wake=lambda: wakes.append(1)))
    thread.start()
    begun, release = threading.Event(), threading.Event()
    thread.post(lambda: (begun.set(), release.wait(PATIENCE)))
    assert begun.wait(PATIENCE)
    before = len(wakes)
    called = []
    for number in range(MANY):
        thread.post(partial(called.append, number))
    assert len(wakes) == before
    release.set()
    flush(thread)
    assert len(called) == MANY
    assert len(wakes) - before < MANY / 2  # a look for each turn of the loop


def test_a_flood_of_callbacks_lets_tasks_run(thread):
    """A callback that posts the next one for ever takes turns with everything else."""
    over = False

    def again():
        if not over:
            thread.post(again)

    for _ in range(MANY):
        thread.post(again)
    assert thread.submit(add, 1).wait_sync(PATIENCE) == 2
    over = True
    flush(thread)


def test_a_callback_that_raises_harms_nobody(thread, caplog):
    for error in (ValueError("bad"), SystemExit(3), KeyboardInterrupt()):
        assert thread.post(partial(raise_, error))
    called = []
    thread.post(partial(called.append, 1))
    flush(thread)
    assert called == [1]
    records = [record for record in caplog.records if record.name == "mainspring"]
    assert [type(record.exc_info[1]) for record in records] == [ValueError, SystemExit, KeyboardInterrupt]
    assert all("loop thread 'own': a posted callback raised" in record.getMessage() for record in records)


def raise_(error):
    raise error


def iter_of(number):
    yield number


@pytest.mark.parametrize("fn", [add, partial(add, 1), None, 3])
def test_what_post_refuses(thread, fn):
    with pytest.raises(InvalidParameterError, match="post\\(\\) takes a"):
        thread.post(fn)


@pytest.mark.parametrize(("fn", "what"), [(lambda: add(1), "a coroutine"), (lambda: iter_of(1), "a generator")])
def test_work_that_comes_out_of_a_callback_unrun_is_told(thread, caplog, fn, what):
    thread.post(fn)
    flush(thread)
    assert f"returned {what}, which nothing runs" in caplog.text


def test_callbacks_see_the_threads_variables(thread):
    variable.set("the caller's")
    seen = []
    thread.post(lambda: seen.append(variable.get()))
    flush(thread)
    assert seen == ["unset"]


def test_a_callback_may_post(thread):
    called = []
    thread.post(lambda: thread.post(partial(called.append, 1)))
    flush(thread)
    flush(thread)
    assert called == [1]


def test_a_signal_handler_may_post(thread):
    done = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: thread.post(done.set))
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert done.wait(PATIENCE)


def test_an_interrupt_on_the_way_to_the_loop_keeps_nobody_waiting(thread):
    """As by Ctrl-C, wherever it comes in."""

    def post():
        with suppress(KeyboardInterrupt):
            thread.post(lambda: None)

    interrupt_each_line(
        (mainspring,),
        lambda: flush(thread),
        post,
        partial(raise_, KeyboardInterrupt()),
        lambda _: flush(thread),
        least=6,
    )


def test_a_post_that_a_stop_overtakes_is_refused(make):
    """It saw the loop running; by the time that it has put its callback into the queue, the thread has come to its end."""

    def prepare():
        nonlocal thread
        thread = make()
        thread.start()
        called.clear()

    def post():
        accepted.append(thread.post(partial(called.append, True)))

    def check(interrupted):
        thread.stop()
        assert called == [True] * accepted[-1]

    thread, called, accepted = None, [], []
    interrupt_each_line((threads,), prepare, post, lambda: in_thread(thread.stop), check, least=6)
    assert {*accepted} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("submitted", [False, True])
@pytest.mark.parametrize(  # an end of trio's cannot be made to fail
    ("anyio_backend", "breaks"),
    [pytest.param(loop, False, id=name) for name, loop in LOOPS.items()]
    + [pytest.param(LOOPS[name], True, id=f"{name}-breaks") for name in ("asyncio", "uvloop")],
)
def test_a_post_that_the_end_of_the_loop_meets_is_refused(anyio_backend, caplog, breaks, submitted):
    """It saw the loop running, and puts its callback in between the last turn and the end, which looks at the queue as well."""
    backend, options = anyio_backend

    def meet(line, lines):
        ended, let_end = threading.Event(), threading.Event()

        def at_end():
            ended.set()
            assert let_end.wait(PATIENCE)
            if breaks:
                raise RuntimeError("broken")

        def come_to_the_end():
            stopper.start()
            assert ended.wait(PATIENCE)

        def let_it_end():
            let_end.set()
            stopper.join(PATIENCE)

        called = []
        thread = LoopThread(backend=backend, backend_options=taking_part(backend, options, at_end=at_end))
        thread.start()
        stopper = threading.Thread(target=thread.stop)
        with Interruption((threads,), line, come_to_the_end, then=(lines, let_it_end)) as between:
            if submitted:
                ticket = thread.submit(called_in_a_task, called)
            else:
                accepted = thread.post(partial(called.append, True))
        let_end.set()
        thread.stop()
        if submitted:
            with suppress(LoopNotRunningError):
                ticket.wait_sync(0)
            accepted = bool(called)
        assert called == [True] * accepted
        seen.add(accepted)
        return between

    seen = set()
    for lines in (1, 2, 4, 8):
        for line in range(1000):
            if not meet(line, lines).happened:
                break
    assert seen == {True, False}
    assert ("broke" in caplog.text) is breaks


async def called_in_a_task(called):
    called.append(True)


def test_a_post_that_meets_the_end_of_a_turn_is_called(make):
    """It comes in when the queue has been seen to be empty, and takes the loop to be awake still."""

    def met(line):
        called, thread = threading.Event(), make(name="own")
        with Interruption((threads,), line, lambda: in_thread(lambda: thread.post(called.set)), thread="own") as turn:
            thread.start()
            flush(thread)
            turn.begin()
            thread.post(lambda: None)
            time.sleep(0.002)  # for the event loop to fall asleep
        if turn.happened:
            assert called.wait(PATIENCE)
        thread.stop()
        return turn.happened

    lines = 0
    while met(lines):
        lines += 1
    assert lines > 6


# ----------------------------------------------------------------------------------------------------------------- tasks


def test_a_task_gives_its_result(thread):
    ticket = thread.submit(add, 2, 3)
    assert isinstance(ticket, Ticket)
    assert ticket.wait_sync(PATIENCE) == 5


@pytest.mark.anyio
async def test_a_result_is_awaited_in_another_event_loop(anyio_backend):
    for backend in ("asyncio", "trio"):
        thread = LoopThread(backend=backend)
        thread.start()
        with anyio.fail_after(PATIENCE):
            assert await thread.submit(add, 2).wait() == 3
        assert await anyio.to_thread.run_sync(thread.stop)


def test_a_task_that_raises(thread):
    async def bad():
        raise LookupError("no such row")

    with pytest.raises(LookupError, match="no such row"):
        thread.submit(bad).wait_sync(PATIENCE)
    assert thread.submit(add, 1).wait_sync(PATIENCE) == 2


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_cannot_end_the_loop(thread, error):
    async def leave():
        raise error

    with pytest.raises(TaskExitError, match="to end that, call its stop") as raised:
        thread.submit(leave).wait_sync(PATIENCE)
    assert raised.value.__cause__ is error
    assert thread.submit(add, 1).wait_sync(PATIENCE) == 2


def test_a_task_that_cancels_itself(make):
    import asyncio

    thread = make(backend="asyncio", backend_options={})
    thread.start()

    async def cancelled():
        raise asyncio.CancelledError

    with pytest.raises(TicketAbandonedError, match=r"cancelled was cancelled in loop thread .* \(CancelledError\)"):
        thread.submit(cancelled).wait_sync(PATIENCE)
    assert thread.submit(add, 1).wait_sync(PATIENCE) == 2


def decorated(fn):
    @wraps(fn)
    def call(*args):
        return fn(*args)

    return call


def yields():
    yield 1


async def yields_later():
    yield 1


def test_what_submit_refuses(thread):
    called: list[int] = []
    with pytest.raises(
        InvalidParameterError, match=r"not a coroutine: write submit\(add, …\) instead of submit\(add\(…\)\)"
    ):
        thread.submit(add(1))
    with pytest.raises(
        InvalidParameterError, match=r"post\(\) takes a function, not a coroutine: write submit\(add, …\)"
    ):
        thread.post(add(1))
    for steps in (yields, yields_later, partial(yields)):
        with pytest.raises(InvalidParameterError, match=r"post\(\) takes a plain function, not"):
            thread.post(steps)
    for blocks in (lambda: called.append(1), partial(called.append, 1), called.append, decorated(called.append)):
        with pytest.raises(InvalidParameterError, match="is plain and would block the event loop"):
            thread.submit(blocks)
    assert thread.submit(decorated(add), 1).wait_sync(PATIENCE) == 2
    assert called == []
    with pytest.raises(InvalidParameterError, match="stop must be a plain function"):
        thread.submit(anyio.sleep, 0, stop=anyio.aclose_forcefully)
    with pytest.raises(InvalidParameterError, match="stop_timeout must be 0 or more seconds"):
        thread.submit(add, 1, stop_timeout=-1)
    with pytest.raises(InvalidParameterError, match="timeout must be 0 or more seconds, or None"):
        thread.stop(timeout=float("nan"))


@pytest.mark.anyio
async def test_a_task_sees_the_callers_variables_and_its_own_event_loop(anyio_backend):
    async def look():
        return variable.get(), async_library(), anyio.current_time() > 0

    variable.set("the caller's")
    for backend in ("asyncio", "trio"):
        thread = LoopThread(backend=backend)
        thread.start()
        assert await thread.submit(look).wait(PATIENCE) == ("the caller's", backend, True)
        await anyio.to_thread.run_sync(thread.stop)


def test_a_ticket_that_somebody_else_answers(thread):
    go = threading.Event()

    async def slow():
        await anyio.to_thread.run_sync(go.wait)

    ticket = thread.submit(slow)
    ticket.complete(None)
    go.set()
    assert thread.stop() is True


def test_without_a_loop_a_ticket_fails_at_once(make):
    thread = make(name="own")
    with pytest.raises(LoopNotRunningError, match="loop thread 'own' is idle; start\\(\\) it first"):
        thread.submit(add, 1).wait_sync(0)
    thread.start()
    thread.stop()
    with pytest.raises(LoopNotRunningError, match="loop thread 'own' is stopped; make a new LoopThread"):
        thread.submit(add, 1).wait_sync(0)


def unread(caplog):
    return [record.getMessage() for record in caplog.records if "its ticket was not read" in record.getMessage()]


def test_an_error_that_nobody_asks_for_is_logged(thread, caplog):
    async def bad():
        raise LookupError("no such\nrow")

    async def leave():
        raise SystemExit(3)

    gc.disable()  # it is told when it is dropped, not when a collection comes around
    try:
        thread.submit(bad)
        thread.submit(leave)
        thread.submit(wraps(add)(lambda: None))  # cannot be seen before it is called
        assert thread.stop() is True
        thread.submit(add, 1)
    finally:
        gc.enable()
    lines = unread(caplog)
    assert len(lines) == 4  # in any order: trio runs tasks in a random one
    (told,) = (line for line in lines if "bad, submitted to loop thread 'own', failed" in line)
    assert "its ticket was not read: LookupError: no such; row, at " in told
    assert told.endswith('in bad: raise LookupError("no such\\nrow")')
    for text in ("leave raised SystemExit(3)", "submit() takes an async function", "loop thread 'own' is stopped"):
        assert sum(text in line for line in lines) == 1


def test_an_error_that_somebody_asks_for_is_not_logged(thread, caplog):
    async def bad():
        raise LookupError("no such row")

    with pytest.raises(LookupError):
        thread.submit(bad).wait_sync(PATIENCE)
    assert thread.submit(add, 1).wait_sync(PATIENCE) == 2
    gc.collect()
    assert unread(caplog) == []


def test_an_error_that_came_too_late_to_be_the_answer_is_not_logged(thread, caplog):
    async def bad():
        await anyio.to_thread.run_sync(answered.wait)
        raise LookupError("no such row")

    answered = threading.Event()
    ticket = thread.submit(bad)
    ticket.complete(1)
    answered.set()
    thread.stop()
    del ticket
    gc.collect()
    assert unread(caplog) == []


# ------------------------------------------------------------------------------------------------------------------ ends


def test_what_was_accepted_is_done_before_the_end(thread):
    release = threading.Event()
    thread.post(lambda: release.wait(PATIENCE))
    called = []

    def call(number):
        time.sleep(0.0001)  # so that they take several turns of the event loop
        called.append(number)

    for number in range(MANY):
        thread.post(partial(call, number))
    ticket = thread.submit(add, 1)
    stopper = threading.Thread(target=thread.stop)
    stopper.start()
    while thread.state is LoopThreadState.RUNNING:
        pass
    assert not thread.post(pytest.fail)
    release.set()
    stopper.join(PATIENCE)
    assert called == list(range(MANY))
    assert ticket.wait_sync(0) == 2


@pytest.mark.parametrize("timeouts", [(0.05, PATIENCE), (PATIENCE, 0.05)])
def test_of_several_stops_the_shortest_time_counts(thread, timeouts):
    ticket = thread.submit(anyio.sleep, 2 * PATIENCE)
    others = [threading.Thread(target=thread.stop, kwargs={"timeout": timeout}) for timeout in timeouts]
    for other in others:
        other.start()
        other.join(0.01)  # until it waits
    for other in others:
        other.join(PATIENCE / 2)
        assert not other.is_alive()
    with pytest.raises(LoopNotRunningError, match="cancelled"):
        ticket.wait_sync(0)


def test_a_stop_waits_as_long_as_any_of_the_tasks_may_take(make):
    thread = make(stop_timeout=0, cancel_grace=0.05)
    thread.start()
    stopping = threading.Event()
    long = thread.submit(anyio.to_thread.run_sync, partial(stopping.wait, PATIENCE), stop_timeout=PATIENCE)
    short = thread.submit(anyio.sleep, 0, stop_timeout=0.01)
    short.wait_sync(PATIENCE)
    later = threading.Timer(0.3, stopping.set)
    later.start()
    assert thread.stop() is True
    assert long.wait_sync(0) is True
    later.join()


def test_a_stop_gives_tasks_their_time_and_then_cancels_them(thread):
    cleaned = []

    async def forever():
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
            cleaned.append(True)

    ticket = thread.submit(forever)
    assert thread.stop(timeout=0.01) is False
    assert cleaned == [True]
    with pytest.raises(LoopNotRunningError, match=r"loop thread 'own' has stopped and cancelled .*forever"):
        ticket.wait_sync(0)


def test_a_stop_waits_for_tasks_that_end_in_time(thread):
    asked = threading.Event()

    async def run():
        while not asked.is_set():
            await anyio.sleep(0.005)
        return "in time"

    ticket = thread.submit(run, stop=asked.set)
    assert thread.stop() is True
    assert ticket.wait_sync(0) == "in time"


def test_a_task_may_have_more_time_than_the_thread(make):
    thread = make(stop_timeout=0, cancel_grace=0)
    thread.start()
    begun = threading.Event()

    async def run():
        begun.set()
        await anyio.sleep(0.2)
        return "in time"

    ticket = thread.submit(run, stop_timeout=PATIENCE)
    assert begun.wait(PATIENCE)
    assert thread.stop() is True
    assert ticket.wait_sync(0) == "in time"


def test_a_second_stop_can_make_it_shorter(thread):
    thread.submit(anyio.sleep_forever, stop_timeout=10 * PATIENCE)
    patient = threading.Thread(target=thread.stop)
    patient.start()
    while thread.state is LoopThreadState.RUNNING:
        pass
    assert thread.stop(timeout=0) is False
    patient.join(PATIENCE)
    assert not patient.is_alive()


def test_a_stop_in_a_callback_does_not_wait_for_itself(thread):
    answers = []
    thread.post(lambda: answers.append(thread.stop()))
    assert thread.stop() is True  # whoever comes from outside waits for the same end
    assert thread.state is LoopThreadState.STOPPED
    assert answers == [True]
    assert not living("own")


def test_a_stop_in_a_task_does_not_wait_for_itself(thread):
    async def leave():
        return thread.stop()

    assert thread.submit(leave).wait_sync(PATIENCE) is True
    assert thread.stop() is True


def test_a_stop_in_a_worker_thread_does_not_wait_for_itself(thread):
    async def leave():
        return await anyio.to_thread.run_sync(thread.stop)

    assert thread.submit(leave).wait_sync(PATIENCE) is True
    assert thread.stop() is True


def test_a_stop_in_a_plain_handler_does_not_wait_for_itself(thread):
    answers = []

    def handle(job: int) -> None:
        answers.append(thread.stop())

    mailbox = InMemoryMailbox("stops")
    ticket = LoopGroup([MainLoop(mailbox, handle)], guardian=False).start_in(thread)
    thread.submit(mailbox.send, 1).wait_sync(PATIENCE)
    assert ticket.wait_sync(PATIENCE) is not None
    assert thread.stop() is True
    assert answers == [True]


def test_a_thread_stops_another_one_that_has_started_it(thread, make):
    other = make()
    other.start()

    async def leave():
        return other.stop()

    assert thread.submit(leave).wait_sync(PATIENCE) is True
    assert other.state is LoopThreadState.STOPPED, "it is another one: its end was waited for"


def test_what_is_cancelled_by_a_stop_is_not_logged(thread, caplog):
    thread.submit(anyio.sleep_forever)
    assert thread.stop(timeout=0) is False
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize("error", [BaseExceptionGroup("exits", [KeyboardInterrupt()]), GeneratorExit()])
def test_an_exit_of_any_kind_is_told(thread, error):
    async def leave():
        raise error

    with pytest.raises(TaskExitError, match=f"leave raised {type(error).__name__}") as raised:
        thread.submit(leave).wait_sync(PATIENCE)
    assert raised.value.__cause__ is error
    assert thread.submit(add, 1).wait_sync(PATIENCE) == 2


def test_many_stop_it_at_once(thread):
    called = []
    for number in range(100):
        thread.post(partial(called.append, number))
    stoppers = [threading.Thread(target=lambda: (thread.stop(), called.append("over"))) for _ in range(8)]
    for stopper in stoppers:
        stopper.start()
    for stopper in stoppers:
        stopper.join(PATIENCE)
        assert not stopper.is_alive()
    assert called == [*range(100), *["over"] * 8]


def test_a_signal_handler_may_stop_it(thread):
    before = signal.signal(signal.SIGUSR1, lambda *_: thread.stop())
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert thread.state is LoopThreadState.STOPPED


TRIOS_WAY_IN = SimpleNamespace(__file__=trio.lowlevel.TrioToken.run_sync_soon.__code__.co_filename)


def interrupt_each_line(modules, prepare, act, handler, check, *, least):
    """Interrupt ``act()`` by ``handler()`` before each of its lines in ``modules``, at ``least`` so many, one a round."""

    def each_line():
        for line in range(1000):
            prepare()
            with Interruption(modules, line, handler) as between:
                act()
            check(between.happened)
            if not between.happened:
                assert line >= least
                return

    in_thread(each_line, 80)


@pytest.mark.slow
def test_a_signal_handler_may_stop_it_wherever_it_interrupts_a_stop(make):
    def prepare():
        nonlocal thread
        thread = make(name="own", stop_timeout=90)
        thread.start()
        answers.clear()

    def stop():
        answers.append(thread.stop())

    def check(interrupted):
        assert thread.state is LoopThreadState.STOPPED
        assert not living("own")
        assert answers == [True] * interrupted

    thread, answers = None, []
    interrupt_each_line((threads, threading, TRIOS_WAY_IN), prepare, lambda: thread.stop(), stop, check, least=20)


@pytest.mark.slow
def test_a_signal_handler_that_stops_what_is_being_started_waits_no_longer_than_its_timeout(make):
    def prepare():
        nonlocal thread
        thread = make(name="own", stop_timeout=0, cancel_grace=0.02)

    def start():
        with suppress(LoopNotRunningError):
            thread.start()

    def check(_):
        thread.stop(timeout=PATIENCE)
        assert thread.state is LoopThreadState.STOPPED
        assert not living("own")

    thread = None
    interrupt_each_line((threads, threading), prepare, start, lambda: thread.stop(), check, least=20)


def test_a_signal_handler_may_stop_it_wherever_it_interrupts_a_post(make):
    def prepare():
        nonlocal thread
        thread = make(stop_timeout=90)
        thread.start()
        for told in (called, accepted, answers):
            told.clear()

    def post():
        accepted.append(thread.post(partial(called.append, True)))

    def stop():
        answers.append(thread.stop())

    def check(interrupted):
        stop()
        assert thread.state is LoopThreadState.STOPPED
        assert called == [each for each in accepted if each]
        assert answers == [True] * (1 + interrupted)

    thread, called, accepted, answers = None, [], [], []
    interrupt_each_line((threads, TRIOS_WAY_IN), prepare, post, stop, check, least=6)


def test_a_callback_that_blocks_is_named_and_no_wait_for_ever(make, caplog):
    thread = make(stop_timeout=0, cancel_grace=0.1)
    thread.start()
    release = threading.Event()
    called = []
    thread.post(lambda: release.wait(PATIENCE))
    thread.post(partial(called.append, 1))
    with caplog.at_level(logging.ERROR, "mainspring"):
        assert thread.stop() is False
    assert "has not ended within 0.1 s" in caplog.text
    assert "test_loop_thread.py" in caplog.text
    assert thread.state is LoopThreadState.STOPPING
    release.set()  # what was accepted is done all the same
    assert thread.stop(timeout=PATIENCE) is False  # as the first one has said
    assert thread.state is LoopThreadState.STOPPED
    assert called == [1]


def test_a_task_that_swallows_its_cancellation_is_named(make, caplog):
    thread = make(cancel_grace=0.1)
    thread.start()
    over = threading.Event()
    begun = threading.Event()

    async def stubborn():
        begun.set()
        while not over.is_set():
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.005)

    thread.submit(stubborn)
    assert begun.wait(PATIENCE)
    assert thread.stop(timeout=0) is False
    assert "task test_a_task_that_swallows_its_cancellation_is_named.<locals>.stubborn at " in caplog.text
    assert "await anyio.sleep(0.005)" in caplog.text
    over.set()
    assert thread.stop(timeout=PATIENCE) is False
    assert thread.state is LoopThreadState.STOPPED


def test_a_task_that_had_to_be_cancelled_did_not_end_by_itself_whatever_it_made_of_that(thread):
    begun = threading.Event()

    async def cleans_up():
        begun.set()
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            raise ValueError("something else") from None

    ticket = thread.submit(cleans_up)
    assert begun.wait(PATIENCE)
    assert thread.stop(timeout=0) is False
    with pytest.raises(ValueError, match="something else"):
        ticket.wait_sync(PATIENCE)
    assert thread.stop() is False


def test_a_stop_callable_that_raises_is_logged(thread, caplog):
    thread.submit(anyio.sleep, 0.05, stop=partial(raise_, ValueError("bad")))
    thread.stop()
    assert "a posted callback raised" in caplog.text


def test_an_object_that_is_dropped_stops(make, anyio_backend):
    backend, options = anyio_backend
    thread = LoopThread(name="dropped", backend=backend, backend_options=options)
    thread.start()
    (running,) = living("dropped")
    called = []
    for number in range(10):
        thread.post(partial(called.append, number))
    del thread
    gc.collect()
    running.join(PATIENCE)
    assert not running.is_alive()
    assert called == list(range(10))


def test_a_loop_that_breaks_lets_nobody_wait(make, caplog):
    """Somebody stops asyncio's loop from inside: what was accepted and cannot be done any more is told."""
    thread = make(backend="asyncio", backend_options={"use_uvloop": False})
    thread.start()
    begun = threading.Event()

    async def forever():
        begun.set()
        await anyio.sleep_forever()

    running = thread.submit(forever)
    assert begun.wait(PATIENCE)
    thread.post(lambda: asyncio.get_running_loop().stop())
    with pytest.raises((TicketAbandonedError, LoopNotRunningError)):
        running.wait_sync(PATIENCE)
    assert thread.stop() is False
    assert thread.stop() is False
    assert "the event loop of loop thread" in caplog.text
    assert not thread.post(pytest.fail)
    with pytest.raises(LoopNotRunningError):
        thread.submit(add, 1).wait_sync(0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine")  # of such an end
def test_what_a_broken_loop_had_accepted_is_told(caplog):
    """It ends without having been told to, and without another turn."""

    class Broken(asyncio.SelectorEventLoop):
        breaks = False

        def run_forever(self):
            if self.breaks:
                raise RuntimeError("broken")
            super().run_forever()

    def break_it():
        loop = asyncio.get_running_loop()
        loop.breaks = True
        loop.stop()
        begun.set()
        go.wait(PATIENCE)
        time.sleep(0.01)  # longer than callbacks are called in one turn

    begun, go = threading.Event(), threading.Event()
    thread = LoopThread(name="own", backend_options={"use_uvloop": False, "loop_factory": Broken})
    thread.start()
    thread.post(break_it)
    assert begun.wait(PATIENCE)
    assert thread.post(pytest.fail)
    ticket = thread.submit(add, 1)
    assert thread.post(pytest.fail)
    go.set()
    with pytest.raises(LoopNotRunningError, match="is stopped"):
        ticket.wait_sync(PATIENCE)
    assert not thread.post(pytest.fail)
    assert thread.stop() is False
    assert "the event loop of loop thread 'own' broke" in caplog.text
    assert "could not call 2 callbacks that were in its queue" in caplog.text
    gc.collect()  # here, and not in a later test


# ----------------------------------------------------------------------------------------------------- in flight and idle


def test_what_is_in_flight_is_counted_and_waited_for(thread):
    posted, gate, seen = threading.Event(), threading.Event(), []

    async def task():
        await anyio.sleep(0)
        while not gate.is_set():
            await anyio.sleep(0.001)
        seen.append("task")

    def callback():
        posted.wait(PATIENCE)
        seen.append(thread.in_flight)
        gate.wait(PATIENCE)

    assert thread.in_flight == 0
    assert thread.wait_idle() is True
    ticket = thread.submit(task)
    thread.post(callback)
    thread.post(lambda: seen.append("callback"))
    posted.set()
    while not seen:
        time.sleep(0.001)
    assert seen == [3]  # in the callback: itself, the task, and the callback behind it
    assert thread.in_flight == 3
    assert thread.wait_idle(timeout=0.01) is False
    gate.set()
    assert thread.wait_idle(timeout=PATIENCE) is True
    assert ticket.is_ready
    assert sorted(seen[1:]) == ["callback", "task"]
    assert thread.in_flight == 0


def test_what_is_accepted_meanwhile_is_waited_for(thread):
    done = []

    async def chain(left):
        await anyio.sleep(0.001)
        if left:
            thread.post(lambda: thread.submit(chain, left - 1))
        else:
            done.append(True)

    for _ in range(3):
        thread.submit(chain, 5)
    waiting = [threading.Thread(target=thread.wait_idle) for _ in range(3)]
    for one in waiting:
        one.start()
    assert thread.wait_idle(timeout=PATIENCE)
    assert done == [True] * 3
    for one in waiting:
        one.join(PATIENCE)
        assert not one.is_alive()


def test_one_that_does_not_run_is_idle_and_its_end_ends_the_wait(make):
    thread = make()
    assert thread.wait_idle() is True
    thread.start()
    thread.submit(anyio.sleep_forever)
    answers = []
    waits = threading.Thread(target=lambda: answers.append(thread.wait_idle()))
    waits.start()
    time.sleep(0.005)
    assert answers == []
    thread.stop(timeout=0)
    waits.join(PATIENCE)
    assert answers == [True]
    assert (thread.in_flight, thread.wait_idle()) == (0, True)


def test_a_wait_that_could_not_end_is_refused_by_name(thread):
    async def in_a_worker_thread():
        with pytest.raises(ConfigError, match="would wait for what calls it"):
            await anyio.to_thread.run_sync(thread.wait_idle)
        with pytest.raises(ConfigError, match="would wait for what calls it"):
            thread.wait_idle()

    async def elsewhere():
        with pytest.raises(ConfigError, match=r"await anyio.to_thread.run_sync\(thread.wait_idle\)"):
            thread.wait_idle()
        return await anyio.to_thread.run_sync(thread.wait_idle)

    thread.submit(in_a_worker_thread).wait_sync(PATIENCE)
    assert anyio.run(elsewhere) is True
    with pytest.raises(InvalidParameterError, match="timeout must be 0 or more seconds"):
        thread.wait_idle(timeout=-1)


# ----------------------------------------------------------------------------------------------------------------- group


def test_a_group_runs_in_it_and_shuts_down_within_its_own_time(make):
    thread = make(stop_timeout=0)
    thread.start()
    begun, finish = threading.Event(), threading.Event()
    handled = []

    async def handle(number: int) -> None:
        begun.set()
        while not finish.is_set():
            await anyio.sleep(0.005)
        handled.append(number)

    mailbox = open_mailbox("memory://portal-group")
    group = LoopGroup([MainLoop(mailbox, handle)], guardian=False)
    ticket = group.start_in(thread)
    thread.submit(mailbox.send, 7).wait_sync(PATIENCE)
    assert begun.wait(PATIENCE)
    stopper = threading.Thread(target=thread.stop)
    stopper.start()
    while thread.state is LoopThreadState.RUNNING:
        pass
    finish.set()
    stopper.join(PATIENCE)
    assert handled == [7]
    assert ticket.wait_sync(0).clean


def test_a_group_in_it_has_started_when_its_start_returns(make, tmp_path):
    thread = make()
    thread.start()
    handled = []
    for number in range(5):
        mailbox = open_mailbox(f"sqlite:///{tmp_path}/{number}.db?name=jobs", body=int)

        async def handle(job: int) -> None:
            handled.append(job)

        group = LoopGroup([MainLoop(mailbox, handle)], guardian=False)
        report = group.start_in(thread)
        mailbox.sync.send(number)  # it is open
        while len(handled) <= number:
            time.sleep(0.001)
        assert not report.is_ready

        async def ask(group=group):
            return group.status()

        assert thread.submit(ask).wait_sync(PATIENCE).started
        with pytest.raises(ConfigError, match=r"group 'mainspring' runs in another thread: ask there"):
            group.status()
        thread.post(group.request_shutdown)
        assert report.wait_sync(PATIENCE).clean
        assert group.status().reasons == ("not running",)
    assert handled == [*range(5)]


def test_a_group_that_cannot_start_in_it_keeps_nobody_waiting(make, tmp_path):
    async def handle(job: int) -> None: ...

    def group():
        return LoopGroup([MainLoop(open_mailbox(f"sqlite:///{tmp_path}/none/x.db?name=jobs"), handle)], guardian=False)

    thread = make()
    idle = group().start_in(thread)  # nobody has started the thread
    thread.start()
    broken = group().start_in(thread)
    stopped = group()
    stopped.request_shutdown()
    ended = stopped.start_in(thread)
    with pytest.raises(LoopNotRunningError):
        idle.wait_sync(0)
    with pytest.raises(MainspringError, match="none"):
        broken.wait_sync(PATIENCE)
    with suppress(MainspringError):
        ended.wait_sync(PATIENCE)


@pytest.mark.anyio
async def test_in_an_event_loop_the_start_of_a_group_blocks_nothing(make, anyio_backend):
    async def handle(job: int) -> None: ...

    with make() as thread:
        mailbox = open_mailbox("memory://portal-group-async")
        go_on, waited = threading.Event(), []
        thread.post(lambda: waited.append(go_on.wait(PATIENCE)))  # nothing starts there meanwhile
        report = LoopGroup([MainLoop(mailbox, handle)], guardian=False).start_in(thread)
        go_on.set()
        await anyio.to_thread.run_sync(thread.stop)
        with suppress(LoopNotRunningError):
            assert (await report.wait(PATIENCE)).clean
        assert waited == [True], "it has waited for the thread"


def test_a_group_in_it_that_crashes(make):
    thread = make()
    thread.start()

    class Crashing:
        name = "crashing"
        running = False
        heartbeat = Heartbeat()

        async def run(self):
            raise RuntimeError("broken")

        async def shutdown(self, *, timeout=30.0):
            return True

    with pytest.raises(RuntimeError, match="broken"):
        LoopGroup([Crashing()], guardian=False).start_in(thread).wait_sync(PATIENCE)
