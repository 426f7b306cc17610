"""``Runnable``: all that a group asks of a loop; and how every loop is stopped within a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.core.lazy_event import LazyEvent
    from mainspring.runtime.heartbeat import Heartbeat
    from mainspring.threads.entry import AnywhereEvent
    from mainspring.worker.actor import LoopActor


@runtime_checkable
class Runnable(Protocol):
    """A loop of any make that a LoopGroup can run, watch and stop.

    ``run`` and ``shutdown`` are each plain or async; ``running`` and ``heartbeat`` are attributes or plain methods. Their forms
    are looked at when the loop is given to a group.

    ``run`` returns when the loop is done or was told to stop. It is passed those of the keywords ``max_iterations``,
    ``visibility_timeout`` and ``wait_time_seconds`` that it accepts. A plain one runs in a thread of its own, with a copy of
    the group's context.

    ``shutdown`` asks the loop to stop; asked before ``run``, it is remembered for one run. Where it takes a ``timeout``, it is
    passed the seconds that are left until the run is cancelled (366 days in a drain). What it returns says whether everything
    ended by itself; None counts as True. A plain one is called where ``run`` runs: on the event loop, which it must not block,
    or in a thread.
    """

    async def run(self, *args: Any, **keywords: Any) -> Any:
        """Run until done or told to stop."""

    async def shutdown(self, *, timeout: float = 30.0) -> bool:
        """Stop: no new work, let the work in hand end within ``timeout`` seconds, then cancel it."""

    @property
    def running(self) -> bool:
        """True while ``run`` is under way."""

    @property
    def heartbeat(self) -> Heartbeat:
        """Its sign of life; None: it is not judged."""


class AnyRunnable(Protocol):
    """A :class:`Runnable` in any of its forms, as type checkers see it."""

    @property
    def run(self) -> Callable[..., Any]:
        """Run until done or told to stop."""

    @property
    def shutdown(self) -> Callable[..., Any]:
        """Stop."""

    @property
    def running(self) -> Any:
        """True while ``run`` is under way."""

    @property
    def heartbeat(self) -> Any:
        """Its sign of life, or None."""


@runtime_checkable
class Steerable(Runnable, Protocol):
    """A loop that can be paused, and stopped in steps, as MainLoop can. Other loops are stopped by ``shutdown`` alone."""

    name: str
    shutdown_timeout: float | None
    shutdown_priority: int
    pausable: bool
    actor: LoopActor | None
    """The actor that serves its control messages, or None. What asks the loop itself for a shutdown asks its actor."""

    def pause(self) -> None:
        """Take no new work until :meth:`resume`."""

    def resume(self) -> None:
        """Take new work again."""

    @property
    def paused(self) -> bool:
        """True if it has been told to pause."""

    async def wait_paused(self) -> None:
        """Wait until no work is being taken any more, or the pause is over."""

    def announce_shutdown(self) -> None:
        """Tell the work in hand that the end is near."""

    def stop_intake(self) -> None:
        """Take no new work; a wait for work ends at once."""

    def cancel_work(self) -> None:
        """Cancel the work in hand; its messages are released."""

    def abort(self) -> None:
        """Cancel the whole run."""

    @property
    def runs(self) -> Sequence[Any]:
        """The work in hand, as the watchdog's subjects."""

    @property
    def claims(self) -> Sequence[Any]:
        """Its calls of its store, as further subjects of the watchdog."""

    @property
    def in_flight(self) -> int:
        """How much work is in hand."""

    @property
    def trouble(self) -> str | None:
        """The reason why it cannot take work just now, or None."""


async def stop_in_time(
    loop: Steerable | LoopActor, ended: LazyEvent | AnywhereEvent, *, timeout: float, cancel_grace: float
) -> bool:
    """Give a loop that was told to stop ``timeout`` seconds, and its cancelled work ``cancel_grace`` more, before its run is
    cancelled as a whole. Returns when ``ended`` is set: whether it ended by itself."""
    with anyio.move_on_after(timeout):
        await ended.wait()
    if ended.is_set():
        return True
    loop.cancel_work()
    with anyio.move_on_after(cancel_grace):
        await ended.wait()
    if not ended.is_set():
        loop.abort()
        await ended.wait()
    return False
