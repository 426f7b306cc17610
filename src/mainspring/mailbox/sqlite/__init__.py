"""Mailboxes in a SQLite file that the processes of one machine share."""

from mainspring.mailbox.sqlite.mailbox import SQLiteMailbox as SQLiteMailbox
