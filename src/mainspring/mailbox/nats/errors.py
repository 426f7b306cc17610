"""What a NATS server answers, and how it refuses."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nats.errors import MaxPayloadError

from mainspring.errors import (
    ConfigError,
    MailboxConnectionError,
    MailboxError,
    MainspringError,
    SerializationError,
    message_of,
    remedy,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.mailbox.nats.parser import Heard


class ApiError(MailboxError):
    """What JetStream says where it refuses."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"JetStream refused: {text} (code {code})")
        self.code = code
        self.text = text


class NotAllowedError(ConfigError, MailboxError):
    """The login is good for less than a mailbox needs."""


class GoneError(MailboxConnectionError):
    """A stream or a consumer is not there, or not any more: a server has lost its data, or somebody has deleted it."""


class NobodyAnswersError(GoneError):
    """The server is there, but no stream or consumer takes what was sent: it does not exist, or JetStream is off."""


class PullEndedError(GoneError):
    """A pull request was refused, or did not end: perhaps its consumer is gone."""


NO_STREAM = 10059
NO_CONSUMER = 10014


def is_gone(error: Exception) -> bool:
    """Whether a call failed as a stream or a consumer is not there, or may have."""
    return isinstance(error, GoneError) or (isinstance(error, ApiError) and error.code in (NO_STREAM, NO_CONSUMER))


def refuses_login(error: Exception) -> bool:
    """Whether it is a server's refusal of this user, which the driver raises as text."""
    text = message_of(error).lower()
    return "authorization violation" in text or "authentication" in text


def denied(error: Exception) -> str | None:
    """The subject, in small letters, that this user may not use, where the server says so; other answer it gives none."""
    found = re.search(r'permissions violation for (?:publish|subscription) to "([^"]+)"', message_of(error).lower())
    return found[1] if found else None


def no_connection(name: str, servers: Sequence[str], refusals: Sequence[Exception]) -> MainspringError:
    """Why none of the servers can be connected to, each of which was tried."""
    from mainspring.mailbox.nats.client import LoginError, NoTlsError

    told = "; ".join(dict.fromkeys(map(message_of, refusals)))
    if any(map(refuses_login, refusals)):
        told += "; check the user and the password of the URL, its token or its credentials"
    else:
        told += next(filter(None, map(remedy, refusals)), "")
    lasting = all(isinstance(error, NoTlsError | LoginError) or refuses_login(error) for error in refusals)
    kind = ConfigError if lasting else MailboxConnectionError
    error = kind(f"{name}: no connection to a NATS server at {', '.join(servers)}: {told}")
    error.__cause__ = refusals[-1]
    return error


def in_words(error: Exception, name: str, servers: Sequence[str], told: str) -> MainspringError:
    """What the driver raises, in the port's words; ``servers`` are those that were tried, where there was no connection yet."""
    if isinstance(error, MainspringError):
        return error
    if isinstance(error, MaxPayloadError):
        return SerializationError(f"{name}: the message is larger than the server takes (max_payload)")
    what = "the connection to the NATS server is lost"
    if servers:
        what = f"no connection to a NATS server at {', '.join(servers)}"
    failure = MailboxConnectionError(f"{name}: {what}: {told}")
    failure.__cause__ = error
    return failure


def check_credentials(path: str) -> None:
    """Raise :class:`ConfigError` where the driver could make nothing of that credentials file."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(
            f"the credentials file {path!r} cannot be read ({error.strerror}); correct its path"
        ) from None
    if find_spec("nkeys") is None:
        raise ConfigError("credentials= needs nkeys, to sign with what is in the file: pip install 'nats-py[nkeys]'")


def parse(answer: Heard) -> dict[str, Any]:
    """An answer of JetStream's. Raises :class:`ApiError` where it refuses, :class:`NobodyAnswersError` where none is."""
    if answer.head and answer.status[0] == "503":
        raise NobodyAnswersError(
            "no JetStream answers at the NATS server: start it with JetStream (nats-server -js), or wait for its leader"
        )
    try:
        found: dict[str, Any] = json.loads(answer.data)
    except ValueError:
        raise ConfigError(f"what answers at the NATS server is no JetStream: {answer.data[:60]!r}") from None
    error = found.get("error")
    if error is not None:
        raise ApiError(int(error.get("err_code", 0)), str(error.get("description", "")))
    return found
