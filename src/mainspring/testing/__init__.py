"""Tools for tests: virtual time, a reproducible schedule, the contract of a mailbox, simulated fleets and processes.

Names are imported at first use, because every pytest run loads the pytest plugin of this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mainspring.testing.mailbox_contract as mailbox_contract
    from mainspring.testing.simulated_processes import ProcessRecord as ProcessRecord
    from mainspring.testing.simulated_processes import SimulatedProcess as SimulatedProcess
    from mainspring.testing.simulated_processes import SimulatedProgram as SimulatedProgram
    from mainspring.testing.simulated_processes import SimulatedSpawner as SimulatedSpawner
    from mainspring.testing.simulation import Faults as Faults
    from mainspring.testing.simulation import Simulation as Simulation
    from mainspring.testing.simulation import SimulationReport as SimulationReport
    from mainspring.testing.simulation import simulate as simulate
    from mainspring.testing.stand_ins import override as override
    from mainspring.testing.virtual_time import DeadlockError as DeadlockError
    from mainspring.testing.virtual_time import VirtualClock as VirtualClock
    from mainspring.testing.virtual_time import run_virtual as run_virtual

_FROM_VIRTUAL = ("DeadlockError", "VirtualClock", "run_virtual")
_FROM_PROCESSES = ("ProcessRecord", "SimulatedProcess", "SimulatedProgram", "SimulatedSpawner")
_FROM_SIMULATION = ("Faults", "Simulation", "SimulationReport", "simulate")

__all__ = [
    "DeadlockError",
    "Faults",
    "ProcessRecord",
    "SimulatedProcess",
    "SimulatedProgram",
    "SimulatedSpawner",
    "Simulation",
    "SimulationReport",
    "VirtualClock",
    "mailbox_contract",
    "override",
    "run_virtual",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _FROM_VIRTUAL:
        value = getattr(import_module("mainspring.testing.virtual_time"), name)
    elif name in _FROM_PROCESSES:
        value = getattr(import_module("mainspring.testing.simulated_processes"), name)
    elif name in _FROM_SIMULATION:
        value = getattr(import_module("mainspring.testing.simulation"), name)
    elif name == "override":
        value = import_module("mainspring.testing.stand_ins").override
    elif name == "mailbox_contract":
        value = import_module("mainspring.testing.mailbox_contract")
    else:
        raise AttributeError(f"module 'mainspring.testing' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
