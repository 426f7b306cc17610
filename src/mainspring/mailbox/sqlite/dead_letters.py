"""The dead letters of a SQLite mailbox: found, put back, forgotten."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mainspring.mailbox.codec import headers_of
from mainspring.mailbox.limits import full
from mainspring.mailbox.message import Dead, Delivery
from mainspring.mailbox.sqlite import commands as do
from mainspring.mailbox.sqlite import schema as sql

if TYPE_CHECKING:
    from mainspring.mailbox.sqlite.unit_of_work import Work


def list_dead(work: Work, commands: list[do.ListDead]) -> None:
    """A page of them, oldest first."""
    for command in commands:
        values = (command.mailbox, command.mailbox, command.after, command.limit)
        command.result = [_dead_row(row) for row in work.rows(sql.DEAD_PAGE, values)]


def find(work: Work, commands: list[do.FindDead]) -> None:
    """Those of some ids."""
    for command in commands:
        values = (command.mailbox, json.dumps(command.ids))
        command.result = [_dead_row(row) for row in work.rows(sql.DEAD_BY_ID, values)]


def _dead_row(row: tuple[Any, ...]) -> tuple[Delivery, Dead, float]:
    name, body, deliveries, attempts, enqueued_at, first, reply_to, headers, checkpoint, history, *why, dead_at = row
    known = {} if headers is None else headers_of(headers) or {}
    first = first or 0.0
    delivery = Delivery(
        name, body, "", deliveries, attempts, enqueued_at, first, reply_to, known, checkpoint, None, history
    )
    return delivery, Dead(*why), dead_at


def revive(work: Work, commands: list[do.Revive]) -> None:
    """Back into the queue, with fresh counts."""
    for command in commands:
        first = work.tick
        which = (command.mailbox,) if command.ids is None else (command.mailbox, json.dumps(command.ids))
        if command.capacity is not None:
            waiting = work.waiting(command.mailbox)
            more = work.value(sql.COUNT_ALL_DEAD if command.ids is None else sql.COUNT_SOME_DEAD, which)
            if more and waiting + more > command.capacity:
                command.error = full(waiting, command.capacity, more)
                continue
        work.execute(sql.REVIVE_ALL if command.ids is None else sql.REVIVE_SOME, (first, *which))
        revived = work.changes()
        work.tick += revived
        work.execute(sql.READY_RANGE, (first + 1, work.tick))
        _drop_dead(work, command)
        tally = work.tally(command.mailbox)
        tally.dead -= revived
        tally.gain(revived)
        command.result = revived


def forget(work: Work, commands: list[do.Forget]) -> None:
    """Away for good."""
    for command in commands:
        command.result = dropped = _drop_dead(work, command)
        tally = work.tally(command.mailbox)
        tally.dead -= dropped
        tally.settled += dropped


def _drop_dead(work: Work, command: do.Revive | do.Forget) -> int:
    if command.ids is None:
        work.execute(sql.DROP_ALL_DEAD, (command.mailbox,))
    else:
        work.execute(sql.DROP_SOME_DEAD, (command.mailbox, json.dumps(command.ids)))
    return work.changes()
