"""What a service does in hours, tested in milliseconds: delays, retries, timeouts, a deploy in the middle of the work.

    pytest -q test_reminders.py

A test that asks for ``virtual_clock`` runs in virtual time: when every task waits, the clock jumps to the next deadline.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import anyio
from reminders import Reminder, make_group

from mainspring import InMemoryMailbox

if TYPE_CHECKING:
    from mainspring.testing import VirtualClock


def mailbox() -> InMemoryMailbox[Reminder, None]:
    """The real one's stand-in; with ``serialize=True`` its bodies make the way through JSON, as on disk."""
    return InMemoryMailbox("reminders", serialize=True)


async def test_a_reminder_comes_when_it_is_due(virtual_clock: VirtualClock) -> None:
    sent: list[tuple[float, str]] = []

    async def notify(to: str, text: str) -> None:
        sent.append((virtual_clock.now, text))

    async with mailbox() as reminders:
        group = make_group(reminders, notify)
        await reminders.send(Reminder("ann", "in an hour"), delay=3600)
        await reminders.send(Reminder("ann", "in a minute"), delay=60)
        await group.run(install_signals=False, until_empty=True)
    assert sent == [(60, "in a minute"), (3600, "in an hour")]


async def test_after_four_failures_it_is_a_dead_letter(virtual_clock: VirtualClock) -> None:
    tries: list[float] = []

    async def notify(to: str, text: str) -> None:
        tries.append(virtual_clock.now)
        raise ConnectionError("no answer")

    async with mailbox() as reminders:
        group = make_group(reminders, notify)
        await reminders.send(Reminder("ann", "Tea"))
        await group.run(install_signals=False, until_empty=True)
        (letter,) = await reminders.dead_letters()
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert all(pause <= bound for pause, bound in zip(pauses, (10, 30, 90), strict=True))
    assert (letter.attempt, letter.error) == (4, "no answer")


async def test_a_service_that_never_answers_costs_30_seconds_an_attempt(virtual_clock: VirtualClock) -> None:
    began: list[float] = []

    async def notify(to: str, text: str) -> None:
        began.append(virtual_clock.now)
        if len(began) == 1:
            await anyio.sleep_forever()

    async with mailbox() as reminders:
        group = make_group(reminders, notify)
        await reminders.send(Reminder("ann", "Tea"))
        await group.run(install_signals=False, until_empty=True)
        assert (await reminders.counts()).settled == 1
    assert 30 <= began[1] <= 40


async def test_a_deploy_in_the_middle_loses_nothing(virtual_clock: VirtualClock) -> None:
    told: list[str] = []

    async def notify(to: str, text: str) -> None:
        await anyio.sleep(20)
        told.append(text)

    async with mailbox() as reminders:
        group = make_group(reminders, notify)
        for number in range(15):  # ten at once, so five have to wait
            await reminders.send(Reminder("ann", f"{number}"))
        async with group:
            await anyio.sleep(15)  # SIGTERM would come here
        assert group.report is not None
        assert group.report.clean
        assert (len(told), await reminders.approximate_count()) == (10, 5)
        await group.run(install_signals=False, until_empty=True)  # the new version
    assert sorted(told, key=int) == [f"{number}" for number in range(15)]
