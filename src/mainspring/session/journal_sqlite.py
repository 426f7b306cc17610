"""The names of :mod:`mainspring.state.session.journal_sqlite`, where they were before."""

from mainspring.state.session.journal_sqlite import *  # noqa: F403
