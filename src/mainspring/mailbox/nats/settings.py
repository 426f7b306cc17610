"""Where a NATS mailbox lives, and its options. Needs no driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic_core import core_schema

from mainspring.errors import ConfigError
from mainspring.mailbox.settings import Accepts, Host, OptionalText, number, read_url, seconds
from mainspring.mailbox.tls import TLSOptions
from mainspring.validation import MAX_VISIBILITY

if TYPE_CHECKING:
    import ssl

    from mainspring.mailbox.settings import MailboxURL

PORT: Final = 4222


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("half of an even number of replicas is no majority")
    return value


class NatsOptions(TLSOptions):
    """The options of a :class:`NatsMailbox`."""

    kind: ClassVar[str] = "a NATS mailbox"
    schemes: ClassVar[tuple[str, ...]] = ("nats", "tls")
    hints: ClassVar[dict[str, str]] = {
        "capacity": "limit the storage of the account or the server instead (then a send raises MailboxFullError)"
    }

    ack_wait: Annotated[
        float,
        Accepts(number(seconds(1, MAX_VISIBILITY)), f"a number of seconds from 1 to {MAX_VISIBILITY:.0f}"),
    ]
    replicas: Annotated[
        int,
        Accepts(
            number(core_schema.no_info_after_validator_function(_odd, core_schema.int_schema(ge=1, le=5))), "1, 3 or 5"
        ),
    ]
    storage: Annotated[
        Literal["file", "memory"], Accepts(core_schema.literal_schema(["file", "memory"]), "'file' or 'memory'")
    ]
    credentials: OptionalText


@dataclass(frozen=True)
class Server:
    """A NATS server, or the servers of one cluster: how to reach it, and as whom."""

    hosts: tuple[Host, ...]
    scheme: str = "nats"
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    tls_options: tuple[object, ...] = field(default=(), repr=False)
    """What the context was made of: servers are equal if these are."""

    @classmethod
    def of(cls, url: str, options: NatsOptions) -> Server:
        """Return the server that ``url`` means. Raises :class:`ConfigError`, without the password in it."""
        place = read_url(url, options.schemes)
        if place.path not in ("", "/"):
            raise ConfigError(
                f"{place.shown!r}: a NATS mailbox has no path; its name is an option: nats://host:4222?name=jobs"
            )
        tls = options.tls(place, "tls") if options.says_tls else None  # the driver reads what the machine trusts anew
        made_of = (options.ca_file, options.cert_file, options.key_file, options.ssl_context)
        return cls(place.hosts(PORT), place.scheme, place.username, place.password, tls, made_of)

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
        """The options of the driver's ``connect``. They count for all servers of the cluster, also those it learns of later."""
        tls = {} if self.tls is None else {"tls": self.tls}
        if self.user is None:
            return tls
        if self.password is None:
            return {"token": self.user, **tls}
        return {"user": self.user, "password": self.password, **tls}

    def is_at(self, url: MailboxURL) -> bool:
        """True if ``url`` means this server: one of its hosts is the same."""
        return not set(self.hosts).isdisjoint(url.hosts(PORT))


def _host(host: Host) -> str:
    name, port = host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
