"""What is no state of a table is refused by name, and changes nothing: wrong things, dtypes, keys, parts of one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import CPU, META, Net, batch_of, collection, repeated_batch, shard, table, train
from test_sequences import sequences
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torch_ecrec import checkpoint

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)
WIDE = "collections.0.embedding_bags.wide.weight"
MOMENTUM = "wide.momentum1"


def made(kind: str = "rowwise_adagrad") -> Any:
    return shard(Net(collection(kind, device=META)))


@pytest.mark.parametrize("value", [[1.0], None, np.zeros((50, 8), np.float32), 3.0], ids=lambda v: type(v).__name__)
def test_what_is_no_tensor_is_refused_by_name(value: Any) -> None:
    model, session = made()
    state = model.state_dict()
    before = session.records[0].clone()
    with pytest.raises(TypeError, match=r"`weight` of table wide is loaded from a tensor of shape \(50, 8\), got "):
        model.load_state_dict({**state, WIDE: value})
    optimizer = model.fused_optimizer.state_dict()
    optimizer["state"][WIDE][MOMENTUM] = torch.zeros(49)
    with pytest.raises(ValueError, match=r"`momentum1` of table wide takes shape \(50,\) here, got \(49,\)"):
        model.fused_optimizer.load_state_dict(optimizer)
    assert torch.equal(session.records[0], before)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(50, 8, dtype=torch.complex64),
        torch.ones(50, 8, device="meta"),
        torch.ones(50, 8).to_sparse(),
        torch.quantize_per_tensor(torch.ones(50, 8), 0.1, 0, torch.quint8),
    ],
    ids=["complex", "meta", "sparse", "quantized"],
)
def test_what_has_no_real_numbers_is_refused_by_name(value: Any) -> None:
    model, session = made()
    before = session.records[0].clone()
    with pytest.raises(RuntimeError, match="`weight` of table wide: real numbers are needed, in a dense tensor"):
        model.load_state_dict({**model.state_dict(), WIDE: value})
    assert torch.equal(session.records[0], before)


def test_parts_of_sums_are_no_values() -> None:
    model, _ = made()
    mesh = init_device_mesh("cpu", (1,))
    partial = DTensor.from_local(torch.ones(50, 8), mesh, [Partial()], run_check=False)
    with pytest.raises(RuntimeError, match=r"`weight` of table wide: a DTensor with placements .*`redistribute` it"):
        model.load_state_dict({**model.state_dict(), WIDE: partial})


def test_streamed_tables_of_which_nothing_was_loaded_are_refused() -> None:
    """They have no rows: to load them did nothing, and said nothing."""
    model, _ = made()
    other, session = made()
    train(model, [batch_of(6, 1)])
    before = session.records[0].clone()
    for state, load in (
        (model.streamed_state_dict(), other.load_state_dict),
        (model.streamed_optim_state_dict(), other.fused_optimizer.load_state_dict),
    ):
        with pytest.raises(RuntimeError, match="is streamed to a checkpoint, and cannot be loaded from"):
            load(state)
    assert torch.equal(session.records[0], before)


def test_a_checkpoint_that_lacks_a_part_of_a_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_ecrec.state_dicts.streamed.PORTION_BYTES", 4 * 8 * 7)
    model, session = made()
    checkpoint.save(model, tmp_path)
    train(model, [batch_of(6, 1)])
    before = session.records[0].clone()
    reader = dcp.FileSystemReader(tmp_path)
    metadata = reader.read_metadata()
    chunks = metadata.state_dict_metadata[f"model.{WIDE}"].chunks
    assert len(chunks) > 2
    del chunks[1]
    monkeypatch.setattr(reader, "read_metadata", lambda: metadata)
    with pytest.raises(ValueError, match=rf"has 344 of the 400 numbers of model.{WIDE}: a part of it is missing"):
        checkpoint.load(model, storage_reader=reader)
    assert torch.equal(session.records[0], before), "nothing was loaded"


def test_inverse_indices_that_are_no_integers_are_refused() -> None:
    model, _ = shard(collection())
    features = repeated_batch(["f0", "f1", "f2", "f3"], 4, 1)
    names, index = features.inverse_indices()
    bad = KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=features.lengths(),
        stride_per_key_per_rank=[[stride] for stride in features.stride_per_key()],
        inverse_indices=(names, index.float()),
    )
    with pytest.raises(ValueError, match=r"`inverse_indices` must be integers, got torch.float32"):
        model(bad)


@pytest.mark.parametrize(
    ("kind", "lengths", "weights"),
    [
        ("bags", [2] * 8, 8),  # more than there are: other memory was read and written
        ("bags", [1] * 7 + [0], 8),
        ("bags", [2, -1, 1, 1, 2, 1, 1, 1], 8),
        ("bags", [1] * 8, 5),
        ("sequences", [2] * 6, None),
        ("sequences", [1] * 5 + [0], None),
        ("sequences", [2, -1, 1, 1, 2, 1], None),
    ],
)
def test_lengths_and_weights_that_do_not_fit_the_ids_are_refused(
    kind: str, lengths: list[int], weights: int | None
) -> None:
    """TorchRec validates the first batch; this is the second."""
    ids, names = len(lengths), [f"f{i}" for i in range(len(lengths) // 2)]
    model, session = shard(sequences() if kind == "sequences" else collection(is_weighted=True))

    def batch(lengths: list[int], weights: int | None) -> KeyedJaggedTensor:
        given = None if weights is None else torch.ones(weights, dtype=torch.float32)
        return KeyedJaggedTensor(names, torch.ones(ids).long(), given, torch.tensor(lengths))

    model(batch([1] * ids, None if weights is None else ids))
    with pytest.raises(ValueError, match=r"must be those of its [68] ids, and not negative|5 weights for 8 ids"):
        model(batch(lengths, weights))
    assert session.lookups == 1


@pytest.mark.parametrize(
    ("values", "lengths", "weights", "says"),
    [
        ((8, 1), (8,), (8,), r"the batch's ids must have one dimension, got shape \(8, 1\)"),
        ((8,), (8,), (8, 1), r"the batch's weights must have one dimension, got shape \(8, 1\)"),
        ((6,), (6,), (6,), r"the batch must have as many bags of each of its 4 features, got 6"),
    ],
    ids=["ids", "weights", "bags"],
)
def test_a_batch_of_a_shape_that_no_kernel_takes_is_refused_by_name(
    values: tuple[int, ...], lengths: tuple[int, ...], weights: tuple[int, ...], says: str
) -> None:
    """TorchRec validates the first batch; this is the second."""
    model, session = shard(collection(is_weighted=True))
    names = [f"f{i}" for i in range(4)]

    def batch(values: tuple[int, ...], lengths: tuple[int, ...], weights: tuple[int, ...]) -> KeyedJaggedTensor:
        given = torch.ones(weights, dtype=torch.float32)
        return KeyedJaggedTensor(names, torch.ones(values).long(), given, torch.ones(lengths).long())

    model(batch((8,), (8,), (8,)))
    with pytest.raises(ValueError, match=says):
        model(batch(values, lengths, weights))
    assert session.lookups == 1


def test_a_learning_rate_that_is_no_number_is_refused() -> None:
    model, session = shard(Net(collection("sgd")))
    train(model, [batch_of(6, 1)])
    model.fused_optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match=r"learning rate of tables wide.* must be finite, got nan"):
        model(batch_of(6, 2))[0].backward()
    assert session.step == 2


def test_what_becomes_infinite_where_it_is_loaded_is_told() -> None:
    config = table("t", 6, 4, "f0", data_type=DataType.FP16)
    model, _ = shard(collection("sgd", [config]))
    key = "embedding_bags.t.weight"
    with pytest.warns(UserWarning, match=r"weights of table t are loaded that its torch.float16 cannot hold"):
        model.load_state_dict({key: torch.full((6, 4), 1e6)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict({key: torch.full((6, 4), torch.inf)})
        model.load_state_dict({key: torch.full((6, 4), 65504.0, dtype=torch.float32)})


def processed() -> nn.Module:
    bags = EmbeddingBagCollection(tables=[table("t", 20, 8, "f0", "f1")], device=CPU, is_weighted=True)
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    return FeatureProcessedEmbeddingBagCollection(bags, {name: PositionWeightedModule(4) for name in ("f0", "f1")})


def test_a_feature_processor_with_a_batch_size_per_feature_is_refused() -> None:
    """TorchRec's wrapper drops the sizes, and then the bags are others."""
    model, _ = shard(processed())
    with pytest.raises(ValueError, match="is not supported where features are processed"):
        model(repeated_batch(["f0", "f1"], 4, 1))
