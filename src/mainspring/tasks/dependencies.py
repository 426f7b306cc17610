"""Dependencies of tasks: parameters that the worker provides for each run, by the library ``uncalled-for``.

A dependency is opened on the worker's event loop before the function runs, and closed after it, with the function's error if it
failed. That is before the message is acknowledged: what a dependency raises as it is closed is a failed attempt.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from uncalled_for import (
    CallArgument,
    Depends,
    FailedDependency,
    Provided,
    get_dependency_parameters,
    resolved_dependencies,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

__all__ = ["CallArgument", "Depends", "Provided", "names_of", "provided"]


def names_of(fn: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters that are dependencies. Raise TypeError where they are declared wrongly."""
    return frozenset(get_dependency_parameters(fn))


@asynccontextmanager
async def provided(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Open the dependencies of one call; yield ``arguments`` with their values.

    If a dependency cannot be opened, its error is raised.
    """
    async with resolved_dependencies(fn, dict(arguments)) as values:
        for value in values.values():
            if isinstance(value, FailedDependency):
                raise value.error
        yield {**arguments, **values}
