"""What TorchRec has saved, or we have exported, as a checkpoint of a cluster: every bit, and every refusal.

The oracles: the records before the export; and a model that loads the same folder through `load_state_dict`.
"""

import contextlib
import dataclasses
import io
import json
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake_session import FakeSession
from kept import Shelf, read_by_slots
from models import (
    CPU,
    LR,
    META,
    Net,
    batch_of,
    dense_parameters,
    job_of,
    plain_torchrec,
    table,
    tables,
    train,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torchrec import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torch_ecrec import checkpoint
from torch_ecrec.checkpoint import dcp_import
from torch_ecrec.checkpoint.dcp_metadata import read_metadata
from torch_ecrec.cli.main import main
from torch_ecrec.errors import CheckpointError
from torch_ecrec.nn import imported
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.processes.restore_source import dense_model
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.state_dicts.shares import shape_of
from torch_ecrec.storage import importing
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.manifest import Manifest

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.filterwarnings("ignore")]


class Counting(Net):
    """With a buffer that is in state dicts, and one that is not."""

    def __init__(self, *collections: EmbeddingBagCollection) -> None:
        super().__init__(*collections)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("lately", torch.zeros(3), persistent=False)


class Chunked(Tensor):
    """A tensor that DCP saves in given chunks, as processes with a sharding of theirs would."""

    @staticmethod
    def __new__(cls, whole: Tensor, chunks: list[tuple[list[int], list[int]]]) -> "Chunked":
        made: Any = Tensor._make_wrapper_subclass(cls, whole.size(), dtype=whole.dtype)
        made.whole, made.chunks = whole, chunks
        return made

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        def item(offsets: list[int], sizes: list[int]) -> WriteItem:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.size())
            return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

        return [item(*chunk) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offsets, sizes = next(chunk for chunk in self.chunks if torch.Size(chunk[0]) == index.offset)
        return self.whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def net(device: torch.device = CPU) -> Net:
    made = EmbeddingBagCollection(tables=tables(), device=device)
    apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.1})
    torch.manual_seed(3)
    return Counting(made)


def optimizers(model: Any) -> tuple[KeyedOptimizerWrapper, CombinedOptimizer]:
    keyed = KeyedOptimizerWrapper(dense_parameters(model), lambda p: torch.optim.Adam(p, lr=LR))
    return keyed, CombinedOptimizer([model.fused_optimizer, keyed])


def flat(value: Any) -> Tensor:
    """What a single process has of a tensor of a state dict."""
    found = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
    return found.detach().clone()


