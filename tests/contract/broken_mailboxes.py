"""Mailboxes that are broken on purpose, each with the behaviours of the contract that catch it.

Most are broken in their backend. A class of mailboxes is broken in what it does before it asks the backend.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from mainspring import InMemoryMailbox, InvalidParameterError, ReceiptHandleExpiredError
from mainspring.mailbox.backend import Notifications
from mainspring.mailbox.message import UNKNOWN, Ack, Cancelled, CancelOutcome, Dead, Nack
from mainspring.testing import mailbox_contract
from wrapped_backend import WrappedBackend, wrap

if TYPE_CHECKING:
    from typing import Self

    from mainspring.mailbox.backend import MailboxStatistics
    from mainspring.mailbox.message import ClaimedMessage, Counts, Envelope, Settlement

Kind: TypeAlias = type[WrappedBackend] | type[InMemoryMailbox[Any, Any]]


def broken(kind: Kind) -> mailbox_contract.BackendUnderTest:
    """The backend of mailboxes that are broken in this way."""

    def make(name: str, *, body: Any = None, reply: Any = None) -> InMemoryMailbox[Any, Any]:
        if issubclass(kind, WrappedBackend):
            return wrap(named(InMemoryMailbox, name, body, reply), kind)
        return named(kind, name, body, reply)

    return mailbox_contract.BackendUnderTest(make, name=kind.__name__)


def named(kind: type[InMemoryMailbox[Any, Any]], name: str, body: Any, reply: Any) -> InMemoryMailbox[Any, Any]:
    """The one queue of that name."""
    return kind.from_url(f"memory://{name}", body=body, reply=reply)


class AcceptsStale(WrappedBackend):
    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        with suppress(ReceiptHandleExpiredError):
            await self.inner.settle(delivery, settlement)


class AcceptsStaleExtension(WrappedBackend):
    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        with suppress(ReceiptHandleExpiredError):
            await self.inner.extend(delivery, timeout)


class ForgetsCheckpoints(WrappedBackend):
    async def claim(self, *limits: Any) -> list[ClaimedMessage]:
        claimed = await self.inner.claim(*limits)
        for delivery in claimed:
            delivery.checkpoint = None
        return claimed

    async def checkpoint(self, delivery: ClaimedMessage, state: bytes) -> None:
        pass


async def end_lease(backend: Any, delivery: ClaimedMessage) -> None:
    """Do as if its lease had run out."""
    with suppress(ReceiptHandleExpiredError):
        await backend.settle(delivery, Nack())


class ExtendShortens(WrappedBackend):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.shortened: dict[str, tuple[ClaimedMessage, float]] = {}

    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        await self.end_leases()
        await self.inner.extend(delivery, timeout)
        self.shortened[delivery.receipt_handle] = delivery, anyio.current_time() + timeout

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        await self.end_leases()
        await self.inner.settle(delivery, settlement)

    async def claim(self, *limits: Any) -> list[ClaimedMessage]:
        await self.end_leases()
        return await self.inner.claim(*limits)

    async def counts(self) -> Counts:
        await self.end_leases()
        return await self.inner.counts()

    async def end_leases(self) -> None:
        for receipt, (delivery, until) in list(self.shortened.items()):
            if until <= anyio.current_time():
                del self.shortened[receipt]
                await end_lease(self.inner, delivery)


class RefusesAllForOne(WrappedBackend):
    async def acknowledge_many(self, deliveries: list[ClaimedMessage]) -> dict[int, Exception]:
        refused = await self.inner.acknowledge_many(deliveries)
        for error in refused.values():
            raise error
        return refused


class ExtendDoesNothing(WrappedBackend):
    async def extend(self, delivery: ClaimedMessage, timeout: float) -> None:
        await self.inner.extend(delivery, 0.0)


class ReleasesToTheTail(WrappedBackend):
    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if isinstance(settlement, Nack):
            settlement = replace(settlement, front=False)
        await self.inner.settle(delivery, settlement)


class NacksToTheFront(WrappedBackend):
    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if isinstance(settlement, Nack) and not settlement.delay:
            settlement = replace(settlement, front=True)
        await self.inner.settle(delivery, settlement)


class ChargesReleases(WrappedBackend):
    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if isinstance(settlement, Nack):
            settlement = replace(settlement, charge=True)
        await self.inner.settle(delivery, settlement)


class IgnoresNackDelay(WrappedBackend):
    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if isinstance(settlement, Nack):
            settlement = replace(settlement, delay=0.0)
        await self.inner.settle(delivery, settlement)


class LosesOnCancel(WrappedBackend):
    async def claim(self, *limits: Any) -> list[ClaimedMessage]:
        claimed = await self.inner.claim(*limits)
        await anyio.sleep(0)  # can be cancelled with messages in hand
        return claimed


class DoesNotChargeExpiry(WrappedBackend):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.charged: dict[str, int] = {}

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        await self.inner.settle(delivery, settlement)
        if isinstance(settlement, Nack) and settlement.charge:
            self.charged[delivery.message_id] = self.charged.get(delivery.message_id, 0) + 1

    async def claim(self, *limits: Any) -> list[ClaimedMessage]:
        claimed = await self.inner.claim(*limits)
        for delivery in claimed:
            delivery.attempt = 1 + self.charged.get(delivery.message_id, 0)
        return claimed


class TellsOfNoWaiting(WrappedBackend):
    def statistics(self) -> MailboxStatistics:
        return replace(self.inner.statistics(), waiting_receives=0)


class TellsOfAllThatHaveWaited(WrappedBackend):
    most = 0

    def statistics(self) -> MailboxStatistics:
        found = self.inner.statistics()
        self.most = max(self.most, found.waiting_receives)
        return replace(found, waiting_receives=self.most)


class CountsFlightAsPending(WrappedBackend):
    async def counts(self) -> Counts:
        counts = await self.inner.counts()
        return replace(counts, pending=counts.pending + counts.in_flight, in_flight=0)


class ForgetsTheSettled(WrappedBackend):
    async def counts(self) -> Counts:
        return replace(await self.inner.counts(), settled=0)


class FillsTheBatch(WrappedBackend):
    async def claim(self, most: int, lease: float, wait: float) -> list[ClaimedMessage]:
        until = anyio.current_time() + wait
        claimed: list[ClaimedMessage] = []
        while len(claimed) < most:
            more = await self.inner.claim(most - len(claimed), lease, max(0.0, until - anyio.current_time()))
            if not more:
                break
            claimed += more
        return claimed


class Polls(WrappedBackend):
    async def claim(self, most: int, lease: float, wait: float) -> list[ClaimedMessage]:
        until = anyio.current_time() + wait
        while not (claimed := await self.inner.claim(most, lease, 0.0)) and anyio.current_time() < until:
            await anyio.sleep(min(1.0, until - anyio.current_time()))
        return claimed


class GivesOutTwice(WrappedBackend):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.last: list[ClaimedMessage] = []

    async def claim(self, *limits: Any) -> list[ClaimedMessage]:
        again, self.last = self.last, []
        claimed = await self.inner.claim(*limits)
        self.last = claimed[:1]
        return claimed + again


class LastInFirstOut(WrappedBackend):
    async def claim(self, *limits: Any) -> list[ClaimedMessage]:
        return (await self.inner.claim(*limits))[::-1]


class Forgetful(InMemoryMailbox[Any, Any]):
    """Ignores the parameters of send in ``ignored``."""

    ignored: tuple[str, ...] = ()

    async def send(self, body: Any, **options: Any) -> str:
        return await super().send(body, **{key: value for key, value in options.items() if key not in self.ignored})


class IgnoresDedup(Forgetful):
    ignored = ("dedup_key",)


class IgnoresPriority(Forgetful):
    ignored = ("priority",)


class IgnoresDelay(Forgetful):
    ignored = ("delay",)


class IgnoresHeaders(Forgetful):
    ignored = ("headers",)


class IgnoresExpiry(Forgetful):
    ignored = ("expires_in",)


class SendsSome(InMemoryMailbox[Any, Any]):
    async def send_many(self, bodies: Any, **options: Any) -> list[str]:
        return [await self.send(body, **options) for body in bodies]


class ClosesSilently(WrappedBackend):
    def stop_claims(self) -> None:
        pass


class StaysOpen(InMemoryMailbox[Any, Any]):
    """Is never opened, and so never closed: one in memory works without."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class LosesTheUndecodable(WrappedBackend):
    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if isinstance(settlement, Dead) and settlement.error_type == "NotJsonError":
            settlement = Ack()
        await self.inner.settle(delivery, settlement)


