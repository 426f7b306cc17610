"""What the tests of offloading have done in other processes: functions of a module, as pickling wants them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import ctypes
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from mainspring.errors import Reject, Retry


def add(a, b):
    return a + b


async def asynchronous(number=0):
    return number


def leads_to_async(number=1):
    return asynchronous(number)


TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")


def exchange_tenant(name: str) -> str:
    before = TENANT.get()
    TENANT.set(name)
    return before


def pid():
    return os.getpid()


def sleep(seconds):
    time.sleep(seconds)


def meet(folder, count):
    """Wait until so many processes are here."""
    Path(folder, f"{os.getpid()}.here").touch()
    while len([*Path(folder).glob("*.here")]) < count:
        time.sleep(0.005)


def sleep_in(path, seconds=60):
    """Say in a file which process this is, and sleep."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(seconds)


def hold_the_interpreter(path):
    """Start a program, say in a file who both are, and let no other thread of this process run any more."""
    program = subprocess.Popen(["sleep", "60"])
    Path(path).write_text(f"{os.getpid()} {program.pid}")
    re.match(r"(a+)+$", "a" * 60 + "b")


def start_and_sleep(path):
    """Start a program, say in a file who both are, and sleep."""
    program = subprocess.Popen(["sleep", "60"])
    Path(path).write_text(f"{os.getpid()} {program.pid}")
    time.sleep(60)


FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{sys.argv[2]} {os.getpid()} {child.pid}")
os.replace(sys.argv[1] + ".new", sys.argv[1])
time.sleep(60)
"""


def start_family(path):
    """Start a program in a session of its own, which does the same, and say in a file who all of them are."""
    subprocess.Popen([sys.executable, "-c", FAMILY, path, str(os.getpid())], start_new_session=True)
    while not os.path.exists(path):
        time.sleep(0.005)


def start_family_and_sleep(path):
    start_family(path)
    time.sleep(60)


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


def _arrive():
    raise LookupError("nothing here knows it")


class Stranger:
    """It can be pickled, and unpickled nowhere."""

    def __reduce__(self):
        return _arrive, ()


def raise_it(kind, *args):
    raise kind(*args)


async def _be_cancelled():
    raise asyncio.CancelledError


def be_cancelled_in_a_loop_of_its_own(*args):
    asyncio.run(_be_cancelled())


def be_cancelled_as_a_future(*args):
    raise concurrent.futures.CancelledError


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


def fork_and_return():
    """Both go on, as where a library's fork goes wrong."""
    return "parent" if os.fork() else "child"


def fork_and_raise():
    if not os.fork():
        raise FileNotFoundError("no such program")
    return "parent"


def fork_and_leave():
    if not os.fork():
        sys.exit(0)
    return "parent"


def fork_and_wait():
    """How the child has ended, which came back from here too."""
    child = os.fork()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None


def fork_and_die_while_answering(seconds):
    """Leave a child behind, with all that it has inherited, and die amid an answer."""
    if not os.fork():
        time.sleep(seconds)
        os._exit(0)
    os.write(_own_connection(), struct.pack("!i", 1000) + b"the first of 1000 bytes")
    kill_oneself()


def note(path, word):
    """Something that must not be done twice."""
    with Path(path).open("a") as file:
        file.write(f"{word}\n")
    return word


def _own_connection():
    """The descriptor by which this worker talks to its owner."""
    return int(Path("/proc/self/cmdline").read_bytes().split(b"\0")[-4])


def _speak(descriptor, data):
    with Connection(descriptor) as connection:
        connection.send_bytes(data)


def speak_out_of_turn(data, after=None, then=0):
    """Send something to the owner of this worker, at once, or when there is a file at the path ``after``; then tell so in a
    file beside that. Send the signal ``then`` to oneself."""
    descriptor = os.dup(_own_connection())
    if after is not None:

        def speak():
            while not os.path.exists(after):
                time.sleep(0.005)
            _speak(descriptor, data)
            Path(f"{after}.said").touch()

        threading.Thread(target=speak, daemon=True).start()
    else:
        _speak(descriptor, data)
    os.kill(os.getpid(), then)
    return os.getpid()


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


def generates(number: int = 0):
    yield number


async def generates_async(number: int = 0):
    yield number


def leads_to_a_generator():
    return generates()
