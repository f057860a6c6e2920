"""Every public method of a module, of our sharded model and of a collection in it: the same as with TorchRec, or
refused by name. What a new release brings fails here until somebody has judged it.
"""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import managed
import pytest
import torch
import torchrec.distributed
from models import CPU, Net, batch_of, collection, plain_torchrec, seeded, seeded_tables, shard, table, train
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore")
BATCHES = [batch_of(6, seed) for seed in range(2)]

SAME, OURS, COPIED = "as TorchRec's", "a method of ours", "a model cannot be copied"
DEVICE = (
    "not compiled with|not linked with|has no attribute 'ProcessGroupNCCL'|no NVIDIA driver|a module|cannot be copied"
)
Do = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def tensors_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRec's `copy` replaces these, and where NCCL is not built in it does not put them back."""
    for kind in (torch.Tensor, nn.Parameter):
        monkeypatch.setattr(kind, "__deepcopy__", kind.__deepcopy__)


def nothing(*_: Any, **__: Any) -> None:
    pass


def kind_of(made: object) -> object:
    """What may be compared between a module of ours and one of TorchRec's."""
    if isinstance(made, (nn.Module, torch.utils.hooks.RemovableHandle)):
        return "a module" if isinstance(made, nn.Module) else "a handle"
    return made if isinstance(made, (str, int, bool, list, tuple, type(None))) else str(made)


def named(values: Any) -> list[tuple[str, tuple[int, ...], bool]]:
    return [(name, tuple(value.shape), value.requires_grad) for name, value in values]


def first_of(one: nn.Module) -> str:
    return next(name for name, _ in one.named_parameters())


