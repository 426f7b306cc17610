"""Dead letters that are kept for a time: older ones are purged by the loops of their mailbox."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import anyio
import pytest

from mainspring import DeadLetterPolicy, InMemoryMailbox, LoopGroup, MainLoop, Reject, Tasks
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox.message import Counts
from mainspring.testing import run_virtual
from stores import KINDS, on

HOUR = 3_600


async def handle(body: str) -> None:
    raise Reject(body)


def group_of(mailbox, keep):
    return LoopGroup([MainLoop(mailbox, handle, dead_letter=DeadLetterPolicy(keep=keep))], guardian=False)


@pytest.mark.parametrize("keep", ["10h", timedelta(hours=10), 10 * HOUR])
def test_dead_letters_are_purged_once_they_are_too_old(keep):
    async def main():
        mailbox = InMemoryMailbox()
        async with group_of(mailbox, keep):
            await mailbox.send("old")
            await anyio.sleep(6 * HOUR)
            await mailbox.send("newer")
            await anyio.sleep(4 * HOUR - 1)
            assert (await mailbox.counts()).dead == 2
            await anyio.sleep(3_700)
            assert [letter.body for letter in await mailbox.dead_letters()] == ["newer"]
            await anyio.sleep(6 * HOUR)
            assert await mailbox.counts() == Counts(settled=2)

    run_virtual(main)


def test_without_a_time_they_stay():
    async def main():
        mailbox = InMemoryMailbox()
        async with group_of(mailbox, None):
            await mailbox.send("old")
            await anyio.sleep(12 * HOUR)
            assert (await mailbox.counts()).dead == 1

    run_virtual(main)


def test_more_than_a_page_are_purged_at_once():
    async def main():
        mailbox = InMemoryMailbox()
        async with group_of(mailbox, "1h"):
            await mailbox.send_many(["x"] * 1_100)
            await anyio.sleep(HOUR)
            while (dead := (await mailbox.counts()).dead) == 1_100:
                await anyio.sleep(10)
            assert dead == 0

    run_virtual(main)


def test_a_store_that_fails_is_tried_again(caplog):
    class Failing(InMemoryMailbox):
        failures = 3

    async def main():
        mailbox = Failing()
        purge = mailbox.backend.purge_dead_letters

        async def fail(message_ids):
            if Failing.failures:
                Failing.failures -= 1
                raise MailboxConnectionError("no answer")
            return await purge(message_ids)

        mailbox.backend.purge_dead_letters = fail
        async with group_of(mailbox, "1h"):
            await mailbox.send("old")
            await anyio.sleep(6 * HOUR)
            assert (await mailbox.counts()).dead == 0

    run_virtual(main)
    assert [record.getMessage() for record in caplog.records if "could not be purged" in record.getMessage()] == [
        "handle: old dead letters could not be purged: MailboxConnectionError: no answer"
    ]


@pytest.mark.parametrize("when", ["between two sweeps", "in a sweep"])
def test_a_cancellation_that_no_scope_asked_for_ends_neither_the_sweeps_nor_the_loop(when):
    async def main():
        mailbox = InMemoryMailbox()
        group = group_of(mailbox, "1h")
        async with group:
            await mailbox.send("old")
            await anyio.sleep(100)
            if when == "in a sweep":
                broken = [asyncio.get_running_loop().create_future()]
                broken[0].cancel()
                dead_letters = mailbox.backend.dead_letters

                async def cut_off(limit, after):
                    if broken:
                        await broken.pop()
                    return await dead_letters(limit, after)

                mailbox.backend.dead_letters = cut_off
            else:
                (task,) = [each for each in asyncio.all_tasks() if each.get_name().endswith(" retention")]
                task.cancel()
            await anyio.sleep(3 * HOUR)
            assert (await mailbox.counts()).dead == 0
            await mailbox.send("new")
            await anyio.sleep(1)
            assert (await mailbox.counts()).dead == 1
        assert group.report.exit_status == 0

    run_virtual(main, backend="asyncio")


@pytest.mark.own_time(3)
@pytest.mark.anyio
@on(*KINDS)
async def test_each_store_purges_the_old_ones(store):
    mailbox = store.box()
    async with mailbox, group_of(mailbox, 0.5):
        await mailbox.send("old")
        with anyio.fail_after(20):
            while (await mailbox.counts()).settled != 1:
                await anyio.sleep(0.05)


@pytest.mark.parametrize("keep", [0, -1, "soon", "", float("nan"), True, "5 days"])
def test_a_time_that_is_none_is_refused(keep):
    with pytest.raises(ConfigError, match="keep must be above 0 seconds"):
        DeadLetterPolicy(keep=keep)


def test_a_task_cannot_keep_its_own():
    tasks = Tasks(InMemoryMailbox(), dead_letter=DeadLetterPolicy(keep="30d"))
    with pytest.raises(ConfigError, match="give it to Tasks"):

        @tasks.task(dead_letter=DeadLetterPolicy(keep="7d"))
        async def work() -> None: ...
