"""What is kept of a message's earlier attempts: decided without a store."""

from __future__ import annotations

from mainspring.mailbox.history import LAST, LEASE_EXPIRED, crashes_before, read_history, remember, silences


def test_the_last_attempts_are_kept_and_the_crashes_before_them_counted():
    for attempts in range(1, 3 * LAST):
        history = silences(None, attempts)
        kept = read_history(history)
        assert [failure.attempt for failure in kept] == list(range(max(1, attempts - LAST), attempts))
        assert {failure.error_type for failure in kept} <= {LEASE_EXPIRED}
        assert crashes_before(history, attempts) == attempts - 1


def test_a_failure_is_kept_with_the_silences_before_it():
    history = remember(None, 3, "no such row", "LookupError", 1.0)
    history = remember(history, LAST + 9, "still none", "LookupError", 2.0)
    kept = read_history(history)
    assert [failure.attempt for failure in kept] == list(range(10, LAST + 10))
    assert kept[-1].error == "still none"
    assert crashes_before(history, LAST + 10) == LAST + 7
