"""Which modes there are, how they are chosen, and that all processes of a cluster must have the same."""

import pytest
from coordinator_harness import Harness

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.durability import policy_of
from torch_ecrec.durability.acknowledged_when_applied import AcknowledgedWhenApplied
from torch_ecrec.durability.none import Unprotected
from torch_ecrec.durability.parity import Parity
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.membership import join_of
from torch_ecrec.spec.experiment import MODES, Experiment, difference
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings

CODE = CodeSpec(3, 2, 1)
PARTIAL = CheckpointSettings(url="memory://kept", every_steps=10, beyond="partial")


def test_no_experiment_is_made_unless_a_setting_says_so(monkeypatch):
    assert not Settings.from_environment().experiment and not Experiment().variables() and not Experiment().gives_up()
    monkeypatch.setenv("TORCH_ECREC_EXPERIMENT_MODE", "minusNNRep-minus2PC")
    monkeypatch.setenv("TORCH_ECREC_EXPERIMENT_RANGES", "10")
    settings = Settings.from_environment()
    assert settings.experiment == Experiment("minusNNRep-minus2PC", 10) and len(settings.experiment.gives_up()) == 3
    assert settings.environment()["TORCH_ECREC_EXPERIMENT_RANGES"] == "10", "processes that are started have it, too"


@pytest.mark.parametrize(
    ("mode", "near"),
    [("minus2pc", "minus2PC"), ("minusNNREP", "minusNNRep"), ("minus2PC-minusNNRep", "minusNNRep-minus2PC")],
)
def test_a_misspelt_mode_is_refused_with_the_nearest(mode, near):
    with pytest.raises(ValueError, match=f"got '{mode}'; did you mean {near}[?]"):
        Settings(experiment_mode=mode)


@pytest.mark.parametrize("ranges", [-1, 1 << 40])
def test_ranges_are_a_number(ranges):
    with pytest.raises(ValueError, match="`experiment_ranges` must be at"):
        Settings(experiment_ranges=ranges)


def test_what_each_mode_leaves_out():
    modes = map(Experiment, MODES)
    assert {one.mode: (one.acknowledges_when_applied, one.keeps_no_dense_snapshots) for one in modes} == {
        "minus2PC": (True, False),
        "minusNNRep": (False, True),
        "minusNNRep-minus2PC": (True, True),
    }


def test_a_policy_for_each():
    assert policy_of("none", Experiment()) is Unprotected
    assert policy_of("parity", Experiment()) is policy_of("parity", Experiment("minusNNRep")) is Parity
    assert policy_of("parity", Experiment("minus2PC")) is AcknowledgedWhenApplied


@pytest.mark.parametrize(
    ("experiment", "more", "said"),
    [
        (Experiment("minus2PC"), {"code": CodeSpec(3, 2, 1, protection="none")}, "cannot go with --protection none"),
        (Experiment(ranges=3), {"checkpoint": PARTIAL}, "cannot go with --beyond partial"),
        (Experiment("minusNNRep"), {"checkpoint": PARTIAL}, "sends no dense snapshots to the servers"),
    ],
)
def test_a_cluster_that_cannot_make_it_is_refused(experiment, more, said):
    with pytest.raises(ValueError, match=said):
        ClusterSettings(**{"code": CODE, "spares": 0, **more}, experiment=experiment)


def joins(experiment: Experiment) -> messages.Join:
    """As it arrives at the coordinator."""
    word = messages.from_member(messages.json_of(join_of("server", "one", 1, experiment=experiment)))
    assert isinstance(word, messages.Join)
    return word


@pytest.mark.parametrize("ours", [Experiment(), Experiment("minus2PC"), Experiment("minus2PC", 3)])
@pytest.mark.parametrize(
    "theirs", [Experiment(), Experiment("minus2PC"), Experiment("minusNNRep"), Experiment(ranges=3)]
)
def test_who_joins_must_have_the_same(ours, theirs):
    refusal = Harness(code=CODE, experiment=ours).core.refusal(joins(theirs))
    assert (refusal is None) == (ours == theirs)
    assert refusal is None or "TORCH_ECREC_EXPERIMENT_" in refusal


def test_a_refusal_names_setting_and_both_values():
    ours, theirs = Experiment("minus2PC").variables(), {"Push": "7c9d02e1"}
    said = difference(theirs, ours)
    assert said.startswith("TORCH_ECREC_EXPERIMENT_MODE is 'minus2PC' in this cluster, and not set in the process that")
    assert difference(ours, {}).startswith("TORCH_ECREC_EXPERIMENT_MODE is not set in this cluster, and 'minus2PC'")
    assert difference({**ours, **theirs}, ours) == ""


def test_a_status_says_it():
    h = Harness(code=CODE, experiment=Experiment("minus2PC", 3))
    said = h.core.status(0.0).experiment
    assert said is not None and (said.mode, said.ranges, len(said.gives_up)) == ("minus2PC", 3, 2)
    assert Harness(code=CODE).core.status(0.0).experiment is None
