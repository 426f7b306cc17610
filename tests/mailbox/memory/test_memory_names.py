"""Names and event loops of memory mailboxes: one queue a name and loop, which ends with that."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import anyio
import pytest

from mainspring.errors import ConfigError, MailboxClosedError, MailboxFullError
from mainspring.mailbox.memory.mailbox import InMemoryMailbox
from mainspring.mailbox.open import open_mailbox
from mainspring.testing import run_virtual

LOOPS: dict[str, Any] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}


@pytest.fixture(params=LOOPS)
def first(request: pytest.FixtureRequest) -> Any:
    return LOOPS[request.param]


@pytest.fixture(params=LOOPS)
def second(request: pytest.FixtureRequest) -> Any:
    return LOOPS[request.param]


async def bodies(mailbox: Any) -> list[Any]:
    return [message.body for message in await mailbox.receive(max_messages=100)]


def test_one_name_is_one_queue_on_a_loop_and_a_constructed_mailbox_is_its_own(first: Any) -> None:
    async def main() -> None:
        a, b = open_mailbox("memory://jobs"), open_mailbox("memory://jobs", capacity=5)
        other, own = open_mailbox("memory://other"), InMemoryMailbox("jobs")
        await a.send(1)
        assert await bodies(other) == await bodies(own) == []
        assert await bodies(b) == [1]
        assert a.address == b.address == "memory://jobs"
        assert len({a.address, own.address, InMemoryMailbox("jobs").address}) == 3

    anyio.run(main, **first)


def test_the_queue_lives_as_long_as_somebody_has_it(first: Any) -> None:
    async def main() -> None:
        mailbox = open_mailbox("memory://jobs")
        await mailbox.send(1)
        del mailbox
        gc.collect()
        assert await bodies(open_mailbox("memory://jobs")) == []

        async with open_mailbox("memory://other") as opened:
            await opened.send(1)
        gc.disable()
        try:
            del opened  # nothing in it refers back to it
            assert await bodies(open_mailbox("memory://other")) == []
        finally:
            gc.enable()

    anyio.run(main, **first)


def test_closing_one_of_two_leaves_the_other_open_and_its_receiver_waiting(first: Any) -> None:
    async def main() -> None:
        got = []

        async def wait() -> None:
            got.extend(await bodies_waiting(b))

        async def bodies_waiting(mailbox: Any) -> list[Any]:
            return [m.body for m in await mailbox.receive(wait_time_seconds=30)]

        with anyio.fail_after(20):
            async with open_mailbox("memory://jobs") as b, anyio.create_task_group() as tasks:
                async with open_mailbox("memory://jobs") as a:
                    tasks.start_soon(wait)
                    await anyio.wait_all_tasks_blocked()
                with pytest.raises(MailboxClosedError):
                    await a.send(1)
                await anyio.wait_all_tasks_blocked()
                assert got == []
                await b.send(2)
        assert got == [2]

    anyio.run(main, **first)


def test_who_waits_watches_the_time_itself_once_the_mailbox_that_did_is_closed() -> None:
    async def main() -> None:
        unentered = open_mailbox("memory://jobs")
        got = []

        async def wait() -> None:
            got.extend(m.body for m in await unentered.receive(wait_time_seconds=1_000))

        with anyio.fail_after(2_000):
            async with anyio.create_task_group() as tasks, open_mailbox("memory://jobs") as entered:
                await entered.send("x", delay=100)
                tasks.start_soon(wait)
                await anyio.sleep(10)
        assert got == ["x"]
        assert anyio.current_time() == 100

    run_virtual(main)


def test_a_new_object_of_a_name_begins_afresh_on_the_next_loop(first: Any, second: Any) -> None:
    old = open_mailbox("memory://jobs")

    async def send() -> None:
        await old.send(1)

    async def look() -> None:
        assert await bodies(open_mailbox("memory://jobs")) == []

    anyio.run(send, **first)
    anyio.run(look, **second)


def test_an_object_whose_event_loop_has_ended_with_messages_says_so_on_the_next_one(first: Any, second: Any) -> None:
    mailbox = open_mailbox("memory://jobs")

    async def before() -> None:
        async with mailbox:
            await mailbox.send(1)

    async def after() -> None:
        with pytest.raises(
            ConfigError, match=r"'jobs' belonged to an event loop that has ended, with 1 message not done: .*purge"
        ):
            async with mailbox:
                pass

    anyio.run(before, **first)
    anyio.run(after, **second)


def test_an_object_that_has_nothing_to_lose_begins_afresh_on_the_next_loop(first: Any, second: Any) -> None:
    mailbox = open_mailbox("memory://jobs", capacity=2)

    async def work(number: int) -> None:
        async with mailbox:
            await mailbox.send_many([number, number])
            with pytest.raises(MailboxFullError):
                await open_mailbox("memory://jobs").send(1)
            assert await mailbox.purge() == 2
            assert (await mailbox.counts()).settled == 2

    anyio.run(work, 1, **first)
    anyio.run(work, 2, **second)


@pytest.mark.parametrize("make", [lambda: open_mailbox("memory://jobs"), lambda: InMemoryMailbox("jobs")])
def test_use_from_another_live_event_loop_is_a_config_error(make: Any, first: Any, second: Any) -> None:
    mailbox = make()
    errors = []

    async def other() -> None:
        for call in (mailbox.counts, mailbox.receive, lambda: mailbox.send(2), mailbox.__aenter__):
            try:
                await call()
            except ConfigError as error:
                errors.append(str(error))

    async def main() -> None:
        await mailbox.send(1)
        await anyio.to_thread.run_sync(lambda: anyio.run(other, **second))
        assert await bodies(mailbox) == [1]

    anyio.run(main, **first)
    assert len(errors) == 4
    assert "another event loop" in errors[0]


def test_a_new_object_of_a_name_in_use_on_another_loop_is_a_config_error(first: Any) -> None:
    async def other() -> None:
        with pytest.raises(ConfigError, match="another event loop"):
            await open_mailbox("memory://jobs").send(1)

    async def main() -> None:
        mailbox = open_mailbox("memory://jobs")
        await mailbox.send(1)
        await anyio.to_thread.run_sync(lambda: anyio.run(other, **first))

    anyio.run(main, **first)


def test_an_address_reaches_a_constructed_mailbox(first: Any) -> None:
    async def main() -> None:
        own: InMemoryMailbox[Any, Any] = InMemoryMailbox("a name/with odd ü?#@:")
        through = open_mailbox(own.address)
        await through.send(5)
        assert await bodies(own) == [5]

    anyio.run(main, **first)


def test_mailboxes_nobody_closed_are_collected_in_silence(first: Any) -> None:
    async def main() -> None:
        mailbox: InMemoryMailbox[Any, Any] = InMemoryMailbox()
        with anyio.move_on_after(0.01):
            await mailbox.receive(wait_time_seconds=30)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        anyio.run(main, **first)
        gc.collect()


def test_opening_twice_is_refused_and_opening_again_after_a_close_is_not(first: Any) -> None:
    mailbox: InMemoryMailbox[int, Any] = InMemoryMailbox("jobs")

    async def main() -> None:
        async with mailbox:
            with pytest.raises(ConfigError, match="already open"):
                await mailbox.__aenter__()
            await mailbox.send(1)
        with pytest.raises(MailboxClosedError):
            await mailbox.send(2)
        async with mailbox:
            assert await bodies(mailbox) == [1]

    anyio.run(main, **first)


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("memory://", {}, "memory://NAME"),
        ("memory:///jobs", {}, "memory://NAME"),
        ("memory://jobs/x", {}, "memory://NAME"),
        ("memory://jobs?colour=red", {}, "it has capacity, serialize"),
        ("memory://jobs", {"path": "x"}, "it has capacity, serialize"),
        ("memory://jobs?capacity=-1", {}, "capacity must be a whole number"),
        ("memory://jobs?capacity=many", {}, "capacity must be a whole number"),
        ("memory://jobs?serialize=perhaps", {}, "serialize must be true or false"),
        ("memory://jobs?capacity=1", {"capacity": 2}, "leave one out"),
        ("memory://jobs?capacity=1&capacity=2", {}, "leave one out"),
        ("memory://jobs?capacity", {}, "no mailbox URL"),
        ("nosuch://jobs", {}, "no mailbox backend has the scheme"),
        (None, {}, "no mailbox URL"),
    ],
)
def test_a_bad_url_is_a_config_error_that_says_what_is_allowed(url: Any, options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_mailbox(url, **options)


def test_options_come_from_the_url_or_the_call_and_must_agree_by_name() -> None:
    mailbox = open_mailbox("memory://options?capacity=100&serialize=true", body=int)
    assert mailbox.serializes
    assert isinstance(mailbox, InMemoryMailbox)
    with pytest.raises(ConfigError, match="capacity=100 already, not 5"):
        open_mailbox("memory://options", capacity=5)

    async def fill() -> None:
        await mailbox.send_many(range(100))
        with pytest.raises(MailboxFullError):
            await open_mailbox("memory://options").send(1)

    anyio.run(fill)


def test_two_threads_with_loops_of_their_own_use_names_of_their_own() -> None:
    results = {}

    def run(name: str) -> None:
        async def main() -> None:
            async with open_mailbox(f"memory://{name}") as mailbox:
                await mailbox.send_many(range(200))
                results[name] = await bodies(mailbox)

        anyio.run(main)

    threads = [threading.Thread(target=run, args=(f"n{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(results[f"n{n}"] == list(range(100)) for n in range(4))
