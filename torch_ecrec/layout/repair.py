"""Plans the repair of lost records: which members of a stripe to read, as of which steps, in what portions.

Pure decisions: no I/O, no clock. `server/rebuild.py` carries them out (plan, price in bytes, fetch, decode, install).

One repair covers records of one slot whose stripes share a base, so that every stripe has the same member -> slot map
(`Layout.group`). Any k other members of the stripe give the record back, if all stand for the same history: a data
member `as of` step v[its slot], a parity as of v[s] for every data slot s of the stripe.

The vector v (rules 6 and 7 of `docs/design.md`): a parity stands for what its holder has folded; it can go back (its
fold log) but not forward, so v[s] is the least that any parity in the repair has folded of s, the repaired parity
included: it can be rolled forward later by its own log, while newer steps that it has not folded could not be undone.

Example: k = 2, r = 1, record lost on slot 0, sibling on slot 1, parity on slot 2, which has folded {0: 9, 1: 7}. Slot 1
has applied 8. Then v = {0: 9, 1: 7}; slot 1 undoes its step 8 for the reader; parity XOR sibling is the record after 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch_ecrec.layout.stripes import Layout


@dataclass(frozen=True)
class RepairPlan:
    """The members to read in order to repair `member` of the stripes with base `base`.

    Attributes:
        sources: slots of the k data members, the repaired one included: the keys of the version vector.
        reads: the k members to read.
        parities: slots of the parity members among them: whose folded steps bound the version vector.
    """

    base: int
    member: int
    sources: tuple[int, ...]
    reads: tuple[int, ...]
    parities: tuple[int, ...]

    def read_bytes(self, records: int, record_bytes: int) -> int:
        """Returns how many bytes the repair of `records` records reads."""
        return len(self.reads) * records * record_bytes


def plan_repair(layout: Layout, base: int, member: int, unhealthy: Iterable[int]) -> RepairPlan:
    """Chooses k members to repair another from: healthy slots first, then data before parity, then the nearest."""
    doubtful = set(unhealthy)
    slot_of = [int(slot) for slot in layout.member_slot[base]]
    others = [j for j in range(layout.n) if j != member]
    others.sort(key=lambda j: (slot_of[j] in doubtful, j >= layout.k, j))
    reads = tuple(sorted(others[: layout.k]))
    return RepairPlan(
        base=base,
        member=member,
        sources=tuple(slot_of[: layout.k]),
        reads=reads,
        parities=tuple(slot_of[j] for j in reads if j >= layout.k),
    )


def version_vector(plan: RepairPlan, folded_by: Iterable[Mapping[int, int]]) -> dict[int, int] | None:
    """Returns the step of each source as of which all members are read; None if a parity has not met a source yet.

    Args:
        plan: what is repaired.
        folded_by: for each parity that is read, and for the repaired one if it is a parity: source -> last step folded.
    """
    holders = list(folded_by)
    if any(source not in folded for folded in holders for source in plan.sources):
        return None
    return {source: min(folded[source] for folded in holders) for source in plan.sources}


def portions(total: int, record_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Splits `total` records into half-open ranges of at most `chunk_bytes` each, at least one record."""
    size = max(1, chunk_bytes // record_bytes)
    for first in range(0, total, size):
        yield first, min(first + size, total)


def unrecoverable_bases(layout: Layout, lost: Iterable[int]) -> list[int]:
    """Returns the bases of stripes with more than r members on the `lost` slots: these cannot be decoded."""
    gone = set(lost)
    tolerated = layout.n - layout.k
    return [base for base in range(layout.slots) if sum(int(s) in gone for s in layout.member_slot[base]) > tolerated]


def rows_lost(layout: Layout, lost: Iterable[int], first: int = 0, end: int | None = None) -> int:
    """Returns how many rows of a table group cannot be decoded: those on lost slots in stripes that lost more than r
    members.

    It counts all rows, or only those in [first, end).
    """
    gone, end = set(lost), layout.rows if end is None else end
    return sum(
        layout.rows_of_rank(slot, int(layout.member_rank[base, member]), first, end)
        for base in unrecoverable_bases(layout, gone)
        for member, slot in enumerate(layout.member_slot[base, : layout.k].tolist())
        if slot in gone
    )
