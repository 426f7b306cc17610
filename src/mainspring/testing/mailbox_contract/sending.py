"""Sending: what arrives, delays, dedup keys, expiry; which parameters are refused."""

from __future__ import annotations

import datetime
import math
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from mainspring.core import clock
from mainspring.errors import InvalidParameterError
from mainspring.testing.mailbox_contract.harness import (
    AnyMailbox,
    Behaviour,
    Harness,
    check,
    equal,
    from_row,
    on_mailbox,
    raises,
    texts,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence


@on_mailbox()
async def a_sent_message_arrives_as_it_was_sent(h: Harness, box: AnyMailbox) -> None:
    """send returns the id; the first delivery has it, the body, and counts of 1; no headers, no reply_to, no checkpoint."""
    sent = await box.send({"n": 1})
    check(isinstance(sent, str) and bool(sent), f"send returned {sent!r}, no id")
    await h.counts(box, pending=1)
    message = await h.one(box)
    equal((message.id, message.body), (sent, {"n": 1}), "id and body")
    equal((message.delivery_count, message.attempt), (1, 1), "delivery_count and attempt")
    equal((dict(message.headers), message.reply_to, message.checkpoint), ({}, None, None), "what was not sent")
    check(bool(message.receipt_handle), "there is no receipt handle")
    check(not message.is_settled, "a fresh delivery counts as settled")


@on_mailbox()
async def what_is_no_text_is_refused(h: Harness, box: AnyMailbox) -> None:
    """Half a surrogate pair in a key, a header, an address or an id raises InvalidParameterError; a neighbour is sent."""
    await box.send("before")
    for odd in ("\ud800", "a\udc80"):
        for what, call in (
            ("dedup_key", lambda odd=odd: box.send("x", dedup_key=odd)),
            ("a header", lambda odd=odd: box.send("x", headers={"k": odd})),
            ("a header's name", lambda odd=odd: box.send_many(["x"], headers={odd: "v"})),
            ("reply_to", lambda odd=odd: box.send("x", reply_to=odd)),
            ("reply_to of many", lambda odd=odd: box.send_many(["x"], reply_to=odd)),
            ("the id of dead letters", lambda odd=odd: box.replay_dead_letters([odd])),
            ("the id of a dead letter", lambda odd=odd: box.dead_letter(odd)),
            ("the id that a page begins after", lambda odd=odd: box.dead_letters(after=odd)),
        ):
            with raises(InvalidParameterError, f"{what} that is no text"):
                await call()
    with raises(InvalidParameterError, "a NUL character in reply_to"):
        await box.send("x", reply_to="a\0b")
    await h.counts(box, pending=1)
    await h.delivery(box, "a", dedup_key="a\0b", headers={"k": "a\0b"})
    equal(dict((await h.one(box)).headers), {"k": "a\0b"}, "a NUL character in a header")


@on_mailbox()
async def times_are_aware_utc(h: Harness, box: AnyMailbox) -> None:
    """enqueued_at and first_received_at are aware UTC datetimes of the send and of the first delivery."""
    before = clock.utc_now()
    await box.send("x")
    await h.pass_time(h.short)
    received = clock.utc_now()
    message = await h.one(box)
    for name, actual, expected in (
        ("enqueued_at", message.enqueued_at, before),
        ("first_received_at", message.first_received_at, received),
    ):
        equal(actual.utcoffset(), datetime.timedelta(0), f"the UTC offset of {name}")
        h.check_date(actual, expected, name)


@on_mailbox()
async def ids_differ(h: Harness, box: AnyMailbox) -> None:
    """No two messages have the same id, equal bodies or not."""
    sent = [await box.send("same") for _ in range(5)] + await box.send_many(["same"] * 5)
    equal(len(set(sent)), 10, "different ids of ten messages")


@on_mailbox()
async def send_many_of_nothing_is_nothing(h: Harness, box: AnyMailbox) -> None:
    """send_many([]) returns [] and sends nothing."""
    equal(await box.send_many([]), [], "ids")
    await h.counts(box)


@on_mailbox()
async def send_many_parameters_hold_for_each(h: Harness, box: AnyMailbox) -> None:
    """Headers and reply_to of send_many are every message's."""
    await box.send_many(["a", "b"], headers={"k": "v"}, reply_to="elsewhere")
    for message in await h.all(box):
        equal((dict(message.headers), message.reply_to), ({"k": "v"}, "elsewhere"), f"those of {message.body!r}")


@on_mailbox()
async def headers_arrive_unchanged(h: Harness, box: AnyMailbox) -> None:
    """Headers keep every character, also empty ones and those beyond ASCII, through every delivery."""
    headers = {"trace": "00-abc", "empty": "", "": "no name", "Grüße": "日本\n\t\\\"'"}
    message = await h.delivery(box, headers=headers)
    equal(dict(message.headers), headers, "headers of the first delivery")
    await message.nack()
    equal(dict((await h.one(box)).headers), headers, "headers of the second delivery")


@on_mailbox("delay")
async def a_delayed_message_stays_hidden_until_its_time(h: Harness, box: AnyMailbox) -> None:
    """A delayed message counts as delayed and cannot be received; when the delay ends, it is pending."""
    with h.within(h.short):
        await box.send("later", delay=h.short)
        await box.send("now")
        await h.counts(box, delayed=1, pending=1)
    if h.virtual:
        equal(texts(await h.all(box)), ["now"], "what can be received before the delay ends")
        await h.counts(box, delayed=1, in_flight=1)
        await h.pass_time(h.short - 0.001)
        await h.none(box, "the delay lasts another millisecond")
        await h.pass_time(0.001)
    else:
        await h.pass_time(h.short)
        equal((await h.one(box)).body, "now", "what was sent without a delay")
    await h.due_counts(box, pending=1, in_flight=1)
    message = await h.one(box)
    equal((message.body, message.delivery_count, message.attempt), ("later", 1, 1), "the delayed message")


@on_mailbox("delay")
async def a_delay_can_be_a_timedelta_or_an_instant(h: Harness, box: AnyMailbox) -> None:
    """send and send_many take delay= as a timedelta and at= as a datetime of any zone; a past one is now."""
    east = datetime.timezone(datetime.timedelta(hours=9))
    async with h.ending(h.short):
        await box.send("delta", delay=datetime.timedelta(seconds=h.short))
        await box.send("instant", at=clock.utc_now().astimezone(east) + datetime.timedelta(seconds=h.short))
        await box.send_many(["many"], at=clock.utc_now() + datetime.timedelta(seconds=h.short))
        await h.counts(box, delayed=3)
    equal(sorted(texts(await h.all(box, due=3))), ["delta", "instant", "many"], "what came when its time was there")
    await box.send("far", at=clock.utc_now() + datetime.timedelta(hours=1))
    message = await h.delivery(box, "past", at=clock.utc_now() - datetime.timedelta(days=4_000))
    equal(message.body, "past", "what was sent for a past instant")
    await message.nack(delay=datetime.timedelta(hours=1))
    await h.none(box, "a nack by an hour")


@on_mailbox("dedup")
async def a_dedup_key_makes_one_message(h: Harness, box: AnyMailbox) -> None:
    """While a message with a key is unfinished (delayed, pending or in flight), a send with it returns the first id."""
    first = await box.send("first", dedup_key="k")
    equal(await box.send("second", dedup_key="k"), first, "the id while it is pending")
    message = await h.one(box)
    equal(await box.send("third", dedup_key="k"), first, "the id while it is in flight")
    await message.nack(delay=3_600)
    equal(await box.send("fourth", dedup_key="k"), first, "the id while it is delayed")
    await h.counts(box, delayed=1)
    check(await box.send("other", dedup_key="other") != first, "another key gave the same message")
    equal(message.body, "first", "the body")


@on_mailbox("dedup")
async def a_finished_message_frees_its_dedup_key(h: Harness, box: AnyMailbox) -> None:
    """Acknowledged, dead-lettered or purged, a message frees its key: the next send makes a new one."""
    first = await box.send("a", dedup_key="k")
    await (await h.one(box)).acknowledge()
    second = await box.send("b", dedup_key="k")
    await (await h.one(box)).dead_letter("no")
    third = await box.send("c", dedup_key="k")
    await box.purge()
    fourth = await box.send("d", dedup_key="k")
    equal(len({first, second, third, fourth}), 4, "different ids")
    equal((await h.one(box)).body, "d", "what is left")


@on_mailbox("dedup", also="other")
async def a_dedup_key_is_its_mailboxes_own(h: Harness, box: AnyMailbox, other: AnyMailbox) -> None:
    """The same key in another mailbox is another message."""
    first = await box.send("here", dedup_key="k")
    check(await other.send("there", dedup_key="k") != first, "two mailboxes share a key")
    equal((await h.one(other)).body, "there", "what came in the other mailbox")


@on_mailbox("expiry")
async def an_expired_message_goes_to_the_dead_letters(h: Harness, box: AnyMailbox) -> None:
    """A message past its expires_in cannot be received: it is a dead letter, never delivered, dated by its expiry."""
    expired = await box.send("stale", expires_in=h.short)
    await box.send("fresh")
    await h.pass_time(2 * h.short)
    equal(texts(await h.all(box)), ["fresh"], "what can be received")
    await h.due_counts(box, in_flight=1, dead=1)
    (letter,) = await box.dead_letters()
    equal((letter.message_id, letter.body), (expired, "stale"), "the dead letter")
    equal((letter.first_received_at, letter.delivery_count), (None, 0), "its deliveries")
    check(bool(letter.error) and bool(letter.error_type), "it does not say why")
    lived = (letter.dead_lettered_at - letter.enqueued_at).total_seconds()
    check(abs(lived - h.short) <= h.slack + 0.001, f"it died {lived:g} s after it was sent, not {h.short:g} s")


@on_mailbox("dedup", "expiry")
async def an_expired_message_frees_its_dedup_key(h: Harness, box: AnyMailbox) -> None:
    """Past its expires_in, a message that waits frees its key; one in flight has it until it is settled or its lease ends."""
    life = h.short + 1.0

    async def frees(key: str) -> bool:
        return await box.send("new", dedup_key=key) != sent[key]

    async with h.ending(life):
        sent = {key: await box.send(key, dedup_key=key, expires_in=life) for key in ("lost", "back", "done", "held")}
        await h.one(box, lease=life)
        held = {message.body: message for message in await h.all(box, due=3)}
        for key, delay in {"pending": 0, "delayed": 3_600 if h.capabilities.delay else 0}.items():
            sent[key] = await box.send(key, dedup_key=key, expires_in=life, delay=delay)
    for key in ("pending", "delayed", *(["lost"] if h.capabilities.lease_ends_seen else [])):
        check(await h.when_due(partial(frees, key)), f"the {key} message has expired and kept its key")
    for key in ("back", "done", "held"):
        equal(await box.send("again", dedup_key=key), sent[key], "the id while the expired message is in flight")
    await held["back"].nack()
    await held["done"].acknowledge()
    for key in ("back", "done"):
        check(await box.send("new", dedup_key=key) != sent[key], f"the {key} message is over and kept its key")
    if h.capabilities.lease_ends_seen:
        await h.counts(box, pending=5, in_flight=1, settled=1, dead=4)


@on_mailbox("expiry")
async def what_somebody_works_on_does_not_expire(h: Harness, box: AnyMailbox) -> None:
    """A message in flight outlives its expires_in and can be acknowledged; given back after it, it is dead."""
    async with h.ending(h.short + 1.0):
        await box.send_many(["done", "back", "released", "later"], expires_in=h.short + 1.0)
        done, back, released, later = await h.all(box)
    await h.counts(box, in_flight=4)
    await done.acknowledge()
    await back.nack()
    await released.release()
    await later.nack(delay=3_600 if h.capabilities.delay else 0)
    await h.counts(box, settled=1, dead=3)
    await h.none(box, "it was given back past its expiry")


@on_mailbox(also="other")
async def a_mailbox_holds_only_its_own_messages(h: Harness, box: AnyMailbox, other: AnyMailbox) -> None:
    """Messages, counts, purges and dead letters of another name on the store are not this mailbox's."""
    await box.send("here")
    await other.send_many(["there", "dead"])
    await (await other.receive(max_messages=2))[1].dead_letter("x")
    await h.counts(box, pending=1)
    await h.counts(other, in_flight=1, dead=1)
    equal(await box.dead_letters(), [], "dead letters of the first mailbox")
    equal(await box.purge(), 1, "purged messages")
    await h.counts(other, in_flight=1, dead=1)


YEAR = 366 * 86_400.0


def _limit(
    name: str,
    claim: str,
    call: Callable[[Any, Any], Awaitable[object]],
    *needs: str,
    refused: Sequence[Any],
    accepted: Sequence[Any] = (),
    left: Sequence[Any] = ("x",),
    of_delivery: bool = False,
) -> Behaviour:
    """Make a behaviour of a parameter: values that ``call`` refuses or takes, and the bodies that are ``left`` after those."""

    async def run(h: Harness, box: AnyMailbox) -> None:
        message = None
        if of_delivery:
            message = await h.delivery(box)
        else:
            await box.send("x")
        for number, value in enumerate(refused, 1):  # not every value has a repr
            with raises(InvalidParameterError, f"refused value {number} of {len(refused)}"):
                await call(message or box, value)
        await h.counts(box, **{"in_flight" if message else "pending": 1})
        for value in accepted:
            await call(message or box, value)
        equal(texts(await h.all(box)), list(left), "what can be received afterwards")
        if message is not None:
            await message.acknowledge()

    return from_row(name, claim, run, *needs)


LIMITS = [
    _limit("receive_checks_max_messages", "max_messages is a whole number from 1 to 1,000.",
           lambda box, value: box.receive(max_messages=value),
           refused=(0, -1, 1_001, 1.5, math.nan), accepted=(1_000,), left=()),
    _limit("receive_checks_visibility_timeout", "visibility_timeout is 0 to 43,200 seconds and a number.",
           lambda box, value: box.receive(visibility_timeout=value),
           refused=(-1, -0.001, 43_200.5, math.inf, math.nan), accepted=(43_200,), left=()),
    _limit("receive_checks_wait_time", "wait_time_seconds is 0 or more and a number.",
           lambda box, value: box.receive(wait_time_seconds=value, visibility_timeout=600),
           refused=(-1, -math.inf, math.nan), accepted=(math.inf,), left=()),
    _limit("send_checks_priority", "A priority is a whole number within ±32,767.",
           lambda box, value: box.send(value, priority=value),
           "priority", refused=(32_768, -32_768, 0.5, math.nan, "high"),
           accepted=(-32_767, 32_767), left=(32_767, "x", -32_767)),
    _limit("send_checks_expires_in", "expires_in is above 0, at most 366 days, and a number.",
           lambda box, value: box.send("y", expires_in=value),
           "expiry", refused=(0, -1, YEAR + 1, math.inf, math.nan), accepted=(YEAR,), left=("x", "y")),
    _limit("send_checks_headers", "Headers are strings by string.",
           lambda box, value: box.send("y", headers=value),
           refused=({"a": 1}, {1: "a"}, {"a": None}, {"a": 10**4_300}, {10**4_300: "a"})),
    _limit("send_checks_dedup_key", "A dedup_key is a string of at least one character.",
           lambda box, value: box.send("y", dedup_key=value),
           "dedup", refused=("", 5, b"x")),
    _limit("an_id_that_is_no_text_is_refused", "cancel() raises InvalidParameterError for an id that no message can have.",
           lambda box, value: box.cancel(value),
           "cancel", refused=("\ud800",)),
    _limit("nack_checks_delay", "A nack's delay is 0 to 366 days and a number; otherwise the message is not settled.",
           lambda message, value: message.nack(delay=value),
           refused=(-1, YEAR + 1, math.inf, math.nan), left=(), of_delivery=True),
    _limit("extend_checks_timeout", "extend_visibility takes 0 to 43,200 seconds, and a number.",
           lambda message, value: message.extend_visibility(value),
           refused=(-1, 43_200.5, math.inf, math.nan), accepted=(43_200, 0), left=(), of_delivery=True),
    _limit("dead_letters_checks_limit", "dead_letters takes a limit from 1.",
           lambda box, value: box.dead_letters(limit=value),
           refused=(0, -1), accepted=(1,)),
]  # fmt: skip
"""The parameters whose limits differ in nothing but their values."""


@on_mailbox("delay")
async def send_checks_delay(h: Harness, box: AnyMailbox) -> None:
    """A delay is 0 to 366 days and a number; nothing is sent otherwise."""
    days: list[Any] = [timedelta(days=-1), timedelta(days=367)]
    for value in (-1, YEAR + 1, math.inf, math.nan, *days):
        with raises(InvalidParameterError, f"send(delay={value!r})"):
            await box.send("x", delay=value)
        with raises(InvalidParameterError, f"send_many(delay={value!r})"):
            await box.send_many(["x"], delay=value)
    now = clock.utc_now()
    wrong: list[tuple[Any, Any, str]] = [
        (0, now.replace(tzinfo=None), "a datetime with a time zone"),
        (0, 60, "a datetime with a time zone"),
        (0, now + timedelta(days=367), "within 366 days"),
        (5, now, "not both"),
        (timedelta(seconds=5), now, "not both"),
    ]
    for delay, at, why in wrong:
        with raises(InvalidParameterError, f"send(delay={delay!r}, at={at!r})") as caught:
            await box.send("x", delay=delay, at=at)
        check(why in str(caught[0]), f"it says {caught[0]}")
    await h.counts(box)
    await box.send("x", delay=YEAR)
    await h.counts(box, delayed=1)


@on_mailbox("checkpoints")
async def a_checkpoint_is_bytes(h: Harness, box: AnyMailbox) -> None:
    """What is none is refused, and the one before it stays."""
    message = await h.delivery(box)
    await message.save_checkpoint(b"1")
    bad: list[Any] = ["2", None, {"a": 1}, 3]
    for value in bad:
        with raises(InvalidParameterError, f"save_checkpoint({value!r})"):
            await message.save_checkpoint(value)
    check(message.checkpoint == b"1", f"the checkpoint is {message.checkpoint!r}")
    await message.acknowledge()


@on_mailbox()
async def a_refused_parameter_is_named(h: Harness, box: AnyMailbox) -> None:
    """The error's text names the parameter and the value."""
    with raises(InvalidParameterError, "a bad max_messages") as caught:
        await box.receive(max_messages=5_000)
    text = str(caught[0])
    check("max_messages" in text and "5000" in text, f"the error names neither parameter nor value: {text}")
    check(isinstance(caught[0], ValueError), "it is no ValueError")
