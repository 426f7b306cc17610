"""Which values are numbers of seconds, and which are counts."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest

from mainspring.validation import is_number, is_whole


@pytest.mark.parametrize("value", [0, 1, 0.0, 2.5, 10])
def test_numbers_within_the_limits(value):
    assert is_number(value, 0, 10)


@pytest.mark.parametrize("value", [-1, -1e-300, 10.1, math.nan, True, False, "1", None, Decimal(1), 1j])
def test_what_is_none_within_the_limits(value):
    assert not is_number(value, 0, 10)


def test_infinity_is_one_only_where_that_is_said():
    assert not is_number(math.inf, 0)
    assert is_number(1e308, 0)
    assert is_number(math.inf, 0, math.inf)


def test_counts_are_integers_from_the_least_on():
    assert [is_whole(value) for value in (-3, 0, 10**30)] == [True] * 3
    assert [is_whole(value, 1) for value in (0, 1, 2)] == [False, True, True]
    assert [is_whole(value) for value in (True, 1.0, "1", None, math.nan)] == [False] * 5
