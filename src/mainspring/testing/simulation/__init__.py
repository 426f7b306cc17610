"""Deterministic simulation: the real loops and groups, in a world that fails, on a clock that jumps."""

from mainspring.testing.simulation.faults import Faults, PlannedFault
from mainspring.testing.simulation.guards import RealWorldError
from mainspring.testing.simulation.run import Simulation, SimulationReport, Violation, shrink, simulate

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
