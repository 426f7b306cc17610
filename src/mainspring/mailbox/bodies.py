"""The types of a mailbox's bodies and replies, and the form in which its store keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mainspring.core import random
from mainspring.core.process import identity
from mainspring.errors import ConfigError
from mainspring.mailbox.backend import MailboxHooks
from mainspring.mailbox.codec import Codec, type_name

if TYPE_CHECKING:
    from mainspring.core.process import Identity
    from mainspring.mailbox.message import Delivery


class Bodies(MailboxHooks):
    """The part of a mailbox that knows what its bodies are."""

    verifies: bool = True
    """Whether a body (or reply) of a type that does not rule out a change on its way through JSON is read back and compared
    when it is sent. Set it to False before the first send to save that time; what is received may then differ."""

    def __init__(self, name: str, body: Any, reply: Any) -> None:
        self.name = name
        self._body_type = body
        self._reply_type = reply
        self._codec: Codec | None = None
        self._reply_codec: Codec | None = None
        self._id_prefix = ""
        self._id_count = 0
        self._id_process: Identity | None = None

    def new_id(self) -> str:
        """A new message id: a random prefix of this mailbox object and a count, so that ids sort in order of sending.

        A forked child has a prefix of its own: else its next id were that of its parent's next one, and its brothers'.
        """
        process = self._id_process
        if process is None or not process.here:
            self._id_prefix, self._id_process = random.token(64), identity()
        self._id_count += 1
        return f"{self._id_prefix}{self._id_count:08x}"

    def _new_ids(self, count: int) -> list[str]:
        """As many new message ids, in order."""
        last = self.new_id()  # which also sees to the prefix
        first, prefix = self._id_count + 1, self._id_prefix
        self._id_count += count - 1
        return [last, *map(f"{prefix}%08x".__mod__, range(first, first + count - 1))]

    @property
    def codec(self) -> Codec:
        """Encodes and decodes this mailbox's bodies; made at first use, when the type is known."""
        if self._codec is None:
            self._codec = Codec(self._body_type, verifies=self.verifies)
        return self._codec

    @property
    def reply_codec(self) -> Codec:
        """Encodes and checks the replies; made at first use."""
        if self._reply_codec is None:
            self._reply_codec = Codec(self._reply_type, verifies=self.verifies)
        return self._reply_codec

    @property
    def reply_type(self) -> Any:
        """The type of the replies, or None where nobody has said it (yet)."""
        return self._reply_type

    @property
    def is_bound(self) -> bool:
        """Whether the type of its bodies is known."""
        return self._body_type is not None

    def bind(self, *, body: Any = None, reply: Any = None) -> None:
        """Say the type of bodies (or replies) where the constructor was not told; a loop does so from its handler.

        Raises :class:`ConfigError` where it was told another one.
        """
        self._body_type = self._bound("body", self._body_type, body)
        self._reply_type = self._bound("reply", self._reply_type, reply)
        self._codec = self._reply_codec = None

    def _bound(self, what: str, old: Any, new: Any) -> Any:
        if old is not None and new is not None and old != new:
            raise ConfigError(
                f"mailbox {self.name!r} holds {what} type {type_name(old)}, but its handler takes {type_name(new)};"
                " make the two the same"
            )
        return new if old is None else old

    def _payload(self, codec: Codec, body: Any) -> Any:
        """``body``, checked, in the form in which this store keeps it."""
        if self.serializes:
            return codec.encode(body)
        codec.check(body)
        return body

    def _body_of(self, delivery: Delivery) -> Any:
        return self.codec.decode(delivery.body) if self.serializes else delivery.body
