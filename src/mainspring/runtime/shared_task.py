"""A task that serves several owners, such as the mailboxes on one server, and runs in the scope of one of them."""

from __future__ import annotations

from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from mainspring.runtime.scope import DaemonScope


class SharedTask:
    """Runs some functions side by side as long as it has members.

    It runs as a task of one member's scope. When that member leaves, a task of another member's scope takes over: it begins
    once the first one has ended. A cancellation of the scope does not end it: clean-up of the members under a shield still
    needs it.

    :param functions: each runs until it is cancelled, and may be run again. An error of one cancels the member's scope.
    """

    def __init__(self, name: str, *functions: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._functions = functions
        self._members: dict[DaemonScope, Context] = {}
        self._home: DaemonScope | None = None  # the scope whose task it is
        self._running = anyio.CancelScope()
        self._turn = anyio.Lock()

    def join(self, scope: DaemonScope) -> None:
        """Make the owner of a scope a member. A task of its scope runs in the context of this call."""
        self._members[scope] = copy_context()
        self._find_home()

    def leave(self, scope: DaemonScope) -> None:
        """End the membership of that owner (idempotent)."""
        self._members.pop(scope, None)
        if self._home is scope:
            self._home = None
            self._running.cancel()
            self._find_home()

    def _find_home(self) -> None:
        if self._home is None and self._members:
            self._home, context = next(iter(self._members.items()))
            self._running = anyio.CancelScope(shield=True)
            context.run(partial(self._home.start_soon, self._run, self._running, name=self._name))

    async def _run(self, running: anyio.CancelScope) -> None:
        with running:
            async with self._turn, anyio.create_task_group() as tasks:
                for function in self._functions:
                    tasks.start_soon(function)
