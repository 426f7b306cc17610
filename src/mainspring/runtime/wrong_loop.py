"""Errors of code that uses asyncio and runs on trio: what they mean, and what to do."""

from __future__ import annotations

from mainspring.core.process import async_library
from mainspring.errors import WrongEventLoopError
from mainspring.runtime.scope import lone_error

_NO_EVENT_LOOP = ("no running event loop", "There is no current event loop")
_TRIO_REFUSES = "trio.run received unrecognized yield message"


def explained(error: BaseException, name: str) -> BaseException:
    """Return an error that says what to do if ``error`` came of asyncio's functions on trio, where they cannot work; else
    ``error``. ``name`` says what has raised it, and its cause is ``error``.

    asyncio raises what its functions meet without an event loop of theirs, and trio refuses what they yield.
    """
    lone = lone_error(error)
    if not isinstance(lone, RuntimeError | TypeError | AttributeError):
        return error
    text = str(lone)
    if not (
        (isinstance(lone, RuntimeError) and text.startswith(_NO_EVENT_LOOP))
        or (isinstance(lone, TypeError) and text.startswith(_TRIO_REFUSES))
        or (not isinstance(lone, TypeError) and _is_raised_in_asyncio(lone))
    ):
        return error
    try:
        if async_library() != "trio":
            return error
    except RuntimeError:  # in a thread of its own
        return error
    told = WrongEventLoopError(
        f"{name} uses asyncio, and runs on trio ({type(lone).__name__}: {text.partition('. ')[0]}); run it on asyncio:"
        ' `mainspring run --loop asyncio`, anyio.run(…, backend="asyncio"), run_virtual(…, backend="asyncio")'
    )
    told.__cause__ = error
    return told


def _is_raised_in_asyncio(error: BaseException) -> bool:
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return step is not None and str(step.tb_frame.f_globals.get("__name__")).partition(".")[0] == "asyncio"
