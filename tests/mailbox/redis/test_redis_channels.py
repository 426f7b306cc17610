"""Channels that an ACL takes from a user, or that another program uses: their mailbox polls, and hears again by itself."""

from __future__ import annotations

import pytest

from mainspring import ConfigError
from mainspring.mailbox.message import Counts
from redis_support import LISTENER, RedisLine, line_to, place, soon
from servers import RedisServer

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def own_server():
    with RedisServer("--appendonly", "no") as own:
        yield own


@pytest.fixture
def here(own_server):
    with place(own_server.url, fallback_interval=3_600, username="plain", password="secret") as made:
        grant(made)
        yield made


def grant(here, *channels: str) -> None:
    """Let the user have these channels only; by default all of them."""
    rules = [f"&{channel}" for channel in channels or ["{ms:*"]]
    here.call("ACL", "SETUSER", "plain", "on", ">secret", "~{ms:*", "+@all", "resetchannels", *rules)


class Tries:
    """How often a line has passed on that a mailbox is to be subscribed to ``channel``."""

    def __init__(self, line: RedisLine, here, channel: str = "all", name: str = "refused") -> None:
        self.count = 0
        self._channel = here.key(channel, name).encode()
        line.on_command = self._note

    def _note(self, passage, command) -> None:
        if command == [b"SSUBSCRIBE", self._channel]:
            self.count += 1

    async def more(self, count: int = 3) -> None:
        """Wait for some more."""
        await soon(lambda seen=self.count: self.count >= seen + count)


async def refuse_on_reconnection(here, line, mailbox) -> None:
    grant(here, here.key("*", "stays"))  # which makes the server hang up


async def refuse_on_renewal(here, line, mailbox) -> None:
    here.call("SPUBLISH", here.key("all", "refused"), "dsoon")  # no mailbox wrote this
    await soon(lambda: not mailbox.statistics().connected)
    await soon(lambda: not here.call("PUBSUB", "SHARDCHANNELS", here.key("*", "refused")))
    grant(here, here.key("*", "stays"))


@pytest.mark.slow
@pytest.mark.parametrize("refuse", [refuse_on_reconnection, refuse_on_renewal])
async def test_a_subscription_that_is_refused_is_tried_again_alone(here, waiting, refuse):
    """The others of the connection hear all the time."""
    async with line_to(here) as line, line.mailbox("refused") as refused, line.mailbox("stays") as stays:
        tries = Tries(line, here)
        await waiting.start(refused)
        await refuse(here, line, refused)
        await tries.more()
        await soon(lambda: stays.statistics().connected)
        await waiting.start(stays)
        before = stays.statistics().reconnects, line.opened
        await tries.more()
        await stays.send("x")
        await waiting.until(1)
        assert [mailbox for mailbox, _ in waiting.got] == [stays]
        assert (stays.statistics().reconnects, line.opened) == before
        assert refused.statistics().polling

        grant(here)
        await soon(lambda: refused.statistics().connected)
        await refused.send("y")
        await waiting.until(2)
        assert [message.body for message in waiting.messages] == ["x", "y"]


@pytest.mark.slow
async def test_the_half_of_a_subscription_that_was_not_refused_does_not_pile_up(here, anyio_backend):
    async with line_to(here) as line, line.mailbox("refused") as mailbox:
        tries = Tries(line, here)
        grant(here, here.key("?" * 24, "refused"))  # its own channels, and not that of all
        await tries.more(6)
        assert len(here.channels("refused")) <= 1
        grant(here)
        await soon(lambda: mailbox.statistics().connected)
        assert len(here.channels("refused")) == 1


async def test_a_mailbox_that_is_refused_can_close_and_leaves_the_others_theirs(here, waiting):
    async with line_to(here) as line, line.mailbox("stays") as stays:
        tries = Tries(line, here)
        async with line.mailbox("refused"):
            grant(here, here.key("*", "stays"))
            await tries.more()
        await soon(lambda: stays.statistics().connected)
        await waiting.start(stays)
        await stays.send("x")
        await waiting.until(1)
    assert [passage.name for passage in line.passages if passage.name == LISTENER] == []


async def test_a_mailbox_that_closes_while_all_are_subscribed_again_leaves_the_others_theirs(here, waiting):
    """What the server says to one of them is not taken for another's."""

    def on_command(passage, command) -> None:
        if command[0] == b"SSUBSCRIBE":
            line.news.hold()

    async with (
        line_to(here) as line,
        line.mailbox("closes") as closes,
        line.mailbox("refused") as refused,
        line.mailbox("stays") as stays,
    ):
        line.on_command = on_command
        grant(here, here.key("*", "closes"), here.key("*", "stays"))
        await line.news.arrived()
        await closes.close()
        line.on_command = None
        line.news.let_go()
        await soon(lambda: stays.statistics().connected)
        assert refused.statistics().polling
        await waiting.start(stays)
        await stays.send("x")
        await waiting.until(1)
        assert await stays.counts() == Counts(in_flight=1)


async def test_an_opening_that_is_refused_its_channels_leaves_nothing_and_the_others_theirs(here, waiting):
    async with here.mailbox("stays") as stays:
        here.call("ACL", "SETUSER", "plain", "-ssubscribe")
        try:
            with pytest.raises(ConfigError, match=r"may not use SSUBSCRIBE .*; grant the commands with ACL SETUSER"):
                await here.mailbox("refused").__aenter__()
        finally:
            grant(here)
        assert here.call("PUBSUB", "SHARDCHANNELS", here.key("*", "refused")) == []
        await waiting.start(stays)
        await stays.send("x")
        await waiting.until(1)
