"""The port's calls on dead letters: list, show, replay, purge; and the notes that a death leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic

from typing_extensions import TypeVar

from mainspring.core import clock
from mainspring.errors import InvalidParameterError, SerializationError
from mainspring.mailbox.bodies import Bodies
from mainspring.mailbox.history import remember
from mainspring.mailbox.limits import check_id
from mainspring.mailbox.message import Dead, DeadLetter, Envelope
from mainspring.validation import is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mainspring.mailbox.message import Delivery

T = TypeVar("T", default=Any)

REPLY_ERRORS = "reply_errors"
"""The header by which a sender says that where there will be no result, ``reply_to`` gets an error reply; any value does.

An error reply has no body (JSON null) and, beside ``request_id``, the headers ``error`` and ``error_type``.
"""


class Keep(Dead):
    """The settlement that leaves a dead letter where it is, for somebody to look at: it is no failure."""

    __slots__ = ()


class DeadLetterCalls(Bodies, Generic[T]):
    """The part of a mailbox that looks after its dead letters."""

    def __init__(self, name: str, body: Any, reply: Any) -> None:
        super().__init__(name, body, reply)
        self._mourners: list[Callable[[str], object]] = []

    if TYPE_CHECKING:

        def _check_open(self) -> None: ...

    async def dead_letters(self, *, limit: int = 1_000, after: str | None = None) -> list[DeadLetter[T]]:
        """The dead letters, oldest first: at most ``limit``, behind the one whose id is ``after``."""
        self._check_open()
        if not is_whole(limit, 1):
            raise InvalidParameterError(f"dead_letters: limit must be at least 1, not {limit!r}")
        if after is not None:
            check_id("dead_letters: after", after)
        return [self._dead_letter(*found) for found in await self._dead_letters(limit, after)]

    async def dead_letter(self, message_id: str) -> DeadLetter[T] | None:
        """The dead letter of that id, or None where there is none (any more)."""
        self._check_open()
        check_id("dead_letter: message_id", message_id)
        for found in await self._find_dead([message_id]):
            return self._dead_letter(*found)
        return None

    async def replay_dead_letters(self, message_ids: Iterable[str] | None = None) -> int:
        """Send dead letters (None: all) to the tail of the queue again, with fresh counts; how many that were.

        Raises :class:`MailboxFullError`, and sends none, where there is no room for all of them. A dead letter has its
        ``dedup_key`` again, unless another unfinished message has it by now; its history begins anew. Of all, a store on a
        server sends some at a time: where it raises then, some may have been sent, and another call sends the rest.
        """
        self._check_open()
        return await self._replay(_ids(message_ids))

    async def purge_dead_letters(self, message_ids: Iterable[str] | None = None) -> int:
        """Forget dead letters (None: all) for good; how many that were."""
        self._check_open()
        return await self._discard_dead(_ids(message_ids))

    def _listen_for_deaths(self, listener: Callable[[str], object]) -> Callable[[], None]:
        """Call ``listener`` with the id of a message dead-lettered through this object, until the result is called."""
        self._mourners.append(listener)
        return lambda: self._mourners.remove(listener)

    def _tell_of_death(self, message_id: str) -> None:
        for listener in tuple(self._mourners):
            listener(message_id)

    def _dead_letter(self, delivery: Delivery, dead: Dead, at: float) -> DeadLetter[T]:
        try:
            body = self._body_of(delivery)
        except SerializationError:
            body = None
        return DeadLetter.of(self.name, delivery, body, dead, at)

    def _obituary(self, delivery: Delivery, dead: Dead) -> Dead:
        """``dead`` with the message's history and, where its sender wants to hear of it, an error reply."""
        history, reply = dead.history, dead.reply
        if history is None and self.capabilities.history:
            now = clock.utc_now().timestamp()
            history = remember(delivery.history, delivery.attempt, dead.error, dead.error_type, now)
        if reply is None and delivery.reply_to is not None and REPLY_ERRORS in delivery.headers:
            reply = self._error_reply(delivery.message_id, delivery.reply_to, dead.error, dead.error_type)
        return replace(dead, history=history, reply=reply)

    def _error_reply(self, message_id: str, reply_to: str, error: str, error_type: str) -> Envelope:
        headers = {"request_id": message_id, "error": error, "error_type": error_type}
        return Envelope(self.new_id(), b"null" if self.serializes else None, reply_to=reply_to, headers=headers)


def _ids(message_ids: Iterable[str] | None) -> list[str] | None:
    if message_ids is None:
        return None
    ids = [message_ids] if isinstance(message_ids, str) else list(message_ids)
    for message_id in ids:
        check_id("dead letters: a message id", message_id)
    return ids
