"""For tests. The protocol without processes: the whole cluster in one process.

simulation    runs on a virtual clock, with faults at chosen messages or at random, large and small
exploration   every order of messages, and every moment of a crash, of a very small cluster

And with them, on networks that fail:

hosts         several hosts on one machine, with links that are cut, slow or lossy, and hosts that die
"""

from torch_ecrec.testing.result import SimulationResult
from torch_ecrec.testing.scenario import Scenario, half_tables, small_tables
from torch_ecrec.testing.simulation import SimulatedCluster, simulate
from torch_ecrec.testing.verification import check_parity, check_parity_as_of
from torch_ecrec.transport.local import Fault

__all__ = [
    "Fault",
    "Scenario",
    "SimulatedCluster",
    "SimulationResult",
    "check_parity",
    "check_parity_as_of",
    "half_tables",
    "simulate",
    "small_tables",
]