DO: dict[str, Do] = {
    "add_module": lambda one: one.add_module("x", nn.Linear(1, 1)),
    "apply": lambda one: one.apply(nothing),
    "bare_named_parameters": lambda one: named(one.bare_named_parameters()),
    "buffers": lambda one: list(one.buffers()),
    "compile": lambda one: one.compile(backend="eager", dynamic=True, disable=True),
    "copy": lambda one: one.copy(torch.device("cpu")),
    "eval": lambda one: one.eval().training,
    "extra_repr": lambda one: bool(repr(one)),
    "get_buffer": lambda one: one.get_buffer("x"),
    "get_delta_tracker": lambda one: one.get_delta_tracker(),
    "get_extra_state": lambda one: one.get_extra_state(),
    "get_parameter": lambda one: tuple(one.get_parameter(first_of(one)).shape),
    "get_submodule": lambda one: bool(one.get_submodule("module" if hasattr(one, "module") else "embedding_bags")),
    "init_data_parallel": lambda one: one.init_data_parallel(),
    "load_state_dict": lambda one: str(one.load_state_dict(one.state_dict())),
    "named_buffers": lambda one: list(one.named_buffers()),
    "named_parameters": lambda one: named(one.named_parameters()),
    "parameters": lambda one: [tuple(parameter.shape) for parameter in one.parameters()],
    "register_buffer": lambda one: one.register_buffer("b", torch.zeros(1)),
    "register_module": lambda one: one.register_module("x", nn.Linear(1, 1)),
    "register_parameter": lambda one: one.register_parameter("p", nn.Parameter(torch.zeros(1))),
    "reset_parameters": lambda one: one.reset_parameters(),
    "set_extra_state": lambda one: one.set_extra_state(1),
    "set_submodule": lambda one: one.set_submodule("x.y", nn.Linear(1, 1)),
    "share_memory": lambda one: one.share_memory(),
    "sharded_parameter_names": lambda one: sorted(one.sharded_parameter_names()),
    "sparse_grad_parameter_names": lambda one: sorted(one.sparse_grad_parameter_names()),
    "state_dict": lambda one: [(name, tuple(value.size())) for name, value in one.state_dict().items()],
    "to": lambda one: one.to("cpu"),
    "train": lambda one: one.train(True).training,
    "type": lambda one: one.type(torch.float32),
    "write": lambda one: one.write(BATCHES[0].sparse_features),
    "write_dist": lambda one: one.write_dist(one.create_context(), BATCHES[0].sparse_features),
    "zero_grad": lambda one: one.zero_grad(),
    **{name: lambda one, name=name: getattr(one, name)() for name in ("cpu", "cuda", "float", "ipu", "mtia", "xpu")},
    # modes and words that are no methods
    "=": lambda one: setattr(one, "x", 1),
    "= module": lambda one: setattr(one, "module" if hasattr(one, "module") else "embedding_bags", nn.Linear(1, 1)),
    "copy.copy": lambda one: bool(copy.copy(one)),
    "copy.deepcopy": copy.deepcopy,
    "len": len,
}
HOOKS = (
    *("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
    *("register_full_backward_pre_hook", "register_load_state_dict_post_hook", "register_load_state_dict_pre_hook"),
    *("register_state_dict_post_hook", "register_state_dict_pre_hook"),
)
VERDICTS: dict[str, str] = {name: SAME for name in (*DO, *HOOKS)} | {
    **dict.fromkeys(("copy", "cuda", "ipu", "mtia", "xpu"), DEVICE),
    "copy.deepcopy": COPIED,
    **dict.fromkeys(("bfloat16", "double", "half"), "of dense layers, which then do not fit what is looked up (mat1)"),
    **dict.fromkeys(("children", "modules", "named_children", "named_modules"), "tables are no modules"),
    "forward": "test_nn.py",
    **dict.fromkeys(("requires_grad_",), "freezes tables, too; TorchRec raises (test_frozen.py)"),
    "register_backward_hook": "deprecated; of tensors that a module takes and gives, of which ours gets none, as there",
    "to_empty": "memory that nothing has written to; tables stay as they are",
    **dict.fromkeys(("init_torchrec_delta_tracker", "reshard"), "refused (test_coverage.py, test_moves.py)"),
    **dict.fromkeys(("attach", "close", "digest", "flush", "full_optim_state_dict", "full_state_dict"), OURS),
    **dict.fromkeys(("step", "streamed_optim_state_dict", "streamed_state_dict"), OURS),
    **dict.fromkeys(
        ("announce", "before_lookup", "config_of", "give_out_as", "keys_of_tables", "load_state", "made_with"), OURS
    ),
    **dict.fromkeys(("modules_of_tables", "save_state"), OURS),
    **dict.fromkeys(("compute", "compute_and_output_dist", "create_context", "input_dist", "output_dist"), "stages"),
    **dict.fromkeys(("prefetch", "preprocess_input", "update"), "stages, which do nothing here (test_pipelines.py)"),
}
LACKING = {  # of TorchRec's sharded collection
    **dict.fromkeys(
        ("create_embedding_bag_sharding", "create_grouped_sharding_infos", "extend_shard_name"), "within it"
    ),
    "init_data_parallel": "of tables that the trainers have",
    "create_rocksdb_hard_link_snapshot": "of tables on an SSD of a trainer",
    **dict.fromkeys(("register_post_lookup_tracker_fn", "register_post_odist_tracker_fn"), "trackers are refused"),
    "update_shards": "`reshard` is refused",
}


def pair(sub: bool) -> list[tuple[Any, Any]]:
    """Ours, then TorchRec's: the model, and what is looked at of it."""
    found = []
    for make in (lambda net: shard(net)[0], lambda net: plain_torchrec(net, 1)):
        torch.manual_seed(0)
        net = Net(collection("sgd", seeded_tables()))
        nn.init.constant_(net.over.weight, 0.1)
        model = make(net)
        found.append((model, model.module.collections[0] if sub else model))
    return found


class Whole(nn.Module):
    """One collection of another kind, and a dense layer."""

    def __init__(self, tables: Any, keys: list[str] | None) -> None:
        super().__init__()
        self.tables, self.keys = tables, keys  # None: of bags
        torch.manual_seed(1)
        self.over = nn.Linear(8, 1, dtype=torch.float32)

    def forward(self, batch: Any) -> tuple[torch.Tensor, None]:
        made = self.tables(batch.sparse_features)
        rows = made.values().view(-1, 8) if self.keys is None else torch.cat([made[key].values() for key in self.keys])
        return torch.tanh(self.over(rows)).square().mean(), None


def sequences() -> tuple[Whole, Any]:
    configs = [
        EmbeddingConfig(name=name, num_embeddings=20, embedding_dim=8, feature_names=of, init_fn=init)
        for name, of, init in (
            ("words", ["f2", "f0"], functools.partial(seeded, seed=1)),
            ("places", ["f1"], functools.partial(seeded, seed=2)),
        )
    ]
    made = EmbeddingCollection(tables=configs, device=CPU)
    apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.05})
    return Whole(made, ["f2", "f0", "f1"]), EmbeddingCollectionSharder()


def processed() -> tuple[Whole, Any]:
    configs = [table("words", 20, 8, "f0", "f1", init_fn=functools.partial(seeded, seed=1))]
    bags = EmbeddingBagCollection(tables=configs, device=CPU, is_weighted=True)
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.05})
    made = FeatureProcessedEmbeddingBagCollection(bags, PositionWeightedModuleCollection({"f0": 4, "f1": 4}))
    return Whole(made, None), FeatureProcessedEmbeddingBagCollectionSharder()


Kind = Callable[[], tuple[Any, Any]]
OTHER_KINDS: dict[Kind, tuple[list[str], set[str], set[str]]] = {
    # tables; methods of ours, which need no word; those of TorchRec's that ours lacks
    sequences: (["words", "places"], set(), {"create_embedding_sharding"}),
    processed: (  # stages, and what is of a sharded collection, are of the collection within ours
        ["words"],
        {"is_weighted", "split"},
        {
            *("add_fp_params_grad_sync_callback", "apply_feature_processors_to_kjt_list", "sharded_parameter_names"),
            *("compute", "compute_and_output_dist", "copy", "create_context", "input_dist", "output_dist"),
            *("prefetch", "preprocess_input", "update", "write", "write_dist"),
        },
    ),
}


