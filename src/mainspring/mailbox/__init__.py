"""Mailboxes: queues of messages with leases, whatever store they lie on.

A :class:`~mainspring.mailbox.mailbox.Mailbox` has a :class:`~mainspring.mailbox.backend.Backend`. The mailbox checks
parameters, encodes and decodes bodies, keeps the life cycle, and makes requests and replies. The backend keeps the
messages. Between the two go an ``Envelope`` (a message to be stored), a ``ClaimedMessage`` (a message that was claimed) and
a settlement (``Ack``, ``Nack`` or ``Dead``): see :mod:`~mainspring.mailbox.message`.

A message is in exactly one state: delayed, pending, in flight, settled or dead. A claim makes it in flight, and gives
it a receipt handle and a lease. Only the holder of that handle may settle it, and only until the lease ends; then it
is pending again. Whatever fails, a message stays in one of these states: a cancelled claim puts back what it had
claimed, a lost connection leaves messages to the end of their leases.

Backends that batch (SQLite, Redis, PostgreSQL) stand on :mod:`~mainspring.mailbox.batched`. No backend imports
another one.
"""
