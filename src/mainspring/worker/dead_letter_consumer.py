"""``DLQConsumer``: a loop that works on the dead letters of a mailbox, on the engine that all loops share."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

from mainspring.errors import ConfigError, ReplyError
from mainspring.mailbox.dead_letters import DeadLetterView, Replay
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.message import DeadLetter, Keep
from mainspring.validation import is_number
from mainspring.worker.main_loop import MainLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.message import Message
    from mainspring.offload.pool import OffloadPool
    from mainspring.policies import DeadLetterPolicy, LeasePolicy, RetryPolicy
    from mainspring.worker.handler import HandlerOf


T = TypeVar("T")


class Verdict(StrEnum):
    """What a handler of dead letters may return."""

    PURGE = "purge"
    """It is dealt with: forget it. So does returning None."""
    REPLAY = "replay"
    """Send it to its mailbox again, with fresh counts."""
    KEEP = "keep"
    """Leave it among the dead letters and do not bring it again."""


class LoopOptions(TypedDict, total=False):
    """What a loop of any kind can be told; :class:`MainLoop` says what it means, and what it is by default."""

    name: str | None
    concurrency: int
    visibility_timeout: float
    wait_time_seconds: float
    retry: RetryPolicy | None
    dead_letter: DeadLetterPolicy | None
    lease: LeasePolicy | None
    handler_timeout: float | None
    shutdown_timeout: float | None
    shutdown_priority: int
    offload: Literal["thread", "process"] | OffloadPool | None


class DLQConsumer(MainLoop):
    """Takes the dead letters of a mailbox, hands each to a handler as a :class:`DeadLetter`, and does what it says.

    The handler is ``(letter)`` or ``(letter, ctx)``, async or plain. It returns None or ``Verdict.PURGE`` to have the dead
    letter purged, ``Verdict.REPLAY`` to have it replayed, or ``Verdict.KEEP`` to leave it where it is. ``Retry``, and any other
    error, brings it again later by ``retry``; ``Reject``, or errors until ``dead_letter`` says enough, keep it: whatever a
    handler does but return, a dead letter is not lost. While it is handled it stays among the dead letters of the mailbox and
    is leased: of several consumers, in whatever processes, one has it. After a crash another takes over.

    :param mailbox: whose dead letters; it is opened if it is not open, and a MainLoop may work on it beside this.
    :param look_every: seconds between looks for dead letters that died in other processes, or of their age; those of the
        same mailbox object are heard of at once.
    :param options: those of :class:`MainLoop`, but ``body``.

    :raises ConfigError: as MainLoop, and where the mailbox's store cannot lease dead letters (``Capabilities.siblings`` and
        ``dedup``).
    """

    def __init__(
        self,
        mailbox: Mailbox[T, Any],
        handler: HandlerOf[DeadLetter[T], Verdict],
        *,
        look_every: float = 5.0,
        **options: Unpack[LoopOptions],
    ) -> None:
        if not isinstance(mailbox, Mailbox):
            raise ConfigError(f"DLQConsumer: mailbox must be a Mailbox (see open_mailbox), not {mailbox!r}")
        if not (is_number(look_every, 0) and look_every):
            raise ConfigError(f"DLQConsumer: look_every must be above 0 seconds, not {look_every!r}")
        view = DeadLetterView(mailbox, look_every=float(look_every))
        checked: Any = handler  # against the mailbox, above: the view is of all dead letters
        super().__init__(view, checked, body=DeadLetter, **options)
        self.wrap(self._as_it_says)

    async def _as_it_says(self, message: Message[DeadLetter, None], call: Callable[[], Awaitable[Any]]) -> None:
        """Do what the handler returned. None and PURGE need nothing: the engine acknowledges, which purges."""
        try:
            verdict = await call()
        except ReplyError as error:
            raise ConfigError(
                f"{self.name}: a dead letter has no requester to answer; raise Reject to keep it"
            ) from error
        if verdict is None or verdict == Verdict.PURGE:
            return
        if verdict == Verdict.REPLAY:
            await message.settle(Replay())
        elif verdict == Verdict.KEEP:
            await message.settle(Keep("its handler chose to keep it", "Verdict.KEEP"))
        else:
            raise ConfigError(f"{self.name}: a handler of dead letters returns None or a Verdict, not {verdict!r}")


DeadLetterConsumer = DLQConsumer
