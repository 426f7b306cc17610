"""A network that goes silent, without a word to either end: noticed on every server, and survived."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
import pytest

import nats_support
import redis_support
from mainspring import ConfigError, MailboxConnectionError, open_mailbox
from mainspring.core import random
from postgres_support import moved
from silent_line import Line

pytestmark = pytest.mark.anyio


@pytest.mark.slow
@pytest.mark.loops("asyncio")
@pytest.mark.parametrize("kind", ["nats", "redis", "postgres"])
async def test_a_silent_connection_is_given_up_and_made_anew(
    kind: str, request: pytest.FixtureRequest, anyio_backend: str
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    prefix = f"silent-{random.token(48)}-"
    options: dict[str, Any] = {"timeout": 1.0}
    if kind == "postgres":  # where a call may take long
        options = {"schema": request.getfixturevalue("place").schema, "listen": False}
    line = Line(url)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, line.serve)
        way = moved(url, listener.extra(anyio.abc.SocketAttribute.local_port))
        async with open_mailbox(way, name=f"{prefix}jobs", silence=0.5, **options) as mailbox:
            await mailbox.send("held")
            (held,) = await mailbox.receive(wait_time_seconds=5)
            tasks.start_soon(_go_silent, line)
            with anyio.fail_after(8), pytest.raises(MailboxConnectionError):
                await mailbox.receive(wait_time_seconds=60)
            line.silent = False
            with anyio.fail_after(20):
                while True:
                    with suppress(MailboxConnectionError):
                        await held.extend_visibility(60)
                        break
                    await anyio.sleep(0.05)
                await held.acknowledge()
                await mailbox.send("after")
                (message,) = await mailbox.receive(wait_time_seconds=10)
            assert message.body == "after"
            await message.acknowledge()
        tasks.cancel_scope.cancel()
    if kind == "nats":
        await nats_support.remove(url, nats_support.encoded(prefix))
    if kind == "redis":
        redis_support.Place(url).clean(prefix)


async def _go_silent(line: Line) -> None:
    await anyio.sleep(0.1)
    line.silent = True


@pytest.mark.parametrize("url", ["nats://host", "redis://host", "postgresql://host/database"])
@pytest.mark.parametrize("silence", [0, -1, "long", float("nan")])
def test_silence_is_a_time(url: str, silence: Any) -> None:
    with pytest.raises(ConfigError, match="silence"):
        open_mailbox(url, silence=silence)
