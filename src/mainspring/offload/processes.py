"""Jobs in worker processes. A worker does one job at a time; the processes that its jobs start are killed with it."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - between this process and its own children, as in the standard library's pools
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe, spawn
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from mainspring.core import process
from mainspring.core.clock import monotonic
from mainspring.core.introspection import name_of
from mainspring.core.loggers import Logger
from mainspring.errors import OffloadClosedError, OffloadPickleError, OffloadWorkerDiedError, TaskExitError, describe
from mainspring.offload import worker_main
from mainspring.offload.worker_main import BEGUN, LEAVE, READY, TAG_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable


class ParentDeathPipe:
    """One worker's pipe. ``theirs`` is the descriptor that the worker gets."""

    def __init__(self) -> None:
        self.theirs, self._ours = os.pipe()
        process.on_fork(self, ParentDeathPipe._forget)

    def given(self) -> None:
        """Close the worker's end here: the worker has it, or could not be started."""
        os.close(self.theirs)

    def close(self) -> None:
        """Close this end. A worker that still runs dies of it."""
        process.off_fork(self)  # first: a child forked in between would close what has the number next
        self._forget()

    def _forget(self) -> None:
        os.close(self._ours)


STOP_WITHIN = 1.0
"""Longest time for finding and stopping a family of processes, in seconds. It takes milliseconds."""


def descendants(root: int) -> dict[int, int]:
    """Return the process ids of all descendants of ``root``, each with the id of its parent.

    The result is empty while this process can open no more files.
    """
    children: dict[int, list[int]] = {}
    try:
        entries = os.listdir("/proc")
    except OSError:
        return {}
    for entry in entries:
        if entry.isdigit():
            children.setdefault(_parent(int(entry)), []).append(int(entry))
    found: dict[int, int] = {}
    reached = [root]
    while reached:
        parent = reached.pop()
        new = [child for child in children.get(parent, ()) if child not in found]
        found.update(dict.fromkeys(new, parent))
        reached += new
    return found


def hold(family: dict[int, int]) -> list[int]:
    """Return descriptors of these processes. A signal by descriptor never reaches a process that got the number meanwhile."""
    held = []
    for pid, parent in family.items():
        with suppress(OSError):
            descriptor = os.pidfd_open(pid)
            if _parent(pid) == parent:
                held.append(descriptor)
            else:  # it has ended, or its parent has, and the next look finds it
                os.close(descriptor)
    return held


def kill_held(held: list[int]) -> None:
    """Kill the processes of these descriptors, and close them."""
    for descriptor in held:
        _send(descriptor, signal.SIGKILL)
        os.close(descriptor)


def kill_family(root: int) -> None:
    """Kill the process ``root``, which must be a child of this one that has not been waited for, and its descendants.

    Returns once the signals are sent; it does not wait for their ends.
    """
    held: list[int] = []
    known: dict[int, int] = {}
    with suppress(ProcessLookupError):
        os.kill(root, signal.SIGSTOP)
    quiet, until = 0, monotonic() + STOP_WITHIN
    # What is forked while it looks is found the next time; twice, since a process that ends meanwhile takes one look.
    while quiet < 2 and monotonic() < until:
        new = dict(descendants(root).items() - known.items())
        known |= new
        stopped = hold(new)
        for descriptor in stopped:
            _send(descriptor, signal.SIGSTOP)
        held += stopped
        quiet = 0 if new else quiet + 1
    kill_held(held)
    with suppress(ProcessLookupError):
        os.kill(root, signal.SIGKILL)


