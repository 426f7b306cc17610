"""Mailbox URLs: where a store is, and the options of a mailbox. Each backend states its own as a class (:class:`Options`).

The constructor of a mailbox has the defaults of its options, the class has their types and bounds. An option stands in the
query of the URL or is given as a keyword, but not both. In the query it is text, which pydantic reads in lax mode. Its core
does this alone: the models of pydantic would double what a program imports that opens a mailbox.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias, get_type_hints
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic_core import SchemaValidator, ValidationError, core_schema
from typing_extensions import ParamSpec

from mainspring import validation
from mainspring.errors import ConfigError
from mainspring.redaction import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pydantic_core import CoreSchema

P = ParamSpec("P")
Host: TypeAlias = tuple[str, int]

# ------------------------------------------------------------------------------------------------------------- options


class Accepts:
    """Which values an option takes: ``schema`` reads one, ``description`` says to people what it must be.

    Errors do not show the value of a ``secret`` option.
    """

    def __init__(self, schema: CoreSchema, description: str = "text", *, secret: bool = False) -> None:
        self.read = SchemaValidator(schema).validate_python
        self.description = description
        self.secret = secret


def number(schema: CoreSchema) -> CoreSchema:
    """Return a schema for a number, or for None if ``schema`` takes that. It takes no bool, and reads ``none`` as None."""
    return core_schema.no_info_before_validator_function(_number, schema)


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a bool is no number")  # noqa: TRY004 - pydantic reads a ValueError only
    return None if isinstance(value, str) and value.lower() == "none" else value


def seconds(least: float, most: float | None = None) -> CoreSchema:
    """Return a schema for a finite number of seconds within these bounds."""
    return core_schema.float_schema(ge=least, le=most, allow_inf_nan=False)


Text: TypeAlias = Annotated[str, Accepts(core_schema.str_schema())]
OptionalText: TypeAlias = Annotated[str | None, Accepts(core_schema.nullable_schema(core_schema.str_schema()))]
Secret: TypeAlias = Annotated[str | None, Accepts(core_schema.nullable_schema(core_schema.str_schema()), secret=True)]
Flag: TypeAlias = Annotated[bool, Accepts(core_schema.bool_schema(), "true or false")]
Duration: TypeAlias = Annotated[float, Accepts(number(seconds(0.001)), "a number of seconds from 0.001")]
Capacity: TypeAlias = Annotated[
    int | None,
    Accepts(number(core_schema.nullable_schema(core_schema.int_schema(ge=1))), "a whole number from 1, or None"),
]


class Options:
    """The options of one kind of mailbox, checked. Each is an attribute whose annotation says what it :class:`Accepts`."""

    kind: ClassVar[str]
    """The name of the mailbox in errors."""
    schemes: ClassVar[tuple[str, ...]]
    """The schemes of its URLs."""
    hints: ClassVar[dict[str, str]] = {}
    """What to write instead of an option that does not exist, by its name."""
    besides: ClassVar[str] = ""
    """What it takes besides these options: the end of the list in errors."""
    _known: ClassVar[dict[str, Accepts]]

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        cls._known = {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}

    @classmethod
    def of(cls, url: str, **given: Any) -> Self:
        """Check the options ``given`` for a mailbox at ``url`` (or of that name), and read the values that are text.

        :raises ConfigError: one is unknown, or cannot be used. No secret is shown.
        """
        options, known = cls(), cls._known
        for name, value in given.items():
            accepts = known.get(name)
            if accepts is None:
                instead = cls.hints.get(name) or f"it has {', '.join(known)}{cls.besides}"
                raise ConfigError(f"{shown(url)!r}: {cls.kind} has no option {name!r}; {instead}")
            try:
                setattr(options, name, accepts.read(value))
            except ValidationError:
                got = "" if accepts.secret else f", not {validation.shown(value):.200}"
                raise ConfigError(f"{shown(url)!r}: {name} must be {accepts.description}{got}") from None
        return options

    def with_values(self, **checked: Any) -> Self:
        """Return a copy with other values of some options, which are not checked."""
        options = copy(self)
        vars(options).update(checked)
        return options


class ServerOptions(Options):
    """The options that all mailboxes on servers have."""

    name: Text
    timeout: Duration
    silence: Duration


# ---------------------------------------------------------------------------------------------------------------- URLs


@dataclass(frozen=True, slots=True)
class MailboxURL:
    """A mailbox URL, taken apart."""

    bare: str = field(repr=False)
    """The URL without its query."""
    scheme: str
    username: str | None
    password: str | None = field(repr=False)
    places: str
    path: str
    """Like :attr:`places`, the hosts, as it stands there: percent-encoded."""
    query: tuple[tuple[str, str], ...] = field(repr=False)

    @property
    def shown(self) -> str:
        """The URL as in :attr:`bare`, without the login."""
        return shown(self.bare)

    def hosts(self, default: int) -> tuple[Host, ...]:
        """Return the hosts and their ports. Raise :class:`ConfigError` for what is neither. No host at all is ``localhost``."""
        return tuple(self._host(place, default) for place in self.places.split(","))

    def _host(self, place: str, default: int) -> Host:
        name, colon, port = place.rpartition(":")
        if not colon or port.endswith("]"):  # no port; an IPv6 address has its colons in brackets
            name, port = place, ""
        name = unquote(name.removeprefix("[").removesuffix("]")).lower()
        if place == self.places:
            name = name or "localhost"
        if not name or (port and not (_PORT.fullmatch(port) and 0 < int(port) < 65_536)):
            raise ConfigError(
                f"{self.shown!r}: what stands there is no host and port; write it as in {self.scheme}://localhost:{default}"
            )
        return name, int(port) if port else default


def read_url(url: str, schemes: Iterable[str], kind: str = "") -> MailboxURL:
    """Take a mailbox URL apart.

    :param schemes: the schemes that it may have.
    :param kind: the kind of mailbox that has those schemes; none is given where they are all that there are.
    :raises ConfigError: it is none, or has another scheme.
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
    if parts.scheme not in schemes:
        known = [f"{scheme}://" for scheme in schemes]
        raise ConfigError(
            f"{shown(url)!r}: the URL of {kind} begins with {' or '.join(known)}; open_mailbox() makes mailboxes of every kind"
            if kind
            else f"{shown(url)!r}: no mailbox backend has the scheme {parts.scheme + '://'!r}; there are {', '.join(known)}"
        )
    if parts.scheme not in _WITHOUT_HOST and not _AUTHORITY.match(url):
        raise ConfigError(f"{shown(url)!r}: behind the scheme come two slashes, as in {parts.scheme}://host?name=jobs")
    if parts.fragment:
        raise ConfigError(
            f"{shown(url)!r}: a # begins what no mailbox reads; write %23 where it belongs to a name or a path"
        )
    login, at, places = ("", "", parts.netloc) if parts.scheme in _WITHOUT_HOST else parts.netloc.rpartition("@")
    user, colon, password = login.partition(":")
    return MailboxURL(
        url.partition("#")[0].partition("?")[0],
        parts.scheme,
        unquote(user) if at else None,
        unquote(password) if colon else None,
        places,
        parts.path,
        _query(url, parts.query),
    )


