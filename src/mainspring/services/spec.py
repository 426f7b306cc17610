"""What a user says of supervised services, as values. Times are in seconds, sizes in bytes."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from mainspring.errors import ConfigError
from mainspring.policies import RestartPolicy
from mainspring.services.restarts import RestartType
from mainspring.validation import is_number, is_whole

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class Strategy(StrEnum):
    """Which services are restarted with a service that has ended (the terms are Erlang's)."""

    ONE_FOR_ONE = "one_for_one"
    """It alone."""
    ONE_FOR_ALL = "one_for_all"
    """All of them."""
    REST_FOR_ONE = "rest_for_one"
    """It, and the services that were started after it."""


def _check_seconds(owner: object, *names: str, above_zero: bool = False) -> None:
    for name in names:
        value = getattr(owner, name)
        if not is_number(value, 0) or (above_zero and value == 0):
            least = "above 0" if above_zero else "0 or more"
            raise ConfigError(f"{type(owner).__name__}: {name} must be {least} seconds, not {value!r}")


def _check_whole(owner: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not is_whole(value, least):
            raise ConfigError(f"{type(owner).__name__}: {name} must be a whole number from {least}, not {value!r}")


def texts(owner: str, name: str, value: object) -> tuple[str, ...]:
    """Return a list of strings as a tuple.

    :raises ConfigError: it is something else, or a NUL character is in it.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{owner}: {name} must be a list of strings, not {value!r}")
    if any("\0" in each for each in value):
        raise ConfigError(f"{owner}: {name} must have no NUL character: {value!r}")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class StartupSettings:
    """How long a service may take to become ready, and how often it is tried.

    Each try has ``timeout`` seconds. After ``max_retries`` failed tries in a row the start has failed. While it starts, its
    probe is asked again after 0.1 s, then each time after twice as long, up to every ``health_check_interval`` seconds.
    """

    timeout: float = 60.0
    max_retries: int = 3
    health_check_interval: float = 5.0

    def __post_init__(self) -> None:
        _check_seconds(self, "timeout", "health_check_interval", above_zero=True)
        _check_whole(self, 1, "max_retries")


@dataclass(frozen=True, slots=True)
class ShutdownSettings:
    """How a service is stopped: SIGTERM, ``drain_timeout`` seconds, SIGKILL of all that is left, ``force_kill_timeout``
    seconds.

    ``timeout`` caps the whole, hooks included. The drain has at least half of it, if ``force_kill_timeout`` would leave less.
    For an orchestrator it caps the stop of all services.
    """

    timeout: float = 30.0
    drain_timeout: float = 20.0
    force_kill_timeout: float = 5.0

    def __post_init__(self) -> None:
        _check_seconds(self, "timeout", "drain_timeout", "force_kill_timeout")


@dataclass(frozen=True, slots=True)
class HealthCheckSettings:
    """When a service that runs counts as unwell and as well again.

    Its probe is asked every ``interval`` seconds and fails if it has not answered after ``timeout``. One failure makes it
    Degraded, ``max_failures`` in a row have it restarted. ``successes`` in a row make it Running again.
    """

    interval: float = 10.0
    timeout: float = 5.0
    max_failures: int = 3
    successes: int = 1

    def __post_init__(self) -> None:
        _check_seconds(self, "interval", "timeout", above_zero=True)
        _check_whole(self, 1, "max_failures", "successes")


@dataclass(frozen=True, slots=True)
class HookSettings:
    """Whether hooks run, and how many seconds each may take where it does not say so itself."""

    enabled: bool = True
    timeout: float = 10.0

    def __post_init__(self) -> None:
        _check_seconds(self, "timeout", above_zero=True)


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The timeouts and policies of one service, or of all that say nothing else."""

    startup: StartupSettings = StartupSettings()
    shutdown: ShutdownSettings = ShutdownSettings()
    health_check: HealthCheckSettings = HealthCheckSettings()
    restart_policy: RestartPolicy = field(default_factory=RestartPolicy)
    hooks: HookSettings = HookSettings()


@dataclass(frozen=True, slots=True)
class Resources:
    """Limits of a service's processes, set before its program starts. None: as the supervisor has it.

    ``memory`` (bytes) and ``processes`` are limits of the whole replica where cgroups (version 2) can be written. Elsewhere
    ``memory`` is that of each process (RLIMIT_DATA), and ``processes`` counts all of the same user and does not hold root.
    ``cpu_seconds`` is processor time of each process, ``open_files`` of each. ``niceness``: from -20 (first) to 19 (last).
    """

    memory: int | None = None
    cpu_seconds: int | None = None
    open_files: int | None = None
    processes: int | None = None
    niceness: int | None = None

    def __post_init__(self) -> None:
        for name in ("memory", "cpu_seconds", "open_files", "processes"):
            if getattr(self, name) is not None:
                _check_whole(self, 1, name)
        if self.niceness is not None and not (is_whole(self.niceness, -20) and self.niceness <= 19):
            raise ConfigError(f"Resources: niceness must be a whole number from -20 to 19, not {self.niceness!r}")


def _check_address(owner: object, name: str, read: Callable[[str], object]) -> None:
    value = getattr(owner, name)
    if not isinstance(value, str):
        raise ConfigError(f"{type(owner).__name__}: {name} must be a string, not {value!r}")
    try:
        read(value.replace("{socket}", "/socket").replace("{service}", "name").replace("{replica}", "1"))
    except ValueError as error:
        raise ConfigError(f"{type(owner).__name__}: {name} must be {error}, not {value!r}") from None


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """Passes if a GET of ``url`` is answered with a status from 200 to 399.

    ``unix:/path.sock/health`` asks over a Unix socket. ``{socket}`` stands for the replica's own socket, ``{service}`` for its
    name, ``{replica}`` for its number.

    :raises ConfigError: the URL is none that can be asked.
    """

    url: str

    def __post_init__(self) -> None:
        from mainspring.services.addresses import http_target

        _check_address(self, "url", lambda url: url.startswith("unix:/") or http_target(url))


@dataclass(frozen=True, slots=True)
class TcpProbe:
    """Passes if a connection to ``host:port`` is made.

    :raises ConfigError: the address is something else.
    """

    address: str

    def __post_init__(self) -> None:
        from mainspring.services.addresses import host_port

        _check_address(self, "address", host_port)


@dataclass(frozen=True, slots=True)
class ExecProbe:
    """Passes if the command ends with exit status 0. What it has started in the background is killed then.

    :raises ConfigError: the command is no list of strings, or an empty one.
    """

    command: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", texts("ExecProbe", "command", self.command))
        if not self.command or not self.command[0]:
            raise ConfigError("ExecProbe: command must name a program")


@dataclass(frozen=True, slots=True)
class GrpcProbe:
    """Passes if the gRPC health service at ``host:port`` or ``unix:/path`` says SERVING of ``service`` (of the whole: ``""``).

    :raises ConfigError: the address is something else, or the extra ``grpc`` is not installed.
    """

    address: str
    service: str = ""

    def __post_init__(self) -> None:
        from mainspring.services.addresses import host_port

        _check_address(self, "address", lambda address: address.startswith("unix:/") or host_port(address))
        import mainspring.services.grpc_probe  # noqa: F401 - imported here, it does not hold up a supervisor that runs


CallableProbe: TypeAlias = Callable[[], Awaitable[object] | object]
"""Passes if it returns anything but False. A plain function is called in a thread."""
Probe: TypeAlias = HttpProbe | TcpProbe | ExecProbe | GrpcProbe | CallableProbe


_PROBES = (HttpProbe, TcpProbe, ExecProbe, GrpcProbe)


class HookMoment(StrEnum):
    """When a hook runs."""

    PRE_START = "pre_start"
    POST_START = "post_start"
    PRE_STOP = "pre_stop"
    POST_STOP = "post_stop"
    PRE_RESTART = "pre_restart"
    POST_RESTART = "post_restart"


@dataclass(frozen=True, slots=True)
class Hook:
    """A command, or an async callable without arguments, that runs at a moment of a service's life.

    ``timeout`` (seconds): None means that of :class:`HookSettings`. ``abort``: a failure aborts what was about to happen (a
    start fails, a restart counts as failed); else it is only logged. A stop goes on in each case.
    """

    action: tuple[str, ...] | Callable[[], Awaitable[object]]
    timeout: float | None = None
    abort: bool = False


@dataclass(frozen=True, slots=True)
class Replacement:
    """When a process is replaced by a fresh one, drained first. None: never for this reason.

    ``messages``: how many it has handled, by its own word: ``mainspring run`` counts them. ``memory``: its resident bytes,
    ``age``: seconds since it became ready.
    """

    messages: int | None = None
    memory: int | None = None
    age: float | None = None

    def __post_init__(self) -> None:
        for name in ("messages", "memory"):
            if getattr(self, name) is not None:
                _check_whole(self, 1, name)
        if self.age is not None:
            _check_seconds(self, "age", above_zero=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A supervised service: a command that runs in ``replicas`` processes, and how it is kept running.

    A process is ready when its ``probe`` passes, it has written a line that matches ``ready_line``, or it has sent
    ``READY=1`` to the socket in ``NOTIFY_SOCKET`` (``notify=True``). With several of these all must hold. With none it is
    ready when its program has run for ``ready_after`` seconds.

    :param name: letters, digits, ``_``, ``.`` and ``-``.
    :param command: the program and its arguments; no shell reads them. ``{socket}`` and ``{replica}`` are replaced.
    :param depends_on: services that must be running before it starts, and that stop after it.
    :param environment: set beside the supervisor's own environment.
    :param core: False for an optional service, whose failure leaves the others alone and the whole Degraded.
    :param no_restart_statuses: exit statuses after which it is never started again.
    :param user: a user's name; only root can change it. ``HOME``, ``USER`` and ``LOGNAME`` are then those of that user, unless
        ``environment`` sets them.
    :param listen: addresses (``host:port`` or ``unix:/path``) of sockets that the supervisor opens and holds across restarts.
    :raises ConfigError: a value cannot work.
    """

    name: str
    command: tuple[str, ...]
    replicas: int = 1
    depends_on: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    probe: Probe | None = None
    startup_probe: Probe | None = None
    ready_line: str | None = None
    notify: bool = False
    ready_after: float = 1.0
    restart: RestartType = RestartType.PERMANENT
    no_restart_statuses: frozenset[int] = frozenset()
    core: bool = True
    hooks: Mapping[HookMoment, tuple[Hook, ...]] = field(default_factory=dict)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    working_directory: str | None = None
    user: str | None = None
    listen: tuple[str, ...] = ()
    replace_after: Replacement = Replacement()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise ConfigError(
                f"ServiceSpec: name must be of letters, digits, '_', '.' and '-', and begin with a letter or digit,"
                f" not {self.name!r}"
            )
        whose = f"service {self.name!r}"
        object.__setattr__(self, "command", texts(whose, "command", self.command))
        object.__setattr__(self, "depends_on", texts(whose, "depends_on", self.depends_on))
        object.__setattr__(self, "listen", texts(whose, "listen", self.listen))
        if not self.command or not self.command[0]:
            raise ConfigError(f"service {self.name!r}: command must name a program")
        for name, kind in (("resources", Resources), ("lifecycle", Lifecycle), ("replace_after", Replacement)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{whose}: {name} must be a {kind.__name__}, not {getattr(self, name)!r:.100}")
        for name in ("probe", "startup_probe"):
            probe = getattr(self, name)
            if probe is not None and not isinstance(probe, _PROBES) and not callable(probe):
                kinds = "an HttpProbe, TcpProbe, ExecProbe, GrpcProbe or a function"
                raise ConfigError(f"{whose}: {name} must be {kinds}, not {probe!r:.100}")
        object.__setattr__(self, "hooks", _hooks(whose, self.hooks))
        _check_whole(self, 1, "replicas")
        _check_seconds(self, "ready_after")
        try:
            object.__setattr__(self, "restart", RestartType(self.restart))
        except ValueError:
            allowed = ", ".join(RestartType)
            raise ConfigError(
                f"service {self.name!r}: restart must be one of {allowed}, not {self.restart!r}"
            ) from None
        if self.ready_line is not None:
            try:
                re.compile(self.ready_line)
            except re.error as error:
                raise ConfigError(
                    f"service {self.name!r}: ready_line must be a regular expression, not {self.ready_line!r}: {error}"
                ) from None

    @property
    def tells_ready(self) -> bool:
        """True if there is a probe, a line or a notification that says that a process is ready."""
        return self.notify or any(each is not None for each in (self.probe, self.startup_probe, self.ready_line))


def _hooks(whose: str, hooks: object) -> Mapping[HookMoment, tuple[Hook, ...]]:
    """Return the hooks by their moment.

    :raises ConfigError: they are something else.
    """
    if not isinstance(hooks, Mapping):
        raise ConfigError(f"{whose}: hooks must be a mapping of moments to lists of Hook, not {hooks!r:.100}")
    found = {}
    for moment, each in hooks.items():
        if moment not in list(HookMoment):
            raise ConfigError(f"{whose}: hooks: the moment must be one of {', '.join(HookMoment)}, not {moment!r:.100}")
        if isinstance(each, str) or not isinstance(each, Sequence) or not all(isinstance(hook, Hook) for hook in each):
            raise ConfigError(f"{whose}: hooks: {moment} must be a list of Hook, not {each!r:.100}")
        found[HookMoment(moment)] = tuple(each)
    return found
