"""Errors say whose fault they are and whether a retry can help; Retry and Reject say what to do."""

from __future__ import annotations

import math

import pytest

import mainspring
from mainspring import errors

LEAVES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MainspringError)]


@pytest.mark.parametrize("kind", LEAVES)
def test_each_error_says_whose_fault_it_is(kind):
    assert kind.fault in ("caller", "config", "environment", "handler")
    assert isinstance(kind.retryable, bool)
    assert kind.__doc__


def test_what_another_try_can_help():
    helped = {kind.__name__ for kind in LEAVES if kind.retryable}
    assert helped == {
        "MailboxFullError",
        "OffloadFullError",
        "OffloadTimeoutError",
        "OffloadWorkerDiedError",
        "MailboxConnectionError",
        "HandlerStalledError",
        "HandlerTimeoutError",
        "JobRunningError",
        "JournalLockedError",
        "OverrideLockedError",
        "RequestTimeoutError",
        "ServiceNotRunningError",
        "SessionFullError",
        "TaskExitError",
        "TicketTimeoutError",
    }


def test_the_errors_that_python_has_a_word_for_are_those_too():
    assert issubclass(errors.InvalidParameterError, ValueError)
    assert issubclass(errors.SerializationError, ValueError)
    assert issubclass(errors.HandlerTimeoutError, TimeoutError)
    mailbox = {kind for kind in LEAVES if issubclass(kind, errors.MailboxError)}
    assert {errors.MailboxClosedError, errors.ReceiptHandleExpiredError, errors.SerializationError} < mailbox


@pytest.mark.parametrize("name", [n for n in mainspring.__all__ if n.endswith("Error")])
def test_each_public_error_has_the_one_base(name):
    assert issubclass(getattr(mainspring, name), mainspring.MainspringError)


def test_every_error_is_public():
    assert {kind.__name__ for kind in LEAVES} <= set(mainspring.__all__)


def test_retry_and_reject_are_no_errors_of_the_package():
    assert not issubclass(errors.Retry, errors.MainspringError)
    assert not issubclass(errors.Reject, errors.MainspringError)
    assert (errors.Retry().delay, errors.Retry().charge) == (None, True)
    assert str(errors.Retry(3)) == "retry in 3 s"
    assert str(errors.Reject("no such user")) == "no such user"


@pytest.mark.parametrize("delay", [-1, math.nan, math.inf, 367 * 86_400, "5", True, [1]])
def test_retry_refuses_a_delay_that_is_none(delay):
    with pytest.raises(errors.InvalidParameterError, match="Retry: delay must be 0 to 31622400 seconds"):
        errors.Retry(delay)


def test_a_stalled_handler_tells_its_line():
    assert errors.HandlerStalledError("stalled", where="x.py:3 in f").where == "x.py:3 in f"
