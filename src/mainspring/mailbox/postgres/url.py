"""From the URL of a PostgreSQL mailbox to what libpq is told and what the mailbox is, and back to an address for replies."""

from __future__ import annotations

import math
import os
import re
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from mainspring.errors import ConfigError
from mainspring.mailbox import limits
from mainspring.mailbox.limits import SILENCE
from mainspring.mailbox.open import divided
from mainspring.redaction import one_line, shown

SCHEMA = "mainspring"
LONGEST_NAME = 1_000
"""Bytes of a mailbox's name, which an index must hold."""
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")
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
"""What an address says of the way to the server, so that nobody goes there by a worse one. Who somebody is, is not in it."""


def check_name(name: str) -> None:
    """Raise :class:`ConfigError` for the name of a mailbox that no database can keep."""
    limits.check_name(name)
    if len(name.encode()) > LONGEST_NAME:
        raise ConfigError(f"the name of a mailbox must be text of up to {LONGEST_NAME} bytes, not {name!r:.100}")


def check_schema(schema: str) -> str:
    """``schema``, where it is a plain lower-case name, which needs no quotes; else raises :class:`ConfigError`."""
    if not (isinstance(schema, str) and _NAME.fullmatch(schema)):
        raise ConfigError(
            f"schema must be a name of up to 40 lower-case letters, digits and _, as in {SCHEMA!r}, not {schema!r}"
        )
    return schema


def options_of(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """The mailbox's own options, which are strings where they stood in the URL, as values; the others as they are."""
    values = {}
    for key, value in options.items():
        try:
            values[key] = _OPTIONS[key](value) if key in _OPTIONS and isinstance(value, str) else value
        except ValueError:
            kind = "a number" if _OPTIONS[key] in (int, float) else "true or false"
            raise ConfigError(f"{shown(url)!r}: the option {key} must be {kind}, not {value!r}") from None
    return values


def check_parameters(url: str, parameters: dict[str, Any]) -> None:
    """Raise :class:`ConfigError` for what is neither an option of the mailbox nor a parameter of libpq."""
    for key in parameters:
        if not is_parameter(key):
            allowed = ", ".join(_OPTIONS)
            raise ConfigError(
                f"{shown(url)!r}: a PostgreSQL mailbox has no option {key!r}; it has {allowed}, and libpq's"
            )


def address_of(conninfo: str, schema: str, name: str) -> str:
    """A mailbox as a URL, without a password, but with what says how the server is to be reached and trusted."""
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
    """The name that an address means in that schema of that database; None where it is elsewhere."""
    if "://" not in address:
        return address
    if not address.startswith(("postgresql://", "postgres://")):
        return None
    try:
        bare, options = divided(address)
        query = dict(options)
        theirs = where_of(conninfo_of(bare, {key: value for key, value in query.items() if is_parameter(key)}))
    except ConfigError:  # no URL of anything: opening it will say so
        return None
    if theirs != where_of(conninfo) or query.get("schema", SCHEMA) != schema:
        return None
    return query.get("name", "default")


def where_of(conninfo: str) -> tuple[tuple[tuple[str, str, str], ...], str, str]:
    """What a connection string leads to: hosts (each with its number, if that is given, and port), database and service."""
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
    """What libpq goes by: a connection string, and for what it leaves out the environment.

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
    """What libpq is told: the URL without its query, the parameters that stand there, and our defaults.

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
    """Whether libpq has a connection parameter of that name."""
    return any(option.keyword.decode() == key for option in psycopg.pq.Conninfo.get_defaults())


def _truth(text: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


_OPTIONS: dict[str, Any] = {
    "name": str, "capacity": int, "schema": str, "migrate": _truth, "listen": _truth, "poll_interval": float,
    "timeout": float, "silence": float,
}  # fmt: skip
