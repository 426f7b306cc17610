"""``GroupSettings``: the numbers of a group, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mainspring.core.introspection import check_runs, instead_of, is_async, is_generator, name_of
from mainspring.errors import ConfigError
from mainspring.policies import RestartPolicy
from mainspring.runtime.hard_exit import kill_with_words
from mainspring.validation import is_number, is_whole
from mainspring.worker.middleware import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.group.calibration import Timeouts
    from mainspring.worker.main_loop import MainLoop
    from mainspring.worker.middleware import Middleware

OnCrash = Literal["terminate", "report"]


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """See :class:`~mainspring.group.group.LoopGroup` for the meaning of each. Times are in seconds."""

    shutdown_timeout: float = 30.0
    cancel_grace: float = 5.0
    drain_delay: float = 0.0
    max_concurrency: int | None = None
    health_host: str = "127.0.0.1"
    health_port: int | None = None
    checks: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    check_timeout: float = 0.8
    check_interval: float = 10.0
    check_max_failures: int = 3
    restart: RestartPolicy | None = None
    watchdog_threshold: float | None = 720.0
    watchdog_interval: float = 60.0
    block_threshold: float | None = 30.0
    guardian: bool | None = None
    on_crash: OnCrash = "terminate"
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None
    middleware: Sequence[Middleware] = ()
    kill: Callable[[str], None] = kill_with_words
    """How the watchdog ends the process; a simulated one ends otherwise."""

    def __post_init__(self) -> None:
        for name in ("shutdown_timeout", "cancel_grace", "drain_delay"):
            _seconds(name, getattr(self, name), least=0.0)
        for name in ("watchdog_threshold", "watchdog_interval", "block_threshold", "check_timeout", "check_interval"):
            value = getattr(self, name)
            if value is not None or name not in {"watchdog_threshold", "block_threshold"}:
                _seconds(name, value, least=0.001)
        if self.max_concurrency is not None and not is_whole(self.max_concurrency, 1):
            raise ConfigError(
                f"LoopGroup: max_concurrency must be a whole number from 1, or None, not {self.max_concurrency!r}"
            )
        if not is_whole(self.check_max_failures, 1):
            raise ConfigError(
                f"LoopGroup: check_max_failures must be a whole number from 1, not {self.check_max_failures!r}"
            )
        if self.health_port is not None and not (is_whole(self.health_port, 0) and self.health_port <= 65_535):
            raise ConfigError(f"LoopGroup: health_port must be 0 to 65535, or None, not {self.health_port!r}")
        if not isinstance(self.health_host, str) or not self.health_host:
            raise ConfigError(f"LoopGroup: health_host must be a host name or an address, not {self.health_host!r}")
        if self.on_crash not in ("terminate", "report"):
            raise ConfigError(f'LoopGroup: on_crash must be "terminate" or "report", not {self.on_crash!r}')
        if self.restart is not None and not isinstance(self.restart, RestartPolicy):
            raise ConfigError(f"LoopGroup: restart must be a RestartPolicy, or None, not {self.restart!r}")
        checked(self.middleware, "LoopGroup")
        if self.lifespan is not None:
            self._check_lifespan(self.lifespan)
        if self.guardian is not None and not isinstance(self.guardian, bool):
            raise ConfigError(f"LoopGroup: guardian must be True, False or None, not {self.guardian!r}")
        if not isinstance(self.checks, Mapping):
            raise ConfigError(
                f"LoopGroup: checks must be functions by name, as in {{'database': ping}}, not {self.checks!r}"
            )
        for name, check in self.checks.items():
            if not callable(check):
                raise ConfigError(f"LoopGroup: check {name!r} must be a function, not {check!r}")
            check_runs(check, f"LoopGroup: check {name!r},")

    @staticmethod
    def _check_lifespan(lifespan: object) -> None:
        advice = "decorate it with @asynccontextmanager"
        if isinstance(lifespan, AbstractAsyncContextManager):
            raise ConfigError(
                "LoopGroup: lifespan must be the function itself, without calling it: each run calls it anew"
            )
        if not callable(lifespan):
            raise ConfigError(f"LoopGroup: lifespan must be a function, {instead_of(lifespan, 'lifespan=')}; {advice}")
        if is_generator(lifespan) or is_async(lifespan):
            raise ConfigError(f"LoopGroup: lifespan {name_of(lifespan)} gives no async context manager; {advice}")

    def timeouts_of(self, loop: MainLoop) -> Timeouts:
        """Return the timeouts that a loop of the group runs under."""
        from mainspring.group.calibration import Timeouts  # late: only a group that runs needs it

        return Timeouts(
            loop=loop.name,
            visibility_timeout=loop.visibility_timeout,
            wait_time_seconds=loop.wait_time_seconds,
            renew=loop.lease.renew,
            watchdog_threshold=self.watchdog_threshold,
            watchdog_interval=self.watchdog_interval,
            block_threshold=self.block_threshold,
            drain_delay=self.drain_delay,
            shutdown_timeout=self.shutdown_timeout,
            cancel_grace=self.cancel_grace,
            max_attempts=loop.dead_letter.max_attempts,
            max_crashes=loop.dead_letter.max_crashes,
            horizon=loop.retry.horizon(loop.dead_letter.max_attempts),
        )

    @property
    def stop_within(self) -> float:
        """Seconds from the request for a shutdown until a process that owns itself has left in any case."""
        from mainspring.group.calibration import Timeouts

        phases = Timeouts(
            drain_delay=self.drain_delay, shutdown_timeout=self.shutdown_timeout, cancel_grace=self.cancel_grace
        )
        return phases.needed

    @property
    def hard_limit(self) -> float:
        """Seconds past the finish deadline after which a process that owns itself leaves by force."""
        from mainspring.group.calibration import KILL_MARGIN

        return self.cancel_grace + KILL_MARGIN


def _seconds(name: str, value: object, *, least: float) -> None:
    if not is_number(value, least):
        raise ConfigError(f"LoopGroup: {name} must be a number of seconds from {least:g}, not {value!r}")
