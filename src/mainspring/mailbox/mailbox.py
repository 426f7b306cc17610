"""The mailbox port: what every backend is to its users, on top of the few hooks that a backend writes.

The public calls check their parameters, encode and decode, and keep the life cycle; a backend implements the
:class:`MailboxHooks` on :class:`Envelope`, :class:`Delivery` and :class:`Settlement` and need not repeat any of it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, Self

import anyio
from typing_extensions import TypeVar

from mainspring.core.process import async_library, identity, off_fork, on_fork
from mainspring.core.state_machine import MAILBOX, MailboxState, StateMachine
from mainspring.errors import (
    ConfigError,
    InvalidParameterError,
    MailboxClosedError,
    MailboxConnectionError,
    MailboxError,
    MessageSettledError,
    ReplyNotAvailableError,
    SerializationError,
    copied,
)
from mainspring.mailbox.backend import TRANSIENT, Capabilities, MailboxStatistics
from mainspring.mailbox.codec import NotJsonError
from mainspring.mailbox.limits import CLOSE_TIMEOUT, MAX_MESSAGES, check_receive, check_seconds, is_name
from mainspring.mailbox.message import ACK, Ack, Counts, Dead, Delivery, Envelope, Message, Settlement
from mainspring.mailbox.requests import RequestCalls
from mainspring.mailbox.sync import SyncCalls
from mainspring.runtime.deadline import HEADER
from mainspring.runtime.scope import DaemonScope
from mainspring.validation import MAX_VISIBILITY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType
    from weakref import WeakSet

    from mainspring.core.process import Identity
    from mainspring.mailbox.replies import ReplyRouter

__all__ = ["MAX_MESSAGES", "Capabilities", "Mailbox"]

T = TypeVar("T", default=Any)
R = TypeVar("R", default=Any)


class Mailbox(RequestCalls[T, R], SyncCalls[T, R], Generic[T, R]):
    """A queue of messages with leases: at-least-once, fenced, first in first out among equal priorities.

    A new mailbox is unopened; ``async with mailbox`` opens it, and a LoopGroup opens what is not open. A closed mailbox can
    be opened again. All its calls belong to the event loop it was opened on; :attr:`sync` has those for other threads.
    """

    def __init__(self, name: str, *, body: Any = None, reply: Any = None) -> None:
        if not name or not isinstance(name, str):
            raise ConfigError(f"a mailbox needs a name of at least one character, not {name!r}")
        if not is_name(name):
            raise ConfigError(
                f"the name of a mailbox must be text that UTF-8 can hold, without NUL characters, not {name!r:.100}"
            )
        super().__init__(name, body, reply)
        self._state: StateMachine[MailboxState] = StateMachine(MAILBOX, MailboxState.UNOPENED, name=f"mailbox {name!r}")
        self._usable = self._works_unopened
        self._thread: int | None = None
        self._process: Identity | None = None
        self._scope: DaemonScope | None = None
        self._routers: list[ReplyRouter] = []
        self._open_ones: WeakSet[Mailbox[Any, Any]] | None = None
        self.reply_stores: tuple[Mailbox[Any, Any], ...] = ()
        """Mailboxes of the other stores that replies may go to; see ``open_mailbox(reply_stores=)``."""
        self._listeners: list[Callable[[list[str]], object]] = []
        self._silence_listeners: list[Callable[[MailboxConnectionError], object]] = []
        self.forgotten_replies = 0

    def __repr__(self) -> str:
        shown = f"{type(self).__name__} {self.name!r} {self._state.state}"
        if self._state.state is MailboxState.OPEN:
            now = self._statistics()
            shown += "" if now.connected else ", not connected"
            counts = {"waiting": now.waiting_receives, "queued": now.queued, "in flight": now.in_flight}
            shown += "".join(f", {count} {what}" for what, count in counts.items() if count)
        return f"<{shown}>"

    # --------------------------------------------------------------------------------------------------- life cycle

    @property
    def state(self) -> MailboxState:
        """Unopened, open or closed."""
        return self._state.state

    async def exists(self) -> bool:
        """Whether there is a mailbox of this name on the store, empty or not: for one that is not open.

        Nothing is made, and nothing is brought up to date. There is one as soon as somebody has opened it, or has sent a
        reply to its name. One in memory always is.

        :raises ConfigError: what is there is not a mailbox's, or of a newer Mainspring; the server refuses the login.
        :raises MailboxConnectionError: the store cannot be reached, so it is not known.
        """
        self._check_async_backend()
        return self._state.state is MailboxState.OPEN or await self._exists()

    async def __aenter__(self) -> Self:
        self._check_async_backend()
        from mainspring.mailbox.replies import open_mailboxes

        if self._scope is not None:
            self._check_process()
            raise ConfigError(f"mailbox {self.name!r} is already open; open it in one place and pass it on")
        self._scope = scope = DaemonScope(f"mailbox {self.name}")
        try:
            await scope.__aenter__()
            try:
                await self._open(scope)
            except BaseException as error:
                await scope.__aexit__(type(error), error, error.__traceback__)
                raise
        except BaseException:
            self._scope = None
            raise
        self._end_routing = self._route_replies(scope)
        self._state.to(MailboxState.OPEN, anyio.current_time())
        self._usable = True
        self._thread, self._process = get_ident(), identity()
        on_fork(self, Mailbox._forget)
        self._open_ones = open_mailboxes()
        self._open_ones.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        scope, self._scope = self._scope, None
        self._end_routing()
        try:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT):
                await self.close()
        except BaseException as failed:
            if scope is not None:
                await scope.__aexit__(type(failed), failed, failed.__traceback__)
            raise
        return await scope.__aexit__(kind, error, trace) if scope is not None else None

    def _route_replies(self, scope: DaemonScope) -> Callable[[], None]:
        """Let replies to other stores go out through daemons of ``scope``, until the function that this returns is called."""
        from mainspring.mailbox.replies import ReplyRouter

        router = ReplyRouter(self.name, scope)
        self._routers.append(router)
        return partial(self._routers.remove, router)  # which does not refer back to the mailbox

    async def close(self) -> None:
        """Wake the waiting receives (they return ``[]``), finish what is under way, disconnect. Idempotent.

        Messages in flight stay leased until their leases end. Later calls raise :class:`MailboxClosedError`. Cancelled, it
        leaves the mailbox closed to its users, and what it had not finished is finished when the ``async with`` block ends.
        """
        if self._state.state is MailboxState.CLOSED or self._is_forked():
            return
        opened = self._state.state is MailboxState.OPEN
        self._state.to(MailboxState.CLOSED, anyio.current_time())
        self._usable = False
        off_fork(self)
        if self._open_ones is not None:
            self._open_ones.discard(self)
        self._wake_all()
        if opened:
            await self._close()
        if self._scope is not None:  # not cancelled: its scope holds the body of the `async with` block as well
            await self._scope.stop(timeout=0)

    # ----------------------------------------------------------------------------------------------------- receiving

    async def receive(
        self, *, max_messages: int = 1, visibility_timeout: float = 60, wait_time_seconds: float = 0
    ) -> list[Message[T, R]]:
        """Lease up to ``max_messages`` messages (1 to 1,000) for ``visibility_timeout`` seconds (0 to 43,200).

        Returns what is available as soon as there is one, and never waits to fill the batch. While there is none it waits
        ``wait_time_seconds``, woken at once by a send, an expired lease, the end of a delay, or a close (then ``[]``).

        Bytes that are no JSON do not come out: they go to the dead letters, and their neighbours are returned. A cancelled
        receive has claimed nothing.

        :raises InvalidParameterError: a value is outside its limits.
        :raises MailboxClosedError: the mailbox was closed before the call.
        :raises MailboxConnectionError: the store cannot be reached; nothing was claimed, as far as is known.
        """
        self._check_open()
        check_receive(max_messages, visibility_timeout, wait_time_seconds)
        deadline = anyio.current_time() + wait_time_seconds if wait_time_seconds else 0.0
        while True:
            wait = max(0.0, deadline - anyio.current_time()) if wait_time_seconds else 0.0
            deliveries = await self._claim(max_messages, visibility_timeout, wait)
            if not deliveries:
                return []
            messages, undecodable = self._messages(deliveries)
            buried = await self._bury(undecodable) if undecodable else 0
            if messages or not buried:
                return messages

    def _messages(self, deliveries: list[Delivery]) -> tuple[list[Message[T, R]], list[tuple[Delivery, Dead]]]:
        """What users can be given, and what is no JSON and so belongs to the dead letters."""
        messages: list[Message[T, R]] = []
        undecodable = []
        for delivery in deliveries:
            try:
                messages.append(Message(self, delivery, self._body_of(delivery)))
            except NotJsonError as error:
                undecodable.append((delivery, Dead.of(error)))
            except SerializationError:
                messages.append(Message(self, delivery, None, is_decoded=False))
        return messages, undecodable

    async def _bury(self, undecodable: list[tuple[Delivery, Dead]]) -> int:
        """Dead-letter them; how many that were. One that cannot be just now comes again when its lease ends."""
        buried = 0
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_TIMEOUT):
            for delivery, dead in undecodable:
                try:
                    await self._settle_dead(delivery, dead)
                except MailboxError:
                    continue
                buried += 1
        return buried

    # ------------------------------------------------------------------------- what Message and the engine call

    def settle(self, delivery: Delivery, settlement: Settlement) -> Awaitable[None]:
        """End a delivery (see :class:`Message`)."""
        self._check_open()
        if type(settlement) is Ack and settlement.reply is not None:
            return self._settle_with_reply(delivery, settlement, settlement.reply)
        if type(settlement) is Dead:
            return self._settle_dead(delivery, settlement)
        return self._settle(delivery, settlement)

    async def acknowledge_many(self, messages: Sequence[Message[T, R]]) -> dict[int, Exception]:
        """Acknowledge messages of this mailbox together: in one step, where the backend can do that.

        Returns those that were refused, by their number, with what :meth:`Message.acknowledge` would have raised; all others
        are done. A message that is named twice is acknowledged once, and the second is refused with
        :class:`MessageSettledError`, or as the first was. Raises what hits them all; then none is settled, as far as is known.
        A call that is cancelled may or may not have taken effect.

        :raises MessageSettledError: one of them is settled already; nothing was done.
        :raises MailboxClosedError: the mailbox is not open; nothing was done.
        :raises MailboxConnectionError: the store cannot be reached.
        """
        self._check_open()
        for message in messages:
            message._check_unsettled()  # noqa: SLF001 - Message is this port's own, as below
        once = list(dict.fromkeys(messages))
        for message in once:
            message._settled, message._settling = ACK, True  # noqa: SLF001 - this package's own
        try:
            refused = await self._acknowledge_many([message._delivery for message in once]) if once else {}  # noqa: SLF001 - this package's own
        except Exception:
            for message in once:
                message._settled = None  # noqa: SLF001 - this package's own
            raise
        finally:
            for message in once:
                message._settling = False  # noqa: SLF001 - this package's own
        for number in refused:
            once[number]._settled = None  # noqa: SLF001 - this package's own
        return refused if len(once) == len(messages) else _with_repeats(messages, once, refused)

    async def _settle_dead(self, delivery: Delivery, dead: Dead) -> None:
        """Bury it, and tell its requester, if that can be told: the news may be lost, the message may not."""
        dead = self._obituary(delivery, dead)
        if dead.reply is None:
            await self._settle(delivery, dead)
        else:
            try:
                await self._settle_with_reply(delivery, dead, dead.reply)
            except ReplyNotAvailableError:
                await self._settle(delivery, replace(dead, reply=None))
        self._tell_of_death(delivery.message_id)

    async def _settle_with_reply(self, delivery: Delivery, settlement: Ack | Dead, reply: Envelope) -> None:
        """One step where the reply goes to this store, else send it while the lease is held, then settle."""
        address = reply.reply_to or ""
        local = self._local_name(address)
        if local is not None:
            if not is_name(local):
                raise ReplyNotAvailableError(f"the reply cannot be sent to {address!r}: that is no name of a mailbox")
            await self._settle(delivery, replace(settlement, reply=replace(reply, reply_to=local)))
            return
        if not self._routers:
            raise ReplyNotAvailableError(
                f"the reply cannot be sent to {address!r}, another store than that of mailbox {self.name!r}: open the"
                " mailbox with `async with`, so that it can keep the connection"
            )
        is_result = type(settlement) is Ack
        raw = reply.body if self.serializes else b"null" if reply.body is None else self.reply_codec.encode(reply.body)
        await self._extend(delivery, 0.0)  # shortens nothing, and is refused where the lease is lost
        copy = replace(reply, body=raw, reply_to=None, dedup_key=f"reply:{delivery.message_id}")
        try:
            await self._routers[-1].send(address, copy, self._destination)
        except (MailboxError, OSError):
            if is_result:
                raise
        await self._settle(delivery, replace(settlement, reply=None))

    async def _send_late_reply(self, reply: Envelope) -> None:
        """Send a reply by itself, as its message is settled already: it may be lost where the process dies in between.

        :raises ReplyNotAvailableError: it goes to a store that this process does not know.
        :raises MailboxError: the mailbox that it goes to cannot be opened, or does not take it.
        """
        address = reply.reply_to or ""
        local = self._local_name(address)
        raw = reply.body if self.serializes else b"null" if reply.body is None else self.reply_codec.encode(reply.body)
        box = self._sibling(local) if local is not None else self._destination(address)
        if not box.name.startswith(TRANSIENT) or await box.exists():  # else whoever asked is gone
            async with box:
                await box._send_encoded(replace(reply, body=raw, reply_to=None))  # noqa: SLF001 - this package's own

    def _destination(self, address: str) -> Mailbox[Any, Any]:
        from mainspring.mailbox.replies import destination

        return destination(self, address)

    def _failure_reply(self, message: Message[Any, Any], error: BaseException | str) -> Envelope | None:
        """What tells the requester of ``message`` that there will be no result, or None where nobody wants to hear that."""
        return self._obituary(message._delivery, Dead.of(error)).reply  # noqa: SLF001 - Message is this port's own

    async def _send_encoded(self, envelope: Envelope) -> str:
        """Put an envelope whose body is JSON bytes already: a reply from a mailbox on another store."""
        self._check_open()
        return (await self._put([envelope]))[0]

    def _is_here(self, address: str) -> bool:
        """Whether a reply to that address goes to this store."""
        return self._local_name(address) is not None

    async def extend(self, delivery: Delivery, timeout: float) -> None:
        """Extend a delivery's lease (see :meth:`Message.extend_visibility`)."""
        self._check_open()
        check_seconds("extend_visibility: timeout", timeout, MAX_VISIBILITY)
        await self._extend(delivery, float(timeout))

    async def save_checkpoint(self, delivery: Delivery, state: bytes) -> None:
        """Keep a delivery's checkpoint (see :meth:`Message.save_checkpoint`)."""
        self._check_open()
        if not isinstance(state, bytes):
            raise InvalidParameterError(f"save_checkpoint: the state must be bytes, not {state!r:.100}")
        await self._save_checkpoint(delivery, state)

    def reply_to(self, message: Message[Any, Any], body: Any) -> Envelope:
        """The reply to ``message``, checked and encoded, for :class:`Ack`."""
        return self._reply_envelope(message._delivery, body)  # noqa: SLF001 - Message is this port's own

    def _reply_envelope(self, delivery: Delivery, body: Any) -> Envelope:
        """The reply to ``delivery``, for its ``reply_to``, with the request's id and deadline in its headers."""
        payload = self._payload(self.reply_codec, body)
        headers = {"request_id": delivery.message_id}
        if HEADER in delivery.headers:
            headers[HEADER] = delivery.headers[HEADER]
        return Envelope(self.new_id(), payload, reply_to=delivery.reply_to, headers=headers)

    # -------------------------------------------------------------------------------------------------- looking after

    async def counts(self) -> Counts:
        """Return how many messages are where, and how long the oldest pending one has waited.

        The parts add up to all messages that were ever accepted. :attr:`Counts.queue_age` is in seconds, and None where the
        backend does not tell. The cost does not grow with the number of messages. A cancelled call leaves nothing behind.

        :raises MailboxClosedError: the mailbox is not open.
        :raises MailboxConnectionError: the store does not answer.
        """
        self._check_open()
        return await self._counts()

    def statistics(self) -> MailboxStatistics:
        """Return what this mailbox object is doing: receives that wait, operations that are queued or in flight, batches.

        No call to the store is made. An unopened or closed mailbox has zeros.
        """
        return self._statistics() if self._usable else MailboxStatistics()

    async def approximate_count(self) -> int:
        """How many messages are still to be done: delayed, pending and in flight."""
        return (await self.counts()).waiting

    async def purge(self) -> int:
        """Drop all messages that are delayed, pending or in flight, and return how many that were.

        Their holders' later calls raise :class:`ReceiptHandleExpiredError`. Dead letters stay.
        """
        self._check_open()
        return await self._purge()

    @property
    def address(self) -> str:
        """How a sender names this mailbox in ``reply_to``: its URL where it has one, else its name."""
        return self.name

    def _check_open(self) -> None:
        if not self._usable:
            self._check_process()
            raise MailboxClosedError(
                f"mailbox {self.name!r} is {self._state.state}; use it inside `async with` or under a running LoopGroup"
            )
        if self._thread is not None and self._thread != get_ident():  # a thread has one event loop at a time
            raise ConfigError(
                f"mailbox {self.name!r} is open in the event loop of another thread; open a mailbox of your own here, or"
                " use mailbox.sync"
            )

    def _forget(self) -> None:
        """In a forked child: its connections and its event loop are the parent's."""
        self._usable = False

    def _is_forked(self) -> bool:
        return self._process is not None and not self._process.here

    def _check_process(self) -> None:
        if self._process is not None and not self._process.here and self._state.state is MailboxState.OPEN:
            raise ConfigError(
                f"mailbox {self.name!r} is open in process {self._process.pid}, from which this one was forked, and"
                " must not be used across a fork; open one of its own here (for SQLite: in a process that subprocess or the"
                " spawn method has started)"
            )

    def _check_async_backend(self) -> None:
        if (library := async_library()) not in self.capabilities.async_backends:
            supported = " or ".join(sorted(self.capabilities.async_backends))
            raise ConfigError(
                f"mailbox {self.name!r}: {type(self).__name__} runs on {supported} only, not on {library}: choose that"
                " (`mainspring run --loop`, anyio.run(…, backend=)), or use memory:// where time is virtual"
            )


def _with_repeats(
    messages: Sequence[Message[Any, Any]], once: list[Message[Any, Any]], refused: dict[int, Exception]
) -> dict[int, Exception]:
    """What was refused ``once`` each, by the numbers of ``messages``, of which some are there again."""
    first = {message: number for number, message in reversed(list(enumerate(messages)))}
    errors = {once[number]: error for number, error in refused.items()}
    found: dict[int, Exception] = {}
    for number, message in enumerate(messages):
        try:
            if message in errors:
                found[number] = copied(errors[message])
            elif first[message] != number:
                message._check_unsettled()  # noqa: SLF001 - Message is this port's own
        except MessageSettledError as error:
            found[number] = error
    return found
