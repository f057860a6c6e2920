"""The protocol under random kills and noise, on the simulated cluster; the oracle is the undisturbed run."""

import dataclasses

import pytest
import torch
from faults import SCHEDULES, WAYS, run_schedules, seeds_of
from harness import Scenario, simulate


@pytest.mark.parametrize("way", WAYS)
def test_random_kills(way):
    """With few of the seeds below, others for each way."""
    seeds = seeds_of(way, 4)
    run_schedules(way, seeds.start % SCHEDULES, len(seeds))


def test_kills_with_a_bfloat16_wire_are_exact_too():
    scenario = Scenario(wire="bfloat16", steps=6, spares=2)
    undisturbed, full = simulate(scenario), simulate(dataclasses.replace(scenario, wire="float32"))
    assert not torch.equal(undisturbed.records[0], full.records[0]), "nothing was rounded"
    run = simulate(dataclasses.replace(scenario, kills=((1, 2), (0, 4)), noise=0.05))
    assert run.kills == 2
    run.check_against(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("way", WAYS)
def test_more_random_kills(way):
    run_schedules(way, 0, SCHEDULES)
    run_schedules(way, 1000, 300)
