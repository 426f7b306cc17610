"""Pulls from a NATS server that can be taken back."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio

from mainspring.errors import MailboxConnectionError
from mainspring.mailbox.limits import CLOSE_TIMEOUT
from mainspring.mailbox.nats.errors import ApiError, NobodyAnswersError, PullEndedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.errors import MailboxError
    from mainspring.mailbox.nats.client import StrictClient
    from mainspring.mailbox.nats.connection import Wire
    from mainspring.mailbox.nats.parser import Heard


GLANCE = 0.02
"""Seconds that a pull lasts at least. Without an end the server answers at once that there is nothing, and at times wrongly:
what was sent just now it may not have noticed yet; and where what it has counted was removed, it waits for ever instead."""
LONGEST_GLANCE = 0.5
"""Seconds that the last of some glances lasts, where the server says that there is something and does not deliver it."""
OVERDUE = 0.5
"""Seconds after its end at which a pull is taken for ended although the server does not say so: where several wait, 2.9 now
and then drops one that is over without a word."""


class Puller:
    """A subscription of its own for one pull at a time: taken away, the server knows at once that nobody waits."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._messages: list[Heard] = []
        self._wanted = 0
        self.source = ""
        self._ended: Any = None
        self._arrived: Callable[[], object] | None = None

    async def open(self, client: StrictClient) -> None:
        """Subscribe."""
        self._client = client
        self._subject = client.new_inbox()
        try:
            self._subscription = await client.hear(self._subject, self._on_message)
        except Exception as error:
            raise self._wire.failure(error) from error

    def take(self) -> list[Heard]:
        """What has come and was not taken yet."""
        taken, self._messages = self._messages, []
        return taken

    def forget(self) -> None:
        """Be of no more use: the connection is lost."""
        self._client.forget(self._subscription)

    def end(self, error: MailboxError | None = None) -> None:
        """Let the pull under way end now, with what has come so far."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)

    async def pull(
        self,
        subject: str,
        request: bytes,
        wanted: int,
        lasts: float,
        put_back: Callable[[Puller], Awaitable[None]],
    ) -> list[Heard]:
        """Send a pull request and return what comes until it ends: by itself, within ``lasts`` seconds, or by :meth:`end`.

        One that the server does not end in time, but has not lost, has brought what has come.

        Where this is cancelled, or its end is forced, ``put_back`` is called under a shield, to see to what has come or comes.
        """
        wire = self._wire
        loop = wire.loop
        self._messages = []
        self._wanted = wanted
        self.source = subject
        epoch = wire.epoch
        self._ended = loop.create_future()
        wire.pullers.add(self)
        timer = loop.call_later(lasts + OVERDUE, self._finish, _OVERDUE)
        ended: Any = _UNFINISHED
        come: list[Heard] = []
        try:
            await wire.publish(subject, request, self._subject)
            ended = await self._ended
            if ended is _OVERDUE:
                await self._look(subject)
                come = self.take()
        finally:
            timer.cancel()
            if ended is not _DONE:
                await self._take_back(put_back)
            wire.pullers.discard(self)
            wire.ease()
        if ended is _DONE:
            if epoch == wire.epoch:
                wire.idle.append(self)
            else:  # lost just now
                self.forget()
            return self.take()
        if ended is None or ended is _OVERDUE:
            return come
        raise type(ended)(*ended.args)

    async def _look(self, subject: str) -> None:
        """Raise :class:`MailboxConnectionError` where a pull is overdue as the server or the consumer is not there."""
        consumer = subject.removeprefix("$JS.API.CONSUMER.MSG.NEXT.")
        try:
            await self._wire.api(f"CONSUMER.INFO.{consumer}")
        except ApiError as error:
            raise PullEndedError(f"the NATS server did not end a pull request in time: {error}") from error

    async def _take_back(self, put_back: Callable[[Puller], Awaitable[None]]) -> None:
        """Tell the server that nobody waits any more, and give back what it has delivered, or still delivers.

        The driver's own ``drain`` would throw away what the server had in hand for this subscription as it went.
        """
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT / 2):
            with suppress(Exception):  # a lost connection: what was delivered comes again when its lease ends
                client = self._wire.driver
                if client is self._client and client.is_connected:
                    await client._send_unsubscribe(self._subscription._id)  # noqa: SLF001 - see above
                    await put_back(self)
            with suppress(Exception):
                await self._client.hush(self._subscription)

    def _on_message(self, message: Heard) -> None:
        if message.reply:
            self._messages.append(message)
            if len(self._messages) >= self._wanted:
                self._finish(_DONE)
            return
        status, told = message.status
        if status in ("404", "408"):
            self._finish(_DONE)
        elif status == "503":
            self._finish(NobodyAnswersError("no stream or consumer answers: it was deleted, or JetStream is off"))
        elif status != "100":
            kind: type[MailboxConnectionError] = PullEndedError
            if "MaxWaiting" in told:
                kind = MailboxConnectionError
                told = "as many receives wait as the consumer of the queue lets wait, in all processes (max_waiting)"
            self._finish(kind(f"the NATS server ended a pull request: {status} {told}"))

    def _finish(self, how: Any) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(how)


class _Sign:
    """A value that is only itself."""


_DONE = _Sign()
_OVERDUE = _Sign()
_UNFINISHED = _Sign()
