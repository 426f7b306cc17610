"""The limits of tasks: what ``@tasks.task`` says, and the declaration of it in the store.

The store keeps the limits, and decides by them which message may be claimed (:mod:`mainspring.mailbox.limiters`). A program
declares those of its tasks once for each time that it opens their mailbox: before the first claim of a loop, or the first send
of a call with limits. Where two versions of a program run, the limits that were declared last hold.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mainspring.errors import ConfigError
from mainspring.mailbox.backend import LIMITED, SHARED
from mainspring.mailbox.limiters import ALL_TASKS, Blocks, LimitChange, TaskLimits
from mainspring.policies import Rate
from mainspring.validation import MAX_LIMIT, is_whole, shown

if TYPE_CHECKING:
    from mainspring.mailbox.mailbox import Mailbox
    from mainspring.tasks.tasks import Tasks

Ordered: TypeAlias = "bool | Literal['running', 'retry', 'dead']"
"""What holds up the later calls of a key: see :meth:`Tasks.task`."""

_ORDERED = {False: None, True: Blocks.RETRY, "running": Blocks.RUNNING, "retry": Blocks.RETRY, "dead": Blocks.DEAD}
_OF_KEYS = ("key_rate", "key_concurrency", "ordered", "weight")
UNLIMITED = TaskLimits()
"""The limits of a task of which nothing is said."""


@dataclass(frozen=True)
class LimitOptions:
    """The options of :meth:`Tasks.task` about limits and shares, not checked yet."""

    rate: Any = None
    concurrency: Any = None
    key_rate: Any = None
    key_concurrency: Any = None
    ordered: Any = False

    weight: Any = None

    @property
    def _said(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]

    @property
    def first(self) -> str | None:
        """The name of the first option that is given."""
        return next(iter(self._said), None)

    def checked(self, name: str, key: Any) -> TaskLimits:
        """Return the limits that the options mean.

        :raises ConfigError: an option is invalid or lacks its key.
        """
        for option in ("concurrency", "key_concurrency"):
            check_concurrency(f"task {name}: {option}", getattr(self, option))
        if not isinstance(self.ordered, bool | str) or self.ordered not in _ORDERED:
            raise ConfigError(
                f"task {name}: ordered must be True or False, 'running', 'retry' or 'dead', not {self.ordered!r}"
            )
        for option in self._said:
            if option in _OF_KEYS and key is None:
                raise needs_key(name, option)
        blocks = _ORDERED[self.ordered]
        if blocks is not None and self.key_concurrency not in (None, 1):
            raise ConfigError(
                f"task {name}: ordered runs one call of a key at once; leave out key_concurrency={self.key_concurrency}"
            )
        return TaskLimits(
            self.concurrency,
            _rate(f"task {name}: rate", self.rate),
            self.key_concurrency if blocks is None else 1,
            _rate(f"task {name}: key_rate", self.key_rate),
            blocks or Blocks.RUNNING,
        )


def needs_key(name: str, option: str) -> ConfigError:
    """Return the error for an option that says something about keys, of a task without one."""
    return ConfigError(f"task {name}: {option} needs key=, the name of a parameter or a function of the arguments")


def check_concurrency(what: str, concurrency: Any) -> None:
    """Raise :class:`ConfigError` unless it is None or a whole number from 1 to a billion."""
    if concurrency is not None and not (is_whole(concurrency, 1) and concurrency <= MAX_LIMIT):
        raise ConfigError(
            f"{what} must be a whole number from 1 to {MAX_LIMIT:,}, or None, not {shown(concurrency):.100}; pause what"
            " shall not run"
        )


def check_limited(what: str, mailbox: Mailbox[Any, Any]) -> None:
    """Raise :class:`ConfigError` if the mailbox keeps no limits of tasks."""
    if not mailbox.capabilities.limits:
        raise ConfigError(f"{what} needs a mailbox with Capabilities.limits, as {LIMITED} have it, not {mailbox!r}")


def check_bounded(what: str, mailbox: Mailbox[Any, Any]) -> None:
    """Raise :class:`ConfigError` if the mailbox has no concurrency across the fleet."""
    if not mailbox.capabilities.concurrency:
        raise ConfigError(f"{what} needs a mailbox with Capabilities.concurrency, as {SHARED} have it, not {mailbox!r}")


def _rate(what: str, rate: Any) -> Rate | None:
    try:
        return None if rate is None else Rate.of(rate)
    except ConfigError as error:
        one = "one rate holds for every key; " if callable(rate) and what.endswith("key_rate") else ""
        raise ConfigError(f"{what}: {one}{error}") from None


async def declare(tasks: Tasks) -> None:
    """Let the store have the limits of the tasks that are registered, unless it was told since the mailbox was opened.

    The limits of tasks that are not registered stay as they are.

    :raises MailboxClosedError: the mailbox is not open.
    :raises MailboxConnectionError: the store cannot be reached.
    """
    backend, opening = tasks.mailbox.backend, tasks.mailbox.opening
    if opening is not None and tasks.declared_in is opening:
        return
    tasks.mailbox.check_open()
    stored = {state.task: state.limits for state in await backend.limits()}
    said = {name: task.handling.limits for name, task in tasks.registered.items()}
    said[ALL_TASKS] = TaskLimits(concurrency=tasks.max_concurrency)
    changes = [LimitChange(name, limits) for name, limits in said.items() if limits != stored.get(name, UNLIMITED)]
    if changes:
        await backend.change_limits(changes)
    tasks.declared_in = opening
