"""Event-sourced state: one writer, typed slices, reducers, snapshots, transactions, and a journal that outlives a crash.

What state classes are written with is here: :data:`append`, :data:`replace_latest`, :func:`upsert_by`, :func:`on` and
:func:`versioned`.
"""

from mainspring.state.session.records import versioned
from mainspring.state.session.slices import append, on, replace_latest, upsert_by

__all__ = ["append", "on", "replace_latest", "upsert_by", "versioned"]
