"""Where a Redis mailbox lives, and its options. Needs no driver."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Final
from urllib.parse import quote, unquote

from mainspring.errors import ConfigError
from mainspring.mailbox.limits import SILENCE
from mainspring.mailbox.settings import Capacity, Duration, Flag, Host, OptionalText, Secret, read_url
from mainspring.mailbox.tls import TLSOptions

if TYPE_CHECKING:
    import ssl

    from mainspring.mailbox.settings import MailboxURL

SENTINEL_PORT: Final = 26379
PORT: Final = 6379
FALLBACK: Final = 5.0
"""Seconds after which a waiting process looks for itself: a call may have gone to a process that was just stopped. A message
that was sent along is that process's until its lease ends. For so long, too, what is owed waits for a call to leave with."""
RECOVERY: Final = 60.0
"""Seconds between two looks, of all processes together, for what was lost with a deleted key."""


class RedisOptions(TLSOptions):
    """The options of a :class:`RedisMailbox`."""

    kind: ClassVar[str] = "a Redis mailbox"
    schemes: ClassVar[tuple[str, ...]] = (
        "redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster",
    )  # fmt: skip

    capacity: Capacity
    fallback_interval: Duration
    recovery_interval: Duration
    allow_eviction: Flag
    username: OptionalText = None
    password: Secret = None
    sentinel_password: Secret = None


@dataclass(frozen=True)
class RedisServer:
    """A Redis server, or several that make one: how to reach it, and as whom. Mailboxes share connections if this is equal."""

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
    timeout: float = 5.0
    silence: float = SILENCE

    @property
    def address(self) -> str:
        """Its URL, without user and password."""
        scheme = "rediss" if self.tls is not None else "redis"
        if self.kind != "single":
            scheme += f"+{self.kind}"
        hosts = ",".join(f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name, port in self.hosts)
        service = f"/{quote(self.service, safe='')}" if self.service else ""
        return f"{scheme}://{hosts}{service}/{self.db}"

    @classmethod
    def of(cls, url: str, options: RedisOptions) -> RedisServer:
        """Return the server that ``url`` means, with the login and the TLS of ``options``. Raises :class:`ConfigError`."""
        place = read_url(url, options.schemes)
        scheme, _, _ = place.scheme.partition("+")
        return replace(
            cls.at(place),
            username=options.username or place.username or None,
            password=options.password or place.password or None,
            sentinel_password=options.sentinel_password,
            tls=options.tls(place, place.scheme.replace(scheme, "rediss")),
            tls_options=(scheme, options.ca_file, options.cert_file, options.key_file, options.ssl_context),
            timeout=options.timeout,
            silence=options.silence,
        )

    @classmethod
    def at(cls, url: MailboxURL) -> RedisServer:
        """Return the server that ``url`` means, without login and TLS. Raises :class:`ConfigError`."""
        _, _, kind = url.scheme.partition("+")
        hosts = url.hosts(SENTINEL_PORT if kind == "sentinel" else PORT)
        steps = [unquote(step) for step in url.path.split("/") if step]
        service = ""
        if kind == "sentinel":
            if not steps:
                raise ConfigError(f"{url.shown!r} names no service; write it as redis+sentinel://host:26379/service/0")
            service = steps.pop(0)
        if len(hosts) > 1 and not kind:
            raise ConfigError(f"{url.shown!r} names several hosts: that is redis+sentinel:// or redis+cluster://")
        return cls(hosts, kind or "single", service, _db(url.shown, steps, kind))

    def is_at(self, url: MailboxURL) -> bool:
        """True if ``url`` means this server: the same database of the same hosts."""
        other = RedisServer.at(url)
        mine = (self.kind, self.service, self.db, frozenset(self.hosts))
        return mine == (other.kind, other.service, other.db, frozenset(other.hosts))


def _db(shown: str, steps: list[str], kind: str) -> int:
    if not steps:
        return 0
    if len(steps) > 1 or not re.fullmatch(r"[0-9]{1,9}", steps[0]):
        raise ConfigError(f"{shown!r}: after the host comes the number of the database, as in redis://localhost:6379/0")
    if kind == "cluster" and int(steps[0]):
        raise ConfigError(f"{shown!r}: a cluster has the database 0 only: leave the number out")
    return int(steps[0])
