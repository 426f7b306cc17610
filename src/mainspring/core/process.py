"""The one registry of what there is one of per process by nature, and hence the only module-level mutable state.

The signal receiver, the names of ``memory://`` mailboxes and the open store files: each is claimed here by an owner and given
back. A fork takes none of them along. A forked child starts with an empty registry, without the parent's wake-up descriptor.
Before, every object that called :func:`on_fork` has let go of what belongs to the parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from anyio.lowlevel import current_token

from mainspring.core.introspection import code_of
from mainspring.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from types import FrameType

    from anyio.abc import Process

T = TypeVar("T")
V = TypeVar("V")


class _Registry:
    """What this process has claimed. One instance, renewed in a forked child."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.here = True
        self.lock = threading.RLock()
        self.owners: dict[str, str] = {}
        self.shared: WeakValueDictionary[tuple[str, Hashable], Any] = WeakValueDictionary()
        self.current: dict[str, Any] = {}
        self.inherited: dict[tuple[str, Hashable], Any] = {}
        self.on_fork: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()
        self.fork = threading.local()


_registry = _Registry()


def _before_fork() -> None:
    """Hold signals back until the child has its own handlers: one that comes earlier would count as the parent's."""
    _registry.fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _registry.fork.mask)


def _after_fork_in_child() -> None:
    global _registry
    parent, _registry = _registry, _Registry()
    parent.here = False
    # Kept, not used: what the parent goes on using must not be torn down here when the last reference to it is dropped.
    # By items(), which holds the values: a collection of garbage can end one between its key and a look at it.
    _registry.inherited = {**parent.inherited, **dict(parent.shared.items())}
    try:
        signal.set_wakeup_fd(-1)  # a socket of the parent's event loop
        for thing, forget in reversed(list(parent.on_fork.items())):
            forget(thing)
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, parent.fork.mask)
        except KeyboardInterrupt:  # it came before any code of the child, and an error is not passed on from here
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def on_fork(thing: T, forget: Callable[[T], object]) -> None:
    """Call ``forget(thing)`` in each child that is forked off this process, until :func:`off_fork` or the end of ``thing``.

    The last registered is called first. ``forget`` must not take a lock that ``thing`` has: a thread of the parent may
    have held it at the fork.
    """
    _registry.on_fork[thing] = forget


def off_fork(thing: object) -> None:
    """Undo :func:`on_fork` (idempotent)."""
    _registry.on_fork.pop(thing, None)


def end_returned_child() -> NoReturn:
    """End a forked child that has come back from the code of the user that forked: the parent's event loop is not its own."""
    os.write(2, b"mainspring: a handler forked, and its child came back from it; the child is ended\n")
    os._exit(1)


class Identity(Protocol):
    """Stands for one process. Two processes have two objects, also where one is forked off the other.

    ``here`` is True in that process and False in a child forked off it: the check costs less than asking for the process id.
    """

    @property
    def pid(self) -> int: ...
    @property
    def here(self) -> bool: ...


def identity() -> Identity:
    """Return what stands for this process."""
    return _registry


def async_library() -> str:
    """Return ``"asyncio"`` or ``"trio"``: what the running event loop is."""
    return "trio" if type(current_token().native_token).__module__.partition(".")[0] == "trio" else "asyncio"


def event_loop() -> object:
    """Return the identity of the running event loop, to tell one from another."""
    return current_token().native_token


def in_event_loop() -> bool:
    """True if this thread runs an event loop just now, so that blocking it would stop everything there.

    Asked of the libraries themselves: in a bare callback of the event loop, which no task has scheduled, anyio does not
    know on what it runs.
    """
    running, trio = _asked_of_libraries()
    return (running is not None and running() is not None) or (trio is not None and trio.in_trio_run())


