"""What a service tells the manager that has started it: systemd, or a supervisor that speaks ``sd_notify(3)``."""

from __future__ import annotations

import math
import os
import socket
from collections import deque
from typing import TYPE_CHECKING

import anyio

from mainspring.core import clock, process
from mainspring.core.loggers import Logger
from mainspring.redaction import one_line
from mainspring.runtime.interval import Periodic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = Logger("mainspring")

_KIND = "service manager"
_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
LOOK_AGAIN = 1.0
"""Seconds until a service that was not well, or a manager that took nothing, is looked at again, at most."""
EXTENSION = 60.0
"""Seconds by which the time for a stop without a limit is extended, again and again."""
_MARGIN = 1.0
_KEPT = 32


class ServiceManager:
    """Sends notifications to ``address``, a datagram socket: a path, or ``@name`` of an abstract one.

    ``watchdog``: seconds within which the manager wants a sign of life; None: it wants none. Every call returns at once. What
    the manager cannot take just now is kept, and sent by :meth:`run`. What cannot be sent is logged once.
    """

    def __init__(self, address: str, *, watchdog: float | None = None) -> None:
        self.address = address
        self.watchdog = watchdog
        self._place = os.fsencode("\0" + address[1:] if address.startswith("@") else address)
        self._unsent: deque[bytes] = deque(maxlen=_KEPT)
        self._complained = False
        self._unlimited = False
        self._timer: Periodic | None = None
        self._next_sign = math.inf
        self._next_extension = math.inf

    def __repr__(self) -> str:
        return f"<ServiceManager {self.address} watchdog={self.watchdog}>"

    def tell(self, **news: str | int) -> None:
        """Send variables as they are, such as ``STATUS="…"``. A line break in a value becomes ``"; "``."""
        text = "\n".join(f"{name}={one_line(str(value))}" for name, value in news.items())
        self._unsent.append(text.encode("utf-8", "surrogateescape"))
        self._send()

    def ready(self, status: str = "") -> None:
        """Say that the start, or a reload, is over."""
        self.tell(READY=1, **_status(status))

    def reloading(self, status: str = "") -> None:
        """Say that the configuration is being read again. :meth:`ready` ends this."""
        self.tell(RELOADING=1, MONOTONIC_USEC=_microseconds(clock.monotonic()), **_status(status))

    def stopping(self, within: float, status: str = "") -> None:
        """Say that the service stops, which takes up to ``within`` seconds, also beyond the manager's own limit.

        ``math.inf``: as long as it takes; :meth:`run` asks for more time again and again, until :meth:`extend` sets an end.
        """
        self.tell(STOPPING=1, **_status(status))
        self.extend(within)

    def extend(self, seconds: float) -> None:
        """Ask for ``seconds`` from now on for what is under way: the start, or the stop."""
        self._unlimited = seconds == math.inf
        now = anyio.current_time()
        self._next_extension = now + EXTENSION / 3 if self._unlimited else math.inf
        self.tell(EXTEND_TIMEOUT_USEC=_microseconds(EXTENSION if self._unlimited else seconds + _MARGIN))
        if self._timer is not None:
            self._timer.wake_by(self._next_extension)

    async def run(self, alive: Callable[[], bool]) -> None:
        """Give signs of life, at half the interval of the watchdog, for as long as ``alive()`` is True. Run until cancelled.

        The event loop calls it, so an event loop that does not turn gives no sign. Where ``alive()`` is False it is asked
        again soon, so that a service that has recovered is not killed.
        """
        now = anyio.current_time()
        self._next_sign = math.inf if self.watchdog is None else now
        self._timer = Periodic(lambda overslept: self._step(alive), first=now)
        try:
            await self._timer.run()
        finally:
            self._timer = None

    async def _step(self, alive: Callable[[], bool]) -> float:
        now, well = anyio.current_time(), None
        if now >= self._next_sign and self.watchdog is not None:
            well = alive() and self._say({"WATCHDOG": 1})
            self._next_sign = now + (self.watchdog / 2 if well else min(LOOK_AGAIN, self.watchdog / 8))
        if now >= self._next_extension:
            if alive():
                self.extend(math.inf)
            else:
                self._next_extension = now + LOOK_AGAIN
        self._send()
        return min(self._next_sign, self._next_extension, now + LOOK_AGAIN if self._unsent else math.inf)

    def _say(self, news: dict[str, int]) -> bool:
        """Send a sign of life, which is worth nothing later. Return False if it was not sent."""
        self._send()
        if self._unsent:
            return False
        self.tell(**news)
        if self._unsent:
            self._unsent.clear()
            return False
        return True

    def _send(self) -> None:
        while self._unsent:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                    sender.sendto(self._unsent[0], socket.MSG_DONTWAIT, self._place)
            except (BlockingIOError, InterruptedError):
                if self._timer is not None:
                    self._timer.wake_by(anyio.current_time() + LOOK_AGAIN)
                return
            except OSError as error:
                if not self._complained:
                    self._complained = True
                    _log.warning("the service manager at %s cannot be told: %s", self.address, error.strerror or error)
            self._unsent.popleft()


def service_manager() -> ServiceManager | None:
    """Return the way to the manager that has started this process; None if none wants to be told.

    It follows ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``, which the first call takes out of the environment: a
    program that this process starts is not the service. Later calls return the same object.
    """
    address, usec, pid = (os.environ.pop(name, "") for name in _VARIABLES)
    if not address:
        found: ServiceManager | None = process.current(_KIND)
        return found
    if address[0] not in "/@" or len(address) == 1:
        _log.warning("NOTIFY_SOCKET is neither a path nor an abstract socket, and is passed over: %s", address)
        return None
    mine = pid in ("", str(os.getpid()))
    whole = usec.isascii() and usec.isdigit() and int(usec) > 0
    if usec and not whole:
        _log.warning("WATCHDOG_USEC is no number of microseconds, and is passed over: %s", usec)
    manager = ServiceManager(address, watchdog=int(usec) / 1e6 if whole and mine else None)
    process.set_current(_KIND, manager)
    return manager


def without_manager(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of an environment for processes that are not the service that a manager has started."""
    return {name: value for name, value in environment.items() if name not in _VARIABLES}


def _status(text: str) -> dict[str, str]:
    return {"STATUS": text} if text else {}


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
