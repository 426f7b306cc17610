"""The limits of a mailbox on NATS, for the whole fleet: it can be paused, and the messages in flight at once be bounded.

Both are in a record (``records.py``). A change replaces the version that it has read, so two changes at once are both made.
Then it is published to all mailbox objects, and the queue's consumer is set to it: the description of the consumer is the
version. A publication can be lost. So a mailbox object reads the record when it opens, after a reconnection before it claims,
and when a check of the recovery finds another version with the consumer.

- A pause is kept by each mailbox object: it makes no pull. Pulls under way end, and what they bring goes to the tail uncharged.
- The concurrency is kept by the server, as the ``max_ack_pending`` of the queue's consumer. All that is out with the consumer
  counts, also leases that a nak with a delay has set, and leases that have ended and were not found yet. The message of such a
  lease is delivered again in spite of the limit.

If the process that changes the record dies before it sets the consumer, or two processes set it in the wrong order, the check
of a mailbox object that knows the record repairs it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.limiters import ALL_TASKS, LimitState, TaskLimits
from mainspring.mailbox.nats.names import UNBOUNDED
from mainspring.mailbox.records import RecordWrite

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.mailbox.limiters import LimitChange
    from mainspring.mailbox.nats.client import RawMessage
    from mainspring.mailbox.nats.records import Records
    from mainspring.mailbox.nats.streams import Store

KIND: Final = "limits"
KEY: Final = "mailbox"
"""The kind and the key of the record."""
UNLIMITED: Final = LimitState(ALL_TASKS, TaskLimits())
_TRIES: Final = 20


class MailboxLimits:
    """The limits of one mailbox, as one mailbox object knows them."""

    def __init__(self, store: Store, records: Records) -> None:
        self._store = store
        self._records = records
        self._version = 0
        self._was_read = False
        self._state = UNLIMITED
        self._known_in = store.connection.epoch
        self.changed: Callable[[LimitState], object] = lambda before: None
        """Called when the limits have changed, with the earlier ones."""

    @property
    def paused(self) -> bool:
        """True if no message may be claimed."""
        return self._state.paused

    @property
    def is_bounded(self) -> bool:
        """True if the messages in flight at once are bounded."""
        return self._state.most is not None

    async def change(self, changes: list[LimitChange]) -> None:
        """Change the limits, and tell all mailbox objects. See :meth:`Backend.change_limits`."""
        names = self._store.names
        for _ in range(_TRIES):
            before = after = await self.read()
            for change in changes:
                after = _changed(after, change)
            if after == before:
                return
            value = _encoded(after)
            version = await self._records.write(RecordWrite(KIND, KEY, value, if_version=self._version))
            if version is not None:
                self._note(version, after)
                await self._store.connection.publish(names.to_limits, b"%d %s" % (version, value))
                await self._enforce(await self._store.consumer())
                return
        raise MailboxConnectionError(f"the limits of the mailbox were changed by others {_TRIES} times during one call")

    async def read(self) -> LimitState:
        """Return the limits as the store has them, and take note of them."""
        before, self._was_read = self._version, True
        found = await self._records.find(KIND, [KEY])
        version = found[0].version if found else 0
        if version >= self._version or self._version == before:  # else newer ones were heard during the call
            self._note(version, _decoded(found[0].value) if found else UNLIMITED)
        return self._state

    async def read_again(self) -> None:
        """Read the limits if the connection was lost since the last time: a change may not have been heard."""
        epoch = self._store.connection.epoch
        if epoch != self._known_in:
            await self.read()
            self._known_in = epoch

    def hear(self, message: RawMessage) -> None:
        """Take note of limits that a process has published."""
        version, _, value = message.data.partition(b" ")
        if int(version) > self._version:
            self._note(int(version), _decoded(value))

    def _note(self, version: int, state: LimitState) -> None:
        before, self._version, self._state = self._state, version, state
        self._store.most_in_flight = UNBOUNDED if state.most is None else state.most
        if before != state:
            self.changed(before)

    async def check(self, consumer: dict[str, Any]) -> None:
        """Read the limits if the queue's consumer, of which this is the state, was set to other ones than are known here.

        Also read them if the stream of records was found since the mailbox was opened.
        """
        if not self._was_read and self._store.names.records in self._store.made:
            await self.read()
        described = consumer["config"].get("description", "")
        if described != _described(self._version):
            await self.read()
        if described or self._version:  # else an operator's own setting stays
            await self._enforce(consumer)

    async def _enforce(self, consumer: dict[str, Any]) -> None:
        """Set the consumer to the limits. If another process changes them meanwhile, the latest ones hold."""
        for _ in range(_TRIES):
            wanted = {"max_ack_pending": self._store.most_in_flight, "description": _described(self._version)}
            config = consumer["config"]
            if {name: config.get(name, "") for name in wanted} == wanted:
                return
            consumer = await self._store.change_consumer({**config, **wanted})
            await self.read()


def _described(version: int) -> str:
    """Return the description of a consumer that was set to these limits."""
    return f"limits {version}" if version else ""


def _changed(state: LimitState, change: LimitChange) -> LimitState:
    """Return the limits after a change of them."""
    return replace(
        state,
        limits=state.limits if change.declared is None else TaskLimits(change.declared.concurrency),
        paused=state.paused if change.paused is None else change.paused,
        concurrency=state.concurrency if change.concurrency is None else change.concurrency or None,
    )


def _encoded(state: LimitState) -> bytes:
    said = {"paused": state.paused, "declared": state.limits.concurrency, "concurrency": state.concurrency}
    return json.dumps(said).encode()


def _decoded(value: bytes) -> LimitState:
    said = json.loads(value)
    return LimitState(ALL_TASKS, TaskLimits(said["declared"]), said["paused"], said["concurrency"])
