"""Mailboxes on a Redis or Valkey server."""

from mainspring.mailbox.redis.mailbox import RedisMailbox as RedisMailbox
