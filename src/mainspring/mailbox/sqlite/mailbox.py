"""A durable mailbox in a SQLite file, shared by the processes of one machine."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Never
from urllib.parse import quote, unquote

import anyio
from pydantic_core import core_schema
from typing_extensions import TypeVar

from mainspring.core import clock
from mainspring.core.process import event_loop
from mainspring.errors import ConfigError, MainspringError
from mainspring.mailbox import batched
from mainspring.mailbox.backend import SHARED_STORE, TRANSIENT, TRANSIENT_LIFE, MailboxStatistics
from mainspring.mailbox.batched import Batcher, Command
from mainspring.mailbox.job_commands import (
    ChangeLimits,
    Find,
    FindRecords,
    ListLimits,
    ListMessages,
    ListRecords,
    ReplaceBody,
    Reschedule,
    SetTask,
    WriteRecord,
)
from mainspring.mailbox.limits import check_column, check_row, lease_over
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.message import Dead, Nack
from mainspring.mailbox.settings import Accepts, Capacity, Options, Text, name_at, number, seconds, with_query
from mainspring.mailbox.sqlite.connection import DatabaseFile
from mainspring.mailbox.sqlite.shared_file import CommandBatch, SharedFile, SQLiteWaiters
from mainspring.mailbox.sqlite.store import JoiningAcknowledge, is_lease
from mainspring.mailbox.sqlite.threads import INSPECT_EVERY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mainspring.mailbox.limiters import LimitChange, LimitState
    from mainspring.mailbox.message import (
        ClaimedMessage,
        Envelope,
        MessagePage,
        MessageQuery,
        RescheduleOutcome,
        Settlement,
        UnfinishedMessage,
    )
    from mainspring.mailbox.records import Record, RecordWrite
    from mainspring.mailbox.settings import MailboxURL
    from mainspring.runtime.scope import DaemonScope

T = TypeVar("T", default=Any)
R = TypeVar("R", default=Any)


class SQLiteMailbox(Mailbox[T, R]):
    """A queue in a SQLite file; several queues (names) and several processes can share one file.

    Operations of concurrent callers, of all mailboxes that this process has on the file, are committed together by one thread.
    A send returns once the message is on disk. Leases follow the clock since boot, so that a changed date does not touch them,
    and end with the boot. Delays and expiries are dates, so that they outlast a restart of the machine. Beside the file lie its
    ``-wal`` and ``-shm`` files, and a directory ``-wake`` through which processes wake each other. The file must be on a local
    disk, and must not be used across a fork.

    :param path: of the file, made where there is none; its directory must exist.
    :param name: of the queue in the file.
    :param body: the type of the bodies; else the handler's annotation gives it, else anything that JSON can say.
    :param reply: the type of the replies.
    :param synchronous: ``"full"``: what has returned survives a power cut. ``"normal"`` waits for no disk: it survives the
        end of the process, but a power cut can take the last moments back.
    :param capacity: how many messages may wait (delayed, pending, in flight) before a send through this object raises
        :class:`MailboxFullError`; None: as many as the disk holds.
    :param busy_timeout: seconds to wait for another process's transaction before :class:`MailboxConnectionError`.
    :raises ConfigError: a value cannot work. On opening: the file is another program's, or of a newer Mainspring.
    """

    backend: SQLiteBackend

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "default",
        body: Any = None,
        reply: Any = None,
        synchronous: str = "full",
        capacity: int | None = None,
        busy_timeout: float = 5.0,
        **unknown: Never,
    ) -> None:
        file = os.fspath(path)
        if file.startswith("sqlite://"):
            raise ConfigError(f"SQLiteMailbox takes a path, and {file!r} is a URL: that is for open_mailbox()")
        if not file or file == ":memory:" or file.endswith("/") or "\0" in file:
            raise ConfigError(f"a SQLite mailbox needs the path of a file, not {file!r}; in memory is memory://{name}")
        options = SQLiteOptions.of(
            f"sqlite:///{file}",
            name=name,
            synchronous=synchronous,
            capacity=capacity,
            busy_timeout=busy_timeout,
            **unknown,
        )
        super().__init__(SQLiteBackend(os.path.realpath(file), options), body=body, reply=reply)

    @classmethod
    def from_url(cls, url: str, *, body: Any = None, reply: Any = None, **options: Any) -> SQLiteMailbox[Any, Any]:
        """Return the mailbox that a ``sqlite:///`` URL means; its options can stand in the query."""
        place, given = with_query(url, options, SQLiteOptions)
        if place.places:
            raise ConfigError(
                f"{url!r} names the host {place.places!r}; a file is sqlite:///relative.db or sqlite:////absolute/path.db"
            )
        return cls(unquote(place.path)[1:], body=body, reply=reply, **given)

    @property
    def path(self) -> str:
        """The absolute path of its file."""
        return self.backend.path

    @property
    def transactions(self) -> int:
        """How many transactions this process has committed to the file, for all its mailboxes, since it first opened it."""
        return self.backend.transactions


