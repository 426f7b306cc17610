"""``override``: a group or tasks on mailboxes in memory, in the place of their own."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
from anyio import from_thread

from mainspring.core import random
from mainspring.core.state_machine import MailboxState
from mainspring.errors import ConfigError, MessageSettledError
from mainspring.group.group import LoopGroup
from mainspring.mailbox.dead_letters import DeadLetterBackend
from mainspring.mailbox.limits import no_thread_connection, no_transactions
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.memory.mailbox import KIND, MemoryBackend
from mainspring.mailbox.sync import ThreadConnection
from mainspring.tasks.tasks import Tasks
from mainspring.worker.main_loop import MainLoop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from mainspring.mailbox.backend import Backend
    from mainspring.mailbox.message import ClaimedMessage, Envelope, Message, Settlement


@contextmanager
def override(
    *targets: LoopGroup | Tasks | MainLoop | Mailbox[Any, Any], connection: Any = None, resources: Any = None
) -> Iterator[None]:
    """Keep the messages of groups, tasks, loops and mailboxes in memory inside the block, and open nothing of their stores.

    Everything else is the real thing: loops with their policies and middleware, names, types of bodies, resources. It is a
    plain ``with``, as nothing is opened: the group, or ``async with``, still opens each mailbox, inside the block. Mailboxes on
    one store see each other as there, by name and by URL; so do the mailboxes in ``reply_stores``. Each block begins with
    empty queues. Mailboxes that are in memory anyway stay as they are. A group opens no health server, as its port may be
    taken; :func:`~mainspring.http.app.health_app` serves the same to a test.

    What memory cannot do: messages do not outlive the event loop, and no other process sees them. Limits of a store, such as
    the size of a body, and the restrictions of its driver do not hold; the mailboxes also open on trio.

    :param connection: what ``ctx.transaction()`` yields, in the place of the driver's connection, for a mailbox with
        ``Capabilities.transactions``. The message is settled as the block ends, and calls that were sent with this connection
        appear then; an error takes both back. Writes through it are the stand-in's affair. ``ctx.transaction(session)`` yields
        that session, and commits it or rolls it back by its own methods, if it has them; so in plain handlers. A message that
        is sent with any other connection appears at once, as its COMMIT is not seen.
    :param resources: what ``ctx.resources`` is in the handlers of the groups. Their ``lifespan=`` is not called, and nothing
        opens or closes it. None: it is what the ``lifespan=`` opens.
    :raises ConfigError: a target is none of these, or none is a group that ``resources`` are for. Or a mailbox is open as the
        block begins, or at its end.
    """
    groups = [target for target in targets if isinstance(target, LoopGroup)]
    if resources is not None and not groups:
        raise ConfigError(
            "override: resources are those of a group: give it too, or make one in the test: LoopGroup([tasks.loop()],"
            " lifespan=…)"
        )
    mailboxes = _mailboxes_of(targets)
    _check_closed(mailboxes, "enter override() before anything opens it")
    before = [(mailbox, mailbox.backend) for mailbox in mailboxes]
    settings = [(group, group.settings) for group in groups]
    for group in groups:
        group.settings = replace(group.settings, health_port=None)
        if resources is not None:
            group.settings = replace(group.settings, lifespan=lambda: nullcontext(resources))
    stores: list[_StandInStore] = []
    for mailbox, backend in before:
        if not isinstance(backend, DeadLetterBackend | MemoryBackend) or isinstance(backend, StandIn):
            mailbox.backend = _stand_in(backend, stores, connection)
    for mailbox, backend in before:
        if isinstance(backend, DeadLetterBackend):
            mailbox.backend = backend.renewed()
    try:
        yield
    finally:
        for group, own in settings:
            group.settings = own
        for mailbox, backend in before:
            if mailbox.state is not MailboxState.OPEN:  # else it would close what it has not opened
                mailbox.backend = backend
    _check_closed(
        mailboxes, "end its group, or leave its `async with`, inside the block of override(); it stays in memory"
    )


def _mailboxes_of(targets: tuple[Any, ...]) -> list[Mailbox[Any, Any]]:
    """Return the mailboxes of the targets, with those under views of dead letters and those for replies to other stores."""
    found: dict[Mailbox[Any, Any], None] = {}

    def add(target: Any) -> None:
        if isinstance(target, LoopGroup):
            for loop in target.loops:
                if isinstance(loop, MainLoop):
                    add(loop)
        elif isinstance(target, MainLoop | Tasks):
            add(target.mailbox)
        elif not isinstance(target, Mailbox):
            raise ConfigError(f"override takes groups, tasks, loops and mailboxes, not {target!r:.200}")
        elif target not in found:
            found[target] = None
            if isinstance(target.backend, DeadLetterBackend):
                add(target.backend.source)
            for store in target.reply_stores:
                add(store)

    for target in targets:
        add(target)
    return [*found]


def _check_closed(mailboxes: list[Mailbox[Any, Any]], remedy: str) -> None:
    for mailbox in mailboxes:
        if mailbox.state is MailboxState.OPEN:
            raise ConfigError(f"override: mailbox {mailbox.name!r} is open; {remedy}")


class _StandInStore:
    """What stands in for one store: the original of one of its mailboxes, and what the keys of its queues end with."""

    def __init__(self, original: Backend, connection: Any) -> None:
        self.original = original
        self.connection = connection
        self.mark = f"@{random.token(64)}"

    def has(self, backend: Backend) -> bool:
        """True if ``backend`` is on the original store."""
        return type(backend) is type(self.original) and self.original.local_name(backend.address) is not None

    def key(self, name: str) -> str:
        """Return the key of the queue of that name, which may be such a key."""
        return name if name.endswith(self.mark) else f"{name}{self.mark}"


def _stand_in(backend: Backend, stores: list[_StandInStore], connection: Any) -> StandIn:
    original = backend.original if isinstance(backend, StandIn) else backend  # in a block inside another one
    store = next((store for store in stores if store.has(original)), None)
    if store is None:
        stores.append(store := _StandInStore(original, connection))
    return StandIn(original.name, original, store)


class StandIn(MemoryBackend):
    """A queue in memory that stands in for one of another store. As that, it must be opened."""

    works_unopened: ClassVar[bool] = False

    def __init__(self, name: str, original: Backend, store: _StandInStore, *, capacity: int | None = None) -> None:
        super().__init__(name, capacity=capacity or original.capacity, key=store.key(name))
        self.capabilities = replace(self.capabilities, transactions=original.capabilities.transactions)
        self.original = original
        self._stands_for = store
        self._under_way: dict[str, _StandInTransaction] = {}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"mailbox {self.__dict__.get('name')!r} is in memory inside the block of override(): it has no {name!r}"
        )

    def sibling(self, name: str) -> StandIn:
        bare = name.removesuffix(self._stands_for.mark)
        return StandIn(bare, self.original, self._stands_for)

    def local_name(self, address: str) -> str | None:
        if address.startswith(KIND):
            return super().local_name(address)
        name = self.original.local_name(address)
        return None if name is None else self._stands_for.key(name)

    # --------------------------------------------------------------------------------------------------- transactions

    async def send_within(self, connection: Any, envelopes: list[Envelope]) -> list[str]:
        if not self.capabilities.transactions:
            return await super().send_within(connection, envelopes)
        now = _current.get()
        given = connection.connection if isinstance(connection, ThreadConnection) else connection
        if now is None or given is not now.connection:
            return await self.send(envelopes)
        now.sends.append((self, envelopes))
        return [envelope.message_id for envelope in envelopes]

    @asynccontextmanager
    async def transaction(self, message: Message[Any, Any], connection: Any) -> AsyncIterator[Any]:
        if not self.capabilities.transactions:
            async with super().transaction(message, connection) as given:
                yield given
            return
        given = self._stands_for.connection if connection is None else connection
        if given is None:
            raise ConfigError(
                f"mailbox {self.name!r} is in memory: say what ctx.transaction() is to yield, by override(…, connection=…)"
            )
        this = self._begin(message, given)
        token = _current.set(this)
        try:
            async with nullcontext() if connection is None else _committed(given):
                yield given
                await self._acknowledge(message, this)
            await self._end(message, this)
        finally:
            _current.reset(token)
            self._leave(message, this)

    @contextmanager
    def thread_transaction(self, message: Message[Any, Any], connection: Any) -> Iterator[Any]:
        if not self.capabilities.transactions:
            raise no_transactions(self.name)
        if connection is None:
            raise no_thread_connection()
        this = from_thread.run_sync(self._begin, message, connection)
        token = _current.set(this)
        try:
            with _committed_in_thread(connection):
                yield connection
                from_thread.run(self._acknowledge, message, this)
            from_thread.run(self._end, message, this)
        finally:
            _current.reset(token)
            from_thread.run_sync(self._leave, message, this)

    def _begin(self, message: Message[Any, Any], connection: Any) -> _StandInTransaction:
        handle = message.receipt_handle
        if message.is_settled or handle in self._under_way:
            raise MessageSettledError(
                f"message {message.id}: it is already settled, or in a transaction; open one for each message"
            )
        this = self._under_way[handle] = _StandInTransaction(connection)
        return this

    async def _acknowledge(self, message: Message[Any, Any], this: _StandInTransaction) -> None:
        if this.settlement is None:
            with anyio.CancelScope(shield=True):
                await message.acknowledge()

    async def _end(self, message: Message[Any, Any], this: _StandInTransaction) -> None:
        del self._under_way[message.receipt_handle]
        assert this.settlement is not None
        with anyio.CancelScope(shield=True):
            await super().settle(message.delivery, this.settlement)
            this.ended = True
            for backend, envelopes in this.sends:
                await backend.send(envelopes)

    def _leave(self, message: Message[Any, Any], this: _StandInTransaction) -> None:
        self._under_way.pop(message.receipt_handle, None)
        if not this.ended:
            message.settlement = None

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        under_way = self._under_way.get(delivery.receipt_handle)
        if under_way is None:
            await super().settle(delivery, settlement)
        else:
            store = self._here()
            store.queue.leased(delivery, store.clock())
            under_way.settlement = settlement

    async def acknowledge_many(self, deliveries: list[ClaimedMessage]) -> dict[int, Exception]:
        if not any(delivery.receipt_handle in self._under_way for delivery in deliveries):
            return await super().acknowledge_many(deliveries)
        return await super(MemoryBackend, self).acknowledge_many(deliveries)


@asynccontextmanager
async def _committed(given: Any) -> AsyncIterator[None]:
    """Run the block in a transaction of a connection or session; in none, if it is a stand-in that has no such methods."""
    if hasattr(given, "transaction"):  # asyncpg, psycopg
        async with given.transaction():
            yield
        return
    try:
        yield
    except BaseException:
        if hasattr(given, "rollback"):
            await given.rollback()
        raise
    if hasattr(given, "commit"):
        await given.commit()


@contextmanager
def _committed_in_thread(given: Any) -> Iterator[None]:
    """Do the same on a connection or session that is not async."""
    if hasattr(given, "ensure_connection"):
        with import_module("django.db.transaction").atomic(using=given.alias):
            yield
        return
    if hasattr(given, "transaction"):  # psycopg
        with given.transaction():
            yield
        return
    try:
        yield
    except BaseException:
        if hasattr(given, "rollback"):
            given.rollback()
        raise
    if hasattr(given, "commit"):
        given.commit()


class _StandInTransaction:
    """The block of a transaction: what it yields, how it settles its message, and what is sent at its end."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.settlement: Settlement | None = None
        self.ended = False
        self.sends: list[tuple[StandIn, list[Envelope]]] = []


_current: ContextVar[_StandInTransaction | None] = ContextVar(
    "the transaction that stands in for a store's", default=None
)
