"""etcd as the coordinators of a cluster see it, in memory."""

from __future__ import annotations

import dataclasses

from torch_ecrec.transport.etcd import Leader, Term


class VirtualEtcd:
    """Its state: what the two keys of `transport/etcd.py` say, and a revision. It answers at once, and always.

    Attributes:
        kept: who leads, or has led last.
    """

    def __init__(self) -> None:
        self.revision, self.kept = 10, Term()

    def term(self) -> Term:
        return self.kept

    def leader(self) -> Leader | None:
        return None if self.kept.address is None else Leader(self.kept.address, self.kept.revision)

    def take(self, me: Term, before: Term) -> bool:
        if (self.kept.revision, self.kept.beat) != (before.revision, before.beat):
            return False
        self.revision += 1
        self.kept = dataclasses.replace(me, revision=self.revision, beat=self.revision)
        return True

    def beat(self, mine: Term) -> bool:
        if self.kept.revision != mine.revision:
            return False
        self.revision += 1
        self.kept = dataclasses.replace(self.kept, beat=self.revision)
        return True

    def leave(self, mine: Term) -> None:
        if self.kept.revision == mine.revision:
            self.revision += 1
            self.kept = dataclasses.replace(self.kept, address=None, revision=self.revision)

    def end(self, mine: Term) -> None:
        if self.kept.revision == mine.revision:
            self.revision, self.kept = self.revision + 1, Term()
