"""All of torch and TorchRec that takes a module, put around a model with tables on servers: it trains to the same bits,
or is refused by name. What a new release brings fails here until somebody has judged it.

Pipelines are in `test_pipelines.py`, methods of modules in `test_modules.py`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
import torch.distributed as dist
import torchrec.distributed
from models import CPU, Net, batch_of, collection, dense_parameters, optimizer_of, seeded_tables, shard
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as composed_checkpoint
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor import distribute_module, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrizations, parametrize, prune, stateless
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torchrec.distributed.model_parallel import DMPCollection, HybridEvalDMP
from torchrec.distributed.shard import shard_modules
from torchrec.distributed.types import ShardingEnv
from torchrec.inference import modules as inference

from torch_ecrec.compat.torchrec import TRACKERS

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore")
BATCHES = [batch_of(6, seed) for seed in range(3)]
BATCH = BATCHES[0]

EXACT = ""
AROUND = "is put around a .* whose tables are on the servers"
COPIED = "a model cannot be copied"
ROWS = "its rows live on the servers, and this is only their placeholder"
RECORDED = "cannot record a lookup of rows that are on the servers"
Call = Callable[[Any], Any]


def model() -> Any:
    made = Net(collection("sgd", seeded_tables()))
    nn.init.constant_(made.over.weight, 0.1)
    return shard(made)[0]


def trained(run: Call, whole: Any) -> list[object]:
    """Three steps, made by what is called, of a model that it is around; and all that they have changed."""
    optimizer, losses = optimizer_of(whole), []
    for batch in BATCHES:
        optimizer.zero_grad()
        loss, _ = run(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    session = whole.session
    state = [t for one in optimizer.state_dict()["state"].values() for t in one.values() if isinstance(t, Tensor)]
    return [session.step, len(session.snapshots), *losses, *session.records, *dense_parameters(whole).values(), *state]


def same(a: list[object], b: list[object]) -> bool:
    pairs = list(zip(a, b, strict=False))
    alike = [torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y for x, y in pairs]
    return len(a) == len(b) and all(alike)


def table(whole: Any) -> nn.Module:
    found: nn.Module = whole.module.collections[0].embedding_bags["wide"]
    return found


def of_numbers(transform: Callable[..., Any], *more: Any) -> Call:
    """Applies a transform to a function of numbers in which the model is called."""
    return lambda whole: transform(lambda x: whole(BATCH)[0] * x.sum(), *more)


def within(context: Callable[[], Any]) -> Call:
    def made(whole: Any) -> Call:
        def run(batch: Any) -> Any:
            with context():
                return whole(batch)

        return run

    return made


def then(do: Call) -> Call:
    """Does something to the model, and trains the model itself."""

    def made(whole: Any) -> Any:
        do(whole)
        return whole

    return made


def replaced(whole: Any, name: str, wrapper: Call) -> Any:
    setattr(whole.module, name, wrapper(getattr(whole.module, name)))
    return whole


def quantised_by_config(whole: Any) -> Any:
    whole.qconfig = quantization.default_qconfig
    return quantization.prepare(whole, inplace=True)


def mesh() -> Any:
    return init_device_mesh("cpu", (1,))


def env() -> ShardingEnv:
    return ShardingEnv.from_process_group(dist.group.WORLD)


class Serves(inference.PredictModule):
    def predict_forward(self, batch: Any) -> Any:
        return self.predict_module(batch)


@contextlib.contextmanager
def flops() -> Iterator[None]:
    with FlopCounterMode(display=False):
        yield


ones = torch.ones(2, dtype=torch.float32)
T = "torch.distributed."
APPLIED: dict[str, tuple[Call, str]] = {
    # other models around it
    "torch.nn.parallel.distributed.DistributedDataParallel": (nn.parallel.DistributedDataParallel, AROUND),
    "torch.nn.parallel.DistributedDataParallelCPU": (nn.parallel.DistributedDataParallelCPU, AROUND),
    "torch.nn.parallel.data_parallel.DataParallel": (nn.DataParallel, AROUND),
    "torch.nn.parallel.data_parallel.data_parallel": (
        lambda whole: nn.parallel.data_parallel(whole, BATCH),
        "device type could not be determined",
    ),
    f"{T}fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (FullyShardedDataParallel, AROUND),
    f"{T}fsdp.fully_shard": (lambda whole: fully_shard(whole, mesh=mesh()), ROWS),
    f"{T}fsdp.fully_shard of the inner model": (lambda whole: fully_shard(whole.module, mesh=mesh()), ROWS),
    f"{T}fsdp.fully_shard of a layer": (
        then(lambda whole: fully_shard(whole.module.over, mesh=mesh())),
        "DTensor cannot be kept",
    ),
    f"{T}fsdp.wrap.wrap": (wrap, EXACT),
    f"{T}_composable.replicate.replicate": (replicate, AROUND),
    f"{T}_composable.replicate.replicate of the inner model": (then(lambda whole: replicate(whole.module)), AROUND),
    f"{T}tensor.distribute_module": (lambda whole: distribute_module(whole, mesh()), ROWS),
    f"{T}tensor.parallel.api.parallelize_module": (lambda whole: parallelize_module(whole, mesh(), {}), EXACT),
    "torchrec.distributed.model_parallel.DistributedModelParallel": (
        torchrec.distributed.DistributedModelParallel,
        AROUND,
    ),
    "torchrec.distributed.model_parallel.DMPCollection": (
        lambda whole: DMPCollection(whole, CPU, whole.plan, 1, 1, dist.group.WORLD),
        AROUND,
    ),
    "torchrec.distributed.model_parallel.HybridEvalDMP": (lambda whole: HybridEvalDMP(whole, env()), AROUND),
    "torchrec.distributed.shard.shard_modules": (lambda whole: shard_modules(whole, env()), EXACT),
    **{
        f"{tracker.__module__}.{tracker.__qualname__}": (tracker, "trackers of TorchRec .*leave them out")
        for tracker in TRACKERS
    },
    # activations again, on another device, in another precision
    f"{T}_composable.checkpoint_activation.checkpoint": (composed_checkpoint, EXACT),
    f"{T}algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper": (checkpoint_wrapper.checkpoint_wrapper, EXACT),
    f"{T}algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper of collections": (
        then(
            lambda whole: replaced(
                whole, "collections", lambda all_: nn.ModuleList(map(checkpoint_wrapper.checkpoint_wrapper, all_))
            )
        ),
        EXACT,
    ),
    f"{T}algorithms._checkpoint.checkpoint_wrapper.offload_wrapper": (checkpoint_wrapper.offload_wrapper, EXACT),
    f"{T}algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing": (
        then(checkpoint_wrapper.apply_activation_checkpointing),
        EXACT,
    ),
    "torch.utils.checkpoint.checkpoint": (
        lambda whole: lambda batch: checkpoint(whole, batch, use_reentrant=False),
        EXACT,
    ),
    "torch.autograd.graph.save_on_cpu": (within(torch.autograd.graph.save_on_cpu), EXACT),
    "torch.autograd.detect_anomaly": (within(torch.autograd.detect_anomaly), EXACT),
    "torch.utils.flop_counter.FlopCounterMode": (within(flops), EXACT),
    "torch.nn.Sequential": (lambda whole: nn.Sequential(whole), EXACT),
    # copies
    "copy.deepcopy": (copy.deepcopy, COPIED),
    "pickle.dumps": (pickle.dumps, ROWS),
    "torch.serialization.save": (lambda whole: torch.save(whole, io.BytesIO()), ROWS),
    "torch.optim.swa_utils.AveragedModel": (AveragedModel, COPIED),
    "torch.optim.swa_utils.update_bn": (then(lambda whole: update_bn([BATCH], whole)), EXACT),
    # weights of other kinds
    **{
        f"torch.nn.utils.{name} of a table": (lambda whole, change=change: change(table(whole)), ROWS)
        for name, change in {
            "parametrize.register_parametrization": (
                lambda one: parametrize.register_parametrization(one, "weight", nn.Identity())
            ),
            "parametrize.register_parametrization, unsafe": (
                lambda one: parametrize.register_parametrization(one, "weight", nn.Identity(), unsafe=True)
            ),
            "parametrizations.weight_norm": parametrizations.weight_norm,
            "parametrizations.spectral_norm": parametrizations.spectral_norm,
            "parametrizations.orthogonal": parametrizations.orthogonal,
            "weight_norm.weight_norm": nn.utils.weight_norm,
            "spectral_norm.spectral_norm": nn.utils.spectral_norm,
            "prune.identity": lambda one: prune.identity(one, "weight"),
            "prune.l1_unstructured": lambda one: prune.l1_unstructured(one, "weight", 0.5),
            "prune.ln_structured": lambda one: prune.ln_structured(one, "weight", 0.5, 2, 0),
            "prune.random_unstructured": lambda one: prune.random_unstructured(one, "weight", 0.5),
            "prune.random_structured": lambda one: prune.random_structured(one, "weight", 0.5, 0),
        }.items()
    },
    "torch.nn.utils.prune.custom_from_mask of a table": (
        lambda whole: prune.custom_from_mask(table(whole), "weight", torch.ones(50, 8)),
        "not on the expected device meta",
    ),
    "torch.nn.utils.prune.global_unstructured": (
        lambda whole: prune.global_unstructured([(table(whole), "weight")], prune.L1Unstructured, amount=0.5),
        ROWS,
    ),
    "torch.nn.utils.parameters_to_vector": (lambda whole: nn.utils.parameters_to_vector(whole.parameters()), ROWS),
    "torch.nn.utils.clip_grad_norm_": (then(lambda whole: nn.utils.clip_grad_norm_(whole.parameters(), 1.0)), EXACT),
    "torch.nn.utils.memory_format.convert_conv2d_weight_memory_format": (
        then(lambda whole: nn.utils.convert_conv2d_weight_memory_format(whole, torch.channels_last)),
        EXACT,
    ),
    "torch.func.replace_all_batch_norm_modules_": (then(torch.func.replace_all_batch_norm_modules_), EXACT),
    # quantised
    "torch.ao.quantization.stubs.QuantWrapper": (quantization.QuantWrapper, EXACT),
    "torch.ao.quantization.quantize.prepare": (quantization.prepare, COPIED),
    "torch.ao.quantization.quantize.prepare, in place": (then(quantised_by_config), EXACT),
    "torch.ao.quantization.quantize.convert": (quantization.convert, COPIED),
    "torch.ao.quantization.quantize.quantize_dynamic": (quantization.quantize_dynamic, COPIED),
    "torch.ao.quantization.fuse_modules.fuse_modules": (
        lambda whole: quantization.fuse_modules(whole, [["module.over"]]),
        COPIED,
    ),
    "torchrec.inference.modules.quantize_inference_model": (then(inference.quantize_inference_model), EXACT),
    "torchrec.inference.modules.quantize_embeddings": (
        then(lambda whole: inference.quantize_embeddings(whole, torch.qint8, inplace=True)),
        EXACT,
    ),
    "torchrec.inference.modules.PredictModule": (lambda whole: Serves(whole, "cpu"), "does not require grad"),
    # recorded
    "torch.jit._script.script": (torch.jit.script, RECORDED),
    "torch.fx._symbolic_trace.symbolic_trace": (lambda whole: torch.fx.symbolic_trace(whole.module), RECORDED),
    "torch.fx.experimental.optimization.fuse": (
        lambda whole: importlib.import_module("torch.fx.experimental.optimization").fuse(whole),
        COPIED,
    ),
    # transformed
    "torch.func.vmap": (lambda whole: torch.func.vmap(lambda x: whole(BATCH)[0] * x)(ones), RECORDED),
    **{
        f"torch.func.{name}": (lambda whole, way=way: of_numbers(way)(whole)(ones), RECORDED)
        for name, way in {
            "grad": torch.func.grad,
            "grad_and_value": torch.func.grad_and_value,
            "jacrev": torch.func.jacrev,
            "jacfwd": torch.func.jacfwd,
            "hessian": torch.func.hessian,
            "functionalize": torch.func.functionalize,
        }.items()
    },
    "torch.func.vjp": (of_numbers(torch.func.vjp, ones), RECORDED),
    "torch.func.jvp": (of_numbers(torch.func.jvp, (ones,), (ones,)), RECORDED),
    "torch.func.linearize": (of_numbers(torch.func.linearize, ones), "value out of a tracing tensor"),
    "torch.autograd.functional.jacobian": (then(of_numbers(torch.autograd.functional.jacobian, ones)), EXACT),
    "torch.autograd.functional.vjp": (then(of_numbers(torch.autograd.functional.vjp, ones)), EXACT),
    "torch.func.functional_call": (
        lambda whole: lambda b: torch.func.functional_call(whole, {"no": ones}, (b,)),
        EXACT,
    ),
    "torch.nn.utils.stateless.functional_call": (
        lambda whole: lambda b: stateless.functional_call(whole, {}, (b,)),
        EXACT,
    ),
    "torch.func.stack_module_state": (lambda whole: torch.func.stack_module_state([whole, whole]), ROWS),
}


JUDGED = {  # regular expressions of other names, and why nothing of them needs to be tried here
    r"torch\.compile": "`test_compiled.py`",
    r"torchrec\.distributed\.train_pipeline\..*": "`test_pipelines.py`; these are what pipelines are made of",
    r"torch\.(jit\.isinstance|is_(storage|tensor)|typename|sym_ite|_utils\.classproperty|jit\._script\.interface)": (
        "ask, and take no module"
    ),
    r"torch\.utils\.(_pytree\..*|set_module|flop_counter\.shape_wrapper)": "take a function, and call it",
    r"torch\.(export|distributed)\.(load|distributed_c10d\.(all_)?gather_object)": "take no module",
    r"torch\.utils\.throughput_benchmark\.ThroughputBenchmark": "calls it, without gradients",
    r"torch\.serialization\.load": "takes no module",
    r"torch\.jit\._(serialization|freeze|async)\..*": "take what `torch.jit.script` would have made",
    r"torch\.(utils\.(bundled_inputs|mobile_optimizer)|ao\.quantization\.quantize_jit)\..*": "likewise",
    r"torch\.onnx\.(ONNXProgram|export|_internal\..*)|torch\.jit\._trace\..*": "record it: test_coverage.py",
    r"torch\.export\.(export|draft_export|save|exported_program\..*|unflatten\..*)": "likewise; placeholders refuse it",
    r"torch\.fx\.(graph|graph_module|interpreter|subgraph_rewriter|passes)\..*|torchrec\.fx\..*": (
        "run what was recorded; TorchRec's tracer is that of its pipelines, for which a sharded module is a leaf"
    ),
    r"torch\.fx\.experimental\.optimization\..*": "record it as `fuse` does, or take its parts",
    r"torch\.distributed\.pipelining\..*": "take stages that were recorded, of one tensor each",
    r"torch\.distributed\.nn\.api\.remote_module\.RemoteModule": "makes a module elsewhere, of its class",
    r"torch\.distributed\.checkpoint\.state_dict\..*": (
        "fail at the names of TorchRec's model, too (an AttributeError); `torch_ecrec.checkpoint` does this"
    ),
    r"torch\.distributed\.fsdp\.(api|wrap|register_fsdp_forward_method|share_comm_ctx).*": "parts of what is refused",
    r"torch\.distributed\.algorithms\._checkpoint\.checkpoint_wrapper\.\w+Wrapper": "what the functions make",
    r"torch\.ao\.(pruning|quantization\.(fake_quantize|observer|default_eval_fn)).*": "of modules that have observers",
    r"torch\.ao\.quantization\.(quantize\.(add_quant_dequant|prepare_qat|propagate_qconfig_|quantize|quantize_qat|"
    r"swap_module)|fuse_modules\.fuse_modules_qat)": "as `prepare`, `convert` and `fuse_modules` do, of dense layers",
    r"torch\.nn\.modules\.(container|transformer)\..*|torch\.nn\.utils\._named_member_accessor\..*": "hold modules",
    r"torch\.nn\.parallel\.parallel_apply\.parallel_apply": "calls each, in a thread",
    r"torch\.nn\.utils\.(parametrize|prune|weight_norm|spectral_norm)\.(\w*remove\w*|is_\w+|ParametrizationList|"
    r"type_before_parametrizations|transfer_parametrizations_and_params)": "of what was refused before",
    r"torch\.nn\.utils\.memory_format\.convert_conv3d_weight_memory_format": "of convolutions",
    r"torch\.utils\.mkldnn\.to_mkldnn": "makes dense layers constants, as with TorchRec: no optimizer finds them",
    r"torch\.autograd\.functional\.(hessian|hvp|jvp|vhp)": "as `jacobian` and `vjp`, twice",
    r"torchrec\.distributed\.(embedding|embeddingbag|mc_\w+|quant_embeddingbag)\.\w*Sharded\w*": "TorchRec's shardings",
    r"torchrec\.distributed\.(fused_params|quant_state|types|utils)\..*": "parts of TorchRec's shardings and plans",
    r"torchrec\.distributed\.model_parallel\.get_(unwrapped_)?module": "give the module within",
    r"torchrec\.distributed\.shard\.shard": "wants a sharder for our module, and says that there is none",
    r"torchrec\.(inference|quant|metrics|modules)\..*": "of models that are not sharded yet, and of TorchRec's tables",
}
PLACES = """
torch torch.nn torch.nn.parallel torch.nn.utils torch.nn.utils.parametrize torch.nn.utils.parametrizations
torch.nn.utils.prune torch.nn.utils.stateless torch.optim.swa_utils torch.func torch.compiler torch.export torch.jit
torch.fx torch.fx.experimental.optimization torch.ao.quantization torch.ao.pruning torch.distributed
torch.distributed.fsdp torch.distributed.fsdp.wrap torch.distributed.tensor torch.distributed.tensor.parallel
torch.distributed.algorithms torch.distributed.algorithms.model_averaging.averagers
torch.distributed.algorithms._checkpoint.checkpoint_wrapper torch.distributed._composable torch.distributed.pipelining
torch.distributed.checkpoint.state_dict torch.distributed.nn.api.remote_module torch.utils torch.utils.checkpoint
torch.utils.flop_counter torch.utils.mkldnn torch.utils.mobile_optimizer torch.utils.bundled_inputs torch.onnx
torch.autograd.functional torchrec torchrec.distributed torchrec.distributed.shard torchrec.distributed.model_parallel
torchrec.distributed.train_pipeline torchrec.distributed.utils torchrec.distributed.quant_state
torchrec.distributed.model_tracker.model_delta_tracker torchrec.distributed.model_tracker.trackers.raw_id_tracker
torchrec.inference torchrec.inference.modules torchrec.quant torchrec.quant.utils torchrec.fx torchrec.metrics
torchrec.modules.utils
"""
NAMES = {"module", "model", "mod", "root", "net", "modules", "root_module", "obj", "func", "f", "base_model"}


def takes_module(thing: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(thing.__init__ if inspect.isclass(thing) else thing).parameters.values()
        return any(one.name in NAMES or "Module" in str(one.annotation) for one in parameters)
    return False


def all_that_takes_a_module() -> set[str]:
    found = set[str]()
    for place in PLACES.split():
        module = importlib.import_module(place)
        for name, thing in vars(module).items():
            home = getattr(thing, "__module__", None) or ""
            if not name.startswith("_") and callable(thing) and home.startswith("torch") and takes_module(thing):
                found.add(f"{home}.{getattr(thing, '__qualname__', name)}")
    return found


def test_all_that_takes_a_module_is_judged() -> None:
    """In a process of its own: torch loads parts of itself, and wraps others, when something needs them."""
    code = f"import sys; sys.path[:] = {sys.path!r}; import test_wrappers as t; print(*t.all_that_takes_a_module())"
    words = [sys.executable, "-P", "-c", code]
    found = set(subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout.split())
    applied = {name.partition(" of ")[0].partition(",")[0] for name in APPLIED}
    assert len(found) > 150 and len(found & applied) > 40
    assert {name for name in found - applied if not any(re.fullmatch(one, name) for one in JUDGED)} == set()


@dataclass(frozen=True)
class Undisturbed:
    after: list[object]


@pytest.fixture(scope="module")
def undisturbed(process_group: object) -> Undisturbed:
    whole = model()
    found = Undisturbed(trained(whole, whole))
    assert len(found.after) > 12 and len(whole.session.snapshots) == 2
    return found


@pytest.mark.parametrize("name", APPLIED)
def test_what_takes_a_model_trains_it_alike_or_is_refused(name: str, undisturbed: Undisturbed) -> None:
    wrapper, verdict = APPLIED[name]
    whole = model()
    if verdict == EXACT:
        assert same(trained(wrapper(whole), whole), undisturbed.after)
        return
    with pytest.raises((RuntimeError, TypeError, AttributeError), match=verdict):
        trained(wrapper(whole), whole)