class RepliesLate(WrappedBackend):
    """Acknowledges, but loses the reply."""

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        await self.inner.settle(delivery, Ack() if isinstance(settlement, Ack) else settlement)


class RepliesUnfenced(WrappedBackend):
    """Sends the reply before it looks at the lease."""

    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if isinstance(settlement, Ack) and settlement.reply is not None:
            reply = settlement.reply
            target = self.inner.sibling(reply.reply_to)
            await target.send([replace(reply, reply_to=None)])
            settlement = Ack()
        await self.inner.settle(delivery, settlement)


class DropsTracebacks(WrappedBackend):
    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if isinstance(settlement, Dead):
            settlement = replace(settlement, traceback="")
        await self.inner.settle(delivery, settlement)


class PurgesTheDead(WrappedBackend):
    async def purge(self) -> int:
        await self.purge_dead_letters(None)
        return await self.inner.purge()


class ReplaysAll(WrappedBackend):
    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        return await self.inner.replay_dead_letters(None)


class DatesDeathsLate(WrappedBackend):
    async def dead_letters(self, limit: int, after: str | None) -> Any:
        found = await self.inner.dead_letters(limit, after)
        return [(delivery, dead, at + 5) for delivery, dead, at in found]


class ReplaysWithoutKeys(WrappedBackend):
    replayed = False

    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        self.replayed = True
        return await self.inner.replay_dead_letters(message_ids)

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        return await self.inner.send([replace(e, dedup_key=None) for e in envelopes] if self.replayed else envelopes)


