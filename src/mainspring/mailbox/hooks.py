"""What a mailbox backend writes: the hooks under the public calls, and the capabilities it declares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from mainspring.mailbox.message import Counts, Dead, Delivery, Envelope, Settlement
    from mainspring.scope import DaemonScope


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. The contract suite skips by these only, and users can ask before they rely on one."""

    durable: bool = False
    """A sent message survives the end of the process."""
    cross_process: bool = False
    """Several processes can use one mailbox at once."""
    fencing: bool = True
    """The store itself refuses a stale receipt handle."""
    front_return: bool = True
    """``release()`` puts a message before all that wait."""
    priority: bool = True
    delay: bool = True
    expiry: bool = True
    dedup: bool = True
    checkpoints: bool = True
    transactional_reply: bool = True
    """A reply to a mailbox on the same store and the acknowledgement are one step."""
    ordered: bool = False
    """Calls take effect in the order in which they were made: a claim made after a settlement sees it."""
    lease_granularity: float = 0.0
    """Seconds by which the store may round a lease."""
    async_backends: frozenset[str] = frozenset({"asyncio", "trio"})
    """The event loops that the backend's driver runs on."""


class MailboxHooks(ABC):
    """The part of a mailbox that differs from one backend to the next."""

    capabilities: ClassVar[Capabilities]
    works_unopened: ClassVar[bool] = False
    """Whether calls are taken before the mailbox is opened (after it was closed they never are)."""
    serializes: bool = True
    """Whether bodies reach the store as JSON bytes (else as the objects they are)."""

    @abstractmethod
    async def _open(self, scope: DaemonScope) -> None:
        """Connect; tasks the backend needs are started in ``scope`` and end with it."""

    @abstractmethod
    async def _close(self) -> None:
        """Flush and disconnect. Waiting receives have been told; no further hook is called until the next open."""

    @abstractmethod
    async def _put(self, envelopes: list[Envelope]) -> list[str]:
        """Store all or none, as durably as the backend does; the ids (an earlier one's where ``dedup_key`` matched)."""

    @abstractmethod
    async def _claim(self, max_messages: int, visibility_timeout: float, wait_time_seconds: float) -> list[Delivery]:
        """Claim what is available, at most ``max_messages``; wait only while there is none; ``[]`` when closed."""

    @abstractmethod
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """End the delivery in one step; :class:`ReceiptHandleExpiredError` where its lease is not held any more."""

    @abstractmethod
    async def _extend(self, delivery: Delivery, timeout: float) -> None:
        """Let the lease last ``timeout`` seconds from now, unless it already lasts longer."""

    @abstractmethod
    async def _save_checkpoint(self, delivery: Delivery, state: bytes) -> None:
        """Keep ``state`` with the message while its lease is held."""

    @abstractmethod
    async def _counts(self) -> Counts:
        """Where the messages are."""

    @abstractmethod
    async def _purge(self) -> int:
        """Drop all that is delayed, pending and in flight; how many that were. From then on they count as settled."""

    @abstractmethod
    async def _dead_letters(self, limit: int, after: str | None) -> list[tuple[Delivery, Dead, float]]:
        """The oldest dead letters (behind the one with id ``after``) and when each died (POSIX seconds)."""

    @abstractmethod
    async def _replay(self, message_ids: list[str] | None) -> int:
        """Make dead letters pending again with fresh counts, at the tail; None means all; how many that were."""

    @abstractmethod
    async def _discard_dead(self, message_ids: list[str] | None) -> int:
        """Forget dead letters for good; None means all; how many that were. From then on they count as settled."""

    def _wake_all(self) -> None:  # noqa: B027 - one whose receives never wait has nothing to do here
        """Let every waiting receive return ``[]`` at once; called as the first thing of a close."""
