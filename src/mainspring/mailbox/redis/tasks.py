"""The commands of a Redis mailbox for tasks: lists, changed bodies, and limits.

``lua/listing.lua`` and ``lua/limits.lua`` describe the keys that hold them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.job_commands import ChangeLimits, ListLimits, ListMessages, ReplaceBody, SetTask
from mainspring.mailbox.limiters import Blocks, LimitState, TaskLimits
from mainspring.mailbox.message import MessagePage
from mainspring.mailbox.redis.commands import (
    AGAIN,
    MICRO,
    NO_MEMORY,
    OUTCOMES,
    encoded,
    micros,
    named,
    read_unfinished,
    single,
    take_settled,
)
from mainspring.policies import Rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mainspring.mailbox.batched import Command
    from mainspring.mailbox.redis.client import FunctionCall
    from mainspring.mailbox.redis.commands import Argument, Operation

NONE: Final = "-"
"""Stands for a limit that there is not."""


# ------------------------------------------------------------------------------------------------------------ writing


def _list(_: FunctionCall, command: ListMessages) -> tuple[Argument, ...]:
    query = command.query
    since = 0 if query.since is None else max(0, micros(query.since))
    task = b"" if query.task is None else named(query.task)
    which = b"k" + named(query.key) + task if query.key is not None else b"t" + task if task else b""
    after = (query.after or "").encode("utf-8", "surrogateescape")
    return "list_messages", query.place, query.limit, since, which, after


def _change(_: FunctionCall, command: ChangeLimits) -> Iterator[Argument]:
    yield from ("change_limits", len(command.changes))
    for change in command.changes:
        yield encoded(change.task)
        yield "" if change.declared is None else _written(change.declared)
        yield "" if change.paused is None else int(change.paused)
        yield "" if change.concurrency is None else change.concurrency


def _written(limits: TaskLimits) -> str:
    """Return limits as ``lua/limits.lua`` says, from the declared concurrency on, without the changed concurrency."""
    numbers = (limits.concurrency, *_of_rate(limits.rate), limits.key_concurrency, *_of_rate(limits.key_rate))
    exact = [None if rate is None else (rate.limit, rate.per, rate.burst) for rate in (limits.rate, limits.key_rate)]
    return " ".join(
        [*(NONE if number is None else str(number) for number in numbers), limits.blocks, json.dumps(exact)]
    )


def _of_rate(rate: Rate | None) -> tuple[float | None, int | None]:
    return (None, None) if rate is None else (rate.interval * MICRO, rate.burst)


# ------------------------------------------------------------------------------------------------------------ reading


def _take_page(command: ListMessages, result: Any) -> None:
    if result == -1:
        command.result = AGAIN
        return
    rows, after = result
    messages = [read_unfinished(*row) for row in rows]
    command.result = MessagePage(messages, after.decode("utf-8", "surrogateescape") or None)


def _take_replaced(command: ReplaceBody, result: int) -> None:
    if result == len(OUTCOMES):
        command.error = MailboxConnectionError(NO_MEMORY)
    else:
        command.result = AGAIN if result == -1 else OUTCOMES[result]


def _take_task_set(command: SetTask, result: int) -> None:
    take_settled(command, result)
    command.result = result == 2


def _take_states(command: ListLimits, result: Any) -> None:
    command.result = AGAIN if result == -1 else sorted(map(_read_state, result), key=_task_of)


def _read_state(row: list[Any]) -> LimitState:
    task, held, running, waiting = row
    paused, most, instead, _, _, key_most, _, _, blocks, exact = held.decode().split(" ", 9)
    rate, key_rate = (None if each is None else Rate(*each) for each in json.loads(exact or "[null, null]"))
    limits = TaskLimits(_number(most), rate, _number(key_most), key_rate, Blocks(blocks))
    name = task.decode("utf-8", "surrogatepass")
    return LimitState(name, limits, paused == "1", _number(instead), running, waiting)


def _number(text: str) -> int | None:
    return None if text == NONE else int(text)


def _task_of(state: LimitState) -> str:
    return state.task


TASK_OPERATIONS: Final[dict[type[Command], Operation]] = {
    ReplaceBody: single(3, lambda _, c: ("replace_body", encoded(c.message_id), c.body), _take_replaced),
    ChangeLimits: single(3, _change),
    SetTask: single(2, lambda _, c: ("set_task", encoded(c.delivery.receipt_handle), encoded(c.task)), _take_task_set),
    ListMessages: single(10, _list, _take_page),
    ListLimits: single(10, lambda *_: ("limits",), _take_states),
}