class Saved:
    """Plain TorchRec, trained for some steps and saved with DCP; and what a model of ours has that loads the folder."""

    def __init__(self, place: Path) -> None:
        self.folder, self.job = place / "dcp", place / "job.json"
        theirs: Any = plain_torchrec(net(), 1)
        theirs.module.seen.fill_(5.0)
        _, optimizer = optimizers(theirs)
        train(theirs, [batch_of(6, step) for step in range(3)], optimizer)
        self.state = {"model": theirs.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
        dcp.save(self.state, checkpoint_id=self.folder, no_dist=True)
        checkpoint.describe(net(META), self.job, trainers=1)
        module = net()
        self.session = FakeSession(job_of(module))
        model: Any = DistributedModelParallel(module, session=self.session)
        _, optimizer = optimizers(model)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        train(model, [batch_of(6, 50)], optimizer)  # so that its optimizer has state to load into
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=self.folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        model.flush()
        self.session.step = 1  # as where training begins
        self.records = [records.clone() for records in self.session.records]
        self.losses = train(model, [batch_of(6, step) for step in range(3, 6)], optimizer)
        self.after = [records.clone() for records in self.session.records]
        self.dense_after = {name: value.detach().clone() for name, value in model.named_parameters() if "over" in name}

    def content(self) -> dict[str, Any]:
        """As it was saved, to be saved otherwise."""
        found: dict[str, Any] = {}
        for name in ("model", "optimizer"):
            found[name] = dict(self.state[name])
        found["optimizer"]["state"] = {key: dict(value) for key, value in found["optimizer"]["state"].items()}
        return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


def stored(url: str, manifest: Manifest | None = None) -> Restored:
    manifest = manifest or Catalog(url).newest()
    return Restored(url, manifest.id, manifest.done)


def records_of(url: str, job: JobSpec) -> list[Any]:
    """As servers read them, each slot its own."""
    found, times = read_by_slots(stored(url), job)
    assert all((count == 1).all() for count in times)
    return found


def same(url: str, job: JobSpec, wanted: Any) -> bool:
    return all(
        np.array_equal(a, b.view(torch.uint8).numpy()) for a, b in zip(records_of(url, job), wanted, strict=True)
    )


def begun(url: str) -> tuple[Any, FakeSession, Any, CombinedOptimizer]:
    """A model in a cluster that begins with the checkpoint, without a word of the folder."""
    module = net()
    session = FakeSession(job_of(module))
    session.restarted, one = True, stored(url)
    session.records = [torch.from_numpy(found).view(torch.float32) for found in records_of(url, session.job)]
    session.parts = dense_model(one)
    model: Any = DistributedModelParallel(module, session=session)
    for parameter in dense_parameters(model).values():
        parameter.data.fill_(7.0)
    _, optimizer = optimizers(model)
    return model, session, module, optimizer


def test_training_goes_on_as_if_the_model_had_loaded_it(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "PORTION_BYTES", 11 * 36)
    url = str(tmp_path / "store")
    assert main(["checkpoints", url, "--import", str(saved.folder), "--job", str(saved.job)]) == 0
    out = capsys.readouterr().out
    assert "107 rows" in out and f"up --restore {url}@0, for 1 trainers" in out
    assert "not in it: epoch, which is no tensor" in out and "random states" in out and "momentum" not in out
    assert main(["checkpoints", url, "--verify"]) == 0 and "whole" in capsys.readouterr().out
    assert same(url, saved.session.job, saved.records)
    model, session, _, optimizer = begun(url)
    reader = model.attach(optimizer=optimizer, reader=[batch_of(6, step) for step in range(3, 6)])
    assert train(model, reader, optimizer) == saved.losses
    assert all(map(torch.equal, session.records, saved.after))
    for name, value in dense_parameters(model).items():
        assert torch.equal(value, saved.dense_after[name]), name
    assert dict(model.named_buffers())["seen"].tolist() == [5, 5]


def test_buffers_that_are_in_no_state_dict_may_come_or_not(saved: Saved) -> None:
    """Ours have them, TorchRec's do not."""
    module = net()
    model: Any = DistributedModelParallel(module, session=FakeSession(job_of(module)))
    tensors = {name: flat(value) for name, value in saved.state["model"].items() if "embedding_bags" not in name}
    for more in ({}, {"lately": torch.ones(3)}):
        parts = [(torch.from_numpy(p), h) for h, p in imported.packed(1, tensors | more, {}, {})]
        imported.begin_with_(model, [], parts)
        assert dict(model.named_buffers())["lately"].tolist() == [len(more)] * 3
    parts = [(torch.from_numpy(p), h) for h, p in imported.packed(1, tensors | {"other": torch.ones(3)}, {}, {})]
    with pytest.raises(ValueError, match="has other that the model has not"):
        imported.begin_with_(model, [], parts)


def test_what_has_two_names_comes_under_either(saved: Saved) -> None:
    """State dicts have tied weights twice. Other numbers in one of the names are of another model."""
    module: Any = net()
    module.one = module.other = nn.Linear(2, 2)
    model: Any = DistributedModelParallel(module, session=FakeSession(job_of(module)))
    tensors = {name: flat(value) for name, value in saved.state["model"].items() if "embedding_bags" not in name}
    optimizer = torch.optim.Adam(dense_parameters(model).values())

    def begin(**more: Tensor) -> None:
        given = {f"{name}.{what}": value for name, value in more.items() for what in ("weight", "bias")}
        given = {name: value if "bias" in name else value.expand(2, 2).clone() for name, value in given.items()}
        state = {"other.weight": {"exp_avg": torch.eye(2)}}
        parts = [(torch.from_numpy(p), h) for h, p in imported.packed(1, tensors | given, state, {})]
        imported.begin_with_(model, [optimizer], parts)

    begin(one=torch.ones(2), other=torch.ones(2))
    assert module.one.weight.tolist() == [[1, 1], [1, 1]] and module.one.bias.tolist() == [1, 1]
    assert torch.equal(optimizer.state[module.one.weight]["exp_avg"], torch.eye(2))
    begin(other=torch.zeros(2))
    assert module.one.bias.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"has other numbers in other\.weight than in one\.weight, which are one"):
        begin(one=torch.ones(2), other=torch.zeros(2))


