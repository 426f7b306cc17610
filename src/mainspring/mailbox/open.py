"""``open_mailbox``: from a URL to an unopened mailbox of the right backend."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, overload
from urllib.parse import parse_qsl, unquote, urlsplit

from mainspring.errors import ConfigError

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
    ``redis://localhost:6379/0?name=jobs``: a queue on a server, for any number of machines.

    :param body: the type of the bodies; else the handler's annotation gives it, else anything that JSON can say.
    :param reply: the type of the replies.
    :param options: the backend's own options; each can also stand in the URL's query.
    :raises ConfigError: an unknown scheme, a missing extra, a bad or unknown option.
    """
    if not isinstance(url, str):
        raise ConfigError(f"{url!r} is no mailbox URL: it must be a string, as in 'sqlite:///jobs.db?name=jobs'")
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise ConfigError(f"{_shown(url)!r} is no mailbox URL: {error}") from None
    if not parts.scheme:
        raise ConfigError(f"{_shown(url)!r} is no mailbox URL; write it as in 'sqlite:///jobs.db?name=jobs'")
    if parts.fragment:
        raise ConfigError(
            f"{_shown(url)!r}: a # begins what no mailbox reads; write %23 where it belongs to a name or a path"
        )
    if parts.scheme not in _BACKENDS:
        known = ", ".join(f"{scheme}://" for scheme in _BACKENDS)
        raise ConfigError(
            f"{_shown(url)!r}: no mailbox backend has the scheme {parts.scheme + '://'!r}; there are {known}"
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
            raise ConfigError(f"{_shown(url)!r}: the option {key!r} is given twice; leave one out")
        merged[key] = value
    mailbox: Mailbox[Any, Any] = backend.from_url(
        url, host=unquote(parts.netloc), path=unquote(parts.path), options=merged, body=body, reply=reply
    )
    return mailbox


def _shown(url: str) -> str:
    """``url`` as errors show it: a server's without user and password."""
    scheme, colon, rest = url.partition("://")
    if not colon or scheme in {"memory", "sqlite"}:
        return url
    return f"{scheme}://{rest.rpartition('@')[2]}"