class SQLiteOptions(Options):
    """The options of a :class:`SQLiteMailbox`."""

    kind: ClassVar[str] = "a SQLite mailbox"
    schemes: ClassVar[tuple[str, ...]] = ("sqlite",)

    name: Text
    synchronous: Annotated[
        Literal["full", "normal"], Accepts(core_schema.literal_schema(["full", "normal"]), "'full' or 'normal'")
    ]
    capacity: Capacity
    busy_timeout: Annotated[float, Accepts(number(seconds(0)), "a number of seconds from 0")]


class SQLiteBackend(batched.BatchedBackend):
    """A queue in the file at ``path``."""

    capabilities = SHARED_STORE
    waiters: SQLiteWaiters

    def __init__(self, path: str, options: SQLiteOptions) -> None:
        super().__init__(options.name, options.capacity)
        self.path = path
        self._options = options
        self._shared: SharedFile | None = None
        self._number = 0

    @property
    def address(self) -> str:
        """Its URL, with the absolute path."""
        return f"sqlite:///{quote(self.path)}?name={quote(self.name, safe='')}"

    @property
    def transactions(self) -> int:
        """See :attr:`SQLiteMailbox.transactions`."""
        return 0 if self._shared is None else self._shared.file.transactions

    def local_name(self, address: str) -> str | None:
        return name_at(address, SQLiteOptions, self._is_here)

    def _is_here(self, url: MailboxURL) -> bool:
        return not url.places and os.path.realpath(unquote(url.path)[1:]) == self.path

    # ---------------------------------------------------------------------------------------------------- life cycle

    async def exists(self) -> bool:
        SharedFile.shared(self.path)  # which refuses in a process that was forked from a user of the file
        file = DatabaseFile(self.path)
        file.busy_timeout = self._options.busy_timeout
        with clock.real_work():
            return await anyio.to_thread.run_sync(file.has_mailbox, self.name, limiter=anyio.CapacityLimiter(1))

    async def open(self, scope: DaemonScope) -> None:
        shared = SharedFile.shared(self.path)
        shared.acquire(self._options.synchronous, self._options.busy_timeout)
        self._shared = shared
        self._real = clock.virtual_clock() is None
        self._loop = event_loop()
        self._new_event = anyio.lowlevel.current_token().backend_class.create_event  # as anyio.Event() finds it
        self._boot = clock.boot_clock()
        self._wall = clock.wall_clock()
        self._real_work = clock.work_holder()
        alarms = self.begin_timers(scope)
        self._sweep_alarm = alarms.alarm(self._sweep_due)
        self.open_line(SQLiteWaiters(alarms, self.sweep_in, self.notifications))
        self._scope = scope
        self._batcher = Batcher(
            self._execute, resume=self._until_executed, undo=self.undo, name=f"mailbox {self.name!r}"
        )
        try:
            opening = batched.Open(self.name)
            await self._execute([opening])
            if opening.error is not None:
                raise opening.error
        except BaseException:
            self.end_timers()
            await self._release()
            raise
        self._number = self.waiters.mailbox = opening.result
        self._keep_at = self._now() + TRANSIENT_LIFE / 24 if self.name.startswith(TRANSIENT) else math.inf
        self.notifications.cancelled.on_demand = self.notifications.results.on_demand = self._listen_on_demand
        shared.add_waiters(self.waiters)
        scope.start_soon(self._batcher.run, name=f"mailbox {self.name} batches", stop=self._batcher.stop)

    def statistics(self) -> MailboxStatistics:
        batcher = self._batcher
        return MailboxStatistics(
            waiting_receives=self.waiters.parked,
            queued=batcher.queued,
            in_flight=batcher.in_flight,
            batches=batcher.batches,
            connected=True,
        )

    async def close(self) -> None:
        try:
            await self._batcher.close()
        finally:
            self._sweep_alarm.end()
            self.end_timers()
            if self._shared is not None:
                self._shared.remove_waiters(self.waiters)
            await self._release()

    async def _release(self) -> None:
        """Leave the file; waits for the last user's connection to close."""
        shared = self._shared
        if shared is None:
            return
        released = anyio.Event()
        shared.release(CommandBatch((), self._boot, 0.0, self._loop, released.set))
        with self._real_work():
            await released.wait()

    async def _execute(self, commands: list[Command]) -> None:
        """Have commands executed by the writer thread."""
        assert self._shared is not None
        self._executed = self._new_event()
        self._submitted = commands
        self._submitted_at = self._now()
        self._shared.submit(
            CommandBatch(commands, self._boot, self._wall(), self._loop, self._executed.set, self._real)
        )
        await self._until_executed()

    async def _until_executed(self) -> None:
        """Wait for the writer thread. Where that is cancelled, the batcher calls this anew."""
        with self._real_work():
            await self._executed.wait()
        for command in self._submitted:
            if type(command) is batched.Claim and command.result:
                for delivery in command.result:
                    delivery.leased_at = self._submitted_at

    def sweep_in(self, seconds: float) -> None:
        """Sweep in ``seconds`` at the latest: something may be due then."""
        if (when := self._now() + seconds) < self._sweep_alarm.due:
            self._sweep_alarm.wake_by(when)

    def _sweep_due(self, overslept: float) -> float:
        self.waiters.announced = math.inf
        if self.waiters.parked:
            self._scope.start_soon(self._sweep, name=f"mailbox {self.name} sweep")
        return math.inf

    async def _sweep(self) -> None:
        """Have done what is due, on behalf of the claims that wait."""
        try:
            await self.call(batched.Sweep())
        except MainspringError:  # the receives themselves will hear of it
            self.sweep_in(INSPECT_EVERY)

    # ----------------------------------------------------------------------------------------------------- messages

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        for envelope in envelopes:
            check_row("a message", envelope)
        ids: list[str] = await self.call(batched.Send(envelopes, self._capacity))
        return ids

    async def _keep(self) -> None:
        """Say that this transient mailbox is in use; one that was forgotten meanwhile (the machine slept) is made anew."""
        self._keep_at = self._now() + TRANSIENT_LIFE / 24
        self._number = await self._batcher.call(batched.Open(self.name))
        if self._shared is not None and self._number != self.waiters.mailbox:
            self._shared.remove_waiters(self.waiters)
            self.waiters.mailbox = self._number
            self._shared.add_waiters(self.waiters)

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        command: Command
        if isinstance(settlement, Nack):
            command = batched.NackCommand(delivery, settlement)
        elif isinstance(settlement, Dead):
            command = batched.DeadLetterCommand(delivery, _writable(settlement))
        elif settlement.reply is None:
            for error in (await self.call(JoiningAcknowledge([delivery], settlement.result))).values():
                raise error
            return
        else:
            check_row("a reply", settlement.reply)
            command = batched.Reply(delivery, settlement)
        await self.call(command)

    async def acknowledge_many(self, deliveries: list[ClaimedMessage]) -> dict[int, Exception]:
        return await self.call(JoiningAcknowledge(deliveries))  # type: ignore[no-any-return]

    async def checkpoint(self, delivery: ClaimedMessage, state: bytes) -> None:
        check_column("a checkpoint", len(state))
        await super().checkpoint(delivery, state)

    async def find(self, message_ids: list[str]) -> list[UnfinishedMessage]:
        return await self.call(Find(message_ids))  # type: ignore[no-any-return]

    async def reschedule(self, message_id: str, delay: float) -> RescheduleOutcome:
        return await self.call(Reschedule(message_id, delay))  # type: ignore[no-any-return]

    async def replace_body(self, message_id: str, body: Any) -> RescheduleOutcome:
        check_column("a message", len(body))
        return await self.call(ReplaceBody(message_id, body))  # type: ignore[no-any-return]

    async def list_messages(self, query: MessageQuery) -> MessagePage:
        return await self.call(ListMessages(query))  # type: ignore[no-any-return]

    async def change_limits(self, changes: list[LimitChange]) -> None:
        await self.call(ChangeLimits(changes))

    async def set_task(self, delivery: ClaimedMessage, task: str) -> bool:
        return bool(await self.call(SetTask(delivery, task)))

    async def limits(self) -> list[LimitState]:
        return await self.call(ListLimits())  # type: ignore[no-any-return]

    async def write_record(self, write: RecordWrite, envelopes: Sequence[Envelope] = ()) -> int | None:
        for envelope in envelopes:
            check_row("a message", envelope)
        return await self.call(WriteRecord(write, list(envelopes), self._capacity))  # type: ignore[no-any-return]

    async def find_records(self, kind: str, keys: list[str]) -> list[Record]:
        return await self.call(FindRecords(kind, keys))  # type: ignore[no-any-return]

    async def list_records(self, kind: str, limit: int, after: str | None) -> list[Record]:
        return await self.call(ListRecords(kind, limit, after))  # type: ignore[no-any-return]

    async def call(self, command: Command) -> Any:
        if self._now() >= self._keep_at:
            await self._keep()
        command.mailbox = self._number
        if isinstance(command, batched.OfDelivery) and not is_lease(command.delivery.receipt_handle):
            raise lease_over(command.delivery)
        return await self._batcher.call(command)

    def _listen_on_demand(self, wanted: bool) -> None:
        if wanted and self._shared is not None and self._real and not self.waiters.closed:
            self._shared.listen()

    def sibling(self, name: str) -> SQLiteBackend:
        return SQLiteBackend(self.path, self._options.with_values(name=name, capacity=None))


def _writable(dead: Dead) -> Dead:
    """Make the texts of an error valid UTF-8: they quote whatever went wrong."""
    error, kind, trace = (_text(part) for part in (dead.error, dead.error_type, dead.traceback))
    return replace(dead, error=error, error_type=kind, traceback=trace)


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
