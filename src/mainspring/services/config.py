"""The file of services: YAML, and environment variables that override it, as the settings of an orchestrator.

``MAINSPRING_LIFECYCLE__SHUTDOWN__TIMEOUT=45s`` overrides ``lifecycle: {shutdown: {timeout: …}}``, and
``MAINSPRING_SERVICES__WORKER__REPLICAS=8`` a key of the service ``worker``. In the name of a service, what is neither letter
nor digit is written ``_``. A list or a mapping is written as JSON. A mapping of the file and that of the environment merge key
by key.

This module imports pydantic and PyYAML, so it is imported where a file is read, and nowhere else.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError
from pydantic_settings import PydanticBaseSettingsSource

from mainspring.errors import ConfigError
from mainspring.policies import RestartPolicy
from mainspring.redaction import one_line
from mainspring.services.config_keys import FileSettings, keys_at
from mainspring.services.config_values import WrongValueError, shown, without_owner
from mainspring.services.spec import (
    HealthCheckSettings,
    HookMoment,
    HookSettings,
    Lifecycle,
    ServiceSpec,
    ShutdownSettings,
    StartupSettings,
    Strategy,
)
from mainspring.services.yaml_tree import UnreadableYamlError, read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic.fields import FieldInfo

    from mainspring.services.alerts import AlertCommand, Webhook
    from mainspring.services.config_keys import LifecycleKeys, ServiceKeys
    from mainspring.services.yaml_tree import Path as KeyPath
    from mainspring.services.yaml_tree import Tree

PREFIX = "MAINSPRING_"
_GROUPS: dict[str, type[Any]] = {
    "startup": StartupSettings,
    "shutdown": ShutdownSettings,
    "health_check": HealthCheckSettings,
    "restart_policy": RestartPolicy,
    "hooks": HookSettings,
}


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """What a file of services says. ``shutdown`` caps the stop of all services together."""

    services: tuple[ServiceSpec, ...]
    strategy: Strategy = Strategy.ONE_FOR_ONE
    max_restarts: int | None = None
    period: float = 60.0
    shutdown: ShutdownSettings = field(default_factory=ShutdownSettings)
    alerts: tuple[Webhook | AlertCommand, ...] = ()


def read_config(path: str | os.PathLike[str], *, environment: Mapping[str, str] | None = None) -> OrchestratorConfig:
    """Read a file of services. Environment variables (None: those of this process) override what it says.

    :raises ConfigError: the file cannot be read, or a key or a value in it cannot be used. The error has one line for each
        fault: ``FILE:LINE: KEY: what is wrong; allowed: …``.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {reason}") from None
    return parse_config(content, name=os.fspath(path), environment=environment)


def parse_config(content: bytes, *, name: str, environment: Mapping[str, str] | None = None) -> OrchestratorConfig:
    """Read what a file of services holds; ``name`` stands for it in errors. Otherwise as :func:`read_config`."""
    faults = _FaultList(name)
    try:
        tree, faults.lines = read_yaml(content)
    except UnreadableYamlError as fault:
        at = name if fault.line is None else f"{name}:{fault.line}"
        raise ConfigError(f"{at}: {one_line(fault)}") from None
    if not isinstance(tree, dict):
        what = "the file is empty" if tree is None else f"the file is {shown(tree)} and no mapping"
        raise ConfigError(f"{name}:1: {what}; allowed: {', '.join(keys_at(()))}")
    said = _without_nulls(tree)
    overrides = _overrides(os.environ if environment is None else environment, said, faults)
    faults.stop_if_any()
    try:
        settings = _settings(said, overrides)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            faults.add_error(each)
        faults.stop()
    return _Builder(settings, faults).config()


def _without_nulls(tree: Tree) -> Any:
    """Return the tree without keys that have no value, so that they count as not said. A service stays, and is empty."""
    if not isinstance(tree, dict):
        return tree
    found = {key: _without_nulls(value) for key, value in tree.items() if value is not None}
    services = tree.get("services")
    if isinstance(services, dict):
        kept = {name: {} if value is None else _service_without_nulls(value) for name, value in services.items()}
        found["services"] = kept
    return found


def _service_without_nulls(service: Tree) -> Any:
    found = _without_nulls(service)
    if isinstance(service, dict) and isinstance(service.get("environment"), dict):
        found["environment"] = service["environment"]  # there, no value is a fault: it may stand for an empty one
    return found


# -------------------------------------------------------------------------------------------------------- environment


class _Given(PydanticBaseSettingsSource):
    """A source of settings that is a tree of values."""

    def __init__(self, tree: dict[str, Any]) -> None:
        super().__init__(FileSettings)
        self._tree = tree

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._tree.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._tree


