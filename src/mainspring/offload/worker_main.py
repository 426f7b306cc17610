"""The program of a worker process, and what it does with a job: standard library only, so that it starts quickly.

A job comes as bytes and its answer goes back as bytes, in pickle. Both ends are this program and the one that started it, on
one machine and of one installation. Nothing of it is ever stored. An interpreter runs :func:`perform` alone.
"""

from __future__ import annotations

import fcntl
import os
import pickle  # noqa: TID251 - between this process and its own child, as in the standard library's pools
import select
import signal
import sys
import threading
import traceback
from contextvars import copy_context
from multiprocessing import spawn
from multiprocessing.connection import Connection
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

READY = b"ready"
BEGUN = b"begun"
LEAVE = b""
"""What passes beside jobs and answers: the worker can take jobs, it has taken one, it is to end."""
TAG_SIZE = 8
"""Bytes before a job that tell it from the others of its worker. They also stand before all that is said of it."""


def perform(job: bytes) -> bytes:
    """Do a pickled ``(function, arguments)``, and pickle how it went; raises nothing.

    The answer is ``(how, what, text)``: ``("returned", pickled result, "")``, ``("raised", pickled exception, traceback)``,
    ``("unrun", "what it returned that has not run", "")``, ``("lost", "what of it cannot be pickled", traceback)``.
    Each job has context variables of its own: a worker does one job after the other.
    """
    try:
        fn, args = pickle.loads(job)  # noqa: S301 - from the process that started this one
    except BaseException as error:
        return _lost("the function or an argument cannot be unpickled there", error)
    try:
        result = copy_context().run(fn, *args)
    except BaseException as error:
        trace = error.__traceback__
        text = "".join(traceback.format_exception(error.with_traceback(trace and trace.tb_next)))  # without this frame
        try:
            pickled = pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
            pickle.loads(pickled)  # noqa: S301 - many an exception can be pickled, but not unpickled
        except BaseException:
            return _lost("it raised an exception that cannot be pickled", error, text)
        return _answer("raised", pickled, text)
    if isinstance(result, CoroutineType):
        result.close()  # else Python warns that it was never awaited
        return _answer("unrun", "a coroutine", "")
    if isinstance(result, GeneratorType | AsyncGeneratorType):
        return _answer("unrun", "a generator", "")
    try:
        return _answer("returned", pickle.dumps(result, pickle.HIGHEST_PROTOCOL), "")
    except BaseException as error:
        return _lost(f"its result of type {type(result).__qualname__} cannot be pickled", error)


def _answer(how: str, what: bytes | str, text: str) -> bytes:
    return pickle.dumps((how, what, text), pickle.HIGHEST_PROTOCOL)


def _lost(what: str, error: BaseException, text: str = "") -> bytes:
    try:
        said = str(error)
    except Exception:
        said = "it cannot be printed"
    return _answer("lost", f"{what} ({type(error).__qualname__}: {said})", text)


def main(descriptor: int, parent_death: int, owner: int) -> None:
    """Take jobs until told to leave. The process ``owner`` is at the other end of the connection ``descriptor``, and holds
    that of the pipe ``parent_death`` for as long as it lives."""
    _die_with_the_owner(parent_death)
    # The owner decides when a worker ends: a service manager signals all of a service's processes at once, and a job in
    # hand is to be finished. A handler, unlike SIG_IGN, is not passed on to programs that a job starts.
    handlers = {signum: signal.signal(signum, _leave_it_to_the_owner) for signum in (signal.SIGINT, signal.SIGTERM)}
    connection, worker = Connection(descriptor), os.getpid()
    # What a job starts or forks off has no part in it: it could take jobs, and would hide the end of this process.
    os.set_inheritable(descriptor, False)
    _fork_without(connection, handlers)
    try:
        spawn.prepare(pickle.loads(connection.recv_bytes()))  # noqa: S301 - sys.path, __main__ and the like
        threading.Thread(target=_watch_the_owner, args=(descriptor, owner), name="owner", daemon=True).start()
        connection.send_bytes(READY)
        while (order := connection.recv_bytes()) != LEAVE:
            tag = order[:TAG_SIZE]
            connection.send_bytes(tag + BEGUN)
            answer = perform(order[TAG_SIZE:])
            if os.getpid() != worker:
                _end_child()
            connection.send_bytes(tag + answer)
    except (EOFError, OSError):
        return  # the owner is gone


def _end_child() -> None:
    """End the child that a job has forked and that came out of the job too: one worker does not become two."""
    os.write(2, b"mainspring worker: the job forked, and its child came back from it; the child is ended\n")
    os._exit(1)


def _fork_without(connection: Connection, handlers: dict[signal.Signals, Any]) -> None:
    """Give what a job forks off these signal handlers, and no connection. Signals are held back until it has them."""
    forking = threading.local()

    def before() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def begin() -> None:
        connection.close()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        try:
            after()
        except KeyboardInterrupt:  # it came before any code of the child, and an error is not passed on from here
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=begin)


def _leave_it_to_the_owner(signum: int, frame: Any) -> None:
    """Do nothing."""


def _die_with_the_owner(parent_death: int) -> None:
    """Have the kernel kill this process, and what its jobs start, once the other end is closed.

    No thread of this process could: a job may hold the interpreter's lock for ever.
    """
    os.set_inheritable(parent_death, False)
    fcntl.fcntl(parent_death, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(parent_death, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent_death, fcntl.F_SETFL, fcntl.fcntl(parent_death, fcntl.F_GETFL) | os.O_ASYNC)


def _watch_the_owner(descriptor: int, owner: int) -> None:
    """Do the same from here, for what the kernel does not notice. A program that the owner has forked off in a way of its own
    holds the other ends as well."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is reported unasked
    try:
        poll.register(os.pidfd_open(owner), select.POLLIN)
        there = os.getppid() == owner
    except OSError:
        there = False
    while there and not poll.poll():
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
