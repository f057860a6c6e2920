"""Managed collisions: ids are remapped as by TorchRec, rows that other ids get begin anew, and all of it goes back."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import managed
import pytest
import torch
from fake_session import FakeSession
from managed import NAMES, SIZES, Net, batch_of, reset_on_a_cpu, stock, whole
from models import CPU, LR, META, dense_parameters, job_of, shard
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.mc_embedding import ShardedManagedCollisionEmbeddingCollection
from torchrec.distributed.mc_embeddingbag import ShardedManagedCollisionEmbeddingBagCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy

from torch_ecrec.nn.attachment import OTHER_MODULES
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.sharder import sharders_for

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)
STEPS = 9


def maps_of(model: Any) -> dict[str, Tensor]:
    return {name: whole(value).clone() for name, value in model.state_dict().items() if "_managed_collision" in name}


def tables_of(model: Any) -> dict[str, Tensor]:
    return {name: whole(value).clone() for name, value in model.state_dict().items() if "_embedding_module" in name}


def step_both(models: list[Any], seed: int) -> list[tuple[Tensor, Tensor]]:
    """From the same random state, so that rows are drawn alike."""
    found = []
    for model in models:
        torch.manual_seed(seed)
        loss, remapped = model(batch_of(6, seed))
        loss.backward()
        for parameter in dense_parameters(model).values():
            assert parameter.grad is not None
            with torch.no_grad():
                parameter -= LR * parameter.grad
            parameter.grad = None
        found.append((loss.detach(), remapped.values()))
    return found


def same_start(oracle: Any, mine: Any) -> None:
    """The tables of ours are those of TorchRec, which draws its own when it shards."""
    state = mine.state_dict()
    mine.load_state_dict(state | {name: values.clone() for name, values in tables_of(oracle).items()})
    for parameter, other in zip(dense_parameters(mine).values(), dense_parameters(oracle).values(), strict=True):
        parameter.data.copy_(other.data)


@pytest.mark.parametrize("form", ["bags", "sequences"])
@pytest.mark.parametrize(
    ("kind", "policy", "interval"),
    [
        ("sgd", "distance", 1),
        ("adagrad", "lfu", 2),
        ("rowwise_adagrad", "lru", 2),
        ("rowwise_adagrad", "distance", 3),
        ("sgd", "filtered", 2),
    ],
)
def test_ids_rows_and_losses_are_those_of_torchrec(kind: str, policy: str, interval: int, form: str) -> None:
    with reset_on_a_cpu():
        oracle, (mine, session) = (stock(Net(kind, policy, form, interval)), shard(Net(kind, policy, form, interval)))
        assert isinstance(
            mine.module.managed,
            (ShardedManagedCollisionEmbeddingBagCollection, ShardedManagedCollisionEmbeddingCollection),
        )
        same_start(oracle, mine)
        assert mine.state_dict().keys() == oracle.state_dict().keys()
        assert [n for n, _ in mine.named_parameters()] == [n for n, _ in oracle.named_parameters()]
        before, changed = maps_of(mine), 0
        for seed in range(STEPS):
            (expected, wanted), (loss, remapped) = step_both([oracle, mine], seed)
            assert torch.equal(remapped, wanted)
            torch.testing.assert_close(loss, expected)
            now, theirs = maps_of(mine), maps_of(oracle)
            assert all(torch.equal(now[name], theirs[name]) for name in theirs)
            changed += any(not torch.equal(now[n], before[n]) for n in now if n.endswith("_sorted_raw_ids"))
            before = now
            for name, values in tables_of(oracle).items():
                torch.testing.assert_close(tables_of(mine)[name], values)
        assert changed > 1 and session.step == STEPS + 1
        if kind != "sgd":  # what was reset, and what was not
            ours, theirs = (m.fused_optimizer.state_dict()["state"] for m in (mine, oracle))
            for key, values in theirs.items():
                for name, value in values.items():
                    torch.testing.assert_close(ours[key][name], whole(value))


def rows_of_ids(model: Any, table: str) -> dict[int, int]:
    """What the map of a table says."""
    maps = model.module.managed._managed_collision_collection._managed_collision_modules
    pairs = zip(maps[table]._mch_sorted_raw_ids.tolist(), maps[table]._mch_remapped_ids_mapping.tolist(), strict=True)
    return {raw: row for raw, row in pairs if raw != torch.iinfo(torch.int64).max}


def test_rows_that_are_given_away_begin_anew_and_no_others() -> None:
    model, session = shard(Net("sgd", "distance", "bags", 1))
    model(batch_of(6, 0))
    before = {name: (session.weights(name).clone(), rows_of_ids(model, name)) for name in SIZES}
    model(batch_of(6, 7))
    for name, (weights, rows) in before.items():
        new = {row for raw, row in rows_of_ids(model, name).items() if rows.get(raw) != row}
        moved = set((session.weights(name) != weights).any(1).nonzero().flatten().tolist())
        assert moved == new and 0 < len(new) < SIZES[name]


def test_out_of_training_the_map_is_read_alone() -> None:
    model, session = shard(Net("sgd", "lfu", "bags", 1))
    model(batch_of(6, 0))[0].backward()
    before, records = maps_of(model), session.records[0].clone()
    model.eval()
    with torch.no_grad():
        _, remapped = model(batch_of(6, 5))
    assert all(torch.equal(values, before[name]) for name, values in maps_of(model).items())
    assert torch.equal(session.records[0], records) and len(remapped.values().unique()) > 1


def test_maps_on_the_meta_device_are_made_on_the_host() -> None:
    model, _ = shard(Net("sgd", "lfu", "bags", 1, META))
    model(batch_of(6, 0))[0].backward()
    assert all(values.device == CPU for values in maps_of(model).values())


def test_a_state_dict_is_loaded() -> None:
    first, _ = shard(Net("adagrad", "lfu", "bags"))
    for seed in range(4):
        step_both([first], seed)
    second, _ = shard(Net("adagrad", "lfu", "bags"))
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(values, maps_of(first)[name]) for name, values in maps_of(second).items())
    first.eval(), second.eval()
    (one, rows), (other, others) = first(batch_of(6, 2)), second(batch_of(6, 2))
    assert torch.equal(one, other) and torch.equal(rows.values(), others.values())


# restarts -------------------------------------------------------------------------------------------------


class Life:
    """A trainer with everything attached, made anew in place of `before` if it is given."""

    def __init__(self, policy: str, way: str, before: FakeSession | None = None, step: int = 0) -> None:
        net = Net("rowwise_adagrad", policy, "bags", 3)
        torch.manual_seed(100 + step)
        self.session = FakeSession(job_of(net), before=before, step=step)
        self.model = DistributedModelParallel(net, device=CPU, session=self.session)
        self.optimizer = torch.optim.Adam(dense_parameters(self.model).values(), lr=LR)
        self.losses: list[float] = []
        self.rows: list[list[int]] = []
        reader = [batch_of(6, seed) for seed in range(STEPS)]
        self.batches = self.model.attach(optimizer=self.optimizer, reader=reader, seen=self)
        getattr(self, way)()

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "rows": [list(rows) for rows in self.rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses[:], self.rows[:] = state["losses"], state["rows"]

    def plain(self) -> None:
        for batch in self.batches:
            self.optimizer.zero_grad()
            loss, remapped = self.model(batch)
            loss.backward()
            self.optimizer.step()
            self.note(loss, remapped)

    def piped(self) -> None:
        runner = TrainPipelineSparseDist(self.model, self.optimizer, CPU)
        batches = iter(self.batches)
        while len(self.rows) < STEPS:
            self.rows.append(runner.progress(batches).values().tolist())

    def note(self, loss: Tensor, remapped: Any) -> None:
        self.losses.append(float(loss.detach()))
        self.rows.append(remapped.values().tolist())


@pytest.mark.parametrize("policy", ["lfu", "lru", "distance"])
def test_a_trainer_that_is_started_again_goes_on_bit_for_bit(policy: str) -> None:
    """As it was made, before a change of the maps, after one, and with ids that wait for one."""
    first = Life(policy, "plain")
    assert len(set(first.losses)) == STEPS
    for step in (0, 2, 3, 4, 7):
        second = Life(policy, "plain", first.session, step)
        assert second.session.step == first.session.step
        assert second.losses == first.losses and second.rows == first.rows
        assert all(map(torch.equal, second.session.records, first.session.records))
        assert all(torch.equal(v, maps_of(first.model)[n]) for n, v in maps_of(second.model).items())


def test_a_pipeline_remaps_in_the_order_of_its_steps() -> None:
    plain, piped = Life("lfu", "plain"), Life("lfu", "piped")
    assert piped.rows == plain.rows and all(map(torch.equal, piped.session.records, plain.session.records))
    again = Life("lfu", "piped", piped.session, 4)
    assert again.rows == piped.rows and all(map(torch.equal, again.session.records, piped.session.records))


def test_maps_of_another_size_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Life("lfu", "plain")
    monkeypatch.setattr(managed, "POLICIES", managed.POLICIES | {"lfu": managed.POLICIES["lru"]})
    with pytest.raises(ValueError, match="the map of table a is another one in the snapshot"):
        Life("lfu", "plain", first.session, 4)


def test_maps_that_give_rows_away_otherwise_than_before_are_told_as_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Life("distance", "plain")
    assert Life("distance", "plain", first.session, 4).session.inexact == []
    slower = functools.partial(DistanceLFU_EvictionPolicy, decay_exponent=3.0)
    monkeypatch.setattr(managed, "POLICIES", managed.POLICIES | {"distance": slower})
    assert Life("distance", "plain", first.session, 4).session.inexact == [OTHER_MODULES]


def test_ids_that_cannot_be_remapped_are_refused_by_name() -> None:
    model, _ = shard(Net("sgd", "lfu", "bags"))
    batch = batch_of(4, 0)
    features = batch.sparse_features
    for values in (features.values().int(), features.values().float()):
        batch.sparse_features = KeyedJaggedTensor.from_lengths_sync(NAMES, values, features.lengths())
        with pytest.raises(ValueError, match=r"managed: ids that are remapped must be int64, got torch\."):
            model(batch)


def test_a_dense_model_elsewhere_is_refused_by_name() -> None:
    net = Net("sgd", "lfu", "bags")
    sharder = sharders_for(None, {"managed._embedding_module": {}}, [])[-2]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="managed: ids are remapped with the dense model on a CPU, got cuda"):
        sharder.shard(net.managed, {}, None, torch.device("cuda"), "managed")  # type: ignore[arg-type]
