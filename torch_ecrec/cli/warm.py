"""`torch-ecrec warm`: compiles what Numba compiles into its cache."""

from __future__ import annotations

import argparse

HELP = "compile the kernels now, so that the first run does not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`warm` has none."""


def run(arguments: argparse.Namespace) -> int:
    """Compiles all kernels, or finds them in the cache."""
    from torch_ecrec.processes import launch

    launch.warm()
    return 0
