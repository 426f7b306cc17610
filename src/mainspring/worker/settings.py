"""How a worker handles messages, as its ``MainLoop`` was told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mainspring.policies import DeadLetterPolicy, LeasePolicy, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class WorkerSettings(NamedTuple):
    """How a worker handles messages; see :class:`~mainspring.worker.main_loop.MainLoop` for the meaning of each."""

    handler: str = ""
    concurrency: int = 1
    retry: RetryPolicy = RetryPolicy()
    dead_letter: DeadLetterPolicy = DeadLetterPolicy()
    lease: LeasePolicy = LeasePolicy()
    handler_timeout: float | None = None
    timeout_option: str = "handler_timeout"
    """What the option is called that gave the timeout, for error texts."""
    wants_context: bool = False
    in_thread: bool = False
    before: Callable[[], Coroutine[Any, Any, None]] | None = None
    """What the worker does before it receives; see ``Handlers.before``."""
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None
    """What runs beside the worker for as long as it takes work; see ``Handlers.beside``."""
