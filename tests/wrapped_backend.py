"""The one place of the tests that knows how a mailbox reaches its backend: to call its operations, and to change them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.message import ACK

if TYPE_CHECKING:
    from collections.abc import Callable

M = TypeVar("M", bound=Mailbox[Any, Any])

_HOOKS = {
    "open": "_open",
    "close": "_close",
    "exists": "_exists",
    "wake_all": "_wake_all",
    "statistics": "_statistics",
    "send": "_put",
    "claim": "_claim",
    "settle": "_settle",
    "acknowledge_many": "_acknowledge_many",
    "extend": "_extend",
    "checkpoint": "_save_checkpoint",
    "counts": "_counts",
    "purge": "_purge",
    "cancel": "_cancel",
    "announce_cancelled": "_announce_cancelled",
    "dead_letters": "_dead_letters",
    "find_dead": "_find_dead",
    "replay": "_replay",
    "purge_dead": "_discard_dead",
    "sibling": "_sibling",
    "local_name": "_local_name",
    "drop": "_drop",
}


def backend_of(mailbox: Mailbox[Any, Any]) -> Any:
    """Return the operations of a mailbox's backend: they check no parameter, and encode nothing."""
    return SimpleNamespace(**{operation: getattr(mailbox, hook) for operation, hook in _HOOKS.items()})


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
    backend = wrapper(backend_of(mailbox))
    changed = {operation for operation in (*_HOOKS, "capabilities") if hasattr(type(backend), operation)}
    for operation in changed:
        setattr(mailbox, _HOOKS.get(operation, operation), getattr(backend, operation))
    if not getattr(type(backend), "works_unopened", True):
        mailbox._works_unopened = mailbox._usable = False
    if "send" in changed:
        mailbox.send = partial(Mailbox.send, mailbox)  # type: ignore[method-assign]  # one in memory has a way past it
    return mailbox
