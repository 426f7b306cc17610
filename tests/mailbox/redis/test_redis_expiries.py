"""More messages of a Redis mailbox have expired at once than one call sees to: nothing takes the rest for live ones."""

from __future__ import annotations

import pytest

from mainspring import MailboxFullError
from mainspring.mailbox.message import Counts
from redis_support import place

pytestmark = pytest.mark.anyio
MANY = 2_500
"""One call sees to a thousand."""


@pytest.fixture
def here(redis_url):
    with place(redis_url) as made:
        yield made


def let_expire(here, ids):
    """As if their time had come: that of the last of them first, in which order they are seen to."""
    for start in range(0, len(ids), 500):
        dated = [(MANY - number, message_id) for number, message_id in enumerate(ids)][start : start + 500]
        here.call("ZADD", here.key("expiry"), "XX", *(part for pair in dated for part in pair))


async def test_no_receive_has_one_of_them(here, anyio_backend):
    """All that is live comes out of one receive, also what stands behind them."""
    async with here.mailbox() as mailbox:
        let_expire(here, await mailbox.send_many(range(MANY), expires_in=600))
        await mailbox.send("live")
        assert [message.body for message in await mailbox.receive(max_messages=1_000)] == ["live"]
        assert await mailbox.counts() == Counts(in_flight=1, dead=MANY)


async def test_a_waiting_receive_has_none_of_them(here, anyio_backend):
    async with here.mailbox() as mailbox:
        let_expire(here, await mailbox.send_many(range(MANY), expires_in=600))
        assert await mailbox.receive(max_messages=1_000, wait_time_seconds=0.01) == []
        assert await mailbox.counts() == Counts(dead=MANY)


async def test_one_of_them_holds_no_key(here, anyio_backend):
    """A message that is sent with its key is another one, and not dropped for one that is dead."""
    async with here.mailbox() as mailbox:
        keyed = await mailbox.send("old", dedup_key="k", expires_in=600)
        let_expire(here, [keyed, *await mailbox.send_many(range(MANY), expires_in=600)])
        assert await mailbox.send("new", dedup_key="k") != keyed
        (message,) = await mailbox.receive()
        assert message.body == "new"
        assert await mailbox.counts() == Counts(in_flight=1, dead=MANY + 1)


async def test_one_of_them_that_somebody_works_on_holds_its_key(here, anyio_backend):
    async with here.mailbox() as mailbox:
        keyed = await mailbox.send("old", dedup_key="k", expires_in=600)
        (message,) = await mailbox.receive()
        let_expire(here, [keyed, *await mailbox.send_many(range(MANY), expires_in=600)])
        assert await mailbox.send("new", dedup_key="k") == keyed
        await message.acknowledge()
        assert await mailbox.counts() == Counts(settled=1, dead=MANY)


async def test_they_take_nobodys_room(here, anyio_backend):
    async with here.mailbox(capacity=MANY) as mailbox:
        let_expire(here, await mailbox.send_many(range(MANY), expires_in=600))
        await mailbox.send("live")
        with pytest.raises(MailboxFullError, match="holds 1 of at most"):
            await mailbox.send_many(range(MANY))
        assert await mailbox.counts() == Counts(pending=1, dead=MANY)


@pytest.mark.parametrize("what", ["find", "replay", "discard"])
async def test_they_are_found_among_the_dead_by_their_ids(here, what, anyio_backend):
    async with here.mailbox() as mailbox:
        ids = await mailbox.send_many(range(MANY), expires_in=600)
        let_expire(here, ids)
        if what == "find":
            letter = await mailbox.dead_letter(ids[0])
            assert letter is not None
            assert letter.error_type == "MessageExpiredError"
        elif what == "replay":
            assert await mailbox.replay_dead_letters([ids[0]]) == 1
            assert await mailbox.counts() == Counts(pending=1, dead=MANY - 1)
        else:
            assert await mailbox.purge_dead_letters([ids[0]]) == 1
            assert await mailbox.counts() == Counts(settled=1, dead=MANY - 1)
