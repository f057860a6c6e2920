"""The protocol without processes: the whole cluster in one process, for the tests of it.

simulation    runs on a virtual clock, with faults at chosen messages or at random, large and small
exploration   every order of messages, and every moment of a crash, of a very small cluster

It runs the code of `torch_ecrec` that runs for real; nothing of the package imports it, and it is not installed.
"""

from harness.network import Fault
from harness.result import SimulationResult
from harness.scenario import Scenario, half_tables, small_tables
from harness.simulation import SimulatedCluster, simulate
from harness.verification import check_parities_as_of, check_parity

__all__ = [
    "Fault",
    "Scenario",
    "SimulatedCluster",
    "SimulationResult",
    "check_parities_as_of",
    "check_parity",
    "half_tables",
    "simulate",
    "small_tables",
]
