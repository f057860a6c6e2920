"""Checks that the packages that trainers need are installed, without loading them."""

from __future__ import annotations

import importlib.util

NEEDED = {"torchrec": "TorchRec", "fbgemm_gpu": "FBGEMM"}  # modules, and what people call them
HOW = (
    "on a CPU: pip install fbgemm-gpu-cpu==1.8.0 && pip install --no-deps torchrec==1.8.0;"
    " with a GPU: pip install fbgemm-gpu==1.8.0 torchrec==1.8.0"
)


def require_torchrec() -> None:
    """Raises ImportError, with the command that installs what is missing, unless TorchRec and FBGEMM are installed.

    `pip install torch-ecrec` alone cannot bring them: TorchRec's metadata asks for the CUDA build of FBGEMM.
    """
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; {HOW}")
