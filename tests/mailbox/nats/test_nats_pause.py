"""Pauses and the concurrency of a mailbox on NATS: news are lost, processes die, and two of them change the limits at once.

The contract has what each mailbox does with them.
"""

from __future__ import annotations

import anyio
import pytest

pytest.importorskip("nats", reason="the extra 'nats' is not installed")

from mainspring import LoopGroup, MainLoop, Tasks
from mainspring.cli.app import call
from mainspring.errors import ConfigError, MailboxConnectionError
from mainspring.mailbox.limiters import ALL_TASKS, LimitChange, LimitState, TaskLimits
from mainspring.mailbox.message import Counts
from mainspring.mailbox.nats.mailbox import NatsMailbox
from mainspring.testing import mailbox_contract
from nats_support import GET, PULL, cut_off, one, place, reconnected, until_it_works

pytestmark = [pytest.mark.anyio, pytest.mark.loops("asyncio")]

UPDATE = "$JS.API.CONSUMER.DURABLE.CREATE.*"


@pytest.fixture
async def here(nats_url, anyio_backend):
    async with place(nats_url) as made:
        yield made


async def nothing_comes(box):
    assert await box.receive(wait_time_seconds=0.2) == []


async def most_in_flight(here):
    """What the server keeps."""
    return (await here.server.consumer(here.names().queue))["config"]["max_ack_pending"]


async def until_the_server_keeps(here, most):
    with anyio.fail_after(20):
        while await most_in_flight(here) != most:
            await anyio.sleep(0.02)


@pytest.mark.parametrize(
    "behaviour",
    [each for each in mailbox_contract.behaviours() if each.needs & {"pause", "concurrency"}],
    ids=lambda behaviour: behaviour.name,
)
async def test_the_contract_of_pauses_and_concurrency(here, behaviour):
    """Also among the quick tests, unlike all of it."""

    def make(mailbox, *, body=None, reply=None):
        return here.box(mailbox, body=body, reply=reply)

    await behaviour(mailbox_contract.BackendUnderTest(make, short_lease=1.0, lateness=1.0))


# ---------------------------------------------------------------------------------------------------------------- pauses


async def test_a_pause_during_a_lost_connection_holds_from_the_next_claim_on(here):
    line = await here.line()
    async with here.box() as operator, here.box(over=line) as worker:
        await nothing_comes(worker)
        line.refuses = True
        line.cut()
        await operator.pause()
        await operator.send("x")
        line.refuses = False
        await reconnected(worker)
        await nothing_comes(worker)
        await operator.resume()
        assert (await one(worker)).body == "x"


async def test_an_end_of_a_pause_during_a_lost_connection_is_found_soon(here):
    line = await here.line()
    async with here.box() as operator, here.box(over=line) as worker:
        await operator.pause()
        await operator.send("x")
        await nothing_comes(worker)
        line.refuses = True
        line.cut()
        await operator.resume()
        line.refuses = False
        assert (await until_it_works(lambda: one(worker))).body == "x"


async def test_a_receive_that_waits_for_the_end_of_a_pause_learns_that_the_server_is_gone(here):
    line = await here.line()
    async with here.box(over=line) as worker:
        await worker.pause()
        line.refuses = True

        async def wait():
            with pytest.raises(MailboxConnectionError):
                await worker.receive(wait_time_seconds=30)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                assert worker.statistics().waiting_receives == 1
                line.cut()


async def test_a_pause_whose_news_was_lost_is_found_by_a_look(here):
    line = await here.line()
    async with here.box(over=line) as operator, here.box() as worker:
        line.hold(here.names().to_limits)  # for ever
        await operator.pause()
        assert await worker.limits() == [LimitState(ALL_TASKS, TaskLimits(), paused=True)]
        await operator.send("x")
        await nothing_comes(worker)


async def test_a_pause_whose_news_was_lost_is_found_by_the_next_check(here):
    """There is one at the opening, and one every 30 seconds."""
    line, names = await here.line(), here.names()
    async with here.box() as operator:
        line.hold_all(lambda frame: frame.subject == names.to_limits and frame.verb == b"MSG")  # for ever
        check = line.hold(f"$JS.API.CONSUMER.INFO.{names.queue}.*", skip=1)
        async with here.box(over=line) as worker:
            await check.full()
            await operator.pause()
            looks = line.watch(GET + names.records)
            check.open()
            await looks.full()
            await anyio.sleep(0.1)
            await operator.send("x")
            await nothing_comes(worker)


