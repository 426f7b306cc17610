"""``Workload``: the clients of a run: they send messages and requests, and wait for the replies."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import trio

from mainspring.errors import MailboxConnectionError, MailboxFullError, SerializationError
from mainspring.mailbox.memory.mailbox import InMemoryMailbox
from mainspring.mailbox.message import Envelope

if TYPE_CHECKING:
    from mainspring.testing.simulation.link import LinkedMailbox
    from mainspring.testing.simulation.run import Simulation
    from mainspring.testing.simulation.world import World

REQUEST_EVERY = 4
"""Which share of the messages asks for a reply."""
BURST = 0.1
"""Of how many sends several come at once: then messages wait together, are claimed together and acknowledged together."""
BURST_SIZE = 8
"""The most messages of a burst. The quiet after it is as long as they would have taken one by one."""
RETRY = 2.0
"""Seconds after which a client that could not send tries again."""
NO_JSON = b"\xff\x00 no JSON"
STRANGE = (b'{"poison":true}', b'"poison"', b"null", b"[[]]", b"-1")
"""JSON of which one is surely of another shape than a body, unless anything goes."""


class Workload:
    """Sends ``per_minute`` messages a worker and minute, unevenly, and keeps the mailbox to which replies go."""

    def __init__(self, world: World, mailbox: LinkedMailbox, simulation: Simulation) -> None:
        self._world = world
        self._mailbox = mailbox
        self._simulation = simulation
        self._replies: InMemoryMailbox[Any, Any] = InMemoryMailbox("replies", serialize=True)
        self._rng = Random(f"{world.seed} workload")  # noqa: S311 - reproducibility is the point
        self._strange = [raw for raw in STRANGE if not _fits(mailbox, raw)]

    async def send(self) -> None:
        """Send until cancelled."""
        rng = self._rng
        gap = 60.0 / (self._simulation.per_minute * self._simulation.workers)
        number, size = 0, 1
        while True:
            await trio.sleep(gap * size * (0.5 + rng.random()))
            size = rng.randint(2, BURST_SIZE) if rng.random() < BURST else 1
            for _ in range(size):
                number += 1
                poisoned = rng.random() < self._world.faults.poison
                twice = rng.random() < self._world.faults.duplicate
                keyed = rng.random() < 0.5
                await self._send_one(number, poisoned=poisoned, twice=twice, keyed=keyed)

    async def _send_one(self, number: int, *, poisoned: bool, twice: bool, keyed: bool) -> None:
        while True:
            try:
                if poisoned:
                    await self._send_poison()
                elif self._simulation.send is not None:
                    await self._simulation.send(self._mailbox, number)
                else:
                    body = self._world.probe.body(number)
                    reply_to = self._replies.address if number % REQUEST_EVERY == 0 else None
                    key = f"key {number}" if keyed else None
                    for _ in range(2 if twice else 1):
                        await self._mailbox.send(body, reply_to=reply_to, dedup_key=key)
            except (MailboxConnectionError, MailboxFullError):
                await trio.sleep(RETRY)
            else:
                return

    async def _send_poison(self) -> None:
        raw = NO_JSON if not self._strange or self._rng.random() < 0.5 else self._rng.choice(self._strange)
        await self._mailbox._send_encoded(Envelope(self._mailbox.new_id(), raw))  # noqa: SLF001 - this package's own

    async def receive_replies(self) -> None:
        """Receive replies until cancelled, as the requesters would."""
        async with self._replies as replies:
            while True:
                for message in await replies.receive(max_messages=100, wait_time_seconds=86_400):
                    self._world.ledger.reply_seen(message.headers.get("request_id"))
                    await message.acknowledge()


def _fits(mailbox: LinkedMailbox, raw: bytes) -> bool:
    try:
        mailbox.codec.decode(raw)
    except SerializationError:
        return False
    return True