def _query(url: str, query: str) -> tuple[tuple[str, str], ...]:
    try:
        options = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        if not all(_OPTION.fullmatch(key) for key, _ in options):
            raise ValueError
    except ValueError:  # what is none may be the end of a password
        raise ConfigError(
            f"{shown(url)!r} is no mailbox URL: behind the ? stand options as key=value, with & between them"
        ) from None
    for key, _ in options:
        if key in _NO_OPTIONS:
            raise ConfigError(f"{shown(url)!r}: a mailbox has no option {key!r} that stands in its URL")
    return tuple(options)


def _check_login(url: str) -> None:
    """Raise if a ``/``, ``?``, ``#`` or ``@`` in a password ends what is read as the login. Show nothing of the rest."""
    scheme, _, rest = url.partition("://")
    if scheme in _WITHOUT_HOST:
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


_WITHOUT_HOST = ("memory", "sqlite")
_AUTHORITY = re.compile(r"\s*[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_OPTION = re.compile(r"[\w.-]+")
_PLACE = re.compile(r"(\[[^]]*\]|[^:@]*)(:\d*)?")
_PORT = re.compile(r"[0-9]{1,5}")
_NO_OPTIONS = ("self", "cls", "url", "server", "body", "reply", "reply_stores")


def with_query(url: str, given: dict[str, Any], model: type[Options]) -> tuple[MailboxURL, dict[str, Any]]:
    """Take the URL of a mailbox with options of that ``model`` apart; they stand in its query, or are the keywords ``given``.

    :raises ConfigError: it is none, or an option is given twice.
    """
    place = read_url(url, model.schemes, model.kind)
    options: dict[str, Any] = {}
    for key, value in (*place.query, *given.items()):
        if key in options:
            raise ConfigError(f"{shown(url)!r}: the option {key!r} is given twice; leave one out")
        options[key] = value
    return place, options


def reads_query(model: type[Options]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Give a constructor whose first parameter is a URL that URL without its query, and the options there as keywords."""

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        first = list(signature(init).parameters)[1]

        @wraps(init)
        def construct(*args: P.args, **given: P.kwargs) -> None:
            keywords: dict[str, Any] = dict(given)
            url: Any = args[1] if len(args) > 1 else keywords.pop(first, None)
            place, options = with_query(url, keywords, model)
            init(args[0], place.bare, *args[2:], **options)  # type: ignore[arg-type]

        return construct

    return decorate


def name_at(address: str, model: type[Options], is_here: Callable[[MailboxURL], bool]) -> str | None:
    """Return the name of the mailbox that an address means where its URL ``is_here``, else None. What is no URL is a name."""
    if "://" not in address:
        return address
    try:
        url = read_url(address, model.schemes)
        return dict(url.query).get("name", "default") if is_here(url) else None
    except ConfigError:  # opening it will say so
        return None
