"""Where a task or a thread stands: the line that a report names when something had to be cancelled."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from contextlib import contextmanager
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, TracebackType
from typing import TYPE_CHECKING, Any

from mainspring.core.run_in_context import driven

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

# By module name and not by path: a user's program may well live in a directory called asyncio.
_PLUMBING = frozenset(
    {"anyio", "asyncio", "concurrent", "contextlib", "outcome", "queue", "selectors", "threading", "trio", "uvloop"}
)
_EVENT_LOOPS = frozenset({"anyio", "asyncio", "trio", "uvloop"})
_DEBUGGERS = frozenset({"bdb", "pdb", "debugpy", "pydevd", "_pydevd_bundle", "ptvsd", "pudb", "ipdb"})
_DEPTH = 1_000
_STANDARD_LIBRARY = linecache.__file__.removesuffix("linecache.py")
_INSTALLED = ("/site-packages/", "/dist-packages/")


def where(awaitable: Any) -> str:
    """Return the innermost line that a coroutine stands on: of the user's code, else of a library's, of this package's, or of
    the event loop's. Libraries are what is installed, and the standard library.

    ``"path.py:12 in handle: await client.get(url)"``. Of a coroutine that is running just now (seen from another thread) it is
    the line of the outermost function, since Python keeps no more. Of an ended coroutine, it is an empty string.
    """
    chosen: tuple[FrameType, int | None] | None = None
    rank = 0
    with _uncollected():
        chain = [*await_chain(awaitable)]
    for frame, line in chain:
        if _rank(frame) >= rank:
            chosen, rank = (frame, line), _rank(frame)
    return describe(*chosen) if chosen is not None else ""


def where_thread(thread_id: int) -> str:
    """Return the line, chosen as in :func:`where`, that a thread is executing; of an ended thread an empty string.

    What called the event loop is not looked at where something that the event loop called is there to be named.
    """
    place = place_of(thread_id)
    return describe(*place) if place is not None else ""


def place_of(thread_id: int) -> tuple[FrameType, int] | None:
    """Return what :func:`where_thread` describes, without reading the source, so that a thread need not wait for that."""
    chosen: tuple[FrameType, int] | None = None
    for frame, line in stack_of(thread_id):
        if chosen is None or _rank(frame) > _rank(chosen[0]):
            chosen = (frame, line)
        elif _top_package(frame) in _EVENT_LOOPS and _rank(chosen[0]):
            break
    return chosen


def where_raised(error: BaseException) -> str:
    """Return the line, chosen as in :func:`where`, from which an error came; an empty string where it was never raised.

    And where it is one of this package's that passed no other lines: its text says what is to be known.
    """
    chosen: tuple[FrameType, int] | None = None
    step = error.__traceback__
    while step is not None:
        if chosen is None or _rank(step.tb_frame) >= _rank(chosen[0]):
            chosen = (step.tb_frame, step.tb_lineno)
        step = step.tb_next
    if chosen is None or (_rank(chosen[0]) == 1 and type(error).__module__.partition(".")[0] == _OWN):
        return ""
    return describe(*chosen)


def beneath(trace: TracebackType | None, module: str) -> TracebackType | None:
    """Return a traceback without its first frames, as far as they are those of the module of that name."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == module:
        trace = trace.tb_next
    return trace


def in_debugger(thread_id: int) -> bool:
    """True if a debugger holds that thread, which may then stand still for as long as its user likes."""
    return any(_top_package(frame) in _DEBUGGERS for frame, _ in stack_of(thread_id))


def describe(frame: FrameType, line: int | None) -> str:
    """Return a frame and its line as one line of text, with the source where it can be read."""
    code = frame.f_code
    number = line or code.co_firstlineno
    source = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    return f"{code.co_filename}:{number} in {code.co_name}" + (f": {source}" if source else "")


