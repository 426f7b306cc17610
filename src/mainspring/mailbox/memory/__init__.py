"""The mailbox in memory: one process, one event loop."""

from mainspring.mailbox.memory.mailbox import InMemoryMailbox as InMemoryMailbox
