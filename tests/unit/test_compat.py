"""What we need of each private name of other packages: the first to fail when the pinned set moves."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pickle
import pickletools
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numba
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec.distributed
from managed import Net, batch_of
from numba.core.caching import UserWideCacheLocator
from test_architecture import MODULES, own, seam
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology, stats
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torch_ecrec.compat import argparse as of_argparse
from torch_ecrec.compat import numba as of_numba
from torch_ecrec.compat import python as of_python
from torch_ecrec.compat import rpc as of_rpc
from torch_ecrec.compat import torch as of_torch
from torch_ecrec.compat import torchrec as of_torchrec
from torch_ecrec.compat.torch import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties

SEAMS = (of_argparse, of_numba, of_python, of_rpc, of_torch, of_torchrec)
CPU = torch.device("cpu")


class Marked(Tensor):
    """Counts how often its `__torch_function__` is asked."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(Tensor):
    __torch_function__ = of_torch.plain_torch_function  # type: ignore[assignment]


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
    return of_torch.sharded_of([Shard(values, whole)], of, group)


def public_names(module: Any) -> list[str]:
    """What a module of the seam offers: in its list, or defined there."""
    defined = (name for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__)
    return sorted({*getattr(module, "__all__", ()), *(name for name in defined if not name.startswith("_"))})


@pytest.mark.smoke  # looks at all of the package
def test_every_name_is_tested() -> None:
    source = inspect.getsource(sys.modules[__name__])
    assert not [name for module in SEAMS for name in public_names(module) if name not in source]
    assert set(seam()) == {"torch_ecrec.compat", *(module.__name__ for module in SEAMS)}


def test_a_parser_tells_its_commands_and_their_arguments() -> None:
    parser = argparse.ArgumentParser()
    one = parser.add_subparsers().add_parser("one", help="does it")
    one.add_argument("file", type=Path, help="what is read")
    one.add_argument("--many", "-m", type=int, default=3, metavar="N", help="how often (default %(default)s)")
    one.add_argument("--how", choices=["fast", "slow"], help="which way")
    one.add_argument("--quiet", action="store_true", help="says nothing")
    one.add_argument("--hidden", help=argparse.SUPPRESS)
    assert of_argparse.commands_of(parser) == [("one", one, "does it")]
    assert of_argparse.arguments_of(one) == [
        of_argparse.Argument((), "FILE", None, "what is read"),
        of_argparse.Argument(("--many", "-m"), "N", 3, "how often (default 3)"),
        of_argparse.Argument(("--how",), "fast|slow", None, "which way"),
        of_argparse.Argument(("--quiet",), "", None, "says nothing"),
    ]
    of_argparse.complete_files(parser, Path, "files")
    assert [action.dest for action in one._actions if getattr(action, "complete", "") == "files"] == ["file"]


def test_an_empty_value_of_an_option_is_refused_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    parser = of_argparse.NoEmptyValues()
    parser.add_argument("--file", type=Path)
    parser.add_argument("--url", default="")
    parser.add_argument("--names", type=str, help='"": none')
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*")
    found = parser.parse_args(["--names", "", "--hidden", "", "--file", "x", "", "y"])
    assert (found.url, found.names, found.hidden, found.words) == ("", "", "", ["", "y"])
    for words in (["--file", ""], ["--file="], ["--url", ""]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert f"argument {words[0].strip('=')}: a value is wanted, and this one is empty" in capsys.readouterr().err


@pytest.mark.smoke  # looks at all of the package
def test_every_name_says_what_it_is() -> None:
    """Functions and classes by their docstrings; constants by the text behind them."""
    for name, tree in seam().items():
        for node in ast.walk(tree):
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            public = public and not any(ast.unparse(one).endswith(".setter") for one in node.decorator_list)
            assert not public or ast.get_docstring(node), f"{name}: {node.name}"  # type: ignore[union-attr, arg-type]


@pytest.mark.smoke  # looks at all of the package
def test_no_class_of_ours_has_a_private_name_of_a_library() -> None:
    """Nothing of a class that we derive from is overridden unseen, by a method or by an attribute that we assign."""
    hidden = []
    for name in MODULES:
        if name in seam() or name.endswith("__main__"):
            continue
        for cls in vars(importlib.import_module(name)).values():
            if isinstance(cls, type) and cls.__module__ == name:
                hidden += [f"{name}: {cls.__qualname__}.{one}" for one in _names_of_libraries(cls)]
    assert not hidden


def _names_of_libraries(cls: type) -> set[str]:
    theirs = [base for base in cls.__mro__ if base.__module__.startswith(("torch.", "torchrec.", "numba."))]
    if not theirs:
        return set()
    found: set[str] = set()
    for base in theirs:
        found |= set(vars(base))
        try:
            tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # made by a decorator, or not of Python: `vars` has what there is
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return {name for name in own().of_class(cls.__name__) if not name.endswith("__")} & found


def test_a_subclass_is_not_asked_within_no_torch_function() -> None:
    one = torch.ones(2).as_subclass(Marked)
    before = Marked.asked
    with of_torch.NoTorchFunction():
        assert one.requires_grad is False
    assert Marked.asked == before
    assert one.requires_grad is False and Marked.asked == before + 1


def test_what_is_made_of_a_plain_subclass_is_a_tensor() -> None:
    one = torch.ones(2).as_subclass(Plain)
    assert type(one) is Plain and type(one + 1) is Tensor and type(one[:1]) is Tensor


def test_a_tensor_without_memory_says_its_shape_and_dtype() -> None:
    one = of_torch.tensor_without_memory(Empty, torch.Size([1 << 40, 4]), torch.bfloat16)
    assert type(one) is Empty and one.shape == (1 << 40, 4) and one.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="no values"):
        one + 1


