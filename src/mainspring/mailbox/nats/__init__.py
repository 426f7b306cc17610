"""Mailboxes on a NATS server with JetStream."""

from mainspring.mailbox.nats.mailbox import NatsMailbox as NatsMailbox
