"""What belongs to the whole process, and a test must leave as it found it: others run after it, in any order."""

import gc
import logging
import os
import signal
import sys
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2)
OF_LIBRARIES = ("threads", "__slotnames__", "TORCHINDUCTOR_CACHE_DIR")
"""What libraries change for good when first used: OpenMP's, loaded by another one; `copyreg`'s; torch's compiler."""


def state() -> dict[str, Any]:
    """Returns all of it by name. What an imported module has, as torch's settings, is there once that is imported."""
    ours = logging.getLogger("torch_ecrec")
    found: dict[str, Any] = {which.name: signal.getsignal(which) for which in SIGNALS}
    found["logger"] = (ours.level, ours.disabled, ours.propagate, ours.handlers[:], ours.filters[:])
    found["os.environ"] = _environment()
    found |= {"working folder": os.getcwd(), "sys.path": sys.path[:], "sys.argv": sys.argv[:]}
    found |= {"garbage collector": gc.isenabled(), "profiler": sys.getprofile()}
    if "torch" in sys.modules:
        import torch
        import torch.distributed as dist

        from torch_ecrec.resume import arithmetic

        found |= arithmetic.of_torch()
        found |= {"gradients": torch.is_grad_enabled(), "process group": dist.is_initialized()}
        found["torch.Tensor"] = {name: id(value) for name, value in vars(torch.Tensor).items()}
    return found


def put_back(before: dict[str, Any]) -> None:
    """Restores the environment and our logger, which suites of libraries, and what is for a process of its own, set."""
    for name in _environment().keys() - before["os.environ"].keys():
        del os.environ[name]
    os.environ.update(before["os.environ"])
    ours = logging.getLogger("torch_ecrec")
    level, ours.disabled, ours.propagate, ours.handlers[:], ours.filters[:] = before["logger"]
    ours.setLevel(level)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns what is not as it was, a line each; of mappings, their entries. What is only in one has been imported."""
    found = []
    for name in sorted(before.keys() & after.keys() - set(OF_LIBRARIES)):
        was, now = before[name], after[name]
        if isinstance(was, dict):
            changed = {one for one in was.keys() | now.keys() if was.get(one) != now.get(one)} - set(OF_LIBRARIES)
            found += [f"{name}, {one}: {was.get(one)} -> {now.get(one)}" for one in sorted(changed)]
        elif was != now:
            found.append(f"{name}: {was} -> {now}")
    return found


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