class NewestDeathFirst(WrappedBackend):
    async def dead_letters(self, limit: int, after: str | None) -> Any:
        return (await self.inner.dead_letters(limit, after))[::-1]


class CancelsOnlyWhatWaits(WrappedBackend):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.held: set[str] = set()

    async def claim(self, *limits: Any) -> list[ClaimedMessage]:
        claimed = await self.inner.claim(*limits)
        self.held |= {delivery.message_id for delivery in claimed}
        return claimed

    async def cancel(self, message_id: str) -> Cancelled:
        return UNKNOWN if message_id in self.held else await self.inner.cancel(message_id)


class CancelsSilently(WrappedBackend):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.notifications = Notifications()  # separate from the backend's


class CancelsWithoutCounting(WrappedBackend):
    cancelled = 0

    async def cancel(self, message_id: str) -> Cancelled:
        cancelled = await self.inner.cancel(message_id)
        self.cancelled += cancelled.outcome is not CancelOutcome.UNKNOWN
        return cancelled

    async def counts(self) -> Counts:
        counts = await self.inner.counts()
        return replace(counts, settled=counts.settled - self.cancelled)


class CancelsAgain(WrappedBackend):
    async def cancel(self, message_id: str) -> Cancelled:
        cancelled = await self.inner.cancel(message_id)
        return cancelled if cancelled.reply_to else cancelled._replace(outcome=CancelOutcome.REMOVED)


class DiesWithoutAWord(WrappedBackend):
    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if isinstance(settlement, Dead):
            settlement = replace(settlement, reply=None)
        await self.inner.settle(delivery, settlement)


class ForgetsWhoAsked(WrappedBackend):
    async def cancel(self, message_id: str) -> Cancelled:
        return Cancelled((await self.inner.cancel(message_id)).outcome)

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        return await self.inner.send(
            [replace(e, reply_to=None) if "mainspring-reply-errors" in e.headers else e for e in envelopes]
        )


class KeepsNoHistory(WrappedBackend):
    async def settle(self, delivery: ClaimedMessage, settlement: Settlement) -> None:
        if not isinstance(settlement, Ack):
            settlement = replace(settlement, history=None)
        await self.inner.settle(delivery, settlement)


class KeepsTheHistoryOfTheReplayed(WrappedBackend):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.old: dict[str, str | None] = {}

    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        self.old |= {
            delivery.message_id: delivery.history for delivery, _, _ in await self.inner.dead_letters(1_000, None)
        }
        return await self.inner.replay_dead_letters(message_ids)

    async def claim(self, *limits: Any) -> list[ClaimedMessage]:
        claimed = await self.inner.claim(*limits)
        for delivery in claimed:
            delivery.history = self.old.get(delivery.message_id, delivery.history)
        return claimed


