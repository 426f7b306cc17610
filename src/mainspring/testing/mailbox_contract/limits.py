"""The limits of parameters: outside them InvalidParameterError, and nothing happens."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from mainspring.core import clock
from mainspring.errors import InvalidParameterError
from mainspring.testing.mailbox_contract.harness import Harness, behaviour, check, equal, raises

YEAR = 366 * 86_400.0


@behaviour()
async def receive_checks_max_messages(h: Harness) -> None:
    """max_messages is a whole number from 1 to 1,000."""
    async with h.open() as box:
        await box.send("x")
        bad: list[Any] = [0, -1, 1_001, 1.5, math.nan]
        for value in bad:
            with raises(InvalidParameterError, f"max_messages={value!r}"):
                await box.receive(max_messages=value)
        await h.counts(box, pending=1)
        equal(len(await box.receive(max_messages=1_000)), 1, "messages received with max_messages=1000")


@behaviour()
async def receive_checks_visibility_timeout(h: Harness) -> None:
    """visibility_timeout is 0 to 43,200 seconds and a number."""
    async with h.open() as box:
        await box.send("x")
        for value in (-1, -0.001, 43_200.5, math.inf, math.nan):
            with raises(InvalidParameterError, f"visibility_timeout={value!r}"):
                await box.receive(visibility_timeout=value)
        await h.counts(box, pending=1)
        equal(len(await box.receive(visibility_timeout=43_200)), 1, "messages received for twelve hours")


@behaviour()
async def receive_checks_wait_time(h: Harness) -> None:
    """wait_time_seconds is 0 or more and a number."""
    async with h.open() as box:
        await box.send("x")
        for value in (-1, -math.inf, math.nan):
            with raises(InvalidParameterError, f"wait_time_seconds={value!r}"):
                await box.receive(wait_time_seconds=value)
        await h.counts(box, pending=1)
        equal(len(await box.receive(wait_time_seconds=math.inf)), 1, "messages received with an endless wait")


@behaviour()
async def a_refused_parameter_is_named(h: Harness) -> None:
    """The error's text names the parameter and the value."""
    async with h.open() as box:
        with raises(InvalidParameterError, "a bad max_messages") as caught:
            await box.receive(max_messages=5_000)
        text = str(caught[0])
        check("max_messages" in text and "5000" in text, f"the error names neither parameter nor value: {text}")
        check(isinstance(caught[0], ValueError), "it is no ValueError")


@behaviour("checkpoints")
async def a_checkpoint_is_bytes(h: Harness) -> None:
    """What is none is refused, and the one before it stays."""
    async with h.open() as box:
        await box.send("x")
        message = await h.one(box)
        await message.save_checkpoint(b"1")
        bad: list[Any] = ["2", None, {"a": 1}, 3]
        for value in bad:
            with raises(InvalidParameterError, f"save_checkpoint({value!r})"):
                await message.save_checkpoint(value)
        check(message.checkpoint == b"1", f"the checkpoint is {message.checkpoint!r}")
        await message.acknowledge()


@behaviour("delay")
async def send_checks_delay(h: Harness) -> None:
    """A delay is 0 to 366 days and a number; nothing is sent otherwise."""
    async with h.open() as box:
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


@behaviour("priority")
async def send_checks_priority(h: Harness) -> None:
    """A priority is a whole number within ±32,767."""
    async with h.open() as box:
        bad: list[Any] = [32_768, -32_768, 0.5, math.nan, "high"]
        for value in bad:
            with raises(InvalidParameterError, f"priority={value!r}"):
                await box.send("x", priority=value)
        await h.counts(box)
        await box.send("low", priority=-32_767)
        await box.send("high", priority=32_767)
        equal((await h.one(box)).body, "high", "the first of the two extremes")


@behaviour("expiry")
async def send_checks_expires_in(h: Harness) -> None:
    """expires_in is above 0, at most 366 days, and a number."""
    async with h.open() as box:
        for value in (0, -1, YEAR + 1, math.inf, math.nan):
            with raises(InvalidParameterError, f"expires_in={value!r}"):
                await box.send("x", expires_in=value)
        await h.counts(box)
        await box.send("x", expires_in=YEAR)
        await h.counts(box, pending=1)


@behaviour()
async def send_checks_headers(h: Harness) -> None:
    """Headers are strings by string."""
    async with h.open() as box:
        huge = 10**4_300  # repr() of it raises
        bad: list[Any] = [{"a": 1}, {1: "a"}, {"a": None}, {"a": huge}, {huge: "a"}]
        for number, value in enumerate(bad):
            with raises(InvalidParameterError, f"headers of kind {number}"):
                await box.send("x", headers=value)
        await h.counts(box)


@behaviour("dedup")
async def send_checks_dedup_key(h: Harness) -> None:
    """A dedup_key is a string of at least one character."""
    async with h.open() as box:
        bad: list[Any] = ["", 5, b"x"]
        for value in bad:
            with raises(InvalidParameterError, f"dedup_key={value!r}"):
                await box.send("x", dedup_key=value)
        await h.counts(box)


@behaviour()
async def nack_checks_delay(h: Harness) -> None:
    """A nack's delay is 0 to 366 days and a number; otherwise the message is not settled."""
    async with h.open() as box:
        await box.send("x")
        message = await h.one(box)
        for value in (-1, YEAR + 1, math.inf, math.nan):
            with raises(InvalidParameterError, f"nack(delay={value!r})"):
                await message.nack(delay=value)
        check(not message.is_settled, "a refused nack settled the message")
        await message.acknowledge()


@behaviour()
async def extend_checks_timeout(h: Harness) -> None:
    """extend_visibility takes 0 to 43,200 seconds, and a number."""
    async with h.open() as box:
        await box.send("x")
        message = await h.one(box)
        for value in (-1, 43_200.5, math.inf, math.nan):
            with raises(InvalidParameterError, f"extend_visibility({value!r})"):
                await message.extend_visibility(value)
        await message.extend_visibility(43_200)
        await message.extend_visibility(0)
        await message.acknowledge()


@behaviour()
async def dead_letters_checks_limit(h: Harness) -> None:
    """dead_letters takes a limit from 1."""
    async with h.open() as box:
        for value in (0, -1):
            with raises(InvalidParameterError, f"dead_letters(limit={value!r})"):
                await box.dead_letters(limit=value)