def test_tables_alone_leave_the_dense_model_to_the_script(saved: Saved, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    words = ["checkpoints", url, "--import", str(saved.folder), "--job", str(saved.job), "--tables-only"]
    assert main(words) == 0
    model, session, _, optimizer = begun(url)
    assert same(url, session.job, saved.records)
    dcp.load(state := {"model": model.state_dict()}, checkpoint_id=saved.folder)
    model.load_state_dict(state["model"])
    reader = model.attach(optimizer=optimizer, reader=[batch_of(6, 3)])
    assert train(model, reader, optimizer) == saved.losses[:1]


def test_what_was_imported_is_exported_again(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There and back, twice: the same tensors, and records; the job goes with them."""
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    assert main(["checkpoints", first, "--import", str(saved.folder), "--job", str(saved.job)]) == 0
    assert main(["checkpoints", first, "--export", str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    assert main(["checkpoints", second, "--import", str(tmp_path / "dcp"), "--trainers", "5", "--seed", "9"]) == 0
    job = Catalog(second).newest().spec
    assert (job.trainers, job.seed, job.code.slots) == (5, 9, 5) and len(dense_model(stored(second))) == 5
    assert same(second, job, saved.records)
    file = tmp_path / "tables.safetensors"
    assert main(["checkpoints", second, "--export", str(file)]) == 0
    capsys.readouterr()
    assert main(["checkpoints", third, "--import", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["rows"] == 107 and any("the dense model" in one for one in said["absent"])
    assert same(third, job, saved.records)
    folders = [dcp_import.Folder(path) for path in (saved.folder, tmp_path / "dcp")]
    ours, theirs = (
        {name.split(".", 1)[1]: one.whole(name) for name in one.tensors} for one in folders
    )  # optimizers have other names
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weights_of_16_bits_and_several_kinds_of_state(tmp_path: Path) -> None:
    shelf, file = Shelf(str(tmp_path / "kept")), tmp_path / "tables.safetensors"
    shelf.write(5)
    assert main(["checkpoints", str(tmp_path / "kept"), "--export", str(file)]) == 0
    assert main(["checkpoints", str(tmp_path / "again"), "--import", str(file)]) == 0
    found = records_of(str(tmp_path / "again"), shelf.job)
    assert all(np.array_equal(a, b) for a, b in zip(found, shelf.truth, strict=True))


WAYS: dict[str, Callable[[int, int], list[tuple[list[int], list[int]]]]] = {
    "rows": lambda R, C: [([0, 0], [3, C]), ([3, 0], [R - 3, C])],
    "columns": lambda R, C: [([0, 0], [R, 1]), ([0, 1], [R, C - 1])],
    "both": lambda R, C: [([0, 0], [2, C]), ([2, 0], [R - 2, C - 1]), ([2, C - 1], [R - 2, 1])],
}


@pytest.mark.parametrize("way", WAYS)
def test_any_sharding(saved: Saved, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "PORTION_BYTES", 5 * 36)
    content = saved.content()
    for name, value in content["model"].items():
        if "embedding_bags" in name:
            rows, columns = shape_of(value)
            content["model"][name] = Chunked(flat(value), WAYS[way](rows, columns))
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    url = str(tmp_path / "store")
    assert main(["checkpoints", url, "--import", str(tmp_path / "dcp"), "--job", str(saved.job)]) == 0
    assert same(url, saved.session.job, saved.records)


def test_the_job_is_the_one_that_the_script_brings(saved: Saved, tmp_path: Path) -> None:
    described = checkpoint.describe(net(), tmp_path / "job.json", trainers=1)
    assert described == checkpoint.describe(net(META), tmp_path / "job.json", trainers=1)
    module = net()
    model: Any = DistributedModelParallel(module, session=FakeSession(job_of(module)))
    assert checkpoint.describe(model, tmp_path / "job.json") == described
    assert not described.job.difference(model.session.job)
    assert checkpoint.describe(net(), tmp_path / "job.json").job.trainers == 1, "as the process group has"
    assert set(described.tables) == {"wide", "small", "shared", "last"}
    with pytest.raises(ValueError, match="nothing to import"):
        checkpoint.describe(nn.Linear(2, 2), tmp_path / "none.json", trainers=1)
    assert not (tmp_path / "none.json").exists()


# what is refused ----------------------------------------------------------------------------------


def refused(saved: Saved, tmp_path: Path, content: dict[str, Any], *more: str) -> str:
    """The reason, of content that is saved with DCP; and that nothing is left of the attempt."""
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return refused_folder(saved, tmp_path, tmp_path / "dcp", *more)


def refused_folder(saved: Saved, tmp_path: Path, folder: Path, *more: str) -> str:
    job = () if "--job" in more else ("--job", str(saved.job))
    with contextlib.redirect_stderr(said := io.StringIO()):
        code = main(["checkpoints", str(tmp_path / "store"), "--import", str(folder), *job, *more])
    assert code == CheckpointError.exit_code
    store = tmp_path / "store"
    assert not store.exists() or not list(store.iterdir()), "nothing is left"
    return said.getvalue()


TABLE_KEYS = [f"collections.0.embedding_bags.{name}.weight" for name in ("wide", "small", "shared", "last")]
WIDE = TABLE_KEYS[0]


def test_a_table_that_is_missing_or_strange(saved: Saved, tmp_path: Path) -> None:
    content = saved.content()
    del content["model"][WIDE]
    assert f"lacks tables: model.{WIDE}" in refused(saved, tmp_path / "a", content)
    content = saved.content()
    content["model"][WIDE.replace("wide", "more")] = torch.ones(3, 8)
    assert "knows nothing of: model.collections.0.embedding_bags.more" in refused(saved, tmp_path / "b", content)
    content = saved.content()
    content["model"][WIDE] = torch.ones(50, 9)
    reason = refused(saved, tmp_path / "c", content)
    assert f"model.{WIDE} is float32 of shape (50, 9), the job has float32 of shape (50, 8)" in reason
    content["model"][WIDE] = torch.ones(50, 8, dtype=torch.float64)
    assert "float64 of shape (50, 8), the job has float32" in refused(saved, tmp_path / "d", content)


def test_optimizer_state_that_is_missing_or_strange(saved: Saved, tmp_path: Path) -> None:
    content = saved.content()
    state = content["optimizer"]["state"]
    state[WIDE]["wide.momentum2"] = torch.zeros(50, 8)
    assert "wide.momentum2. It is of a model with other" in refused(saved, tmp_path / "a", content)
    del state[WIDE]["wide.momentum2"]
    old = state[WIDE]["wide.momentum1"]
    state[WIDE]["wide.momentum1"] = torch.zeros(50, 8)
    assert "is float32 of shape (50, 8), the job has float32 of shape (50,)" in refused(saved, tmp_path / "b", content)
    state[WIDE]["wide.momentum1"] = torch.zeros(100)
    assert "sharded by columns have one for each shard" in refused(saved, tmp_path / "e", content)
    del state[WIDE]["wide.momentum1"]
    state[WIDE]["sum"] = torch.zeros(50, 8)  # as a dense optimizer has it
    assert "lacks optimizer state: `momentum1` of table wide." in refused(saved, tmp_path / "c", content)
    words = ["--import", str(tmp_path / "c" / "dcp"), "--job", str(saved.job), "--fresh-optimizer-state"]
    url = str(tmp_path / "c" / "store")
    assert main(["checkpoints", url, *words]) == 0
    table_group, first = saved.session.job.place_of_table["wide"]
    found = records_of(url, saved.session.job)[table_group].view(np.float32)[first : first + 50]
    wanted = saved.records[table_group][first : first + 50].clone()
    assert flat(old).any() and wanted[:, 8].any()
    wanted[:, 8] = 0
    assert np.array_equal(found, wanted.numpy())


def test_two_models_in_one_folder(saved: Saved, tmp_path: Path) -> None:
    content = saved.content()
    content["ema"] = {name: flat(value) + 1 for name, value in content["model"].items()}
    assert "more than once, under ema., model.: say which, --model-key" in refused(saved, tmp_path, content)
    url = str(tmp_path / "right")
    words = ["--import", str(tmp_path / "dcp"), "--job", str(saved.job), "--model-key", "model"]
    assert main(["checkpoints", url, *words]) == 0
    assert same(url, saved.session.job, saved.records)


def test_a_folder_that_was_cut_off_or_is_none(saved: Saved, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in saved.folder.iterdir()}
    (part,) = (name for name in files if name.endswith(".distcp"))
    for i, (name, size, reason) in enumerate(
        [
            (part, len(files[part]) - 1, "was cut off"),
            (part, len(files[part]) // 3, "was cut off"),
            (part, None, "No such file"),
            (".metadata", 100, "is no folder of torch.distributed.checkpoint"),
            (".metadata", None, "is no folder of torch.distributed.checkpoint"),
        ]
    ):
        copy = tmp_path / str(i) / "dcp"
        shutil.copytree(saved.folder, copy)
        (copy / name).unlink()
        if size is not None:
            (copy / name).write_bytes(files[name][:size])
        assert reason in refused_folder(saved, tmp_path / str(i), copy), (name, size)
    data = bytearray(files[part])
    at = data.index(b"PK\x03\x04")
    data[at : at + 2000] = bytes(2000)
    copy = tmp_path / "altered" / "dcp"
    shutil.copytree(saved.folder, copy)
    (copy / part).write_bytes(data)
    assert "cannot be read, it was altered" in refused_folder(saved, tmp_path / "altered", copy)


class Harm:
    """What a pickle may say, and whoever reads it calls."""

    def __init__(self, told: Path) -> None:
        self.told = told

    def __reduce__(self) -> Any:
        return Path.touch, (self.told,)


def test_metadata_of_a_stranger_runs_nothing(saved: Saved, tmp_path: Path) -> None:
    told = tmp_path / "told"
    copy = tmp_path / "dcp"
    shutil.copytree(saved.folder, copy)
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    for harm in (Harm(told), {"planner": Harm(told)}):
        (copy / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(metadata, planner_data=harm)))
        assert "which DCP never writes: nothing was run" in refused_folder(saved, tmp_path, copy)
        assert not told.exists()
    (copy / ".metadata").write_bytes(pickle.dumps(OrderedDict()))
    assert "its .metadata is a <class 'collections.OrderedDict'>" in refused_folder(saved, tmp_path, copy)
    pickle.loads(pickle.dumps(Harm(told)))
    assert told.exists(), "a plain reader would have run it"


class Named:
    """Is pickled as an attribute of something, as Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, of: object, name: str) -> None:
        self.asked = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.asked


def test_members_of_enumerations_may_be_named_as_any_python_does(saved: Saved, tmp_path: Path) -> None:
    """And no attribute of anything else: `getattr` would lead to all that a process has."""
    copy = tmp_path / "copy"
    shutil.copytree(saved.folder, copy)
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    named = dataclasses.replace(metadata, planner_data=Named(_MEM_FORMAT_ENCODING, member.name))
    (copy / ".metadata").write_bytes(pickle.dumps(named))
    assert read_metadata(copy).planner_data is member
    for of, name in ((_MEM_FORMAT_ENCODING, "__init__"), (_MEM_FORMAT_ENCODING, "mro"), (OrderedDict, "update")):
        (copy / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(metadata, planner_data=Named(of, name))))
        with pytest.raises(CheckpointError, match=f"its .metadata asks for '{name}' of .*: nothing was run"):
            read_metadata(copy)


