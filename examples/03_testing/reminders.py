"""A service that sends reminders when they are due: the subject of the tests beside it.

    mainspring run reminders:group
    mainspring send 'sqlite:///reminders.db?name=reminders' '{"to": "ann", "text": "Tea"}' --delay 5

The tests:

    pytest -q test_reminders.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from mainspring import Context, DeadLetterPolicy, LoopGroup, MainLoop, RetryPolicy, open_mailbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring import Mailbox


@dataclass
class Reminder:
    """The message."""

    to: str
    text: str


async def notify(to: str, text: str) -> None:
    """In place of a service that reaches people."""
    await anyio.sleep(0.1)
    sys.stdout.write(f"{to}: {text}\n")


def make_group(reminders: Mailbox[Reminder, None], notify: Callable[[str, str], Awaitable[None]] = notify) -> LoopGroup:
    """The service, on whatever mailbox and with whatever way to reach people: a test gives its own."""

    async def remind(reminder: Reminder, ctx: Context) -> None:
        await notify(reminder.to, reminder.text)

    loop = MainLoop(
        reminders,
        remind,
        concurrency=10,
        handler_timeout=30,
        retry=RetryPolicy(initial_delay=10, factor=3),
        dead_letter=DeadLetterPolicy(max_attempts=4),
    )
    return LoopGroup([loop])


group = make_group(open_mailbox("sqlite:///reminders.db?name=reminders"))
