"""The key and the weight of a call: whose share of the workers it takes, and which limits hold for it.

The key is the name of a parameter, a function of the arguments, or a text that was given with the call. ``unique`` and
``debounce`` also go by it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from mainspring.errors import ConfigError, InvalidParameterError
from mainspring.mailbox.limits import is_name
from mainspring.validation import is_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mainspring.tasks.task import Task

Key: TypeAlias = "str | Callable[..., str]"
"""A parameter's name, or a function of a call's arguments."""
Weight: TypeAlias = "float | str | Callable[..., float]"
"""A number, a parameter's name, or a function of a call's arguments."""

LONGEST_KEY: Final = 512
"""The most characters of a key."""
LEAST_WEIGHT: Final = 0.01
MOST_WEIGHT: Final = 100.0


def check_key(name: str, key: Any, parameters: Sequence[str]) -> None:
    """Raise :class:`ConfigError` unless ``key`` is None, the name of one of these parameters, or a plain function."""
    if key is None or _is_of_arguments(key, parameters):
        return
    raise ConfigError(
        f"task {name}: key must be the name of a parameter ({', '.join(parameters)}) or a plain function of the"
        f" arguments, not {key!r}"
    )


def check_weight(name: str, weight: Any, parameters: Sequence[str]) -> None:
    """Raise :class:`ConfigError` unless ``weight`` is None, such a number, the name of a parameter, or a plain function."""
    if weight is None or is_number(weight, LEAST_WEIGHT, MOST_WEIGHT) or _is_of_arguments(weight, parameters):
        return
    raise ConfigError(
        f"task {name}: weight must be a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, the name of a parameter"
        f" ({', '.join(parameters)}) or a plain function of the arguments, not {weight!r}"
    )


def check_number(what: str, weight: Any) -> None:
    """Raise :class:`InvalidParameterError` unless it is a number that a weight can be."""
    if not is_number(weight, LEAST_WEIGHT, MOST_WEIGHT):
        raise InvalidParameterError(
            f"{what} must be a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, not {weight!r:.100}"
        )


def _is_of_arguments(given: Any, parameters: Sequence[str]) -> bool:
    if isinstance(given, str):
        return given in parameters
    return callable(given) and not inspect.iscoroutinefunction(given)


def share_of(task: Task[..., Any], arguments: dict[str, Any]) -> tuple[str | None, float]:
    """Return the key of a call with these arguments, or None, and its weight.

    :raises InvalidParameterError: the key is no text of 1 to 512 characters, or the weight no number from 0.01 to 100.
    """
    key, weight = given_key(task, arguments), task.sending.weight
    if key is None:
        return None, 1.0
    if weight is None:
        weight = _of(task, task.handling.weight, arguments)
    if weight is None:
        return key, 1.0
    check_number(f"task {task.name}: a weight", weight)
    return key, float(weight)


def given_key(task: Task[..., Any], arguments: dict[str, Any]) -> str | None:
    """Return the key that was given with a call, or follows from its arguments; None if its task has none.

    :raises InvalidParameterError: it is no text of 1 to 512 characters.
    """
    key: Any = task.sending.key
    if key is None and task.handling.key is None:
        return None
    if key is None:
        key = _of(task, task.handling.key, arguments)
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    if not isinstance(key, str) or not 0 < len(key) <= LONGEST_KEY:
        shown = f"{len(key):,} characters" if isinstance(key, str) and key else f"{key!r:.100}"
        raise InvalidParameterError(
            f"task {task.name}: a key must be a text of 1 to {LONGEST_KEY} characters, not {shown}"
        )
    if not is_name(key):
        raise InvalidParameterError(
            f"task {task.name}: a key must be text that UTF-8 can hold, without NUL characters, not {key!r:.100}"
        )
    return key


def is_known_by(task: Task[..., Any], arguments: dict[str, Any]) -> bool:
    """True if the key and the weight of a call follow from these of its arguments and the defaults of the function."""
    missing = task.parameters.missing(arguments)
    of_arguments = (
        task.sending.key is None and task.handling.key,
        task.sending.weight is None and task.handling.weight,
    )
    return missing is None or not any(callable(given) or given == missing for given in of_arguments)


def _of(task: Task[..., Any], given: Any, arguments: dict[str, Any]) -> Any:
    """Return the argument of that name, what the function returns for the arguments, or the value that was given itself."""
    if isinstance(given, str):
        return task.parameters.argument(given, arguments)
    return given(**task.parameters.with_defaults(arguments)) if callable(given) else given