def all_stacks(*, without: Container[int | None] = ()) -> str:
    """Return the stacks of all threads as text, the main thread first; those of the threads ``without`` are left out."""
    import traceback

    stacks = _all_stacks()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    wanted = (ident for ident in stacks if ident not in without)
    for ident in sorted(wanted, key=lambda ident: ident != threading.main_thread().ident):
        parts.append(f"Thread {names.get(ident, '?')} ({ident}), most recent call last:")
        lines = traceback.StackSummary.extract(reversed(stacks[ident]))
        parts.append("".join(lines.format()).rstrip())
    stacks.clear()  # this very frame is in there, and would stay with all others until garbage is collected
    return "\n".join(parts)


def stack_of(thread_id: int) -> list[tuple[FrameType, int]]:
    """Return the frames of a thread and their lines, the innermost first; of an ended thread none."""
    return _all_stacks(thread_id).get(thread_id, [])


@contextmanager
def _uncollected() -> Iterator[None]:
    """Look at what another thread executes, in Python 3.11 without a garbage collection on the way.

    It could let the other thread go on in the midst of a step to its next frame, which then is none any more. The process then
    ends with a segmentation fault, or (up to 3.11.8, CPython issue 106883) all threads wait for each other for ever. Python
    3.12 and later collect between such steps only.
    """
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _all_stacks(only: int | None = None) -> dict[int, list[tuple[FrameType, int]]]:
    """Return the frames and lines of each thread, or of one, by its id."""
    with _uncollected():
        # No name for the frames of all threads, since this one is among them: it would hold itself.
        return {
            ident: _outwards(frame)
            for ident, frame in sys._current_frames().items()  # noqa: SLF001 - the only way to see another thread's stack
            if only in (None, ident)
        }


def _outwards(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    stack = []
    while frame is not None:
        stack.append((frame, frame.f_lineno))
        frame = frame.f_back
    return stack


def await_chain(awaitable: Any) -> Iterator[tuple[FrameType, int | None]]:
    """Yield the frames of a coroutine and of what it waits for, and their lines, the outermost first."""
    for _ in range(_DEPTH):
        frame: FrameType | None
        if isinstance(awaitable, CoroutineType):
            frame, awaitable = awaitable.cr_frame, awaitable.cr_await
        elif isinstance(awaitable, GeneratorType):
            frame, awaitable = awaitable.gi_frame, awaitable.gi_yieldfrom or driven(awaitable)
        elif isinstance(awaitable, AsyncGeneratorType):
            frame, awaitable = awaitable.ag_frame, awaitable.ag_await
        else:
            awaitable = _inside(awaitable)
            if awaitable is None:
                return
            continue
        if frame is not None:
            yield frame, frame.f_lineno


def _inside(awaitable: Any) -> Any | None:
    """Return what the interpreter's own wrappers wait for (``async for``, ``coroutine.__await__()``). Only gc knows that."""
    if type(awaitable).__name__ in (
        "async_generator_asend",
        "async_generator_athrow",
        "coroutine_wrapper",
        "anext_awaitable",
    ):
        for inner in gc.get_referents(awaitable):
            if isinstance(inner, CoroutineType | AsyncGeneratorType) or type(inner).__name__.startswith(
                "async_generator_a"
            ):
                return inner
    return None


def _rank(frame: FrameType) -> int:
    """Return how much a frame tells a reader: 3 the user's code, 2 a library's, 1 this package's, 0 the event loop's."""
    top = _top_package(frame)
    if top == _OWN:
        return 3 if frame.f_globals["__name__"].startswith(f"{_OWN}.examples") else 1  # those are a user's programs
    if top in _PLUMBING:
        return 0
    path = frame.f_code.co_filename
    is_library = path.startswith((_STANDARD_LIBRARY, "<frozen ")) or any(folder in path for folder in _INSTALLED)
    return 2 if is_library else 3


def _top_package(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else ""


_OWN = __name__.partition(".")[0]
