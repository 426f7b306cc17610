"""The clients of a run, which send messages and requests; and what they must know of the group under test."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import trio

from mainspring.errors import ConfigError, MailboxConnectionError, MailboxFullError, SerializationError
from mainspring.mailbox.memory.mailbox import InMemoryMailbox
from mainspring.mailbox.message import Envelope
from mainspring.testing.simulation.faults import generator
from mainspring.worker.main_loop import MainLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.group.group import LoopGroup
    from mainspring.mailbox.codec import Codec
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.testing.simulation.run import Simulation
    from mainspring.testing.simulation.world import World


REQUEST_EVERY = 4
"""One of this many messages asks for a reply."""
BURST = 0.1
"""Probability that a send is a burst, whose messages are claimed and acknowledged together."""
BURST_SIZE = 8
"""Most messages of a burst. The pause after it keeps the average rate."""
RETRY = 2.0
"""Seconds after which a failed send is retried."""
NO_JSON = b"\xff\x00 no JSON"
STRANGE = (b'{"poison":true}', b'"poison"', b"null", b"[[]]", b"-1")
"""JSON documents, of which at least one does not fit a body type other than ``Any``."""


class Workload:
    """Sends ``per_minute`` messages per worker and minute, unevenly, and owns the mailbox for replies."""

    def __init__(self, world: World, mailbox: Mailbox[Any, Any], simulation: Simulation) -> None:
        self._world = world
        self._mailbox = mailbox
        self._simulation = simulation
        self._replies: InMemoryMailbox[Any, Any] = InMemoryMailbox("replies", serialize=True)
        self._rng = generator(world.seed, "workload")
        self._strange = [raw for raw in STRANGE if not fits(mailbox.codec, raw)]

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
                with_key = rng.random() < 0.5
                await self._send_one(number, poisoned=poisoned, twice=twice, with_key=with_key)

    async def _send_one(self, number: int, *, poisoned: bool, twice: bool, with_key: bool) -> None:
        while True:
            try:
                if poisoned:
                    await self._send_poison()
                elif self._simulation.send is not None:
                    await self._simulation.send(self._mailbox, number)
                else:
                    body = self._world.under_test.body(number)
                    reply_to = self._replies.address if number % REQUEST_EVERY == 0 else None
                    key = f"key {number}" if with_key else None
                    for _ in range(2 if twice else 1):
                        await self._mailbox.send(body, reply_to=reply_to, dedup_key=key)
            except (MailboxConnectionError, MailboxFullError):
                await trio.sleep(RETRY)
            else:
                return

    async def _send_poison(self) -> None:
        raw = NO_JSON if not self._strange or self._rng.random() < 0.5 else self._rng.choice(self._strange)
        await self._mailbox.backend.send([Envelope(self._mailbox.new_id(), raw)])

    async def receive_replies(self) -> None:
        """Receive replies until cancelled, on behalf of the requesters."""
        async with self._replies as replies:
            while True:
                for message in await replies.receive(max_messages=100, wait_time_seconds=86_400):
                    self._world.ledger.reply_seen(message.headers.get("request_id"))
                    await message.acknowledge()


def fits(codec: Codec, raw: bytes) -> bool:
    """True if a body of that codec can be read from ``raw``."""
    try:
        codec.decode(raw)
    except SerializationError:
        return False
    return True


SPARE = 600.0
"""Virtual seconds without progress, beyond what the settings of a group explain, after which it counts as stuck."""
DEPTH = 6
"""Greatest nesting depth of an example body."""


class GroupUnderTest:
    """What a run must know of the group under test: the type of its bodies, its leases, its limits.

    :raises ConfigError: ``group`` is no group, has no MainLoop on ``mailbox``, or no example of a body fits.
    """

    def __init__(
        self, group: LoopGroup, mailbox: Mailbox[Any, Any], body: Callable[[int], Any] | bytes | None, *, sends: bool
    ) -> None:
        from mainspring.group.group import LoopGroup

        if not isinstance(group, LoopGroup):
            raise ConfigError(f"simulation: the build function must return a LoopGroup, not {group!r}")
        loops = [loop for loop in group.loops if isinstance(loop, MainLoop) and loop.mailbox is mailbox]
        if not loops:
            raise ConfigError(
                "simulation: no loop of the group is on the mailbox that the build function was given; it is called as"
                " build(mailbox), and must make its MainLoop on that"
            )
        self.codec = mailbox.codec
        self.body_type = self.codec.body_type
        self.max_attempts = max(loop.dead_letter.max_attempts for loop in loops)
        self.max_crashes = max(loop.dead_letter.max_crashes for loop in loops)
        self.lease = max(loop.visibility_timeout for loop in loops)
        settings = group.settings
        slowest = max(self.lease + loop.wait_time_seconds for loop in loops)
        stall = (settings.watchdog_threshold or 0.0) + settings.watchdog_interval
        self.patience = SPARE + 3 * (slowest + stall + settings.shutdown_timeout)
        self._body = body
        if not sends:
            self._try_body()

    def body(self, number: int) -> Any:
        """Return the body of message ``number``."""
        if callable(self._body):
            return self._body(number)
        document = json.dumps(example(self._schema, number)).encode() if self._body is None else self._body
        return self.codec.decode(document)

    def _try_body(self) -> None:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticInvalidForJsonSchema

        if self._body is None:
            try:
                self._schema = TypeAdapter(self.body_type).json_schema()
            except PydanticInvalidForJsonSchema as error:
                raise self._no_example(error) from None
        try:
            self.codec.check(self.body(1))
        except SerializationError as error:
            raise self._no_example(error) from None

    def _no_example(self, error: Exception) -> ConfigError:
        reason = str(error).partition("\n")[0]
        how = "body= gave none" if self._body is not None else "none could be derived from its type"
        return ConfigError(
            f"simulation: no body for {self.codec.name} ({how}: {reason}); pass body=, a function of the message's number"
            " (on the command line --body, a JSON document)"
        )


def example(schema: dict[str, Any], number: int, root: dict[str, Any] | None = None, depth: int = 0) -> Any:
    """Return a value that a JSON schema of pydantic allows, different for each ``number`` if possible."""
    root = schema if root is None else root
    if "$ref" in schema:
        return example(root["$defs"][schema["$ref"].rpartition("/")[2]], number, root, depth)
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    if "enum" in schema:
        return schema["enum"][number % len(schema["enum"])]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            options = schema[key]
            return example(options[0 if depth < DEPTH else -1], number, root, depth + 1)
    kind = schema.get("type", "object")
    if kind == "object":
        properties = schema.get("properties", {})
        wanted = schema.get("required", ())
        made = {name: example(properties[name], number, root, depth + 1) for name in wanted}
        return made or ({"n": number} if not properties else {})
    if kind == "array":
        if "prefixItems" in schema:
            return [example(item, number, root, depth + 1) for item in schema["prefixItems"]]
        least = schema.get("minItems", 0 if depth >= DEPTH else 1)
        return [example(schema.get("items", {}), number, root, depth + 1) for _ in range(least)]
    return _plain(kind, schema, number)


def _plain(kind: str, schema: dict[str, Any], number: int) -> Any:
    if kind in ("integer", "number"):
        least = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        most = schema.get("maximum", schema.get("exclusiveMaximum", least + 1_000_001) - 1)
        return least + number % max(1, int(most - least) + 1)
    if kind == "string":
        by_format = {
            "date-time": "2000-01-01T00:00:00Z",
            "date": "2000-01-01",
            "time": "00:00:00Z",
            "uuid": f"00000000-0000-4000-8000-{number:012d}",
            "uri": f"https://example.org/{number}",
            "email": f"someone{number}@example.org",
            "duration": "PT1S",
            "path": f"/tmp/{number}",  # noqa: S108 - it is only a string
            "binary": str(number),
            "ipv4": "192.0.2.1",
        }
        text: str = by_format.get(schema.get("format", ""), f"text {number}")
        return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]
    return number % 2 == 0 if kind == "boolean" else None