def in_task_of(loop: object) -> bool:
    """True in a task of the event loop ``loop`` (see :func:`event_loop`), but not in a signal handler that interrupts it."""
    running, trio = _asked_of_libraries()
    if trio is not None and trio.in_trio_task():
        here = trio.current_trio_token()
    elif running is not None and running() is not None and sys.modules["asyncio"].current_task() is not None:
        here = running()
    else:
        return False
    return here is loop and not in_signal_handler()


def _asked_of_libraries() -> tuple[Any, Any]:
    """Return asyncio's function that gives the running loop, and ``trio.lowlevel``.

    None for what is not imported, or is being imported by another thread just now: nothing runs on it.
    """
    running = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)  # asyncio documents it for libraries
    return running, getattr(sys.modules.get("trio"), "lowlevel", None)


def in_signal_handler() -> bool:
    """True in a Python signal handler, and in what it calls: the state of the interrupted code may be half-way then.

    Asked of the stack. A handler that has just put another one in its own place is not recognised.
    """
    if not in_main_thread():
        return False
    handlers = filter(callable, map(signal.getsignal, range(1, signal.NSIG)))  # what is no signal has no handler
    codes = {code for handler in handlers if (code := getattr(code_of(handler), "__code__", None)) is not None}
    frame: FrameType | None = sys._getframe() if codes else None  # noqa: SLF001 - documented, for want of another way
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def call_soon(loop: Any, fn: Callable[[], object]) -> bool:
    """Have the event loop ``loop`` (see :func:`event_loop`) call ``fn()``, from any thread or signal handler.

    Return False where the loop is gone: it needs to hear of nothing, so that is no error.
    """
    call = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon
    try:
        call(fn)
    except RuntimeError:  # trio.RunFinishedError, or asyncio's "Event loop is closed"
        return False
    return True


def carried_context(library: str | None) -> Context:
    """Return the caller's context variables, for code on ``"asyncio"``, on ``"trio"``, or (None) in a plain thread."""
    context = copy_context()
    # Says on what its code runs; anyio and others ask it. It is not there while another thread imports sniffio.
    variable = getattr(sys.modules.get("sniffio"), "current_async_library_cvar", None)
    if variable is not None:
        context.run(variable.set, library)
    return context


def signal_child(child: Process, signum: int) -> None:
    """Send a signal to a child process that the event loop waits for; none where it has ended.

    Not by the process object: that looks first whether its process has ended, and so takes the exit status away from the
    event loop, which would tell 255 instead.
    """
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signum)


def in_main_thread() -> bool:
    """True if this is the thread that Python runs signal handlers in."""
    return threading.current_thread() is threading.main_thread()


def claim(what: str, owner: str) -> None:
    """Take the one ``what`` of this process; raises :class:`ConfigError`, naming the holder, where it is taken."""
    with _registry.lock:
        holder = _registry.owners.get(what)
        if holder is not None:
            raise ConfigError(f"{owner} cannot have the process's {what}: {holder} has it; give it to one of them only")
        _registry.owners[what] = owner


def disclaim(what: str) -> None:
    """Give ``what`` back (idempotent)."""
    with _registry.lock:
        _registry.owners.pop(what, None)


def shared(kind: str, name: Hashable, make: Callable[[], V]) -> V:
    """Return the process's one object of that kind and name; ``make`` makes it if there is none. It lives while it is used."""
    with _registry.lock:
        found: V | None = _registry.shared.get((kind, name))
        if found is None:
            found = make()
            _registry.shared[kind, name] = found
        return found


def inherited(kind: str, name: Hashable) -> Any | None:
    """Return what :func:`shared` gave the process this one was forked from, or None. It is the parent's: do not use it."""
    return _registry.inherited.get((kind, name))


def current(kind: str) -> Any | None:
    """Return the process's current object of that kind, or None."""
    return _registry.current.get(kind)


def set_current(kind: str, value: Any | None) -> None:
    """Make ``value`` the process's current object of that kind; None removes it."""
    with _registry.lock:
        if value is None:
            _registry.current.pop(kind, None)
        else:
            _registry.current[kind] = value
