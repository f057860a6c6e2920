"""Less of a resource for the servers, while a mode has its turn.

    lessNetwork   each server's link carries 1 Gbit/s, by tc's token buckets
    lessCPU       all servers together have half a core, by a control group

The same cluster trains without the limit in the other turns, so that nothing else differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch_ecrec.bench.experiment import Running, Stopped
from torch_ecrec.bench.places import OnHosts
from torch_ecrec.testing import cpu_quota, hosts
from torch_ecrec.testing.cpu_quota import CpuQuota

NETWORK, CPU = "lessNetwork", "lessCPU"
LIMITS = (NETWORK, CPU)
NETWORK_BITS_PER_S = 1e9
CPU_CORES = 0.5


def unavailable(limit: str) -> str:
    """Returns why a resource cannot be limited here; "": it can be."""
    reason = {NETWORK: hosts.unavailable, CPU: cpu_quota.unavailable}[limit]()
    return f"{limit}: {reason}" if reason else ""


@contextlib.contextmanager
def applied(limit: str, running: Running) -> Iterator[None]:
    """Limits the servers of what runs, within the block. `limit`: one of `LIMITS`, or "" for none.

    Raises:
        Stopped: it cannot be limited here, or the limit was never met, so that nothing was tried.
    """
    if not limit:
        yield
        return
    if reason := unavailable(limit):
        raise Stopped(reason)
    assert running.mode.code is not None, "servers are ours"
    if limit == CPU:
        with CpuQuota(CPU_CORES) as quota:
            quota.take(running.cluster_pids)
            yield
            _require_met(quota.times_met(), limit)
        return
    assert isinstance(running.place, OnHosts), "its experiment has hosts"
    theirs = list(running.place.hosts)[-running.mode.code.slots :]  # servers begin with the last
    try:
        for host in theirs:
            host.link(bits_per_s=NETWORK_BITS_PER_S)
        yield
        _require_met(sum(host.held_up() for host in theirs), limit)
    finally:
        for host in theirs:
            host.link()


def _require_met(times: int, limit: str) -> None:
    if not times:
        raise Stopped(f"{limit}: the servers have never had to wait for it")