def _settings(said: dict[str, Any], overrides: dict[str, Any]) -> FileSettings:
    class Sourced(FileSettings):
        @classmethod
        def settings_customise_sources(cls, *_: Any, **__: Any) -> tuple[PydanticBaseSettingsSource, ...]:
            return _Given(overrides), _Given(said)

    return Sourced()


def _overrides(environment: Mapping[str, str], said: dict[str, Any], faults: _FaultList) -> dict[str, Any]:
    """Return what the variables say, as a tree. The list of faults learns which variable says which key."""
    tree: dict[str, Any] = {}
    top = keys_at(())
    for name in sorted(environment):
        if not name.startswith(PREFIX):
            continue
        first, nested, rest = name.removeprefix(PREFIX).partition("__")
        key = first.lower()
        if key not in top:
            if nested:
                faults.add(name, key, _unknown((), key))
            continue
        path = _path_of(name, key, rest, said, faults) if nested else (key,)
        if path is not None:
            faults.variables[path] = name
            _put(tree, path, environment[name])
    return tree


def _path_of(name: str, key: str, rest: str, said: dict[str, Any], faults: _FaultList) -> KeyPath | None:
    if key != "services":
        return (key, *rest.lower().split("__"))
    services = said.get("services")
    names = list(services) if isinstance(services, dict) else []
    spelled = {service: re.sub(r"[^A-Z0-9]", "_", service.upper()) for service in names}
    longest = max((len(each) for each in spelled.values() if rest.startswith(f"{each}__")), default=0)
    found = [service for service, each in spelled.items() if len(each) == longest and rest.startswith(f"{each}__")]
    if len(found) != 1:
        text = f"{' and '.join(found)} are spelled so" if found else "no service of the file is spelled so"
        faults.add(
            name, "services", f"{text}; allowed: {PREFIX}SERVICES__NAME__KEY with NAME of {', '.join(spelled.values())}"
        )
        return None
    keys = rest[longest + 2 :].split("__")
    kept = 1 if keys[0].lower() == "environment" else len(keys)
    return ("services", found[0], *(each.lower() for each in keys[:kept]), *keys[kept:])


def _put(tree: dict[str, Any], path: KeyPath, value: str) -> None:
    """Put a value into the tree. A variable for a whole mapping gives way to variables for keys in it."""
    for step in path[:-1]:
        below = tree.setdefault(str(step), {})
        if not isinstance(below, dict):
            below = tree[str(step)] = {}
        tree = below
    tree[str(path[-1])] = value


# ------------------------------------------------------------------------------------------------------------- faults


def _unknown(path: KeyPath, key: str) -> str:
    allowed = keys_at(path)
    close = get_close_matches(key.lower(), allowed, 1)
    return f"unknown key{f', did you mean {close[0]}?' if close else ''}; allowed: {', '.join(allowed)}"


class _Fault(NamedTuple):
    line: int
    where: str
    text: str


