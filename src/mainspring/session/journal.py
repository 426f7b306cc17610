"""The names of :mod:`mainspring.state.session.journal`, where they were before."""

from mainspring.state.session.journal import *  # noqa: F403
