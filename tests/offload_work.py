"""What the tests of offloading have done in other processes: functions of a module, as pickling wants them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from mainspring.errors import Reject, Retry


def add(a, b):
    return a + b


def pid():
    return os.getpid()


def sleep(seconds):
    time.sleep(seconds)


def sleep_in(path, seconds=60):
    """Say in a file which process this is, and sleep."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(seconds)


def kill_oneself(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def segfault():
    ctypes.string_at(0)


def leave_at_once(status):
    os._exit(status)


def leave(status):
    sys.exit(status)


def end_after(seconds):
    """Return, and have the process die a little later, when it is idle."""
    threading.Timer(seconds, os._exit, (7,)).start()
    return os.getpid()


def a_lambda():
    return lambda: None


class TwoWords(Exception):
    """It can be pickled, but not unpickled."""

    def __init__(self, one, two):
        super().__init__(one)
        self.two = two


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("with a lock in it")
        self.lock = threading.Lock()


class PrankError(Exception):
    def __reduce__(self):
        return str, ("no exception",)


def raise_it(kind, *args):
    raise kind(*args)


def raise_retry():
    raise Retry(delay=5, charge=False)


def write_to_every_stream():
    """What would spoil a protocol on standard output."""
    print("to standard output", flush=True)
    os.write(1, b"by number\n")
    return sys.stdin.read()


def start_child(path):
    """Leave a child behind, and sleep."""
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    Path(path).write_text(f"{os.getpid()} {child}")
    time.sleep(60)


def signal_oneself(signum):
    os.kill(os.getpid(), signum)
    time.sleep(0.05)
    return "still here"


def reject(job: str) -> None:
    raise Reject(f"no {job}")


def retry(job: str) -> None:
    raise Retry(charge=False)


def shout(job: str) -> str:
    return f"{job.upper()} {os.getpid()}"


def hang(job: str) -> None:
    sleep_in(job)


def hang_the_first_time(job: str) -> str:
    """``job`` is a path; the file says that it was here before."""
    if not Path(job).exists():
        sleep_in(job)
    return "the second time"


def die(job: str) -> None:
    kill_oneself()
