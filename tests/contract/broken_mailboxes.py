"""Mailboxes that are broken on purpose, each with the behaviours of the contract that catch it."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from mainspring import InMemoryMailbox, ReceiptHandleExpiredError
from mainspring.mailbox.message import UNKNOWN, Ack, Cancelled, CancelOutcome, Dead, Return

if TYPE_CHECKING:
    from mainspring.mailbox.message import Counts, Delivery, Settlement


class Broken(InMemoryMailbox[Any, Any]):
    """Still whole."""

    def __init__(self, name: str, *, body: Any = None, reply: Any = None) -> None:
        super().__init__(name, serialize=True, body=body, reply=reply)
        self._settle_in(name, None)
        self.charged: dict[str, int] = {}
        self.lease_ends: dict[str, float] = {}
        self.last: list[Delivery] = []


class AcceptsStale(Broken):
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        with suppress(ReceiptHandleExpiredError):
            await super()._settle(delivery, settlement)


class AcceptsStaleExtension(Broken):
    async def _extend(self, delivery: Delivery, timeout: float) -> None:
        with suppress(ReceiptHandleExpiredError):
            await super()._extend(delivery, timeout)


class ForgetsCheckpoints(Broken):
    async def _claim(self, *limits: Any) -> list[Delivery]:
        claimed = await super()._claim(*limits)
        for delivery in claimed:
            delivery.checkpoint = None
        return claimed

    async def _save_checkpoint(self, delivery: Delivery, state: bytes) -> None:
        pass


class ExtendShortens(Broken):
    async def _extend(self, delivery: Delivery, timeout: float) -> None:
        await super()._extend(delivery, timeout)
        self.lease_ends[delivery.receipt_handle] = anyio.current_time() + timeout

    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        if anyio.current_time() >= self.lease_ends.get(delivery.receipt_handle, math.inf):
            raise ReceiptHandleExpiredError("shortened")
        await super()._settle(delivery, settlement)


class ExtendDoesNothing(Broken):
    async def _extend(self, delivery: Delivery, timeout: float) -> None:
        await super()._extend(delivery, 0.0)


class ReleasesToTheTail(Broken):
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        if isinstance(settlement, Return):
            settlement = replace(settlement, front=False)
        await super()._settle(delivery, settlement)


class NacksToTheFront(Broken):
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        if isinstance(settlement, Return) and not settlement.delay:
            settlement = replace(settlement, front=True)
        await super()._settle(delivery, settlement)


class ChargesReleases(Broken):
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        if isinstance(settlement, Return):
            settlement = replace(settlement, charge=True)
        await super()._settle(delivery, settlement)


class IgnoresNackDelay(Broken):
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        if isinstance(settlement, Return):
            settlement = replace(settlement, delay=0.0)
        await super()._settle(delivery, settlement)


class LosesOnCancel(Broken):
    async def _claim(self, *limits: Any) -> list[Delivery]:
        claimed = await super()._claim(*limits)
        await anyio.sleep(0)  # can be cancelled with messages in hand
        return claimed


class DoesNotChargeExpiry(Broken):
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        await super()._settle(delivery, settlement)
        if isinstance(settlement, Return) and settlement.charge:
            self.charged[delivery.message_id] = self.charged.get(delivery.message_id, 0) + 1

    async def _claim(self, *limits: Any) -> list[Delivery]:
        claimed = await super()._claim(*limits)
        for delivery in claimed:
            delivery.attempt = 1 + self.charged.get(delivery.message_id, 0)
        return claimed


class CountsFlightAsPending(Broken):
    async def _counts(self) -> Counts:
        counts = await super()._counts()
        return replace(counts, pending=counts.pending + counts.in_flight, in_flight=0)


class ForgetsTheSettled(Broken):
    async def _counts(self) -> Counts:
        return replace(await super()._counts(), settled=0)


class FillsTheBatch(Broken):
    async def _claim(self, most: int, lease: float, wait: float) -> list[Delivery]:
        until = anyio.current_time() + wait
        claimed: list[Delivery] = []
        while len(claimed) < most:
            more = await super()._claim(most - len(claimed), lease, max(0.0, until - anyio.current_time()))
            if not more:
                break
            claimed += more
        return claimed


class Polls(Broken):
    async def _claim(self, most: int, lease: float, wait: float) -> list[Delivery]:
        until = anyio.current_time() + wait
        while not (claimed := await super()._claim(most, lease, 0.0)) and anyio.current_time() < until:
            await anyio.sleep(min(1.0, until - anyio.current_time()))
        return claimed


class GivesOutTwice(Broken):
    async def _claim(self, *limits: Any) -> list[Delivery]:
        again, self.last = self.last, []
        claimed = await super()._claim(*limits)
        self.last = claimed[:1]
        return claimed + again


class LastInFirstOut(Broken):
    async def _claim(self, *limits: Any) -> list[Delivery]:
        return (await super()._claim(*limits))[::-1]


class Forgetful(Broken):
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


class SendsSome(Broken):
    async def send_many(self, bodies: Any, **options: Any) -> list[str]:
        return [await self.send(body, **options) for body in bodies]


class ClosesSilently(Broken):
    def _wake_all(self) -> None:
        pass


class StaysOpen(Broken):
    def _check_open(self) -> None:
        pass


class LosesTheUndecodable(Broken):
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        if isinstance(settlement, Dead) and settlement.error_type == "NotJsonError":
            settlement = Ack()
        await super()._settle(delivery, settlement)


class RepliesLate(Broken):
    """Acknowledges, but loses the reply."""

    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        await super()._settle(delivery, Ack() if isinstance(settlement, Ack) else settlement)


class RepliesUnfenced(Broken):
    """Sends the reply before it looks at the lease."""

    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        if isinstance(settlement, Ack) and settlement.reply is not None:
            reply = settlement.reply
            async with Broken(reply.reply_to or "") as target:
                await target._put([replace(reply, reply_to=None)])
            settlement = Ack()
        await super()._settle(delivery, settlement)


class DropsTracebacks(Broken):
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        if isinstance(settlement, Dead):
            settlement = replace(settlement, traceback="")
        await super()._settle(delivery, settlement)


class PurgesTheDead(Broken):
    async def _purge(self) -> int:
        await self._discard_dead(None)
        return await super()._purge()


class ReplaysAll(Broken):
    async def _replay(self, message_ids: list[str] | None) -> int:
        return await super()._replay(None)


class DatesDeathsLate(Broken):
    async def _dead_letters(self, limit: int, after: str | None) -> Any:
        found = await super()._dead_letters(limit, after)
        return [(delivery, dead, at + 5) for delivery, dead, at in found]


class ReplaysWithoutKeys(Broken):
    async def _replay(self, message_ids: list[str] | None) -> int:
        for entry, _, _ in self._store.queue.dead.values():
            entry.dedup_key = None
        return await super()._replay(message_ids)


class NewestDeathFirst(Broken):
    async def _dead_letters(self, limit: int, after: str | None) -> Any:
        return (await super()._dead_letters(limit, after))[::-1]


class CancelsOnlyWhatWaits(Broken):
    async def _cancel(self, message_id: str) -> Any:
        if any(entry.message_id == message_id for entry in self._store.queue._in_flight.values()):
            return UNKNOWN
        return await super()._cancel(message_id)


class CancelsSilently(Broken):
    def _announce_cancelled(self, message_ids: list[str]) -> None:
        pass


class CancelsWithoutCounting(Broken):
    async def _cancel(self, message_id: str) -> Any:
        cancelled = await super()._cancel(message_id)
        self._store.queue.settled -= cancelled.outcome is not CancelOutcome.UNKNOWN
        return cancelled


class CancelsAgain(Broken):
    async def _cancel(self, message_id: str) -> Any:
        cancelled = await super()._cancel(message_id)
        return cancelled if cancelled.reply_to else cancelled._replace(outcome=CancelOutcome.REMOVED)


class DiesWithoutAWord(Broken):
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        if isinstance(settlement, Dead):
            settlement = replace(settlement, reply=None)
        await super()._settle(delivery, settlement)


class ForgetsWhoAsked(Broken):
    async def _cancel(self, message_id: str) -> Any:
        return Cancelled((await super()._cancel(message_id)).outcome)

    async def _put(self, envelopes: list[Any]) -> list[str]:
        return await super()._put([replace(e, reply_to=None) if "reply_errors" in e.headers else e for e in envelopes])


class KeepsNoHistory(Broken):
    async def _settle(self, delivery: Delivery, settlement: Settlement) -> None:
        if not isinstance(settlement, Ack):
            settlement = replace(settlement, history=None)
        await super()._settle(delivery, settlement)


class KeepsTheHistoryOfTheReplayed(Broken):
    async def _replay(self, message_ids: list[str] | None) -> int:
        old = {key: letter[0].history for key, letter in self._store.queue.dead.items()}
        replayed = await super()._replay(message_ids)
        for lane in self._store.queue._lanes.values():
            for entry in lane:
                entry.history = old.get(entry.message_id)
        return replayed


class KeepsTheDead(Broken):
    async def _discard_dead(self, message_ids: list[str] | None) -> int:
        return len(message_ids or self._store.queue.dead)


class ReplaysNothing(Broken):
    async def _replay(self, message_ids: list[str] | None) -> int:
        return len(message_ids or self._store.queue.dead)


class FindsAnyDead(Broken):
    async def _find_dead(self, message_ids: list[str]) -> Any:
        return await self._dead_letters(1, None)


class AgesByTheNewest(Broken):
    async def _counts(self) -> Counts:
        counts, wall = await super()._counts(), self._store.queue.wall()
        ages = [wall - entry.enqueued_at for lane in self._store.queue._lanes.values() for entry in lane]
        return replace(counts, queue_age=min(ages, default=0.0))


class AgesByTheReceived(Broken):
    async def _counts(self) -> Counts:
        counts, queue = await super()._counts(), self._store.queue
        ages = [queue.wall() - entry.first_received_at for lane in queue._lanes.values() for entry in lane]
        return replace(counts, queue_age=min(ages, default=0.0))


class SendsWhatChanges(Broken):
    verifies = False


KINDS: list[tuple[type[Broken], list[str]]] = [
    (AcceptsStale, ["acknowledge_after_the_expiry_is_refused", "nack_after_a_redelivery_is_refused"]),
    (AcceptsStale, ["a_lease_ends_at_its_instant", "after_a_purge_every_holder_is_refused"]),
    (AcceptsStaleExtension, ["extend_visibility_after_the_expiry_is_refused"]),
    (ForgetsCheckpoints, ["a_checkpoint_survives_every_return", "save_checkpoint_after_the_expiry_is_refused"]),
    (ExtendShortens, ["extend_never_shortens"]),
    (ExtendDoesNothing, ["extend_lengthens_a_lease_from_now", "a_lease_can_be_kept_for_ever"]),
    (ReleasesToTheTail, ["a_released_message_goes_to_the_front", "a_released_batch_goes_before_all_that_wait"]),
    (NacksToTheFront, ["a_nacked_message_goes_to_the_tail"]),
    (ChargesReleases, ["a_release_charges_nothing", "an_uncharged_nack_charges_nothing"]),
    (IgnoresNackDelay, ["a_nacks_delay_hides_the_message", "the_end_of_a_nacks_delay_wakes_a_waiting_receive"]),
    (LosesOnCancel, ["a_cancellation_that_meets_a_send_loses_nothing"]),
    (DoesNotChargeExpiry, ["an_expired_lease_charges_and_delivers_again"]),
    (CountsFlightAsPending, ["counts_follow_every_step", "counts_add_up_under_any_use"]),
    (
        AgesByTheNewest,
        ["the_queue_age_is_that_of_the_oldest_pending_message", "the_queue_age_looks_at_each_priority"],
    ),
    (AgesByTheReceived, ["the_queue_age_includes_the_delay", "the_queue_age_sees_a_lease_that_has_ended"]),
    (ForgetsTheSettled, ["counts_add_up_under_concurrency", "an_acknowledged_message_is_gone"]),
    (FillsTheBatch, ["receive_never_waits_to_fill_the_batch"]),
    (Polls, ["send_wakes_a_waiting_receive", "nack_wakes_a_waiting_receive", "a_replay_wakes_a_waiting_receive"]),
    (GivesOutTwice, ["concurrent_receivers_get_each_message_once", "a_leased_message_is_hidden_from_others"]),
    (LastInFirstOut, ["send_many_keeps_the_order", "a_batch_has_the_order_too"]),
    (IgnoresDedup, ["a_dedup_key_makes_one_message"]),
    (IgnoresPriority, ["send_checks_priority", "a_batch_has_the_order_too"]),
    (IgnoresDelay, ["a_delayed_message_stays_hidden_until_its_time", "a_long_delay_hides", "send_checks_delay"]),
    (IgnoresHeaders, ["headers_arrive_unchanged"]),
    (IgnoresExpiry, ["an_expired_message_goes_to_the_dead_letters", "send_checks_expires_in"]),
    (SendsSome, ["send_many_is_all_or_nothing"]),
    (ClosesSilently, ["close_ends_a_waiting_receive_at_once"]),
    (
        StaysOpen,
        [
            "a_closed_mailbox_refuses_every_call",
            "a_message_of_a_closed_mailbox_cannot_be_settled",
            "a_forked_child_is_refused_every_call",
        ],
    ),
    (LosesTheUndecodable, ["bytes_that_are_no_json_go_to_the_dead_letters"]),
    (RepliesLate, ["a_reply_arrives_and_acknowledges"]),
    (RepliesUnfenced, ["reply_after_the_expiry_is_refused", "reply_after_a_redelivery_is_refused"]),
    (DropsTracebacks, ["a_dead_letter_says_everything"]),
    (PurgesTheDead, ["a_purge_drops_what_is_not_dead"]),
    (ReplaysAll, ["a_replay_can_be_of_some"]),
    (DatesDeathsLate, ["an_expired_message_died_at_its_expiry"]),
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
    (ReplaysNothing, ["a_dead_letter_can_be_replayed_from_a_view", "a_replayed_message_can_be_cancelled"]),
    (FindsAnyDead, ["a_dead_letter_can_be_found_by_its_id"]),
    (NewestDeathFirst, ["dead_letters_come_oldest_first_in_pages", "dead_letters_are_in_the_order_of_their_deaths"]),
    (
        SendsWhatChanges,
        ["what_would_not_be_received_as_it_is_is_refused", "replies_are_received_as_they_were_sent_or_refused"],
    ),
]
