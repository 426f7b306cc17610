"""The names of :mod:`mainspring.worker.tool_calls`, where they were before."""

from mainspring.worker.tool_calls import *  # noqa: F403
