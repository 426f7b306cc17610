"""Structured concurrency: what owns tasks, and what ends them.

A :class:`~mainspring.runtime.scope.DaemonScope` is an anyio task group whose tasks have names and are stopped in the
reverse order of their start; each long-running task of the package belongs to one. A
:class:`~mainspring.runtime.signals.ShutdownCoordinator` is told of signals and of requests to stop, and tells those
who listen. Loops that repeat are an interval (:mod:`~mainspring.runtime.interval`) or retry with backoff
(:mod:`~mainspring.runtime.retry`).

asyncio can cancel a task that no anyio scope has cancelled: that is a spurious cancellation, and
:mod:`~mainspring.runtime.cancellation` tells it from a real one.
"""
