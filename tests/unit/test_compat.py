"""What we need of each private name of torch and TorchRec: the first to fail when the pinned set moves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torchrec.distributed.planner import stats
from torchrec.distributed.types import ShardingType

from torch_ecrec import compat
from torch_ecrec.compat import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties


class Marked(Tensor):
    """Counts how often its `__torch_function__` is asked."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(Tensor):
    __torch_function__ = compat.plain_torch_function  # type: ignore[assignment]


class Empty(Tensor):
    """Refuses whatever is done with it."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise RuntimeError("there are no values")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def sharded(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = ShardMetadata([0, 0], list(values.shape), "rank:0/cpu")
    of = ShardedTensorMetadata([whole], values.shape, TensorProperties(dtype=values.dtype))
    return compat.sharded_of([Shard(values, whole)], of, group)


def test_every_name_is_tested() -> None:
    source = inspect.getsource(inspect.getmodule(test_every_name_is_tested))  # type: ignore[arg-type]
    assert not [name for name in compat.__all__ if name not in source]


def test_a_subclass_is_not_asked_within_no_torch_function() -> None:
    one = torch.ones(2).as_subclass(Marked)
    before = Marked.asked
    with compat.NoTorchFunction():
        assert one.requires_grad is False
    assert Marked.asked == before
    assert one.requires_grad is False and Marked.asked == before + 1


def test_what_is_made_of_a_plain_subclass_is_a_tensor() -> None:
    one = torch.ones(2).as_subclass(Plain)
    assert type(one) is Plain and type(one + 1) is Tensor and type(one[:1]) is Tensor


def test_a_tensor_without_memory_says_its_shape_and_dtype() -> None:
    one = compat.tensor_without_memory(Empty, torch.Size([1 << 40, 4]), torch.bfloat16)
    assert type(one) is Empty and one.shape == (1 << 40, 4) and one.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="no values"):
        one + 1


def test_backward_passes_have_numbers_and_an_end() -> None:
    """A callback that is queued by one is called after those that were queued before."""
    seen: list[object] = []
    weight = torch.ones(2, requires_grad=True)

    def note(_: Tensor) -> None:
        seen.append(compat.backward_pass())
        compat.queue_callback(lambda: compat.queue_callback(lambda: seen.append("last")))
        compat.queue_callback(lambda: seen.append("end"))

    weight.register_hook(note)
    assert compat.backward_pass() == -1
    for _ in range(2):
        weight.sum().backward()
    first, *ends, second = seen[0], seen[1], seen[2], seen[3]
    assert isinstance(first, int) and isinstance(second, int) and first >= 0 and second not in (first, -1)
    assert ends == ["end", "last"]


def test_a_sharded_tensor_is_made_and_read(group: dist.ProcessGroup) -> None:
    values = torch.arange(6.0).reshape(3, 2)
    made = sharded(values, group)
    assert isinstance(made, compat.ShardedTensor) and compat.group_of(made) is group
    (shard,) = made.local_shards()
    assert shard.tensor.data_ptr() == values.data_ptr() and shard.metadata.shard_sizes == [3, 2]
    assert made.metadata().size == values.shape and made.metadata().tensor_properties.dtype == values.dtype
    spec = compat.EnumerableShardingSpec([shard.metadata])
    assert spec.shards == [shard.metadata]


def test_items_and_chunks_of_checkpoints(group: dist.ProcessGroup) -> None:
    values = torch.arange(6.0).reshape(3, 2)
    (shard,) = sharded(values, group).local_shards()  # type: ignore[attr-defined]
    items = [
        compat.write_item_of_tensor("a", values),
        compat.write_item_of_shard("a", sharded(values, group), shard.metadata),
    ]
    for item in items:
        assert isinstance(item, WriteItem) and item.index.fqn == "a" and item.tensor_data is not None
        assert item.tensor_data.size == values.shape and item.tensor_data.chunk.sizes == values.shape
    for chunk in (compat.chunk_of_tensor(values), compat.chunk_of_shard(shard.metadata)):
        assert tuple(chunk.offsets) == (0, 0) and tuple(chunk.sizes) == (3, 2)
    assert items[1].index == MetadataIndex("a", torch.Size([0, 0]), items[1].index.index)


def test_a_state_is_taken_apart_and_put_together() -> None:
    flat, places = compat.flatten_state_dict({"a": {"b": torch.ones(1)}, "c": 3})
    assert set(flat) == {"a.b", "c"} and places["a.b"] == ("a", "b")
    state: dict[str, object] = {}
    compat.set_element(state, places["a.b"], 7)
    assert state == {"a": {"b": 7}}


def test_the_share_of_a_distributed_tensor(group: dist.ProcessGroup) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    shape, offset = compat.local_shape_and_offset(torch.Size([3, 2]), mesh, [dist.tensor.Shard(0)])
    assert (tuple(shape), tuple(offset)) == ((3, 2), (0, 0))


def test_a_file_of_tensors_is_read_without_their_memory(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3, 2)}, tmp_path / "file")
    with compat.FakeTensorMode():
        found = torch.load(tmp_path / "file", weights_only=True)["a"]
    assert found.shape == (3, 2) and found.untyped_storage()._checkpoint_offset is not None


def test_leaves_and_keys() -> None:
    assert compat.tree_leaves([1, {"a": (2, 3)}]) == [1, 2, 3]
    keys = nn.Linear(1, 1).load_state_dict(nn.Linear(1, 1).state_dict())
    assert isinstance(keys, compat.IncompatibleKeys) and compat.IncompatibleKeys([], []) == keys


def test_nothing_of_an_unsharded_model_has_a_sharded_name() -> None:
    assert compat.sharded_names(nn.Linear(1, 1)) == set()


def test_a_short_name_holds_within() -> None:
    known = ShardingType.ROW_WISE.value
    before = stats._get_sharding_type_abbr(known)
    with compat.short_name("erasure_coded", "EC"):
        assert stats._get_sharding_type_abbr("erasure_coded") == "EC"
        assert stats._get_sharding_type_abbr(known) == before
    with pytest.raises(ValueError, match="erasure_coded"):
        stats._get_sharding_type_abbr("erasure_coded")
