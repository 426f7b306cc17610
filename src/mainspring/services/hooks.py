"""Runs the hooks of one moment of a service's life."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from mainspring.errors import message_of
from mainspring.services.callables import answer_of
from mainspring.services.spawning import SpawnError
from mainspring.services.spec import HookMoment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.services.commands import CommandResult
    from mainspring.services.spec import Hook, HookSettings

NEVER_ABORTED = frozenset({HookMoment.PRE_STOP, HookMoment.POST_STOP})
"""Moments of a stop, which goes on whatever its hooks do."""


async def run_hooks(
    moment: HookMoment,
    hooks: Sequence[Hook],
    *,
    settings: HookSettings,
    run: Callable[[tuple[str, ...]], Awaitable[CommandResult]],
    failed: Callable[[str, bool], object],
) -> bool:
    """Run hooks one after the other. Return False where a failure aborts what was about to happen; the rest are then left out.

    A hook fails where its command does not end with exit status 0, its callable raises, or it takes longer than its timeout.

    :param run: runs a command. Cancelled, it leaves no process behind.
    :param failed: is called with each failure in words, and whether it aborts.
    """
    if not settings.enabled:
        return True
    for hook in hooks:
        error = await _run(hook, settings.timeout if hook.timeout is None else hook.timeout, run)
        if error is None:
            continue
        aborts = hook.abort and moment not in NEVER_ABORTED
        failed(error, aborts)
        if aborts:
            return False
    return True


async def _run(hook: Hook, timeout: float, run: Callable[[tuple[str, ...]], Awaitable[CommandResult]]) -> str | None:
    late = f"it did not end within {timeout:g} s"
    if callable(hook.action):
        return (await answer_of(hook.action, timeout=timeout, late=late)).error
    error: str | None = late
    with anyio.move_on_after(timeout):
        try:
            error = (await run(hook.action)).error
        except SpawnError as refused:
            error = message_of(refused)
    return error
