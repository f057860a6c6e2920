"""etcd as the coordinators of a cluster see it, in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch_ecrec.transport.etcd import EtcdUnavailable, Leader, Run, View


class VirtualEtcd:
    """Its state: two keys, leases, a revision. It answers at once, and always; see `EtcdKeys` for what it is asked.

    Args:
        clock: seconds, by which leases end.

    Attributes:
        leader, run: the keys of `transport/etcd.py`.
        leases: id -> how long it is, until when, in seconds.
        revision: of all that it has.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.revision, self.leases = clock, 10, dict[int, tuple[float, float]]()
        self.leader: Leader | None = None
        self.run: Run | None = None
        self._next = 1

    def look(self) -> View:
        self.expire()
        return View(self.leader, self.run, 1, self.revision)

    def expire(self) -> None:
        """Leases end."""
        for lease, (_, until_s) in list(self.leases.items()):
            if until_s <= self.clock():
                self.revoke(lease)

    def revoke(self, lease: int) -> None:
        self.leases.pop(lease, None)
        if self.leader is not None and self.leader.lease == lease:
            self.leader, self.revision = None, self.revision + 1

    def grant(self, ttl_s: float) -> int:
        self._next += 1
        self.leases[self._next] = (ttl_s, self.clock() + ttl_s)
        return self._next

    def renew(self, lease: int) -> bool:
        self.expire()
        if lease not in self.leases:
            return False
        ttl_s, _ = self.leases[lease]
        self.leases[lease] = (ttl_s, self.clock() + ttl_s)
        return True

    def take(self, address: tuple[str, int], lease: int, ttl_s: int, run: Run, seen: int) -> None:
        self.expire()
        if lease not in self.leases:
            raise EtcdUnavailable("requested lease not found")
        if self.leader is None and self._is_still(seen):
            self.revision += 1
            self.leader = Leader(address, self.revision, run.leader, lease, ttl_s)
            self.run = dataclasses.replace(run, revision=self.revision)

    def end(self, run: Run) -> bool:
        if not self._is_still(run.revision):
            return False
        self.revision += 1
        self.leader, self.run = None, dataclasses.replace(run, over=True, revision=self.revision)
        return True

    def _is_still(self, revision: int) -> bool:
        return revision == (0 if self.run is None else self.run.revision)

    def forget(self) -> None:
        """All that it knew: it was started without its files."""
        self.leader = self.run = None
        self.revision = 1
        self.leases.clear()
