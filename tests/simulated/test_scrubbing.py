"""Bits that flip in servers' memory: found, named and repaired, and the run is the undisturbed one, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from flipped_runs import Flipped, name_of
from harness import tiers
from harness.result import SimulationResult
from harness.scenario import LOADS, Scenario, half_tables
from harness.simulation import SimulatedCluster, simulate
from harness.verification import check_parities_as_of, check_parity
from thinned import in_turns

from torch_ecrec.records.tiers.tiered import SCAN_BYTES
from torch_ecrec.spec.job import CodeSpec

CODES = (CodeSpec(3, 2, 1), CodeSpec(6, 2, 2), CodeSpec(5, 4, 1))
OFTEN = tuple(range(100, 2000, 60))  # events


@functools.cache
def undisturbed(scenario: Scenario) -> SimulationResult:
    return simulate(scenario)


def check(cluster: Flipped) -> None:
    """The run is the undisturbed one, and each flip in a slot that lives was found once, named, and repaired."""
    undo = {"random_kills": 0, "random_trainer_kills": 0, "reborn": False, "kills": (), "noise": 0.0}
    calm = dataclasses.replace(cluster.scenario, network_seed=0, **undo)
    cluster.go().check_against(undisturbed(calm))
    advance(cluster)
    assert cluster.flipped
    assert not any(event["used"] or event["reason"] for event in cluster.told("damaged"))
    named = Counter(cluster.names())
    assert set(named) <= {name_of(*flip) for flip in cluster.flipped}, "nothing else is called damaged"
    live = cluster.slots()
    lasting = Counter(name_of(*flip) for flip in cluster.flipped if flip[0] in live)
    assert not lasting - named, "each of them was found"


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_flip_is_found_named_and_repaired_and_changes_nothing(code: CodeSpec, seed: int) -> None:
    cluster = Flipped(Scenario(code=code, steps=6, network_seed=seed), OFTEN)
    check(cluster)
    assert sum(event["count"] for event in cluster.told("damaged")) == len(cluster.flipped)
    assert sum(slot.scrubber.mended for slot in cluster.slots()) == len(cluster.flipped)
    assert cluster.told("mended"), "and said so"
    placed = [place.incarnation for place in cluster.slots_known]
    assert placed == [0] * code.slots, "nobody was lost for it"


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_flips_while_servers_and_trainers_are_lost(seed: int) -> None:
    scenario = Scenario(CodeSpec(6, 2, 2), steps=8, network_seed=seed, random_kills=2, reborn=True)
    if seed % 2:
        scenario = dataclasses.replace(scenario, random_trainer_kills=1, trainers_return=True)
    cluster = Flipped(scenario, tuple(range(60, 3000, 40)))
    check(cluster)
    assert cluster.run.kills + cluster.run.trainer_kills


def test_flips_while_messages_are_late_repeated_and_dropped() -> None:
    check(Flipped(Scenario(CodeSpec(3, 2, 1), steps=8, network_seed=3, noise=0.03), OFTEN))


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_parity_is_not_decoded_from(seed: int) -> None:
    """Nobody looks in the background; who rebuilds a lost slot reads others, and is told which are damaged."""
    scenario = Scenario(CodeSpec(6, 2, 2), steps=8, network_seed=seed, kills=((1, 3), (4, 5)))
    check(Flipped(scenario, OFTEN, parity=1.0, checks="background", scrubs="last", crash_damaged=True))


def test_flips_in_records_of_16_bits() -> None:
    check(Flipped(Scenario(tables=half_tables(), steps=5), OFTEN))


def test_a_load_does_not_hide_a_flip() -> None:
    """What is written over would fit its seal, and its parity keep the damage: it is looked at before."""
    check(Flipped(Scenario(steps=3, loads=LOADS), range(20, 900, 15)))
    check(Flipped(Scenario(steps=0, loads=LOADS), range(20, 900, 7), parity=0.0, checks="background"))


def test_what_nobody_has_used_is_repaired_to_the_last_bit_in_the_background() -> None:
    """After training: lookups and steps are over, so nothing of what flips then was used."""
    scenario = Scenario(steps=4)
    cluster = Flipped(scenario, (), checks="background")
    cluster.go().check_against(undisturbed(scenario))
    for _ in range(20):
        cluster.scrub(10_000)
    before = len(cluster.told("damaged"))
    for _ in range(10):
        assert any(cluster.flip() for _ in range(100))
        cluster.scrub(10_000)
        advance(cluster)
    collect_again(cluster)
    cluster.run.check_against(undisturbed(scenario))
    assert sum(event["count"] for event in cluster.told("damaged")[before:]) == 10
    assert not any(event["used"] for event in cluster.told("damaged"))


def collect_again(cluster: Flipped) -> None:
    """Records as they are now are those of the run."""
    cluster.run.records.clear()
    cluster.run.collect(cluster.slots())
    check_parity(cluster.slots())


def as_in_memory(most_bytes: int) -> int:
    """A budget for about as many records, of some 16 bytes, where they are on disks and count as `SCAN_BYTES` each."""
    return most_bytes * SCAN_BYTES // 16 if tiers.FRAMES else most_bytes


def advance(cluster: Flipped) -> None:
    """Until all is mended, and the coordinator knows."""
    for _ in range(2000):
        if cluster.all_mended():
            break
        cluster.network.clock.advance()
    end_s = cluster.network.clock.now_s + 0.05
    while cluster.network.clock.advance() and cluster.network.clock.now_s < end_s:
        pass


def test_where_a_step_may_have_used_it_already_the_word_says_so() -> None:
    """A record that is read in every step flips, and nobody looks before its use."""
    cluster = Flipped(Scenario(steps=6, touch=1.0), (150,), parity=0.0, checks="background", scrubs="last")
    run = cluster.go()
    assert run.fatal is None and len(cluster.flipped) == 1
    (event,) = cluster.told("damaged")
    assert event["count"] == event["used"] == 1 and event["reason"] == ""
    assert cluster.names() == [name_of(*cluster.flipped[0])]


class Timed(Flipped):
    """Keeps in mind at which step of training each bit flipped."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.flipped_at: dict[tuple[str, str, int, int], int] = {}

    def flip(self) -> bool:
        if not super().flip():
            return False
        slot = self.flipped[-1][0]
        self.flipped_at[name_of(*self.flipped[-1])] = slot.trained(slot.rule.applied)
        return True


