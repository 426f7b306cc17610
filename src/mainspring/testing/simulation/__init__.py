"""Deterministic simulation: real loops and groups in virtual time, under faults drawn from a seed.

A run (``run``) is described by a ``Simulation`` and takes place in a ``World``. The parts:

- ``faults`` draws the plan of a run from its seed: at which instant which worker crashes, freezes or loses its connection.
- ``workload`` holds the clients. It also inspects the group under test: the type of its bodies, its leases, its limits.
- ``store`` is the server: an in-memory mailbox, and one ``SimulatedBackend`` per process, where calls are delayed, fail, or
  lose their answers.
- ``process`` is one process of a worker: it builds the user's group on a mailbox of its own and runs it. A process is
  running, frozen (its tasks are held and continue later), or gone (its tasks never run again).
- ``world`` starts processes, replaces processes that end, and makes the planned faults happen.
- ``ledger`` keeps an independent account of every message. Store and processes report to it what took effect; the first
  contradiction is the violation and ends the run.
- ``event_log`` records the run, and draws timelines of it.
- ``guards`` fail a run whose code uses sockets, threads or real time, because it could not be repeated.

A run has three phases: work and faults; then the fleet finishes the remaining messages; then everything shuts down. Equal
``Simulation`` values give equal logs: each kind of fault, each client and each process has its own random generator, seeded
by the run's seed and its name. So disabling one kind of fault does not move the others, which ``shrink`` relies on.
"""

from mainspring.testing.simulation.faults import Faults, PlannedFault
from mainspring.testing.simulation.guards import RealWorldError
from mainspring.testing.simulation.ledger import Violation
from mainspring.testing.simulation.run import Simulation, SimulationReport, shrink, simulate

__all__ = [
    "Faults",
    "PlannedFault",
    "RealWorldError",
    "Simulation",
    "SimulationReport",
    "Violation",
    "shrink",
    "simulate",
]
