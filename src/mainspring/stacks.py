"""Where a task or a thread stands: the line that a report names when something had to be cancelled."""

from __future__ import annotations

import linecache
import sys
import threading
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLUMBING = ("/asyncio/", "/anyio/", "/trio/", "/outcome/", "/concurrent/futures/", "/threading.py", "/selectors.py")


def where(awaitable: Any) -> str:
    """The innermost line, outside the event loop's own code, on which a suspended coroutine waits.

    ``"path.py:12 in handle: await client.get(url)"``, or an empty string where it is not suspended (running or done).
    """
    chosen: tuple[FrameType, int] | None = None
    for frame, line in _await_chain(awaitable):
        if chosen is None or not _is_plumbing(frame):
            chosen = (frame, line)
    return describe(*chosen) if chosen is not None else ""


def where_thread(thread_id: int) -> str:
    """The innermost line outside the event loop's code that a thread is executing, or an empty string."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - the only way to see another thread's stack
    while frame is not None and _is_plumbing(frame) and frame.f_back is not None:
        frame = frame.f_back
    return describe(frame, frame.f_lineno) if frame is not None else ""


def describe(frame: FrameType, line: int) -> str:
    """A frame and its line as one line of text, with the source where it can be read."""
    code = frame.f_code
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f": {source}" if source else "")


def all_stacks() -> str:
    """The stacks of all threads as text, the main thread first."""
    import traceback

    frames = sys._current_frames()  # noqa: SLF001 - as above
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident in sorted(frames, key=lambda ident: ident != threading.main_thread().ident):
        parts.append(f"Thread {names.get(ident, '?')} ({ident}), most recent call last:")
        parts.append("".join(traceback.format_stack(frames[ident])).rstrip())
    return "\n".join(parts)


def _await_chain(awaitable: Any) -> Iterator[tuple[FrameType, int]]:
    seen = 0
    while awaitable is not None and seen < 1_000:
        seen += 1
        if isinstance(awaitable, CoroutineType):
            frame, awaitable = awaitable.cr_frame, awaitable.cr_await
        elif isinstance(awaitable, GeneratorType):
            frame, awaitable = awaitable.gi_frame, awaitable.gi_yieldfrom
        elif isinstance(awaitable, AsyncGeneratorType):
            frame, awaitable = awaitable.ag_frame, awaitable.ag_await
        else:
            return
        if frame is not None:
            yield frame, frame.f_lineno


def _is_plumbing(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return any(part in path for part in _PLUMBING) or path.startswith(_OWN)


_OWN = str(Path(__file__).parent)