def test_backward_passes_have_numbers_and_an_end() -> None:
    """A callback that is queued by one is called after those that were queued before."""
    seen: list[object] = []
    weight = torch.ones(2, requires_grad=True)

    def note(_: Tensor) -> None:
        seen.append(of_torch.backward_pass())
        of_torch.queue_callback(lambda: of_torch.queue_callback(lambda: seen.append("last")))
        of_torch.queue_callback(lambda: seen.append("end"))

    weight.register_hook(note)
    assert of_torch.backward_pass() == -1
    for _ in range(2):
        weight.sum().backward()
    first, *ends, second = seen[0], seen[1], seen[2], seen[3]
    assert isinstance(first, int) and isinstance(second, int) and first >= 0 and second not in (first, -1)
    assert ends == ["end", "last"]


def test_a_sharded_tensor_is_made_and_read(group: dist.ProcessGroup) -> None:
    values = torch.arange(6.0).reshape(3, 2)
    made = sharded(values, group)
    assert isinstance(made, of_torch.ShardedTensor) and of_torch.group_of(made) is group
    (shard,) = made.local_shards()
    assert shard.tensor.data_ptr() == values.data_ptr() and shard.metadata.shard_sizes == [3, 2]
    assert made.metadata().size == values.shape and made.metadata().tensor_properties.dtype == values.dtype
    alone = of_torch.group_with([0], "gloo", alone=True, timeout=timedelta(hours=5))
    assert isinstance(alone, dist.ProcessGroup) and dist.get_world_size(alone) == 1
    found = of_torch.timeout_of(alone)
    assert found is not None and abs(found - timedelta(hours=5)) < timedelta(seconds=9)  # less what torch 2.14 took
    assert of_torch.timeout_of(of_torch.group_with([0], "gloo", alone=True)) == dist.default_pg_timeout
    spec = of_torch.EnumerableShardingSpec([shard.metadata])
    assert spec.shards == [shard.metadata]


def test_items_and_chunks_of_checkpoints(group: dist.ProcessGroup) -> None:
    values = torch.arange(6.0).reshape(3, 2)
    (shard,) = sharded(values, group).local_shards()  # type: ignore[attr-defined]
    items = [
        of_torch.write_item_of_tensor("a", values),
        of_torch.write_item_of_shard("a", sharded(values, group), shard.metadata),
    ]
    for item in items:
        assert isinstance(item, WriteItem) and item.index.fqn == "a" and item.tensor_data is not None
        assert item.tensor_data.size == values.shape and item.tensor_data.chunk.sizes == values.shape
    for chunk in (of_torch.chunk_of_tensor(values), of_torch.chunk_of_shard(shard.metadata)):
        assert tuple(chunk.offsets) == (0, 0) and tuple(chunk.sizes) == (3, 2)
    assert items[1].index == MetadataIndex("a", torch.Size([0, 0]), items[1].index.index)


