"""Mailboxes that groups and loops open: each has one owner, who closes it at its end."""

from __future__ import annotations

import anyio
import pytest

from mainspring import ConfigError, DLQConsumer, InMemoryMailbox, LoopGroup, MailboxClosedError, MainLoop
from mainspring.core.state_machine import MailboxState
from mainspring.mailbox.ownership import open_in
from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox
from mainspring.runtime.scope import DaemonScope

pytestmark = pytest.mark.anyio


@pytest.fixture
def shared(path, anyio_backend):
    """A durable mailbox that nobody has opened."""
    return SQLiteMailbox(path, name="jobs", body=int)


def group_on(mailbox, name, done):
    async def handle(job: int) -> None:
        done.append((name, job))

    return LoopGroup([MainLoop(mailbox, handle, name=f"loop of {name}")], name=name)


async def until(holds):
    with anyio.fail_after(60):
        while not holds():
            await anyio.sleep(0.001)


async def test_a_second_group_is_refused_and_the_first_goes_on(shared):
    done = []
    async with group_on(shared, "one", done):
        with pytest.raises(ConfigError) as refused:
            async with group_on(shared, "two", done):
                raise AssertionError("it has started")
        assert str(refused.value) == (
            "mailbox 'jobs' was opened by group 'one', which closes it at its end, under the work of group 'two': open it"
            " around both (`async with mailbox:`), or give each a mailbox object of its own"
        )
        await shared.send(1)
        await until(lambda: done)
    assert done == [("one", 1)]
    assert shared.state is MailboxState.CLOSED


async def test_a_mailbox_that_its_user_has_opened_outlives_the_groups_that_share_it(shared):
    done = []
    async with shared:
        async with group_on(shared, "one", done):
            async with group_on(shared, "two", done):
                pass
            await shared.send(1)
            await until(lambda: done)
        await shared.send(2)
        assert (await shared.counts()).pending == 1
    with pytest.raises(MailboxClosedError):
        await shared.send(3)


async def test_one_group_after_the_other_may_open_it(shared):
    done = []
    for number, name in enumerate(("one", "two", "one")):
        async with group_on(shared, name, done):
            await shared.send(number)
            await until(lambda number=number: len(done) > number)
    assert done == [("one", 0), ("two", 1), ("one", 2)]


async def test_a_loop_of_its_own_is_an_owner_too(shared):
    async def handle(job: int) -> None: ...

    async with MainLoop(shared, handle, name="alone"):
        with pytest.raises(ConfigError, match=r"opened by loop 'alone', .* under the work of group 'two'"):
            async with group_on(shared, "two", []):
                pass


@pytest.mark.parametrize("dead_first", [True, False])
async def test_the_loops_of_one_group_share_it_also_by_way_of_its_dead_letters(shared, dead_first):
    async def handle(job: int) -> None:
        done.append(job)

    async def bury(letter) -> None:
        done.append(letter.body)

    done = []
    loops = [MainLoop(shared, handle), MainLoop(shared, handle, name="another"), DLQConsumer(shared, bury)]
    async with LoopGroup(loops[::-1] if dead_first else loops):
        await shared.send_many([1, 2, 3])
        await until(lambda: len(done) == 3)
    assert shared.state is MailboxState.CLOSED


async def test_two_groups_on_the_dead_letters_of_one_mailbox_have_two_owners(shared):
    async def bury(letter) -> None: ...

    async with LoopGroup([DLQConsumer(shared, bury)], name="one"):
        with pytest.raises(ConfigError, match=r"opened by group 'one', .* under the work of group 'two'"):
            async with LoopGroup([DLQConsumer(shared, bury)], name="two"):
                pass


async def test_an_open_that_fails_leaves_no_owner(tmp_path, anyio_backend):
    mailbox = SQLiteMailbox(tmp_path / "later" / "mail.db", name="jobs", body=int)
    done = []
    with pytest.raises(ConfigError, match="has no directory"):
        async with group_on(mailbox, "one", done):
            pass
    (tmp_path / "later").mkdir()
    async with group_on(mailbox, "two", done):
        await mailbox.send(1)
        await until(lambda: done)
    assert done == [("two", 1)]


async def test_a_mailbox_that_works_unopened_can_be_shared_at_any_time(anyio_backend):
    mailbox = InMemoryMailbox("jobs", body=int)
    done = []
    async with group_on(mailbox, "one", done):
        async with group_on(mailbox, "two", done):
            pass
        await mailbox.send(1)
        await until(lambda: done)
    assert done == [("one", 1)]


@pytest.mark.slow
async def test_in_virtual_time_the_first_to_end_does_not_close_it_for_the_second(path, virtual_clock):
    """The work of hours of one group, while the other, refused, has been and gone."""
    shared = SQLiteMailbox(path, name="jobs", body=int)
    done = []

    async def handle(job: int) -> None:
        await anyio.sleep(7_200)
        done.append(virtual_clock.now)

    async with LoopGroup([MainLoop(shared, handle)], name="one", shutdown_timeout=10_000, watchdog_threshold=None):
        await shared.send(1)
        await anyio.sleep(3_600)
        with pytest.raises(ConfigError, match="open it around both"):
            async with group_on(shared, "two", []):
                pass
    assert done == [7_200]


class Slow(InMemoryMailbox):
    """A mailbox that takes a second to open, or fails after it."""

    def __init__(self, name, error=None):
        super().__init__(name, serialize=False)
        self.backend.works_unopened = False
        self._error = error

    async def __aenter__(self):
        await anyio.sleep(1)
        if self._error is not None:
            raise self._error
        return await super().__aenter__()


async def test_the_mailboxes_of_a_group_are_opened_at_the_same_time(virtual_clock):
    async def handle(job: int) -> None: ...

    loops = [MainLoop(Slow(f"slow-{n}"), handle, name=f"loop {n}") for n in range(100)]
    began = anyio.current_time()
    async with LoopGroup(loops):
        assert anyio.current_time() - began < 2


class View(InMemoryMailbox):
    """A mailbox that opens another one, ``after`` seconds late, and fails if that takes more than ``within``."""

    def __init__(self, name, source, after, within):
        super().__init__(name, serialize=False)
        self.backend.works_unopened = False
        self._source, self._after, self._within = source, after, within

    async def __aenter__(self):
        await anyio.sleep(self._after)
        with anyio.fail_after(self._within):
            async with DaemonScope() as scope:
                await open_in(scope, [self._source], "view")
        return await super().__aenter__()


async def test_an_opening_that_its_first_user_gives_up_ends_for_the_second(virtual_clock):
    async def handle(job: int) -> None: ...

    source = Slow("source")
    views = [View("second", source, 0.1, 60), View("first", source, 0, 0.5)]
    with pytest.raises(MailboxClosedError, match="'source' was closed while it was being opened"):
        async with LoopGroup([MainLoop(view, handle, name=view.name) for view in views]):
            raise AssertionError("it has started")


async def test_of_several_that_cannot_be_opened_the_first_is_named_and_none_stays_open(virtual_clock):
    async def handle(job: int) -> None: ...

    errors = [None, ConfigError("the second"), ConfigError("the third"), None]
    mailboxes = [Slow(f"slow-{n}", error) for n, error in enumerate(errors)]
    with pytest.raises(ConfigError, match="the second"):
        async with LoopGroup([MainLoop(mailbox, handle, name=mailbox.name) for mailbox in mailboxes]):
            raise AssertionError("it has started")
    assert not any(mailbox.opened_by for mailbox in mailboxes)
    assert MailboxState.OPEN not in [mailbox.state for mailbox in mailboxes]
