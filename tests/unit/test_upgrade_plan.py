"""What `torch-ecrec upgrade` does next, by a status: whom it drains, where it waits, and what it says; and `drain`."""

from __future__ import annotations

import argparse
import functools
from types import SimpleNamespace
from typing import Any

import pytest
from coordinator_harness import Harness, known, rejoin
from coordinator_words import healthy, member, status

import torch_ecrec
from torch_ecrec.cli import drain, upgrade
from torch_ecrec.cli.upgrade import Plan
from torch_ecrec.processes import coordination, launch, supervisor
from torch_ecrec.protocol.status import MemberStatus, MoveStatus, RegatheringStatus, Status, json_of
from torch_ecrec.spec.settings import Settings

OLD, NEW = "0.0.9", torch_ecrec.__version__


def server(number: int, version: str, **more: Any) -> MemberStatus:
    return member(f"server-{number}", version=version, **more)


def of(*members: MemberStatus, hosts: tuple[int, ...] = (0, 1, 2), **more: Any) -> Status:
    """Slot i is on server hosts[i]."""
    slots = [type(one)(one.slot, f"server-{host}", 0, True) for one, host in zip(healthy(3), hosts, strict=True)]
    return status(version=OLD, slots=slots, members=list(members), **more)


SERVING = [server(number, OLD) for number in range(3)]
SPARE = server(3, NEW, spare=True)


@pytest.mark.parametrize(
    ("members", "more", "drains", "says"),
    [
        (SERVING, {}, [], f"no server of version {NEW} is there without a slot: then start one of it"),
        ([*SERVING, server(3, OLD, spare=True)], {}, [], "end server-3 (pid 7 on its host), and start one of it"),
        ([*SERVING, server(3, NEW, spare=True, draining=True)], {}, [], "no server of version"),
        ([*SERVING, server(3, NEW, spare=True, alive=False)], {}, [], "no server of version"),
        ([*SERVING, SPARE], {}, ["server-0"], "server-0: 0; server-1: 1; server-2: 2. The next one moves soon"),
        ([*SERVING, SPARE, server(4, OLD, spare=True)], {}, ["server-4"], "The next one moves soon"),
        ([*SERVING[1:], server(0, OLD, draining=True), SPARE], {}, [], "The next one moves soon"),
        ([*SERVING, SPARE], {"move": MoveStatus(0, "server-3")}, ["server-0"], "Slot 0 is being copied to server-3"),
    ],
)
def test_what_is_done_next(members: list[MemberStatus], more: dict[str, Any], drains: list[str], says: str) -> None:
    plan = Plan.of(of(*members, **more))
    assert plan.to_drain == drains and says in plan.progress("10.0.0.1:29400")
    assert plan.has_room or not drains, "nothing is marked where there is no room"


def test_slots_that_are_repaired_come_first() -> None:
    said = of(*SERVING, SPARE)
    said.slots[1] = type(said.slots[1])(1, "server-1", 0, False)
    assert "Others are being repaired first" in Plan.of(said).progress("")


def test_two_slots_of_one_server_are_both_left() -> None:
    plan = Plan.of(of(*SERVING[:2], SPARE, hosts=(0, 1, 0)))
    assert plan.left == {"server-0": [0, 2], "server-1": [1]}


@pytest.mark.parametrize("back", [[], SERVING[:1]], ids=["nobody", "one"])
@pytest.mark.parametrize("regathers", [True, False])
def test_a_coordinator_that_was_started_again_does_not_end_it(back: list[MemberStatus], regathers: bool) -> None:
    """It shows no slots until members of the one before are back: servers that it would call free have all of them."""
    said = status(version=OLD, slots=[], members=back, regathering=RegatheringStatus([], []) if regathers else None)
    plan = Plan.of(said)
    assert not plan.is_over and not plan.to_drain and "does not know where slots are" in plan.progress("")


def test_so_shows_a_coordinator_that_was_started_again() -> None:
    before, after = Harness().start(), Harness()
    plans = [Plan.of(after.core.status(after.now_s))]
    for name in ("server-0", "server-1"):
        rejoin(after, known(before, name))
        plans.append(Plan.of(after.core.status(after.now_s), "another version"))
    assert not any(plan.is_known or plan.is_over for plan in plans)
    assert Plan.of(before.core.status(before.now_s), "another version").left.keys() >= {"server-0", "server-1"}


def test_nor_does_a_slot_that_waits_for_a_server() -> None:
    new = [server(number, NEW) for number in (3, 4)]
    said = of(server(2, OLD, spare=True), *new, hosts=(3, 4, 4))
    assert Plan.of(said).is_over
    said.slots[1] = type(said.slots[1])(1, "", 1, False)
    plan = Plan.of(said)
    assert not plan.left and not plan.is_over and "none. Others are being repaired first" in plan.progress("")


