"""The protocol without processes: the whole cluster in one process, for tests.

simulation    runs on a virtual clock, with faults at chosen messages or at random, large and small
exploration   every order of messages, and every moment of a crash, of a very small cluster
"""

from torch_ecrec.testing.simulation import (
    Cluster,
    Run,
    Scenario,
    check_parity,
    check_parity_as_of,
    simulate,
    small_tables,
)
from torch_ecrec.transport.local import Fault

__all__ = ["Cluster", "Fault", "Run", "Scenario", "check_parity", "check_parity_as_of", "simulate", "small_tables"]
