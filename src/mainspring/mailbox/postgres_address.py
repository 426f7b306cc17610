"""From the URL of a PostgreSQL mailbox to what libpq is told and what the mailbox is, and back to an address for replies."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from mainspring.errors import ConfigError
from mainspring.mailbox.postgres_connection import one_line
from mainspring.urls import shown

SCHEMA = "mainspring"
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_DEFAULTS = {
    "application_name": "mainspring",
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


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
            kind = "a number" if key in ("capacity", "timeout") else "true or false"
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
    """A mailbox as a URL, without a password."""
    host, port, database = where_of(conninfo)
    user = conninfo_to_dict(conninfo).get("user")
    who = f"{quote(str(user), safe='')}@" if user else ""
    more = "" if schema == SCHEMA else f"&schema={schema}"
    return (
        f"postgresql://{who}{quote(host, safe='')}:{port}/{quote(database, safe='')}?name={quote(name, safe='')}{more}"
    )


def local_name(address: str, conninfo: str, schema: str) -> str | None:
    """The name that an address means in that schema of that database; None where it is elsewhere."""
    if "://" not in address:
        return address
    try:
        parts = urlsplit(address)
        if parts.scheme not in ("postgresql", "postgres"):
            return None
        query = dict(parse_qsl(parts.query))
        theirs = where_of(conninfo_of(address, {}))
    except (ValueError, ConfigError):  # no URL of anything: opening it will say so
        return None
    if theirs != where_of(conninfo) or query.get("schema", SCHEMA) != schema:
        return None
    return query.get("name", "default")


def where_of(conninfo: str) -> tuple[str, str, str]:
    """The server and the database that a connection string leads to."""
    given = conninfo_to_dict(conninfo)
    user = given.get("user") or ""
    host = given.get("host") or given.get("hostaddr") or "localhost"
    return str(host), str(given.get("port") or 5432), str(given.get("dbname") or user)


def conninfo_of(url: str, parameters: dict[str, Any]) -> str:
    """What libpq is told: the URL without its query, the parameters that stand there, and our defaults."""
    bare = "postgresql://" + re.split(r"[?#]", url, maxsplit=1)[0].partition("://")[2]
    try:
        given = conninfo_to_dict(bare, **parameters)
        known = {key: str(value) for key, value in given.items() if value is not None}
        return make_conninfo("", **{**_DEFAULTS, **known})
    except psycopg.Error as error:
        secret = urlsplit(bare).password
        told = one_line(error).replace(secret, "***") if secret else one_line(error)
        raise ConfigError(f"{shown(bare)!r}: {told}") from None


def is_parameter(key: str) -> bool:
    """Whether libpq has a connection parameter of that name."""
    return any(option.keyword.decode() == key for option in psycopg.pq.Conninfo.get_defaults())


def is_text(value: str) -> bool:
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def _truth(text: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


_OPTIONS: dict[str, Any] = {
    "name": str, "capacity": int, "schema": str, "migrate": _truth, "listen": _truth, "timeout": float,
}  # fmt: skip