def test_metadata_that_points_out_of_its_folder(saved: Saved, tmp_path: Path) -> None:
    copy = tmp_path / "dcp"
    shutil.copytree(saved.folder, copy)
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    for at in ("../secret", "/etc/passwd"):
        places = {key: dataclasses.replace(place, relative_path=at) for key, place in metadata.storage_data.items()}
        (copy / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(metadata, storage_data=places)))
        assert f"{at!r} for a file, which is not in the folder" in refused_folder(saved, tmp_path, copy)


def test_parts_that_leave_something_out(saved: Saved, tmp_path: Path) -> None:
    content = saved.content()
    whole = flat(content["model"][WIDE])
    content["model"][WIDE] = Chunked(whole, [([0, 0], [20, 8]), ([25, 0], [25, 8])])
    folder = tmp_path / "dcp"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.default_planner._validate_global_plan", lambda *_: [])
        assert "400 numbers, and 360 in parts that leave some out" in refused(saved, tmp_path, content)
        shutil.rmtree(folder)
        content["model"][WIDE] = Chunked(whole, [([0, 0], [25, 8]), ([20, 0], [25, 8])])
        assert "in parts that lie over each other" in refused(saved, tmp_path, content)


def test_what_says_nothing_of_the_job(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "store")
    assert main(["checkpoints", url, "--import", str(saved.folder)]) == CheckpointError.exit_code
    assert "`torch_ecrec.checkpoint.describe(model, FILE, trainers=N)` in the script" in capsys.readouterr().err
    (tmp_path / "job.json").write_text("{}")
    reason = refused_folder(saved, tmp_path, saved.folder, "--job", str(tmp_path / "job.json"))
    assert "describes no job" in reason
    (tmp_path / "job.json").write_bytes(saved.job.read_bytes().replace(b'"format":1', b'"format":2'))
    assert "has format 2" in refused_folder(saved, tmp_path, saved.folder, "--job", str(tmp_path / "job.json"))
    assert "No such file" in refused_folder(saved, tmp_path, saved.folder, "--job", str(tmp_path / "none.json"))
    (tmp_path / "job.json").write_bytes(saved.job.read_bytes().replace(b'"beside":[]', b'"beside":["mc"]'))
    reason = refused_folder(saved, tmp_path, saved.folder, "--job", str(tmp_path / "job.json"))
    assert "mc remap ids, and which row is whose is not imported" in reason
    for words in (["--job", "x"], ["--tables-only"], ["--trainers", "2"], ["--model-key", "m"]):
        assert main(["checkpoints", url, *words]) == 2
        assert f"{words[0]} says what is imported: it goes with --import" in capsys.readouterr().err
    assert main(["checkpoints", url, "--import", str(saved.job)]) == 2
    assert "takes a folder of DCP or a file that ends in .safetensors" in capsys.readouterr().err