async def test_what_the_server_hands_out_as_a_pause_begins_goes_back_uncharged(here):
    line = await here.line()
    async with here.box() as operator, here.box(over=line) as worker:
        async with anyio.create_task_group() as tasks:
            received = []

            async def receive():
                received.extend(await worker.receive(wait_time_seconds=20))

            tasks.start_soon(receive)
            await line.watch(f"{PULL}*").full()
            heard = line.hold_all(lambda frame: frame.verb in (b"MSG", b"HMSG"))
            await operator.send("x")
            await heard.came()
            await operator.pause()
            while here.names().to_limits not in [frame.subject for frame in heard.caught]:
                await heard.came(len(heard.caught) + 1)
            heard.open()
            with anyio.fail_after(20):
                while await operator.counts() != Counts(pending=1):
                    await anyio.sleep(0.02)
            assert received == []
            await operator.resume()
        (message,) = received
        assert (message.body, message.attempt) == ("x", 1)


async def test_closing_ends_a_receive_that_waits_for_the_end_of_a_pause(here):
    ended = []
    async with anyio.create_task_group() as tasks, here.box() as box:
        await box.pause()

        async def receive():
            ended.append(await box.receive(wait_time_seconds=30))

        tasks.start_soon(receive)
        await anyio.sleep(0.1)
    assert ended == [[]]


# ----------------------------------------------------------------------------------------------------------- concurrency


async def test_a_concurrency_whose_process_dies_before_the_server_has_it_is_repaired(here):
    line = await here.line()
    async with here.box(over=line) as operator:
        await until_the_server_keeps(here, -1)
        await cut_off(line, line.hold(UPDATE), lambda: operator.set_concurrency(3))
    assert await most_in_flight(here) == -1
    async with here.box() as box:
        await until_the_server_keeps(here, 3)
        assert [state.most for state in await box.limits()] == [3]


async def test_two_changes_at_once_are_both_made(here):
    async with here.box() as first, here.box() as second:
        for most in (5, 6, 7):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first.set_concurrency, most)
                tasks.start_soon(second.pause)
                tasks.start_soon(second.backend.change_limits, [LimitChange(ALL_TASKS, TaskLimits(most + 10))])
            expected = LimitState(ALL_TASKS, TaskLimits(most + 10), paused=True, concurrency=most)
            assert await first.limits() == await second.limits() == [expected]
            assert await most_in_flight(here) == most
            await second.resume()


async def test_of_two_processes_that_tell_the_server_the_later_change_counts(here):
    line = await here.line()
    async with here.box(over=line) as slow, here.box() as quick:
        held = line.hold(UPDATE)
        line.hold_all(lambda frame: frame.subject == here.names().to_limits and frame.verb == b"MSG")  # for ever
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slow.set_concurrency, 2)
            await held.full()
            await quick.set_concurrency(9)
            held.open()
        assert await most_in_flight(here) == 9


async def test_a_receive_that_waits_for_several_messages_returns_what_a_new_concurrency_allows(here):
    async with here.box() as operator, here.box() as worker:
        received = []

        async def receive():
            received.extend(await worker.receive(max_messages=10, wait_time_seconds=25))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receive)
                await anyio.sleep(0.1)
                await operator.set_concurrency(2)
                await operator.send_many(["x", "y", "z"])
        # Which ones: a message handed to the pull that the change ended goes to the tail.
        assert 1 <= len({message.body for message in received}) == len(received) <= 2


@pytest.mark.parametrize("limited", [True, False], ids=["limited", "never limited"])
async def test_what_an_operator_sets_at_the_server_is_mended_where_the_mailbox_has_limits(here, limited):
    queue = here.names().queue
    async with here.box() as box:
        if limited:
            await box.set_concurrency(3)
    config = (await here.server.consumer(queue))["config"] | {"max_ack_pending": 7}
    await here.server.api(f"CONSUMER.DURABLE.CREATE.{queue}.mainspring", {"stream_name": queue, "config": config})
    line = await here.line()
    checks = line.hold_answers(f"$JS.API.STREAM.INFO.{queue}", count=1, skip=1)
    async with here.box(over=line):
        await checks.full()  # the consumer was asked before
        checks.open()
        if limited:
            await until_the_server_keeps(here, 3)
        await anyio.sleep(0.1)
        assert await most_in_flight(here) == (3 if limited else 7)


