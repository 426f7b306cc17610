"""Mailboxes on a Redis or Valkey server.

The library of Lua functions keeps every rule about messages. One call of it runs a batch of operations on one mailbox, in one
step. ``lua/store.lua`` says what a mailbox's keys hold, and what is left if a step fails halfway. Python brings operations of
concurrent callers together, and messages to receives that wait. Large bodies do not pass through the library:

``mailbox``     checks, and makes commands of a backend's calls; claims; what the timers do
``listener``    hears of new messages, and which processes wait for them
``shared_server``  what the mailboxes of a process share: the listener, and sweeps of many mailboxes by one call
``client``      a batch of commands on its way: one call at a time, reconnecting, retries, what a lost call leaves to be done
``commands``    how each command is written for the library, and how its result is read; ``records``: the commands for records
``topology``    which server has the mailbox
``connection``  the connections, which all mailboxes of a process and event loop share
``settings``    which server a URL means, and the options

A command is queued, out, or done. Cancelled while queued it has no effect. Cancelled while out it may have one. The runner of
the batcher goes on with the call. The next batch undoes a claim that comes back for a caller that is gone.

A lost connection makes all commands of the call fail, as they may have been done or not; senders decide whether to try again.
Only the undoing of claims is retried by itself, with the next call. What this mailbox claimed without getting the answer (known
by the claimant in the receipts) becomes pending again. The server may also be lost for good: each lease ends by its own time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mainspring.mailbox.redis.mailbox import RedisMailbox as RedisMailbox

__all__ = ["RedisMailbox"]


def __getattr__(name: str) -> Any:
    """Import the mailbox at first use: the other modules need no driver, and take less time."""
    if name != "RedisMailbox":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mainspring.mailbox.redis.mailbox import RedisMailbox

    return RedisMailbox