def test_the_word_says_from_which_step_on_it_may_have_been_used() -> None:
    """Not when it was found: a checkpoint in between has what came of it."""
    scenario = Scenario(steps=6, touch=1.0)
    late = Timed(scenario, (150,), parity=0.0, checks="background", scrubs="last")
    late.go()
    (event,) = late.told("damaged")
    (flipped_at,) = late.flipped_at.values()
    assert event["used"] and event["step"] <= flipped_at < scenario.steps, "and it was found after the last step"
    often = Timed(dataclasses.replace(scenario, steps=30), range(3000, 9000, 300), parity=0.0, checks="background")
    often.go()
    used = [event for event in often.told("damaged") if event["used"]]
    assert used and all(event["step"] <= often.flipped_at[event["what"], *event["places"][0]] for event in used)
    assert any(event["step"] > 0 for event in used), "each record is seen once in a round"


def two_of_a_stripe(code: CodeSpec) -> Flipped:
    """Two records of one stripe flip at once, before anybody looks."""

    class Two(Flipped):
        def flip(self) -> bool:
            layout = self.layouts[0]
            for member in range(2):
                slot = self.slots()[int(layout.member_slot[0, member])]
                slot.shards[0].flip_(layout.first_position(0, member), 7 + member)
                self.flipped.append((slot, 0, False, layout.first_position(0, member)))
            return True

    return Two(Scenario(code=code, steps=6), (150,))


def test_two_of_a_stripe_are_repaired_by_two_parities() -> None:
    """Each is in the other's way: both are decoded from the rest."""
    check(two_of_a_stripe(CodeSpec(6, 2, 2)))


def test_more_than_the_stripe_can_repair_is_the_end_and_says_where() -> None:
    cluster = two_of_a_stripe(CodeSpec(3, 2, 1))
    run = cluster.go()
    assert run.fatal is not None and "of table a: too much of their stripes is damaged or lost" in run.fatal
    assert any(event["reason"] for event in cluster.told("damaged"))


@pytest.mark.parametrize("member", range(4))
def test_a_damaged_record_is_the_end_where_two_other_hosts_of_its_stripe_are_lost(member: int) -> None:
    """Each of the three waits for the others: who rebuilds the lost ones is told what is damaged, and what is not
    there."""

    class LostBeside(Flipped):
        def flip(self) -> bool:
            """A flip that nobody has seen yet; and hosts die, no more than the code repairs without it."""
            if not self.whole() or not self.slots():
                return False
            layout = self.layouts[0]
            slot_of = [int(slot) for slot in layout.member_slot[0]]
            slot, position = self.slots()[slot_of[member]], layout.first_position(0, member)
            parity = member >= layout.k
            slot.shards[0].flip_(position, 7, parity)
            self.flipped.append((slot, 0, parity, position))
            for other in [one for one in range(layout.n) if one != member][:2]:
                self.network.kill(self.slots_known[slot_of[other]].server)
            return True

    scenario = Scenario(code=CodeSpec(6, 2, 2), steps=6, spares=3)
    cluster = LostBeside(scenario, (150,), checks="background", scrubs="never", crash_damaged=True)
    run = cluster.go()
    assert cluster.flipped and run.kills == 2
    assert run.fatal is not None and "too much of their stripes is damaged or lost" in run.fatal
    assert "of table" in run.fatal


