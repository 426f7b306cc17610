"""The one source of randomness, so that a virtual run can seed all of it."""

from __future__ import annotations

from contextvars import ContextVar
from random import Random, SystemRandom

_rng: ContextVar[Random] = ContextVar("mainspring_rng")
_system = SystemRandom()


def rng() -> Random:
    """The generator for jitter and identities: the operating system's, or the seeded one of a virtual run."""
    return _rng.get(_system)


def seed(value: int) -> None:
    """Make every draw in this context, and in the tasks started from it, follow from ``value`` (tests only)."""
    _rng.set(Random(value))  # noqa: S311 - reproducibility is the point


def token(bits: int = 64) -> str:
    """A new random identity as lower-case hexadecimal of ``bits`` bits."""
    return f"{rng().getrandbits(bits):0{bits // 4}x}"
