"""The keys of a file of services, and what each of them takes.

A mapping is a ``TypedDict`` without required keys: pydantic then returns what was said and nothing else, so that the settings
of all services and those of one merge key by key.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Required, TypeAlias, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, with_config
from pydantic_settings import BaseSettings, SettingsConfigDict
from typing_extensions import TypedDict, is_typeddict

from mainspring.policies import Jitter
from mainspring.services import config_values as values
from mainspring.services.alerts import AlertCommand, Webhook
from mainspring.services.config_values import (
    Command,
    Count,
    CountFromZero,
    Duration,
    DurationAboveZero,
    EnvironmentName,
    EnvironmentValue,
    ExitStatus,
    Factor,
    Filled,
    Flag,
    Listed,
    Mapped,
    Niceness,
    Pattern,
    ServiceName,
    Size,
    Text,
    WrongValueError,
)
from mainspring.services.restarts import RestartType
from mainspring.services.spec import (
    ExecProbe,
    GrpcProbe,
    Hook,
    HttpProbe,
    Probe,
    Replacement,
    Resources,
    Strategy,
    TcpProbe,
)

_STRICT = ConfigDict(extra="forbid")


def _jitter(value: object) -> str:
    if value not in get_args(Jitter):
        raise WrongValueError(f"{values.shown(value)} is no such word", ", ".join(get_args(Jitter)))
    return values.text(value)


@with_config(_STRICT)
class StartupKeys(TypedDict, total=False):
    """``lifecycle.startup``."""

    timeout: DurationAboveZero
    max_retries: Count
    health_check_interval: DurationAboveZero


@with_config(_STRICT)
class ShutdownKeys(TypedDict, total=False):
    """``lifecycle.shutdown``."""

    timeout: Duration
    drain_timeout: Duration
    force_kill_timeout: Duration


@with_config(_STRICT)
class HealthCheckKeys(TypedDict, total=False):
    """``lifecycle.health_check``."""

    interval: DurationAboveZero
    timeout: DurationAboveZero
    max_failures: Count
    successes: Count


@with_config(_STRICT)
class RestartPolicyKeys(TypedDict, total=False):
    """``lifecycle.restart_policy``."""

    max_retries: CountFromZero
    initial_delay: Duration
    max_delay: Duration
    backoff_factor: Factor
    reset_interval: Duration
    jitter: Annotated[str, PlainValidator(_jitter)]


@with_config(_STRICT)
class HookSettingsKeys(TypedDict, total=False):
    """``lifecycle.hooks``."""

    enabled: Flag
    timeout: DurationAboveZero


@with_config(_STRICT)
class LifecycleKeys(TypedDict, total=False):
    """``lifecycle``, of all services or of one."""

    startup: Annotated[StartupKeys, Mapped]
    shutdown: Annotated[ShutdownKeys, Mapped]
    health_check: Annotated[HealthCheckKeys, Mapped]
    restart_policy: Annotated[RestartPolicyKeys, Mapped]
    hooks: Annotated[HookSettingsKeys, Mapped]


@with_config(_STRICT)
class ResourcesKeys(TypedDict, total=False):
    """``resources`` of a service."""

    memory: Size
    cpu_seconds: Count
    open_files: Count
    processes: Count
    niceness: Niceness


@with_config(_STRICT)
class ReplacementKeys(TypedDict, total=False):
    """``replace_after`` of a service."""

    messages: Count
    memory: Size
    age: DurationAboveZero


# ------------------------------------------------------------------------------------------------------------- probes

_PROBES = "a mapping with one of http, tcp, exec, grpc"


@with_config(_STRICT)
class GrpcKeys(TypedDict, total=False):
    """``probe.grpc``."""

    address: Filled
    service: Text


def _grpc(value: object) -> object:
    return {"address": value} if isinstance(value, str) and not value.startswith("{") else values.mapped(value)


@with_config(_STRICT)
class ProbeKeys(TypedDict, total=False):
    """``probe`` and ``startup_probe`` of a service."""

    http: Filled
    tcp: Filled
    exec: Command
    grpc: Annotated[GrpcKeys, BeforeValidator(_grpc)]


def _probe_mapping(value: object) -> object:
    if not isinstance(value, dict) and not (isinstance(value, str) and value.startswith("{")):
        raise WrongValueError(f"{values.shown(value)} is no mapping", _PROBES)
    return values.mapped(value)


def _probe(said: ProbeKeys) -> Probe:
    kinds = list(said)
    if len(kinds) != 1:
        raise WrongValueError(
            " and ".join(kinds) + " stand together" if kinds else "it names no kind of probe", _PROBES
        )
    if "exec" in said:
        return ExecProbe(tuple(said["exec"]))
    if "http" in said:
        url, expected = said["http"], "http://host:port/path, https://host:port/path, unix:/path.sock/path"
        if not re.match(r"https?://[^/]|unix:(/|\{socket\})", url):
            raise WrongValueError(f"{values.shown(url)} is no such URL", expected)
        return values.by_constructor(lambda: HttpProbe(url))
    if "tcp" in said:
        address = _host_port(said["tcp"])
        return values.by_constructor(lambda: TcpProbe(address))
    if "address" not in said["grpc"]:
        raise WrongValueError("it names no address", "host:port, or a mapping with address and service")
    return values.by_constructor(lambda: GrpcProbe(**said["grpc"]))


def _host_port(address: str) -> str:
    host, _, port = address.rpartition(":")
    whole_port = port.isascii() and port.isdigit() and int(port) <= 65_535
    if not host or not (whole_port or "{" in port) or (":" in host and not host.startswith("[")):
        raise WrongValueError(f"{values.shown(address)} is no address", "host:port, an IPv6 address in brackets")
    return address


def _listen(value: object) -> str:
    address = values.filled(value)
    if address.startswith("unix:"):
        if not address.startswith("unix:/"):
            raise WrongValueError(f"{values.shown(address)} is no absolute path", "host:port, unix:/path")
        return address
    return _host_port(address)


ProbeValue: TypeAlias = Annotated[ProbeKeys, BeforeValidator(_probe_mapping), AfterValidator(_probe)]

# -------------------------------------------------------------------------------------------------------------- hooks


@with_config(_STRICT)
class HookKeys(TypedDict, total=False):
    """A hook that says more than its command."""

    command: Required[Command]
    timeout: DurationAboveZero
    abort: Flag


def _hook_mapping(value: object) -> object:
    if isinstance(value, str) and value.startswith("-"):
        raise WrongValueError(
            f"{values.shown(value)} looks like an argument of the command before it",
            'each command as one text, "./migrate --all", or as a list of its own, [./migrate, --all]',
        )
    if isinstance(value, dict) or (isinstance(value, str) and value.startswith("{")):
        return values.mapped(value)
    return {"command": value}


def _hook(said: HookKeys) -> Hook:
    return Hook(tuple(said["command"]), said.get("timeout"), said.get("abort", False))


def _hook_list(value: object) -> object:
    if isinstance(value, dict) or (isinstance(value, str) and not value.startswith("[")):
        return [value]
    return values.listed(value)


HookList: TypeAlias = Annotated[
    list[Annotated[HookKeys, BeforeValidator(_hook_mapping), AfterValidator(_hook)]], BeforeValidator(_hook_list)
]


@with_config(_STRICT)
class HooksKeys(TypedDict, total=False):
    """``hooks`` of a service: commands by their moment."""

    pre_start: HookList
    post_start: HookList
    pre_stop: HookList
    post_stop: HookList
    pre_restart: HookList
    post_restart: HookList


# ----------------------------------------------------------------------------------------------------------- services


@with_config(_STRICT)
class ServiceKeys(TypedDict, total=False):
    """A service: the fields of a ServiceSpec."""

    command: Required[Command]
    replicas: Count
    depends_on: Annotated[list[Filled], Listed]
    environment: Annotated[dict[EnvironmentName, EnvironmentValue], Mapped]
    resources: Annotated[ResourcesKeys, Mapped, AfterValidator(lambda said: Resources(**said))]
    probe: ProbeValue
    startup_probe: ProbeValue
    ready_line: Pattern
    notify: Flag
    ready_after: Duration
    restart: Annotated[RestartType, PlainValidator(lambda value: values.choice(value, RestartType))]
    no_restart_statuses: Annotated[list[ExitStatus], Listed]
    core: Flag
    hooks: Annotated[HooksKeys, Mapped]
    lifecycle: Annotated[LifecycleKeys, Mapped]
    working_directory: Filled
    user: Filled
    listen: Annotated[list[Annotated[str, PlainValidator(_listen)]], Listed]
    replace_after: Annotated[ReplacementKeys, Mapped, AfterValidator(lambda said: Replacement(**said))]


# ------------------------------------------------------------------------------------------------------------- alerts

_ALERTS = "a mapping with webhook or command"


@with_config(_STRICT)
class AlertKeys(TypedDict, total=False):
    """One of ``alerts``."""

    webhook: Filled
    headers: Annotated[dict[str, Text], Mapped]
    command: Command
    timeout: DurationAboveZero


def _alert_mapping(value: object) -> object:
    if not isinstance(value, dict):
        raise WrongValueError(f"{values.shown(value)} is no mapping", _ALERTS)
    return value


def _alert(said: AlertKeys) -> Webhook | AlertCommand:
    timeout = said.get("timeout", 10.0)
    if ("webhook" in said) is ("command" in said):
        both = "webhook and command stand together" if "webhook" in said else "it names no target"
        raise WrongValueError(both, _ALERTS)
    if "command" in said:
        if "headers" in said:
            raise WrongValueError("a command has no headers", "headers with webhook")
        return AlertCommand(tuple(said["command"]), timeout)
    return values.by_constructor(lambda: Webhook(said["webhook"], said.get("headers", {}), timeout))


AlertValue: TypeAlias = Annotated[AlertKeys, BeforeValidator(_alert_mapping), AfterValidator(_alert)]

# ----------------------------------------------------------------------------------------------------------- the file


class FileSettings(BaseSettings):
    """The keys at the top of a file."""

    model_config = SettingsConfigDict(extra="forbid", validate_default=False)

    lifecycle: Annotated[LifecycleKeys, Mapped] = LifecycleKeys()
    services: Annotated[dict[ServiceName, Annotated[ServiceKeys, Mapped]], Mapped] = Field(default_factory=dict)
    strategy: Annotated[Strategy, PlainValidator(lambda value: values.choice(value, Strategy))] = Strategy.ONE_FOR_ONE
    max_restarts: Annotated[int | None, PlainValidator(lambda value: values.whole(value, 0))] = None
    period: DurationAboveZero = 60.0
    alerts: Annotated[list[AlertValue], Listed] = Field(default_factory=list)


def keys_at(path: tuple[str | int, ...]) -> list[str]:
    """Return the keys that a mapping may have at this place; none where any may stand there."""
    kind: Any = FileSettings
    for step in path:
        kind = _bare(kind)
        if is_typeddict(kind) or kind is FileSettings:
            kind = get_type_hints(kind, include_extras=True).get(str(step))
        elif get_origin(kind) in (dict, list):
            kind = get_args(kind)[-1]
    kind = _bare(kind)
    if kind is FileSettings:
        return list(FileSettings.model_fields)
    return list(get_type_hints(kind)) if is_typeddict(kind) else []


def _bare(kind: Any) -> Any:
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind
