"""The names of a mailbox on a NATS server, and the configuration of its streams and consumers. Without the driver."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError
from mainspring.mailbox.backend import TRANSIENT, TRANSIENT_LIFE
from mainspring.mailbox.nats.messages import nanoseconds

CONSUMER = "mainspring"
"""The name of the durable consumer of each stream that has one."""
MAX_NAME = 180
UNBOUNDED = -1
"""The ``max_ack_pending`` of a consumer that hands out any number of messages."""
DELAYED_ACK_WAIT = 2.0
"""Seconds after which a due message goes to another process, if the first one does not move it."""
_log = Logger("mainspring.mailbox")


def letters(text: str) -> str:
    """Return a text in ASCII letters, digits and ``-``, and any other byte as ``_`` and two hexadecimal digits."""
    raw = text.encode("utf-8", "surrogatepass")
    return re.sub(rb"[^A-Za-z0-9-]", lambda found: b"_%02x" % found[0][0], raw).decode()


def read_letters(text: str) -> str:
    """Return the text that :func:`letters` has written."""
    raw = re.sub(rb"_([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), text.encode())
    return raw.decode("utf-8", "surrogatepass")


def encoded(name: str) -> str:
    """Return ``name`` in letters that stream names, bucket names and subjects allow; different names stay different."""
    text = letters(name)
    if len(text) > MAX_NAME:
        raise ConfigError(f"mailbox {name[:40]!r}…: its name is longer than {MAX_NAME} letters on a NATS server")
    return text


@dataclass(frozen=True, slots=True)
class Names:
    """The streams of one mailbox, and the beginnings of their subjects."""

    queue: str
    delayed: str
    expiries: str
    dead: str
    moves: str
    checkpoints: str
    records: str
    to_queue: str
    to_delayed: str
    to_expiries: str
    to_dead: str
    to_moves: str
    to_checkpoints: str
    to_records: str
    to_cancelled: str
    to_changes: str
    to_limits: str
    to_results: str
    to_made: str
    transient: bool

    @classmethod
    def of(cls, name: str) -> Names:
        """Return those of the mailbox called ``name``."""
        return cls.of_encoded(encoded(name))

    @classmethod
    def of_encoded(cls, short: str) -> Names:
        """Return those of the mailbox whose encoded name is ``short``."""
        root = f"mainspring.{short}"
        return cls(
            f"mainspring-queue_{short}",
            f"mainspring-delayed_{short}",
            f"mainspring-expiries_{short}",
            f"mainspring-dead_{short}",
            f"mainspring-moves_{short}",
            f"KV_mainspring-checkpoints_{short}",
            f"mainspring-records_{short}",
            f"{root}.queue.",
            f"{root}.delayed.",
            f"{root}.expiry.",
            f"{root}.dead.",
            f"{root}.moves",
            f"$KV.mainspring-checkpoints_{short}.",
            f"{root}.record.",
            f"{root}.cancelled",
            f"{root}.changes",
            f"{root}.limits",
            f"{root}.results",
            f"{root}.made",
            short.startswith(encoded(TRANSIENT)),
        )

    @property
    def streams(self) -> tuple[str, ...]:
        """All of its streams."""
        return (self.queue, self.delayed, self.expiries, self.dead, self.moves, self.checkpoints, self.records)

    def configs(self, *, replicas: int, storage: str) -> list[dict[str, Any]]:
        """Return the configuration of its streams.

        At a limit of the owner's, an accepted message stays and the new one is refused. Of the notes of expiries the
        old ones go: they are reminders only, and the new ones are needed longest. The count of moves is one message,
        whose number counts: replacing it must never be refused.
        """
        common: dict[str, Any] = {
            "storage": storage,
            "num_replicas": replicas,
            "max_msgs_per_subject": 1,
            "discard": "new",
        }
        if self.transient:
            common["max_age"] = nanoseconds(TRANSIENT_LIFE)
        work = {"retention": "workqueue", **common}
        kept = {"retention": "limits", **common}
        old = {"discard": "old"}
        return [
            {"name": self.queue, "subjects": [f"{self.to_queue}*"], **work},
            {"name": self.delayed, "subjects": [f"{self.to_delayed}*"], **work},
            {"name": self.expiries, "subjects": [f"{self.to_expiries}*"], **work, **old},
            {"name": self.dead, "subjects": [f"{self.to_dead}*"], **kept},
            {"name": self.moves, "subjects": [self.to_moves], **kept, **old},
            {
                "name": self.checkpoints,
                "subjects": [f"{self.to_checkpoints}>"],
                "allow_rollup_hdrs": True,
                "deny_delete": True,
                **kept,
            },
            {"name": self.records, "subjects": [f"{self.to_records}>"], **kept},
        ]

    def consumers(self, ack_wait: float, most: int = UNBOUNDED) -> dict[str, dict[str, Any]]:
        """Return the configuration of its consumers, by the stream of each. ``most`` messages of the queue may be out."""
        common = {
            "durable_name": CONSUMER,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "replay_policy": "instant",
            "max_deliver": -1,
            "max_ack_pending": UNBOUNDED,
            "max_waiting": 2_048,
        }
        timed = {"ack_wait": nanoseconds(DELAYED_ACK_WAIT), **common}
        return {
            self.queue: {"ack_wait": nanoseconds(ack_wait), **common, "max_ack_pending": most},
            self.delayed: timed,
            self.expiries: timed,
        }


_WANTED = ("retention", "max_msgs_per_subject", "discard")


def upgraded(wanted: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration that an existing stream needs: an older version let all streams discard old messages."""
    if wanted["discard"] == "new" and found.get("discard") == "old":
        return {**found, "discard": "new"}
    return found


