"""A checkpoint of the cluster as one of `torch.distributed.checkpoint`: plain TorchRec loads it, and trains on."""

import json
import re
import traceback
from pathlib import Path
from typing import Any

import kept
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake_session import FakeSession
from models import LR, batch_of, collection, dense_parameters, job_of, plain_torchrec, tables
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.datasets.utils import Batch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torch_ecrec import checkpoint
from torch_ecrec.checkpoint import dcp_export
from torch_ecrec.cli import main
from torch_ecrec.errors import CheckpointError
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.state_dicts import streamed
from torch_ecrec.storage import exporting
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.manifest import Manifest

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.filterwarnings("ignore")]
KIND = "adagrad"
STEPS = 3


class Normalised(nn.Module):
    """Two collections, of which tables have the same names; a BatchNorm has buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.second = collection(KIND), collection(KIND, tables()[:2])
        torch.manual_seed(seed)
        width = sum(config.embedding_dim * len(config.feature_names) for one in self._tables for config in one)
        self.over = nn.Sequential(nn.BatchNorm1d(width, dtype=torch.float32), nn.Linear(width, 1, dtype=torch.float32))

    @property
    def _tables(self) -> list[Any]:
        return [self.first.embedding_bag_configs(), self.second.embedding_bag_configs()]

    def forward(self, batch: Batch) -> Tensor:
        found = [one(batch.sparse_features) for one in (self.first, self.second)]
        pooled = [one[name] for one in found for name in sorted(one.keys())]  # TorchRec has them in another order
        return nn.functional.mse_loss(self.over(torch.cat(pooled, dim=1)).squeeze(1), batch.labels)


def optimizers(model: Any) -> tuple[KeyedOptimizerWrapper, CombinedOptimizer]:
    keyed = KeyedOptimizerWrapper(dense_parameters(model), lambda p: torch.optim.Adam(p, lr=LR))
    return keyed, CombinedOptimizer([model.fused_optimizer, keyed])


def train(model: Any, optimizer: CombinedOptimizer, steps: range, batches: Any = None) -> list[float]:
    losses = []
    for batch in batches or [batch_of(6, step) for step in steps]:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Written:
    """Ours, trained for some steps; the checkpoint of then; and what it trains on to."""

    def __init__(self, folder: Path, kind: type[Normalised] = Normalised) -> None:
        net = kind(1)
        self.session = FakeSession(job_of(net))
        self.model: Any = DistributedModelParallel(net, session=self.session)
        self.keyed, self.optimizer = optimizers(self.model)
        # one more than is trained: a step has ended, and is kept, when the next batch is drawn
        reader = self.model.attach(optimizer=self.optimizer, reader=[batch_of(6, step) for step in range(2 * STEPS)])
        drawn = iter(reader)
        for _ in range(STEPS):
            train(self.model, self.optimizer, range(0), [next(drawn)])
        batch = next(drawn)
        self.records = [records.clone() for records in self.session.records]
        found = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.tables = {name: value for name, value in found.items() if "embedding_bags" in name}
        self.dense = {name: value for name, value in found.items() if name not in self.tables}
        self.later = train(self.model, self.optimizer, range(0), [batch, *drawn])
        self.manifest = self.write(folder)

    def write(self, folder: Path) -> Manifest:
        shelf = kept.Shelf(str(folder), self.session.job)
        shelf.truth = [records.view(torch.uint8).numpy() for records in self.records]
        payload, header = self.session.snapshots[STEPS]
        shelf.dense = lambda trainer, done: (header, payload.numpy().tobytes())  # type: ignore[method-assign]
        return shelf.write(STEPS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> tuple[Written, str]:
    folder = tmp_path_factory.mktemp("kept")
    return Written(folder), str(folder)


def test_torchrecs_own_model_loads_it_and_trains_on(
    written: tuple[Written, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, url = written
    monkeypatch.setattr(streamed, "PORTION_BYTES", 80)
    folder = tmp_path / "exported"
    assert main.main(["checkpoints", url, "--export", str(folder), "--format", "dcp", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["step"] == STEPS and said["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert any("schedulers" in one for one in said["absent"]) and any("learning rates" in one for one in said["absent"])
    assert [path.name for path in tmp_path.iterdir()] == ["exported"], "nothing else is left"

    theirs: Any = plain_torchrec(Normalised(2), 1)
    keyed, optimizer = optimizers(theirs)
    train(theirs, optimizer, range(50, 52))  # so that its optimizer has state, and other values
    state = {
        "model": theirs.state_dict(),
        "optimizer": theirs.fused_optimizer.state_dict(),
        "dense_optimizer": keyed.state_dict(),
    }
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    chunks = [len(one.chunks) for name, one in found.items() if "embedding_bags" in name]
    assert max(chunks) > 2, "tables are written in portions"
    dcp.load(state, checkpoint_id=folder)
    theirs.load_state_dict(state["model"])
    theirs.fused_optimizer.load_state_dict(state["optimizer"])
    keyed.load_state_dict(state["dense_optimizer"])
    for name, value in ours.dense.items():
        assert torch.equal(theirs.state_dict()[name], value), name
    weights = {name: value for name, value in theirs.state_dict().items() if "embedding_bags" in name}
    assert len(weights) == len(tables()) + 2
    for name, value in weights.items():
        (shard,) = value.local_shards()
        assert torch.equal(shard.tensor, ours.tables[name]), name
    assert train(theirs, optimizer, range(STEPS, 2 * STEPS)) == pytest.approx(ours.later, rel=1e-4)
    again = Normalised(3)
    other: Any = plain_torchrec(again, 1)
    assert train(other, optimizers(other)[1], range(STEPS, 2 * STEPS)) != pytest.approx(ours.later, rel=1e-4)


def test_every_record_and_every_number_is_there(written: tuple[Written, str], tmp_path: Path) -> None:
    """Of ours loads what ours has written, to the bit."""
    ours, url = written
    done = dcp_export.export(Catalog(url), ours.manifest, tmp_path / "exported")
    assert done.bytes > sum(records.nbytes for records in ours.records)
    net = Normalised(4)
    session = FakeSession(job_of(net))
    model: Any = DistributedModelParallel(net, session=session)
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "exported")
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    assert all(map(torch.equal, session.records, ours.records))


class Tied(Normalised):
    """A layer that is used twice, and a buffer with two names."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.one = self.other = nn.Linear(1, 1, dtype=torch.float32)
        self.register_buffer("seen", torch.full((2,), 5.0 * seed, dtype=torch.float32))
        self.register_buffer("also_seen", self.seen)

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) + self.other(self.one(batch.labels[:1, None])).sum()


