"""Failure domains: what is lost together, and which server is best for a slot because of it. Pure.

A *domain* is a path, the widest first: `row1/rack3/host17`. Whoever shares the first levels of two paths shares that
row, or that rack, too. A server that says nothing is alone in its domain.

Slots that have members of one stripe should share nothing, nor should those that keep the dense model. What a server
would share with such slots is counted from the narrowest to the widest: the same server, the same host, the same rack,
... A place is better if it shares less with fewer, the narrowest first: (0, 0, 1) is better than (0, 1, 1).

    hosts a, b, c with two servers each, six slots, stripes of three neighbours: slots 0 and 3 are on a, 1 and 4 on b,
    2 and 5 on c, and any host may be lost with r = 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch_ecrec.spec.settings import DOMAIN_LEVELS_MOST as LEVELS_MOST

Domain = tuple[str, ...]


def parse(server: str, text: str) -> Domain:
    """A server's domain, of what it has said."""
    return tuple(level for level in text.split("/") if level)[:LEVELS_MOST] or (f"server {server}",)


def shared(server: str, others: Iterable[str], domains: Mapping[str, Domain]) -> tuple[int, ...]:
    """How many of the others are on that server, and share its domain, from the narrowest level to the widest."""
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