def test_a_state_is_taken_apart_and_put_together() -> None:
    flat, places = of_torch.flatten_state_dict({"a": {"b": torch.ones(1)}, "c": 3})
    assert set(flat) == {"a.b", "c"} and places["a.b"] == ("a", "b")
    state: dict[str, object] = {}
    of_torch.set_element(state, places["a.b"], 7)
    assert state == {"a": {"b": 7}}


def test_the_share_of_a_distributed_tensor(group: dist.ProcessGroup) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    shape, offset = of_torch.local_shape_and_offset(torch.Size([3, 2]), mesh, [dist.tensor.Shard(0)])
    assert (tuple(shape), tuple(offset)) == ((3, 2), (0, 0))


def test_a_file_of_tensors_is_read_without_their_memory(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3, 2)}, tmp_path / "file")
    with of_torch.FakeTensorMode():
        found = torch.load(tmp_path / "file", weights_only=True)["a"]
    place = of_torch.place_in_file(found)
    assert found.shape == (3, 2) and place is not None
    assert (tmp_path / "file").read_bytes()[place : place + 24] == torch.ones(3, 2).numpy().tobytes()
    assert of_torch.place_in_file(torch.ones(1)) is None


def test_leaves_and_keys() -> None:
    assert of_torch.tree_leaves([1, {"a": (2, 3)}]) == [1, 2, 3]
    keys = nn.Linear(1, 1).load_state_dict(nn.Linear(1, 1).state_dict())
    assert isinstance(keys, of_torch.IncompatibleKeys) and of_torch.IncompatibleKeys([], []) == keys


def test_nothing_of_an_unsharded_model_has_a_sharded_name() -> None:
    assert of_torchrec.sharded_names(nn.Linear(1, 1)) == set()


def test_a_short_name_holds_within() -> None:
    known = ShardingType.ROW_WISE.value
    before = stats._get_sharding_type_abbr(known)
    with of_torchrec.short_names({"erasure_coded": "EC"}):
        assert stats._get_sharding_type_abbr("erasure_coded") == "EC"
        assert stats._get_sharding_type_abbr(known) == before
    with pytest.raises(ValueError, match="erasure_coded"):
        stats._get_sharding_type_abbr("erasure_coded")


# torch --------------------------------------------------------------------------------------------------------------


def test_writes_in_place_are_counted() -> None:
    values = torch.zeros(3)
    before = of_torch.version_of(values)
    values[:1].add_(1)
    assert of_torch.version_of(values) == before + 1 == getattr(values, of_torch.VERSION)


def test_hooks_are_seen() -> None:
    for register in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
        weight = torch.ones(1, requires_grad=True)
        assert not of_torch.has_tensor_hooks(weight)
        register(weight, lambda _: None)  # type: ignore[arg-type]
        assert of_torch.has_tensor_hooks(weight)
    ways = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")
    for number, way in enumerate(ways):
        module = nn.Linear(1, 1)
        assert of_torch.module_hooks(module) == []
        getattr(module, f"register_{way}")(lambda *_: None)
        (kind,) = of_torch.module_hooks(module)
        assert kind == ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")[number]


def test_what_a_module_has_itself() -> None:
    module = nn.Module()
    module.a = module.b = nn.Linear(1, 1)
    module.weight = nn.Parameter(torch.ones(1))
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("passing", torch.ones(1), persistent=False)
    assert list(of_torch.children_of(module)) == ["a", "b"]
    assert list(of_torch.own_parameters(module)) == ["weight"]
    assert list(of_torch.own_buffers(module)) == ["kept", "passing"]
    assert of_torch.transient_buffers(module) == {"passing"}
    of_torch.own_parameters(module)["more"] = nn.Parameter(torch.ones(1))
    assert "more" in dict(module.named_parameters())


