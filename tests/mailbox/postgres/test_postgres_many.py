"""Many PostgreSQL mailboxes in one process: what they share, and that each has its own all the same."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import anyio
import pytest
from test_postgres_waiting import two_processes

from mainspring import LoopGroup, MailboxError, MainLoop
from mainspring.mailbox.postgres.connection import MAX_BATCHES
from postgres_support import receiving, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


def damage(place, *names):
    """Let the server refuse to move the messages of these mailboxes."""
    numbers = ", ".join(str(place.number(name)) for name in names)
    place.execute("CREATE FUNCTION SCHEMA.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'damaged'; END $$")
    place.execute(
        f"""CREATE TRIGGER fault BEFORE UPDATE ON SCHEMA.messages FOR EACH ROW
        WHEN (new.mailbox IN ({numbers})) EXECUTE FUNCTION SCHEMA.fail()"""
    )


@pytest.mark.slow
async def test_they_share_a_few_connections_and_each_gets_its_message(place):
    got = []

    async def handle(job: int) -> None:
        got.append(job)

    mailboxes = [place.mailbox(f"jobs-{n}", application_name="many") for n in range(60)]
    async with (
        place.mailbox(application_name="sender") as sender,
        LoopGroup([MainLoop(mailbox, handle, name=mailbox.name) for mailbox in mailboxes]),
    ):
        await until(lambda: all(mailbox.statistics().waiting_receives for mailbox in mailboxes))
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'many'"
        ((connections,),) = place.execute(count)
        assert connections <= MAX_BATCHES + 2
        for n, mailbox in enumerate(mailboxes):
            place.execute(
                "SELECT SCHEMA.send(%s, ARRAY[%s], ARRAY[%s::bytea])", place.number(mailbox.name), f"{n}", f"{n}"
            )
        await until(lambda: len(got) == len(mailboxes))
        assert sorted(got) == list(range(len(mailboxes)))
        assert sender.statistics().waiting_receives == 0


@pytest.mark.slow
async def test_one_poll_asks_for_all_that_wait(place):
    three = a, b, c = [place.mailbox(name) for name in "abc"]
    async with a, b, c, receiving(a), receiving(b), receiving(c):
        await anyio.sleep(2.5)  # until the tables have been looked after
        before, asked = a.transactions, [mailbox.statistics().batches for mailbox in three]
        await until(lambda: a.transactions >= before + 3)
        assert [mailbox.statistics().batches for mailbox in three] == [one + 3 for one in asked]
        for mailbox in three:
            await mailbox.send("x")


@pytest.mark.slow
async def test_a_receive_asks_nothing_while_the_mailbox_is_known_to_be_empty(place):
    async with two_processes(place) as (receiver, sender):
        with anyio.move_on_after(1):
            await receiver.receive(wait_time_seconds=60)
        asked = receiver.statistics().batches
        for _ in range(5):
            with anyio.move_on_after(0.02):
                await receiver.receive(wait_time_seconds=60)
        assert receiver.statistics().batches == asked
        await sender.send("while no receive waits")
        began = time.monotonic()
        (message,) = await receiver.receive(wait_time_seconds=60)
        assert message.body == "while no receive waits"
        assert time.monotonic() - began < 5
        assert await receiver.receive(wait_time_seconds=0.01) == []  # too short for a poll: it asks itself
        assert receiver.statistics().batches > asked + 1


@pytest.mark.slow
async def test_a_delay_is_waited_for_by_the_mailbox_that_stays(place):
    leave = anyio.Event()

    async def be_first(*, task_status):
        async with place.mailbox("first"):
            task_status.started()
            await leave.wait()

    async with anyio.create_task_group() as tasks:
        await tasks.start(be_first)
        async with place.mailbox("second", poll_interval=30) as second, receiving(second) as got:
            await second.send("x", delay=0.5)
            leave.set()
            with anyio.fail_after(5):
                await until(lambda: got)


@pytest.mark.slow
async def test_a_mailbox_that_is_dropped_fails_its_receive_and_no_other(place):
    async with place.mailbox("dropped") as dropped, place.mailbox("stays") as stays, receiving(stays):
        async with anyio.create_task_group() as tasks:

            async def receive() -> None:
                with pytest.raises(MailboxError, match="dropped"):
                    await dropped.receive(wait_time_seconds=60)

            tasks.start_soon(receive)
            await until(lambda: dropped.statistics().waiting_receives)
            place.execute("SELECT SCHEMA.drop_mailbox(%s)", place.number("dropped"))
        await stays.send("x")


@pytest.mark.slow
async def test_a_poll_that_the_server_refuses_ends_no_mailbox(place):
    """Its tables may be in the middle of a migration, or damaged: the receives find out by calls of their own."""
    async with place.mailbox("a") as a, place.mailbox("b") as b, receiving(a), receiving(b):
        place.execute(
            """CREATE OR REPLACE FUNCTION SCHEMA.poll_all(boxes integer[], sinces float8[]) RETURNS TABLE (
                box integer, pending integer, due_in float8, newly_listening boolean, moved integer, polled_at float8
            ) LANGUAGE plpgsql AS $$ BEGIN RAISE 'cache lookup failed' USING ERRCODE = 'XX000'; END $$"""
        )
        asked = b.statistics().batches
        await until(lambda: b.statistics().batches > asked + 2)
        await a.send("x")
        await b.send("x")


@pytest.mark.slow
async def test_a_poll_that_fails_for_one_mailbox_does_not_fail_for_the_others(place):
    """They are polled for in the same statement, and need no calls of their own."""

    async def receive_in_vain(mailbox):
        with pytest.raises(MailboxError, match="damaged"):
            await mailbox.receive(wait_time_seconds=60)

    mailboxes = [place.mailbox(f"{n}") for n in range(33)]
    broken, others = mailboxes[:3], mailboxes[3:]
    async with AsyncExitStack() as stack:
        for mailbox in mailboxes:
            await stack.enter_async_context(mailbox)
        got = [await stack.enter_async_context(receiving(mailbox)) for mailbox in others]
        await anyio.sleep(2.5)  # until the tables have been looked after
        damage(place, *(mailbox.name for mailbox in broken))
        before = mailboxes[0].transactions
        async with anyio.create_task_group() as tasks:
            for number, mailbox in enumerate(broken, 1):
                await mailbox.send("x", delay=0.3 * number)  # one of these is when most others are polled for
                tasks.start_soon(receive_in_vain, mailbox)
        await anyio.sleep(0.5)
        assert mailboxes[0].transactions < before + len(others)
        for mailbox in others:
            await mailbox.send("x")
        await until(lambda: all(got))


@pytest.mark.slow
async def test_a_mailbox_whose_poll_fails_is_left_out_of_the_next_ones(place):
    """Its receives raise, so none waits there until the store can do its work again."""
    failed = 0
    broken, *others = [place.mailbox(name) for name in "abcd"]

    async def receive() -> None:
        nonlocal failed
        while True:
            try:
                await broken.receive(wait_time_seconds=60)
            except MailboxError:
                failed += 1
                await anyio.sleep(0.1)

    async with (
        broken, others[0], others[1], others[2],
        receiving(others[0]), receiving(others[1]), receiving(others[2]), anyio.create_task_group() as tasks,
    ):  # fmt: skip
        tasks.start_soon(receive)
        damage(place, "a")
        await broken.send("x", delay=0.1)
        await until(lambda: failed)
        await anyio.sleep(2.5)  # until the tables have been looked after
        before, asked, failed = broken.transactions, [mailbox.statistics().batches for mailbox in others], 0
        await until(lambda: broken.transactions >= before + 3)
        assert failed
        assert [mailbox.statistics().batches for mailbox in others] == [one + 3 for one in asked]
        for mailbox in others:
            await mailbox.send("x")
        tasks.cancel_scope.cancel()
