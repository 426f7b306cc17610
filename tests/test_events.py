"""The in-process bus: order, types, raising subscribers, subscriptions that change meanwhile; and events as values."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial

import pytest

from mainspring import InvalidParameterError, events
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


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit("mine")])
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
