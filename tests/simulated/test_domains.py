"""Failure domains: slots of a group are kept apart where that is possible, and it is said where it is not."""

from __future__ import annotations

import itertools

import pytest
from coordinator_harness import Harness

from torch_ecrec.coordinator import domains
from torch_ecrec.observe.text import format_status
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings

SIX = CodeSpec(6, 2, 1)


def started(where: list[str], code: CodeSpec | None = None, spares: int = 1, **options: object) -> Harness:
    """A cluster whose servers say that they are there, in this order."""
    return Harness(code, spares=spares, **options).start(domains=where)


def hosts(h: Harness) -> list[str]:
    return [h.core.members[name].domain for name in h.places]


@pytest.mark.parametrize("where", sorted(set(itertools.permutations("aabbcc"))))
def test_six_slots_on_three_hosts_survive_the_loss_of_any_host(where: tuple[str, ...]) -> None:
    """Two servers each, in whatever order they came; r = 1."""
    for lost in "abc":
        h = started(list(where), SIX, spares=0)
        assert {*hosts(h)[:3]} == {*hosts(h)[3:]} == {*"abc"}
        assert h.core.status(h.now_s).at_risk == []
        for name in [name for name, member in h.core.members.items() if member.domain == lost]:
            h.lose(name)
        assert h.core.fatal is None and lost not in hosts(h)


def test_a_lost_slot_goes_to_a_spare_of_another_host() -> None:
    h = started(["a", "b", "c", "a", "d"], spares=2)
    assert hosts(h) == ["a", "b", "c"]
    h.lose("server-1")
    assert hosts(h) == ["a", "d", "c"], "the first spare shares a host"
    h = started(["a", "b", "c", "a"])
    h.lose("server-1")
    assert hosts(h) == ["a", "a", "c"] and h.places[1] == "server-3", "better than a server with two slots"


def test_the_wider_levels_count_where_the_narrow_ones_are_alike() -> None:
    h = started(["x/1/a", "x/1/b", "x/2/c", "y/3/d", "x/2/e"], spares=2)
    assert hosts(h) == ["x/1/a", "y/3/d", "x/2/c"], "a rack for each, and as many rows as there are"
    h.lose("server-2")
    assert hosts(h)[2] == "x/2/e"


def test_what_cannot_be_avoided_is_said_and_ends_with_a_host_that_comes() -> None:
    h = started(["r/a", "r/a", "r/b"], spares=0)
    status = h.core.status(h.now_s)
    assert [(one.domain, one.slots) for one in status.at_risk] == [("r", [0, 1, 2]), ("r/a", [0, 2])]
    assert "AT RISK: if r/a is lost, slots [0, 2] are lost together" in format_status(status)
    told = [event for event in h.events if event["event"] == "at_risk"]
    assert [event["domains"] for event in told] == [["r", "r/a"]]
    h.join(role="server", domain="s/c")
    h.enter()
    h.move()
    assert sorted(hosts(h)) == ["r/a", "r/b", "s/c"]
    epoch = h.core.epoch
    h.core.on_tick(h.now_s)
    assert h.core.epoch == epoch, "the spare that is left is not better"
    assert [one.domain for one in h.core.status(h.now_s).at_risk] == ["r"]


def test_servers_that_say_nothing_share_nothing() -> None:
    h = started(["", "", ""], spares=0)
    assert h.places == ["server-0", "server-1", "server-2"] and h.core.status(h.now_s).at_risk == []


def test_what_is_shared_is_counted_from_the_narrowest() -> None:
    where = {
        name: domains.parse(name, text) for name, text in zip("pqrs", ("x/1/a", "x/1/a", "x/2/c", ""), strict=True)
    }
    assert domains.shared("p", ["q", "r", "s"], where)[:4] == (0, 1, 1, 2)
    assert domains.shared("p", ["p", "gone"], where)[:4] == (1, 1, 1, 1)
    assert domains.shared("s", ["p", "q"], where) == (0,) * (domains.LEVELS_MOST + 1)


@pytest.mark.parametrize("domain", ["a//b", "/a", "a/", "/".join("abcdefghi"), "x" * 201])
def test_a_domain_that_cannot_be_is_refused(domain: str) -> None:
    with pytest.raises(ValueError, match="failure_domain"):
        Settings(failure_domain=domain)