class Remembers(of_torch.OwnState):
    value = 0

    def save_state(self, destination: dict[str, Any], prefix: str) -> None:
        destination[f"{prefix}value"] = self.value

    def load_state(
        self,
        state: Any,
        prefix: str,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        self.value = state[f"{prefix}value"]


def test_a_module_with_a_state_of_its_own() -> None:
    inner = Remembers()
    inner.register_buffer("stays", torch.ones(1))
    model = nn.Sequential(inner)
    inner.value = 3
    assert model.state_dict() == {"0.value": 3}
    model.load_state_dict({"0.value": 4})
    assert inner.value == 4
    assert model.half()[0].stays.dtype == torch.float32  # type: ignore[union-attr]
    with pytest.raises(NotImplementedError):
        of_torch.OwnState().state_dict()
    with pytest.raises(NotImplementedError):
        of_torch.OwnState().load_state_dict({})


def test_a_hook_that_sums_gradients_is_seen(group: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(nn.Linear(1, 1))
    assert not of_torch.communication_hooks(model)
    model.register_comm_hook(None, allreduce_hook)
    assert of_torch.communication_hooks(model) == [(allreduce_hook, None)]


def test_what_torch_leaves_in_an_optimizer() -> None:
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    assert hasattr(optimizer, of_torch.STEP_HOOKS) and not of_torch.is_scheduled(optimizer)
    before = set(vars(optimizer))
    assert {"state", "param_groups", "defaults", of_torch.STEP_HOOKS} <= before
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    assert of_torch.is_scheduled(optimizer)
    weight.sum().backward()
    optimizer.step()
    left = set(vars(optimizer)) - before
    assert left and all(map(of_torch.is_torchs_own, left)), left
    assert all(map(of_torch.is_torchs_own, ("state", "param_groups", "defaults", of_torch.STEP_HOOKS)))
    assert not of_torch.is_torchs_own("momentum")
    assert not of_torch.has_state_dict_hooks(optimizer)
    optimizer.register_state_dict_post_hook(lambda *_: None)
    assert of_torch.has_state_dict_hooks(optimizer)


def test_attached_optimizers_are_seen_and_copied() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert of_torch.attached_optimizers(weight) == []
    of_torch.copy_attached(weight, other)
    assert of_torch.attached_optimizers(other) == []
    apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
    assert of_torch.attached_optimizers(weight) == [(torch.optim.SGD, {"lr": 0.5})]
    of_torch.copy_attached(weight, other)
    assert of_torch.attached_optimizers(other) == [(torch.optim.SGD, {"lr": 0.5})]
    assert of_torch.attached_arguments(other) == {"lr": 0.5} and of_torch.attached_arguments(torch.ones(1)) == {}


def test_what_is_compiled_is_seen() -> None:
    module, inner = nn.Linear(2, 2), nn.Linear(2, 2)
    assert of_torch.compile_settings(module) is None
    module.compile(backend="eager", dynamic=True)
    assert of_torch.dynamic_of(of_torch.compile_settings(module)) is True
    other = torch.compile(inner, backend="eager", dynamic=False)
    assert of_torch.dynamic_of(of_torch.compile_settings(other)) is False
    before = of_torch.frames_compiled()
    torch.compile(lambda values: values + 1, backend="eager")(torch.ones(1))
    assert of_torch.frames_compiled() > before


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_skipped_by_their_indices(workers: int) -> None:
    reader = DataLoader([0, 1, 2, 3, 4, 5], batch_size=2, num_workers=workers)
    if workers == 0:
        batches = iter(reader)
        assert of_torch.next_index_of(batches)() == [0, 1]
        assert next(batches).tolist() == [2, 3]
    batches = iter(reader)
    seen = []
    ask = of_torch.next_index_of(batches)
    of_torch.set_next_index(batches, lambda: seen.append(ask()) or seen[-1])
    list(batches)
    assert [4, 5] in seen


def test_a_metadata_names_what_we_say(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": 3}, checkpoint_id=tmp_path, no_dist=True)
    named, texts = set(), []
    for operation, argument, _ in pickletools.genops((tmp_path / ".metadata").read_bytes()):
        if operation.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            texts.append(argument)
        elif operation.name == "GLOBAL":
            named.add(tuple(argument.split(" ")))
        elif operation.name == "STACK_GLOBAL":
            named.add(tuple(texts[-2:]))
    private = {name for _, name in named if name.startswith("_")}
    assert private == {name for names in of_torch.DCP_PICKLES.values() for name in names if name.startswith("_")}
    for module, names in of_torch.DCP_PICKLES.items():
        assert all(hasattr(importlib.import_module(module), name) for name in names if module != "torch.serialization")
    assert hasattr(torch.serialization, "_get_layout")


# the standard library -----------------------------------------------------------------------------------------------


def test_the_end_of_the_main_thread_is_known() -> None:
    assert callable(threading._shutdown) and threading._shutdown.__code__.co_name == "_shutdown"  # type: ignore[attr-defined]
    assert not of_python.is_shutdown(sys._getframe())
    seen = []

    def look(frame: Any, *_: Any) -> None:
        seen.append(of_python.is_shutdown(frame))

    sys.setprofile(look)
    exec(compile("def _shutdown(): pass\n_shutdown()", "threading", "exec"), {"__name__": "threading"})
    sys.setprofile(None)
    assert True in seen


def test_where_pickles_say_that_paths_are() -> None:
    said = type(Path()).__module__
    assert said == (of_python.PATHLIB if sys.version_info[:2] == (3, 13) else said)
    assert said.startswith("pathlib")


# rpc ----------------------------------------------------------------------------------------------------------------


def test_no_agent_runs_yet() -> None:
    assert of_rpc.is_agent_set() is False and callable(of_rpc.start_agent) and callable(of_rpc.init_autograd)


# Numba --------------------------------------------------------------------------------------------------------------


class Kept:
    """In place of Numba's files."""

    def __init__(self) -> None:
        self.saved: list[Any] = []

    def load(self, key: Any) -> Any:
        return None

    def save(self, key: Any, data: Any) -> None:
        self.saved.append((key, data))


class Elsewhere(of_numba.UserFolder):
    """Leads to a folder that a test names."""

    to = ""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        assert self.folder
        self.folder = self.to


def test_a_kernel_is_kept_where_we_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert UserWideCacheLocator in of_numba.locators()
    monkeypatch.setattr(Elsewhere, "to", str(tmp_path))

    class Files(of_numba.FunctionFiles, ways=[Elsewhere]):
        pass

    def twice(x: int) -> int:
        return 2 * x

    made, kept = numba.njit(twice), Kept()
    cache = Files(twice)  # type: ignore[no-untyped-call]
    assert isinstance(cache.way, Elsewhere) and "twice" in cache.stem and cache.cache_path == str(tmp_path)
    cache.keep_in(kept)
    of_numba.set_cache(made, cache)
    assert made(3) == 6 and len(kept.saved) == 1


# TorchRec -----------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """One collection under two names."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])]
        self.one = self.other = EmbeddingBagCollection(tables=tables, device=CPU)
        self.dense = nn.Linear(4, 1)


def test_a_model_is_sharded_and_looked_into(group: dist.ProcessGroup) -> None:
    module = Twice()
    apply_optimizer_in_backward(torch.optim.SGD, module.one.parameters(), {"lr": 0.5})
    model = of_torchrec.ShardedAtAllPaths(
        module, env=ShardingEnv.from_process_group(group), device=CPU, init_data_parallel=False
    )
    assert isinstance(model, torchrec.distributed.DistributedModelParallel)
    assert type(model.module.one) is not EmbeddingBagCollection and model.module.one is model.module.other
    assert not of_torchrec.is_data_parallel(model) and of_torchrec.trainers_of(model) is group
    assert of_torchrec.sharded_names(model.module) and "dense.weight" not in of_torchrec.sharded_names(model.module)
    assert len(of_torchrec.lookups_of(model.module.one)) == 1 and of_torchrec.lookups_of(model.module.dense) == []
    model.init_data_parallel()
    assert of_torchrec.is_data_parallel(model)
    assert isinstance(of_torchrec.wrapped_module(model), DistributedDataParallel)


def test_a_transform_of_tensors_is_seen() -> None:
    assert not of_torch.is_transformed()
    assert torch.func.vmap(lambda x: x + of_torch.is_transformed())(torch.zeros(2)).tolist() == [1, 1]


def test_whether_nnpack_is_used_is_said() -> None:
    before = of_torch.nnpack_enabled()
    for enabled in (False, True, before):
        torch.backends.nnpack.set_flags(enabled)
        assert of_torch.nnpack_enabled() == enabled


def test_trackers_are_given_a_model() -> None:
    for tracker in of_torchrec.TRACKERS:
        assert next(iter(inspect.signature(tracker).parameters)) == "model"


def test_sharders_of_wrappers_have_some_inside() -> None:
    inner = EmbeddingBagCollectionSharder()
    assert of_torchrec.inner_sharders(inner) == []
    assert of_torchrec.inner_sharders(FeatureProcessedEmbeddingBagCollectionSharder(inner)) == [inner]
    assert len(of_torchrec.inner_sharders(ManagedCollisionEmbeddingBagCollectionSharder())) == 2


def test_a_marked_parameter_is_stepped_by_nobody_else() -> None:
    weight = nn.Parameter(torch.ones(1))
    assert dict(in_backward_optimizer_filter([("a", weight)].__iter__())) == {"a": weight}
    of_torchrec.mark_as_stepped(weight)
    assert not dict(in_backward_optimizer_filter([("a", weight)].__iter__()))


def test_what_is_ready_is_waited_for() -> None:
    assert of_torchrec.Ready(3).wait() == 3
    tensor = KeyedTensor(keys=["a"], length_per_key=[2], values=torch.ones(1, 2))
    assert of_torchrec.Ready(tensor).keys() == ["a"]  # as TorchRec's, it becomes the result when it is used


def test_what_is_in_wrappers() -> None:
    collection = Twice().one
    processed = FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])],
            device=CPU,
            is_weighted=True,
        ),
        PositionWeightedModuleCollection({"f": 4}, CPU),
    )
    assert type(of_torchrec.collection_processed(processed)) is type(collection)


