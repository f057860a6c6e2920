"""A session over the simulated cluster, for what blocks: it waits by letting virtual time pass."""

from harness import SimulatedCluster

from torch_ecrec.client.session import Session


class VirtualSession(Session):
    """Waits by letting virtual time pass."""

    cluster: SimulatedCluster

    def _wait(self, condition, what, patient=False):
        for _ in range(10_000):
            if condition():
                return
            self.cluster.network.clock.advance()
        raise AssertionError(what)
