"""Mailboxes in a PostgreSQL database."""

from mainspring.mailbox.postgres.mailbox import PostgresMailbox as PostgresMailbox
