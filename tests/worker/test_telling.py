"""What a loop says of how its deliveries ended: the event of each, and the count."""

from __future__ import annotations

import pytest

from mainspring import ConfigError, Context, InMemoryMailbox, LoopGroup, MainLoop, Reject, RetryPolicy
from mainspring.events import MessageNotAcknowledged
from support import FaultyMailbox

SOON = RetryPolicy(initial_delay=3, jitter="none")


async def ends(handler, count=1):
    """The events of the first ``count`` deliveries of a message that ``handler`` is given, and the loop."""
    box, heard = InMemoryMailbox(), []
    loop = MainLoop(box, handler, retry=SOON, wait_time_seconds=1)
    loop.dispatcher.subscribe(MessageNotAcknowledged, heard.append)
    await box.send(1)
    await loop.run(max_iterations=count)
    return heard, loop


async def test_a_failure_says_where_it_came_from_and_when_it_comes_again(virtual_clock):
    async def handle(job: int) -> None:
        raise ValueError("no")

    (event,), _ = await ends(handle)
    assert (event.outcome, event.error, event.charged, event.retry_in) == ("retried", "ValueError: no", True, 3)
    assert event.where.startswith(__file__)
    assert event.where.endswith('in handle: raise ValueError("no")')
    assert "Traceback" in event.traceback
    assert "ValueError: no" in event.traceback


async def test_a_dead_letter_and_its_event_have_the_same_traceback(virtual_clock):
    async def handle(job: int) -> None:
        raise ConfigError("no")

    (event,), loop = await ends(handle)
    (letter,) = await loop.mailbox.dead_letters()
    assert letter.traceback == event.traceback
    assert "in handle" in event.traceback


async def test_an_instruction_is_no_fault(virtual_clock):
    async def handle(job: int) -> None:
        raise Reject("nonsense")

    (event,), _ = await ends(handle)
    assert (event.outcome, event.error) == ("dead_lettered", "Reject: nonsense")
    assert (event.where, event.traceback) == ("", "")


@pytest.mark.parametrize(
    ("settle", "outcome"),
    [
        (lambda message: message.acknowledge(), "acknowledged"),
        (lambda message: message.dead_letter("mine"), "dead_lettered"),
        (lambda message: message.nack(delay=9), "retried"),
        (lambda message: message.release(), "released"),
    ],
)
@pytest.mark.parametrize("raises", [False, True])
async def test_what_a_handler_settles_by_itself_is_called_what_it_is(virtual_clock, settle, outcome, raises):
    async def handle(job: int, ctx: Context) -> None:
        await settle(ctx.message)
        if raises:
            raise ValueError("afterwards")

    _, loop = await ends(handle)
    assert loop.outcomes == {outcome: 1}


async def test_a_huge_error_is_cut(virtual_clock):
    async def handle(job: int) -> None:
        raise ValueError("x" * 1_000_000)

    (event,), _ = await ends(handle)
    assert len(event.error) < 3_000
    assert event.error.endswith("(1,000,000 characters)")


@pytest.mark.slow
async def test_a_run_until_empty_ends_with_the_last_message_and_waits_days_without_effort(virtual_clock):
    looks = 0

    async def look(counts):
        nonlocal looks
        looks += 1
        return await counts()

    async def handle(job: int) -> None:
        """Nothing to do."""

    box = FaultyMailbox(body=int)
    box.always("counts", look)
    await box.send(1, delay=86_400)
    began = virtual_clock.now
    await LoopGroup([MainLoop(box, handle)]).run(install_signals=False, until_empty=True)
    assert virtual_clock.now - began == 86_400
    assert looks < 86_400 / 4
