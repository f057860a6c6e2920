"""Every setting of torch, and every variable of its libraries: it comes back with a restart, its change is told, or it
decides no bits. What a new release brings fails here until somebody has judged it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fbgemm_gpu
import numpy as np
import pytest
import torch
from attached import attach, made
from torch import backends

from torch_ecrec.resume import arithmetic
from torch_ecrec.resume.arithmetic import FLUSHES, PATHS, PATHS_OF_GPU, VARIABLES, settings_of_torch
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings

GPU = "of GPUs, and of none that we know: not kept"
CONTEXT = "of the lines that it is around, which say it again in each life"
WORDS = "decides what is said, and no number"
OTHER = "another word for what is kept"
KEPT = "kept"

PUBLIC = {  # functions of torch that set something for all that follows
    **dict.fromkeys(("set_autocast_cpu_dtype", "set_autocast_cpu_enabled", "set_autocast_dtype"), KEPT),
    **dict.fromkeys(("set_autocast_enabled", "set_autocast_gpu_dtype", "set_default_dtype"), KEPT),
    **dict.fromkeys(("set_default_tensor_type", "set_deterministic_debug_mode", "set_float32_matmul_precision"), KEPT),
    **dict.fromkeys(("set_flush_denormal", "set_num_threads", "use_deterministic_algorithms"), KEPT),
    **dict.fromkeys(
        ("set_autocast_ipu_dtype", "set_autocast_ipu_enabled", "set_autocast_xla_dtype", "set_autocast_xla_enabled"),
        GPU,
    ),
    "set_anomaly_enabled": WORDS,
    "set_autocast_cache_enabled": "casts are made again, to the same numbers",
    "set_default_device": "where tensors are made; a restarted script makes its model again, and says it there",
    "set_grad_enabled": CONTEXT,
    "set_num_interop_threads": "work of one operator is never shared by these",
    "set_printoptions": WORDS,
    "set_rng_state": "random states are kept (`random_states.py`)",
    "set_warn_always": WORDS,
}
BACKENDS = {  # what can be set below `torch.backends`, as `settable` lists it
    **dict.fromkeys((*PATHS, *PATHS_OF_GPU), KEPT),
    **dict.fromkeys(("cuda.allow_fp16_bf16_reduction_math_sdp()", "cuda.enable_flash_sdp()"), KEPT),
    **dict.fromkeys(("cuda.enable_math_sdp()", "cuda.enable_mem_efficient_sdp()", "mha.set_fastpath_enabled()"), KEPT),
    "nnpack.set_flags()": KEPT,
    **dict.fromkeys(("cuda.matmul.allow_tf32", "cudnn.allow_tf32", "mkldnn.allow_tf32"), OTHER),
    **dict.fromkeys(("cudnn.set_flags()", "mkldnn.set_flags()", "opt_einsum.set_flags()", "set_flags()"), OTHER),
    "opt_einsum.enabled": "of a package that is not here; kept where it is",
    "opt_einsum.strategy": "of a package that is not here; kept where it is",
    **dict.fromkeys(
        ("cuda.enable_cudnn_sdp()", "cuda.preferred_blas_library()", "cuda.preferred_linalg_library()"), GPU
    ),
    **dict.fromkeys(("cuda.preferred_rocm_fa_library()", "cudnn.depthwise_kernel", "miopen.immediate"), GPU),
    "miopen.set_flags()": GPU,
    "quantized.supported_engines": "nobody sets it",
    "disable_global_flags()": "forbids to set flags",
    "python_native.disable_operations()": GPU,
    "python_native.disable_dispatch_keys()": GPU,
    "python_native.enable_operations()": GPU,
    "python_native.enable_dispatch_keys()": GPU,
}
DSLS = {"cutedsl", "helion", "triton"}  # that kernels of GPUs are written in
GLOBAL = {  # private pairs `_get_NAME`, `_set_NAME` of torch._C: of at::globalContext, most of them
    **dict.fromkeys(("deterministic_algorithms", "float32_matmul_precision", "mkldnn_deterministic"), KEPT),
    **dict.fromkeys(("math_sdp_allow_fp16_bf16_reduction", "mkldnn_enabled", "nnpack_enabled", "qengine"), KEPT),
    **dict.fromkeys(("cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_accumulation"), KEPT),
    **dict.fromkeys(("cublas_allow_fp16_reduced_precision_reduction", "cudnn_benchmark", "cudnn_deterministic"), KEPT),
    "cudnn_enabled": KEPT,
    **dict.fromkeys(("cublas_allow_tf32", "cudnn_allow_tf32", "onednn_allow_tf32"), OTHER),
    **dict.fromkeys(("blas_preferred_backend", "cudnn_depthwise_kernel", "linalg_preferred_backend"), GPU),
    **dict.fromkeys(("miopen_immediate", "rocm_fa_preferred_backend", "sm_carveout_experimental"), GPU),
    "cublaslt_prefer_grouped_gemm": GPU,
    "cpu_allow_fp16_reduced_precision_reduction": "no public name sets it",
    "sdp_priority_order": "within `sdpa_kernel(...)`: " + CONTEXT,
    "deterministic_fill_uninitialized_memory": "memory that nothing has written to has no bits to bring back",
    **dict.fromkeys(("autograd_fallback_mode", "backcompat_broadcast_warn", "backcompat_keepdim_warn"), WORDS),
    "warnAlways": WORDS,
    "thread_name": WORDS,
    "dtensor_allow_implicit_replication": "else an error",
    **dict.fromkeys(("dispatch_mode", "torch_function_state", "tracing_state", "value_trace"), CONTEXT),
    **dict.fromkeys(
        ("graph_exec_group", "graph_executor_optimize"), "of `torch.jit`, which has no table to look up in"
    ),
    "tensor_metadata": "of a tensor",
}
LIBRARIES = {  # of variables that no number depends on, beside those whose change is told
    r"(OMP|MKL)_NUM_THREADS|OPENBLAS_DEFAULT_NUM_THREADS": "torch's number of threads is brought back",
    r"(DNNL|ONEDNN|FBGEMM)_": "the beginning of others, all of which are told",
    r"DNNL_GRAPH_COMPILED_PARTITION_CACHE_CAPACITY|ONEDNN_CACHE_CONTEXT_UNSAFE": "what is kept, and not made again",
    r"(MKL_DOMAIN_(ALL|BLAS|FFT|PARDISO|VML))|MKL_(GET_MAX|SET)_.*": "words within, no variables",
    r"MKL_(SPARSE_.*|[DS]OMAT.*|PROGRESS_?|DFTI_CHECK)|TORCH_LIBRARY.*": "names of functions",
    r".*(VERBOSE|DEBUG|STATS|LOG|DISPLAY|SHOW|SYMBOLIZE|ADDR2LINE|STACK|TRACE|STDERR).*|TORCH_CUSTOM_TERMINATE": WORDS,
    r"KMP_FOR_T.*|PYTORCH_TEST|TORCH_CHECK_TENSOR_SUBTYPE|TORCH_PROFILER_.*|OMP_AFFINITY_FORMAT|MKL_VML_.*": WORDS,
    r"PYTORCH_JIT_(ENABLE_LARGE_SOURCE_LOCATION|TYPE_VERBOSITY)|PYTORCH_TENSOREXPR_RANDOM_TRANSFORM_SEED": WORDS,
    r"GOMP_(CPU_AFFINITY|SPINCOUNT|OPENACC_DIM)|OMP_(PLACES|PROC_BIND|WAIT_POLICY|DEFAULT_DEVICE|MAX_TASK_PRIORITY)": (
        "where threads run and how they wait"
    ),
    r"OMP_(ADAPTIVE|CANCELLATION|SCHEDULE|NESTED|MAX_ACTIVE_LEVELS)|OPENBLAS_(BLOCK_FACTOR|THREAD_TIMEOUT)": (
        "nothing in torch asks for it"
    ),
    r"MKL_(FAST_MEMORY_LIMIT|MPI_PPN)|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF": "where memory comes from",
    r"TORCH_(NCCL|FR|GLOO|INCLUDE|DISABLE_DEADLOCK|AUTOGRAD_SHUTDOWN)_.*": "how long to wait",
    r".*(MIOPEN|HIPBLASLT|HIPSOLVER|ROCM).*|TORCH_DISABLE_FUNCTIONALIZATION_META_REFERENCE|FBGEMM_TBE_SVE_.*": (
        "of other processors than are supported, or of a compiler's tests"
    ),
}


OWN = {  # our settings: what follows if two processes, or two lives, have others
    **dict.fromkeys(("wire", "evaluation_wire"), "REFUSED after a restart; each trainer's own meanwhile"),
    "pooling": "REFUSED after a restart, if one sums in parts; else no matter",
    "transport": "told to all by the coordinator",
    **dict.fromkeys(("experiment_mode", "experiment_ranges"), "refused where a process joins (`admission.py`)"),
    **dict.fromkeys(("join", "launch", "again"), "say which cluster is meant, which has its own bits"),
    **dict.fromkeys(("window_steps", "call_timeout_s", "give_up_s", "heartbeat_s", "lease_s"), "when, not what"),
    **dict.fromkeys(("standstill_s", "grace_s"), "when, not what; the coordinator's counts"),
    "failure_domain": "where slots are",
    **dict.fromkeys(("shared_memory_bytes", "keep_freed_bytes", "spare_memory"), "where bytes are"),
    **dict.fromkeys(
        ("checkpoint_memory_bytes", "tier", "tier_memory_bytes", "tier_for", "tier_keep"), "where bytes are"
    ),
    **dict.fromkeys(("rebuild_chunk_bytes", "rebuild_bytes_per_s", "move_bytes_per_s"), "how fast"),
    **dict.fromkeys(("record_checks", "scrub_bytes_per_s"), "what is looked at"),
    "look_ahead": "when batches are drawn; a reader that shows another order is refused",
    **dict.fromkeys(("flip_on_signal", "spoil", "spoil_step"), "damage on purpose, of one server, which is found"),
}


def test_every_setting_of_ours_is_judged() -> None:
    assert {field.name for field in dataclasses.fields(Settings)} == OWN.keys()
    refused = {f"TORCH_ECREC_{name.upper()}" for name, verdict in OWN.items() if verdict.startswith("REFUSED")}
    assert arithmetic.of_settings(Settings(), CodeSpec()).keys() == refused


def test_every_function_of_torch_that_sets_something_is_judged() -> None:
    found = {name for name in dir(torch) if name.startswith(("set_", "use_"))}
    assert found - PUBLIC.keys() == set()


def settable() -> set[str]:
    """All that a script can set below `torch.backends`."""
    found: set[str] = set()
    seen: set[int] = set()

    def look(path: str, owner: Any) -> None:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        for name in sorted({*dir(type(owner)), *dir(owner)} - {"m"}):
            kind = vars(type(owner)).get(name)
            if name.startswith("_") or (kind is not None and isinstance(kind, types.FunctionType)):
                continue
            if hasattr(kind, "__set__") and not (isinstance(kind, property) and kind.fset is None):
                found.add(f"{path}{name}")
            with contextlib.suppress(RuntimeError, AttributeError):
                value = getattr(owner, name)
                of_backends = (getattr(value, "__module__", None) or "").startswith("torch.backends")
                if isinstance(value, types.ModuleType) and value.__name__.startswith("torch.backends"):
                    look(f"{path}{name}.", value)
                    if isinstance(getattr(value, "m", None), types.ModuleType):  # its functions
                        look(f"{path}{name}.", value.m)
                elif isinstance(value, types.FunctionType) and of_backends:
                    if name.startswith(("set_", "enable_", "allow_", "preferred_", "disable_")):
                        found.add(f"{path}{name}()")
                elif of_backends and not isinstance(value, (type, types.FunctionType)):
                    look(f"{path}{name}.", value)

    look("", backends)
    look("cuda.matmul.", backends.cuda.matmul)
    return found


def test_every_setting_of_a_backend_is_judged() -> None:
    judged = {name for name in settable() if name not in BACKENDS and not {*name.split(".")} & DSLS}
    assert judged == set()


def test_every_setting_of_the_global_context_is_judged() -> None:
    private = {name[5:] for name in dir(torch._C) if name.startswith("_get_") and f"_set_{name[5:]}" in dir(torch._C)}
    assert private - GLOBAL.keys() == set()


@pytest.mark.slow
def test_every_variable_that_torchs_libraries_know_is_judged() -> None:
    places = [Path(str(package.__file__)).parent for package in (torch, fbgemm_gpu, np)]
    files = [*places[0].glob("lib/*.so*"), *places[1].glob("*.so*"), *places[2].parent.glob("numpy.libs/*")]
    begins = ["MKL", "ONEDNN", "DNNL", "OMP", "GOMP", "KMP", "ATEN", "TORCH", "FBGEMM", "PYTORCH", "OPENBLAS"]
    begins += ["CUBLAS", "NVIDIA", "NNPACK", "XNNPACK"]
    found = set[str]()
    for file in files:
        data = file.read_bytes()
        for begin in begins:
            for at in occurrences(data, f"{begin}_".encode()):
                word = re.compile(rb"[A-Z0-9_]+(?=\0)").match(data, at)
                if data[at - 1] == 0 and word is not None:
                    found.add(word.group().decode())
    assert len(found & {*VARIABLES}) > 15
    left = {name for name in found - {*VARIABLES} if not any(re.fullmatch(one, name) for one in LIBRARIES)}
    assert left == set()


def occurrences(data: bytes, word: bytes) -> Iterator[int]:
    at = data.find(word)
    while at >= 0:
        yield at
        at = data.find(word, at + len(word))


ENGINE = backends.quantized.engine
OTHERWISE: dict[str, Any] = {
    "threads": 3,
    "default dtype": "float64",
    "precision of matrix products": "medium",
    "quantized.engine": next((e for e in backends.quantized.supported_engines if e not in ("none", ENGINE)), ENGINE),
    "opt_einsum.strategy": "greedy",
    **{f"autocast of {device}, dtype": dtype for device, dtype in (("cpu", "float16"), ("cuda", "bfloat16"))},
}


@pytest.mark.parametrize("name", list(settings_of_torch()))
def test_each_setting_comes_back(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(1)  # a flag for denormal numbers is each thread's own
    read, set_ = settings_of_torch()[name]
    before = arithmetic.of_torch()
    other = OTHERWISE.get(name, "bf16" if "precision" in name else not before[name])
    try:
        set_(other)
        assert read() == other
        kept = arithmetic.of_torch()
        arithmetic.set_of_torch(before)
        assert arithmetic.of_torch() == before
        assert f"{name}: {before[name]}, not {other}" in caplog.text
        assert arithmetic.set_of_torch(kept) == [] and arithmetic.of_torch() == kept
        assert arithmetic.set_of_torch({}) == [] and read() == other, "an earlier build has not kept it"
    finally:
        arithmetic.set_of_torch(before)


def test_a_flag_that_threads_have_already_cannot_be_brought_back() -> None:
    threads, before = torch.get_num_threads(), arithmetic.of_torch()
    try:
        torch.set_num_threads(2)
        kept = {**before, "threads": 2, FLUSHES: True}
        assert arithmetic.set_of_torch(kept) == [f"{FLUSHES}: True, not False"]
    finally:
        arithmetic.set_of_torch(before)
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("process_group")
def test_a_model_whose_devices_have_precisions_of_their_own_trains_and_goes_on() -> None:
    """torch's one word for all of them raises then, and so did the first snapshot."""
    before = arithmetic.of_torch()
    try:
        backends.mkldnn.matmul.fp32_precision = "bf16"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        first = attach(made())
        first.steps(4)
        backends.mkldnn.matmul.fp32_precision = "ieee"
        second = attach(made(first.session, 2, seed=2))
        second.steps(4)
        assert second.losses == first.losses and backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        arithmetic.set_of_torch(before)


@pytest.mark.parametrize("name", [*VARIABLES, *arithmetic.of_process()])
def test_what_differs_of_a_process_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = arithmetic.of_process()
    now = before | {name: "another"}
    if name in VARIABLES:
        monkeypatch.setenv(name, "another")
        now = arithmetic.of_process()
    was = before.get(name, "not set")
    assert [*arithmetic.differences(before, now)] == [f"{name}: {was}, not another"]
    assert [*arithmetic.differences(now, before)] == [f"{name}: another, not {was}"]


@pytest.mark.usefixtures("process_group")
def test_another_process_than_before_a_restart_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers that came back on another processor, or with another torch, went on otherwise, without a word."""
    first = attach(made())
    first.steps(3)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    second = attach(made(first.session, 2, seed=2))
    assert second.session.inexact == [
        "torch may compute other bits than before the restart: MKL_CBWR: not set, not COMPATIBLE"
    ]