async def test_limits_outlive_the_queue_that_an_operator_has_deleted(here):
    async with here.box() as box:
        await box.pause()
    await here.server.delete(here.names().queue)
    async with here.box() as box:
        assert [state.paused for state in await box.limits()] == [True]


async def test_a_consumer_that_is_made_anew_keeps_the_concurrency(here):
    async with here.box() as box:
        await box.set_concurrency(1)
        await here.server.api(f"CONSUMER.DELETE.{here.names().queue}.mainspring")
        await until_it_works(lambda: box.send_many(["x", "y"]))
        assert len(await until_it_works(lambda: box.receive(max_messages=10, wait_time_seconds=10))) == 1
        assert await most_in_flight(here) == 1


async def test_a_change_that_changes_nothing_writes_nothing(here):
    line = await here.line()
    async with here.box(over=line) as box:
        await box.set_concurrency(2)
        said = line.watch(here.names().to_limits)
        await box.set_concurrency(2)
        await box.resume()
        assert said.caught == []


async def test_a_cancelled_receive_ends_although_as_many_messages_are_out_as_may_be(here):
    async with here.box() as box:
        await box.set_concurrency(1)
        await box.send_many(["x", "y"])
        message = await one(box)
        with anyio.move_on_after(0.1):
            await box.receive(wait_time_seconds=30)
        await message.acknowledge()
        again = await one(box)
        assert (again.body, again.delivery_count) == ("y", 1)


async def test_the_tasks_of_a_mailbox_run_within_its_concurrency(here):
    """Of all workers together."""
    running, most, done = 0, 0, []

    def tasks_of_a_worker():
        tasks = Tasks(here.box(), max_concurrency=3)

        @tasks.task(name="work")
        async def work(number: int) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await anyio.sleep(0.01)
            running -= 1
            done.append(number)

        return tasks, work

    (first, work), (second, _) = tasks_of_a_worker(), tasks_of_a_worker()
    async with first:
        await work.send_many([(number,) for number in range(30)])
    with anyio.fail_after(60):
        async with anyio.create_task_group() as workers:
            for tasks in (first, second):
                group = LoopGroup([tasks.loop(concurrency=5)], guardian=False)
                workers.start_soon(lambda group=group: group.run(install_signals=False, until_empty=True))
    assert (sorted(done), most) == (list(range(30)), 3)


async def test_a_loop_of_a_paused_mailbox_ends_at_once(here):
    box = here.box()

    async def handle(body: str) -> None:
        raise AssertionError(body)

    async with box:
        await box.pause()
        await box.send("x")
        group = LoopGroup([MainLoop(box, handle)], guardian=False)
        with anyio.fail_after(10):
            async with group:
                await anyio.sleep(0.3)
        assert group.report.clean
        assert await box.counts() == Counts(pending=1)


# ------------------------------------------------------------------------------------------------- what it cannot do


async def test_limits_of_a_task_are_refused_with_the_backends_that_keep_them(here):
    async with here.box() as box:
        for call_it in (box.pause("t"), box.resume("t"), box.set_concurrency(1, "t")):
            with pytest.raises(
                ConfigError,
                match=r"^mailbox \S+ keeps no limits or pauses of single tasks \(Capabilities.limits\); memory://, .* do$",
            ):
                await call_it
        assert await box.limits() == []


# -------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def url(nats_url):
    """A mailbox that is there."""

    async def make():
        async with place(nats_url) as here:
            return f"{nats_url}?name={here.prefix}-jobs"

    async def remove():
        async with NatsMailbox(made) as box:
            await box.backend.drop()

    made = anyio.run(make)
    yield made
    anyio.run(remove)


def test_the_command_line_pauses_and_limits_a_mailbox(url, capsys):
    async def fill():
        async with NatsMailbox(url) as box:
            await box.send("x")

    anyio.run(fill)
    for words in (["pause", url], ["concurrency", url, "3"]):
        assert call(words) == 0
    assert call(["stats", url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all tasks: paused, concurrency 3 (changed)"
    assert call(["pause", url, "--task", "t"]) != 0
    assert "memory://, sqlite://, redis:// and postgresql:// mailboxes do" in capsys.readouterr().err
    for words in (["resume", url], ["concurrency", url, "declared"], ["stats", url]):
        assert call(words) == 0
    assert "all tasks:" not in capsys.readouterr().out
