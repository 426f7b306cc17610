"""What a process that an orchestrator owns does for its surroundings: it tells its service manager, and reaps orphans."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from mainspring.core.state_machine import OrchestratorState
from mainspring.events import OrchestratorStateChanged, ShutdownRequested
from mainspring.runtime.orphans import OrphanReaper, is_init
from mainspring.runtime.scope import DaemonScope
from mainspring.runtime.service_manager import service_manager

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.runtime.service_manager import ServiceManager


class OrchestratorNews:
    """Tells a service manager what happens to an orchestrator. Without a manager it does nothing.

    ``stop_within`` returns the seconds that a stop that begins now may take.
    """

    def __init__(self, manager: ServiceManager | None, stop_within: Callable[[], float]) -> None:
        self._manager = manager
        self._stop_within = stop_within
        self._reason = ""
        self._up = False
        """True from when it has said that it is ready until it stops: only then there is a reload to tell of."""
        self._told_reload = False

    def reloading(self) -> None:
        """Say that the services are being specified anew."""
        if self._manager is not None and self._up:
            self._told_reload = True
            self._manager.reloading("reloading")

    def reloaded(self, status: str) -> None:
        """Say that this is over, however it went."""
        if self._manager is not None and self._up and self._told_reload:
            self._told_reload = False
            self._manager.ready(status)

    def on_request(self, event: ShutdownRequested) -> None:
        """Remember why the end was asked for."""
        self._reason = event.reason

    def on_state(self, event: OrchestratorStateChanged) -> None:
        """Tell of a new state."""
        if self._manager is None:
            return
        if event.new is OrchestratorState.READY:
            self._up = True
            self._manager.ready("ready: all core services have started")
        elif event.new is OrchestratorState.SHUTTING_DOWN:
            self._up = False
            self._manager.stopping(self._stop_within(), f"stopping: {self._reason}" if self._reason else "stopping")
        else:
            self._manager.tell(STATUS=str(event.new))


@asynccontextmanager
async def own_process(
    name: str, dispatcher: Dispatcher, stop_within: Callable[[], float]
) -> AsyncIterator[OrchestratorNews]:
    """Be the main process of a service for the block: tell its manager (``sd_notify``), and reap orphans as process 1.

    Signs of life for a watchdog come from the event loop, so they end where it does not turn. They say no more: services that
    fail, and a spawner that ends, are the orchestrator's to mend, and the end of all services would mend neither.
    """
    manager = service_manager()
    news = OrchestratorNews(manager, stop_within)
    async with DaemonScope(f"process of {name}", timeout=0.0) as scope:
        if manager is not None:
            scope.start_soon(manager.run, lambda: True, name="signs of life")
        if is_init():
            scope.start_soon(OrphanReaper().run, name="orphans")
        ends = [
            dispatcher.subscribe(ShutdownRequested, news.on_request),
            dispatcher.subscribe(OrchestratorStateChanged, news.on_state),
        ]
        try:
            yield news
        finally:
            for end in ends:
                end()