def _parent(pid: int) -> int:
    """Return the process id of its parent, or 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _send(descriptor: int, signum: int) -> None:
    with suppress(OSError):
        signal.pidfd_send_signal(descriptor, signum)


REAP_WITHIN = 2.0
"""Seconds to wait for the end of a worker, unless its pool's ``cancel_grace`` is shorter. It takes milliseconds, or longer if
the kernel holds the process in a call."""

Answer = tuple[str, Any, str]
"""``(how, what, text)``, as :func:`worker_main.perform` returns it."""

_log = Logger("mainspring.offload")


def _ignore_start(starts: bool) -> None:
    """Ignore the start of a worker."""


class Processes:
    """The worker processes of one pool. A worker is started when a job finds none idle.

    Idle ones get half of ``cancel_grace`` to end by themselves when the pool is closed.
    """

    kills = True

    def __init__(self, *, cancel_grace: float, start_timeout: float) -> None:
        self._grace = cancel_grace
        self._start_within = start_timeout
        self._lock = threading.Lock()
        self._idle: list[PoolProcess] = []
        self._all: set[PoolProcess] = set()
        self._closed = False

    def job(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> ProcessJob:
        """Return a job for a worker process."""
        return ProcessJob(self, fn, args)

    def take(self, starting: Callable[[bool], object] = _ignore_start, *, fresh: bool = False) -> PoolProcess:
        """Take the idle worker that was used last, or start a new one.

        ``starting`` is called with True before a start and with False after it. If the worker must be ``fresh``, a new one
        replaces an idle one.

        :raises OffloadWorkerDiedError: the worker could not be started.
        """
        useless: list[PoolProcess] = []
        try:
            with self._lock:
                if self._closed:
                    raise OffloadClosedError("the pool of processes is closed")
                while self._idle and not (fresh and useless):
                    worker = self._idle.pop()
                    if not (fresh or worker.has_ended):
                        return worker
                    useless.append(worker)
                starting(True)
                worker = PoolProcess(min(REAP_WITHIN, self._grace))
                self._all.add(worker)
        finally:
            for other in useless:
                self.discard(other)
        try:
            worker.get_ready(self._start_within)
        except WorkerDied as death:
            self.discard(worker)
            raise OffloadWorkerDiedError(
                f"a worker process could not be started: it {death}; see what it has said on standard error (a script must"
                ' guard what it runs with `if __name__ == "__main__":`)'
            ) from None
        finally:
            starting(False)
        return worker

    def release(self, worker: PoolProcess) -> None:
        """Make a worker that has done its job available again."""
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        self.discard(worker)

    def discard(self, worker: PoolProcess) -> None:
        """Kill a worker and wait for its end."""
        worker.kill()
        worker.reap()
        with self._lock:
            self._all.discard(worker)

    def close(self) -> None:
        """End all workers: idle ones may leave by themselves, busy ones are killed."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = self._all.difference(idle)
        for worker in busy:
            worker.kill()  # the thread that waits for its answer discards it
        for worker in idle:
            worker.ask_to_leave()
        until = monotonic() + self._grace / 2
        for worker in idle:
            worker.wait(max(0.0, until - monotonic()))
            worker.kill()
        for worker in idle:
            self.discard(worker)


