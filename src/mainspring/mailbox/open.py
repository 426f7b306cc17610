"""``open_mailbox``: from a URL to an unopened mailbox of the right backend."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, overload

from mainspring.errors import ConfigError

if TYPE_CHECKING:
    from mainspring.mailbox.mailbox import Mailbox

T = TypeVar("T")
R = TypeVar("R")
Stores = Iterable["str | Mailbox[Any, Any]"]

_BACKENDS = {
    "memory": ("mainspring.mailbox.memory.mailbox", "InMemoryMailbox", None),
    "sqlite": ("mainspring.mailbox.sqlite.mailbox", "SQLiteMailbox", None),
    "redis": ("mainspring.mailbox.redis.mailbox", "RedisMailbox", "redis"),
    "rediss": ("mainspring.mailbox.redis.mailbox", "RedisMailbox", "redis"),
    "redis+sentinel": ("mainspring.mailbox.redis.mailbox", "RedisMailbox", "redis"),
    "rediss+sentinel": ("mainspring.mailbox.redis.mailbox", "RedisMailbox", "redis"),
    "redis+cluster": ("mainspring.mailbox.redis.mailbox", "RedisMailbox", "redis"),
    "rediss+cluster": ("mainspring.mailbox.redis.mailbox", "RedisMailbox", "redis"),
    "postgresql": ("mainspring.mailbox.postgres.mailbox", "PostgresMailbox", "postgres"),
    "postgres": ("mainspring.mailbox.postgres.mailbox", "PostgresMailbox", "postgres"),
    "nats": ("mainspring.mailbox.nats.mailbox", "NatsMailbox", "nats"),
    "tls": ("mainspring.mailbox.nats.mailbox", "NatsMailbox", "nats"),
}


@overload
def open_mailbox(
    url: str, *, body: type[T], reply: type[R], reply_stores: Stores = (), **options: Any
) -> Mailbox[T, R]: ...
@overload
def open_mailbox(
    url: str, *, body: type[T], reply: Any = None, reply_stores: Stores = (), **options: Any
) -> Mailbox[T, Any]: ...
@overload
def open_mailbox(
    url: str, *, body: Any = None, reply: type[R], reply_stores: Stores = (), **options: Any
) -> Mailbox[Any, R]: ...
@overload
def open_mailbox(
    url: str, *, body: Any = None, reply: Any = None, reply_stores: Stores = (), **options: Any
) -> Mailbox[Any, Any]: ...
def open_mailbox(
    url: str, *, body: Any = None, reply: Any = None, reply_stores: Stores = (), **options: Any
) -> Mailbox[Any, Any]:
    """Return a mailbox for ``url``, unopened: enter it with ``async with``, or give it to a loop whose group opens it.

    ``memory://jobs``: a queue of this process and event loop. ``sqlite:///relative.db?name=jobs`` and
    ``sqlite:////absolute/path.db?name=jobs``: a durable queue that the processes of one machine share.
    For any number of machines, a queue on a server: ``redis://localhost:6379/0?name=jobs`` (with TLS ``rediss://``; of
    sentinels ``redis+sentinel://host,host/service/0``, of a cluster ``redis+cluster://host,host``; both with ``rediss``, too),
    ``postgresql://user@localhost:5432/database?name=jobs`` (or ``postgres://``), ``nats://localhost:4222?name=jobs`` (with TLS
    ``tls://``). They need the extras ``redis``, ``postgres`` and ``nats``. Without ``name`` the mailbox is ``default``.

    :param body: the type of the bodies; else the handler's annotation gives it, else anything that JSON can say.
    :param reply: the type of the replies.
    :param reply_stores: URLs of other stores that replies may go to (any mailbox there), as ``redis://host/0``, or mailboxes on
        them. A ``reply_to`` that is a URL must lie on one of these stores, on the mailbox's own, or on that of a mailbox that
        is open on this event loop. Only the name of the mailbox is taken from it, and the login from here.
    :param options: the backend's own options; each can also stand in the URL's query, as text: ``capacity=none``,
        ``listen=false``.
    :raises ConfigError: an unknown scheme, a missing extra, a bad or unknown option.
    """
    from mainspring.mailbox.settings import read_url

    scheme = read_url(url, _BACKENDS).scheme
    module, name, extra = _BACKENDS[scheme]
    try:
        backend = getattr(import_module(module), name)
    except ImportError as error:
        if extra is None:
            raise
        raise ConfigError(f"{scheme}:// needs an extra: pip install 'mainspring[{extra}]' ({error})") from error
    mailbox: Mailbox[Any, Any] = backend.from_url(url, body=body, reply=reply, **options)
    mailbox.reply_stores = _stores(reply_stores)
    return mailbox


def _stores(given: Any) -> tuple[Mailbox[Any, Any], ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"reply_stores must be a list of URLs or mailboxes, not {given!r}")
    return tuple(store if hasattr(store, "reply_stores") else open_mailbox(store) for store in given)
