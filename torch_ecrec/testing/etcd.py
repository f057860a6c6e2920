"""etcd as the coordinators of a cluster see it, in memory: what it keeps, as of a time that is given."""

from __future__ import annotations

import dataclasses

from torch_ecrec.transport.etcd import NOBODY, EtcdUnavailable, Last, Leader


class VirtualEtcd:
    """Its state: two keys, leases, a revision. It answers at once, and always.

    Attributes:
        leader, last: the keys of `transport/etcd.py`.
        leases: id -> how long it is, until when.
    """

    def __init__(self) -> None:
        self.revision, self.leases = 10, dict[int, tuple[float, float]]()
        self.leader: Leader | None = None
        self.last = NOBODY
        self._next = 1

    def look(self) -> tuple[Leader | None, Last]:
        return self.leader, self.last

    def expire(self, now_s: float) -> None:
        """Leases end."""
        for lease, (_, until_s) in list(self.leases.items()):
            if until_s <= now_s:
                self._drop(lease)

    def _drop(self, lease: int) -> None:
        self.leases.pop(lease, None)
        if self.leader is not None and self.leader.lease == lease:
            self.leader = None

    def grant(self, ttl_s: float, now_s: float) -> int:
        self._next += 1
        self.leases[self._next] = (ttl_s, now_s + ttl_s)
        return self._next

    def renew(self, lease: int, now_s: float) -> bool:
        if lease not in self.leases:
            return False
        ttl_s, _ = self.leases[lease]
        self.leases[lease] = (ttl_s, now_s + ttl_s)
        return True

    def revoke(self, lease: int) -> None:
        self._drop(lease)

    def take(self, me: Last, address: tuple[str, int], lease: int, last: Last) -> bool:
        if lease not in self.leases:
            raise EtcdUnavailable("requested lease not found")
        if self.leader is not None or not self._is_still(last):
            return False
        self.revision += 1
        self.leader = Leader(address, me.counts_from + self.revision, me.id, lease, me.ttl_s)
        self.last = dataclasses.replace(me, revision=self.revision)
        return True

    def write(self, said: Last, last: Last) -> bool:
        if not self._is_still(last):
            return False
        self.revision += 1
        self.leader, self.last = None, dataclasses.replace(said, revision=self.revision)
        return True

    def _is_still(self, last: Last) -> bool:
        """By its value, as etcd compares it: whatever the revision."""
        return dataclasses.replace(self.last, revision=0) == dataclasses.replace(last, revision=0)

    def forget(self) -> None:
        """All that it knew: it was started without its files."""
        self.leader, self.last, self.revision = None, NOBODY, 1
        self.leases.clear()
