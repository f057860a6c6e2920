"""Checks that the packages that trainers need are installed, and were tested together, without loading them.

FBGEMM's extension loads under one release of torch each. So a *set* is what belongs together; two are tested (`SETS`,
which requirements/ has as files).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from dataclasses import dataclass

NEEDED = {"torchrec": "TorchRec", "fbgemm_gpu": "FBGEMM"}  # modules, and what people call them
BUILDS = ("fbgemm-gpu-cpu", "fbgemm-gpu")  # of FBGEMM: for CPUs, and for CUDA


@dataclass(frozen=True)
class Set:
    """Releases of torch, FBGEMM and TorchRec that are tested together."""

    torch: str
    fbgemm: str
    torchrec: str

    def __str__(self) -> str:
        return f"torch {self.torch} with FBGEMM {self.fbgemm} and TorchRec {self.torchrec}"

    def pip(self, gpu: bool) -> str:
        """Returns the commands that bring it. TorchRec's metadata asks for the CUDA build of FBGEMM, so on a CPU it
        goes in last, without what it asks for."""
        pip = "python -m pip install"
        if gpu:
            return f"{pip} torch=={self.torch} fbgemm-gpu=={self.fbgemm} torchrec=={self.torchrec}"
        return f"{pip} torch=={self.torch} fbgemm-gpu-cpu=={self.fbgemm} && {pip} --no-deps torchrec=={self.torchrec}"


SETS = (Set("2.13.0", "1.8.0", "1.8.0"), Set("2.14.1", "1.9.0", "1.9.2"))
TESTED = "; or ".join(map(str, SETS))


def release(version: str) -> str:
    """Returns a version without what says which build it is: 2.13.0 of 2.13.0+cpu."""
    return version.partition("+")[0]


def set_of_torch(torch: str) -> Set | None:
    """Returns the tested set of a release of torch, or of one like it; None: none is."""
    same = [one for one in SETS if one.torch == release(torch)]
    alike = [one for one in SETS if one.torch.rpartition(".")[0] == release(torch).rpartition(".")[0]]
    return next(iter(same + alike), None)


def require_torchrec() -> None:
    """Raises ImportError, with the command that installs what is missing, unless TorchRec and FBGEMM are installed.

    `pip install torch-ecrec` alone cannot bring them: TorchRec's metadata asks for the CUDA build of FBGEMM. Releases
    that were not tested together get a warning.
    """
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        wanted = set_of_torch(_version("torch")) or SETS[0]
        how = f"on a CPU: {wanted.pip(False)}; with a GPU: {wanted.pip(True)}"
        raise ImportError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; {how}")
    fbgemm = next((found for name in BUILDS if (found := _version(name))), "")
    here = Set(*map(release, (_version("torch"), fbgemm, _version("torchrec"))))
    if all((here.torch, here.fbgemm, here.torchrec)) and here not in SETS:
        warnings.warn(f"{here}, as installed, were not tested together; tested are {TESTED}", stacklevel=2)


def _version(distribution: str) -> str:
    """Returns the version that is installed, "" where none is, or nobody says."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
