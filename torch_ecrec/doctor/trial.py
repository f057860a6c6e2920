"""What `torch-ecrec doctor` tries in a process of its own, since it may crash it: a script (`python -P trial.py`).

    packages    loads torch, FBGEMM and TorchRec, one after the other, and looks for the rest
    kernels     loads all compiled kernels from their cache, and compiles none

It says what it is about to do, and what came of it, in lines of JSON on standard output behind a mark of ours, for what
it loads may print, too. Of what is announced and not followed by an answer, the process has died. Of modules of ours
`packages` imports none, so that it runs whatever lacks.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

MARK = "torch-ecrec-doctor "
LOADED = ("torch", "fbgemm_gpu", "torchrec")  # in this order: each needs those before it
DISTRIBUTIONS = ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec")
OPERATOR = "asynchronous_complete_cumsum"  # of FBGEMM; its package can be imported without any


def say(**what: Any) -> None:
    """Says something to the parent process."""
    print(f"\n{MARK}{json.dumps(what)}", flush=True)


def packages(others: list[str]) -> None:
    """Says which versions are installed, which of `others` are not, and what comes of loading the three."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    lacking = [name for name in (*LOADED, *others) if importlib.util.find_spec(name) is None]
    say(versions=versions, lacking=lacking)
    for name in LOADED:
        if name in lacking:
            continue
        spec = importlib.util.find_spec(name)
        say(loads=name, at=str((spec and spec.origin) or ""))
        try:
            module = importlib.import_module(name)
            if name == "fbgemm_gpu":
                getattr(importlib.import_module("torch").ops.fbgemm, OPERATOR)
        except Exception as error:  # whatever an extension raises: it is what was asked
            say(failed=name, why=f"{type(error).__name__}: {error}")
            return
        say(loaded=name, version=str(getattr(module, "__version__", "")), cuda=_cuda(name, module))


def _cuda(name: str, module: Any) -> str:
    """Returns the CUDA version of a build of torch; "" of a build for CPUs."""
    return str(getattr(getattr(module, "version", None), "cuda", None) or "") if name == "torch" else ""


def kernels() -> None:
    """Says whether the cache has all kernels, and whether its folder can be written."""
    say(loads="kernels")
    from torch_ecrec.codec import field
    from torch_ecrec.processes.launch import warm
    from torch_ecrec.runtime.kernel_cache import KernelCache

    class NotCompiled(Exception):
        pass

    read: Callable[..., Any] = KernelCache.load_overload

    def read_or_refuse(cache: KernelCache, sig: Any, target_context: Any) -> Any:
        found = read(cache, sig, target_context)
        if found is None:
            raise NotCompiled(cache.stem)
        return found

    ours = _kernels_of(field)
    if not ours:  # they are plain functions: Numba was told to compile nothing
        say(disabled=True)
        return
    folder = KernelCache(ours[0]).cache_path
    say(folder=folder, unwritable=_unwritable(folder))
    KernelCache.load_overload = read_or_refuse  # type: ignore[method-assign,assignment]
    try:
        warm()
    except NotCompiled as error:
        say(missing=str(error))
    else:
        say(compiled=True)


def _kernels_of(module: Any) -> list[Any]:
    """Returns the Python functions of the kernels that a module defines."""
    found = [one.py_func for one in vars(module).values() if hasattr(one, "py_func")]
    return [one for one in found if one.__module__ == module.__name__]


def _unwritable(folder: str) -> str:
    """Returns why nothing can be written in a folder; "": it can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".torch-ecrec-doctor-"):
            return ""
    except OSError as error:
        return error.strerror or str(error)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "packages":
        packages(rest)
    else:
        kernels()
