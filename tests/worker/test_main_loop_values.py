"""What MainLoop's constructor and calls refuse: each by name, with what would do."""

from __future__ import annotations

import math

import pytest

from mainspring import DeadLetterPolicy, InMemoryMailbox, LeasePolicy, MainLoop, RetryPolicy
from mainspring.errors import ConfigError

pytestmark = pytest.mark.anyio


async def handle(job: int) -> None: ...


BAD = [
    ("name", 5, "name must be a string"),
    ("concurrency", 0, "concurrency must be a whole number from 1, not 0"),
    ("concurrency", -3, "concurrency must be a whole number from 1"),
    ("concurrency", 1.5, "concurrency must be a whole number from 1, not 1.5"),
    ("concurrency", "4", "concurrency must be a whole number from 1, not '4'"),
    ("concurrency", True, "concurrency must be a whole number from 1"),
    ("concurrency", None, "concurrency must be a whole number from 1"),
    ("visibility_timeout", 0, "visibility_timeout must be 1 to 43200 seconds, not 0"),
    ("visibility_timeout", 0.5, "visibility_timeout must be 1 to 43200 seconds"),
    ("visibility_timeout", 43_201, "visibility_timeout must be 1 to 43200 seconds"),
    ("visibility_timeout", math.nan, "visibility_timeout must be 1 to 43200 seconds, not nan"),
    ("visibility_timeout", "60", "visibility_timeout must be 1 to 43200 seconds, not '60'"),
    ("visibility_timeout", None, "visibility_timeout must be 1 to 43200 seconds"),
    ("visibility_timeout", True, "visibility_timeout must be 1 to 43200 seconds"),
    ("wait_time_seconds", -1, "wait_time_seconds must be 0 or more seconds and finite, not -1"),
    ("wait_time_seconds", math.inf, "wait_time_seconds must be 0 or more seconds and finite"),
    ("wait_time_seconds", math.nan, "wait_time_seconds must be 0 or more seconds and finite"),
    ("wait_time_seconds", "x", "wait_time_seconds must be 0 or more seconds and finite"),
    ("handler_timeout", 0, "handler_timeout must be above 0 seconds, or None, not 0"),
    ("handler_timeout", -1, "handler_timeout must be above 0 seconds"),
    ("handler_timeout", math.nan, "handler_timeout must be above 0 seconds"),
    ("handler_timeout", math.inf, "handler_timeout must be above 0 seconds"),
    ("handler_timeout", "1", "handler_timeout must be above 0 seconds"),
    ("shutdown_timeout", -1, "shutdown_timeout must be 0 or more seconds, or None, not -1"),
    ("shutdown_timeout", math.nan, "shutdown_timeout must be 0 or more seconds"),
    ("shutdown_timeout", "1", "shutdown_timeout must be 0 or more seconds"),
    ("shutdown_priority", 1.5, "shutdown_priority must be a whole number, not 1.5"),
    ("shutdown_priority", None, "shutdown_priority must be a whole number"),
    ("retry", 5, "RetryPolicy expected, not 5"),
    ("retry", LeasePolicy(), "RetryPolicy expected"),
    ("dead_letter", "never", "DeadLetterPolicy expected, not 'never'"),
    ("lease", "on-beat", "LeasePolicy expected, not 'on-beat'"),
]


@pytest.mark.parametrize(("parameter", "value", "text"), BAD)
def test_wrong_constructor_values_are_named(parameter, value, text):
    with pytest.raises(ConfigError) as caught:
        MainLoop(InMemoryMailbox(), handle, **{parameter: value})
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mailbox", [None, "memory://jobs", object()])
def test_a_mailbox_is_needed(mailbox):
    with pytest.raises(ConfigError, match=r"mailbox must be a Mailbox \(see open_mailbox\)"):
        MainLoop(mailbox, handle)


def test_the_extremes_are_allowed():
    MainLoop(
        InMemoryMailbox(),
        handle,
        concurrency=100_000,
        visibility_timeout=43_200,
        wait_time_seconds=0,
        handler_timeout=0.001,
        shutdown_timeout=0,
        shutdown_priority=-5,
        retry=RetryPolicy(),
        dead_letter=DeadLetterPolicy(),
        lease=LeasePolicy(),
    )


def test_the_defaults():
    loop = MainLoop(InMemoryMailbox(), handle)
    assert (loop.name, loop.concurrency, loop.visibility_timeout, loop.wait_time_seconds) == ("handle", 1, 60, 30)
    assert (loop.shutdown_timeout, loop.shutdown_priority) == (None, 0)
    assert loop.lease == LeasePolicy()
    assert MainLoop(InMemoryMailbox(), handle, name="jobs").name == "jobs"


@pytest.mark.parametrize(
    ("keyword", "value", "text"),
    [
        ("max_iterations", -1, "max_iterations must be a whole number from 0, or None, not -1"),
        ("max_iterations", 1.5, "max_iterations must be a whole number"),
        ("max_iterations", "3", "max_iterations must be a whole number"),
        ("max_iterations", True, "max_iterations must be a whole number"),
        ("visibility_timeout", 0, "visibility_timeout must be 1 to 43200 seconds"),
        ("visibility_timeout", "60", "visibility_timeout must be 1 to 43200 seconds"),
        ("wait_time_seconds", -1, "wait_time_seconds must be 0 or more seconds"),
        ("wait_time_seconds", math.nan, "wait_time_seconds must be 0 or more seconds"),
    ],
)
async def test_wrong_values_of_a_run_are_named_and_do_not_use_a_shutdown_up(keyword, value, text):
    mailbox = InMemoryMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle)
    await loop.shutdown()
    with pytest.raises(ConfigError, match=text):
        await loop.run(**{keyword: value})
    assert not loop.running
    await loop.run()  # the shutdown from before
    assert (await mailbox.counts()).pending == 1


@pytest.mark.parametrize("timeout", [-1, math.nan, "5", None, True])
async def test_a_wrong_timeout_of_a_shutdown_is_named_and_asks_for_nothing(timeout):
    mailbox = InMemoryMailbox()
    await mailbox.send(1)
    loop = MainLoop(mailbox, handle)
    with pytest.raises(ConfigError, match="shutdown: timeout must be 0 or more seconds"):
        await loop.shutdown(timeout=timeout)
    await loop.run(max_iterations=1)
    assert (await mailbox.counts()).settled == 1
