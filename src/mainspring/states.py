"""The names of :mod:`mainspring.core.state_machine`, where they were before."""

from mainspring.core.state_machine import *  # noqa: F403
