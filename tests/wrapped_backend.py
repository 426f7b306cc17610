"""Faults around a backend: the operations of a real one, of which a subclass changes some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.message import ACK

if TYPE_CHECKING:
    from collections.abc import Callable

M = TypeVar("M", bound=Mailbox[Any, Any])


class WrappedBackend:
    """A backend around another, ``inner``. Its operations are those of ``inner`` where a subclass does not override them.

    A subclass that sets ``capabilities`` declares those instead; one that sets ``works_unopened`` to False has to be opened.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, operation: str) -> Any:
        return getattr(self.inner, operation)

    async def acknowledge_many(self, deliveries: list[Any]) -> dict[int, Exception]:
        """Acknowledge one after the other, so that what a subclass does in ``settle`` happens to each."""
        refused: dict[int, Exception] = {}
        for number, delivery in enumerate(deliveries):
            try:
                await self.settle(delivery, ACK)
            except Exception as error:
                refused[number] = error
        return refused


def wrap(mailbox: M, wrapper: Callable[[Any], WrappedBackend]) -> M:
    """Put ``wrapper(backend)`` in the place of the backend of an unopened mailbox; return the mailbox."""
    mailbox.backend = wrapper(mailbox.backend)  # type: ignore[assignment]
    if not mailbox.backend.works_unopened:
        mailbox._usable = False
    return mailbox