class ProcessJob:
    """One call in a worker process."""

    killable = True
    is_told = False

    def __init__(self, processes: Processes, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self._args = args
        self._processes = processes
        self._lock = threading.Lock()
        self._worker: PoolProcess | None = None
        self._begun = False
        self._given_up = False
        self._starting: Callable[[bool], object] = _ignore_start

    def on_worker_start(self, starting: Callable[[bool], object]) -> None:
        """Have ``starting(True)`` called when a worker is being started for the job, and ``starting(False)`` after it."""
        self._starting = starting

    @property
    def where(self) -> str:
        """The worker process that does the job, as text."""
        worker = self._worker
        return "" if worker is None else f"worker process {worker.pid}"

    def perform(self) -> Any:
        """Have a worker do the job. Return its result or raise its exception.

        :raises OffloadWorkerDiedError: the worker died during the job, or could not be started.
        :raises OffloadPickleError: the job, its result or its exception cannot be pickled.
        """
        job = pack(self.fn, self._args)
        for last in (False, True):
            # The second time a new one: what has killed the first, as it was idle, may have killed, or be killing, others.
            worker = self._processes.take(self._starting, fresh=last)
            if not self._hold(worker):
                self._processes.release(worker)  # it was given up meanwhile; the worker is as good as new
                raise OffloadClosedError(f"{name_of(self.fn)} was given up before it began")
            try:
                answer = worker.ask(job)
            except WorkerDied as death:
                self._let_go(begun=death.begun)
                self._processes.discard(worker)
                if death.begun or self._given_up:
                    raise OffloadWorkerDiedError(
                        f"the worker process of {name_of(self.fn)} {death}; the call may have had effects"
                    ) from None
                if last:
                    raise OffloadWorkerDiedError(
                        f"the worker process of {name_of(self.fn)} {death} as it received the call, which is"
                        f" {len(job):,} bytes, and so did the one before it; the call has not begun"
                    ) from None
            else:
                self._let_go(begun=True)
                self._processes.release(worker)
                return unpack(self.fn, answer)
            # It died with no job in its hands, maybe before it came to this one: another one does this.
        raise AssertionError

    def give_up(self) -> bool:
        """Kill the worker that does the job, if it has begun. Does not block; callable from the event loop.

        A worker that is still starting is kept for the next job: otherwise jobs with a deadline shorter than a start would
        never run.
        """
        with self._lock:
            self._given_up = True
            if self._worker is not None:
                self._worker.kill_soon()
            return self._begun

    def _hold(self, worker: PoolProcess) -> bool:
        with self._lock:
            if not self._given_up:
                self._worker, self._begun = worker, True
            return not self._given_up

    def _let_go(self, *, begun: bool) -> None:
        with self._lock:
            self._worker, self._begun = None, begun


class WorkerDied(Exception):  # noqa: N818 - between the worker and its job
    """A worker has ended or is unusable. ``begun``: it may have begun the job. The text says how it ended."""

    def __init__(self, how: str, *, begun: bool) -> None:
        super().__init__(how)
        self.begun = begun


class PoolProcess:
    """A worker: a child process that does one job after the other. Only ``kill`` may be called from several threads.

    It has a session of its own, so that a terminal's Ctrl-C does not reach it. Processes that its jobs start are killed with
    it. A killed worker that has not ended ``reap_within`` seconds later is left behind.
    """

    def __init__(self, reap_within: float) -> None:
        self._reap_within = reap_within
        try:
            self._connection, theirs = Pipe()
            self._parent_death = ParentDeathPipe()
        except OSError as error:
            raise OffloadWorkerDiedError(f"a worker process could not be started: {error}") from error
        passed = (theirs.fileno(), self._parent_death.theirs)
        try:
            # -P: the package's folder must not be where the child imports from.
            command = [sys.executable, "-P", worker_main.__file__, *map(str, passed), str(os.getpid())]
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed, start_new_session=True)
            self._end = os.pidfd_open(self._child.pid)
        except OSError as error:
            self._connection.close()
            self._parent_death.close()
            raise OffloadWorkerDiedError(f"a worker process could not be started: {error}") from error
        finally:
            theirs.close()
            self._parent_death.given()
        self._jobs = 0
        self._killed = False
        self._family: list[int] = []
        self._lock = threading.Lock()  # no signal may go to a number that was reaped, and may be another's by now

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """True if the process has ended."""
        return bool(wait([self._end], 0))

    def get_ready(self, within: float) -> None:
        """Wait up to ``within`` seconds until the worker can take jobs."""
        data = spawn.get_preparation_data("mainspring-worker")
        data["authkey"] = bytes(data["authkey"])  # it refuses to be pickled as what it is
        with suppress(OSError):  # how it died says more
            self._connection.send_bytes(pickle.dumps(data))
        if self._receive(within) != READY:
            raise WorkerDied(self._how_it_ended(), begun=False)

    def ask(self, job: bytes) -> Answer:
        """Send a job and return the answer."""
        self._jobs += 1
        tag = self._jobs.to_bytes(TAG_SIZE, "big")
        with suppress(OSError):
            self._connection.send_bytes(tag + job)
        begun = self._receive()
        if begun is None:
            raise WorkerDied(self._how_it_ended(), begun=False)
        answer = self._receive() if begun == tag + BEGUN else begun
        if answer is None:
            raise WorkerDied(self._how_it_ended(), begun=True)
        if begun == tag + BEGUN and answer.startswith(tag):
            with suppress(Exception):  # garbled bytes raise anything
                return opened(answer[TAG_SIZE:])
        raise WorkerDied("answered something else than what became of it", begun=True)

    def ask_to_leave(self) -> None:
        """Ask an idle worker to end. Processes that its jobs have left running are killed once it has ended."""
        self._family = hold(descendants(self.pid))
        with suppress(OSError):
            self._connection.send_bytes(LEAVE)

    def kill(self) -> None:
        """Kill the worker and its descendants, without waiting for their end. Takes milliseconds; works once."""
        with self._lock:
            if self._child.returncode is None and not self._killed:
                self._killed = True
                kill_family(self._child.pid)
                with suppress(ProcessLookupError):  # what has lost its parent, and is in the session still
                    os.killpg(self._child.pid, signal.SIGKILL)

    def kill_soon(self) -> None:
        """Have a thread kill the worker; callable from the event loop."""
        try:
            threading.Thread(target=self.kill, name="mainspring offload kill", daemon=True).start()
        except RuntimeError:  # no more threads to be had
            self.kill()

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` until the worker has ended."""
        wait([self._end], seconds)

    def reap(self) -> None:
        """Wait for the end of a worker that was killed or has died, and close its descriptors.

        A worker that has not ended ``reap_within`` seconds later is left behind, with a warning. None of its code runs, and
        :mod:`subprocess` collects its exit status when a later process is started.
        """
        family, self._family = self._family, []
        kill_held(family)
        if wait([self._end], self._reap_within):
            with self._lock:
                self._child.wait()
        else:
            text = "worker process %d was killed, and has not ended %g s later; it is left behind"
            _log.warning(text, self.pid, self._reap_within)
        os.close(self._end)
        self._connection.close()
        self._parent_death.close()

    def _receive(self, seconds: float | None = None) -> bytes | None:
        """Return the next bytes, or None if the worker has ended. Kill a worker that sends nothing for ``seconds``."""
        if not wait([self._connection, self._end], seconds):
            self.kill()
            return None
        try:
            return self._connection.recv_bytes() if self._connection.poll() else None
        except (EOFError, OSError):
            return None

    def _how_it_ended(self) -> str:
        """Describe the end of a worker that has ended or is about to."""
        if not wait([self._end], REAP_WITHIN):
            return "answered nothing that can be understood, and was killed"
        with self._lock:
            status = self._child.poll() or 0
        if status < 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(-status).name}"
            return f"was killed by signal {-status}"
        return f"ended with status {status}"


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a call as bytes.

    :raises OffloadPickleError: the call cannot be pickled.
    """
    try:
        return pickle.dumps((fn, args), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # an object's own pickling may raise anything
        raise OffloadPickleError(
            f"{name_of(fn)} cannot be offloaded to a process or an interpreter: it or an argument cannot be pickled"
            f" ({describe(error)}); give a function of a module, and plain data"
        ) from None


def opened(answer: bytes) -> Answer:
    """Return an answer of :func:`worker_main.perform` from bytes. Garbled bytes raise anything."""
    how, what, text = pickle.loads(answer)  # noqa: S301 - from a child of this process
    return how, what, text


def unpack(fn: Callable[..., Any], answer: Answer) -> Any:
    """Return the result of a call, or raise its exception."""
    how, what, text = answer
    if how == "unrun":
        raise TaskExitError(
            f"{name_of(fn)} returned {what}, so its work has not run to its end; give a plain function that returns its result"
        )
    try:
        value = pickle.loads(what) if how != "lost" else OffloadPickleError(f"{name_of(fn)}: {what}")  # noqa: S301
    except Exception as error:
        raise OffloadPickleError(
            f"{name_of(fn)}: what it {how} cannot be unpickled here ({describe(error)}); return plain data"
        ) from None
    if how == "returned":
        return value
    if not isinstance(value, BaseException):  # a __reduce__ may say anything
        raise OffloadPickleError(f"{name_of(fn)}: the exception it raised comes back as {type(value).__qualname__}")
    if text:
        value.add_note(f"Where it was raised:\n{text.rstrip()}")
    try:
        raise value
    finally:
        del value  # its traceback refers to this frame
