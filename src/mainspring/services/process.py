"""One process of a replica: whether it is ready, what it says of itself, and how it is brought to its end."""

from __future__ import annotations

import math
import re
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from mainspring.events import ServiceNotified, ServiceOutput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mainspring.core.dispatcher import Dispatcher
    from mainspring.runtime.condition import ConditionVariable
    from mainspring.services.spawning import Launch, ProcessEnd, SpawnedProcess, Spawner, Stream
    from mainspring.services.spec import ServiceSpec

FINISHED = "X_MAINSPRING_FINISHED"
"""A notification that the work of a process is over: its end is no failure, and it is not started again."""
USED_UP = "X_MAINSPRING_USED_UP"
"""A notification that a process asks to be replaced: it has handled its number of messages."""
MAX_MESSAGES = "MAINSPRING_MAX_MESSAGES"
"""The environment variable that says after how many handled messages a process is to send ``USED_UP``."""
_MAX_DIGITS = 20
"""Digits of the greatest number of microseconds that a notification can mean: it has 64 bits."""
DRAIN_TIMEOUT = "X_MAINSPRING_DRAIN_TIMEOUT"
"""A notification of the seconds that a process may need to drain: they replace the drain timeout of its service."""


class ServiceProcess:
    """A process, from the request to start it until nothing is left of it. It is the listener of what the process says.

    All its waits are for ``condition``, which its replica shares: a request to stop or to kill ends them.
    """

    def __init__(self, spec: ServiceSpec, number: int, *, dispatcher: Dispatcher, condition: ConditionVariable) -> None:
        self.spawned: SpawnedProcess | None = None
        self.end: ProcessEnd | None = None
        self.empty = False
        self.finished = False
        self.used_up = False
        self.probes_passed = spec.probe is None and spec.startup_probe is None
        self.ready_at: float | None = None
        """When it became ready; None before."""
        self.hurried = False
        """True if it is to be killed rather than drained."""
        self.killed = False
        """True if it had to be killed."""
        self.notice = ""
        self._spec = spec
        self._number = number
        self._dispatcher = dispatcher
        self._condition = condition
        self._ready_line = None if spec.ready_line is None else re.compile(spec.ready_line)
        self._notified = not spec.notify
        self._extended_until = -math.inf
        self._drain_timeout: float | None = None
        self._drained_by: float | None = None

    async def start(self, spawner: Spawner, launch: Launch) -> None:
        """Start it.

        :raises SpawnError: it cannot be started.
        """
        self.spawned = await spawner.spawn(launch, self)

    async def watch(self) -> None:
        """Note its end, and when nothing is left of it."""
        assert self.spawned is not None
        self.end = await self.spawned.wait()
        self._condition.notify_all()
        await self.spawned.wait_empty()
        self.empty = True
        self._condition.notify_all()

    @property
    def has_said_ready(self) -> bool:
        """True if its probes have passed, its ready line was written, and it has notified, as far as its service has these."""
        return self.probes_passed and self._ready_line is None and self._notified

    def extended(self, deadline: float) -> float:
        """Return the deadline, or the later one that the process has asked for (``EXTEND_TIMEOUT_USEC``)."""
        return max(deadline, self._extended_until)

    # ---------------------------------------------------------------------------------------------- what it says of itself

    def on_line(self, stream: Stream, line: str) -> None:
        """Pass a line of output on. It may be the ready line."""
        if self._ready_line is not None and self._ready_line.search(line):
            self._ready_line = None
            self._condition.notify_all()
        self._dispatcher.dispatch(ServiceOutput(self._spec.name, self._number, stream, line))

    def on_notify(self, news: Mapping[str, str]) -> None:
        """Take note of a notification (see ``sd_notify(3)``), and pass it on."""
        if news.get("READY") == "1":
            self._notified = True
        self.notice = news.get("STATUS", self.notice)
        self.finished = self.finished or FINISHED in news
        self.used_up = self.used_up or USED_UP in news
        if DRAIN_TIMEOUT in news:
            with suppress(ValueError):
                self._drain_timeout = max(0.0, float(news[DRAIN_TIMEOUT]))
        more = news.get("EXTEND_TIMEOUT_USEC", "")
        if more.isascii() and more.isdigit() and len(more) <= _MAX_DIGITS:
            self._extended_until = anyio.current_time() + int(more) / 1e6
        self._dispatcher.dispatch(ServiceNotified(self._spec.name, self._number, dict(news)))
        self._condition.notify_all()

    # ---------------------------------------------------------------------------------------------------------- its end

    async def bring_down(self, *, drain_timeout: float, within: float, force_kill_timeout: float) -> bool:
        """End it: SIGTERM, ``drain_timeout`` seconds or as long as it asks for, then SIGKILL. Return True if nothing is left.

        The drain ends ``force_kill_timeout`` seconds before ``within`` seconds have passed, but has at least half of them: a
        short timeout alone must not mean no drain. When the process has ended by itself, what is left of it gets SIGTERM too,
        and the same time. ``hurried`` ends the drain at once.
        """
        assert self.spawned is not None
        condition, now = self._condition, anyio.current_time()
        latest = now + max(0.0, within - force_kill_timeout, within / 2)
        if self._drained_by is None:
            self._drained_by = now + (drain_timeout if self._drain_timeout is None else self._drain_timeout)

        def deadline() -> float:
            assert self._drained_by is not None
            return min(self.extended(self._drained_by), latest)

        if self.end is None:
            self.spawned.send_signal(signal.SIGTERM)
            await condition.wait_for(lambda: self.end is not None or self.hurried, deadline)
        if self.end is not None and not self.empty:
            self.spawned.send_signal(signal.SIGTERM)
            await condition.wait_for(lambda: self.empty or self.hurried, deadline)
        if not self.empty:
            self.killed = self.end is None
            self.spawned.kill()
            killed_by = anyio.current_time() + force_kill_timeout
            await condition.wait_for(lambda: self.empty, lambda: killed_by)
        return self.empty

    def hurry(self, within: float) -> None:
        """Send SIGTERM again. From now on its drain has ``within`` seconds, or as long as it asks for from now on."""
        if self.spawned is not None and self.end is None:
            self._drained_by = anyio.current_time() + within
            self._extended_until = -math.inf
            self.spawned.send_signal(signal.SIGTERM)
            self._condition.notify_all()

    def kill(self) -> None:
        """Kill it at once, instead of a drain."""
        self.hurried = True
        if self.spawned is not None and not self.empty:
            self.spawned.kill()
        self._condition.notify_all()

    async def destroy(self, timeout: float) -> None:
        """Kill it, and wait up to ``timeout`` seconds until nothing is left, also if the caller was cancelled."""
        if self.spawned is not None and not self.empty:
            self.spawned.kill()
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + timeout):
                await self.spawned.wait_empty()
