"""``Inbox``: events that other threads dispatch, on their way to the event loop of their session.

Open while the session is entered. The flip to closed comes first in closing: what was put before it is handed over, what comes
after it is refused, and what meets it is one of both. There is no lock: deque operations are atomic.
"""

from __future__ import annotations

import contextlib
from collections import deque
from contextvars import copy_context
from typing import TYPE_CHECKING

from mainspring.core.process import call_soon, event_loop, identity
from mainspring.errors import ConfigError, SessionClosedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context

    from mainspring.state.session.changes import Held


class Inbox:
    """Hands events to ``take``, which is called in the thread of the event loop, each in the context that it was put in."""

    def __init__(self, name: str, take: Callable[[Held], object]) -> None:
        self._name = name
        self._take = take
        self._waiting: deque[tuple[Context, Held]] = deque()
        self._loop: object | None = None
        self._process: object = None
        self._users = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_new(self) -> bool:
        """True if the session was never entered."""
        return self._process is None

    def open(self) -> None:
        """The session is entered, on the running event loop."""
        self._loop, self._process = event_loop(), identity()
        self._users += 1

    def close(self) -> None:
        """The session is left: hand over what has come, and take no more."""
        self._users -= 1
        if self._users <= 0:
            self._users, self._loop = 0, None
            self._hand_over()

    def put(self, held: Held) -> None:
        """Have it taken. Callable from any thread.

        :raises SessionClosedError: the session is not entered, or its event loop has ended.
        :raises ConfigError: it was entered before this process was forked.
        """
        loop = self._loop
        closed = SessionClosedError(
            f"session {self._name!r} is not open: other threads dispatch to it inside its `async with`"
        )
        if loop is None:
            raise closed
        if self._process is not identity():
            raise ConfigError(
                f"session {self._name!r} was opened before this process was forked: its event loop is the parent's"
            )
        item = copy_context(), held
        self._waiting.append(item)
        if (self._loop is None or not call_soon(loop, self._hand_over)) and self._withdraw(item):
            raise closed

    def _withdraw(self, item: tuple[Context, Held]) -> bool:
        """True if it was not taken."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(item)
            return True
        return False

    def _hand_over(self) -> None:
        for _ in range(len(self._waiting)):  # what comes meanwhile has a call of its own
            try:
                context, held = self._waiting.popleft()
            except IndexError:  # withdrawn
                return
            context.run(self._take, held)
