"""The names of :mod:`mainspring.state.session`, where they were before."""

from mainspring.state.session import *  # noqa: F403