class _FaultList:
    """Collects faults, each with the place where its value stands."""

    def __init__(self, name: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.variables: dict[KeyPath, str] = {}
        self._name = name
        self._found: list[_Fault] = []

    def add(self, where: str, key: str, text: str, line: int = 0) -> None:
        """Note a fault at a place that is already known."""
        fault = _Fault(line, where, one_line(f"{key}: {text}" if key else text))
        if fault not in self._found:
            self._found.append(fault)

    def at(self, path: KeyPath, text: str) -> None:
        """Note a fault of the value at a path, or of the nearest one around it that is written somewhere."""
        key = _spelled(path)
        for end in range(len(path), -1, -1):
            if path[:end] in self.variables:
                return self.add(self.variables[path[:end]], key, text)
            if path[:end] in self.lines or not end:
                line = self.lines.get(path[:end], 1)
                return self.add(f"{self._name}:{line}", key, text, line)
        return None

    def add_error(self, error: Any) -> None:
        """Note what pydantic says."""
        path = tuple(step for step in error["loc"] if step != "[key]")
        wrong = error.get("ctx", {}).get("error")
        if error["type"] == "extra_forbidden":
            self.at(path, _unknown(path[:-1], str(path[-1])))
        elif isinstance(wrong, WrongValueError):
            self.at(path, f"{wrong}; allowed: {wrong.allowed}" if wrong.allowed else str(wrong))
        elif error["type"] == "missing":
            self.at(path[:-1], f"the key {path[-1]} is missing; allowed: a mapping that has it")
        else:
            self.at(path, f"{error['msg']}, not {shown(error.get('input'))}")

    def stop_if_any(self) -> None:
        """Raise if there are faults."""
        if self._found:
            self.stop()

    def stop(self) -> Any:
        """Raise all faults as one error, in the order of the lines."""
        raise ConfigError("\n".join(f"{fault.where}: {fault.text}" for fault in sorted(self._found, key=_order)))


def _order(fault: _Fault) -> tuple[bool, int, str]:
    return fault.line == 0, fault.line, fault.where


def _spelled(path: KeyPath) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


# ------------------------------------------------------------------------------------------------------------- values


class _Builder:
    """Makes specifications of what was read, and finds what cannot go together."""

    def __init__(self, settings: FileSettings, faults: _FaultList) -> None:
        self._settings = settings
        self._faults = faults

    def config(self) -> OrchestratorConfig:
        settings, faults = self._settings, self._faults
        if not settings.services:
            faults.at(("services",), "there is no service; allowed: a mapping of names to services")
        base = self._lifecycle(("lifecycle",), {}, settings.lifecycle)
        specs = [self._spec(name, said) for name, said in settings.services.items()]
        self._check_dependencies()
        self._check_listening()
        if "period" in settings.model_fields_set and settings.max_restarts is None:
            faults.at(("period",), "without max_restarts it says nothing; allowed: with max_restarts")
        faults.stop_if_any()
        return OrchestratorConfig(
            services=tuple(spec for spec in specs if spec is not None),
            strategy=settings.strategy,
            max_restarts=settings.max_restarts,
            period=settings.period,
            shutdown=base.shutdown,
            alerts=tuple(settings.alerts),  # type: ignore[arg-type]
        )

    def _spec(self, name: str, said: ServiceKeys) -> ServiceSpec | None:
        path: KeyPath = ("services", name)
        lifecycle = self._lifecycle((*path, "lifecycle"), self._settings.lifecycle, said.get("lifecycle", {}))
        given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in said.items()}
        given["hooks"] = {HookMoment(moment): tuple(hooks) for moment, hooks in given.get("hooks", {}).items()}
        given["no_restart_statuses"] = frozenset(given.get("no_restart_statuses", ()))
        given["lifecycle"] = lifecycle
        try:
            return ServiceSpec(name=name, **given)
        except ConfigError as error:
            self._faults.at(path, without_owner(error))
            return None

    def _lifecycle(self, path: KeyPath, base: LifecycleKeys, own: LifecycleKeys) -> Lifecycle:
        """Return the settings of one service. What it says itself (at ``path``) comes before ``base``, key by key."""
        found: dict[str, Any] = {}
        for group, make in _GROUPS.items():
            said: dict[str, Any] = own.get(group, {})  # type: ignore[assignment]
            values = {**base.get(group, {}), **said}  # type: ignore[dict-item]
            where: KeyPath = (*path, group) if said else ("lifecycle", group)
            try:
                found[group] = make(**values)
            except ConfigError as error:
                self._faults.at(where, without_owner(error))
                found[group] = make()
        shutdown: ShutdownSettings = found["shutdown"]
        by = (*(path if "timeout" in own.get("shutdown", {}) else ("lifecycle",)), "shutdown", "timeout")
        said_drain = "drain_timeout" in own.get("shutdown", {})
        # A variable may cut all drains short, as for a quick end of a test.
        if said_drain and shutdown.drain_timeout > shutdown.timeout and by not in self._faults.variables:
            self._faults.at(
                (*path, "shutdown", "drain_timeout"),
                f"{shutdown.drain_timeout:g} s do not fit into shutdown.timeout, which cuts the drain after"
                f" {shutdown.timeout:g} s; allowed: at most shutdown.timeout",
            )
        return Lifecycle(**found)

    def _check_dependencies(self) -> None:
        services = self._settings.services
        graph: dict[str, list[str]] = {}
        for name, said in services.items():
            graph[name] = said.get("depends_on", [])
            for index, other in enumerate(graph[name]):
                if other not in services:
                    names = ", ".join(each for each in services if each != name)
                    text = (
                        f"there is no service {shown(other)}; allowed: {names or 'nothing, as it is the only service'}"
                    )
                    self._faults.at(("services", name, "depends_on", index), text)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            ring: list[str] = error.args[1][::-1]
            self._faults.at(
                ("services", ring[0], "depends_on"),
                f"services wait for each other: {' needs '.join(ring)}; allowed: dependencies without a cycle",
            )

    def _check_listening(self) -> None:
        owners: dict[str, str] = {}
        for name, said in self._settings.services.items():
            for index, address in enumerate(said.get("listen", [])):
                other = owners.setdefault(address, name)
                taken = address in said["listen"][:index]
                if (other != name or taken) and not address.endswith(":0"):
                    text = f"{shown(address)} belongs to service {other} already; allowed: an address of its own"
                    self._faults.at(("services", name, "listen", index), text)
