"""``open_mailbox``: from a URL to an unopened mailbox of the right backend."""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, overload
from urllib.parse import parse_qsl, unquote, urlsplit

from mainspring.errors import ConfigError
from mainspring.urls import shown

if TYPE_CHECKING:
    from mainspring.mailbox.base import Mailbox

T = TypeVar("T")

_BACKENDS = {
    "memory": ("mainspring.mailbox.memory", "InMemoryMailbox", None),
    "sqlite": ("mainspring.mailbox.sqlite", "SQLiteMailbox", None),
    "redis": ("mainspring.mailbox.redis", "RedisMailbox", "redis"),
    "rediss": ("mainspring.mailbox.redis", "RedisMailbox", "redis"),
    "redis+sentinel": ("mainspring.mailbox.redis", "RedisMailbox", "redis"),
    "rediss+sentinel": ("mainspring.mailbox.redis", "RedisMailbox", "redis"),
    "redis+cluster": ("mainspring.mailbox.redis", "RedisMailbox", "redis"),
    "rediss+cluster": ("mainspring.mailbox.redis", "RedisMailbox", "redis"),
    "postgresql": ("mainspring.mailbox.postgres", "PostgresMailbox", "postgres"),
    "postgres": ("mainspring.mailbox.postgres", "PostgresMailbox", "postgres"),
    "nats": ("mainspring.mailbox.nats", "NatsMailbox", "nats"),
    "tls": ("mainspring.mailbox.nats", "NatsMailbox", "nats"),
}


@overload
def open_mailbox(url: str, *, body: type[T], reply: Any = None, **options: Any) -> Mailbox[T, Any]: ...
@overload
def open_mailbox(url: str, *, body: Any = None, reply: Any = None, **options: Any) -> Mailbox[Any, Any]: ...
def open_mailbox(url: str, *, body: Any = None, reply: Any = None, **options: Any) -> Mailbox[Any, Any]:
    """A mailbox for ``url``, unopened: enter it with ``async with``, or give it to a loop whose group opens it.

    ``memory://jobs``: a queue of this process and event loop. ``sqlite:///relative.db?name=jobs`` and
    ``sqlite:////absolute/path.db?name=jobs``: a durable queue that the processes of one machine share.
    For any number of machines, a queue on a server: ``redis://localhost:6379/0?name=jobs`` (with TLS ``rediss://``; of
    sentinels ``redis+sentinel://host,host/service/0``, of a cluster ``redis+cluster://host,host``; both with ``rediss``, too),
    ``postgresql://user@localhost:5432/database?name=jobs`` (or ``postgres://``), ``nats://localhost:4222?name=jobs`` (with TLS
    ``tls://``). They need the extras ``redis``, ``postgres`` and ``nats``. Without ``name`` the mailbox is ``default``.

    :param body: the type of the bodies; else the handler's annotation gives it, else anything that JSON can say.
    :param reply: the type of the replies.
    :param options: the backend's own options; each can also stand in the URL's query.
    :raises ConfigError: an unknown scheme, a missing extra, a bad or unknown option.
    """
    if not isinstance(url, str):
        raise ConfigError(f"{url!r} is no mailbox URL: it must be a string, as in 'sqlite:///jobs.db?name=jobs'")
    _check_login(url)
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise ConfigError(f"{shown(url)!r} is no mailbox URL: {error}") from None
    if not parts.scheme:
        raise ConfigError(f"{shown(url)!r} is no mailbox URL; write it as in 'sqlite:///jobs.db?name=jobs'")
    if parts.fragment:
        raise ConfigError(
            f"{shown(url)!r}: a # begins what no mailbox reads; write %23 where it belongs to a name or a path"
        )
    if parts.scheme not in _BACKENDS:
        known = ", ".join(f"{scheme}://" for scheme in _BACKENDS)
        raise ConfigError(
            f"{shown(url)!r}: no mailbox backend has the scheme {parts.scheme + '://'!r}; there are {known}"
        )
    module, name, extra = _BACKENDS[parts.scheme]
    try:
        backend = getattr(import_module(module), name)
    except ImportError as error:
        if extra is None:
            raise
        raise ConfigError(f"{parts.scheme}:// needs an extra: pip install 'mainspring[{extra}]' ({error})") from error
    merged: dict[str, Any] = {}
    for key, value in [*query, *options.items()]:
        if key in merged:
            raise ConfigError(f"{shown(url)!r}: the option {key!r} is given twice; leave one out")
        merged[key] = value
    mailbox: Mailbox[Any, Any] = backend.from_url(
        url, host=unquote(parts.netloc), path=unquote(parts.path), options=merged, body=body, reply=reply
    )
    return mailbox


def _check_login(url: str) -> None:
    """A password's ``/``, ``?`` or ``#`` ends what is read as the host: say so, rather than show what is left of it."""
    scheme, _, rest = url.partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    port = host.rpartition(":")[2]
    if scheme not in {"memory", "sqlite"} and "@" in rest and "@" not in host and ":" in host and not port.isdigit():
        raise ConfigError(
            f"{shown(url)!r}: a /, ? or # in a user or a password must be written %2F, %3F or %23, and an @ %40"
        )
