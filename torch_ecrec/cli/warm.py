"""`torch-ecrec warm`: compiles all Numba kernels into the cache."""

from __future__ import annotations

import argparse

HELP = "compile the kernels now, so that the first run does not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: `warm` has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Compiles all kernels, unless the cache has them."""
    from torch_ecrec.processes import launch

    launch.warm(tells=True)
    return 0
