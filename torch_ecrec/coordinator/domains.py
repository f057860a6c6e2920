"""Failure domains: what is lost together, which server is best for a slot because of it, and what could be lost. Pure.

A *domain* is a path, the widest first: `row1/rack3/host17`. Whoever shares the first levels of two paths shares that
row, or that rack, too. A server that says nothing is alone in its domain.

Slots that have members of one stripe should share nothing, nor should those that keep the dense model. What a server
would share with such slots is counted from the narrowest to the widest: the same server, the same host, the same rack,
... A place is better if it shares less with fewer, the narrowest first: (0, 0, 1) is better than (0, 1, 1).

    hosts a, b, c with two servers each, six slots, stripes of three neighbours: slots 0 and 3 are on a, 1 and 4 on b,
    2 and 5 on c, and any host may be lost with r = 1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch_ecrec.protocol.status import HostStatus, Redundancy
from torch_ecrec.spec.settings import DOMAIN_LEVELS_MOST as LEVELS_MOST

TRIED_MOST = 300  # sets of servers that are tried before a bound is told instead

Domain = tuple[str, ...]


def parse(server: str, text: str) -> Domain:
    """Returns a server's failure domain from the text that it has sent; a server that sent none is alone in one."""
    return tuple(level for level in text.split("/") if level)[:LEVELS_MOST] or (f"server {server}",)


def shared(server: str, others: Iterable[str], domains: Mapping[str, Domain]) -> tuple[int, ...]:
    """Returns how many of the others are on that server, and share its domain, from the narrowest level to the
    widest."""
    others, own = list(others), domains[server]
    widths = range(len(own), 0, -1)
    counts = [sum(domains.get(other, ())[:width] == own[:width] for other in others) for width in widths]
    return (others.count(server), *counts, *[0] * (LEVELS_MOST - len(own)))


def at_risk(
    servers: Sequence[str], domains: Mapping[str, Domain], loss: Callable[[set[int]], str | None]
) -> dict[str, tuple[list[int], str]]:
    """Domains of several servers whose loss the code could not repair: the slots there, and what would be lost.

    Args:
        servers: by slot.
        loss: what cannot be repaired if these slots are lost together, for people; None: nothing.
    """
    found: dict[str, tuple[list[int], str]] = {}
    paths = sorted({domains[name][:width] for name in servers if name in domains for width in _widths(domains[name])})
    for path in paths:
        slots = [slot for slot, name in enumerate(servers) if domains.get(name, ())[: len(path)] == path]
        several = len({servers[slot] for slot in slots}) > 1
        if several and (reason := loss(set(slots))) is not None:
            found["/".join(path)] = slots, reason
    return found


def _widths(domain: Domain) -> range:
    return range(1, len(domain) + 1)


class Risks:
    """Domains that must not be lost, worked out once for each placement."""

    def __init__(self) -> None:
        self._epoch, self._found = -1, dict[str, tuple[list[int], str]]()
        self._said: list[str] = []

    def look(
        self,
        epoch: int,
        servers: Sequence[str],
        domains: Mapping[str, Domain],
        loss: Callable[[set[int]], str | None],
    ) -> dict[str, tuple[list[int], str]]:
        """As `at_risk`. `epoch`: of the placement."""
        if epoch != self._epoch:
            self._epoch, self._found = epoch, at_risk(servers, domains, loss)
        return self._found

    def news(self, domains: Mapping[str, Domain]) -> list[str] | None:
        """Returns the risks that were found last, if they differ from those returned before; else None.

        On one host alone there are none to report: it is no surprise that a cluster is lost with its only host.
        """
        found = sorted(self._found) if len(set(domains.values())) > 1 else []
        before, self._said = self._said, found
        return found if found != before else None


def losses(
    hosted: Mapping[str, Sequence[int]], lacking: Collection[int], most: int, is_loss: Callable[[set[int]], bool]
) -> int:
    """Returns how many servers, whichever they are, could be lost together now.

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
