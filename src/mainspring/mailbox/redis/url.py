"""Where a Redis mailbox lives: the URL, taken apart. Needs no driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlsplit

from mainspring import redaction
from mainspring.errors import ConfigError
from mainspring.mailbox.tls import tls_context

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

SENTINEL_PORT: Final = 26379
PORT: Final = 6379
FALLBACK: Final = 5.0
"""Seconds after which a waiting process looks for itself: a call may have gone to a process that was just stopped. A message
that was sent along is that process's until its lease ends. For so long, too, what is owed waits for a call to leave with."""
RECOVERY: Final = 60.0
"""Seconds between two looks, of all processes together, for what was lost with a deleted key."""

Host = tuple[str, int]


@dataclass(frozen=True)
class Server:
    """A Redis server, or several that make one: how to reach it, and as whom."""

    hosts: tuple[Host, ...]
    kind: str = "single"
    """``"single"``, ``"sentinel"`` (the hosts are sentinels) or ``"cluster"`` (the hosts are some of its nodes)."""
    service: str = ""
    """What the sentinels call the servers they watch."""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    tls_options: tuple[object, ...] = field(default=(), repr=False)
    """What the context was made of: servers are equal if these are."""

    @property
    def address(self) -> str:
        """Its URL, without user and password."""
        scheme = "rediss" if self.tls is not None else "redis"
        if self.kind != "single":
            scheme += f"+{self.kind}"
        hosts = ",".join(f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name, port in self.hosts)
        service = f"/{quote(self.service, safe='')}" if self.service else ""
        return f"{scheme}://{hosts}{service}/{self.db}"

    def is_at(self, address: str) -> bool:
        """Whether the URL ``address`` means this server: the same database of the same hosts."""
        try:
            other = parse_server(address, {})
        except ConfigError:
            return False
        mine = (self.kind, self.service, self.db, frozenset(self.hosts))
        return mine == (other.kind, other.service, other.db, frozenset(other.hosts))


def read_options(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a URL, which is given without them, each in its type. Raises :class:`ConfigError` for what is of another."""
    values = dict(options)
    for key, (convert, kind) in _OF_TEXT.items():
        if isinstance(values.get(key), str):
            try:
                values[key] = convert(values[key])
            except (ValueError, KeyError):
                raise ConfigError(
                    f"{redaction.shown(url)!r}: the option {key} of a Redis mailbox must be {kind}, not {values[key]!r}"
                ) from None
    return values


_OF_TEXT: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "capacity": (int, "a number"),
    "timeout": (float, "a number"),
    "silence": (float, "a number"),
    "fallback_interval": (float, "a number"),
    "recovery_interval": (float, "a number"),
    "allow_eviction": ({"true": True, "1": True, "false": False, "0": False}.__getitem__, "true or false"),
}


def parse_server(url: str, options: dict[str, Any]) -> Server:
    """The server that ``url`` means; takes what belongs to the connection out of ``options``.

    Raises :class:`ConfigError`, without the password in it.
    """
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    shown = redaction.shown(url)
    login, _, places = parts.netloc.rpartition("@")
    user, _, secret = login.partition(":")
    default = SENTINEL_PORT if kind == "sentinel" else PORT
    hosts = tuple(_host(shown, place, default) for place in (places or "localhost").split(","))
    steps = [unquote(step) for step in parts.path.split("/") if step]
    service = ""
    if kind == "sentinel":
        if not steps:
            raise ConfigError(f"{shown!r} names no service; write it as redis+sentinel://host:26379/service/0")
        service = steps.pop(0)
    if len(hosts) > 1 and not kind:
        raise ConfigError(f"{shown!r} names several hosts: that is redis+sentinel:// or redis+cluster://")
    db = _db(shown, steps, kind)
    return Server(
        hosts,
        kind or "single",
        service,
        db,
        options.pop("username", None) or unquote(user) or None,
        options.pop("password", None) or unquote(secret) or None,
        options.pop("sentinel_password", None),
        *_tls(shown, scheme == "rediss", options),
    )


def _host(shown: str, place: str, default: int) -> Host:
    name, colon, port = place.rpartition(":")
    if not colon or port.endswith("]"):  # no port; an IPv6 address has its colons in brackets
        name, port = place, ""
    name = unquote(name.removeprefix("[").removesuffix("]"))
    if not name or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536)):
        raise ConfigError(f"{shown!r}: what stands there is no host and port; write it as in redis://localhost:6379/0")
    return name, int(port) if port else default


def _db(shown: str, steps: list[str], kind: str) -> int:
    if not steps:
        return 0
    if len(steps) > 1 or not (steps[0].isascii() and steps[0].isdigit()):
        raise ConfigError(f"{shown!r}: after the host comes the number of the database, as in redis://localhost:6379/0")
    if kind == "cluster" and int(steps[0]):
        raise ConfigError(f"{shown!r}: a cluster has the database 0 only")
    return int(steps[0])


def _tls(shown: str, wanted: bool, options: dict[str, Any]) -> tuple[ssl.SSLContext | None, tuple[object, ...]]:
    context: ssl.SSLContext | None = options.pop("ssl_context", None)
    ca, cert, key = (options.pop(name, None) for name in ("ca_file", "cert_file", "key_file"))
    if not wanted:
        if context or ca or cert or key:
            raise ConfigError(f"{shown!r} is not encrypted, yet has options of TLS; the scheme for TLS is rediss://")
        return None, ()
    return tls_context(shown, ca, cert, key, context), ("tls", ca, cert, key, context)
