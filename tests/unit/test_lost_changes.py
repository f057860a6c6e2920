"""What a script has done to tables and sharding would undo without a word is refused, by name, and nothing else is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CPU, META, Net, batch_of, collection, shard, table
from torch import nn
from torch.nn.utils import parametrize
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from torch_ecrec.nn.coverage import coverage_of
from torch_ecrec.nn.script_checks import check_lost_changes

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)


def bags(name: str = "t") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[table(name, 20, 4, "f0")], device=CPU)


class Sequences(nn.Module):
    """Scores all songs by their own rows, as models of sequences do."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(name="songs", num_embeddings=20, embedding_dim=4, feature_names=["f0"])
        self.songs = EmbeddingCollection(tables=[config], device=CPU)
        self.over = nn.Linear(4, 20, bias=False, dtype=torch.float32)


def tied() -> nn.Module:
    made = Sequences()
    made.over.weight = made.songs.embeddings["songs"].weight
    return made


def tied_by_a_second_path() -> nn.Module:
    made = Sequences()
    made.scores = made.songs.embeddings["songs"]
    return made


def one_for_two_tables() -> nn.Module:
    made = Net(bags("t"), bags("u"))
    made.collections[1].embedding_bags["u"].weight = made.collections[0].embedding_bags["t"].weight
    return made


def one_for_two_collections() -> nn.Module:
    """It failed deep in torch, or, where no optimizer was attached, the two were trained apart."""
    made = Net(bags("t"), bags("t"))
    made.collections[1].embedding_bags["t"].weight = made.collections[0].embedding_bags["t"].weight
    return made


def changed(change: Callable[[EmbeddingBagCollection], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = bags()
        change(made)
        return Net(made)

    return make


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def replaced(**how: Any) -> Callable[[], nn.Module]:
    def change(made: EmbeddingBagCollection) -> None:
        made.embedding_bags["t"] = nn.EmbeddingBag(20, 4, mode="sum", **how)

    return changed(change)


CHANGES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied": (tied, "table songs: its weights are also `over.weight` of the model"),
    "tied by a second path": (tied_by_a_second_path, "table songs: its weights are also `scores.weight` of the model"),
    "one for two tables": (one_for_two_tables, "table u: its weights are also those of table t"),
    "one for two collections": (
        one_for_two_collections,
        "table t: its weights are also those of table t of another collection",
    ),
    "hook of a weight": (
        changed(lambda m: m.embedding_bags["t"].weight.register_hook(lambda g: g)),
        "table t: its weights have hooks",
    ),
    "hook after accumulation": (
        changed(lambda m: m.embedding_bags["t"].weight.register_post_accumulate_grad_hook(lambda p: None)),
        "table t: its weights have hooks",
    ),
    "forward hook": (
        changed(lambda m: m.register_forward_hook(lambda *_: None)),
        r"collections.0 has hooks \(_forward_hooks\)",
    ),
    "forward hook before": (changed(lambda m: m.register_forward_pre_hook(lambda *_: None)), "_forward_pre_hooks"),
    "backward hook": (changed(lambda m: m.register_full_backward_hook(lambda *_: None)), "_backward_hooks"),
    "hook of a bag": (
        changed(lambda m: m.embedding_bags["t"].register_forward_hook(lambda *_: None)),
        "a EmbeddingBag in collections.0 has hooks",
    ),
    "parametrized": (
        changed(lambda m: parametrize.register_parametrization(m.embedding_bags["t"], "weight", Halved())),
        "table t is parametrized",
    ),
    "max_norm": (replaced(max_norm=1.0), "table t: `max_norm`=1.0 of its EmbeddingBag would have no effect"),
    "padding": (replaced(padding_idx=3), "table t: `padding_idx`=3 of its EmbeddingBag"),
    "by frequency": (replaced(scale_grad_by_freq=True), "table t: `scale_grad_by_freq`=True"),
    "shape": (
        changed(lambda m: setattr(m.embedding_bags["t"], "weight", nn.Parameter(torch.zeros(30, 4)))),
        r"table t: its weights have shape \(30, 4\), its config says \(20, 4\)",
    ),
}


@pytest.mark.filterwarnings("ignore:tables .* have no optimizer:UserWarning")
@pytest.mark.parametrize("what", CHANGES)
def test_what_would_be_lost_is_refused(what: str) -> None:
    make, message = CHANGES[what]
    with pytest.raises(ValueError, match=message):
        shard(make())


def test_hooks_of_a_wrapper_that_is_replaced_are_refused() -> None:
    configs = [table("t", 20, 4, "f0")]
    inside = EmbeddingBagCollection(tables=configs, device=CPU)
    map_of = MCHManagedCollisionModule(20, CPU, DistanceLFU_EvictionPolicy(), eviction_interval=1, input_hash_size=99)
    module = ManagedCollisionEmbeddingBagCollection(inside, ManagedCollisionCollection({"t": map_of}, configs))
    check_lost_changes(module, {"_embedding_module": inside}, [""])
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="the model has hooks"):
        check_lost_changes(module, {"_embedding_module": inside}, [""])


def test_hooks_on_the_sharded_module_are_called_as_usual() -> None:
    model, _ = shard(Net(collection()))
    called: list[str] = []
    sharded = model.module.collections[0]
    sharded.register_forward_pre_hook(lambda *_: called.append("before"))
    sharded.register_forward_hook(lambda *_: called.append("after"))
    model(batch_of(3, 0))
    assert called == ["before", "after"]


def test_what_is_not_lost_is_let_pass() -> None:
    """The same collection at two paths, copies, the meta device, other names for the same table."""
    shared = collection("sgd", [table("t", 20, 4, "f0")])
    for made in (Net(shared, shared), Net(collection("sgd", device=META)), Net(collection(), collection("adagrad"))):
        check_lost_changes(made, coverage_of(made, None, []).served)
    copied = tied()
    copied.over.weight = nn.Parameter(copied.over.weight.detach().clone())
    check_lost_changes(copied, {"songs": copied.songs})


def test_pruning_tables_are_refused() -> None:
    made = nn.Sequential(ITEPEmbeddingBagCollection(bags(), GenericITEPModule({"t": 100}, lookups=[])))
    with pytest.raises(ValueError, match="0: ITEPEmbeddingBagCollection prunes rows by what its own trainer"):
        shard(made)