def test_a_map_of_ids_is_read_and_put_back() -> None:
    one, other = (Net("sgd", "lfu", "bags").managed for _ in range(2))
    assert of_torchrec.collection_of(one) is getattr(one, of_torchrec.COLLECTION)
    maps = of_torchrec.maps_of(one)
    assert maps is getattr(one, of_torchrec.MAPS) and of_torchrec.returns_remapped(one)
    names = {name for name, _ in one.named_parameters()} | {name for name, _ in one.named_buffers()}
    assert {name.split(".")[0] for name in names} == {of_torchrec.COLLECTION, of_torchrec.MAPS}
    modules = dict(of_torchrec.modules_of_maps(maps).items())
    assert sum(of_torchrec.features_of_tables(maps)) == len(of_torchrec.mapped_features(maps)) >= len(modules)
    for step in range(4):
        one(batch_of(8, step).sparse_features)
    for table, mine in modules.items():
        assert of_torchrec.threshold_filter_of(of_torchrec.eviction_policy_of(mine)) is None
        before = pickle.loads(pickle.dumps(of_torchrec.state_of_map(mine)))
        theirs = of_torchrec.modules_of_maps(of_torchrec.maps_of(other))[table]
        of_torchrec.load_map_(theirs, before)  # type: ignore[arg-type]
        assert str(of_torchrec.state_of_map(theirs)) == str(before)  # type: ignore[arg-type]
        evicts = of_torchrec.eviction_of(mine)  # type: ignore[arg-type]
        assert type(of_torchrec.eviction_policy_of(mine)).__name__ in evicts
        assert of_torchrec.eviction_of(theirs) == evicts  # type: ignore[arg-type]
        with mock.patch.object(theirs, "_eviction_interval", 12345):
            assert of_torchrec.eviction_of(theirs) != evicts  # type: ignore[arg-type]
    batch = batch_of(8, 9).sparse_features
    one(batch), other(batch)
    for table, mine in modules.items():
        theirs = of_torchrec.modules_of_maps(of_torchrec.maps_of(other))[table]
        assert str(of_torchrec.state_of_map(theirs)) == str(of_torchrec.state_of_map(mine))  # type: ignore[arg-type]


