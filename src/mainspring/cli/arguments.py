"""The arguments of a call of a task, as ``mainspring call`` and ``mainspring edit`` take them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mainspring.cli.send import parse_json
from mainspring.cli.user_errors import UserError
from mainspring.errors import SerializationError
from mainspring.mailbox.limits import is_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mainspring.tasks.task import Task


def named_values(verb: str, given: Sequence[str]) -> dict[str, Any]:
    """Return the JSON values of arguments by name: of one JSON object, or of ``NAME=VALUE`` each.

    :raises UserError: a word is neither, or is not UTF-8, or a name is given twice.
    """
    for text in given:
        if not is_text(text):
            raise UserError(f"{verb}: the argument {text!r:.100} is not UTF-8; give text in UTF-8")
    if len(given) == 1 and given[0].lstrip().startswith("{"):
        try:
            found: dict[str, Any] = parse_json(given[0])
        except ValueError as error:
            raise UserError(f"{verb}: {given[0]!r:.100} is no JSON: {error}") from None
        return found
    arguments: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name in arguments:
            raise UserError(
                f"{verb}: {text!r:.100} is no argument of its own; give NAME=VALUE for each, or one JSON object"
            )
        arguments[name] = _value(value)
    return arguments


def typed(verb: str, task: Task[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of the types of the task's function, of JSON values.

    :raises InvalidParameterError: one is missing or unknown.
    :raises UserError: one is not of its type.
    """
    task.parameters.check_names(dict(arguments))
    try:
        return dict(task.parameters.codec.decode(json.dumps(arguments).encode()))
    except SerializationError as error:
        why = str(error).rpartition(f"does not fit task {task.name}: ")[2]
        name = why.partition(": ")[0]
        is_bare = name in arguments and "valid string" in why  # what is nested is JSON, and has quotes where it is text
        quotes = f"; a text that reads as JSON takes quotes of its own: {name}='\"5\"'" if is_bare else ""
        raise UserError(f"{verb}: task {task.name}: {why}{quotes}") from None


def _value(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text
