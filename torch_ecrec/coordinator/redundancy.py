"""What could be lost now without losing anything: so many servers, and which hosts. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from torch_ecrec.coordinator.domains import Domain
from torch_ecrec.protocol.status import HostStatus, Redundancy

TRIED_MOST = 300  # sets of servers that are tried before a bound is told instead


def losses(
    hosted: Mapping[str, Sequence[int]], lacking: Collection[int], most: int, is_loss: Callable[[set[int]], bool]
) -> int:
    """How many servers, whichever they are, could be lost together now.

    Args:
        hosted: the slots of each server that has some.
        lacking: slots that lack a host or records: they count as lost already.
        most: slots that the code repairs together, at least.
        is_loss: whether something cannot be repaired if these slots are lost together.

    Of many servers that is not tried out: then it is what any code of `most` repairs, which may be less than this one
    does.
    """
    lacking = set(lacking)
    if is_loss(lacking):
        return 0
    for count in range(1, most + 1):
        if count > len(hosted):
            return count - 1
        if math.comb(len(hosted), count) > TRIED_MOST:
            largest = sorted((len(slots) for slots in hosted.values()), reverse=True)
            return max(count - 1, sum(total <= most - len(lacking) for total in itertools.accumulate(largest)))
        for servers in itertools.combinations(hosted.values(), count):
            if is_loss(lacking.union(*servers)):
                return count - 1
    return most


class Redundancies:
    """The redundancy of a placement, worked out once for each state of it."""

    def __init__(self) -> None:
        self._key: object = None
        self._found: Redundancy | None = None

    def look(
        self,
        hosted: Mapping[str, Sequence[int]],
        domains: Mapping[str, Domain],
        lacking: Collection[int],
        spares: int,
        elsewhere: bool,
        most: int,
        loss: Callable[[set[int]], str | None],
    ) -> Redundancy:
        """Finds how many servers could be lost now without losing data, and which hosts hold too much.

        Args:
            hosted: the slots of every server that is there; none of a spare.
            domains: of them; see `domains.py`.
            lacking: slots that lack a host or records.
            spares, elsewhere: see `Redundancy`.
            most: slots that the code repairs together, at least.
            loss: what cannot be repaired if these slots are lost together, for people; None: nothing.
        """
        places = {server: tuple(slots) for server, slots in hosted.items()}
        key = (places, dict(domains), frozenset(lacking), spares, elsewhere)
        if key == self._key and self._found is not None:
            return self._found
        serving = {server: slots for server, slots in places.items() if slots}
        hosts = []
        for domain in sorted(set(domains.values())):
            servers = [server for server, of in domains.items() if of == domain]
            slots = sorted(slot for server in servers for slot in places.get(server, ()))
            why = loss({*lacking, *slots}) if slots else None
            hosts.append(HostStatus("/".join(domain), servers, slots, why is None, why or ""))
        self._found = Redundancy(
            losses=losses(serving, lacking, most, lambda slots: loss(slots) is not None),
            of=most,
            spares=spares,
            elsewhere=elsewhere,
            hosts=hosts,
        )
        self._key = key
        return self._found
