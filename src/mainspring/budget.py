"""The names of :mod:`mainspring.state.budget`, where they were before."""

from mainspring.state.budget import *  # noqa: F403
