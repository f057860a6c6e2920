"""Models with tables on the servers and tables that TorchRec shards: exact after a loss of the trainers, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attached import END, Losses, Passes, passes
from fake_session import FakeSession
from models import CPU, LR, Net, batch_of, collection, dense_parameters, job_of, table
from thinned import thinned
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torch_ecrec import checkpoint
from torch_ecrec.errors import NonFiniteGradient
from torch_ecrec.nn.coverage import UNPROTECTED, Coverage
from torch_ecrec.nn.local_shards import LocalShards
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

pytestmark = pytest.mark.usefixtures("process_group")


class Mixed(nn.Module):
    """Bags on the servers; bags and sequences with TorchRec."""

    def __init__(self) -> None:
        super().__init__()
        self.large = Net(collection("rowwise_adagrad", [table("users", 50, 8, "f0")]))
        self.small = collection("adagrad", [table("country", 20, 4, "f1"), table("hour", 30, 4, "f2")])
        config = EmbeddingConfig(name="last", num_embeddings=9, embedding_dim=4, feature_names=["f3"])
        self.rows = EmbeddingCollection(tables=[config], device=CPU)
        apply_optimizer_in_backward(RowWiseAdagrad, self.rows.parameters(), {"lr": LR})
        self.over = nn.Linear(12, 1, dtype=torch.float32)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        loss, _ = self.large(batch)
        rows = self.rows(batch.sparse_features)["f3"].values().sum(0).expand(len(batch.labels), 4)
        pooled = torch.cat([self.small(batch.sparse_features).values(), rows], dim=1)
        more = torch.tanh(self.over(pooled)).squeeze(1)
        return loss + nn.functional.mse_loss(more, batch.labels), more


def plan_of(module: nn.Module, **kinds: str) -> Any:
    """Users on the servers, the others as said."""
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=[kind]) for name, kind in kinds.items()},
    )
    return planner.plan(module, get_default_sharders())


KINDS = {
    "in parts": {"country": "column_wise", "hour": "table_wise", "last": "row_wise"},
    "whole": {"country": "data_parallel", "hour": "data_parallel", "last": "table_wise"},
    "both": {"country": "data_parallel", "hour": "table_wise", "last": "column_wise"},
}  # on a CPU, TorchRec cannot do data-parallel sequences


class Trainer:
    """One life of a trainer that attaches its reader; in place of `before` if that is given."""

    def __init__(
        self,
        kinds: dict[str, str],
        before: FakeSession | None = None,
        step: int = 0,
        unprotected: str = "snapshot",
        evaluates: bool = False,
    ) -> None:
        torch.manual_seed(7 + step)
        module = Mixed()
        self.session = FakeSession(served(kinds), before=before, step=step)
        self.model = DistributedModelParallel(
            module, device=CPU, plan=plan_of(module, **kinds), session=self.session, unprotected=unprotected
        )
        dense = KeyedOptimizerWrapper(dense_parameters(self.model), lambda p: torch.optim.Adam(p, lr=LR))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        self.losses = Losses()
        self.batches = self.model.attach(optimizer=self.optimizer, reader=Passes(), losses=self.losses)
        self.evaluates = evaluates

    def run(self, end: int = END) -> Trainer:
        batches: Iterator[Any] = passes(self.batches)
        if self.evaluates:
            with torch.no_grad():
                self.model(batch_of(6, 99))
        while self.model.steps_done < end:
            self.optimizer.zero_grad()
            loss, _ = self.model(next(batches))
            loss.backward()
            self.optimizer.step()
            self.losses.append(float(loss.detach()))
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9
        return self

    def state(self) -> list[Tensor]:
        own = self.model._dense.shards.tensors()
        return [*self.session.records, *dense_parameters(self.model).values(), *(own[name] for name in sorted(own))]


def served(kinds: dict[str, str]) -> Any:
    """The job: what the plan leaves to TorchRec is none of it."""
    module = Mixed()
    for name, one in (("small", "hour"), ("rows", "last")):
        if one in kinds:
            setattr(module, name, nn.Identity())
    return job_of(module)


# exact, or refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "evaluates"), thinned([1, 4, 6], [False, True], 2))
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_tables_of_both_kinds_go_on_bit_for_bit(kinds: dict[str, str], step: int, evaluates: bool) -> None:
    first = Trainer(kinds, evaluates=evaluates).run()
    assert len(set(first.losses)) == END
    second = Trainer(kinds, first.session, step, evaluates=evaluates)
    assert second.model.steps_done == step == len(second.losses)
    second.run()
    assert second.losses == first.losses
    assert len(first.state()) > 10
    for a, b in zip(first.state(), second.state(), strict=True):
        assert torch.equal(a, b)
    assert first.model.digest() == second.model.digest()


def test_its_tables_are_found_with_all_that_torchrec_keeps_of_them() -> None:
    """Else the test above would compare less than there is."""
    trainer = Trainer(KINDS["in parts"]).run(3)
    before = {name: tensor.clone() for name, tensor in trainer.model._dense.shards.tensors().items()}
    trainer.run(4)
    moved = [name for name, tensor in trainer.model._dense.shards.tensors().items() if not tensor.equal(before[name])]
    for part in ("weights_host", "momentum1_host", "iter_cpu", "learning_rate_tensor"):
        assert any(name.endswith(part) for name in moved), part
    assert {name.split(".")[0] for name in moved} == {"small", "rows"}


def test_whole_copies_are_dense_and_need_no_leave() -> None:
    kinds = dict.fromkeys(("country", "hour"), "data_parallel")
    first = Trainer(kinds, unprotected="refuse").run()
    second = Trainer(kinds, first.session, 4, unprotected="refuse").run()
    assert second.losses == first.losses and not first.model._dense.shards.tensors()
    assert "small.embedding_bags.country.weight" in dense_parameters(first.model)
    for a, b in zip(first.state(), second.state(), strict=True):
        assert torch.equal(a, b)


def test_what_is_in_the_trainers_alone_is_refused_by_name() -> None:
    message = (
        r"(?s)a lost trainer would lose.*small: the plan leaves its tables to TorchRec: country \(column_wise\),"
        r' hour \(table_wise\).*rows: .*unprotected="allow"; to keep small tables.*unprotected="snapshot"'
    )
    with pytest.raises(ValueError, match=message):
        Trainer(KINDS["in parts"], unprotected="refuse")


def test_unprotected_tables_are_lost_with_the_trainers_and_that_is_told() -> None:
    first = Trainer(KINDS["in parts"], unprotected="allow").run()
    assert not first.model._dense.shards.tensors()
    message = "cannot go on after step 4: small, rows were in the trainers alone, unprotected, and are lost"
    with pytest.raises(RuntimeError, match=message):
        Trainer(KINDS["in parts"], first.session, 4, unprotected="allow")


def test_before_the_first_snapshot_nothing_was_lost() -> None:
    first = Trainer(KINDS["in parts"], unprotected="allow").run()
    first.session.after[0] = [records.clone() for records in FakeSession(served(KINDS["whole"])).records]
    Trainer(KINDS["in parts"], first.session, 0, unprotected="allow")


def test_who_says_so_goes_on_with_tables_made_anew() -> None:
    first = Trainer(KINDS["in parts"], unprotected="reset").run()
    second = Trainer(KINDS["in parts"], first.session, 4, unprotected="reset").run()
    assert second.losses[:4] == first.losses[:4] and second.losses[4:] != first.losses[4:]
    assert not first.session.inexact
    [told] = second.session.inexact
    assert "what was trained is lost: small, rows" in told and 'unprotected="reset"' in told


def test_before_the_first_snapshot_nothing_that_was_trained_is_lost() -> None:
    first = Trainer(KINDS["in parts"], unprotected="reset").run()
    first.session.after[0] = [records.clone() for records in FakeSession(served(KINDS["whole"])).records]
    assert not Trainer(KINDS["in parts"], first.session, 0, unprotected="reset").session.inexact


@pytest.mark.parametrize("unprotected", UNPROTECTED)
@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.parametrize("paths", [(), ("small",), ("", "rows")])
def test_only_what_is_allowed_to_begin_anew_makes_a_run_inexact(
    unprotected: str, step: int, paths: tuple[str, ...]
) -> None:
    told = Coverage({}, dict.fromkeys(paths, "why"), {}).lost_by(step, unprotected)
    assert (told is not None) == (unprotected == "reset" and step > 0 and bool(paths))
    assert told is None or all((path or "the model") in told for path in paths)


def test_a_refused_step_says_what_has_stepped_all_the_same() -> None:
    trainer = Trainer(KINDS["in parts"])
    loss, _ = trainer.model(next(iter(trainer.batches)))
    message = "nothing of the step was applied on the servers; small, rows have stepped all the same"
    with pytest.raises(NonFiniteGradient, match=message):
        (loss * float("nan")).backward()


# state dicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_a_whole_state_dict_has_tables_of_both_kinds(default: torch.dtype) -> None:
    """And their dtypes: TorchRec describes a table that it shards as one of the default dtype, whatever it is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        trainer = Trainer(KINDS["in parts"]).run(3)
    finally:
        torch.set_default_dtype(before)
    state, optimizer = trainer.model.full_state_dict(), trainer.model.full_optim_state_dict()["state"]
    shapes = {name.split(".")[-2]: tuple(value.shape) for name, value in state.items() if "embedding" in name}
    assert shapes == {"users": (50, 8), "country": (20, 4), "hour": (30, 4), "last": (9, 4)}
    found = [value for values in optimizer.values() for value in values.values()]
    assert {type(value) for value in (*state.values(), *found)} == {Tensor} and len(found) == 4
    shards = trainer.model._dense.shards.tensors()
    weights = torch.cat([t.flatten() for name, t in sorted(shards.items()) if name.endswith("weights_host")])
    assert torch.equal(state["rows.embeddings.last.weight"].flatten(), weights[:36])