class KeepsTheDead(WrappedBackend):
    async def purge_dead_letters(self, message_ids: list[str] | None) -> int:
        return len(message_ids) if message_ids else (await self.inner.counts()).dead


class ReplaysNothing(WrappedBackend):
    async def replay_dead_letters(self, message_ids: list[str] | None) -> int:
        return len(message_ids) if message_ids else (await self.inner.counts()).dead


class FindsAnyDead(WrappedBackend):
    async def find_dead_letters(self, message_ids: list[str]) -> Any:
        return await self.dead_letters(1, None)


class AgesByTheNewest(WrappedBackend):
    newest = 0.0

    async def send(self, envelopes: list[Envelope]) -> list[str]:
        self.newest = anyio.current_time()
        return await self.inner.send(envelopes)

    async def counts(self) -> Counts:
        counts = await self.inner.counts()
        return replace(counts, queue_age=anyio.current_time() - self.newest if counts.pending else 0.0)


class AgesFromPending(WrappedBackend):
    """Counts the age of a message from when it became pending, as far as that is looked at."""

    since: float | None = None

    async def counts(self) -> Counts:
        counts = await self.inner.counts()
        if not counts.pending:
            self.since = None
            return replace(counts, queue_age=0.0)
        if self.since is None:
            self.since = anyio.current_time()
        return replace(counts, queue_age=anyio.current_time() - self.since)


class SendsWhatChanges(InMemoryMailbox[Any, Any]):
    verifies = False


class CorrectsParameters(InMemoryMailbox[Any, Any]):
    """Takes values out of the limits for the defaults."""

    async def receive(self, **limits: Any) -> Any:
        try:
            return await super().receive(**limits)
        except InvalidParameterError:
            return await super().receive()

    async def dead_letters(self, limit: int = 100, after: str | None = None) -> Any:
        return await super().dead_letters(max(1, limit), after)


def refused(*operations: str) -> list[str]:
    """The behaviours by which a holder whose lease is gone is refused these operations."""
    return [f"{one}_after_{how}_is_refused" for one in operations for how in ("the_expiry", "a_redelivery")]


