"""The options of a PostgreSQL mailbox; from its URL to what libpq is told, and back to an address for replies."""

from __future__ import annotations

import math
import os
import re
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from urllib.parse import quote, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic_core import core_schema

from mainspring.errors import ConfigError
from mainspring.mailbox.limits import SILENCE
from mainspring.mailbox.settings import Accepts, Capacity, Flag, ServerOptions, name_at, number, seconds
from mainspring.redaction import one_line, shown

if TYPE_CHECKING:
    from mainspring.mailbox.settings import MailboxURL

SCHEMA = "mainspring"
LONGEST_NAME = 1_000
"""Bytes of a mailbox's name, which an index must hold."""
MAX_POLL_INTERVAL = 30.0
"""Seconds: each time that a waiting receive asks, it has senders notify for a minute."""
_DEFAULTS = {
    "application_name": "mainspring",
    "keepalives_count": "2",
}

_ALWAYS = {"client_encoding": "UTF8"}
"""Whatever the database, the URL or the environment says: text leaves as UTF-8, and comes back as what it was."""

PORT = "5432"
SHORTEST_TRY = 2.0
LONGEST_TRY = 10.0
"""Seconds that one host has to let us connect, where nothing sets ``connect_timeout``; fewer than 2 count as 2."""
_ENVIRONMENT = {"application_name": "PGAPPNAME", "connect_timeout": "PGCONNECT_TIMEOUT"}
_WAY = (
    "service", "channel_binding", "gssencmode", "krbsrvname", "require_auth", "requirepeer", "sslmode", "sslnegotiation",
    "sslrootcert", "sslcrl", "sslcrldir", "sslsni", "ssl_min_protocol_version", "ssl_max_protocol_version",
    "target_session_attrs",
)  # fmt: skip
"""The parameters of an address that say how to reach the server. The login is not among them."""


def _short(name: str) -> str:
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError("an index cannot hold it")
    return name


class PostgresOptions(ServerOptions):
    """The options of a :class:`PostgresMailbox`, but for libpq's parameters."""

    kind: ClassVar[str] = "a PostgreSQL mailbox"
    schemes: ClassVar[tuple[str, ...]] = ("postgresql", "postgres")
    besides: ClassVar[str] = ", and libpq's"

    name: Annotated[
        str,
        Accepts(
            core_schema.no_info_after_validator_function(_short, core_schema.str_schema()),
            f"text of up to {LONGEST_NAME} bytes",
        ),
    ]
    capacity: Capacity
    schema: Annotated[
        str,
        Accepts(
            core_schema.str_schema(pattern=r"^[a-z_][a-z0-9_]{0,39}$"),
            f"a name of up to 40 lower-case letters, digits and _, as in {SCHEMA!r}",
        ),
    ]
    """Plain, so that it needs no quotes in SQL."""
    migrate: Flag
    listen: Flag
    poll_interval: Annotated[
        float | None,
        Accepts(
            number(core_schema.nullable_schema(seconds(0.001, MAX_POLL_INTERVAL))),
            f"a number of seconds from 0.001 to {MAX_POLL_INTERVAL:g}, or None",
        ),
    ]


def address_of(conninfo: str, schema: str, name: str) -> str:
    """Return a mailbox as a URL, without a password, but with what says how the server is to be reached and trusted."""
    known = _known(conninfo)
    hosts, database, _ = where_of(conninfo)
    who = f"{quote(known['user'], safe='')}@" if "user" in known else ""
    places = ",".join(f"{quote(host, safe='')}:{port}" for host, _, port in hosts)
    if places == f":{PORT}":
        places = ""  # nothing is said of the host: it is libpq's choice
    options = {"name": name}
    if schema != SCHEMA:
        options["schema"] = schema
    if any(number for _, number, _ in hosts):
        options["hostaddr"] = known["hostaddr"]
    options.update((key, known[key]) for key in _WAY if key in known)
    query = "&".join(f"{key}={quote(value, safe='' if key == 'name' else '/')}" for key, value in options.items())
    return f"postgresql://{who}{places}/{quote(database, safe='')}?{query}"


