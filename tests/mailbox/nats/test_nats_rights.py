"""A login of a NATS server that is good for less than a mailbox needs: said at once, and by name."""

from __future__ import annotations

import anyio
import pytest

from mainspring.errors import ConfigError
from mainspring.mailbox.message import Counts
from mainspring.mailbox.nats.mailbox import NatsMailbox
from nats_support import several
from servers import NatsServer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loops("asyncio", "uvloop"),
]
DENIED = {
    "everything": "publish: {deny: '>'}",
    "create": "publish: {deny: '$JS.API.STREAM.CREATE.>'}",
    "inbox": "subscribe: {deny: '_INBOX.>'}",
    "send": "publish: {deny: 'mainspring.>'}",
    "pull": "publish: {deny: '$JS.API.CONSUMER.MSG.NEXT.>'}",
    "remove": "publish: {deny: '$JS.API.STREAM.MSG.DELETE.>'}",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    config = tmp_path_factory.mktemp("rights") / "server.conf"
    users = "".join(f"{{user: {name}, password: x, permissions: {{{what}}}}}\n" for name, what in DENIED.items())
    config.write_text(f"authorization {{ users = [{{user: owner, password: x}}\n{users}] }}\n")
    with NatsServer("-c", str(config)) as own:
        yield own


def mailbox(server, user, name="jobs"):
    return NatsMailbox(f"nats://{user}:x@127.0.0.1:{server.port}", name=name, timeout=30)


@pytest.mark.parametrize("user", ["everything", "create", "inbox"])
async def test_one_who_may_not_open_a_mailbox_is_told_so(server, user, anyio_backend):
    with anyio.fail_after(5), pytest.raises(ConfigError, match=r"does not let this user use '.+'; grant"):
        async with mailbox(server, user, f"no-{user}"):
            pass


@pytest.mark.parametrize(
    ("user", "call"),
    [
        ("send", lambda box: box.send("x")),
        ("send", lambda box: box.send_many(range(20))),
        ("pull", lambda box: box.receive()),
        ("pull", lambda box: box.receive(wait_time_seconds=20)),
    ],
)
async def test_a_call_that_the_user_may_not_make_is_refused_at_once(server, user, call, anyio_backend):
    async with mailbox(server, "owner"), mailbox(server, user) as box:
        for _ in range(2):
            with anyio.fail_after(5), pytest.raises(ConfigError, match=r"does not let this user use '.+'; grant"):
                await call(box)
        assert await box.counts() == Counts()


async def test_what_cannot_be_acknowledged_stays(server, anyio_backend):
    async with mailbox(server, "owner", "kept") as owner, mailbox(server, "remove", "kept") as box:
        await box.send("x")
        (message,) = await several(box, 1)
        with anyio.fail_after(5), pytest.raises(ConfigError):
            await message.acknowledge()
        assert isinstance((await box.acknowledge_many([message]))[0], ConfigError)
        assert not message.is_settled
        assert (await owner.counts()).in_flight == 1
        await owner.purge()
