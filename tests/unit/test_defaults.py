"""What a script may set for all tensors that are made without being told: torch's default dtype and default device.

Ours are told, always: a kernel is given addresses, and believes what lies there. So nothing of what the servers keep
and of what comes out of tables depends on either.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_session import FakeSession
from loops import Loop, resumed, same, undisturbed
from models import (
    CPU,
    META,
    SUM,
    batch_of,
    collection,
    job_of,
    plain_torchrec,
    repeated_batch,
    seeded_tables,
    shard,
    tables,
)
from torch import Tensor, nn
from torch.utils._device import _device_constructors
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torch_ecrec.client import pooling
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.runtime.kernels import addresses

pytestmark = pytest.mark.usefixtures("process_group")

PACKAGE = Path(pooling.__file__).parents[1]
ALONE = ("bench", "testing")  # rooms that run in processes of their own
PUTS_BACK = Path("resume/arithmetic.py")  # what a script had set, after a restart
DEFAULTS = (torch.float64, torch.bfloat16, torch.float16, "cpu", "meta")

# the rule ----------------------------------------------------------------------------------------------


def makers() -> frozenset[str]:
    """What makes tensors of torch's defaults, by torch's own list."""
    return frozenset(function.__name__ for function in _device_constructors())


def untold(source: str) -> list[str]:
    """Calls of `torch.something` that leave a dtype or a device to the defaults."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(function := node.func, ast.Attribute):
            if ast.unparse(function.value) == "torch" and function.attr in makers():
                told = {keyword.arg for keyword in node.keywords}
                if not {"dtype", "device"} <= told:
                    found.append(f"line {node.lineno}: {ast.unparse(node)}")
            if ast.unparse(function) in ("torch.Tensor", "torch.set_default_dtype", "torch.set_default_device"):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.smoke  # looks at all of the package
def test_no_tensor_is_made_without_dtype_and_device() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in ALONE
        and path.relative_to(PACKAGE) != PUTS_BACK
        and (lines := untold(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("torch.empty(3, dtype=torch.int64, device='cpu')", False),
        ("torch.empty(3, dtype=torch.int64)", True),
        ("torch.arange(3, device='cpu')", True),
        ("x = f(torch.tensor([1]))", True),
        ("torch.Tensor([1])", True),
        ("values.new_empty(3)", False),
    ],
)
def test_the_rule_sees_what_it_is_for(source: str, wrong: bool) -> None:
    assert bool(untold(source)) == wrong and {"empty", "zeros", "arange", "tensor", "full"} <= makers()


# training ----------------------------------------------------------------------------------------------


@pytest.fixture
def torchs_own() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def set_default(default: Any) -> None:
    if isinstance(default, torch.dtype):
        torch.set_default_dtype(default)
    else:
        torch.set_default_device(default)


class Told(nn.Module):
    """Bags and sequences under a float32 layer, whatever the defaults are."""

    def __init__(self, where: torch.device, weighted: bool, random_weights: bool) -> None:
        super().__init__()
        configs: list[Any] = tables()
        one = EmbeddingConfig(name="s", num_embeddings=20, embedding_dim=4, feature_names=["f0"])
        for config in [*configs, one] if random_weights else ():
            config.init_fn = torch.nn.init.normal_
        if weighted:
            for config in configs:
                config.pooling = SUM
        self.bags = EmbeddingBagCollection(tables=configs, device=where, is_weighted=weighted)
        self.ids = EmbeddingCollection(tables=[one], device=where)
        self.over = nn.Linear(8 * 2 + 4 + 8 + 4, 1, dtype=torch.float32, device=CPU)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.over(self.bags(features).values()).tanh().sum()
        return pooled + self.ids(features)["f0"].values().square().sum()


