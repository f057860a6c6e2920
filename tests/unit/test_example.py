"""The demonstration's script: its batches."""

import numpy as np
import pytest

from examples.dlrm_criteo import CATEGORIES, FEATURES, to_batch
from torch_ecrec.demo.criteo import Clicks

SAMPLES = 40


def clicks() -> Clicks:
    rows = np.arange(SAMPLES * CATEGORIES, dtype=np.int32).reshape(SAMPLES, CATEGORIES)
    return Clicks(np.zeros(SAMPLES, np.float32), np.zeros((SAMPLES, 13), np.float32), rows)


def test_a_bag_has_the_id_of_its_sample() -> None:
    features = to_batch(clicks()).sparse_features
    assert features.keys() == FEATURES and (features.lengths() == 1).all()
    assert np.array_equal(features.values().view(CATEGORIES, SAMPLES).numpy(), clicks().categories.T)


@pytest.mark.parametrize("ids", [2, 8])
def test_bags_of_several_ids_have_those_of_samples_before(ids: int) -> None:
    features = to_batch(clicks(), ids).sparse_features
    lengths = features.lengths().numpy()
    assert set(lengths.tolist()) == set(range(2 * ids)), "some are empty"
    for number, feature in enumerate(FEATURES):
        jagged = features[feature]
        offsets = jagged.offsets().tolist()
        for sample in range(SAMPLES):
            found = jagged.values()[offsets[sample] : offsets[sample + 1]].tolist()
            assert found == [(sample - back) % SAMPLES * CATEGORIES + number for back in range(len(found))]


def test_no_samples_are_a_batch() -> None:
    assert len(to_batch(clicks()[np.arange(0)], 8).sparse_features.values()) == 0