class OnlyRows(of_torchrec.ListedEnumerator):
    def types_for(self, name: str, allowed: list[str], sharder_key: str) -> list[str]:
        assert super().types_for(name, allowed, sharder_key)
        return [ShardingType.ROW_WISE.value]


class Said(of_torchrec.ReportedStats):
    asked = 0

    def traffic_of(self, shard: Any, option: Any, world_size: int) -> Any:
        self.asked += 1
        return super().traffic_of(shard, option, world_size)

    def more_lines(self, plan: Any) -> list[str]:
        return [*super().more_lines(plan), "a line of ours"]


def test_a_planner_uses_our_parts() -> None:
    said = Said()
    planner = EmbeddingShardingPlanner(topology=Topology(2, "cpu"), stats=said)
    assert of_torchrec.topology_of(planner).world_size == 2
    constraints = {"t": ParameterConstraints()}
    options = OnlyRows(of_torchrec.topology_of(planner), 8, constraints)
    assert (options.world_size, options.local_world_size) == (2, 2)
    of_torchrec.set_parts(planner, options, planner._partitioner)
    plan = planner.plan(Twice(), [EmbeddingBagCollectionSharder()])  # type: ignore[list-item]
    kinds = {table.sharding_type for entry in plan.plan.values() for table in entry.values()}  # type: ignore[attr-defined]
    assert kinds == {ShardingType.ROW_WISE.value}
    assert said.asked and any("a line of ours" in line for line in said.lines)
