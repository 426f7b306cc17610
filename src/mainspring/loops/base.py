"""``Runnable``: all that a group asks of a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.heartbeat import Heartbeat


@runtime_checkable
class Runnable(Protocol):
    """A loop of any make that a LoopGroup can run, watch and stop.

    ``run`` returns when the loop is done or was told to stop. It is passed those of the keywords ``max_iterations``,
    ``visibility_timeout`` and ``wait_time_seconds`` that it accepts. ``shutdown`` asks it to stop, waits at most
    ``timeout`` seconds, and says whether everything ended by itself; asked before ``run``, it is remembered for one run.
    """

    async def run(self, *args: Any, **keywords: Any) -> Any:
        """Run until done or told to stop."""

    async def shutdown(self, *, timeout: float = 30.0) -> bool:
        """Stop: no new work, let the work in hand end within ``timeout`` seconds, then cancel it."""

    @property
    def running(self) -> bool:
        """Whether ``run`` is under way."""

    @property
    def heartbeat(self) -> Heartbeat:
        """Its sign of life."""


@runtime_checkable
class Steerable(Runnable, Protocol):
    """A loop that a group can stop in steps, as MainLoop is; one that cannot is stopped by ``shutdown`` alone."""

    name: str
    shutdown_timeout: float | None
    shutdown_priority: int

    def announce_shutdown(self) -> None:
        """Tell the work in hand that the end is near."""

    def stop_intake(self) -> None:
        """Take no new work; a wait for work ends at once."""

    def cancel_work(self) -> None:
        """Cancel the work in hand; it is given back."""

    def abort(self) -> None:
        """Cancel the whole run."""

    @property
    def runs(self) -> Sequence[Any]:
        """The work in hand, as the watchdog's subjects."""

    @property
    def in_flight(self) -> int:
        """How much work is in hand."""

    @property
    def trouble(self) -> str | None:
        """Why it cannot take work just now, or None."""