def trained(batches: list[KeyedJaggedTensor], default: Any = None, **how: Any) -> list[Tensor]:
    """All that came out of tables, and all that the servers keep, when a script has set a default before or after."""
    late, weighted = how.pop("late", False), how.pop("weighted", False)
    if default is not None and not late:
        set_default(default)
    torch.manual_seed(3)
    net = Told(how["where"], weighted, how["random_weights"])
    apply_optimizer_in_backward(RowWiseAdagrad, net.bags.parameters(), {"lr": 0.1})
    apply_optimizer_in_backward(torch.optim.Adam, net.ids.parameters(), {"lr": 0.1})
    session = FakeSession(job_of(net))
    model = DistributedModelParallel(net, device=CPU, session=session)
    if default is not None and late:
        set_default(default)
    with torch.no_grad():
        model.module.over.weight.copy_(torch.linspace(-1, 1, 32, dtype=torch.float32, device=CPU)[None])
    seen: list[Tensor] = []
    model.module.bags.register_forward_hook(lambda module, given, out: seen.append(out.values().detach().clone()))
    for i, batch in enumerate(batches):
        model(batch).backward()
        if i == 1:
            model.eval()
            with torch.no_grad():
                model(batch)
            model.train()
            model.load_state_dict(model.state_dict())
            model.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
    model.flush()
    return [*seen, *session.records, *(g for _, gradients in session.pushed for g in gradients)]


@pytest.mark.usefixtures("torchs_own")
@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize("how", ["meta", "cpu", "cpu, set late", "drawn", "weighted", "repeated"])
def test_training_has_the_same_bits_whatever_the_defaults_are(how: str, default: Any) -> None:
    """Bags of no, one and several ids, averaged and not, of the servers' first weights and of the script's."""
    if how == "repeated":
        batches = [repeated_batch(["f0", "f1", "f2", "f3"], 6, seed) for seed in range(3)]
        if default == "meta":
            with pytest.raises(NotImplementedError), torch.device("meta"):
                batches[0].permute([1, 0, 2, 3])  # TorchRec's own: such batches are for no default device but the CPU
            return
    else:
        batches = [batch_of(6, seed, 4, how == "weighted").sparse_features for seed in range(3)]
    more: dict[str, Any] = {"where": CPU if "cpu" in how else META, "random_weights": how == "drawn"}
    expected = trained(batches, weighted=how == "weighted", **more)
    found = trained(batches, default, late="late" in how, weighted=how == "weighted", **more)
    assert len(found) == len(expected) > 10 and all(x.dtype == torch.float32 for x in found)
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.usefixtures("torchs_own")
@pytest.mark.parametrize("default", DEFAULTS[:-1], ids=str)
def test_torchrec_trains_the_same(default: Any) -> None:
    """Its own class, with all that its defaults make of what is around tables."""
    batches = [batch_of(6, seed, 4) for seed in range(3)]
    set_default(default)

    def steps(model: nn.Module) -> list[Tensor]:
        found = []
        for batch in batches:
            values = model(batch.sparse_features).values()
            values.square().sum().backward()
            found.append(values.detach())
        return found

    ours = steps(shard(nn.Sequential(collection("sgd", seeded_tables())))[0])
    theirs = steps(plain_torchrec(nn.Sequential(collection("sgd", seeded_tables())), 1))
    assert not torch.equal(ours[0], ours[1])
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == wanted.dtype == torch.float32
        torch.testing.assert_close(mine.sort().values, wanted.sort().values, rtol=1e-5, atol=1e-6)


