"""``mainspring top``: the services of a supervisor, or the loops of a group, live on a terminal, with keys that act.

The main thread draws and reads keys. Each request has a thread of its own, which hands over what came of it by a queue and
wakes the main thread by a pipe: a server that hangs delays no key.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import tty
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live

from mainspring.cli.control_acts import LONGEST_WAIT
from mainspring.cli.control_client import find_server
from mainspring.cli.top_view import TopView
from mainspring.cli.user_errors import UserError
from mainspring.core import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from mainspring.cli.control_client import ControlClient
    from mainspring.cli.control_status import ServicePlace

_LEAST_INTERVAL = 0.1
_LOG_LINES = 200
_KEY = re.compile(rb"\x1b[\[O][A-Z]|.", re.DOTALL)
_MOVES = {b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1}
_ACTS = {b"r": "restart", b"s": "start"}


def show_top(url: str | None, interval: float) -> int:
    """Show it until the user quits. Return the exit status."""
    console = Console()
    if not (sys.stdin.isatty() and console.is_terminal) or console.is_dumb_terminal:
        raise UserError("top needs a terminal; use `mainspring status`")
    server = find_server(url)
    view = TopView(server.url, server.status())
    with _terminal(), Live(console=console, screen=True, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        _TopSession(server, view, max(interval, _LEAST_INTERVAL)).run(
            lambda: live.update(view.screen(console.height), refresh=True)
        )
    return 0


@contextmanager
def _terminal() -> Iterator[None]:
    """Have keys come at once and unseen, without Ctrl-Z; a signal that ends the process leaves in order as well."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    handlers = {signum: signal.signal(signum, _leave) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        tty.setcbreak(descriptor)
        changed = termios.tcgetattr(descriptor)
        changed[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(descriptor, termios.TCSANOW, changed)
        yield
    finally:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _leave(signum: int, _: FrameType | None) -> None:
    raise SystemExit(128 + signum)


class _TopSession:
    def __init__(self, server: ControlClient, view: TopView, interval: float) -> None:
        self._server = server
        self._view = view
        self._interval = interval
        self._results: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._asking = False
        self._confirm: ServicePlace | None = None
        self._unreached = False

    def run(self, draw: Callable[[], None]) -> None:
        """Draw, and follow the keys, until the user quits."""
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        due = clock.monotonic()
        while True:
            now = clock.monotonic()
            if now >= due:
                due = now + self._interval
                self._ask()
            draw()
            ready, _, _ = select.select([sys.stdin, self._woken], [], [], max(0.0, due - now))
            if self._woken in ready:
                os.read(self._woken, 1024)
                self._take_results()
            if sys.stdin in ready:
                pressed = os.read(sys.stdin.fileno(), 1024)
                if not pressed or any(self._press(key) == "quit" for key in _KEY.findall(pressed)):
                    return

    # ------------------------------------------------------------------------------------------------------------- keys

    def _press(self, key: bytes) -> str | None:
        view = self._view
        if self._confirm is not None:
            place, self._confirm, view.message = self._confirm, None, ""
            if key in (b"y", b"Y"):
                self._act("stop", place)
            return None
        if key == b"q":
            return "quit"
        if key in _MOVES and view.logs is None:
            view.move(_MOVES[key])
        elif key in (*_ACTS, b"x", b"l"):
            self._press_on(key, view.selected)
        return None

    def _press_on(self, key: bytes, place: ServicePlace | None) -> None:
        view = self._view
        if place is None:
            view.message = "the loops of a group are not started or stopped from here"
        elif key == b"l":
            view.logs = ["…"] if view.logs is None else None
            self._ask()
        elif view.logs is not None:
            return
        elif key == b"x":
            self._confirm, view.message = place, f"stop {place.name}? y stops it, any other key does not"
        else:
            self._act(_ACTS[key], place)

    # --------------------------------------------------------------------------------------------------------- requests

    def _act(self, act: str, place: ServicePlace) -> None:
        self._view.message = f"{act} of {place.name} is under way"
        self._in_thread(partial(self._perform, act, place))

    def _perform(self, act: str, place: ServicePlace) -> str:
        query = {**place.query, "wait": LONGEST_WAIT}
        answer = self._server.post(f"{place.path}/{act}", query, wait=LONGEST_WAIT)
        return f"{place.name}: {answer['status']}"

    def _ask(self) -> None:
        if not self._asking:
            self._asking = True
            place = self._view.selected if self._view.logs is not None else None
            Thread(target=self._fetch, args=(place,), daemon=True).start()

    def _fetch(self, place: ServicePlace | None) -> None:
        try:
            status = self._server.status()
            lines = None
            if place is not None:
                found = self._server.lines(f"{place.path}/logs", {**place.query, "lines": _LOG_LINES})
                lines = [f"{each['service']}.{each['replica']} | {each['line']}" for each in found if "line" in each]
        except UserError as problem:
            self._hand_over(partial(self._show_problem, str(problem)))
        else:
            self._hand_over(partial(self._show_news, status, lines))

    def _in_thread(self, perform: Callable[[], str]) -> None:
        def work() -> None:
            try:
                said = perform()
            except UserError as problem:
                said = str(problem)
            self._hand_over(partial(setattr, self._view, "message", said))

        Thread(target=work, daemon=True).start()

    def _hand_over(self, result: Callable[[], None]) -> None:
        self._results.put(result)
        with suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def _take_results(self) -> None:
        with suppress(Empty):
            while True:
                self._results.get_nowait()()

    def _show_problem(self, problem: str) -> None:
        self._asking = False
        self._unreached = True
        self._view.message = problem

    def _show_news(self, status: dict[str, Any], lines: list[str] | None) -> None:
        self._asking = False
        if self._unreached:
            self._unreached, self._view.message = False, ""
        self._view.update(status)
        if lines is not None and self._view.logs is not None:
            self._view.logs = lines