KINDS: list[tuple[Kind, list[str]]] = [
    (AcceptsStale, refused("acknowledge", "nack", "delayed_nack", "release", "dead_letter")),
    (AcceptsStale, ["a_lease_ends_at_its_instant", "after_a_purge_every_holder_is_refused"]),
    (AcceptsStale, ["a_refused_holder_can_be_refused_again", "messages_are_acknowledged_in_one_call"]),
    (AcceptsStaleExtension, refused("extend_visibility")),
    (ForgetsCheckpoints, ["a_checkpoint_survives_every_return", *refused("save_checkpoint")]),
    (ExtendShortens, ["extend_never_shortens"]),
    (ExtendDoesNothing, ["extend_lengthens_a_lease_from_now", "a_lease_can_be_kept_for_ever"]),
    (RefusesAllForOne, ["messages_are_acknowledged_in_one_call", "a_foreign_receipt_handle_is_refused_by_itself"]),
    (ReleasesToTheTail, ["a_released_message_goes_to_the_front", "a_released_batch_goes_before_all_that_wait"]),
    (NacksToTheFront, ["a_nacked_message_goes_to_the_tail", "an_uncharged_nack_goes_to_the_tail_too"]),
    (ChargesReleases, ["a_release_charges_nothing", "an_uncharged_nack_charges_nothing"]),
    (IgnoresNackDelay, ["a_nacks_delay_hides_the_message", "the_end_of_a_nacks_delay_wakes_a_waiting_receive"]),
    (LosesOnCancel, ["a_cancellation_that_meets_a_send_loses_nothing"]),
    (DoesNotChargeExpiry, ["an_expired_lease_charges_and_delivers_again", "attempts_add_up_over_every_kind_of_return"]),
    (CountsFlightAsPending, ["counts_add_up_under_any_use"]),
    (
        AgesByTheNewest,
        ["the_queue_age_is_that_of_the_oldest_pending_message", "the_queue_age_looks_at_each_priority"],
    ),
    (AgesFromPending, ["the_queue_age_includes_the_delay", "the_queue_age_sees_a_lease_that_has_ended"]),
    (ForgetsTheSettled, ["counts_add_up_under_concurrency", "an_acknowledged_message_is_gone"]),
    (FillsTheBatch, ["receive_never_waits_to_fill_the_batch"]),
    (TellsOfNoWaiting, ["the_statistics_count_the_receives_that_wait"]),
    (TellsOfAllThatHaveWaited, ["the_statistics_count_the_receives_that_wait"]),
    (Polls, ["send_wakes_a_waiting_receive", "nack_wakes_a_waiting_receive", "a_replay_wakes_a_waiting_receive"]),
    (Polls, ["release_wakes_a_waiting_receive", "the_end_of_a_delay_wakes_a_waiting_receive"]),
    (Polls, ["send_many_wakes_as_many_receivers", "each_send_wakes_another_receiver", "an_endless_wait_is_woken_too"]),
    (Polls, ["a_cancelled_waiter_does_not_swallow_the_wake_up", "a_reply_wakes_the_requester"]),
    (GivesOutTwice, ["concurrent_receivers_get_each_message_once", "a_leased_message_is_hidden_from_others"]),
    (LastInFirstOut, ["first_in_first_out", "a_higher_priority_comes_first"]),
    (IgnoresDedup, ["a_dedup_key_makes_one_message", "send_checks_dedup_key"]),
    (IgnoresPriority, ["send_checks_priority", "a_higher_priority_comes_first"]),
    (IgnoresDelay, ["a_delayed_message_stays_hidden_until_its_time", "a_long_delay_hides", "send_checks_delay"]),
    (IgnoresHeaders, ["headers_arrive_unchanged", "send_checks_headers"]),
    (
        CorrectsParameters,
        ["receive_checks_max_messages", "receive_checks_visibility_timeout", "receive_checks_wait_time"],
    ),
    (CorrectsParameters, ["dead_letters_checks_limit", "a_refused_parameter_is_named"]),
    (IgnoresExpiry, ["an_expired_message_goes_to_the_dead_letters", "send_checks_expires_in"]),
    (SendsSome, ["send_many_is_all_or_nothing"]),
    (ClosesSilently, ["close_ends_a_waiting_receive_at_once"]),
    (
        StaysOpen,
        [
            "a_closed_mailbox_refuses_every_call",
            "a_closed_mailbox_refuses_every_call",
            "a_forked_child_is_refused_every_call",
        ],
    ),
    (LosesTheUndecodable, ["bytes_that_are_no_json_go_to_the_dead_letters", "undecodable_bytes_do_not_end_a_wait"]),
    (RepliesLate, ["a_reply_arrives_and_acknowledges"]),
    (RepliesUnfenced, ["reply_after_the_expiry_is_refused", "reply_after_a_redelivery_is_refused"]),
    (DropsTracebacks, ["a_dead_letter_says_everything"]),
    (PurgesTheDead, ["a_purge_drops_what_is_not_dead"]),
    (ReplaysAll, ["a_replay_can_be_of_some"]),
    (DatesDeathsLate, ["an_expired_message_goes_to_the_dead_letters"]),
    (ReplaysWithoutKeys, ["a_replayed_message_has_its_dedup_key_again"]),
    (CancelsOnlyWhatWaits, ["a_message_in_flight_can_be_cancelled", "a_cancelled_message_frees_its_dedup_key"]),
    (CancelsSilently, ["a_cancellation_is_announced"]),
    (CancelsWithoutCounting, ["a_pending_message_can_be_cancelled", "a_delayed_message_can_be_cancelled"]),
    (CancelsAgain, ["what_is_over_cannot_be_cancelled", "another_mailboxs_message_is_unknown"]),
    (DiesWithoutAWord, ["a_request_that_dies_tells_its_requester"]),
    (ForgetsWhoAsked, ["replies_find_their_requests", "a_reply_has_the_type_of_the_replies"]),
    (KeepsNoHistory, ["a_message_remembers_its_failures", "the_history_is_bounded"]),
    (KeepsTheHistoryOfTheReplayed, ["a_replayed_message_begins_a_new_history"]),
    (KeepsTheDead, ["a_dead_letter_is_received_and_purged_when_acknowledged"]),
    (ReplaysNothing, ["a_dead_letter_can_be_replayed_from_a_view", "a_returned_message_can_be_cancelled"]),
    (FindsAnyDead, ["a_dead_letter_can_be_found_by_its_id"]),
    (NewestDeathFirst, ["dead_letters_come_oldest_first_in_pages", "dead_letters_are_in_the_order_of_their_deaths"]),
]