def check_stream(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise :class:`ConfigError` if an existing stream cannot be used. Replicas and limits are up to its owner.

    Warn of a limit at which a killed server drops messages when it comes back, and of storage that keeps less than is
    asked for.
    """
    for key in _WANTED:
        if found.get(key) != wanted[key]:
            raise ConfigError(
                f"the stream {wanted['name']!r} is there with {key} = {found.get(key)!r}, and the mailbox needs"
                f" {wanted[key]!r}; rename the mailbox, or remove the stream if nothing in it is needed"
            )
    if found.get("discard_new_per_subject"):
        raise ConfigError(
            f"the stream {wanted['name']!r} is there with discard_new_per_subject, and the mailbox needs to replace the"
            " message of a subject; set it to false"
        )
    if (
        wanted["discard"] == "new" and found.get("max_bytes", -1) > 0
    ):  # the server reckons without its overhead, then drops
        raise ConfigError(
            f"the stream {wanted['name']!r} is there with max_bytes, near which the server drops accepted messages, the"
            " oldest first; limit the storage of the account, and set max_bytes to -1"
        )
    if wanted["discard"] == "new" and found.get("max_msgs", -1) > 0:
        _log.warning(
            "the stream %r has max_msgs: a server that is killed at that limit may drop accepted messages when it comes back;"
            " limit the storage of the account or the server instead",
            wanted["name"],
        )
    if found.get("num_replicas", 1) < wanted["num_replicas"]:
        _log.warning(
            "the stream %r is kept by %d server(s), not by the %d that replicas= asks for, which counts where it is made;"
            " change it on the server: nats stream edit %s --replicas=%d",
            *(wanted["name"], found.get("num_replicas", 1), wanted["num_replicas"]),
            *(wanted["name"], wanted["num_replicas"]),
        )
    if (found.get("storage"), wanted["storage"]) == ("memory", "file"):
        _log.warning(
            "the stream %r was made with storage=memory: it forgets all when the server ends; say so here too, or remove it"
            " once it is empty, and it is made anew",
            wanted["name"],
        )
    missing = set(wanted["subjects"]) - set(found.get("subjects") or ())
    if missing:
        raise ConfigError(f"the stream {wanted['name']!r} is there without the subjects {sorted(missing)}; add them")
