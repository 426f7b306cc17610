"""Which worker's handler the running code is in: context variables tell, in tasks and threads that it has started as well."""

from __future__ import annotations

from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mainspring.worker.worker import Worker


def inside() -> Worker | None:
    """Return the worker whose handler this code runs in (or in a task or thread started by it), or None."""
    return _inside.get(None)


def is_inside(loop: object) -> bool:
    """True if this code runs in a handler of ``loop`` (see :func:`inside`), whose end it hence cannot wait for."""
    worker = inside()
    return worker is not None and getattr(loop, "worker", None) is worker


def context_of(worker: Worker) -> Context:
    """Return a copy of the present context, in which :func:`inside` is ``worker``."""
    context = copy_context()
    context.run(_inside.set, worker)
    return context


_inside: ContextVar[Worker] = ContextVar("mainspring_worker")