def test_a_file_of_safetensors_that_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shelf, file = Shelf(str(tmp_path / "kept")), tmp_path / "tables.safetensors"
    shelf.write(5)
    assert main(["checkpoints", str(tmp_path / "kept"), "--export", str(file)]) == 0
    data = file.read_bytes()
    for size in (0, 7, 8, 100, len(data) - 1):
        file.write_bytes(data[:size])
        assert main(["checkpoints", str(tmp_path / "again"), "--import", str(file)]) == CheckpointError.exit_code
        assert "was cut off, or is no file of safetensors" in capsys.readouterr().err, size
    for old, new, reason in [
        (b'"a.weight"', b'"z.weight"', "has no tensors"),
        (b'"c.exp_avg_sq"', b'"c.exp_avg_sx"', "lacks optimizer state: `exp_avg_sq` of table c"),
        (b'"dtype":"F16"', b'"dtype":"F64"', "c.weight is F64"),
        (b'"dtype": "F16"', b'"dtype":"BF16"', "c.weight is bfloat16"),
    ]:
        if old in data:
            file.write_bytes(data.replace(old, new))
            assert main(["checkpoints", str(tmp_path / "again"), "--import", str(file)]) == CheckpointError.exit_code
            assert reason in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_another_dense_model_is_refused_where_it_is_attached(saved: Saved, tmp_path: Path) -> None:
    content = saved.content()
    del content["model"]["over.bias"]
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    url = str(tmp_path / "store")
    assert main(["checkpoints", url, "--import", str(tmp_path / "dcp"), "--job", str(saved.job)]) == 0
    model, _, _, optimizer = begun(url)
    with pytest.raises(ValueError, match=r"it lacks over\.bias, and has nothing that"):
        model.attach(optimizer=optimizer)
    assert all(bool((value == 7).all()) for value in dense_parameters(model).values()), "nothing was changed"
    assert main(["checkpoints", url, "--import", str(saved.folder), "--job", str(saved.job)]) == 0
    model, _, _, _ = begun(url)
    with pytest.raises(ValueError, match=r"state of over\.bias, over\.weight, which no attached optimizer steps"):
        model.attach(optimizer=[])


