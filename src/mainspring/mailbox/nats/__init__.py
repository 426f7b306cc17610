"""Mailboxes on a NATS server with JetStream.

A mailbox is up to seven streams, of which three have a durable consumer (``names.py``). The queue is made when the mailbox is
first opened, each of the others when a message first needs it: a server makes one after another, in some milliseconds each.
A missing stream has nothing in it. Each message has a subject of its own, and a stream keeps one message a subject. So the
server fences each step (``streams.py``): "add unless there is one", "replace if it is still number n", "remove number n". The
states of a message:

- Delayed: in the stream ``delayed``. The scheduler of an open mailbox adds it to ``queue`` when it is due, then removes it.
- Pending: in ``queue``, not out with the queue's consumer.
- In flight: in ``queue``, out with the consumer. The lease is the ack wait of the consumer, or a nak with a delay where its
  length is another one. A message that comes back is replaced by itself under a new number, at the tail. Its former holder
  knows only the old number, and can do nothing to it any more.
- Dead: in ``dead``, with the error in headers.
- Settled: in none of them. ``expiries`` has a note for each message that may expire. ``moves`` counts the additions that were
  no sends, so that the counts add up. Records lie in ``records`` (``records.py``), and are no messages.

Invariants: a message that moves is added to the new stream before it is removed from the old one, so it is never in neither. If
the removal finds that the lease was lost, the copy is removed again. Counting and moving exclude each other within one mailbox
object (``ReadWriteLock``). No lease lasts longer on the holder's clock than on the server's.

A cancelled receive withdraws its pull request and puts back what the server had sent for it. A call under way on a connection
that is lost fails at once with :class:`MailboxConnectionError`. What it asked for may have happened: a lease whose settlement
was not answered is "unsure", and the same settlement succeeds when it is made again. The connection is made anew in the
background; recovery then repairs what a killed server has forgotten (``scheduler.py``).

The mailboxes of a process and event loop share one connection (``shared_client.py``). Each has requests, pull requests and
subscriptions of its own on it. A mailbox that closes ends only these. What one asks for or may not do must not cost the others
the connection: so what may be on its way at once is bounded, and a subscription that is refused ends only what waits on it.

A message's way: ``mailbox.py`` (the backend), ``sends.py``, ``streams.py``, ``connection.py``, ``client.py`` (the driver), and
back through ``claims.py`` and ``settlements.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mainspring.mailbox.nats.mailbox import NatsMailbox as NatsMailbox

__all__ = ["NatsMailbox"]


def __getattr__(name: str) -> Any:
    """Import the mailbox at first use: the rest of the package needs no driver, and imports faster."""
    if name != "NatsMailbox":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mainspring.mailbox.nats.mailbox import NatsMailbox

    return NatsMailbox
