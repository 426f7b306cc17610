"""Event-sourced state: one writer, typed slices, reducers, snapshots, transactions, and a journal that outlives a crash.

State classes are written with :data:`append`, :data:`replace_latest`, :func:`upsert_by`, :func:`on` and :func:`versioned`.

A ``Session`` is the face of one set of slices, and a child session of another one. A session and its children share one
``SessionWriter``, which changes slices, one ``History``, which reads and replaces the past, and at most one ``Journal``. Each
has a ``Cell`` with two views of its slices: ``values``, which readers see, and ``tip``, which has also the events that wait
for the journal.

Without a journal, an event is applied at once. With one, it is encoded and reduced onto the tip in its turn. The writer's
task then writes whatever has come meanwhile in one call of the journal. Once that is durable, the values follow, and the
subscribers are told. A ``Transaction`` gets its turn when all before it is durable, and the other writers wait for its end.

- Readers see only what is durable, in the order in which the journal has it.
- Slices are never changed, only replaced. Reducers compute the next ones, and compute the same when the journal is read.
- A write that fails takes back all events that wait: the tip is set to the values, and the numbers go on from there.
- A dispatch that is cancelled before its turn is not applied; a dispatch that waits for the journal may be. The end of a
  transaction waits for its outcome, even when cancelled.
- Each call of a journal has an end. After a call that was given up, nothing but its closing is asked of the journal, and the
  session is to be opened anew.
"""

from mainspring.state.session.records import versioned
from mainspring.state.session.slices import append, on, replace_latest, upsert_by

__all__ = ["append", "on", "replace_latest", "upsert_by", "versioned"]
