"""What a supervisor does when one of its worker processes ends: decisions only."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from mainspring.cli.user_errors import WRONG_USE

if TYPE_CHECKING:
    from random import Random

    from mainspring.policies import RestartPolicy


@dataclass(frozen=True, slots=True)
class Ended:
    """How a worker process ended: its exit status, how long it ran (seconds), and whether its own work was over."""

    status: int
    ran_for: float
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again in ``delay`` seconds; ``restarts`` is the count in a row from now on."""

    delay: float
    restarts: int


@dataclass(frozen=True, slots=True)
class NoRestart:
    """Its work is done; it is not started again."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The worker cannot be kept running: stop the other workers, and tell the operator."""


@dataclass(frozen=True, slots=True)
class AwaitChange:
    """It cannot run as the source stands: start it again when a file changes."""


RestartDecision: TypeAlias = Restart | NoRestart | GiveUp | AwaitChange


def after_exit(
    ended: Ended, *, stopping: bool, reload: bool, told: bool, restarts: int, policy: RestartPolicy, rng: Random
) -> RestartDecision:
    """Decide what happens to a worker that has ended.

    ``stopping``: the supervisor itself is stopping. ``told``: the supervisor asked this worker to stop, for a reload. A worker
    whose loops have all ended is done. A worker that an operator stopped by SIGTERM is replaced at once. A worker that crashed,
    or had to cancel its work, is replaced after the policy's backoff. It is not replaced if its command line is wrong, since
    the next one would fail alike.
    """
    if stopping:
        return NoRestart()
    if told:
        return Restart(0.0, 0)
    if reload and ended.status != 0:
        return AwaitChange()
    if ended.finished and ended.status == 0:
        return AwaitChange() if reload else NoRestart()
    if ended.status == 0:
        return Restart(0.0, restarts)
    if ended.status == WRONG_USE:
        return GiveUp()
    count, delay = policy.next_restart(restarts, ended.ran_for, rng)
    return GiveUp() if delay is None else Restart(delay, count)


def status_of_returncode(returncode: int) -> int:
    """Return a process's return code as a shell would show it: 128 + n if signal n killed it."""
    return 128 - returncode if returncode < 0 else returncode


def worst(statuses: list[int]) -> int:
    """Return the exit status of a supervisor over those of its workers: the highest, 0 if there is none."""
    return max(statuses, default=0)


def how(returncode: int) -> str:
    """Return an ending in words: ``exit status 70``, ``killed by SIGKILL``."""
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
