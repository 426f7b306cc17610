"""``open_mailbox``: from a URL to an unopened mailbox of the right backend; and how the constructors read such a URL."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar, overload
from urllib.parse import parse_qsl, urlsplit

from typing_extensions import ParamSpec

from mainspring.errors import ConfigError
from mainspring.redaction import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from mainspring.mailbox.mailbox import Mailbox

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
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
    """A mailbox for ``url``, unopened: enter it with ``async with``, or give it to a loop whose group opens it.

    ``memory://jobs``: a queue of this process and event loop. ``sqlite:///relative.db?name=jobs`` and
    ``sqlite:////absolute/path.db?name=jobs``: a durable queue that the processes of one machine share.
    For any number of machines, a queue on a server: ``redis://localhost:6379/0?name=jobs`` (with TLS ``rediss://``; of
    sentinels ``redis+sentinel://host,host/service/0``, of a cluster ``redis+cluster://host,host``; both with ``rediss``, too),
    ``postgresql://user@localhost:5432/database?name=jobs`` (or ``postgres://``), ``nats://localhost:4222?name=jobs`` (with TLS
    ``tls://``). They need the extras ``redis``, ``postgres`` and ``nats``. Without ``name`` the mailbox is ``default``.

    :param body: the type of the bodies; else the handler's annotation gives it, else anything that JSON can say.
    :param reply: the type of the replies.
    :param reply_stores: URLs of other stores that replies may go to (any mailbox there), as ``redis://host/0``, or mailboxes
        on them. A ``reply_to`` that is a URL must lie on one of these stores, on the mailbox's own, or on that of a mailbox
        that is open on this event loop: only the name of the mailbox is taken from it, and the login from here.
    :param options: the backend's own options; each can also stand in the URL's query.
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


def reads_query(
    read: Callable[[str, dict[str, Any]], dict[str, Any]],
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """For a constructor whose first argument is a URL: what stands in the URL's query is given as arguments.

    :param read: makes values of the strings; it is given the URL without them, and them.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        place = list(signature(init).parameters)[1]

        @wraps(init)
        def construct(*args: P.args, **given: P.kwargs) -> None:
            arguments: dict[str, Any] = dict(given)
            url = args[1] if len(args) > 1 else arguments.get(place)
            if not isinstance(url, str):  # its own affair
                return init(*args, **given)
            bare, query = divided(url)
            scheme = urlsplit(bare).scheme
            if _BACKENDS[scheme][0] != init.__module__:
                raise ConfigError(f"{shown(bare)!r}: {scheme}:// is another kind of mailbox; open_mailbox() makes it")
            stood = read(bare, _each_once(url, query))
            arguments = _each_once(url, [*stood.items(), *((key, given[key]) for key in given if key != place)])
            return init(args[0], bare, *args[2:], **arguments)  # type: ignore[arg-type]

        return construct

    return decorate


def divided(url: str) -> tuple[str, list[tuple[str, str]]]:
    """A mailbox URL without its query, and the options that stand there.

    :raises ConfigError: it is none, or of no backend that there is.
    """
    if not isinstance(url, str):
        raise ConfigError(f"{url!r} is no mailbox URL: it must be a string, as in 'sqlite:///jobs.db?name=jobs'")
    _check_login(url)
    try:
        parts = urlsplit(url)
    except ValueError:  # which may say the password
        raise ConfigError(
            f"{shown(url)!r} is no mailbox URL: the brackets of an IPv6 address belong around the host alone, and special"
            " characters elsewhere are written as %5B"
        ) from None
    if not parts.scheme:
        raise ConfigError(f"{shown(url)!r} is no mailbox URL; write it as in 'sqlite:///jobs.db?name=jobs'")
    if parts.scheme in _BACKENDS and parts.scheme not in ("memory", "sqlite") and not _AUTHORITY.match(url):
        raise ConfigError(f"{shown(url)!r}: behind the scheme come two slashes, as in {parts.scheme}://host?name=jobs")
    if parts.fragment:
        raise ConfigError(
            f"{shown(url)!r}: a # begins what no mailbox reads; write %23 where it belongs to a name or a path"
        )
    if parts.scheme not in _BACKENDS:
        known = ", ".join(f"{scheme}://" for scheme in _BACKENDS)
        raise ConfigError(
            f"{shown(url)!r}: no mailbox backend has the scheme {parts.scheme + '://'!r}; there are {known}"
        )
    try:
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        if not all(map(_OPTION.fullmatch, dict(query))):
            raise ValueError
    except ValueError:  # what is none may be the end of a password
        raise ConfigError(
            f"{shown(url)!r} is no mailbox URL: behind the ? stand options as key=value, with & between them"
        ) from None
    for key, _ in query:
        if key in _NO_OPTIONS:
            raise ConfigError(f"{shown(url)!r}: a mailbox has no option {key!r} that stands in its URL")
    return url.partition("#")[0].partition("?")[0], query


def _each_once(url: str, options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key, value in options:
        if key in merged:
            raise ConfigError(f"{shown(url)!r}: the option {key!r} is given twice; leave one out")
        merged[key] = value
    return merged


def _check_login(url: str) -> None:
    """A password's ``/``, ``?``, ``#`` or ``@`` ends what is read as the login: say so, and show nothing of what is left."""
    scheme, _, rest = url.partition("://")
    if scheme in ("memory", "sqlite"):
        return
    rest, _, fragment = rest.partition("#")
    rest, _, query = rest.partition("?")
    host, _, path = rest.partition("/")
    is_login = not all(map(_PLACE.fullmatch, host.split(","))) and "@" not in host
    if (
        host.count("@") > 1
        or "@" in path + fragment
        or ("@" in query and (is_login or "=" not in query.partition("@")[0]))
    ):
        raise ConfigError(
            f"{shown(url)!r}: a /, ?, # or @ in a user or a password must be written %2F, %3F, %23 or %40"
        )


_AUTHORITY = re.compile(r"\s*[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_OPTION = re.compile(r"[\w.-]+")
_PLACE = re.compile(r"(\[[^]]*\]|[^:@]*)(:\d*)?")
_NO_OPTIONS = ("self", "url", "server", "body", "reply", "reply_stores")