def local_name(address: str, conninfo: str, schema: str) -> str | None:
    """Return the name that an address means in that schema of that database, or None if it is elsewhere."""

    def is_here(url: MailboxURL) -> bool:
        query = dict(url.query)
        theirs = conninfo_of(url.bare, {key: value for key, value in query.items() if is_parameter(key)})
        return where_of(theirs) == where_of(conninfo) and query.get("schema", SCHEMA) == schema

    return name_at(address, PostgresOptions, is_here)


def where_of(conninfo: str) -> tuple[tuple[tuple[str, str, str], ...], str, str]:
    """Return what a connection string leads to: hosts (each with its number, if given, and port), database and service."""
    known = _known(conninfo)
    names, numbers = known.get("host", "").split(","), known.get("hostaddr", "").split(",")
    if not any(names):
        names, numbers = numbers, [""]
    ports = known.get("port", PORT).split(",")
    if len(numbers) == 1:
        numbers *= len(names)
    if len(ports) == 1:
        ports *= len(names)
    hosts = tuple((name, number, port or PORT) for name, number, port in zip(names, numbers, ports))  # noqa: B905
    database = known.get("dbname") or ("" if "service" in known else known.get("user") or _own_name())
    return hosts, database, known.get("service", "")


def _known(conninfo: str) -> dict[str, str]:
    """Return what libpq goes by: a connection string, and for what it leaves out the environment.

    Not the name of the user of this machine, which it takes where nothing says another.
    """
    given = {key: str(value) for key, value in conninfo_to_dict(conninfo).items()}
    if "service" in given:  # which goes before the environment, and is read on connecting
        return given
    known = {}
    for option in psycopg.pq.Conninfo.get_defaults():
        key = option.keyword.decode()
        if option.val is not None and option.val != option.compiled and key != "service":
            known[key] = option.val.decode()
    if known.get("user") == _own_name() and "PGUSER" not in os.environ:
        known.pop("user", None)
    return {**known, **given}


def _own_name() -> str:
    return next(
        (
            option.val.decode()
            for option in psycopg.pq.Conninfo.get_defaults()
            if option.keyword == b"user" and option.val
        ),
        "",
    )


def conninfo_of(url: str, parameters: dict[str, Any], timeout: float = math.inf, silence: float = SILENCE) -> str:
    """Return what libpq is told: the URL without its query, the parameters that stand there, and our defaults.

    :param timeout: seconds for all; where there are several hosts, the first that does not answer is not to take them up.
    :param silence: seconds after which the kernel is to give up a connection whose other end it does not hear.
    """
    bare = "postgresql://" + url.partition("://")[2]
    try:
        given = conninfo_to_dict(bare, **parameters)
        known = {key: str(value) for key, value in given.items() if value is not None}
        share = max(SHORTEST_TRY, min(LONGEST_TRY, timeout // len(where_of(make_conninfo("", **known))[0])))
        defaults = {
            **_DEFAULTS,
            "connect_timeout": f"{share:.0f}",
            "keepalives_idle": f"{max(1.0, silence / 2):.0f}",
            "keepalives_interval": f"{max(1.0, silence / 5):.0f}",
            "tcp_user_timeout": f"{800 * silence:.0f}",
        }
        for key, variable in _ENVIRONMENT.items():
            if variable in os.environ:
                del defaults[key]
        return make_conninfo("", **{**defaults, **known, **_ALWAYS})
    except psycopg.Error as error:
        place = shown(bare)
        told = re.sub(r'"([^"]*)"', lambda quoted: quoted[0] if quoted[1] in place else '"***"', one_line(error))
        secret = urlsplit(bare).password
        raise ConfigError(f"{place!r}: {told.replace(secret, '***') if secret else told}") from None


def is_parameter(key: str) -> bool:
    """True if libpq has a connection parameter of that name."""
    return key in _parameters()


@cache
def _parameters() -> frozenset[str]:
    return frozenset(option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults())
