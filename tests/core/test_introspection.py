"""Whether what a user hands over is async, however it is wrapped."""

from __future__ import annotations

from functools import partial

import pytest

from mainspring.core.introspection import code_of, innermost, instead_of, is_async


async def asynchronous(a=0, b=0):
    pass


def plain(a=0, b=0):
    return asynchronous()


class Called:
    async def __call__(self):
        pass

    async def method(self):
        pass

    def plainly(self):
        pass


ASYNC = [asynchronous, partial(asynchronous, 1), partial(partial(asynchronous, 1), 2), Called(), Called().method]
PLAIN = [plain, partial(plain, 1), Called().plainly, Called, partial(Called), print, lambda: asynchronous()]


@pytest.mark.parametrize("fn", ASYNC)
def test_async_ones(fn):
    assert is_async(fn)


@pytest.mark.parametrize("fn", PLAIN)
def test_plain_ones(fn):
    assert not is_async(fn)


def test_what_is_below_the_wrappings():
    called = Called()
    assert innermost(partial(partial(plain, 1), 2)) is plain
    assert code_of(partial(plain)) is plain
    assert innermost(partial(called)) is called
    assert code_of(partial(called)) is Called.__call__


def test_a_coroutine_is_told_how_to_be_written_and_closed():
    coroutine = asynchronous()
    assert instead_of(coroutine, "submit") == (
        "not a coroutine: write submit(asynchronous, …) instead of submit(asynchronous(…))"
    )
    assert coroutine.cr_frame is None
    assert instead_of(3, "submit") == "not 3"
