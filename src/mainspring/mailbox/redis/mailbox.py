"""A mailbox on a Redis (or Valkey) server, shared by processes on many machines."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from mainspring.core.loggers import Logger
from mainspring.errors import ConfigError, InvalidParameterError, MailboxConnectionError, MainspringError
from mainspring.mailbox import batched
from mainspring.mailbox.backend import SHARED_STORE, MailboxStatistics
from mainspring.mailbox.batched import AcknowledgeMany, BatchedBackend, Batcher
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
from mainspring.mailbox.limits import SILENCE, check_real_time, check_size
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.message import Ack, Dead
from mainspring.mailbox.redis.commands import (
    AGAIN,
    MICRO,
    MOST_DEAD,
    TAKES,
    FetchBodies,
    RedisClaim,
    RedisOpen,
    RedisSweep,
    WakeOthers,
    base_of,
    check_command,
    delivery_of,
    micros,
    recovery_of,
    stored_size,
)
from mainspring.mailbox.redis.records import ReplyWithResult
from mainspring.mailbox.redis.settings import FALLBACK, RECOVERY, RedisOptions, RedisServer
from mainspring.mailbox.settings import name_at, reads_query

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mainspring.mailbox.batched import Command
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
    from mainspring.mailbox.redis.client import Client, OtherNodes
    from mainspring.mailbox.redis.listener import RedisWaiters
    from mainspring.mailbox.redis.shared_server import SharedServer
    from mainspring.runtime.scope import DaemonScope

T = TypeVar("T")
R = TypeVar("R")
_log = Logger("mainspring.mailbox")

LINGER = 0.1
"""Seconds for which this process stays on the list of waiters after a receive that has waited in vain: as a rule, the next
one comes at once."""
MOST_AT_ONCE = 250_000
"""Messages of one ``send_many``: all or none are stored, in one call, and the server serves no other client meanwhile."""


class RedisMailbox(Mailbox[T, R]):
    """A queue on a Redis server that any number of processes on any number of machines can share.

    Operations of concurrent callers leave together: one call of a function on the server does all of them in one step. Leases,
    delays and expiries are by the server's clock.

    A send returns once the server has the message. Whether the message outlives the server depends on the server's settings:
    opening logs a warning once for a server without ``appendonly yes``, and does not look at ``appendfsync``. One ``send_many``
    takes up to 250,000 messages (:class:`InvalidParameterError` beyond).

    All mailboxes of a process and event loop with the same server, database, login, TLS options, ``timeout`` and ``silence``
    share two connections. One is for calls; on the other the server tells of new messages. In a cluster each mailbox object
    has two of its own.

    :param url: ``redis://[user:password@]host:6379/0``, ``rediss://…`` (TLS), ``redis+sentinel://host:26379,host/service/0``,
        ``redis+cluster://host:6379,host``. The other parameters can stand in its query instead, as in ``?name=jobs``, but for
        ``body`` and ``reply``.
    :param name: of the queue.
    :param body: the type of the bodies; else the handler's annotation gives it, else anything that JSON can say.
    :param reply: the type of the replies.
    :param capacity: how many messages may wait (delayed, pending, in flight) before a send through this object raises
        :class:`MailboxFullError`; None: as many as the server's memory holds.
    :param timeout: seconds that a call, connecting included, or the opening may take before :class:`MailboxConnectionError`.
    :param silence: seconds after which a connection on which the server answers nothing is replaced, and an idle one is
        pinged before a call.
    :param fallback_interval: seconds after which a waiting receive claims by itself, in case that a notification was lost.
    :param recovery_interval: seconds between two searches, of all processes together, for messages that no index has, as after
        the deletion of a key. They become pending again, with a warning in the log.
    :param allow_eviction: open also on a server that evicts keys when its memory is full, and loses messages by that.
    :param options: ``username``, ``password``, ``sentinel_password``; for TLS ``ca_file``, ``cert_file``, ``key_file``, or
        ``ssl_context``.
    :raises ConfigError: a value cannot work, or the extra is missing. On opening: the server refuses the login or a
        command that is needed, is too old, or evicts keys.
    """

    backend: RedisBackend

    @reads_query(RedisOptions)
    def __init__(
        self,
        url: str,
        *,
        name: str = "default",
        body: Any = None,
        reply: Any = None,
        capacity: int | None = None,
        timeout: float = 5.0,
        silence: float = SILENCE,
        fallback_interval: float = FALLBACK,
        recovery_interval: float = RECOVERY,
        allow_eviction: bool = False,
        **options: Any,
    ) -> None:
        _need_driver()
        checked = RedisOptions.of(
            url,
            name=name,
            capacity=capacity,
            timeout=timeout,
            silence=silence,
            fallback_interval=fallback_interval,
            recovery_interval=recovery_interval,
            allow_eviction=allow_eviction,
            **options,
        )
        super().__init__(RedisBackend(RedisServer.of(url, checked), checked), body=body, reply=reply)

    @classmethod
    def from_url(cls, url: str, *, body: Any = None, reply: Any = None, **options: Any) -> RedisMailbox[Any, Any]:
        """Return the mailbox that a URL means; its options can stand in the query."""
        return cls(url, body=body, reply=reply, **options)


class RedisBackend(BatchedBackend):
    """A queue on a Redis server."""

    waiters: RedisWaiters
    _shared: SharedServer

    capabilities = SHARED_STORE

    def __init__(self, server: RedisServer, options: RedisOptions) -> None:
        super().__init__(options.name, options.capacity)
        self._server = server
        self._options = options
        self._client: Client | None = None

    @property
    def address(self) -> str:
        """Return its URL, without a login: a worker on another store has its own login among its ``reply_stores``."""
        return f"{self._server.address}?name={quote(self.name, safe='')}"

    def local_name(self, address: str) -> str | None:
        return name_at(address, RedisOptions, self._server.is_at)

    # ---------------------------------------------------------------------------------------------------- life cycle

    async def open(self, scope: DaemonScope) -> None:
        from mainspring.mailbox.redis.client import Client, OtherNodes
        from mainspring.mailbox.redis.topology import Topology

        check_real_time(self.name, "a Redis")
        self._scope = scope
        self._topology = Topology(self._server, base_of(self.name))
        self._client = client = Client(self._topology, self.timeout, self._options.silence)
        client.on_silence = self.fail_claims
        self._other_nodes: OtherNodes = OtherNodes(self._topology, self.timeout)
        try:
            await client.within_timeout(partial(self._open, client))
        except BaseException:
            await client.close()
            raise
        scope.start_soon(self._batcher.run, name=f"mailbox {self.name} batches", stop=self._batcher.stop)

    async def _open(self, client: Client) -> None:
        from mainspring.mailbox.redis.shared_server import SharedServer
        from mainspring.mailbox.redis.topology import check

        await client.connect()
        await client.ask(check, self.name, self._server.address, self._options.allow_eviction)
        self._shared = SharedServer.of(self._topology)
        self._prepare(client)
        self._shared.task.join(self._scope)
        try:
            await self._make_known()
            await self._shared.listener.add(self._subscription)
        except BaseException:
            self._end_alarms()
            self._shared.task.leave(self._scope)
            raise

    def _prepare(self, client: Client) -> None:
        from mainspring.mailbox.redis.client import Batches
        from mainspring.mailbox.redis.listener import ListenerEvents, RedisWaiters, Subscription

        alarms = self.begin_timers(self._scope)
        waiters = RedisWaiters(self._wake_others, self._put_back, alarms)
        self.open_line(waiters)
        self._sweep_alarm = alarms.alarm(self._sweep_due)
        self._recovery_alarm = alarms.alarm(self._recovery_due)
        self._leave_alarm = alarms.alarm(self._leave_idle)
        self._recovers = False  # with the next sweep
        self._probes = False  # the next sweep is made even if no claim waits
        self._found_empty: tuple[int, int] | None = None  # of the last claim: `signals` before it, and its lease
        self._held: list[tuple[int, ClaimedMessage]] = []  # messages with their leases, for claims that are out
        events = ListenerEvents(
            due=self.sweep_in,
            cancelled=self.notifications.cancelled.publish,
            results=self.notifications.results.publish,
            claimed=self._give,
            leave=self._post,
            lost=self._listener_lost,
        )
        self._subscription = Subscription(base_of(self.name), client, waiters, events)
        self._subscription.wants_results = self.notifications.results.is_wanted
        self.notifications.results.on_demand = self._results_wanted
        self._batches = Batches(
            self.name,
            client,
            self.timeout,
            waiter=self._subscription.waiter,
            on_due=self.sweep_in,
            on_unconfirmed=self._sweep_soon,
            on_late=partial(self._start, client.abandon),
            alarms=alarms,
        )
        self._batcher = Batcher(
            self._batches.execute, undo=self.undo, resume=self._batches.resume, name=f"mailbox {self.name!r}"
        )

    def _start(self, act: Callable[[], Awaitable[None]]) -> None:
        self._scope.start_soon(act, name=f"mailbox {self.name} trouble")

    @property
    def timeout(self) -> float:
        """Seconds that a call may take."""
        return self._options.timeout

    async def _make_known(self) -> None:
        """Make the mailbox known; raise :class:`ConfigError` if the user or its keys do not allow its operations."""
        from mainspring.mailbox.redis.connection import ServerError

        recovers = not self.name.startswith("~")  # one for replies lives no longer than its requester
        opening = RedisOpen(self.name, self._options.recovery_interval if recovers else None)
        try:
            await self._batches.execute([opening])
        except ServerError as error:
            if error.code not in {"NOPERM", "WRONGTYPE"}:
                raise
            opening.result = [f"has no use of it: {error.code} {error.detail}"], 0, 0.0
        if opening.error is not None:
            raise opening.error
        obstacles, found, again = opening.result
        if obstacles:
            raise ConfigError(
                f"mailbox {self.name!r}: the user of the URL {', '.join(obstacles)}; grant the commands with ACL SETUSER"
                " (how-to/redis says which), and rename keys that are another program's"
            )
        if recovers:
            self._recovered(found, again)

    def statistics(self) -> MailboxStatistics:
        client, subscription, batcher = self._client, self._subscription, self._batcher
        assert client is not None
        return MailboxStatistics(
            waiting_receives=self.waiters.parked,
            queued=batcher.queued,
            in_flight=batcher.in_flight,
            batches=batcher.batches,
            unconfirmed=self._batches.unconfirmed,
            reconnects=client.reconnects + subscription.reconnects,
            connected=subscription.live and client.failed_at <= subscription.live_since,
            polling=not subscription.live,
        )

    async def exists(self) -> bool:
        from mainspring.mailbox.redis.client import has_mailbox

        return await has_mailbox(self._server, self.name, self._options.timeout)

    async def close(self) -> None:
        client = self._client
        assert client is not None
        try:
            if client.connected:
                self._subscription.leave(for_good=True)
            await self._batcher.close()
        finally:
            self._end_alarms()
            await client.close()
            await self._other_nodes.close()
            await self._shared.listener.remove(self._subscription)
            self._shared.task.leave(self._scope)

    def _end_alarms(self) -> None:
        self._shared.sweeper.withdraw(self)
        self._batches.end()
        for alarm in (self._sweep_alarm, self._recovery_alarm, self._leave_alarm):
            alarm.end()
        self.end_timers()

    # ----------------------------------------------------------------------------------------------------- messages

    async def call(self, command: Command) -> Any:
        check_command(command, self._topology.longest)
        while (result := await self._batcher.call(command)) is AGAIN:
            command.done = False
        return result

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        if len(envelopes) > MOST_AT_ONCE:
            raise InvalidParameterError(
                f"send_many: a Redis mailbox takes at most {MOST_AT_ONCE:,} messages at once, not {len(envelopes):,}"
            )
        longest = self._topology.longest
        for envelope in envelopes:
            is_plain = not envelope.headers and envelope.reply_to is None and envelope.dedup_key is None
            if not is_plain or len(envelope.body) >= longest:
                check_size("a message", stored_size(envelope), longest, TAKES)
        command = batched.Send(envelopes, self._capacity)
        while (ids := await self._batcher.call(command)) is AGAIN:
            command.done = False
        sent: list[str] = ids
        return sent

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if isinstance(settlement, Ack):
            reply = settlement.reply
            if reply is not None and await self._has_sent_reply(delivery, reply):
                settlement = replace(settlement, reply=None)
            if settlement.result is not None:
                await self.call(ReplyWithResult(delivery, settlement))
                return
            if settlement.reply is not None:
                await self.call(batched.Reply(delivery, settlement))
                return
            for error in (await self._batcher.call(AcknowledgeMany([delivery]))).values():
                raise error
        elif isinstance(settlement, Dead):
            reply = settlement.reply
            if reply is not None and await self._has_sent_reply(delivery, reply):
                settlement = replace(settlement, reply=None)
            await self.call(batched.DeadLetterCommand(delivery, settlement))
        else:
            await self.call(batched.NackCommand(delivery, settlement))

    async def acknowledge_many(self, deliveries: list[ClaimedMessage]) -> dict[int, Exception]:
        not_held: dict[int, Exception] = await self._batcher.call(AcknowledgeMany(deliveries))
        return not_held

    async def _has_sent_reply(self, delivery: ClaimedMessage, reply: Envelope) -> bool:
        """Send the reply before the settlement, in a cluster: its mailbox may be on another node. Else return False."""
        if not self._topology.cluster:
            return False
        await self.extend(delivery, 0.0)  # shortens nothing, and is refused where the lease is lost
        await self._other_nodes.send(reply, delivery.message_id)
        return True

    async def find(self, message_ids: list[str]) -> list[UnfinishedMessage]:
        return await self._readable(await self.call(Find(list(dict.fromkeys(message_ids)))))

    async def _readable(self, found: list[UnfinishedMessage]) -> list[UnfinishedMessage]:
        """Fetch the bodies that are kept apart. Leave out a message whose body is gone: the message is gone as well."""
        apart = [one.message for one in found if one.message.body is None]
        if not apart:
            return found
        await self._batcher.call(FetchBodies(apart))
        return [one for one in found if one.message.is_readable]

    async def reschedule(self, message_id: str, delay: float) -> RescheduleOutcome:
        outcome: RescheduleOutcome = await self.call(Reschedule(message_id, delay))
        return outcome

    async def replace_body(self, message_id: str, body: Any) -> RescheduleOutcome:
        check_size("a body", len(body), self._topology.longest, TAKES)
        outcome: RescheduleOutcome = await self.call(ReplaceBody(message_id, body))
        return outcome

    async def list_messages(self, query: MessageQuery) -> MessagePage:
        page: MessagePage = await self.call(ListMessages(query))
        return page._replace(messages=await self._readable(page.messages))

    # --------------------------------------------------------------------------------------------------------- limits

    async def change_limits(self, changes: list[LimitChange]) -> None:
        """Change limits in one step. Of many messages that wait, some become ready with it, and the rest soon after."""
        await self.call(ChangeLimits(changes))

    async def set_task(self, delivery: ClaimedMessage, task: str) -> bool:
        return bool(await self.call(SetTask(delivery, task)))

    async def limits(self) -> list[LimitState]:
        states: list[LimitState] = await self.call(ListLimits())
        return states

    # -------------------------------------------------------------------------------------------------------- records

    async def write_record(self, write: RecordWrite, envelopes: Sequence[Envelope] = ()) -> int | None:
        for envelope in envelopes:
            check_size("a message", stored_size(envelope), self._topology.longest, TAKES)
        version: int | None = await self.call(WriteRecord(write, list(envelopes), self._capacity))
        return version

    async def find_records(self, kind: str, keys: list[str]) -> list[Record]:
        records: list[Record] = []
        keys = list(dict.fromkeys(keys))
        while keys:
            some, looked_up = await self.call(FindRecords(kind, keys))
            records += some
            keys = keys[looked_up:]
        return records

    async def list_records(self, kind: str, limit: int, after: str | None) -> list[Record]:
        records: list[Record] = []
        while len(records) < limit:
            some, after = await self.call(ListRecords(kind, limit - len(records), after))
            records += some
            if after is None:
                break
        return records

    # --------------------------------------------------------------------------------------------------- dead letters

    async def dead_letters(self, limit: int, after: str | None) -> list[tuple[ClaimedMessage, Dead, float]]:
        letters: list[tuple[ClaimedMessage, Dead, float]] = []
        while len(letters) < limit:
            most = min(limit - len(letters), MOST_DEAD)
            page = await super().dead_letters(most, after)
            letters += page
            if len(page) < most:
                break
            after = page[-1][0].message_id
        return letters

    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        return await self._in_steps(super().replay_dead_letters, message_ids)

    async def purge_dead_letters(self, message_ids: list[str] | None) -> int:
        return await self._in_steps(super().purge_dead_letters, message_ids)

    async def _in_steps(self, act: Callable[[list[str] | None], Awaitable[int]], message_ids: list[str] | None) -> int:
        """Do something to dead letters: to those with the ids in one step, to all in several; return their number."""
        if message_ids is not None:
            return await act(message_ids)
        done, most = 0, (await self.counts()).dead  # not also what dies meanwhile
        while done < most:
            some = await act(None)
            done += some
            if some < MOST_DEAD:
                break
        return done

    # ----------------------------------------------------------------------------------------------------- receiving

    async def claim(
        self, max_messages: int, visibility_timeout: float, wait_time_seconds: float
    ) -> list[ClaimedMessage]:
        if not wait_time_seconds:
            found = await self.claim_once(max_messages, visibility_timeout, waits=False)
        else:
            waiters, visible = self.waiters, micros(visibility_timeout)
            waiters.active += 1
            waiters.wanted[visible] = waiters.wanted.get(visible, 0) + 1
            self.sweep_in(self._options.fallback_interval)
            is_late = False
            try:
                found = await super().claim(max_messages, visible / MICRO, wait_time_seconds)
                is_late = not found and not waiters.closed
            finally:
                waiters.active -= 1
                waiters.wanted[visible] -= 1
                if not waiters.wanted[visible]:
                    while (held := self._take_held(visible)) is not None:
                        self._put_back(held)
                    if is_late:
                        self._leave_alarm.wake_by(self._now() + LINGER)
                    else:
                        self._leave_idle()
        for delivery in found:
            if delivery.body is None:
                return await self._with_bodies(found)
        return found

    async def _with_bodies(self, found: list[ClaimedMessage]) -> list[ClaimedMessage]:
        """Fetch the bodies that are kept apart. If that fails, or the mailbox is closed meanwhile, undo the claim."""
        fetched = False
        try:
            if not self.waiters.closed:
                await self._batcher.call(FetchBodies([delivery for delivery in found if delivery.body is None]))
                fetched = not self.waiters.closed
        finally:
            if not fetched:
                self._batcher.post(batched.Unclaim(found))
        return found if fetched else []

    def _leave_idle(self, overslept: float = 0.0) -> float:
        """Take this process off the list, as far as no receive waits."""
        waiters, subscription = self.waiters, self._subscription
        if subscription.listed and not waiters.active:
            subscription.leave()
        left = False
        for visible, receives in list(waiters.wanted.items()):
            if not receives:
                del waiters.wanted[visible]
                left = subscription.no_longer_wanted(visible) or left
        if left:
            self._list_again()
        return math.inf

    async def claim_once(self, limit: int, visibility: float, *, waits: bool) -> list[ClaimedMessage]:
        if not waits:
            return await super().claim_once(limit, visibility, waits=False)
        waiters, visible = self.waiters, micros(visibility)
        if self._held and not waiters.closed and (held := self._take_held(visible)) is not None:
            return [held]
        seen = waiters.signals
        if waiters.active == 1 and self._found_empty == (seen, visible) and self._subscription.is_listed(visible):
            return []  # a message would have woken this process, which has been on the list since the last claim
        found: list[ClaimedMessage] = []
        try:
            found = await super().claim_once(limit, visibility, waits=True)
            self._found_empty = None if found else (seen, visible)
        finally:
            if not found or waiters.active > 1:
                self._subscription.waiter(visible, listed=True)
        if found and waiters.signals != seen:  # woken meanwhile: for these, or for more
            waiters.pass_turn_on()
        return found

    def new_claim(self, limit: int, visibility: float, waits: bool) -> RedisClaim:
        return RedisClaim(limit, visibility, waits, self._batches.claimant, bool(self.waiters.parked))

    def _give(self, claim: int, strings: list[bytes], is_doubtful: bool) -> None:
        """Give a message that the server has claimed for this process to a claim that waits, or undo its claim.

        That is undone also if ``is_doubtful``: it may have been undone already, and the message be another process's.

        A claim that is out just now, and has put this process on the list again, takes it when it is back. If the message went
        back instead, the server would send it to that claim at once, which is still out: and so on, without end.
        """
        visible, token, value, *rest = strings
        leased_at = min(self._now(), claim / MICRO + self._batches.clock_offset)
        details = dict(zip(rest[::2], rest[1::2], strict=True)) if rest else None
        delivery = delivery_of(token, value, details, leased_at)
        if self.waiters.closed or is_doubtful:
            self._put_back(delivery)
        elif not self.waiters.give(delivery, int(visible) / MICRO):
            if self.waiters.wanted.get(int(visible)):
                self._held.append((int(visible), delivery))
            else:
                self._put_back(delivery)
        self.waiters.signals += 1  # this process is off the list: a claim that is about to wait looks once more
        self._list_again()

    def _take_held(self, visible: int) -> ClaimedMessage | None:
        """Take a message out that is held for a claim of such a lease, if there is one."""
        for number, (lease, _) in enumerate(self._held):
            if lease == visible:
                return self._held.pop(number)[1]
        return None

    def _list_again(self) -> None:
        """Put this process back on the list of waiters, if claims wait."""
        if self.waiters.parked:
            self._batcher.post(RedisSweep(self._waiter))

    def _waiter(self) -> str:
        """Return the name on the list for the claim that has waited longest; "" if none waits."""
        visibility = self.waiters.visibility
        return "" if visibility is None else self._subscription.waiter(micros(visibility), listed=True)

    def _put_back(self, delivery: ClaimedMessage) -> None:
        self._batcher.post(batched.Unclaim([delivery]))

    def _wake_others(self, count: int) -> None:
        """Wake other processes: this one was woken for messages that no claim here takes."""
        if self._client is not None and self._client.connected and not self.waiters.closed:
            self._batcher.post(WakeOthers(count))

    def _results_wanted(self, wanted: bool) -> None:
        """Hear of results from the first time that they are wanted until the mailbox is closed."""
        if wanted and not (self.waiters.closed or self._subscription.hears_results):
            self._start(partial(self._shared.listener.hear_results, self._subscription))

    def _post(self, command: Command) -> None:
        self._batcher.post(command)

    # ----------------------------------------------------------------------------------------------- what is due

    def _sweep_due(self, overslept: float) -> float:
        """Have the library wake the claims that wait. With unconfirmed operations a call of its own is made in any case."""
        now, interval = self._now(), self._options.fallback_interval
        if self._batches.unconfirmed or self._probes:
            self._probes = False
            self._start(self._sweep_alone)
        elif self.waiters.active:
            self._shared.sweeper.ask(self)
        else:
            return math.inf
        return _aligned(now + interval, interval)

    async def _sweep_alone(self) -> None:
        try:
            await self._batcher.call(RedisSweep(self._waiter))
        except MainspringError:
            self.waiters.signal_all()  # unless it was silence, the next call may succeed
        else:
            if not self._subscription.live:  # the library cannot wake them
                self.waiters.signal_all()

    def sweep_arguments(self) -> tuple[str, int]:
        """Return what the sweeper needs for this mailbox."""
        recovers, self._recovers = self._recovers, False
        return self._waiter(), recovery_of(self._options.recovery_interval if recovers else None)

    def swept(self, due: float, found: int, recover_in: float, dropped: int) -> None:
        """Take what the sweeper found."""
        if due >= 0:
            self.sweep_in(due)
        if dropped:
            self._batches.note_dropped(dropped)
        if recover_in:
            self._recovered(found, recover_in)
        if not self._subscription.live:  # the library cannot wake them
            self.waiters.signal_all()

    def not_swept(self, silent: MailboxConnectionError | None) -> None:
        """Let the claims look for themselves, or fail them if the server is silent."""
        if silent is not None:
            self.fail_claims(silent)
        else:
            self.waiters.signal_all()

    def sweep_in(self, seconds: float) -> None:
        if self.waiters.active and (when := self._now() + seconds) < self._sweep_alarm.due:
            self._sweep_alarm.wake_by(when)

    def _sweep_soon(self) -> None:
        self._sweep_alarm.wake_by(self._now() + self._options.fallback_interval)

    def _listener_lost(self, silent: bool) -> None:
        """Find out at once whether the server is there: it wakes no claim meanwhile. If it was silent, in any case."""
        self._probes = self._probes or silent
        self._sweep_alarm.wake_by(self._now())

    def _recovery_due(self, overslept: float) -> float:
        interval = self._options.recovery_interval
        if self.waiters.closed:
            return math.inf
        self._recovers = True
        self._shared.sweeper.ask(self)
        return _aligned(self._now() + interval, interval)  # also if that call fails; users of the mailbox hear of it

    def _recovered(self, found: int, again: float) -> None:
        """Log what was found. There is more to do in ``again`` seconds."""
        self._recovery_alarm.wake_by(self._now() + again)
        if found:
            _log.warning(
                "mailbox %r: %d messages or dead letters that no index had are back (a key was deleted)",
                self.name,
                found,
            )

    def sibling(self, name: str) -> RedisBackend:
        return RedisBackend(self._server, self._options.with_values(name=name, capacity=None))


def _aligned(when: float, interval: float) -> float:
    """Return ``when`` or a little sooner, so that mailboxes with that interval come to be swept together."""
    step = interval / 10
    return when // step * step


def _need_driver() -> None:
    try:
        import hiredis  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"a Redis mailbox needs an extra: pip install 'mainspring[redis]' ({error})") from error
