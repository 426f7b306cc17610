"""The in-process bus: order, types, raising subscribers, subscriptions that change meanwhile; and events as values."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from functools import partial

import anyio
import pytest

from mainspring import ConfigError, InvalidParameterError, events
from mainspring.events import Dispatcher, LeaseLost, MessageFinished, MessageStarted, Tally

EVENTS = [
    kind
    for kind in vars(events).values()
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind not in (Dispatcher, events.DispatchResult)
]
STARTED = MessageStarted("loop", "m1", "r1", 1, 1)


@pytest.mark.parametrize("kind", EVENTS)
def test_events_are_frozen_values_with_a_meaning(kind):
    assert kind.__dataclass_params__.frozen
    assert kind.__doc__
    assert not kind.__doc__.startswith(f"{kind.__name__}(")  # one that dataclass made up


@pytest.mark.parametrize("kind", [kind for kind in EVENTS if kind is not events.Event])
def test_every_event_says_when_it_was(kind):
    assert issubclass(kind, events.Event)


async def test_an_event_is_stamped_by_the_clock_of_its_run_and_compared_without_that(virtual_clock):
    first = LeaseLost("loop", "m1")
    await anyio.sleep(90)
    second = LeaseLost("loop", "m1")
    assert (second.at - first.at).total_seconds() == 90
    assert second.at.utcoffset().total_seconds() == 0
    assert first == second


def test_events_of_one_kind_are_equal_if_their_fields_are():
    lost = LeaseLost("loop", "m1")
    assert lost == LeaseLost("loop", "m1")
    assert hash(lost) == hash(LeaseLost("loop", "m1"))
    assert lost != LeaseLost("loop", "m2")
    assert lost != ("loop", "m1")
    finished = ("loop", "m1", "r1", "retried", 0.5, 1)
    assert MessageFinished(*finished) != events.MessageNotAcknowledged(*finished)


def test_an_event_shows_its_fields_but_not_its_instant():
    assert repr(LeaseLost("loop", "m1")) == "LeaseLost(loop='loop', message_id='m1')"


def test_subscribers_are_told_in_the_order_in_which_they_subscribed():
    dispatcher, heard = Dispatcher(), []
    for name in "abc":
        dispatcher.subscribe(MessageStarted, lambda event, name=name: heard.append((name, event)))
    result = dispatcher.dispatch(STARTED)
    assert heard == [("a", STARTED), ("b", STARTED), ("c", STARTED)]
    assert (result.delivered, result.errors) == (3, ())


def test_a_type_hears_itself_and_its_subclasses_only():
    dispatcher, heard = Dispatcher(), []
    dispatcher.subscribe(MessageStarted, lambda event: heard.append("started"))
    dispatcher.subscribe(object, lambda event: heard.append("all"))
    dispatcher.subscribe(LeaseLost, lambda event: heard.append("lost"))
    dispatcher.dispatch(STARTED)
    assert heard == ["started", "all"]


async def asynchronous(event):
    raise AssertionError


def generator(event):
    yield event


async def async_generator(event):
    yield event


@pytest.mark.parametrize(
    ("subscriber", "what"), [(asynchronous, "async"), (partial(asynchronous), "async"), (None, "no function")]
)
def test_one_that_nobody_would_run_is_refused(subscriber, what):
    dispatcher = Dispatcher()
    with pytest.raises(
        InvalidParameterError, match=rf"a subscriber is a plain function of \(event\), and .* is {what}; have"
    ):
        dispatcher.subscribe(MessageStarted, subscriber)
    assert not dispatcher.wants(MessageStarted)


@pytest.mark.parametrize(
    "error", [ValueError("mine"), SystemExit("mine"), asyncio.CancelledError("mine"), GeneratorExit("mine")]
)
def test_one_that_raises_is_logged_and_the_next_still_hears(caplog, error):
    dispatcher, heard = Dispatcher(), []

    def broken(event: MessageStarted) -> None:
        raise error

    dispatcher.subscribe(MessageStarted, broken)
    dispatcher.subscribe(MessageStarted, heard.append)
    with caplog.at_level(logging.ERROR, "mainspring"):
        result = dispatcher.dispatch(STARTED)
    assert heard == [STARTED]
    assert (result.delivered, result.errors) == (1, (error,))
    assert "a subscriber to MessageStarted raised" in caplog.text
    assert f"{type(error).__name__}: mine" in caplog.text


def test_an_interrupt_is_raised_once_all_are_told():
    dispatcher, heard = Dispatcher(), []

    def broken(event: MessageStarted) -> None:
        raise KeyboardInterrupt

    dispatcher.subscribe(MessageStarted, broken)
    dispatcher.subscribe(MessageStarted, heard.append)
    with pytest.raises(KeyboardInterrupt):
        dispatcher.dispatch(STARTED)
    assert heard == [STARTED]


@pytest.mark.parametrize(
    ("kind", "subscriber", "complaint"),
    [
        ("Said", print, "subscribe takes the class of events to hear, not 'Said'"),
        (STARTED, print, "subscribe takes the class of events to hear, not MessageStarted"),
        (MessageStarted, generator, "a subscriber is a plain function of .* is a generator"),
        (MessageStarted, async_generator, "a subscriber is a plain function of .* is a generator"),
    ],
)
def test_a_subscription_that_could_hear_nothing_is_refused(kind, subscriber, complaint):
    dispatcher = Dispatcher()
    with pytest.raises(InvalidParameterError, match=complaint):
        dispatcher.subscribe(kind, subscriber)
    assert dispatcher.dispatch(STARTED).delivered == 0


def test_one_that_hides_that_it_is_async_is_an_error_of_the_dispatch():
    dispatcher = Dispatcher()
    dispatcher.subscribe(MessageStarted, lambda event: asynchronous(event))
    result = dispatcher.dispatch(STARTED)
    assert result.delivered == 0
    assert "is async" in str(result.errors[0])


def test_one_that_returns_a_generator_is_an_error_of_the_dispatch():
    dispatcher = Dispatcher()
    dispatcher.subscribe(MessageStarted, lambda event: generator(event))
    result = dispatcher.dispatch(STARTED)
    assert result.delivered == 0
    assert "returned a generator" in str(result.errors[0])


def test_a_subscription_to_several_classes():
    dispatcher, heard = Dispatcher(), []
    dispatcher.subscribe(MessageStarted | LeaseLost, heard.append)
    dispatcher.dispatch(STARTED)
    assert heard == [STARTED]


def test_a_circle_of_dispatchers_is_refused():
    a, b, c = Dispatcher(), Dispatcher(), Dispatcher()
    a.pass_on_to(b)
    b.pass_on_to(c)
    for other in (a, b, c):
        with pytest.raises(ConfigError, match="in a circle"):
            c.pass_on_to(other)
    with pytest.raises(InvalidParameterError, match="takes another Dispatcher, not 5"):
        a.pass_on_to(5)
    assert a.dispatch(STARTED).delivered == 0


def test_unsubscribing_ends_it_and_may_be_done_twice():
    dispatcher, heard = Dispatcher(), []
    first = dispatcher.subscribe(MessageStarted, heard.append)
    dispatcher.subscribe(MessageStarted, heard.append)  # the same function again: a subscription of its own
    first()
    first()
    assert dispatcher.dispatch(STARTED).delivered == 1


def test_subscriptions_that_change_during_a_dispatch_count_from_the_next():
    dispatcher, heard = Dispatcher(), []

    def once(event: MessageStarted) -> None:
        heard.append("once")
        end()
        dispatcher.subscribe(MessageStarted, lambda event: heard.append("later"))

    end = dispatcher.subscribe(MessageStarted, once)
    dispatcher.subscribe(MessageStarted, lambda event: heard.append("last"))
    dispatcher.dispatch(STARTED)
    assert heard == ["once", "last"]
    dispatcher.dispatch(STARTED)
    assert heard == ["once", "last", "last", "later"]


def test_an_event_that_nobody_wants_need_not_be_built():
    dispatcher = Dispatcher()
    assert not dispatcher.wants(MessageFinished)
    end = dispatcher.subscribe(object, lambda event: None)
    assert dispatcher.wants(MessageFinished)
    end()
    assert not dispatcher.wants(MessageFinished)
    assert dispatcher.dispatch(STARTED).delivered == 0


def test_events_are_passed_on_after_the_own_subscribers_until_that_is_ended():
    own, other, heard = Dispatcher(), Dispatcher(), []
    other.subscribe(MessageStarted, lambda event: heard.append("other"))
    end = own.pass_on_to(other)
    own.subscribe(MessageStarted, lambda event: heard.append("own"))
    assert own.dispatch(STARTED).delivered == 2
    assert heard == ["own", "other"]
    assert not own.wants(MessageFinished)
    other.subscribe(MessageFinished, heard.append)  # one that comes later counts too
    assert own.wants(MessageFinished)
    assert other.dispatch(STARTED).delivered == 1  # nothing goes the other way
    end()
    end()
    assert own.dispatch(STARTED).delivered == 1
    assert not own.wants(MessageFinished)


def test_a_tally_starts_at_nothing():
    tally = Tally()
    tally["done"] += 2
    assert (tally["done"], tally["never"]) == (2, 0)