def test_without_protection_a_flip_is_the_end_and_says_where() -> None:
    cluster = Flipped(Scenario(code=CodeSpec(2, protection="none"), steps=6, spares=0), (100,), parity=0.0)
    run = cluster.go()
    assert run.fatal is not None and "there is no protection" in run.fatal and "of table" in run.fatal


def test_when_it_is_switched_off_nothing_is_noticed() -> None:
    cluster: Any = Flipped(Scenario(steps=6, tier_frames=0), (150,), checks="none")
    with pytest.raises(AssertionError, match="not the code of its stripe"):  # the simulation sees it, from outside
        cluster.go()
    assert cluster.flipped and not cluster.told("damaged")
    assert all(slot.scrubber.scrubbed_bytes == 0 for slot in cluster.slots())


@pytest.mark.smoke
@pytest.mark.parametrize("parity", [False, True])
def test_whichever_record_or_parity_is_another_the_simulation_sees_it(parity: bool) -> None:
    cluster = SimulatedCluster(Scenario(code=CodeSpec(6, 2, 2), steps=2, tier_frames=0))
    cluster.go()
    slots, seen = {slot.index: slot for slot in cluster.slots()}, 0
    for shard in [shard for slot in slots.values() for shard in slot.shards]:
        for position in range(shard.parity_rows if parity else shard.data_rows):
            shard.flip_(position, 5, parity)
            with pytest.raises(AssertionError, match="not the code of its stripe"):
                check_parities_as_of(slots)
            shard.flip_(position, 5, parity)
            seen += 1
    check_parities_as_of(slots)
    assert seen > 2 * len(slots)


@in_turns("many", 250, 1000)
def test_all_of_many_flips_are_found(many: int) -> None:
    """In a slot of a cluster at rest, one after the other and many at a time: all are named, nothing else is."""
    cluster = Flipped(Scenario(steps=2), (), checks="background")
    run = cluster.go()
    rng, found = np.random.default_rng(0), 0
    while found < many:
        flips = set()
        stripes = set()
        for _ in range(1 + found % 40):
            before = len(cluster.flipped)
            cluster.flip()
            flips |= {name_of(*flip) for flip in cluster.flipped[before:]}
            stripes |= set(cluster.stripes)
        seen = len(cluster.names())
        while not cluster.all_mended():
            cluster.scrub(as_in_memory(int(rng.integers(1, 9000))))
            advance(cluster)
        named = cluster.names()[seen:]
        assert set(named) == flips and len(named) == len(flips)
        found += len(flips)
    collect_again(cluster)
    run.check_against(undisturbed(Scenario(steps=2)))


def stray(cluster: Flipped) -> tuple[str, int, int]:
    """A delta that no step made is folded into a parity: its name. All seals fit."""
    while True:
        slot = cluster.chance.choice(cluster.slots())
        table_group = cluster.chance.randrange(len(slot.shards))
        shard = slot.shards[table_group]
        if shard.parity_rows:
            at = np.array([cluster.chance.randrange(shard.parity_rows)])
            delta = np.zeros((1, shard.schema.nbytes), np.uint8)
            delta[0, cluster.chance.randrange(shard.schema.nbytes)] = cluster.chance.randrange(1, 256)
            shard.fold_(slot.code, at, delta, np.ones(1, np.uint8))
            (place,) = slot.scrubber.places(table_group, True, at)
            return place


@pytest.mark.parametrize("code", CODES, ids=str)
def test_a_parity_that_is_not_the_code_of_its_stripe_is_found_and_encoded_again(code: CodeSpec) -> None:
    cluster = Flipped(Scenario(code=code, steps=3), (), checks="background")
    cluster.go()
    assert not cluster.told("damaged"), "in a run without one"
    wanted = []
    for _ in range(12):
        wanted.append(stray(cluster))
        cluster.scrub(as_in_memory(20_000))  # all of it
        advance(cluster)
        while not all(slot.whole for slot in cluster.slots()):  # some answers come late, and it is encoded again later
            advance(cluster)
    assert cluster.names() == [("mismatch", *place) for place in wanted]
    assert sum(slot.figures().wrong_stripes for slot in cluster.slots()) == len(wanted), "as a status counts them"
    check_parity(cluster.slots())


@in_turns("steps", 5, 10)
@pytest.mark.parametrize("seed", range(4))
def test_comparing_finds_nothing_where_nothing_is_wrong(seed: int, steps: int) -> None:
    """While steps are applied, folded, taken back and made again, servers lost and rebuilt."""
    more = {"random_kills": 3, "reborn": True, "random_trainer_kills": 2, "trainers_return": True, "noise": 0.02}
    cluster = Flipped(Scenario(CODES[seed % 3], steps=steps, network_seed=seed, spares=2, **more), ())
    run = cluster.go()
    assert run.kills + run.trainer_kills and run.fatal is None and not cluster.told("damaged")
    assert sum(slot.scrubber.rounds for slot in cluster.slots()) > 10
    assert any(kind == "FetchSeals" for _, _, kind in cluster.network.sent)
