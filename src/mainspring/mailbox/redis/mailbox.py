"""A mailbox on a Redis (or Valkey) server, shared by processes on many machines."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from mainspring.core.clock import virtual_clock
from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.mailbox import batched
from mainspring.mailbox.backend import Capabilities, MailboxStatistics
from mainspring.mailbox.batched import AcknowledgeMany, CommandBackend
from mainspring.mailbox.limits import SILENCE, check_size
from mainspring.mailbox.mailbox import Mailbox
from mainspring.mailbox.message import Ack, Dead
from mainspring.mailbox.redis.commands import (
    AGAIN,
    MOST_DEAD,
    TAKES,
    base_of,
    check_command,
    stored_size,
)
from mainspring.mailbox.redis.settings import FALLBACK, RECOVERY, RedisOptions, RedisServer
from mainspring.mailbox.settings import name_at, reads_query

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mainspring.mailbox.batched import Command
    from mainspring.mailbox.message import ClaimedMessage, Envelope, Settlement
    from mainspring.mailbox.redis.client import Client, OtherNodes
    from mainspring.runtime.scope import DaemonScope

T = TypeVar("T")
R = TypeVar("R")

MOST_AT_ONCE = 250_000
"""Messages of one ``send_many``: all or none are stored, in one call, and the server serves no other client meanwhile."""


class RedisMailbox(Mailbox[T, R]):
    """A queue on a Redis server that any number of processes on any number of machines can share.

    Operations of concurrent callers leave together: one call of a function on the server does all of them in one step. Leases,
    delays and expiries are by the server's clock.

    A send returns once the server has the message. Whether the message outlives the server depends on the server's settings:
    opening logs a warning once for a server without ``appendonly yes``, and does not look at ``appendfsync``. One ``send_many``
    takes up to 250,000 messages (:class:`InvalidParameterError` beyond).

    All mailboxes of a process and event loop with the same server, database, login and TLS options share two connections. One
    is for calls; on the other the server tells of new messages. In a cluster each mailbox object has two of its own.

    :param url: ``redis://[user:password@]host:6379/0``, ``rediss://…`` (TLS), ``redis+sentinel://host:26379,host/service/0``,
        ``redis+cluster://host:6379,host``. The other parameters can stand in its query instead, as in ``?name=jobs``, but for
        ``body`` and ``reply``.
    :param name: of the queue.
    :param body: the type of the bodies; else the handler's annotation gives it, else anything that JSON can say.
    :param reply: the type of the replies.
    :param capacity: how many messages may wait (delayed, pending, in flight) before a send through this object raises
        :class:`MailboxFullError`; None: as many as the server's memory holds.
    :param timeout: seconds that a call may take, connecting included, before :class:`MailboxConnectionError`.
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


class RedisBackend(CommandBackend):
    """A queue on a Redis server."""

    capabilities = Capabilities(durable=True, cross_process=True, ordered=True, joined_acks=True, queue_age=True)

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
        from mainspring.mailbox.redis.receive import Receiving
        from mainspring.mailbox.redis.topology import Topology, check

        if virtual_clock() is not None:  # which would jump past each deadline while the server is asked
            raise ConfigError(
                f"mailbox {self.name!r}: a Redis server's time is real, and this event loop's is virtual; use memory:// here"
            )
        self._topology = Topology(self._server, base_of(self.name))
        self._client = client = Client(self._topology, self._options.timeout, self._options.silence)
        self._receiving = receiving = Receiving(
            self.name,
            self._topology,
            client,
            self._options.timeout,
            self._options.silence,
            fallback=self._options.fallback_interval,
            recovery=self._options.recovery_interval,
            on_cancelled=self.notifications.cancelled.publish,
            on_silence=self.notifications.silence.publish,
        )
        self._batcher = receiving.batcher
        self._other_nodes: OtherNodes = OtherNodes(self._topology, self._options.timeout)
        scope.start_soon(receiving.keep_time, name=f"mailbox {self.name} timers")
        try:
            await client.ask(check, self.name, self._server.address, self._options.allow_eviction)
            await receiving.open()
            await scope.start(receiving.listener.run, name=f"mailbox {self.name} listener")
        except BaseException:
            await client.close()
            receiving.end()
            raise
        scope.start_soon(receiving.sweeper.run, name=f"mailbox {self.name} due times")
        scope.start_soon(self._batcher.run, name=f"mailbox {self.name} batches", stop=self._batcher.stop)

    def statistics(self) -> MailboxStatistics:
        client, receiving, batcher = self._client, self._receiving, self._batcher
        assert client is not None
        listener = receiving.listener
        return MailboxStatistics(
            waiting_receives=len(receiving.receives.line),
            queued=batcher.queued,
            in_flight=batcher.in_flight,
            batches=batcher.batches,
            unconfirmed=receiving.batches.unconfirmed,
            reconnects=client.reconnects + listener.reconnects,
            connected=listener.live and client.failed_at <= listener.live_since,
            polling=not listener.live,
        )

    async def exists(self) -> bool:
        from mainspring.mailbox.redis.client import has_mailbox

        return await has_mailbox(self._server, self.name, self._options.timeout)

    async def close(self) -> None:
        client = self._client
        assert client is not None
        try:
            if client.connected:
                self._receiving.listener.leave(for_good=True)
            await self._batcher.close()
        finally:
            await client.close()
            await self._other_nodes.close()
            self._receiving.end()

    def stop_claims(self) -> None:
        if self._client is not None:
            self._receiving.close()

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

    async def claim(
        self, max_messages: int, visibility_timeout: float, wait_time_seconds: float
    ) -> list[ClaimedMessage]:
        return await self._receiving.claim(max_messages, visibility_timeout, wait_time_seconds)

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if isinstance(settlement, Ack):
            reply = settlement.reply
            if reply is not None and not await self._has_sent_reply(delivery, reply):
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

    def sibling(self, name: str) -> RedisBackend:
        return RedisBackend(self._server, self._options.model_copy(update={"name": name, "capacity": None}))


def _need_driver() -> None:
    try:
        import hiredis  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"a Redis mailbox needs an extra: pip install 'mainspring[redis]' ({error})") from error