def test_what_has_two_names_is_under_both(tmp_path: Path) -> None:
    """State dicts have tied weights twice, and snapshots once."""
    ours = Written(tmp_path / "kept", Tied)
    dcp_export.export(Catalog(str(tmp_path / "kept")), ours.manifest, tmp_path / "exported")
    theirs: Any = plain_torchrec(Tied(2), 1)
    dcp.load(state := {"model": theirs.state_dict()}, checkpoint_id=tmp_path / "exported")
    theirs.load_state_dict(state["model"])
    assert {"one.weight", "other.weight", "seen", "also_seen"} <= ours.dense.keys()
    for name, value in ours.dense.items():
        assert torch.equal(theirs.state_dict()[name], value), name


class Twice(Normalised):
    """A collection that is used twice."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.third = self.first


def test_tables_that_have_two_names_are_under_both_and_are_imported_once(tmp_path: Path) -> None:
    ours = Written(tmp_path / "kept", Twice)
    dcp_export.export(Catalog(str(tmp_path / "kept")), ours.manifest, tmp_path / "exported")
    theirs: Any = plain_torchrec(Twice(2), 1)
    state = {"model": theirs.state_dict(), "optimizer": theirs.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "exported")
    theirs.load_state_dict(state["model"])
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    described = checkpoint.describe(Twice(3), tmp_path / "job.json", trainers=1)
    assert described.again == ("third",) and checkpoint.describe(ours.model, tmp_path / "job.json") == described
    for folder, job in (("exported", []), ("theirs", ["--job", str(tmp_path / "job.json")])):
        url = str(tmp_path / f"{folder}-kept")
        assert main.main(["checkpoints", url, "--import", str(tmp_path / folder), *job]) == 0
        manifest = Catalog(url).newest()
        found, _ = kept.read_by_slots(Restored(url, manifest.id, 0), ours.session.job)
        for a, b in zip(found, ours.records, strict=True):
            assert torch.equal(torch.from_numpy(a), b.view(torch.uint8)), folder


def test_a_snapshot_of_no_model_is_refused_by_name(tmp_path: Path) -> None:
    shelf = kept.Shelf(str(tmp_path / "kept"))
    manifest = shelf.write(5)
    with pytest.raises(CheckpointError, match=re.escape("does not say what its tables are called in a model")):
        dcp_export.export(shelf.catalog, manifest, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_is_there_stays(written: tuple[Written, str], tmp_path: Path) -> None:
    ours, url = written
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        dcp_export.export(Catalog(url), ours.manifest, tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot write"):
        dcp_export.export(Catalog(url), ours.manifest, tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("raised", [RuntimeError("unexpected pos 704 vs 598"), OSError(28, "No space left")])
def test_a_disk_that_is_full_while_torch_writes(
    raised: Exception, written: tuple[Written, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises what is no Exception then."""
    ours, url = written

    def full(*_: object, **__: object) -> None:
        raise CheckpointException("", {0: (raised, traceback.StackSummary())})

    monkeypatch.setattr(dcp_export, "save", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*exported: .*; name another place, or make room"):
        dcp_export.export(Catalog(url), ours.manifest, tmp_path / "exported")
    assert not list(tmp_path.iterdir())


def test_an_export_that_is_interrupted_while_torch_writes_is_interrupted(
    written: tuple[Written, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, url = written

    def interrupted(*_: object, **__: object) -> None:
        raise CheckpointException("", {0: (KeyboardInterrupt(), traceback.StackSummary())})

    monkeypatch.setattr(dcp_export, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dcp_export.export(Catalog(url), ours.manifest, tmp_path / "exported")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_left_goes_with_the_next_one_to_the_same_folder(
    written: tuple[Written, str], tmp_path: Path
) -> None:
    ours, url = written
    left, under_way = (tmp_path / f".exported.{word}" for word in ("0123456789ab", "ba9876543210"))
    for one in (left, under_way):
        one.mkdir()
        (one / "tables.safetensors").touch()
    with exporting.held(under_way):
        dcp_export.export(Catalog(url), ours.manifest, tmp_path / "exported")
    assert sorted(one.name for one in tmp_path.iterdir()) == [under_way.name, "exported"]