# addresses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"out": np.zeros((2, 1, 4), np.float64)}, "`out_BFD` must be contiguous float32 of shape"),
        ({"out": np.zeros((4, 1, 2), np.float32).T}, "`out_BFD` must be contiguous float32 of shape"),
        ({"out": np.zeros((3, 1, 4), np.float32)}, "`out_BFD` must be contiguous float32 of shape"),
        ({"parts": [np.zeros((3, 5), np.float32)]}, "`parts"),
        ({"parts": [np.zeros((3, 4), np.float64)]}, "`parts"),
        ({"parts": [np.zeros((3, 8), np.float32)[:, ::2]]}, "`parts"),
        ({"parts": [np.zeros((3, 4), np.float32), np.zeros((3, 4), np.uint16)]}, "`arrays` must be contiguous float32"),
        ({"inverse": np.zeros(4, np.int32)}, "`inverse_N` must be contiguous int64"),
        ({"per_id": np.zeros(4, np.float64)}, "`per_id_N` must be contiguous float32"),
        ({"per_id": np.zeros(3, np.float32)}, "`per_id_N` must be contiguous float32"),
    ],
)
def test_a_kernel_that_takes_an_address_looks_at_what_lies_there(wrong: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {
        "parts": [np.ones((3, 4), np.float32)],
        "inverse": np.zeros(4, np.int64),
        "lengths": np.full((1, 2), 2, np.int32),
        "per_id": np.ones(4, np.float32),
        "weighted": True,
        "mean": np.zeros(1, np.bool_),
        "out": np.zeros((2, 1, 4), np.float32),
    }
    pooling.pool(*given.values())
    assert given["out"].tolist() == [[[2.0] * 4]] * 2
    with pytest.raises(ValueError, match=match):
        pooling.pool(*(given | wrong).values())


def test_addresses_are_of_what_the_caller_says() -> None:
    good = np.zeros((3, 4), np.uint8)
    assert addresses([good, good], 4, np.uint8, np.float32).tolist() == [good.ctypes.data] * 2
    for bad in (good[:, ::2], good.astype(np.int64), np.zeros((3, 5), np.uint8), np.zeros(4, np.uint8)):
        with pytest.raises(ValueError, match="`arrays` must be contiguous uint8 or float32 of shape"):
            addresses([good, bad], 4, np.uint8, np.float32)


# loops ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("torchs_own")
@pytest.mark.parametrize("driver", ["plain", pytest.param("sparse", marks=pytest.mark.slow)])
def test_a_loop_goes_on_bit_for_bit_in_float64(driver: str) -> None:
    """Its dense model is of doubles then: snapshots, optimizers, loads, evaluations and all."""
    torch.set_default_dtype(torch.float64)
    loop = Loop(
        reader="shuffled",
        driver=driver,
        optimizers=("adam", "strange"),
        loads=frozenset({"after"}),
        evals=frozenset({"pass"}),
        pushes=frozenset({"all"}),
    )
    first = undisturbed(loop)
    assert first.model.module.over.weight.dtype == torch.float64
    for step in (0, 2, 4):
        assert same(first, resumed(loop, first, step))


# everyday tests ------------------------------------------------------------------------------------------

QUICK = (
    "test_nn.py::test_sharded_equals_unsharded",
    "test_nn.py::test_weighted_mean_divides_by_the_number_of_ids",
    "test_nn.py::test_id_weights_get_gradients",
    "test_tables.py",
    "test_half_tables.py",
    "test_outputs.py",
    "test_coverage.py::test_feature_processors_are_trained_as_unsharded",
)
EVERYDAY = (
    *("test_attach.py", "test_attach_refusals.py", "test_bad_state.py", "test_coverage.py", "test_dcp_export.py"),
    *("test_dense.py", "test_frozen.py", "test_fused.py", "test_half_tables.py", "test_lost_changes.py"),
    *("test_managed.py", "test_mixed.py", "test_nn.py", "test_outputs.py", "test_pipelines.py", "test_placeholder.py"),
    *("test_planned.py", "test_repeats.py", "test_sequences.py", "test_staging.py", "test_tables.py"),
    "test_trainer_state.py",
)


def runs_under(default: str, tests: Sequence[str], limit_s: float) -> None:
    """Runs other tests of this folder as if their scripts had set this default dtype."""
    here = Path(__file__).parent
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--default-dtype", default]
    found = subprocess.run(
        [*words, *(str(here / test) for test in tests)],
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert found.returncode == 0 and " passed" in found.stdout, found.stdout[-8000:] + found.stderr[-2000:]


def test_everyday_tests_hold_in_float64() -> None:
    """What tests build, train and compare is told its dtype, too: so what fails there is ours."""
    runs_under("float64", QUICK, 600.0)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("default", ["float64", "bfloat16"])
def test_all_that_build_models_hold_under_another_default(default: str) -> None:
    runs_under(default, EVERYDAY, 1400.0)
