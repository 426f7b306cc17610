"""What time brings: leases that end, delays that are over, messages that expire. Done at the start of a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mainspring.mailbox.message import EXPIRED
from mainspring.mailbox.sqlite import schema as sql

if TYPE_CHECKING:
    from mainspring.mailbox.sqlite.unit_of_work import Work

AT_ONCE = 1_000
"""How many of each kind one transaction does, unless somebody counts: the callers in it should not wait for thousands."""


def do_what_is_due(work: Work, exact: bool) -> None:
    """Do what is due by now: all of it where ``exact``, else at most :data:`AT_ONCE` of each kind."""
    limit = -1 if exact else AT_ONCE
    wall = work.wall
    if work.ends is not None and work.ends <= work.boot:
        _end_leases(work, limit)
    if work.due is not None and work.due <= wall:
        _end_delays(work, limit)
    if work.expires is not None and work.expires <= wall:
        expire(work, limit)


def enqueue(work: Work, mailbox: int, seq: int, rank: int, pos: int, delay: float, expires_at: float | None) -> None:
    """Let a message that is nobody's wait: at ``pos`` of the queue, or ``delay`` seconds first."""
    tally = work.tally(mailbox)
    if expires_at is not None and expires_at <= work.wall:
        work.bury(mailbox, seq, EXPIRED, 0, None)
        return
    due = work.wall + delay if delay else None
    if due is None:
        work.execute(sql.ADD_READY, (mailbox, rank, pos, seq))
        tally.gain(1)
    else:
        work.execute(sql.ADD_DELAYED, (due, seq, mailbox))
        tally.delayed += 1
        work.due_at(due)
    if expires_at is not None:
        work.execute(sql.ADD_EXPIRING, (expires_at, seq, pos if due is None else None, due))
        work.due_at(expires_at)


def _end_leases(work: Work, limit: int) -> None:
    """Whoever held it may have died of it: the attempt is charged, and the message goes to the tail."""
    ended = work.rows(sql.ENDED_LEASES, (work.boot, limit))
    if not ended:  # what is due is of no message: left there, it would be due for ever
        work.execute(sql.LEASES_OF_NONE, (work.boot,))
    for lease, mailbox, seq, claimed_at, rank, expires_at in ended:
        work.execute(sql.DROP_LEASE, (lease,))
        work.execute(sql.CAME_BACK, (1, claimed_at, seq))
        work.tally(mailbox).in_flight -= 1
        work.tick += 1
        enqueue(work, mailbox, seq, rank, work.tick, 0.0, expires_at)


def _end_delays(work: Work, limit: int) -> None:
    over = work.rows(sql.DUE, (work.wall, limit))
    if not over:
        work.execute(sql.DELAYS_OF_NONE, (work.wall,))
    for due, seq, mailbox, rank, expires_at in over:
        work.execute(sql.FORGET_DELAYED, (due, seq))
        work.tally(mailbox).delayed -= 1
        if expires_at is not None:
            work.execute(sql.NOT_EXPIRING, (expires_at, seq))
        work.tick += 1
        enqueue(work, mailbox, seq, rank, work.tick, 0.0, expires_at)


def expire(work: Work, limit: int) -> None:
    """Move to the dead letters what waited too long, the earliest first."""
    expired = work.rows(sql.EXPIRED, (work.wall, limit))
    if not expired:
        work.execute(sql.EXPIRIES_OF_NONE, (work.wall,))
    for expires_at, seq, pos, due, mailbox, rank in expired:
        if due is None:
            expire_ready(work, mailbox, rank, pos, seq, expires_at)
        else:
            work.execute(sql.NOT_EXPIRING, (expires_at, seq))
            work.execute(sql.FORGET_DELAYED, (due, seq))
            work.tally(mailbox).delayed -= 1
            work.bury(mailbox, seq, EXPIRED, 0, None, expires_at)


def expire_ready(work: Work, mailbox: int, rank: int, pos: int, seq: int, expires_at: float) -> None:
    """Move a message that has expired at its place in the queue to the dead letters."""
    work.execute(sql.NOT_EXPIRING, (expires_at, seq))
    work.execute(sql.FORGET_READY, (mailbox, rank, pos))
    work.tally(mailbox).pending -= 1
    work.bury(mailbox, seq, EXPIRED, 0, None, expires_at)