def managed_bags() -> tuple[managed.Net, None]:
    return managed.Net("sgd", "lfu", "bags"), None


def managed_sequences() -> tuple[managed.Net, None]:
    return managed.Net("sgd", "lfu", "sequences"), None


for one in (managed_bags, managed_sequences):
    OTHER_KINDS[one] = (
        [],
        {"load_replicated_state", "replicated_state"},
        {"sync_hash_zch_weights"},  # of maps by hash, which are refused
    )


def pair_of(kind: Kind) -> list[tuple[Any, Any]]:
    """As `pair`, of a collection of another kind."""
    ours = shard(kind()[0])[0]
    net, sharder = kind()
    if isinstance(net, managed.Net):
        return [(model, model.module.managed) for model in (ours, managed.stock(net))]
    ways = {name: table_wise(rank=0, compute_kernel="fused") for name in OTHER_KINDS[kind][0]}
    plan = construct_module_sharding_plan(net.tables, ways, sharder, local_size=1, device_type="cpu")
    theirs = torchrec.distributed.DistributedModelParallel(
        net, device=CPU, plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    return [(model, model.module.tables) for model in (ours, theirs)]


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_every_method_of_other_collections_is_judged(kind: Kind) -> None:
    (_, ours), (_, theirs) = pair_of(kind)
    _, own, lacks = OTHER_KINDS[kind]
    assert public(ours) - VERDICTS.keys() == own
    assert public(theirs) - public(ours) - LACKING.keys() == lacks


@pytest.mark.parametrize("name", DO)
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_method_of_other_collections_does_what_it_does_with_torchrec(kind: Kind, name: str) -> None:
    (model, ours), (other, theirs) = pair_of(kind)
    if VERDICTS[name] != SAME or name in OTHER_KINDS[kind][2] or (name in LACKING and not hasattr(ours, name)):
        return
    mine, its = outcome(DO[name], ours), outcome(DO[name], theirs)
    if name in ("write", "write_dist") and kind is sequences:  # TorchRec has it, if a config says so
        assert mine[0] == "NotImplementedError" and "is not implemented" in str(mine[1]) and its[0] != "gives"
    else:
        words = [str(said).replace(type(one).__name__, "X") for (_, said), one in ((mine, ours), (its, theirs))]
        assert (mine[0], words[0]) == (its[0], words[1])
    if name != "reset_parameters" and isinstance(model.module, Whole):  # others draw their first weights
        torch.testing.assert_close(train(model, BATCHES), train(other, BATCHES))


def public(one: nn.Module) -> set[str]:
    return {name for name in dir(type(one)) if not name.startswith("_") and callable(getattr(type(one), name))}


@pytest.mark.parametrize("sub", [False, True], ids=["model", "collection"])
def test_every_method_is_judged(sub: bool) -> None:
    (_, ours), (_, theirs) = pair(sub)
    assert public(ours) - VERDICTS.keys() == set()
    assert {name for name in public(theirs) - public(ours) if not (sub and name in LACKING)} == set()


def outcome(do: Do, one: Any) -> tuple[str, object]:
    try:
        return "gives", kind_of(do(one))
    except (AttributeError, AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("name", DO)
@pytest.mark.parametrize("sub", [False, True], ids=["model", "collection"])
def test_a_method_does_what_it_does_with_torchrec(sub: bool, name: str) -> None:
    (model, ours), (other, theirs) = pair(sub)
    if name in public(ours) | public(theirs) and not (hasattr(ours, name) and hasattr(theirs, name)):
        assert name in LACKING or VERDICTS[name] == OURS
        return
    mine, its = outcome(DO[name], ours), outcome(DO[name], theirs)
    if VERDICTS[name] == SAME:
        classes = [(mine[0], str(mine[1]).replace(type(ours).__name__, "X")), its]
        assert classes[0] == (its[0], str(its[1]).replace(type(theirs).__name__, "X"))
    elif sub and VERDICTS[name] == DEVICE:
        assert mine[0] == "gives"  # its output goes where the model was made to be
    else:
        assert re.search(VERDICTS[name], str(mine[1]))
    if name == "reset_parameters":  # draws other weights than FBGEMM's
        return
    torch.testing.assert_close(train(model, BATCHES), train(other, BATCHES))


def test_who_asks_for_a_copy_of_a_model_finds_tensors_copied_as_before() -> None:
    model = pair(False)[0][0]
    with pytest.raises(TypeError, match=COPIED):
        model.copy(CPU)
    one = torch.zeros(1)
    assert copy.deepcopy(one) is not one


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("sub", [False, True], ids=["model", "collection"])
def test_a_hook_is_called_as_often_as_with_torchrec(sub: bool, name: str) -> None:
    called = []
    for model, one in pair(sub):
        seen: list[int] = []
        getattr(one, name)(lambda *_, seen=seen, **__: seen.append(1))
        train(model, BATCHES)
        model.load_state_dict(model.state_dict())
        called.append(len(seen))
    assert called[0] == called[1]
