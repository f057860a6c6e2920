"""What decides the bits of a step beside its numbers: settings of torch, the process, and ours of what travels.

    of_torch()     is kept with each snapshot, and brought back where the first step begins
    of_process()   likewise kept; nothing changes it in a process, so that it differs is told
    of_settings()  likewise kept; a process has them for its life, so others are refused (other slots are told)

A job that is started again with another OMP_NUM_THREADS would add up in another order, and say nothing of it. What is
in none of these decides no bits: `tests/unit/test_arithmetic.py` has the verdict for each setting that torch has.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import backends

from torch_ecrec.compat.torch import nnpack_enabled
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings, environment_of

SLOTS = "slots"
VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "FBGEMM_ENABLE_AVX512_256", "FBGEMM_ENABLE_INSTRUCTIONS"),
    *("FBGEMM_FORCE_AUTOVEC", "FBGEMM_NO_ASMJIT", "FBGEMM_NO_AUTOVEC", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE"),
    *("MKL_DISABLE_FAST_MM", "MKL_DOMAIN_NUM_THREADS", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_STRIPES"),
    *(
        f"{one}_{name}"
        for one in ("DNNL", "ONEDNN")
        for name in ("CPU_ISA_HINTS", "DEFAULT_FPMATH_MODE", "MAX_CPU_ISA")
    ),
    *("NVIDIA_TF32_OVERRIDE", "OMP_DYNAMIC", "OMP_THREAD_LIMIT", "PYTORCH_JIT", "PYTORCH_JIT_OPT_LIMIT"),
    *("PYTORCH_TENSOREXPR", "PYTORCH_TENSOREXPR_DONT_FUSE", "PYTORCH_TENSOREXPR_FALLBACK", "TORCHDYNAMO_DISABLE"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_COMPILE_DISABLE"),
    *("TORCH_CUDNN_USE_HEURISTIC_MODE_B", "TORCH_CUDNN_V8_API_DISABLED", "TORCH_JIT_DISABLE_NEW_EXECUTOR"),
    *("TORCH_LINALG_PREFER_CUSOLVER", "TORCH_LINEAR_FLATTEN_3D", "TORCH_MKLDNN_MATMUL_MIN_DIM"),
    *("TORCH_MKLDNN_MATMUL_MIN_SIZE", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "OPENBLAS_CORETYPE"),
    *("OPENBLAS_L2_SIZE", "OPENBLAS_NUM_THREADS"),
)
"""Variables of the environment by which torch and its libraries choose how they compute, mostly once in a process.
OMP_NUM_THREADS and MKL_NUM_THREADS are torch's number of threads, which is brought back."""
PACKAGES = ("torch", "torchrec", "numpy")
FLUSHES = "flushing of denormal numbers"
_DENORMAL, _ONE = sys.float_info.min / 2, 1.0
log = logging.getLogger(__name__)


Reads: TypeAlias = Callable[[], Any]
Sets: TypeAlias = Callable[[Any], object]


def _matmul_precision() -> str | None:
    """Returns torch's one word for all devices; None: a script has set devices apart, and torch raises."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(word: str | None) -> None:
    if word is not None:
        torch.set_float32_matmul_precision(word)


def _set_deterministic(enabled: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _set_warn_only(warn_only: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=warn_only)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _at(path: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Returns how to read and set an attribute somewhere below `torch.backends`."""
    *way, name = path.split(".")
    owner = functools.reduce(getattr, way, backends)
    return functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)