def test_a_checkpoint_has_tables_of_both_kinds(tmp_path: Path) -> None:
    first, second = Trainer(KINDS["in parts"]).run(3), Trainer(KINDS["in parts"]).run(2)
    checkpoint.save(first.model, tmp_path / "saved")
    checkpoint.load(second.model, tmp_path / "saved")
    for wanted, found in zip(first.session.records, second.session.records, strict=True):
        assert torch.equal(wanted, found)
    theirs, ours = (trainer.model._dense.shards.tensors() for trainer in (first, second))
    kept = [name for name in theirs if name.endswith(("weights_host", "momentum1_host"))]
    assert len(kept) == 6 and all(torch.equal(theirs[name], ours[name]) for name in kept)


# plans ----------------------------------------------------------------------------------------------------


def test_a_plan_of_ones_own_that_divides_a_collection_is_refused() -> None:
    module = Mixed()
    plan = plan_of(module, **KINDS["in parts"])
    plan.plan["small"]["hour"].sharding_type = "erasure_coded"
    with pytest.raises(
        ValueError, match="small: a collection is sharded as a whole, but hour are to be on the servers"
    ):
        DistributedModelParallel(module, plan=plan, session=FakeSession(served(KINDS["whole"])), unprotected="allow")


def test_a_table_that_is_left_to_torchrec_needs_its_sharder() -> None:
    module = Mixed()
    plan = plan_of(module, **KINDS["in parts"])
    with pytest.raises(ValueError, match="the plan leaves small to TorchRec, but `sharders` has none for EmbeddingBag"):
        DistributedModelParallel(
            module,
            plan=plan,
            session=FakeSession(served(KINDS["whole"])),
            unprotected="snapshot",
            sharders=[],
            device=CPU,
        )


def test_what_cannot_be_kept_is_refused_though_snapshots_are_wanted() -> None:
    class Own(type(collection())):  # type: ignore[misc]
        pass

    module = Mixed()
    module.other = Own(tables=[table("other", 10, 4, "f1")], device=CPU)
    with pytest.raises(ValueError, match=r"(?s)other: Own is a subclass of EmbeddingBagCollection") as caught:
        DistributedModelParallel(
            module,
            plan=plan_of(module, **KINDS["in parts"]),
            session=FakeSession(served(KINDS["whole"])),
            unprotected="snapshot",
        )
    assert "small:" not in str(caught.value)


def test_shards_elsewhere_than_on_a_cpu_are_not_kept_yet() -> None:
    trainer = Trainer(KINDS["in parts"])
    lookup = trainer.model.module.small._lookups[0]
    lookup.somewhere = torch.empty(1, device="meta")
    with pytest.raises(ValueError, match=r"kept in snapshots on a CPU, got small\.0\.somewhere \(meta\)"):
        LocalShards({"small": trainer.model.module.small})
