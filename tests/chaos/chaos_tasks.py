"""The tasks of a chaotic run, with their limits, and its schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chaos_plan import CONCURRENCY, KEY_CONCURRENCY, MOST_IN_FLIGHT, SCHEDULES, Job, Limited

from mainspring import Context, Schedule, Tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from chaos_plan import Settings, Ticking

    from mainspring import DeadLetterPolicy, Mailbox, RetryPolicy

_LIMITS: dict[Limited, dict[str, Any]] = {
    Limited.TASK: {"concurrency": CONCURRENCY},
    Limited.KEYS: {"key_concurrency": KEY_CONCURRENCY},
    Limited.ORDER: {"ordered": True},
}
NOTE = "note"
"""The task of the schedules."""


def tasks_on(
    mailbox: Mailbox[Any, Any],
    settings: Settings,
    handle: Callable[[Job | str, Context], Awaitable[None]],
    *,
    retry: RetryPolicy | None = None,
    dead_letter: DeadLetterPolicy | None = None,
) -> Tasks:
    """Tasks whose calls all go to one handler: with a job, or with the name of a schedule. They have limits if they can."""
    limits = mailbox.capabilities.limits
    tasks = Tasks(mailbox, retry=retry, dead_letter=dead_letter, max_concurrency=MOST_IN_FLIGHT if limits else None)

    async def work(ctx: Context, key: str, job: Job) -> None:
        await handle(job, ctx)

    async def note(ctx: Context, schedule: str) -> None:
        await handle(schedule, ctx)

    for name in Limited:
        options = {"rate": settings.rate} if name is Limited.RATE else _LIMITS[name]
        tasks.task(name=name, key="key", **(options if limits else {}))(work)
    tasks.task(name=NOTE)(note)
    return tasks


def schedule_of(ticking: Ticking) -> Schedule:
    """The schedule as Mainspring has it."""
    when: dict[str, Any] = {"cron": f"*/{ticking.period} * * * * *"} if ticking.declared else {"every": ticking.period}
    return Schedule(ticking.name, NOTE, args=(ticking.name,), misfire="all", **when)


def declare(tasks: Tasks) -> None:
    """Declare what the workers declare."""
    for ticking in SCHEDULES:
        if ticking.declared:
            tasks.schedule(schedule_of(ticking))
