"""The mailbox that a verb works on, named by its URL, by ``MODULE:ATTR`` or by the environment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.cli.user_errors import FAILED, UserError
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.open import open_mailbox

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.tasks.tasks import Tasks

ENVIRONMENT = "MAINSPRING_URL"
"""The environment variable that names the mailbox where a command does not."""


def open_shared(url: str) -> Mailbox[Any, Any]:
    """Return the unopened mailbox of a URL. Raise :class:`UserError` for a URL whose mailbox only this process would see."""
    if url.startswith("memory:"):
        raise UserError(
            "a memory:// mailbox lives and ends with one process: name a mailbox that processes share, as"
            " sqlite:///jobs.db?name=jobs"
        )
    return open_mailbox(url)


def mailbox_and_ids(words: Sequence[str]) -> tuple[Mailbox[Any, Any], list[str]]:
    """Return the unopened mailbox that a command's words name, and the ids behind it.

    The first word is the mailbox if it has a colon, as URLs and ``MODULE:ATTR`` have, and ids have not.

    :raises UserError: none is named, or it is none that processes share.
    """
    target, given = target_and_words(words)
    return _mailbox_of(target), given


def target_and_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return what names the mailbox in a command's words, or in the environment, and the words behind it."""
    given = list(words)
    target = given.pop(0) if given and ":" in given[0] else os.environ.get(ENVIRONMENT, "")
    if not target:
        raise UserError(
            "name a mailbox: its URL, as sqlite:///jobs.db?name=jobs, or MODULE:ATTR of a Tasks, as app:tasks; or set"
            f" {ENVIRONMENT}"
        )
    return target, given


def mailbox_alone(words: Sequence[str], verb: str) -> Mailbox[Any, Any]:
    """Return the mailbox that the words of a verb name, and refuse more words."""
    mailbox, rest = mailbox_and_ids(words)
    if rest:
        raise UserError(f"{verb}: takes a mailbox alone, not {' '.join(rest)!r:.100}")
    return mailbox


def tasks_and_ids(words: Sequence[str]) -> tuple[Tasks, list[str]]:
    """Return the mailbox that a command's words name as tasks, none of which is registered, and the ids behind it."""
    from mainspring.tasks.tasks import Tasks

    mailbox, given = mailbox_and_ids(words)
    return Tasks(
        Mailbox(mailbox.backend)
    ), given  # a face of its own: that of a program is bound to the program's tasks


def is_url(target: str) -> bool:
    """True if ``target`` is the URL of a mailbox, and not ``MODULE:ATTR``."""
    return "://" in target or target.startswith("memory:")


def _mailbox_of(target: str) -> Mailbox[Any, Any]:
    if is_url(target):
        return open_shared(target)
    from mainspring.cli.target import load_attribute
    from mainspring.tasks.tasks import Tasks

    found = load_attribute(target, Tasks, Mailbox)
    mailbox = found.mailbox if isinstance(found, Tasks) else found
    if not isinstance(mailbox, Mailbox):
        raise UserError(
            f"{target} is an object of type {type(found).__name__}; name a Tasks, a Mailbox, or a mailbox URL"
        )
    return open_shared(mailbox.address) if mailbox.address.startswith("memory:") else mailbox


def tasks_named(words: Sequence[str]) -> list[str]:
    """Return the names of the tasks of a command's target, or none if that is a URL or a mailbox."""
    target, _ = target_and_words(words)
    if is_url(target):
        return []
    from mainspring.cli.target import load_attribute
    from mainspring.tasks.tasks import Tasks

    found = load_attribute(target, Tasks, Mailbox)
    if not isinstance(found, Tasks):
        return []
    found.import_modules()
    return sorted(found.registered)


def no_such_task(verb: str, task: str, names: Sequence[str]) -> UserError:
    """Return the error for a task that is not among those of these names."""
    from difflib import get_close_matches

    from mainspring.tasks.registry import NO_TASKS

    close = get_close_matches(task[:200], names, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    there = f"there are: {', '.join(names)}" if names else f"there are none: {NO_TASKS}"
    return UserError(f"{verb}: there is no task {task!r:.100}; {hint}{there}")


def know_tasks(mailbox: Mailbox[Any, Any]) -> None:
    """Let the names of tasks be read from bodies, where the mailbox is bound to nothing else."""
    if not mailbox.is_bound:
        from mainspring.tasks.calls import CallCodec

        mailbox.bind(body=CallCodec({}))


def with_mailbox(mailbox: Mailbox[Any, Any], act: Callable[[Mailbox[Any, Any]], Awaitable[Any]]) -> Any:
    """Return what ``act`` makes of the open mailbox. A mistyped name is refused, since opening its mailbox would make it."""

    async def run() -> Any:
        if not await mailbox.exists():
            check = "a URL without ?name= means this one" if mailbox.name == "default" else "check it"
            raise UserError(
                f"there is no mailbox {mailbox.address}; none of this name was ever opened: {check}", FAILED
            )
        async with mailbox:
            return await act(mailbox)

    return anyio.run(run)