@pytest.mark.parametrize("refuses", [True, False])
def test_the_command_waits_for_a_coordinator_that_was_started_again(
    refuses: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = status(version=OLD, slots=[], members=[])
    over = of(server(0, OLD), server(3, NEW), server(4, NEW), hosts=(3, 3, 4))
    looks = iter([gone] if refuses else [of(*SERVING, SPARE), gone, gone, over])

    def ask(word: dict[str, Any], limit_s: float, led: bool = False) -> dict[str, Any]:
        if word["type"] == "drain":
            return {"type": "refused", "reason": "members of the coordinator before come first"}
        return json_of(said[0] if word["type"] == "compare" else next(looks))

    said = [next(looks)]
    monkeypatch.setattr(upgrade, "asker", lambda join: ask)
    monkeypatch.setattr(upgrade, "asks", lambda arguments: (Settings(), "10.0.0.1:29400"))
    monkeypatch.setattr(upgrade, "ASK_S", 0.0)
    monkeypatch.setattr(launch, "warm", lambda tells: None)
    monkeypatch.setattr("torch_ecrec.processes.kernel_bits.kernel_bits", dict)
    monkeypatch.setattr(upgrade, "is_there", lambda status, name: False)
    arguments = argparse.Namespace(check=False)
    if refuses:
        with pytest.raises(ValueError, match="nothing was moved: the coordinator does not know where slots are"):
            upgrade.run(arguments)
        return
    assert upgrade.run(arguments) == 0 and next(looks, None) is None
    assert "waits: the coordinator does not know where slots are" in capsys.readouterr().out


def test_a_drain_ends_when_the_server_is_lost_in_the_middle_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asked again and again, and for ever, for a server that nobody knows any more."""
    begun, left = (of(server(0, OLD, **about), *SERVING[1:]) for about in ({"draining": True}, {"alive": False}))
    again = status(slots=[], members=[])  # of a coordinator to which nobody has come back yet
    refused = {"type": "refused", "reason": "no server is called 'server-0'"}
    answers = iter([json_of(begun), refused, json_of(again), refused, json_of(left)])
    monkeypatch.setattr(drain, "asker", lambda join: lambda word, limit_s, led=False: next(answers))
    monkeypatch.setattr(drain, "asks", lambda arguments: (Settings(), "10.0.0.1:29400"))
    monkeypatch.setattr(drain, "ASK_S", 0.0)
    asked = argparse.Namespace(what="server-0", undo=False, no_wait=False)
    assert drain.run(asked) == 1 and next(answers, None) is None
    assert "server-0 was lost before all its slots had moved" in capsys.readouterr().out


def test_in_the_end_it_says_who_runs_what_and_what_is_left() -> None:
    new = [server(number, NEW) for number in (3, 4, 5)]
    trainers = [member("trainer-0", version=OLD)]
    plan = Plan.of(of(server(2, OLD, spare=True, draining=True), *new, *trainers, hosts=(3, 4, 5)))
    assert not plan.left and plan.summary().splitlines() == [
        "upgraded: no slot is on a server of another version."
        f" {OLD}: server-2, trainer-0, the coordinator; {NEW}: server-3, server-4, server-5",
        "end server-2: they have no slot any more",
        "then start the coordinator again from this version (docs/howto/upgrade.md)",
        "trainer-0: of another version until they are started again",
    ]


@pytest.mark.parametrize(
    ("about", "waits"),
    [({"draining": True, "spare": True}, False), ({"draining": True}, True), ({"spare": True}, True)],
)
def test_a_server_that_was_drained_waits_for_nobody(
    about: dict[str, bool], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to end, others stay while trainers are there, which may read from them."""
    monkeypatch.setattr(supervisor, "POLL_S", 0.0)
    looks = iter(range(4))
    said = status(members=[member("server-0", **about), member("server-1"), member("trainer-0")])
    supervisor.await_trainers(lambda: said, 1e9, lambda: next(looks) == 3, "server-0")
    assert next(looks, None) == (None if waits else 1)


@pytest.mark.parametrize("back", [["server-0", "server-1"], ["server-1"], []])
def test_nobody_ends_since_a_coordinator_that_was_started_again_shows_no_trainers_yet(
    back: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "POLL_S", 0.0)
    members, regathers = [member(name) for name in back], RegatheringStatus(back, ["trainer-0"])
    said = [status(members=members, slots=[], regathering=regathers if back else None)] * 3
    said += [status(members=[member("server-0"), member("trainer-0")])] * 2 + [status(members=[member("server-0")])] * 2
    left = iter(said)
    supervisor.await_trainers(lambda: next(left), 1e9, lambda: False, "server-0")
    assert len([*left]) == 1, "it ends once it is known that nobody trains"


def test_nor_does_a_coordinator_whose_members_are_not_all_back() -> None:
    before, after = Harness().start(), Harness()
    told = SimpleNamespace(_router=SimpleNamespace(core=after.core))
    waits_for = functools.partial(coordination._Coordinator._trainers, told)  # type: ignore[arg-type]
    assert waits_for() == [], "nobody has come back: it may be the first"
    rejoin(after, known(before, "server-0"))
    assert waits_for() == ["trainers of the coordinator before"]
    rejoin(after, known(before, "trainer-0"))
    assert waits_for() == ["trainer-0"]
    after.core.stop("stopped", "stopped")
    assert waits_for() == []