_GENERAL: dict[str, tuple[Reads, Sets]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "default dtype": (
        lambda: _name_of(torch.get_default_dtype()),
        lambda name: torch.set_default_dtype(getattr(torch, name)),
    ),
    # before the precisions of each device, which it sets, too
    "precision of matrix products": (_matmul_precision, _set_matmul_precision),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, _set_deterministic),
    "deterministic algorithms, warnings only": (torch.is_deterministic_algorithms_warn_only_enabled, _set_warn_only),
    FLUSHES: (lambda: _DENORMAL * _ONE == 0, torch.set_flush_denormal),  # torch has no word for it
    "nnpack": (nnpack_enabled, lambda enabled: backends.nnpack.set_flags(enabled)),
    "fast path of attention": (backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled),
    "flash attention": (backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),  # these are CPUs', too
    "attention in less memory": (backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
    "plain attention": (backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
    "plain attention, reductions of 16 bits": (
        backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
}


def _autocast_of(device: str) -> dict[str, tuple[Reads, Sets]]:
    return {
        f"autocast of {device}": (
            lambda: torch.is_autocast_enabled(device),
            lambda enabled: torch.set_autocast_enabled(device, enabled),
        ),
        f"autocast of {device}, dtype": (
            lambda: _name_of(torch.get_autocast_dtype(device)),
            lambda name: torch.set_autocast_dtype(device, getattr(torch, name)),
        ),
    }


PATHS = ("fp32_precision", "quantized.engine", "mkldnn.enabled", "mkldnn.deterministic") + tuple(
    f"mkldnn.{op}fp32_precision" for op in ("", "matmul.", "conv.", "rnn.")
)
PATHS_OF_GPU = (
    *("cudnn.enabled", "cudnn.deterministic", "cudnn.benchmark", "cudnn.benchmark_limit"),
    *(f"cudnn.{op}fp32_precision" for op in ("", "conv.", "rnn.")),
    *(f"cuda.matmul.allow_{what}" for what in ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction")),
    *("cuda.matmul.allow_fp16_accumulation", "cuda.matmul.fp32_precision"),
)
if backends.opt_einsum.is_available():
    PATHS += ("opt_einsum.enabled", "opt_einsum.strategy")
_ON_CPU = _GENERAL | _autocast_of("cpu") | {path: _at(path) for path in PATHS}
_ON_GPU = _autocast_of("cuda") | {path: _at(path) for path in PATHS_OF_GPU}


def settings_of_torch() -> Mapping[str, tuple[Reads, Sets]]:
    """Returns by name how to read and to set each setting of torch that is kept. Those of GPUs: once one is used."""
    return _ON_CPU | _ON_GPU if torch.cuda.is_available() and torch.cuda.is_initialized() else _ON_CPU


def of_torch() -> dict[str, Any]:
    """Returns the settings of torch on which sums and roundings depend, by name. It is called for every snapshot."""
    return {name: read() for name, (read, _) in settings_of_torch().items()}


def set_of_torch(kept: Mapping[str, Any]) -> list[str]:
    """Restores what `of_torch` returned, and logs what has been otherwise.

    Returns:
        What could not be brought back, each with both values.
    """
    settings, now = settings_of_torch(), of_torch()
    others = {n: f"{n}: {kept[n]}, not {now[n]}" for n in now if n in kept and kept[n] != now[n]}
    if not others:  # an earlier build has kept fewer
        return []
    log.warning(
        "settings of torch are those of before the restart again, as other bits would follow: %s", [*others.values()]
    )
    inexact = []
    for name, (read, set_) in settings.items():
        if name in kept and read() != kept[name]:  # some set others, too
            try:
                set_(kept[name])
            except RuntimeError as error:
                inexact.append(f"{others.get(name, name)} ({error})")
    if FLUSHES in others and torch.get_num_threads() > 1:  # those that run already have a flag each
        inexact.append(others[FLUSHES])
    return inexact


def of_process() -> dict[str, str]:
    """Returns by name what decides how torch computes in this process, and nothing in it can change."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    found |= {"python": platform.python_version().rpartition(".")[0]}  # from 3.12 on, `sum` of floats is another
    found |= {"processor": _processor(), "vectors of torch": backends.cpu.get_cpu_capability()}
    return found | environment_of(VARIABLES)


def _processor() -> str:
    """Returns the kind of processor, as libraries see it that choose by it: those of one kind compute alike."""
    found: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            found[key.strip()] = value.strip()
    except OSError:
        pass
    named = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    flags = found.get("flags", found.get("Features", "")).split()
    vectors = sorted(
        one for one in flags if one.startswith(("amx", "avx", "fma", "sse", "asimd", "sve", "bf16", "i8mm"))
    )
    return " ".join([platform.machine(), *(found[name] for name in named if name in found), *vectors])


def differences(kept: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yields what of `of_process` is otherwise than it was, with both values."""
    for name in sorted(kept.keys() | now.keys()):
        if kept.get(name) != now.get(name):
            yield f"{name}: {kept.get(name, 'not set')}, not {now.get(name, 'not set')}"


def of_settings(settings: Settings, code: CodeSpec) -> dict[str, str]:
    """Returns those of our settings on which bits depend, by their variables, and the slots where they decide some.

    Sums of whole bags have the same bits, whoever makes them.
    """
    in_parts = settings.pooling == "parts" and settings.wire == "float32"  # of rows that are rounded slots sum none
    found = {
        "TORCH_ECREC_WIRE": settings.wire,
        "TORCH_ECREC_EVALUATION_WIRE": settings.evaluation_wire,
        "TORCH_ECREC_POOLING": "parts" if in_parts else "whole",
    }
    return found | ({SLOTS: code.words} if in_parts else {})


def check_settings(kept: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Checks that settings are those of before a restart.

    Returns:
        What is not exact from here on: the job goes on in another cluster, on purpose; "": all is.

    Raises:
        ValueError: a setting is another one; all are named.
    """
    others = [name for name in now if name != SLOTS and kept[name] != now[name]]
    if others:
        raise ValueError(
            f"training went on with {', '.join(f'{name}={kept[name]}' for name in others)}, and this trainer has"
            f" {', '.join(now[name] for name in others)}, with which other bits would follow: start all trainers with"
            " what they had"
        )
    if kept.get(SLOTS) == now.get(SLOTS):
        return ""
    return f"{now[SLOTS]} sum bags in parts, and round otherwise than the {kept[SLOTS]} of before"