def test_a_whole_state_dict_in_a_file_of_safetensors(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the model's own names, as `safetensors.torch.save_file` writes it; here by hand."""
    content, data, header = saved.content(), b"", {}
    named = {name: flat(value) for name, value in content["model"].items()}
    for state in content["optimizer"]["state"].values():
        named |= {f"state.{name}": flat(value) for name, value in state.items() if "momentum1" in name}
    keys = {f"{name}.momentum1": key for key, name in zip(TABLE_KEYS, ("wide", "small", "shared", "last"), strict=True)}
    for name, value in named.items():
        last = name.removeprefix("state.")
        full = f"state.{keys[last]}.{last}" if last in keys else name
        raw = value.numpy().tobytes()
        header[full] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    said = json.dumps(header).encode()
    (tmp_path / "all.safetensors").write_bytes(len(said).to_bytes(8, "little") + said + data)
    url = str(tmp_path / "store")
    words = ["checkpoints", url, "--import", str(tmp_path / "all.safetensors"), "--job", str(saved.job)]
    assert main(words) == 0
    assert "not in it: tensor over.bias" in capsys.readouterr().out
    assert same(url, saved.session.job, saved.records)


def test_a_full_disk_leaves_nothing(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = importing._write_records

    def full(*args: Any) -> None:
        written(*args)
        raise CheckpointError("there is no room")

    monkeypatch.setattr(importing, "_write_records", full)
    assert "no room" in refused_folder(saved, tmp_path, saved.folder)


def test_tables_are_never_whole_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in one chunk, as one process or a table-wise sharding saves it: what is asked of it is a portion."""
    made = EmbeddingBagCollection(tables=[table("wide", 4000, 8, "f0")], device=META)
    apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.1})
    weights, state = torch.rand(4000, 8), torch.rand(4000)
    key = "embedding_bags.wide.weight"
    content = {"model": {key: weights}, "optimizer": {"state": {key: {"wide.momentum1": state}}}}
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    described = checkpoint.describe(made, tmp_path / "job.json", trainers=1)
    monkeypatch.setattr(importing, "PORTION_BYTES", 100 * 36)
    monkeypatch.setattr(torch, "load", _only_fake(torch.load))
    asked: list[int] = []
    rows = dcp_import.DcpSource.rows
    monkeypatch.setattr(
        dcp_import.DcpSource, "rows", lambda self, t, f, a, b: (asked.append(b - a), rows(self, t, f, a, b))[1]
    )
    url = str(tmp_path / "store")
    assert main(["checkpoints", url, "--import", str(tmp_path / "dcp"), "--job", str(tmp_path / "job.json")]) == 0
    assert max(asked) == 100 and len(asked) == 80
    (found,) = records_of(url, described.job)
    assert np.array_equal(found.view(np.float32), torch.cat([weights, state[:, None]], dim=1).numpy())


def _only_fake(load: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **more: Any) -> Any:
        found = load(*args, **more)
        assert type(found).__name__ == "FakeTensor", "no chunk is read as a whole"
        return found

    return checked
