"""The one source of randomness, so that a virtual run can seed all of it."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from random import Random, SystemRandom
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_rng: ContextVar[Random] = ContextVar("mainspring_rng")
_system = SystemRandom()


def rng() -> Random:
    """Return the generator for jitter and identities: the operating system's, or the seeded one of a virtual run."""
    return _rng.get(_system)


def seed(value: int) -> None:
    """Make every draw in this context, and in the tasks started from it, follow from ``value`` (tests only)."""
    _rng.set(Random(value))  # noqa: S311 - reproducibility is the point


@contextmanager
def seeded(value: int) -> Iterator[None]:
    """Seed for the length of a block: see :func:`seed`."""
    token = _rng.set(Random(value))  # noqa: S311 - as above
    try:
        yield
    finally:
        _rng.reset(token)


def token(bits: int = 64) -> str:
    """Return a new random identity as lower-case hexadecimal of ``bits`` bits."""
    return f"{rng().getrandbits(bits):0{bits // 4}x}"
