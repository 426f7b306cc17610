"""The names of :mod:`mainspring.state.session.journal_file`, where they were before."""

from mainspring.state.session.journal_file import *  # noqa: F403
