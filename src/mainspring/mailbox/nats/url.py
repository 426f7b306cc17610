"""Where a NATS mailbox lives: the URL, taken apart. Needs no driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from mainspring import redaction
from mainspring.errors import ConfigError
from mainspring.mailbox.tls import tls_context

if TYPE_CHECKING:
    import ssl

PORT: Final = 4222
SCHEMES: Final = ("nats", "tls")
OPTIONS: Final[dict[str, Any]] = {
    "name": str,
    "ack_wait": float,
    "timeout": float,
    "silence": float,
    "replicas": int,
    "storage": str,
    "credentials": str,
    "ca_file": str,
    "cert_file": str,
    "key_file": str,
    "ssl_context": lambda value: value,
}


@dataclass(frozen=True)
class Server:
    """A NATS server, or the servers of one cluster: how to reach it, and as whom."""

    hosts: tuple[tuple[str, int], ...]
    scheme: str = "nats"
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False, compare=False)

    @property
    def address(self) -> str:
        """Its URL, without user and password."""
        return f"{self.scheme}://{','.join(map(_host, self.hosts))}"

    @property
    def urls(self) -> list[str]:
        """The URLs of its hosts, for the driver: without user and password, which it would take undecoded."""
        return [f"{self.scheme}://{_host(host)}" for host in self.hosts]

    @property
    def options(self) -> dict[str, Any]:
        """Options of the driver's ``connect``, which count for all servers of the cluster, also those it hears of later."""
        tls = {} if self.tls is None else {"tls": self.tls}
        if self.user is None:
            return tls
        if self.password is None:
            return {"token": self.user, **tls}
        return {"user": self.user, "password": self.password, **tls}

    def is_at(self, address: str) -> bool:
        """Whether the URL ``address`` means this server: one of its hosts is the same."""
        try:
            other = parse_server(address)
        except ConfigError:
            return False
        return bool(set(self.hosts) & set(other.hosts))


def _host(host: tuple[str, int]) -> str:
    name, port = host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def parse_server(
    url: str,
    *,
    ca_file: str | None = None,
    cert_file: str | None = None,
    key_file: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> Server:
    """The server that ``url`` means. Raises :class:`ConfigError`, without the password in it."""
    try:
        parts = urlsplit(url)
    except ValueError:  # which may say the password
        raise ConfigError(f"{redaction.shown(url)!r} is no URL of a NATS server, as in nats://localhost:4222") from None
    who, _, places = parts.netloc.rpartition("@")
    shown = redaction.shown(url)
    if parts.scheme not in SCHEMES:
        raise ConfigError(f"{shown!r}: the URL of a NATS server begins with nats:// or tls://")
    if parts.path not in ("", "/"):
        raise ConfigError(f"{shown!r}: a NATS mailbox has no path; its name is an option: nats://host:4222?name=jobs")
    user, colon, password = who.partition(":")
    hosts = tuple(_place(shown, place) for place in places.split(","))
    tls = None
    if ca_file or cert_file or key_file or ssl_context is not None:
        if parts.scheme != "tls":
            raise ConfigError(f"{shown!r} has options of TLS, and may not be encrypted; the scheme for TLS is tls://")
        tls = tls_context(shown, ca_file, cert_file, key_file, ssl_context)
    return Server(hosts, parts.scheme, unquote(user) if who else None, unquote(password) if colon else None, tls)


def _place(shown: str, place: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{place}")
        name, port = parts.hostname or "localhost", parts.port or PORT
    except ValueError:
        raise ConfigError(f"{shown!r}: what stands there is no host and port") from None
    return name, port


def name_in(address: str) -> str:
    """The name of the mailbox that a URL means."""
    return dict(parse_qsl(urlsplit(address).query)).get("name", "default")


def read_options(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a URL, which is given without them, each in its type. Raises :class:`ConfigError` for one that is none."""
    place = redaction.shown(url)
    values = {}
    for key, value in options.items():
        if key not in OPTIONS:
            if key == "capacity":
                raise ConfigError(
                    f"{place!r}: a NATS mailbox has no capacity; limit the storage of the account or the server instead"
                    " (then a send raises MailboxFullError)"
                )
            raise ConfigError(f"{place!r}: a NATS mailbox has no option {key!r}; it has {', '.join(OPTIONS)}")
        try:
            values[key] = OPTIONS[key](value) if isinstance(value, str) else value
        except ValueError:
            raise ConfigError(f"{place!r}: the option {key} must be a number, not {value!r}") from None
    return values
